"""Where this rank is while a peer waits for it: inside a collective of `torch.distributed`, or in `shard`.

A user's own all-reduce, or clipping by a norm over DTensors, blocks inside torch, where our waits cannot see
it. If one rank is there and all others wait for it in ours, the run would hang until a timeout. The frames of
the rank's thread show it, so the guard thread of a transport looks at them. The same goes for a rank that
waits for the others to come to another `shard`.

[Note: only of a thread that rests] Frames of a thread that runs on while they are looked at seem to have
crashed the interpreter once (3.11, a busy machine, in `PyFrame_GetBack`). So they are looked at only if the
thread has used next to no processor time since the last look, as one that waits does.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import FrameType

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


class Whereabouts:
    """Looks at the thread that made it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread) if _HAS_CLOCKS else None
        self._looked, self._used = time.monotonic(), 0.0
        self._place: tuple[int, int] | None = None
        self._since = 0.0

    def collective(self, longer_than: float) -> str | None:
        """The collective of torch, or the meeting in `shard`, that the thread has been in for so many
        seconds, and who called it."""
        if not self._rests():
            self._place = None
            return None
        innermost = sys._current_frames().get(self._thread)
        outermost = _outermost(innermost)
        # A meeting looks again and again; within a collective every part of it counts anew.
        meeting = outermost is not None and outermost.f_code.co_filename == _MEETING
        frame = outermost if meeting else innermost
        place = (id(frame), frame.f_lasti) if frame is not None and outermost is not None else None
        now = time.monotonic()
        if place != self._place:
            self._place, self._since = place, now
        if outermost is None or now - self._since < longer_than:
            return None
        name = outermost.f_code.co_name
        what = "a collective of torch" if name.startswith("_") else f"torch.distributed.{name}"
        return ("the others to come to `shard`" if meeting else what) + _caller(outermost)

    def _rests(self) -> bool:
        """See [Note: only of a thread that rests]."""
        if self._clock is None:
            return True
        before, self._looked = self._looked, time.monotonic()
        used = self._used
        try:
            self._used = time.clock_gettime(self._clock)
        except OSError:  # it has ended
            return False
        return self._used - used <= _RESTS * (self._looked - before)


def _outermost(frame: FrameType | None) -> FrameType | None:
    """The first call into a collective on the way to `frame`."""
    found = None
    while frame is not None:
        if frame.f_code.co_filename in (*_COLLECTIVES, _MEETING):
            found = frame
        frame = frame.f_back
    return found


def _caller(frame: FrameType | None) -> str:
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, str(_PACKAGE))):
        frame = frame.f_back
    return "" if frame is None else f" (called at {Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
