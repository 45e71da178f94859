"""Counts what the operations of a step make and cost while it is traced."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from .fused import workspace
from .recurrent import with_workspace
from .traffic import cost


class _Alive:
    """Bytes of the storages that live. Its own object, since finalizers hold it until the last storage is
    gone: a meter, and through it the model, must not live that long."""

    def __init__(self) -> None:
        self.bytes = 0
        self._known: dict[int, int] = {}

    def ignore(self, storage: UntypedStorage) -> None:
        self._known[storage._cdata] = 0

    def meet(self, storage: UntypedStorage) -> bool:
        """Whether it is a new one."""
        if storage._cdata in self._known:
            return False
        self._known[storage._cdata] = storage.nbytes()
        self.bytes += storage.nbytes()
        weakref.finalize(storage, self._part, storage._cdata)
        return True

    def _part(self, key: int) -> None:
        self.bytes -= self._known.pop(key, 0)


class Meter(TorchDispatchMode):
    """Counts the bytes of storages that operations make and that still live, and tells whoever listens of
    every rise."""

    def __init__(self, rise: Callable[[int], None], work: Callable[[int, int], None], gpu: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rise, self._work, self._gpu = rise, work, gpu
        self._alive = _Alive()

    @property
    def now(self) -> int:
        return self._alive.bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = with_workspace(func, args, func(*args, **(kwargs or {})), self._gpu)
        self._work(*cost(func, args, kwargs or {}, result))
        for tensor in tree_flatten(result)[0]:
            if isinstance(tensor, Tensor):
                self._meet(tensor)
        if self._gpu and (passing := workspace(func, args)):
            self._alive.bytes += passing
            self._rise(self.now)
            self._alive.bytes -= passing
        return result

    def ignore(self, tensor: Tensor) -> None:
        """Leave out a tensor, which the caller keeps, and all views of it."""
        self._alive.ignore(tensor.untyped_storage())

    def _meet(self, tensor: Tensor) -> None:
        if self._alive.meet(tensor.untyped_storage()):
            self._rise(self.now)
