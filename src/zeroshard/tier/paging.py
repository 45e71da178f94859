"""State that rests on the disk and is lent to host memory: read ahead, updated, written behind.

A *page* is one part's state: a stretch of the scratch file. A *berth* is host memory that one page at a time
may lie in. Berths are few and of exact size; whoever needs one while all are taken waits, which bounds host
memory. A page's life: AWAY → COMING → HERE → LEAVING → AWAY. A berth that came free still holds what was
written from it, so a page that comes back soon is not read again.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from zeroshard.count.shapes import GRAIN, LANES, REQUEST
from zeroshard.errors import TierError
from zeroshard.native import Workers

from .scratch import Scratch, grains


class Rest(Enum):
    AWAY = "away"
    COMING = "coming"
    HERE = "here"
    LEAVING = "leaving"


class Berth:
    """Page-aligned host memory for one page."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, max(nbytes, GRAIN), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= 2 << 20 and hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self.bytes = memoryview(self._map)
        self.holds: Page | None = None  # whose contents it has, as they are on the disk


class Page:
    """A stretch of the scratch file, and where its contents are now."""

    def __init__(self, label: str, offset: int, nbytes: int) -> None:
        self.label, self.offset, self.nbytes = label, offset, nbytes
        self.rest = Rest.AWAY
        self.berth: Berth | None = None
        self.mending = threading.Lock()  # neighbours in one grain are written one after another


class Paging:
    """Moves pages between a scratch file and `count` berths. `delay` is called before every request; tests
    put random sleeps there. `failed` is told of the first error, with the page's label."""

    def __init__(
        self, scratch: Scratch, count: int, nbytes: int, delay: Callable[[], None] | None = None
    ) -> None:
        self.scratch, self._delay = scratch, delay
        self.nbytes = count * max(grains(nbytes), GRAIN)
        self._berths = [Berth(grains(nbytes)) for _ in range(count)]
        self._free: deque[Berth] = deque(self._berths)
        self._changed = threading.Condition()
        self._broken: tuple[str, BaseException] | None = None
        self._lanes = Workers(LANES)
        self.failed: Callable[[str, BaseException], None] = lambda label, error: None

    # ------------------------------------------------------------------ the life of a page

    def fetch(self, page: Page) -> None:
        """Start to bring a page in; waits for a berth, and for an earlier write of the page."""
        with self._changed:
            while page.rest is not Rest.AWAY or not self._free:
                self._pause()
            berth = next((b for b in self._free if b.holds is page), self._free[0])
            self._free.remove(berth)
            page.berth = berth
            known = berth.holds is page
            berth.holds = None
            page.rest = Rest.HERE if known else Rest.COMING
        if not known:
            self._transfer(page, self.scratch.read, self._arrived)

    def memory(self, page: Page) -> Tensor:
        """The bytes of a page that was fetched, once they are here."""
        with self._changed:
            while page.rest is not Rest.HERE:
                self._pause()
            assert page.berth is not None
            return page.berth.memory[: page.nbytes]

    def store(self, page: Page) -> None:
        """Start to write a page; its berth comes free when that is done."""
        with self._changed:
            assert page.rest is Rest.HERE
            page.rest = Rest.LEAVING
        self._transfer(page, self.scratch.write, self._left)

    def drop(self, page: Page) -> None:
        """Let a page go that was only read."""
        assert page.rest is Rest.HERE
        self._left(page)

    def settle(self, page: Page) -> None:
        """Wait until what was written is on the disk."""
        with self._changed:
            while page.rest is not Rest.AWAY:
                self._pause()

    # ------------------------------------------------------------------ some bytes of a page

    def peek(self, page: Page, at: int, nbytes: int) -> Tensor:
        """A copy of some bytes of a page that is AWAY."""
        self.settle(page)
        first = at // GRAIN * GRAIN
        bounce = memoryview(mmap.mmap(-1, max(grains(at + nbytes - first), GRAIN)))
        self._now(page, self.scratch.read, bounce[: grains(at + nbytes - first)], first)
        copy = bytearray(bounce[at - first : at - first + nbytes])
        return torch.frombuffer(copy, dtype=torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8)

    def poke(self, page: Page, at: int, values: Tensor) -> None:
        """Overwrite some bytes of a page that is AWAY."""
        nbytes = values.nbytes
        self.settle(page)
        if not nbytes:
            return
        values = values.contiguous().view(-1).view(torch.uint8)
        first = at // GRAIN * GRAIN
        bounce = memoryview(mmap.mmap(-1, grains(at + nbytes - first)))
        with page.mending:
            if at != first or len(bounce) != nbytes:
                self._now(page, self.scratch.read, bounce, first)
            torch.frombuffer(bounce, dtype=torch.uint8)[at - first : at - first + nbytes].copy_(values)
            self._now(page, self.scratch.write, bounce, first)
        with self._changed:
            for berth in self._berths:
                if berth.holds is page:
                    berth.holds = None

    @staticmethod
    def _now(page: Page, move: Callable[[memoryview, int], None], memory: memoryview, at: int) -> None:
        """Move some bytes of a page in the caller's thread."""
        try:
            move(memory, page.offset + at)
        except OSError as error:
            raise _failed(page.label, error) from error

    # ------------------------------------------------------------------ requests

    def _transfer(
        self, page: Page, move: Callable[[memoryview, int], None], then: Callable[[Page], None]
    ) -> None:
        starts = range(0, page.nbytes, REQUEST)
        if not starts:
            then(page)
            return
        left = [len(starts)]
        assert page.berth is not None
        for start in starts:
            piece = page.berth.bytes[start : min(start + REQUEST, page.nbytes)]
            moving = partial(move, piece, page.offset + start)
            self.submit(page, partial(self._request, page, moving, left, then))

    def submit(self, page: Page, request: Callable[[], None]) -> None:
        """Run something that concerns a page on one of the lanes, after what was submitted before."""
        self._lanes.submit(partial(self._guarded, page, request))

    def _guarded(self, page: Page, request: Callable[[], None]) -> None:
        try:
            if self._delay is not None:
                self._delay()
            request()
        except BaseException as error:  # it must reach the training thread, whatever it is
            self.fail(page.label, error)

    def _request(
        self, page: Page, move: Callable[[], None], left: list[int], then: Callable[[Page], None]
    ) -> None:
        move()
        with self._changed:
            left[0] -= 1
            last = left[0] == 0
        if last:
            then(page)

    def _arrived(self, page: Page) -> None:
        with self._changed:
            page.rest = Rest.HERE
            self._changed.notify_all()

    def _left(self, page: Page) -> None:
        with self._changed:
            assert page.berth is not None
            page.berth.holds = page
            self._free.append(page.berth)
            page.berth, page.rest = None, Rest.AWAY
            self._changed.notify_all()

    def _pause(self) -> None:
        """Wait for a change, with the lock held."""
        self.check()
        self._changed.wait(1.0)

    def check(self) -> None:
        """Raise what failed in a lane."""
        if self._broken is not None:
            raise _failed(*self._broken) from self._broken[1]

    def fail(self, label: str, error: BaseException) -> None:
        """Keep an error, and wake whoever waits for what will not come."""
        with self._changed:
            first = self._broken is None
            if first:
                self._broken = (label, error)
            self._changed.notify_all()
        if first:
            self.failed(label, error)

    def close(self) -> None:
        """After what was begun; the file goes."""
        self._lanes.close()
        self.scratch.close()


def _failed(label: str, error: BaseException) -> TierError:
    return TierError(f"the disk tier failed at {label}: {type(error).__name__}: {error}")
