"""Finds ranks that wait inside collectives of torch, by their stacks and torch's flight recorder.

A user's own all-reduce, or clipping by a norm over DTensors, blocks inside torch, where our waits cannot see
it. If one rank is there and all others wait for it in ours, the run would hang until a timeout. The stack of
the rank's thread shows it, so the guard thread of a transport looks at it. The same goes for a rank that
waits for the others to come to another `shard`.

[Note: a stack in one piece] Whoever goes from one frame of another thread to the next in Python may lose the
interpreter in between; the other thread runs on, and the next step crashes the process (3.11, busy machines,
in `PyFrame_GetBack`). `faulthandler` writes a whole stack without giving the interpreter away. That takes a
while, so it is asked for only if the thread has used next to no processor time since the last look, as one
that waits does.

[Note: all inside torch] Where every rank is inside a collective of torch, each in another one, nobody waits
in a transport of ours who could tell, and torch would wait for half an hour. It keeps a record of the
collectives that it has started, by group and number, and the guards of all ranks compare these records once
every rank has been inside torch for a while. Two things are then a fact and not a guess: ranks whose
collective of one number differs, and ranks of which each is ahead of the other in some group. A rank that is
merely ahead may have left a broadcast early, and is no mismatch."""

from __future__ import annotations

import faulthandler
import json
import re
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

_TORCH = str(Path(torch.__file__).parent)
_COLLECTIVES = tuple(
    f"{_TORCH}/distributed/{name}" for name in ("distributed_c10d.py", "_functional_collectives.py")
)
_PACKAGE = Path(__file__).parents[2]
_MEETING = str(_PACKAGE / "comm" / "rendezvous.py")
_HAS_CLOCKS = hasattr(time, "pthread_getcpuclockid")  # not on macOS
_RESTS = 0.1  # processor time over time, at most
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


class StackFrame(NamedTuple):
    file: str
    line: int
    name: str


class StackProbe:
    """Looks at the stack of the thread that made this probe."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self.thread) if _HAS_CLOCKS else None
        self._looked, self._used = time.monotonic(), 0.0
        self._place: Sequence[StackFrame] | None = None
        self._since = 0.0

    def collective(self, longer_than: float) -> str | None:
        """The collective of torch, or the meeting in `shard`, that the thread has been in for so many
        seconds, and who called it."""
        if not self._rests():
            self._place = None
            return None
        frames = stack_of(self.thread)
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
        return _caller(stack_of(self.thread))

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


def stack_of(thread: int) -> tuple[StackFrame, ...]:
    """What a thread of this process is in, the last call first; see [Note: a stack in one piece]."""
    with tempfile.TemporaryFile("w+", encoding="ascii", errors="replace") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        lines = file.read().splitlines()
    found, ours = list[StackFrame](), False
    for line in lines:
        if header := _THREAD.match(line):
            ours = int(header[1], 16) == thread
        elif ours and (frame := _FRAME.match(line)):
            found.append(StackFrame(frame[1], int(frame[2]), frame[3]))
    return tuple(found)


def _caller(frames: Sequence[StackFrame]) -> str:
    """Who called into torch or this package."""
    others = (frame for frame in frames if not frame.file.startswith((_TORCH, str(_PACKAGE))))
    found = next(others, None)
    return "" if found is None else f" (called at {Path(found.file).name}:{found.line})"


CALLED = " (called at "  # in a label: where the user's program asks for it

# By group: the number of the last collective that a rank has started, and what it is.
Started = Mapping[str, Sequence[Any]]

_SIZED = {"all_reduce"}  # where different sizes are different collectives


def started() -> dict[str, list[Any]]:
    """This process's; empty where torch keeps no record of them. The newest is the last."""
    dump = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace_json", None)
    try:
        return _read(json.loads(dump()).get("entries", ())) if dump is not None else {}
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError):  # of another torch
        return {}


def _read(entries: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {group: [0, ""] for group in _groups() if entries}
    for entry in entries:
        if not entry["is_p2p"]:
            group = entry["process_group"][0]
            found.pop(group, None)
            found[group] = [entry["collective_seq_id"], _what(entry)]
    return found


def _groups() -> list[str]:
    """Those that this rank is in."""
    return [] if not dist.is_initialized() else [str(name) for name in c10d._world.pg_names.values()]


def _what(entry: Mapping[str, Any]) -> str:
    name: str = entry["profiling_name"].rpartition(":")[2]
    return f"{name} of {entry['input_sizes']}" if name in _SIZED else name


def named(label: str, told: Started) -> str:
    """A label that says what torch waits for rather than that it does, and in which of several groups."""
    name, called, place = label.partition(CALLED)
    group, (_, newest) = list(told.items())[-1] if told else ("", (0, ""))
    if newest and ("wait_tensor" in name or name.startswith("a collective of torch")):
        name = f"torch.distributed's {newest}"
    where = f" in group {group}" if len(told) > 1 else ""
    return f"{name}{where}{called}{place}"


def differ(told: Sequence[Started]) -> bool:
    """Whether the ranks' last collectives cannot be the same ones."""
    groups = sorted({group for each in told for group in each})
    return any(_other(told, group) for group in groups) or any(
        _ahead(list(_numbers(told, *pair))) for pair in combinations(groups, 2)
    )


def _other(told: Sequence[Started], group: str) -> bool:
    """Whether ranks did different things under one number."""
    numbered: dict[int, str] = {}
    last = [each[group] for each in told if group in each]
    return any(numbered.setdefault(number, what) != what for number, what in last)


def _numbers(told: Sequence[Started], one: str, other: str) -> Iterator[tuple[int, int]]:
    for each in told:
        if one in each and other in each:
            yield each[one][0], each[other][0]


def _ahead(numbers: list[tuple[int, int]]) -> bool:
    """Whether some rank is ahead of another in the first group and behind it in the second."""
    least: dict[int, int] = {}
    for one, other in numbers:
        least[one] = min(other, least.get(one, other))
    most = {one: max(b for a, b in numbers if a == one) for one in least}
    high = 0
    for below, above in pairwise(sorted(least)):
        high = max(high, most[below])
        if least[above] < high:
            return True
    return False
