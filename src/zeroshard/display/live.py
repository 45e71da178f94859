"""The display itself: a context manager around a training loop.

Only rank 0 draws. There is no thread: `show` draws at most every `REDRAW_SECONDS`, because every redraw is
time that the other ranks spend waiting. Where the output is no terminal, `show` prints one plain line every
few seconds instead.
"""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import Self, TextIO

from .figures import bytes_text, clock_text
from .frame import frame
from .reading import LoopRecord, Plain, Reading
from .screen import LiveScreen

REDRAW_SECONDS = 0.4


class Live:
    """A display named `title`.

    `plain` gives the bars something to stand against; `every` is the pace, in seconds, of the plain lines.
    """

    def __init__(
        self,
        title: str,
        *,
        rank: int = 0,
        plain: Plain | None = None,
        every: float = 5.0,
        stream: TextIO | None = None,
    ) -> None:
        self.record = LoopRecord(title, plain)
        self._draws = rank == 0
        self._stream = stream or sys.stdout
        self._screen = LiveScreen(self._stream) if self._draws and _is_terminal(self._stream) else None
        self._interval = REDRAW_SECONDS if self._screen else every
        self._shown: Reading | None = None
        self._drawn = 0.0

    def __enter__(self) -> Self:
        self.record.begin()
        if self._screen:
            self._screen.capture_prints()
        elif self._draws:
            print(self.record.title, file=self._stream, flush=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.record.last is not None and self._shown is not self.record.last:
            self._draw(self.record.last)
        if self._screen:
            self._screen.release_prints()

    def show(self, reading: Reading) -> None:
        """Take note of a reading, and draw it if the last drawing is old enough."""
        if not self._draws:
            return
        self.record.add(reading)
        if self._shown is None or self.record.now - self._drawn >= self._interval:
            self._draw(reading)

    def _draw(self, reading: Reading) -> None:
        self._shown, self._drawn = reading, time.monotonic()
        if self._screen:
            width, height = self._screen.console.size
            self._screen.paint(frame(self.record, reading, width, height - 1))
        else:
            print(_line(self.record, reading), file=self._stream, flush=True)


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _line(record: LoopRecord, reading: Reading) -> str:
    parts = [f"step {reading.step}", f"{reading.done:.0%}", f"loss {record.loss:.3f}"]
    if record.validation:
        parts.append(f"validation {record.validation[-1][1]:.3f}")
    parts += [f"{name} {value}" for name, value in reading.facts.items()]
    if record.tokens_per_second:
        parts.append(f"{record.tokens_per_second:,.0f} tokens/s")
    if reading.memory:
        against = f" of {bytes_text(record.plain.memory)}" if record.plain else ""
        parts.append(f"{bytes_text(max(sum(kinds.values()) for kinds in reading.memory))}{against} per rank")
    if reading.sent:
        parts.append(f"{bytes_text(sum(reading.sent.values()))} sent per step")
    parts.append(f"{clock_text(record.elapsed)} elapsed")
    if reading.done < 1:
        parts.append(f"{clock_text(record.left)} left")
    return " | ".join(parts)
