"""Bytes as bars, against what plain data parallel training would need."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from .figures import bytes_text, unit_of
from .reading import LoopRecord, Reading

BAR = "▆"  # not a full block: bars of neighbouring lines must not touch
NAME_COLUMNS = 9
MOST_RANKS = 4
LEGEND_COLUMNS, LEGEND_WITH_UNITS = 2, 22
DIM = "bright_black"
COLOURS = {
    "parameters": "dodger_blue1",
    "gradients": "medium_orchid",
    "state": "orange1",
    "gathered": "spring_green3",
    "buckets": "turquoise2",
    "gather": "dodger_blue1",
    "publish": "spring_green3",
    "reduce": "medium_orchid",
    "plain": "grey50",
}
OTHER_COLOURS = ("light_coral", "khaki1", "plum2", "grey70")


class _Bar:
    """`rank 0  ▆▆▆▆▆▆▆▆▆    41.6 MB  52%`: parts one after another; `whole` would fill the room."""

    def __init__(self, name: str, parts: Mapping[str, int], whole: int, against: int | None = None) -> None:
        self.name, self.parts, self.whole = name, parts, max(whole, 1)
        total = sum(parts.values())
        share = f"{total / against:.0%}" if against else ""
        self.end = f"{bytes_text(total):>9}{share:>6}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = max(options.max_width - NAME_COLUMNS - len(self.end), 1)
        text = Text(f"{self.name[: NAME_COLUMNS - 1]:{NAME_COLUMNS}}", no_wrap=True)
        drawn = reached = 0
        for kind, count in self.parts.items():
            reached += count
            upto = min(round(room * reached / self.whole), room)
            text.append(BAR * (upto - drawn), _colour(kind))
            drawn = max(drawn, upto)
        yield text.append(" " * (room - drawn) + self.end)


def memory_bars(record: LoopRecord, reading: Reading) -> tuple[str, list[RenderableType]] | None:
    """A bar per rank (of many ranks, the fullest and the emptiest), and what the colours mean."""
    if not reading.memory:
        return None
    totals = [sum(kinds.values()) for kinds in reading.memory]
    plain = record.plain.memory if record.plain else None
    whole = max(*totals, plain or 0)
    ranks = list(range(len(totals)))
    if len(ranks) > MOST_RANKS:
        ranks = sorted({totals.index(max(totals)), totals.index(min(totals))})
    lines: list[RenderableType] = [_Bar(f"rank {rank}", reading.memory[rank], whole, plain) for rank in ranks]
    if plain:
        lines.append(_Bar("plain DP", {"plain": plain}, whole, plain))
    kinds = list(reading.memory[ranks[0]].items())
    starts = range(0, len(kinds), LEGEND_COLUMNS)
    lines += [_Legend(dict(kinds[start : start + LEGEND_COLUMNS]), totals[ranks[0]]) for start in starts]
    return "memory per rank, at its peak", lines


def sent_bars(record: LoopRecord, reading: Reading) -> tuple[str, list[RenderableType]] | None:
    """A bar per kind of traffic, one for all of it, and DDP's."""
    if not reading.sent:
        return None
    plain = record.plain.sent if record.plain else None
    whole = max(sum(reading.sent.values()), plain or 0)
    lines: list[RenderableType] = [_Bar(kind, {kind: count}, whole) for kind, count in reading.sent.items()]
    lines.append(_Bar("all", reading.sent, whole, plain))
    if plain:
        lines.append(_Bar("DDP", {"plain": plain}, whole, plain))
    lines.append(Text(f"{reading.waited:.1%} of the time spent waiting", DIM, no_wrap=True))
    return "sent per step by a rank", lines


class _Legend:
    """`■ parameters 11.4 MB   ■ gradients 11.4 MB`, in columns of equal width and the unit of `total`."""

    def __init__(self, kinds: Mapping[str, int], total: int) -> None:
        self.kinds, self.total = kinds, total

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width // LEGEND_COLUMNS
        scale, unit = unit_of(self.total)
        # In a narrow panel the unit at the end of the bars must do.
        unit = f" {unit}" if width >= LEGEND_WITH_UNITS else ""
        text = Text(no_wrap=True, overflow="crop")
        for kind, count in self.kinds.items():
            words = f"{kind:<10} {count / scale:4.1f}{unit}"
            text.append("■ ", _colour(kind)).append(f"{words:{width - 2}}", DIM)
        yield text


def _colour(kind: str) -> str:
    return COLOURS.get(kind) or OTHER_COLOURS[sum(kind.encode()) % len(OTHER_COLOURS)]
