"""Where a result came from: the command, the commit, the machine, the versions; and where it goes."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# A new run takes the place of the one before it: git keeps that.
RESULTS = ROOT / "benchmarks" / "results"


def command() -> str:
    """What was typed to start this, from the root of the checkout."""
    script = Path(sys.argv[0]).resolve()
    inside = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name
    return shlex.join(["python", str(inside), *sys.argv[1:]])


def commit() -> str:
    """The commit of this checkout, and whether its sources were changed since."""
    changed = git("status", "--porcelain", "--", "src", "benchmarks/*.py")
    return git("rev-parse", "HEAD") + (" with uncommitted changes" if changed else "")


def preamble(title: str, model: str, **known: object) -> list[str]:
    """The first lines of a result: what was measured, where and how; `known` stands in place of what this
    process says of itself."""
    facts = {
        "date": datetime.date.today().isoformat(),
        "model": model,
        "hardware": hardware(),
        "commit": commit(),
        "command": command(),
    }
    return [f"# {title}", "", *(f"- {name}: {value}" for name, value in (facts | known).items()), ""]


def git(*arguments: str) -> str:
    """What git answers about this checkout, or "unknown" outside of one."""
    answer = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else "unknown"


def version(package: str) -> str:
    """The installed version, or that there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def hardware() -> str:
    """Processor, cores and memory in one line."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    return f"{name}, {os.cpu_count()} cores, {memory:.0f} GiB"
