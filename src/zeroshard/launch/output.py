"""What ranks write, on its way to the terminal or to a file."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

_LONGEST_LINE = 1 << 16
_CRASH = "Fatal Python error:"


def open_streams() -> None:
    """Put the null device where this process was started with a closed stream (`>&-`): the next file would
    get its number, and ranks would write into a pipe or socket of ours."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


class OutputStreams:
    """The launcher's two streams, shared by the threads that print on them."""

    def __init__(self, stdout: TextIO, stderr: TextIO) -> None:
        self._lock = threading.Lock()
        self.stdout = stdout
        self.stderr = stderr

    def write(self, stream: TextIO, text: str) -> None:
        """Writes in one piece. A reader that went away (`| head`) is no reason to stop the ranks."""
        with self._lock:
            try:
                stream.write(text)
                stream.flush()
            except (OSError, ValueError):
                return

    def say(self, text: str) -> None:
        """A line of the launcher itself."""
        self.write(self.stderr, f"zeroshard: {text}\n")


class OutputRelay(threading.Thread):
    """Reads a rank's pipe line by line, passes each on, and remembers the last one that was not blank: of a
    crash its headline, not the end of the stacks that follow."""

    def __init__(self, descriptor: int, accept: Callable[[bytes], None]) -> None:
        super().__init__(daemon=True)
        self._descriptor = descriptor
        self._accept = accept
        self.last_line = ""
        self.start()

    def run(self) -> None:
        """Until the last holder of the write end has closed it."""
        with open(self._descriptor, "rb") as pipe:
            while line := pipe.readline(_LONGEST_LINE):
                text = line.decode(errors="replace").strip()
                if text and not self.last_line.startswith(_CRASH):
                    self.last_line = text
                self._accept(line)


def prefixed(rank: int, screen: OutputStreams, stream: TextIO) -> Callable[[bytes], None]:
    """Prints lines on a stream as `[rank 1] …`."""

    def accept(line: bytes) -> None:
        text = line.decode(errors="replace")
        screen.write(stream, f"[rank {rank}] {text}" if text.endswith("\n") else f"[rank {rank}] {text}\n")

    return accept


def filed(path: Path) -> Callable[[bytes], None]:
    """Writes lines to a file, both streams of a rank to the same one, behind what is there: of the attempt
    before, which says why it failed, or of an earlier job."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab", buffering=0)

    def accept(line: bytes) -> None:
        file.write(line)

    return accept
