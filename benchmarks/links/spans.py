"""Draws recorded spans of a training step as an SVG: what was computed, what was waited for, what the link
carried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LEFT, LANE, GAP = 1000, 90, 20, 4
COLOURS = {
    "forward": "#4c78a8",
    "backward": "#54a24b",
    "update": "#f58518",
    "wait": "#e45756",
    "host": "#b279a2",
}
LANES = ("compute", "waiting", "host", "link")
NARROW = 0.3  # pixels: what is narrower cannot be seen
OWN_LANES = {"wait": "waiting", "host": "host"}


@dataclass(frozen=True)
class Panel:
    """One way to train. `spans`: (what, start, stop); `link`: (moment, bytes); times in seconds."""

    title: str
    spans: Sequence[tuple[str, float, float]]
    link: Sequence[tuple[float, int]]


def draw(title: str, panels: Sequence[Panel], seconds: float) -> str:
    """All panels on one scale of time."""
    height = 50 + len(panels) * (len(LANES) * (LANE + GAP) + 34) + 30
    scale = (WIDTH - LEFT - 20) / seconds
    most = max((count for panel in panels for _, count in panel.link), default=1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="22" font-size="15">{escape(title)}</text>',
    ]
    at = 50
    for panel in panels:
        parts += _panel(panel, at, scale, seconds, most)
        at += len(LANES) * (LANE + GAP) + 34
    parts += _legend(at)
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, top: int, scale: float, seconds: float, most: int) -> list[str]:
    parts = [f'<text x="10" y="{top}" font-weight="bold">{escape(panel.title)}</text>']
    rows = {name: top + 8 + n * (LANE + GAP) for n, name in enumerate(LANES)}
    for name, y in rows.items():
        parts.append(f'<text x="10" y="{y + 14}" fill="#555">{name}</text>')
        parts.append(
            f'<rect x="{LEFT}" y="{y}" width="{seconds * scale:.1f}" height="{LANE}" fill="#f4f4f4"/>'
        )
    for what, start, stop in panel.spans:
        if start < seconds and (stop - start) * scale >= NARROW:
            kind = "wait" if what.startswith("wait") else what
            y = rows[OWN_LANES.get(kind, "compute")]
            wide = (min(stop, seconds) - start) * scale
            parts.append(
                f'<rect x="{LEFT + start * scale:.1f}" y="{y}" width="{wide:.1f}" height="{LANE}" '
                f'fill="{COLOURS[kind]}"><title>{escape(what)} {1e3 * (stop - start):.1f} ms</title></rect>'
            )
    y, last, bars = rows["link"] + LANE, 0.0, []
    for moment, count in panel.link:
        if moment < seconds and count:
            wide, tall = max((moment - last) * scale, NARROW), LANE * count / most
            bars.append(f"M{LEFT + last * scale:.1f} {y}v-{tall:.1f}h{wide:.1f}v{tall:.1f}z")
        last = moment
    return [*parts, f'<path d="{"".join(bars)}" fill="#72609b"/>']


def _legend(top: int) -> list[str]:
    parts, x = [], LEFT
    for name, colour in [*COLOURS.items(), ("bytes on the link", "#72609b")]:
        parts.append(f'<rect x="{x}" y="{top}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 17}" y="{top + 11}">{name}</text>')
        x += 40 + 8 * len(name)
    return parts
