"""Finds ranks that start different operations, or the same ones in another order, through the store.

NCCL pairs operations by their order alone. Two ranks that gather different units of one size would get rows
of both, and no error. So each rank keeps a digest of the labels of all operations that it has started, and
writes it into the store from time to time, with their number. A rank compares its own digest at that number
with its left neighbour's: if all neighbours agree, all ranks do. Nothing waits for it, so that a difference
is found out some seconds later; then no rank starts another operation."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any
from zlib import crc32

from zeroshard.errors import RankError

from .waits import look_after, part_from

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

EVERY = 2.0  # seconds between two looks
SLOWER = 0.005  # more for each rank: all ask one store
KEPT = 16384  # operations whose digests are known
TOLD = 256  # operations that are named when ranks disagree
PATIENCE = 10.0  # for the neighbour to name its own


class OperationOrder:
    """The operations that this rank has started."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._left = store, rank, (rank - 1) % size
        self.count = self._digest = 0
        self._past: deque[tuple[str, int]] = deque(maxlen=KEPT)  # labels and digests, the last at the end
        self._open: deque[tuple[int, int]] = deque()  # what the neighbour wrote and this rank has not reached
        self._asked: tuple[int, float] | None = None  # where digests differ, and since when that is known
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.trouble: str | None = None
        self._guards = [look_after(self, self._closed, EVERY + SLOWER * size)] if size > 1 else []

    def add(self, label: str) -> None:
        """An operation is about to start."""
        if self.trouble is not None:
            raise RankError(self.trouble)
        with self._lock:
            self._digest = crc32(label.encode(), self._digest)
            self.count += 1
            self._past.append((label, self._digest))

    def close(self) -> None:
        self._closed.set()
        part_from(self._guards)

    # What the guard does

    def look(self) -> None:
        if self.trouble is not None:
            return
        try:
            self._look()
        except RuntimeError:  # the store has gone: the run is at its end, or others say why
            self._closed.set()

    def _look(self) -> None:
        with self._lock:
            mine = [self.count, self._digest]
        self._store.set(f"order/{self._rank}", json.dumps(mine))
        verdict = self._read("order/verdict")
        if verdict is not None:
            self.trouble = str(verdict)
        elif self._read("order/asked") is not None:
            self._name_mine()
        told = self._read(f"order/{self._left}")
        if told is not None and (not self._open or self._open[-1] != tuple(told)):
            self._open.append((told[0], told[1]))
        if self._asked is None:
            self._compare()
        else:
            self._decide(*self._asked)

    def _read(self, key: str) -> Any:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _compare(self) -> None:
        """All that the neighbour wrote and this rank has reached meanwhile."""
        while self._open and self._open[0][0] <= self.count:
            count, digest = self._open.popleft()
            mine = self._at(count)
            if mine is not None and mine[1] != digest:
                self._store.set("order/asked", json.dumps(self._rank))
                self._name_mine()
                self._asked = count, time.monotonic()
                return

    def _at(self, count: int) -> tuple[str, int] | None:
        """Label and digest of an operation by its number, as long as they are known."""
        with self._lock:
            back = self.count - count
            return self._past[-1 - back] if 0 <= back < len(self._past) else None

    def _name_mine(self) -> None:
        with self._lock:
            first = self.count - min(len(self._past), TOLD) + 1
            labels = [label for label, _ in list(self._past)[-TOLD:]]
        self._store.set(f"order/{self._rank}/labels", json.dumps([first, labels]))

    def _decide(self, count: int, since: float) -> None:
        """Say what differs, when the neighbour has named its operations."""
        theirs = self._read(f"order/{self._left}/labels")
        if theirs is None and time.monotonic() - since < PATIENCE:
            return
        mine = json.dumps(self._difference(count, *(theirs or (0, []))))
        # Several may find out. The first text is everybody's.
        self.trouble = json.loads(self._store.compare_set("order/verdict", "", mine))

    def _difference(self, count: int, first: int, theirs: list[str]) -> str:
        what = f"before their operation {count}"
        for number, label in enumerate(theirs, first):
            mine = self._at(number)
            if mine is not None and mine[0] != label:
                what = f"rank {self._left} started {label} where rank {self._rank} started {mine[0]}"
                break
        return (
            f"ranks have gone different ways over NCCL, and what they got may be wrong: {what}. Every rank "
            "must run the same program; check branches, loop lengths and early exits that depend on the rank."
            " At stage 3 a unit that some ranks do not use cannot be gathered over NCCL: let all ranks call "
            "it, or make it a part of a larger unit (units=)."
        )
