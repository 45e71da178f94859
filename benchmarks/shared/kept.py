"""Where results are kept: a JSON file with every number, and the same for people beside it."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from provenance import RESULTS, command, commit, hardware, version


def facts(title: str, model: str) -> dict[str, Any]:
    """What every result says of itself."""
    return {
        "title": title,
        "date": datetime.date.today().isoformat(),
        "model": model,
        "command": command(),
        "commit": commit(),
        "hardware": hardware(),
        "torch": version("torch"),
        "busy before it began": f"{os.getloadavg()[0]:.1f} of {os.cpu_count()} cores (load average)",
    }


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows with the same keys as a table of Markdown."""
    if not rows:
        return []
    heads = list(rows[0])
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return lines + [f"| {' | '.join(str(row[head]) for head in heads)} |" for row in rows]


def show(found: Mapping[str, Any], body: Sequence[str]) -> str:
    """The text for people: the title, the facts, then what a benchmark has to say."""
    plain = {n: v for n, v in found.items() if n != "title" and isinstance(v, str | int | float)}
    lines = [f"- {name}: {value}" for name, value in plain.items()]
    return "\n".join([f"# {found['title']}", "", *lines, "", *body]) + "\n"


def keep(name: str, found: Mapping[str, Any], text: str) -> Path:
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    path.with_suffix(".md").write_text(text)
    return path
