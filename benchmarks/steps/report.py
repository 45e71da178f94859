"""Renders a finished comparison: tables on the terminal, the same in Markdown, all raw numbers in JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from bars import Verdict, ratio_to
from results import BOUND, LOSS_TOLERANCE, REFERENCE, Paired, Row, Run, Spread
from rich.console import Console
from rich.table import Table

MIB = 1 << 20
NOISY_SHARE = 0.95
COLUMNS = (
    "system",
    "step ms",
    "min-max",
    f"x {BOUND}",
    f"x {REFERENCE}",
    "start-up s",
    "peak RSS MiB",
    "PSS MiB",
    "loss gap",
)


@dataclass(frozen=True)
class Comparison:
    """All that one call of `compare.py` found. `facts` names model, hardware, commit, command, versions."""

    facts: dict[str, object]
    rows: list[Row]
    runs: list[Run]
    verdicts: list[Verdict]
    control: float | None

    @property
    def paired(self) -> Paired:
        """Of systems that took turns; else nothing."""
        return Paired(self.runs)

    def failed(self) -> list[str]:
        """The systems whose row must not be used."""
        return [row.system for row in self.rows if row.status in ("FAILED", "INVALID")]

    def remarks(self) -> list[str]:
        """What a reader must know before believing the numbers."""
        said = [f"{row.system}: {row.status}, {row.note}" for row in self.rows if row.status != "ok"]
        unchecked = [row.system for row in self.rows if row.note and row.status == "ok"]
        if unchecked:
            said.append(
                f"losses unchecked, since {REFERENCE} has none to compare with: {', '.join(unchecked)}"
            )
        bound = next((row for row in self.rows if row.system == BOUND and row.step_ms), None)
        if bound is not None and bound.cpu_share < NOISY_SHARE:
            said.append(
                f"noisy machine: a rank of {BOUND} got {bound.cpu_share:.0%} of a core while it was timed; "
                "repeat this with nothing else running"
            )
        if self.control is not None and self.control <= LOSS_TOLERANCE:
            said.append(
                f"the check on losses is blind here: ranks that never communicate are {self.control:.1e} off"
            )
        return said


def _spread(spread: Spread | None, digits: int) -> tuple[str, str]:
    if spread is None:
        return "-", "-"
    return f"{spread.median:.{digits}f}", f"{spread.low:.{digits}f}-{spread.high:.{digits}f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _beside(comparison: Comparison, row: Row, reference: str) -> str:
    paired = comparison.paired
    ratio = ratio_to(comparison.rows, row.system, reference, paired=paired)
    return str(paired.ratio(row.system, reference)) if paired and ratio is not None else _ratio(ratio)


def _cells(comparison: Comparison, row: Row) -> tuple[str, ...]:
    name = row.system if row.status == "ok" else f"{row.system} ({row.status})"
    return (
        name,
        *_spread(row.step_ms, 1),
        _beside(comparison, row, BOUND),
        _beside(comparison, row, REFERENCE),
        _spread(row.startup_s, 1)[0],
        f"{row.peak_rss / MIB:.0f}" if row.peak_rss else "-",
        f"{row.pss / MIB:.0f}" if row.pss else "-",
        "-" if row.loss_gap is None else f"{row.loss_gap:.1e}",
    )


def _verdict_cells(verdict: Verdict) -> tuple[str, ...]:
    kind = "goal" if verdict.bar.goal else "bar"
    return kind, str(verdict.bar), _ratio(verdict.ratio), verdict.word, verdict.note


BY_REPEATS = "Medians over the repeats; per repeat, the median step of the slower rank."
BY_TURNS = (
    "Systems take turns; a step is the mean of a turn's, of the slower rank. Medians over all turns; ratios "
    "are medians, with quartiles, of those within a round."
)
VERDICT_COLUMNS = ("", "what", "ratio", "verdict", "note")


def show(comparison: Comparison, console: Console) -> None:
    """The tables, for a person at a terminal."""
    table = Table(title=str(comparison.facts["title"]))
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "system" else "right", no_wrap=True)
    for row in comparison.rows:
        style = {"ok": "", "MISSING": "dim"}.get(row.status, "red")
        table.add_row(*_cells(comparison, row), style=style)
    console.print(table)
    judged = Table(*VERDICT_COLUMNS)
    for verdict in comparison.verdicts:
        style = {"pass": "green", "FAIL": "red"}.get(verdict.word, "dim")
        judged.add_row(*_verdict_cells(verdict), style=style)
    console.print(judged)
    for remark in comparison.remarks():
        console.print(f"! {remark}", markup=False)


def _markdown_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    columns = tuple(columns)
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def _inline(value: object) -> str:
    """A nested fact as `name value, …`, without the ones that do not apply."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_inline(inner)}" for name, inner in value.items() if inner)
    return str(value)


def markdown(comparison: Comparison) -> str:
    """The same tables as a document, headed by what is needed to repeat them."""
    facts = comparison.facts
    lines = [f"# {facts['title']}", ""]
    lines += [f"- {name}: {_inline(value)}" for name, value in facts.items() if name != "title"]
    if comparison.control is not None:
        gap = f"{comparison.control:.1e} (tolerance {LOSS_TOLERANCE:g})"
        lines.append(f"- loss gap of ranks that never communicate: {gap}")
    lines += ["", BY_TURNS if comparison.paired else BY_REPEATS, ""]
    lines += _markdown_table(COLUMNS, (_cells(comparison, row) for row in comparison.rows))
    lines += ["", "## Bars", ""]
    lines += _markdown_table(VERDICT_COLUMNS, (_verdict_cells(verdict) for verdict in comparison.verdicts))
    if comparison.remarks():
        lines += ["", "## Remarks", ""] + [f"- {remark}" for remark in comparison.remarks()]
    return "\n".join(lines) + "\n"


def write(comparison: Comparison, path: Path) -> tuple[Path, Path]:
    """`path` as JSON with every raw number, and the Markdown beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        **comparison.facts,
        "control_loss_gap": comparison.control,
        "remarks": comparison.remarks(),
        "rows": [asdict(row) for row in comparison.rows],
        "bars": [
            {"bar": str(v.bar), **asdict(v.bar), "ratio": v.ratio, "verdict": v.word, "note": v.note}
            for v in comparison.verdicts
        ],
        "runs": [asdict(run) for run in comparison.runs],
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    rendered = path.with_suffix(".md")
    rendered.write_text(markdown(comparison))
    return path, rendered
