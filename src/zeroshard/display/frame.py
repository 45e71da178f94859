"""What a frame is made of: headline, curve, bars. What does not fit is left out, the bars first."""

from __future__ import annotations

from rich.box import ROUNDED
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .bars import memory_bars, sent_bars
from .curve import TRAIN, VALIDATION, Curve
from .figures import clock_text
from .reading import LoopRecord, Reading

WIDE = 72  # columns from which two panels of bars stand side by side
FEWEST_CURVE_ROWS, MOST_CURVE_ROWS = 5, 17
DIM = "bright_black"


def frame(record: LoopRecord, reading: Reading, width: int, rows: int) -> Group:
    """The picture of `reading` in at most `rows` lines of `width` columns."""
    parts: list[RenderableType] = [Text(record.title, "bold", no_wrap=True, overflow="ellipsis")]
    parts += [_Progress(record, reading), _facts(record, reading)]
    bars = [panel for panel in (memory_bars(record, reading), sent_bars(record, reading)) if panel]
    bar_rows = 2 + max(len(lines) for _, lines in bars) if bars else 0
    if width < WIDE or rows - len(parts) - bar_rows - 2 < FEWEST_CURVE_ROWS:
        bars, bar_rows = [], 0
    curve_rows = min(rows - len(parts) - bar_rows - 2, MOST_CURVE_ROWS)
    if curve_rows >= FEWEST_CURVE_ROWS:
        name = Text.assemble("loss  ", ("⠒⠒ ", TRAIN), "training  ", ("● ", VALIDATION), "validation")
        parts.append(_panel(name, Curve(record, curve_rows), curve_rows))
    if bars:
        grid = Table.grid(expand=True)
        for _ in bars:
            grid.add_column(ratio=1)
        grid.add_row(*(_panel(Text(name), Group(*lines), bar_rows - 2) for name, lines in bars))
        parts.append(grid)
    return Group(*parts)


def _panel(name: Text, inside: RenderableType, rows: int) -> Panel:
    return Panel(inside, box=ROUNDED, title=name, title_align="left", border_style=DIM, height=rows + 2)


def _facts(record: LoopRecord, reading: Reading) -> Text:
    facts = {"loss": f"{record.loss:.3f}"}
    if record.validation:
        facts["validation"] = f"{record.validation[-1][1]:.3f}"
    if record.tokens_per_second:
        facts["tokens/s"] = f"{record.tokens_per_second:,.0f}"
    facts |= {"step": f"{reading.step:,}", **reading.facts}
    styles = {"loss": f"bold {TRAIN}", "validation": VALIDATION}
    text = Text(no_wrap=True, overflow="ellipsis")
    for name, value in facts.items():
        text.append("   " if text else "").append(f"{name} ", DIM).append(value, styles.get(name, "bold"))
    return text


class _Progress:
    """A thin bar with the times at its end."""

    def __init__(self, record: LoopRecord, reading: Reading) -> None:
        left = f", {clock_text(record.left)} left" if reading.done < 1 else ""
        self.times = f" {clock_text(record.elapsed)} elapsed{left}"
        self.done = min(max(reading.done, 0.0), 1.0)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = max(options.max_width - len(self.times), 0)
        full = round(room * self.done)
        yield Text.assemble(("━" * full, TRAIN), ("─" * (room - full), DIM), self.times, no_wrap=True)
