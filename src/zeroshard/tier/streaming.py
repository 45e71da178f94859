"""Weights that rest on the disk, read for a forward or backward: through a bounded ring of pinned blocks,
several requests in flight, each block on its way to the device while the next is read."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from zeroshard.count.shapes import BLOCKS, REQUEST

from .copies import Copies, Mark
from .paging import Page, Paging
from .ring import Ring
from .scratch import grains


@dataclass(frozen=True)
class Stretch:
    """Weights at the beginning of a page: `nbytes`, and where in them each of some tensors begins."""

    page: Page
    nbytes: int
    starts: Sequence[int]


class Streaming:
    """Brings weights from pages to the device. Shares the lanes of `paging`: requests run in the order in
    which they were made, so a read comes after the write of the same page that was asked for before."""

    def __init__(self, paging: Paging, copies: Copies, longest: int) -> None:
        """`longest`: bytes of the longest stretch."""
        self._paging, self._copies = paging, copies
        self._ring = Ring(BLOCKS, min(REQUEST, grains(longest)), copies.device)
        self.nbytes = self._ring.nbytes

    def start(self, stretches: Sequence[Stretch], targets: Sequence[Sequence[Tensor]]) -> Arrival:
        """Begin to fill `targets`, flat tensors on the device, from their stretches."""
        requests = [
            (stretch, [tensor.view(torch.uint8) for tensor in tensors], at)
            for stretch, tensors in zip(stretches, targets, strict=True)
            for at in range(0, stretch.nbytes, REQUEST)
        ]
        arrival = Arrival(self._paging, len(requests))
        after = self._copies.here()  # the buffer may still be read by what was launched before
        for stretch, tensors, at in requests:
            task = partial(self._read, stretch, tensors, at, after, arrival)
            self._paging.submit(stretch.page, task)
        return arrival

    def _read(
        self, stretch: Stretch, tensors: Sequence[Tensor], at: int, after: Mark, arrival: Arrival
    ) -> None:
        page, stop = stretch.page, min(at + REQUEST, stretch.nbytes)
        self._paging.settle(page)
        block, mark = self._ring.take(), Mark()
        try:
            self._paging.scratch.read(block.bytes[: grains(stop - at)], page.offset + at)
            to, of = [], []
            for tensor, start in zip(tensors, stretch.starts, strict=True):
                low, high = max(at, start), min(stop, start + tensor.numel())
                if low < high:
                    to.append(tensor[low - start : high - start])
                    of.append(block.memory[low - at : high - at])
            mark = self._copies.back(to, of, after)
        finally:
            self._ring.give(block, mark)
        arrival.one(mark)


class Arrival:
    """Weights on their way, as work."""

    def __init__(self, paging: Paging, count: int) -> None:
        self._paging, self._left, self._marks = paging, count, list[Mark]()
        self._lock, self._all = threading.Lock(), threading.Event()
        if not count:
            self._all.set()

    def one(self, mark: Mark) -> None:
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
