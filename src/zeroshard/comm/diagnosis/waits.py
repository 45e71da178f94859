"""Finds ranks that wait for different things, through the store.

Ranks that share memory see one another's waits directly (`control`). Ranks on several hosts write down what
they wait for once a wait has lasted `LONG` seconds: which lane and turn they need, and how many turns of
every lane they have started themselves. With everybody's entry at hand a mismatch is a fact: every rank
waits, each needs a turn that some peer has not started, and nothing has changed for `PATIENCE` seconds. Slow
data was started on both sides, and is never taken for a mismatch."""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from .stacks import CALLED, Started, differ

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

LONG = 5.0
PATIENCE = 8.0
PARTING = 3.0  # seconds; a thread that is stuck in torch is left behind
_LOOK = 1.0
_ANSWERS = 3.0  # seconds within which a store that can answer has
_GATHERS = "its gather ["
_APART = (
    " Here every rank gathers a unit, which all ranks must do at stage 3: where they use different ones "
    "(experts), compute inside run.kept_full(), which gathers all of them, for training too; or let one "
    "unit hold all branches, as the default units do inside a block (drop units=)."
)
_ASKS, _NAMELESS = "all ranks to compute ", "with tensors without a name"


@dataclass
class WaitEntry:
    """What one rank waits for. `lane` is empty where only the label tells (an operation on a GPU, a
    collective of torch). `foreign`: the latter, and what torch has started (`desynchronised`). `away`: for
    other ranks than these, in a transport that finds out by itself whether that can come about."""

    count: int
    label: str
    lane: str
    turn: int
    started: dict[str, int]
    foreign: Started | None = None
    away: bool = False


class StoreWatch:
    """One rank's entry in the store, and its reading of the others'.

    All transports between the same ranks share one, so that ranks which wait in different transports are
    found out too. `started` counts the turns of all lanes; a lane's name begins with its transport's number.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self.started: dict[str, int] = {}
        self._members = 0
        self._lock = threading.Lock()
        self._count = 0
        self._writer: object = None
        self._wait: tuple[str, str, int] | None = None  # what the entry in the store is about
        self._looked = 0.0
        self._seen: list[WaitEntry] = []
        self._since = 0.0
        self.all_foreign = False  # the mismatch is between collectives of torch

    def join(self) -> int:
        """The number of a transport that joins; all ranks let them join in the same order."""
        self._members += 1
        return self._members

    def waiting(
        self,
        writer: object,
        label: str,
        lane: str = "",
        turn: int = 0,
        foreign: Started | None = None,
        away: bool = False,
    ) -> str | None:
        """Call from time to time in a long wait: the text of a mismatch, if this is one."""
        now, wait = time.monotonic(), (label, lane, turn)
        with self._lock:
            # One wait may follow upon another before anybody could say that the first is over.
            if self._writer is None or (self._writer is writer and wait != self._wait):
                self._writer, self._wait = writer, wait
                self._count += 1
                self._write(WaitEntry(self._count, label, lane, turn, dict(self.started), foreign, away))
            elif self._writer is not writer or now - self._looked < _LOOK:
                return None
            self._looked = now
            return self._verdict(now)

    def absent(self) -> list[int]:
        """The other ranks that do not say what they wait for: they are elsewhere."""
        return [rank for rank in range(self._size) if rank != self._rank and self._read(rank) is None]

    def speaks_for(self, writer: object) -> bool:
        """Whether the entry is this writer's."""
        return self._writer is writer

    def over(self, writer: object) -> None:
        """The wait of this writer has ended."""
        with self._lock:
            if self._writer is writer:
                self._writer = None
                self._seen = []
                self._write(None)

    def _verdict(self, now: float) -> str | None:
        entries = [self._read(rank) for rank in range(self._size)]
        present = [entry for entry in entries if entry is not None]
        if len(present) < self._size or not _stuck(present):
            self._seen = []
            return None
        self.all_foreign = all(entry.foreign is not None for entry in present)
        if present != self._seen:
            self._seen, self._since = present, now
            return None
        return disagreement([entry.label for entry in present]) if now - self._since > PATIENCE else None

    def _write(self, entry: WaitEntry | None) -> None:
        self._store.set(f"wait/{self._rank}", json.dumps(None if entry is None else asdict(entry)))

    def _read(self, rank: int) -> WaitEntry | None:
        key = f"wait/{rank}"
        if not self._store.check([key]):
            return None
        fields = json.loads(self._store.get(key))
        return None if fields is None else WaitEntry(**fields)


def _stuck(entries: list[WaitEntry]) -> bool:
    """Whether every rank needs what some peer has not started; by labels where nothing else is known, and by
    torch's own records where all are inside it."""
    if any(entry.away for entry in entries):
        return False
    foreign = [entry.foreign for entry in entries if entry.foreign is not None]
    if len(foreign) == len(entries):
        return differ(foreign)
    if alike(entry.label for entry in entries):
        return False
    return all(
        not entry.lane or any(peer.started.get(entry.lane, 0) < entry.turn for peer in entries)
        for entry in entries
    )


def asked_for(what: str, place: str) -> str:
    """What a rank waits for that is about to ask torch for something."""
    return f"{_ASKS}{what or _NAMELESS}{CALLED}{place})"


def alike(labels: Iterable[str]) -> bool:
    """Whether ranks wait for the same. Where each of them was called does not count; what has no name is like
    anything that torch is asked for."""
    meant = {label.partition(CALLED)[0] for label in labels}
    if _ASKS + _NAMELESS in meant and all(label.startswith(_ASKS) for label in meant):
        meant.remove(_ASKS + _NAMELESS)
    return len(meant) <= 1


def disagreement(labels: list[str], names: Sequence[int] | None = None) -> str:
    """The text of a mismatch, the same on every rank. `names`: what the ranks are called, if not 0, 1, …"""
    called = range(len(labels)) if names is None else names
    listed = "; ".join(f"rank {rank} waits for {label}" for rank, label in zip(called, labels, strict=True))
    return (
        f"ranks wait for different things and none can go on: {listed}. Every rank must run the same "
        "program; check branches, loop lengths and early exits that depend on the rank."
        f"{_APART if all(label.startswith(_GATHERS) for label in labels) else ''}"
    )


class Aside:
    """Makes calls to the store that may not return: the rank that keeps it may be stopped. One at a time; as
    long as one is out, others come back at once with nothing."""

    def __init__(self) -> None:
        self._out: threading.Thread | None = None

    @property
    def threads(self) -> list[threading.Thread]:
        return [] if self._out is None else [self._out]

    def call(self, function: Callable[[], T]) -> T | None:
        """What it returns; None also where the store has gone."""
        if self._out is not None and self._out.is_alive():
            return None
        found: list[T] = []

        def ask() -> None:
            with suppress(RuntimeError):
                found.append(function())

        self._out = threading.Thread(target=ask, name="zeroshard store", daemon=True)
        self._out.start()
        self._out.join(_ANSWERS)
        return found[0] if found else None


class StoreLooker(Protocol):
    def look(self) -> None: ...


def look_after(looker: StoreLooker, closed: threading.Event, every: float) -> threading.Thread:
    """Call `looker.look()` from a thread of its own, returned, as long as it lives and is not closed."""
    thread = threading.Thread(
        target=_look_after, args=(weakref.ref(looker), closed, every), name="zeroshard guard", daemon=True
    )
    thread.start()
    return thread


def part_from(threads: Iterable[threading.Thread]) -> None:
    """Wait until threads have ended that were told to, but not for ever.

    [Note: threads inside torch] A thread that comes back from a call into torch after the interpreter has
    ended is ended by it, through a destructor in C++ that may not be left so: the process aborts (SIGABRT in
    place of its exit code). So whoever has such threads parts from them before the end.
    """
    deadline = time.monotonic() + PARTING
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))


def _look_after(looker: weakref.ref[StoreLooker], closed: threading.Event, every: float) -> None:
    while not closed.wait(every):
        held = looker()
        if held is None:
            return
        held.look()
        del held
