"""Lends state that rests on the disk to host memory: read ahead, updated, written behind.

A *page* is one offload group's state: a segment of the scratch file. A *frame* is host memory that one page
at a time may lie in. Frames are few and of exact size; whoever needs one while all are taken waits, which
bounds host memory. A page's life: AWAY → COMING → HERE → LEAVING → AWAY. A frame that came free still holds
what was written from it, so a page that comes back soon is not read again.

Weights that rest on the disk are read for a forward or backward through a bounded ring of pinned blocks:
several requests in flight, each block on its way to the device while the next is read."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from zeroshard.errors import TierError
from zeroshard.kernels import Workers, raw
from zeroshard.layout.specs import BLOCKS, GRAIN, LANES, REQUEST

from .scratch_file import TierStorage, grains
from .staging import CopyMark, StagingRing, TierCopies


class PageState(Enum):
    AWAY = "away"
    COMING = "coming"
    HERE = "here"
    LEAVING = "leaving"


class PageFrame:
    """Page-aligned host memory for one page."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, max(nbytes, GRAIN), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= 2 << 20 and hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self.bytes = memoryview(self._map)
        self.holds: DiskPage | None = None  # whose contents it has, as they are on the disk


class DiskPage:
    """A segment of the scratch file, and where its contents are now."""

    def __init__(self, label: str, offset: int, nbytes: int) -> None:
        self.label, self.offset, self.nbytes = label, offset, nbytes
        self.rest = PageState.AWAY
        self.frame: PageFrame | None = None
        self.mending = threading.Lock()  # neighbours in one grain are written one after another


class DiskPager:
    """Moves pages between a scratch file and `count` frames. `delay` is called before every request; tests
    put random sleeps there. `failed` is told of the first error, with the page's label."""

    def __init__(
        self, scratch: TierStorage, count: int, nbytes: int, delay: Callable[[], None] | None = None
    ) -> None:
        self.scratch, self._delay = scratch, delay
        self.nbytes = count * max(grains(nbytes), GRAIN)
        self._frames = [PageFrame(grains(nbytes)) for _ in range(count)]
        self._free: deque[PageFrame] = deque(self._frames)
        self._changed = threading.Condition()
        self._broken: tuple[str, BaseException] | None = None
        self._lanes = Workers(LANES)
        self.failed: Callable[[str, BaseException], None] = lambda label, error: None

    # ------------------------------------------------------------------ the life of a page

    def fetch(self, page: DiskPage) -> None:
        """Start to bring a page in; waits for a frame, and for an earlier write of the page."""
        with self._changed:
            while page.rest is not PageState.AWAY or not self._free:
                self._pause()
            frame = next((b for b in self._free if b.holds is page), self._free[0])
            self._free.remove(frame)
            page.frame = frame
            known = frame.holds is page
            frame.holds = None
            page.rest = PageState.HERE if known else PageState.COMING
        if not known:
            self._transfer(page, self.scratch.read, self._arrived)

    def memory(self, page: DiskPage) -> Tensor:
        """The bytes of a page that was fetched, once they are here."""
        with self._changed:
            while page.rest is not PageState.HERE:
                self._pause()
            assert page.frame is not None
            return page.frame.memory[: page.nbytes]

    def store(self, page: DiskPage) -> None:
        """Start to write a page; its frame comes free when that is done."""
        with self._changed:
            assert page.rest is PageState.HERE
            page.rest = PageState.LEAVING
        self._transfer(page, self.scratch.write, self._left)

    def drop(self, page: DiskPage) -> None:
        """Let a page go that was only read."""
        assert page.rest is PageState.HERE
        self._left(page)

    def settle(self, page: DiskPage) -> None:
        """Wait until what was written is on the disk."""
        with self._changed:
            while page.rest is not PageState.AWAY:
                self._pause()

    # ------------------------------------------------------------------ some bytes of a page

    def peek(self, page: DiskPage, at: int, nbytes: int) -> Tensor:
        """A copy of some bytes of a page that is AWAY."""
        self.settle(page)
        first = at // GRAIN * GRAIN
        bounce = memoryview(mmap.mmap(-1, max(grains(at + nbytes - first), GRAIN)))
        self._now(page, self.scratch.read, bounce[: grains(at + nbytes - first)], first)
        copy = bytearray(bounce[at - first : at - first + nbytes])
        return torch.frombuffer(copy, dtype=torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8)

    def poke(self, page: DiskPage, at: int, values: Tensor) -> None:
        """Overwrite some bytes of a page that is AWAY."""
        nbytes = values.nbytes
        self.settle(page)
        if not nbytes:
            return
        values = raw(values.contiguous())
        first = at // GRAIN * GRAIN
        bounce = memoryview(mmap.mmap(-1, grains(at + nbytes - first)))
        with page.mending:
            if at != first or len(bounce) != nbytes:
                self._now(page, self.scratch.read, bounce, first)
            torch.frombuffer(bounce, dtype=torch.uint8)[at - first : at - first + nbytes].copy_(values)
            self._now(page, self.scratch.write, bounce, first)
        with self._changed:
            for frame in self._frames:
                if frame.holds is page:
                    frame.holds = None

    @staticmethod
    def _now(page: DiskPage, move: Callable[[memoryview, int], None], memory: memoryview, at: int) -> None:
        """Move some bytes of a page in the caller's thread."""
        try:
            move(memory, page.offset + at)
        except OSError as error:
            raise _failed(page.label, error) from error

    # ------------------------------------------------------------------ requests

    def _transfer(
        self, page: DiskPage, move: Callable[[memoryview, int], None], then: Callable[[DiskPage], None]
    ) -> None:
        starts = range(0, page.nbytes, REQUEST)
        if not starts:
            then(page)
            return
        left = [len(starts)]
        assert page.frame is not None
        for start in starts:
            chunk = page.frame.bytes[start : min(start + REQUEST, page.nbytes)]
            moving = partial(move, chunk, page.offset + start)
            self.submit(page, partial(self._request, page, moving, left, then))

    def submit(self, page: DiskPage, request: Callable[[], None]) -> None:
        """Run something that concerns a page on one of the lanes, after what was submitted before."""
        self._lanes.submit(partial(self._guarded, page, request))

    def _guarded(self, page: DiskPage, request: Callable[[], None]) -> None:
        try:
            if self._delay is not None:
                self._delay()
            request()
        except BaseException as error:  # it must reach the training thread, whatever it is
            self.fail(page.label, error)

    def _request(
        self, page: DiskPage, move: Callable[[], None], left: list[int], then: Callable[[DiskPage], None]
    ) -> None:
        move()
        with self._changed:
            left[0] -= 1
            last = left[0] == 0
        if last:
            then(page)

    def _arrived(self, page: DiskPage) -> None:
        with self._changed:
            page.rest = PageState.HERE
            self._changed.notify_all()

    def _left(self, page: DiskPage) -> None:
        with self._changed:
            assert page.frame is not None
            page.frame.holds = page
            self._free.append(page.frame)
            page.frame, page.rest = None, PageState.AWAY
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


@dataclass(frozen=True)
class PageSegment:
    """Weights at the beginning of a page: `nbytes`, and where in them each of some tensors begins."""

    page: DiskPage
    nbytes: int
    starts: Sequence[int]


class WeightStream:
    """Brings weights from pages to the device. Shares the lanes of `paging`: requests run in the order in
    which they were made, so a read comes after the write of the same page that was asked for before."""

    def __init__(self, paging: DiskPager, copies: TierCopies, longest: int) -> None:
        """`longest`: bytes of the longest segment."""
        self._paging, self._copies = paging, copies
        self._ring = StagingRing(BLOCKS, min(REQUEST, grains(longest)), copies.device)
        self.nbytes = self._ring.nbytes

    def start(self, segments: Sequence[PageSegment], targets: Sequence[Sequence[Tensor]]) -> WeightArrival:
        """Begin to fill `targets`, flat tensors on the device, from their segments."""
        requests = [
            (segment, [tensor.view(torch.uint8) for tensor in tensors], at)
            for segment, tensors in zip(segments, targets, strict=True)
            for at in range(0, segment.nbytes, REQUEST)
        ]
        arrival = WeightArrival(self._paging, len(requests))
        after = self._copies.here()  # the buffer may still be read by what was launched before
        for segment, tensors, at in requests:
            task = partial(self._read, segment, tensors, at, after, arrival)
            self._paging.submit(segment.page, task)
        return arrival

    def _read(
        self,
        segment: PageSegment,
        tensors: Sequence[Tensor],
        at: int,
        after: CopyMark,
        arrival: WeightArrival,
    ) -> None:
        page, stop = segment.page, min(at + REQUEST, segment.nbytes)
        self._paging.settle(page)
        block, mark = self._ring.take(), CopyMark()
        try:
            self._paging.scratch.read(block.bytes[: grains(stop - at)], page.offset + at)
            to, of = [], []
            for tensor, start in zip(tensors, segment.starts, strict=True):
                low, high = max(at, start), min(stop, start + tensor.numel())
                if low < high:
                    to.append(tensor[low - start : high - start])
                    of.append(block.memory[low - at : high - at])
            mark = self._copies.back(to, of, after)
        finally:
            self._ring.give(block, mark)
        arrival.one(mark)


class WeightArrival:
    """Weights on their way, as work."""

    def __init__(self, paging: DiskPager, count: int) -> None:
        self._paging, self._left, self._marks = paging, count, list[CopyMark]()
        self._lock, self._all = threading.Lock(), threading.Event()
        if not count:
            self._all.set()

    def one(self, mark: CopyMark) -> None:
        with self._lock:
            self._marks.append(mark)
            self._left -= 1
            if not self._left:
                self._all.set()

    def poll(self) -> bool:
        return self._all.is_set() and all(mark.passed() for mark in self._marks)

    def wait(self) -> None:
        while not self._all.wait(0.5):
            self._paging.check()
        for mark in self._marks:
            mark.wait_on_device()
