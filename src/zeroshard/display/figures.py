"""Numbers as people read them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

from rich.box import ROUNDED
from rich.console import Console
from rich.table import Table
from rich.text import Text

UNITS = ("B", "kB", "MB", "GB", "TB")


def unit_of(count: float) -> tuple[int, str]:
    """The unit in which a number of bytes has one to three digits before the point: (1000000, "MB")."""
    power = 0
    while abs(count) >= 999.5 * 1000**power and power < len(UNITS) - 1:
        power += 1
    return 1000**power, UNITS[power]


def bytes_text(count: float) -> str:
    """Three digits and a unit: 41.6 MB."""
    scale, unit = unit_of(count)
    scaled = count / scale
    digits = 0 if scale == 1 or abs(scaled) >= 99.95 else 1 if abs(scaled) >= 9.995 else 2
    return f"{scaled:.{digits}f} {unit}"


def clock_text(seconds: float) -> str:
    """1:05, or 2:00:00 from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def summary(title: str, rows: Sequence[tuple[str, str]], stream: TextIO | None = None) -> None:
    """Print a table of names and values, for the end of a run."""
    table = Table(title=Text(title), title_justify="left", title_style="bold", box=ROUNDED, show_header=False)
    table.border_style = "bright_black"
    table.add_column()
    table.add_column(style="bold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))  # as it is: brackets are no markup
    Console(file=stream or sys.stdout, highlight=False).print(table)
