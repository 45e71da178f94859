"""Counts what the operations of a step make and cost while it is traced."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from .fused import workspace
from .recurrent import with_workspace
from .traffic import cost


class Meter(TorchDispatchMode):
    """Counts the bytes of storages that operations make and that still live, and tells whoever listens of
    every rise."""

    def __init__(self, rise: Callable[[int], None], work: Callable[[int, int], None], gpu: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now, self._rise, self._work, self._gpu = 0, rise, work, gpu
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = with_workspace(func, args, func(*args, **(kwargs or {})), self._gpu)
        self._work(*cost(func, args, kwargs or {}, result))
        for tensor in tree_flatten(result)[0]:
            if isinstance(tensor, Tensor):
                self._meet(tensor)
        if self._gpu and (passing := workspace(func, args)):
            self.now += passing
            self._rise(self.now)
            self.now -= passing
        return result

    def ignore(self, tensor: Tensor) -> None:
        """Leave out a tensor, which the caller keeps, and all views of it."""
        self._known[tensor.untyped_storage()._cdata] = 0

    def _meet(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            weakref.finalize(storage, self._part, storage._cdata)
            self._rise(self.now)

    def _part(self, key: int) -> None:
        self.now -= self._known.pop(key, 0)
