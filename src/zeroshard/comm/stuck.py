"""Ends a run in which a rank lives and does not come: stopped, asleep in the user's code, or busy for ever.

Nobody can tell it from a slow one, so waits say early what they are for, and have an end. [Note: the end]
Who waits in vain tells all ranks which of them did not come. A rank that learns so of itself, while its
program is somewhere else, shows on its own stderr where that is and ends: its guard's thread does, since the
program's would not. A stopped process (SIGSTOP, Ctrl-Z) has no thread that runs; on the same host the ranks
that waited for it let it go on first. Ranks that are threads of one process read its stack themselves."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .diagnosis import exits
from .diagnosis.stacks import stack_of

if TYPE_CHECKING:
    from .diagnosis.stacks import StackFrame

SOON = 5.0  # seconds after which a wait says what it is for
MANY = 10.0  # and so many times a step's usual time
OTHERS = 10.0  # seconds that one whose peers all wait elsewhere leaves them for their verdict
_MARK = "\0"
_NAMED = 200  # ranks that a note tells
_FRAMES, _FEW = 20, 4  # that are shown


@dataclass(frozen=True)
class Person:
    """A rank as messages name it, and what tells whether it can be looked at from here."""

    rank: int
    pid: int
    host: str
    space: str  # of process numbers
    thread: int

    @classmethod
    def me(cls, rank: int) -> list[Any]:
        """This rank, as it is told to the others."""
        return [rank, os.getpid(), socket.gethostname(), _space(), threading.get_ident()]

    @property
    def near(self) -> bool:
        return self.space != "" and self.space == _space()

    @property
    def stopped(self) -> bool:
        """Whether it is seen to be stopped."""
        return self.near and _state(self.pid) == "T"

    def __str__(self) -> str:
        how = ", stopped by SIGSTOP or Ctrl-Z" if self.stopped else ""
        return f"rank {self.rank} (pid {self.pid} on {self.host}{how})"


class Usual:
    """How long a step usually takes, by the fences before updates."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._step = 0.0

    def beat(self) -> None:
        now = time.monotonic()
        if self._last is not None:
            took = now - self._last
            self._step = took if self._step == 0.0 else self._step + (took - self._step) / 8
        self._last = now

    def too_long(self, waited: float, limit: float) -> bool:
        """Whether a wait has lasted long enough to be spoken of."""
        return waited > min(max(SOON, MANY * self._step), limit / 2)


def say(rank: int, waited: float, what: str, late: Sequence[Person]) -> None:
    """Writes a line to stderr that says what a rank waits for, and for which others."""
    who = _listed(late)
    have = "has" if len(late) == 1 else "have"
    print(
        f"zeroshard: rank {rank} has waited {waited:.0f} s for {what}: {who} {have} not come",
        file=sys.stderr,
        flush=True,
    )


def in_vain(me: str, waited: float, what: str, late: Sequence[Person]) -> str:
    """The text of a wait that ends for its length, marked with who did not come."""
    named = _listed(late) or "some rank, which is not known,"
    here = [person for person in late if person.pid == os.getpid()]
    stacks = "".join(f"\nrank {p.rank} is here:\n{shown(stack_of(p.thread))}" for p in here)
    text = (
        f"{me} waited {waited:.0f} s for {what}, and {named} did not come in that time, which "
        "shard(timeout=...) and `zeroshard run --stuck-after` set."
        f"{'' if here or not late else ' It shows its stack, if it can.'}{stacks}"
    )
    return marked(text, [] if here else [person.rank for person in late])


def _listed(people: Sequence[Person]) -> str:
    more = [f"{len(people) - _FEW} more"] if len(people) > _FEW else []
    return " and ".join([*map(str, people[:_FEW]), *more])


def marked(text: str, late: Iterable[int]) -> str:
    """A note with the ranks that did not come, for their guards. In front: a long note is cut."""
    listed = ",".join(map(str, [*late][:_NAMED]))
    return f"{listed}{_MARK}{text}" if listed else text


def read(note: str) -> tuple[str, list[int]]:
    """A note's text, and the ranks that did not come."""
    listed, mark, text = note.partition(_MARK)
    return (text, [int(rank) for rank in listed.split(",")]) if mark else (note, [])


def why_blamed(rank: int, notes: Iterable[str]) -> str | None:
    """The text of a note that names this rank among those that did not come. Not every note does: a rank
    that only heard of the end may say so first."""
    return next((text for text, late in map(read, notes) if rank in late), None)


def show_and_end(rank: int, text: str, thread: int) -> None:
    """This rank is the one that did not come: see [Note: the end]."""
    stack = shown(stack_of(thread))
    where = f"It is here (most recent call last):\n{stack}"
    print(f"zeroshard: rank {rank} did not come where others waited. {where}", file=sys.stderr)
    exits.give_up(rank, text)


def shown(frames: Sequence[StackFrame]) -> str:
    """A stack as Python shows it, the last call last."""
    last = frames[:_FRAMES][::-1]
    return "\n".join(f'  File "{file}", line {line}, in {name}' for file, line, name in last)


def wake(late: Sequence[Person]) -> None:
    """Let stopped ranks of this host go on, so that they can say where they are."""
    for person in late:
        if person.stopped:
            with suppress(OSError):
                os.kill(person.pid, signal.SIGCONT)


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _space() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""
