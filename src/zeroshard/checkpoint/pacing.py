"""Keeps a background copy out of training's way: turns at the interpreter, and what is copied next.

Python in one thread stops the others for up to 5 ms each time they ask. A model has thousands of tensors, and
loops over them in the writing thread would hold training up for as long as they run. So these loops give way
after some microseconds, until somebody waits for the save. Copied next is what somebody waits for, to change
it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

TURN = 50e-6  # seconds at least before the next: measured, training then hardly slows down

_Item = TypeVar("_Item")


class _ThreadTurn(threading.local):
    hurried: Callable[[], bool] | None = None


_here = _ThreadTurn()


@contextmanager
def beside(hurried: Callable[[], bool]) -> Iterator[None]:
    """In here `gently` gives way to other threads, except while `hurried` says that they wait."""
    _here.hurried = hurried
    try:
        yield
    finally:
        _here.hurried = None


def gently(items: Iterable[_Item]) -> Iterator[_Item]:
    """`items`, with the interpreter given to other threads in between where this one works beside them. A
    turn is as long as the last absence, so that a loop takes twice as long at most, whatever the others
    do."""
    hurried = _here.hurried
    if hurried is None:
        yield from items
        return
    since, turn = time.perf_counter(), TURN
    for item in items:
        yield item
        if (now := time.perf_counter()) - since > turn and not hurried():
            time.sleep(0)
            since = time.perf_counter()
            turn = max(TURN, since - now)


_Job = TypeVar("_Job")


class CopyProgress:
    """Of one copy. One thread copies; any number of others wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._left: dict[int, int] | None = None  # jobs by the id of the owner; None: not known yet
        self._wanted: dict[int, None] = {}  # ids of owners who wait, the first one first
        self._waiting = 0
        self._over = False

    @property
    def hurried(self) -> bool:
        """Whether anybody stands still until it is done."""
        return self._waiting > 0

    @contextmanager
    def hurry(self) -> Iterator[None]:
        """Somebody waits, for the length of the block."""
        with self._changed:
            self._waiting += 1
        try:
            yield
        finally:
            with self._changed:
                self._waiting -= 1

    def wait(self) -> None:
        """Until all is copied, or will never be."""
        self._wait_for(lambda: self._over)

    def wait_of(self, owner: object) -> None:
        """Until all that belongs to `owner` is copied, or will never be."""
        key = id(owner)

        def done() -> bool:
            if self._over or (self._left is not None and not self._left.get(key)):
                self._wanted.pop(key, None)
                return True
            self._wanted[key] = None
            return False

        self._wait_for(done)

    def _wait_for(self, done: Callable[[], bool]) -> None:
        with self.hurry(), self._changed:
            self._changed.wait_for(done)

    def take_turns(self, jobs: Iterable[tuple[object, _Job]]) -> Iterator[_Job]:
        """The jobs of all owners, wanted ones first; what has no owner (None) last. A job is done when the
        next one is asked for."""
        queues: dict[int, deque[_Job]] = {}
        for owner, job in jobs:
            queues.setdefault(id(owner), deque()).append(job)
        if (rest := queues.pop(id(None), None)) is not None:
            queues[id(None)] = rest
        with self._changed:
            self._left = {key: len(queue) for key, queue in queues.items()}
            self._changed.notify_all()
        while queues:
            with self._changed:
                key = next((key for key in self._wanted if key in queues), next(iter(queues)))
            yield queues[key].popleft()
            if not queues[key]:
                del queues[key]
            with self._changed:
                self._left[key] -= 1
                if not self._left[key]:
                    self._changed.notify_all()

    def end(self) -> None:
        """Nothing is read any more."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
