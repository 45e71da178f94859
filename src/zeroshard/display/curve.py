"""The loss curve, in braille: every cell of the terminal is two dots wide and four dots tall."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import groupby

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from .figures import clock_text
from .reading import LoopRecord, Point

TRAIN, VALIDATION = "bright_cyan", "bold bright_yellow"
DIM = "bright_black"
# Bits of a braille character: DOTS[row][column], rows from the top.
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
LABEL_EVERY = 3
STEPS_A_WINDOW, WIDEST_WINDOW = 20, 10

Cells = list[list[tuple[str, str]]]  # [row][column]: a character and its style


class Curve:
    """Losses from the beginning to the planned end of the training: the empty part is still to come."""

    def __init__(self, record: LoopRecord, rows: int) -> None:
        self.rows = rows - 1  # the last one holds the times
        self.train = list(_smooth([point for point in record.train if math.isfinite(point[1])]))
        self.validation = [point for point in record.validation if math.isfinite(point[1])]
        self.seconds = record.elapsed + record.left

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.train:
            yield Text("no finite loss yet", DIM)
            return
        losses = [loss for _, loss in self.train + self.validation]
        # The fall is steep first and slow then: a logarithmic scale shows both, where it exists.
        log = min(losses) > 0
        low, high = (math.log(edge) if log else edge for edge in (min(losses), max(losses)))
        if high == low:
            low, high = low - 0.5, high + 0.5

        def depth(loss: float) -> float:
            """0 at the top, less than 1 at the bottom."""
            return 0.999 * (high - (math.log(loss) if log else loss)) / (high - low)

        levels = [high - (high - low) * row / max(self.rows - 1, 1) for row in range(self.rows)]
        labels = [f"{math.exp(level) if log else level:.2f}" for level in levels]
        gutter = max(map(len, labels)) + 1
        columns = max(options.max_width - gutter, 8)
        for row, cells in enumerate(self._cells(columns, depth)):
            label = labels[row] if row % LABEL_EVERY == 0 else ""
            text = Text(f"{label:>{gutter - 1}} ", DIM, no_wrap=True)
            for style, run in groupby(cells, key=lambda cell: cell[1]):
                text.append("".join(glyph for glyph, _ in run), style)
            yield text
        yield Text(" " * gutter + self._times(columns), DIM, no_wrap=True)

    def _cells(self, columns: int, depth: Callable[[float], float]) -> Cells:
        wide, tall = 2 * columns, 4 * self.rows
        by_column: dict[int, list[float]] = {}
        for done, loss in self.train:
            by_column.setdefault(min(int(done * wide), wide - 1), []).append(loss)
        masks = [[0] * columns for _ in range(self.rows)]
        before: tuple[int, int] | None = None
        for x, values in by_column.items():  # in order of time, so from left to right
            dot = x, int(depth(sum(values) / len(values)) * tall)
            for dot_x, dot_y in _line(before or dot, dot):
                masks[dot_y // 4][dot_x // 2] |= DOTS[dot_y % 4][dot_x % 2]
            before = dot
        cells = [[(chr(0x2800 + mask) if mask else " ", TRAIN) for mask in row] for row in masks]
        for done, loss in self.validation:
            cells[int(depth(loss) * self.rows)][min(int(done * columns), columns - 1)] = ("●", VALIDATION)
        return cells

    def _times(self, columns: int) -> str:
        """The clock at the quarters of the axis."""
        text = ""
        for quarter in range(4):
            text = text.ljust(columns * quarter // 4) + clock_text(self.seconds * quarter / 4)
        end = clock_text(self.seconds)
        return text.ljust(columns)[: columns - len(end)] + end


def _smooth(points: list[Point]) -> Iterator[Point]:
    """Means over the last points, more of them as time goes on: losses first fall, and later jump about."""
    for index, (done, _) in enumerate(points):
        window = points[max(index - min(index // STEPS_A_WINDOW, WIDEST_WINDOW), 0) : index + 1]
        yield done, sum(loss for _, loss in window) / len(window)


def _line(start: tuple[int, int], end: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """The dots of a straight line between two dots, both included."""
    (x, y), (to_x, to_y) = start, end
    steps = max(abs(to_x - x), abs(to_y - y), 1)
    for step in range(steps + 1):
        yield round(x + (to_x - x) * step / steps), round(y + (to_y - y) * step / steps)
