"""Who has the interpreter while a thread writes beside training.

Python in one thread stops the others for up to 5 ms each time they ask. A model has thousands of tensors, and
loops over them in the writing thread would hold training up for as long as they run. So these loops give way
after some microseconds, until somebody waits for the save.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

TURN = 50e-6  # seconds at least before the next: measured, training then hardly slows down

_Item = TypeVar("_Item")


class _Here(threading.local):
    hurried: Callable[[], bool] | None = None


_here = _Here()


@contextmanager
def beside(hurried: Callable[[], bool]) -> Iterator[None]:
    """In here `gently` gives way to other threads, except while `hurried` says that they wait."""
    _here.hurried = hurried
    try:
        yield
    finally:
        _here.hurried = None


def gently(items: Iterable[_Item]) -> Iterable[_Item]:
    """`items`, with the interpreter given to other threads in between where this one works beside them."""
    return items if _here.hurried is None else _giving_way(items, _here.hurried)


def _giving_way(items: Iterable[_Item], hurried: Callable[[], bool]) -> Iterator[_Item]:
    """A turn is as long as the last absence, so that a loop takes twice as long at most, whatever the others
    do."""
    since, turn = time.perf_counter(), TURN
    for item in items:
        yield item
        if (now := time.perf_counter()) - since > turn and not hurried():
            time.sleep(0)
            since = time.perf_counter()
            turn = max(TURN, since - now)
