"""Frames painted over one another in place, and printed text that goes above them.

Nothing of the terminal is hidden or switched (no alternate screen, no hidden cursor), so that a rank which is
killed leaves it usable, and the last frame stays in the scrollback.
"""

from __future__ import annotations

import io
import sys
import threading
from typing import TextIO, cast

from rich.console import Console, RenderableType

HOME, CLEAR_BELOW, CLEAR_REST = "\x1b[H", "\x1b[J", "\x1b[K"
# Terminals that know these marks show what stands between them at once; others ignore them.
BEGIN, END = "\x1b[?2026h", "\x1b[?2026l"


class LiveScreen:
    """A terminal with one frame at its end."""

    def __init__(self, stream: TextIO) -> None:
        self.console = Console(file=stream, highlight=False)
        self._stream = stream
        self._lock = threading.RLock()
        self._frame = ""
        self._size = self.console.size
        self._kept: tuple[TextIO, TextIO] | None = None

    def paint(self, frame: RenderableType) -> None:
        with self._lock:
            with self.console.capture() as captured:
                self.console.print(frame)
            self._write("", captured.get())

    def above(self, text: str) -> None:
        """Whole lines, printed where the frame begins; the frame moves down."""
        self._write(text, self._frame)

    def _write(self, text: str, frame: str) -> None:
        """Everything in one write, line over line with nothing erased before, so that nothing flickers."""
        with self._lock:
            size, lines = self.console.size, self._frame.count("\n")
            start = f"\r\x1b[{lines}A" if lines else ""
            if size != self._size and lines:
                # The terminal has wrapped the old frame in its own way, and nobody knows where it begins now.
                start = HOME
                frame = frame if not text else ""
            self._size, self._frame = size, frame
            body = (text + frame).replace("\n", f"{CLEAR_REST}\n")
            self._stream.write(f"{BEGIN}{start}{body}{CLEAR_BELOW}{END}")
            self._stream.flush()

    def capture_prints(self) -> None:
        """Send what is printed from now on above the frame, where it would go to this terminal."""
        self._kept = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (
            cast(TextIO, _PrintsAbove(self, stream)) if stream.isatty() else stream for stream in self._kept
        )

    def release_prints(self) -> None:
        if self._kept is None:
            return
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, _PrintsAbove):
                stream.finish()
        sys.stdout, sys.stderr = self._kept
        self._kept = None


class _PrintsAbove(io.TextIOBase):
    """Stands in for a standard stream while a frame is on the screen."""

    def __init__(self, screen: LiveScreen, stream: TextIO) -> None:
        self._screen, self._stream, self._text = screen, stream, ""

    def write(self, text: str) -> int:
        whole, end, self._text = (self._text + text).rpartition("\n")
        if end:
            self._screen.above(whole + end)
        return len(text)

    def finish(self) -> None:
        if self._text:
            self.write("\n")

    def flush(self) -> None:
        """Only whole lines go out: a frame cannot follow half a line."""

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()
