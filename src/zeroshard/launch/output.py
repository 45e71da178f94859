"""What ranks write, on its way to the terminal or to a file."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

_LONGEST_LINE = 1 << 16
_CRASH = "Fatal Python error:"


class Screen:
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


class Relay(threading.Thread):
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


def prefixed(rank: int, screen: Screen, stream: TextIO) -> Callable[[bytes], None]:
    """Prints lines on a stream as `[rank 1] …`."""

    def accept(line: bytes) -> None:
        text = line.decode(errors="replace")
        screen.write(stream, f"[rank {rank}] {text}" if text.endswith("\n") else f"[rank {rank}] {text}\n")

    return accept


def filed(path: Path, again: bool) -> Callable[[bytes], None]:
    """Writes lines to a file, both streams of a rank to the same one; `again`: behind those of the attempt
    before, which say why it failed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab" if again else "wb", buffering=0)

    def accept(line: bytes) -> None:
        file.write(line)

    return accept
