"""A bounded ring of pinned staging memory. Whoever needs a stage when all are in use waits: that is the
back-pressure which keeps host memory within the plan."""

from __future__ import annotations

import threading
from collections import deque

import torch
from torch import Tensor

from .copies import Mark
from .pinned import pinned


class Stage:
    """One place in the ring: `memory` is flat bytes.

    Views are made once. Torch gives the interpreter away to make one, and where the training thread wants it,
    too, each costs that thread more than the view itself.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._views: dict[tuple[torch.dtype, int, int], Tensor] = {}

    @property
    def bytes(self) -> memoryview:
        return memoryview(self.memory.numpy().data)

    def view(self, dtype: torch.dtype, numel: int, offset: int = 0) -> Tensor:
        found = self._views.get((dtype, numel, offset))
        if found is None:
            size = numel * dtype.itemsize
            found = self._views[dtype, numel, offset] = self.memory[offset : offset + size].view(dtype)
        return found


class Ring:
    """`count` stages of `nbytes` each."""

    def __init__(self, count: int, nbytes: int, device: torch.device) -> None:
        nbytes = -(-nbytes // 64) * 64
        self.nbytes = nbytes * count
        self._memory = pinned(self.nbytes, device)
        self._free: deque[tuple[Stage, Mark]] = deque(
            (Stage(self._memory[i * nbytes : (i + 1) * nbytes]), Mark()) for i in range(count)
        )
        self._changed = threading.Condition()

    def take(self) -> Stage:
        """A stage whose last copy is done; waits for one if none is free."""
        with self._changed:
            while not self._free:
                self._changed.wait()
            stage, mark = self._free.popleft()
        mark.wait_on_host()
        return stage

    def give(self, stage: Stage, after: Mark) -> None:
        """Give a stage back; it is used again when the copy that `after` marks is done."""
        with self._changed:
            self._free.append((stage, after))
            self._changed.notify()
