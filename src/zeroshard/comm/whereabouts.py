"""Where this rank is while a peer waits for it: inside a collective of `torch.distributed`, or in `shard`.

A user's own all-reduce, or clipping by a norm over DTensors, blocks inside torch, where our waits cannot see
it. If one rank is there and all others wait for it in ours, the run would hang until a timeout. The stack of
the rank's thread shows it, so the guard thread of a transport looks at it. The same goes for a rank that
waits for the others to come to another `shard`.

[Note: a stack in one piece] Whoever goes from one frame of another thread to the next in Python may lose the
interpreter in between; the other thread runs on, and the next step crashes the process (3.11, busy machines,
in `PyFrame_GetBack`). `faulthandler` writes a whole stack without giving the interpreter away. That takes a
while, so it is asked for only if the thread has used next to no processor time since the last look, as one
that waits does.
"""

from __future__ import annotations

import faulthandler
import re
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

__all__ = ["Whereabouts"]

_TORCH = str(Path(torch.__file__).parent)
_COLLECTIVES = tuple(
    f"{_TORCH}/distributed/{name}" for name in ("distributed_c10d.py", "_functional_collectives.py")
)
_PACKAGE = Path(__file__).parents[1]
_MEETING = str(_PACKAGE / "comm" / "rendezvous.py")
_HAS_CLOCKS = hasattr(time, "pthread_getcpuclockid")  # not on macOS
_RESTS = 0.1  # processor time over time, at most
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


class Frame(NamedTuple):
    file: str
    line: int
    name: str


class Whereabouts:
    """Looks at the thread that made it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread) if _HAS_CLOCKS else None
        self._looked, self._used = time.monotonic(), 0.0
        self._place: Sequence[Frame] | None = None
        self._since = 0.0

    def collective(self, longer_than: float) -> str | None:
        """The collective of torch, or the meeting in `shard`, that the thread has been in for so many
        seconds, and who called it."""
        if not self._rests():
            self._place = None
            return None
        frames = stack_of(self._thread)
        inside = [at for at, frame in enumerate(frames) if frame.file in (*_COLLECTIVES, _MEETING)]
        outer = frames[inside[-1] :] if inside else ()
        # A meeting looks again and again; within a collective every part of it counts anew.
        meeting = bool(outer) and outer[0].file == _MEETING
        place, now = (outer if meeting else frames) if outer else None, time.monotonic()
        if place != self._place:
            self._place, self._since = place, now
        if not outer or now - self._since < longer_than:
            return None
        name = outer[0].name
        what = "a collective of torch" if name.startswith("_") else f"torch.distributed.{name}"
        return ("the others to come to `shard`" if meeting else what) + _caller(outer)

    def caller(self) -> str:
        """Where the user's program is, as a label ends."""
        return _caller(stack_of(self._thread))

    def _rests(self) -> bool:
        """Whether it has hardly run since the last look."""
        if self._clock is None:
            return True
        before, self._looked = self._looked, time.monotonic()
        used = self._used
        try:
            self._used = time.clock_gettime(self._clock)
        except OSError:  # it has ended
            return False
        return self._used - used <= _RESTS * (self._looked - before)


def stack_of(thread: int) -> tuple[Frame, ...]:
    """What a thread of this process is in, the last call first; see [Note: a stack in one piece]."""
    with tempfile.TemporaryFile("w+", encoding="ascii", errors="replace") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        lines = file.read().splitlines()
    found, ours = list[Frame](), False
    for line in lines:
        if header := _THREAD.match(line):
            ours = int(header[1], 16) == thread
        elif ours and (frame := _FRAME.match(line)):
            found.append(Frame(frame[1], int(frame[2]), frame[3]))
    return tuple(found)


def _caller(frames: Sequence[Frame]) -> str:
    """Who called into torch or this package."""
    others = (frame for frame in frames if not frame.file.startswith((_TORCH, str(_PACKAGE))))
    found = next(others, None)
    return "" if found is None else f" (called at {Path(found.file).name}:{found.line})"
