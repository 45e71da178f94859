"""Bytes of tensors, counted independently of what the library books."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode


def tensor_bytes() -> tuple[int, dict[int, int]]:
    """Bytes of all storages that tensors of this process refer to: in private memory, and by inode in
    segments that several ranks map. To count a segment once, merge the second parts of all ranks.

    Found by walking Python's objects, and by nothing that the library says of itself. Not counted are control
    areas, a fixed 0.4 MB a rank in which transports leave one another notes.
    """
    gc.collect()
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        # By type: `isinstance` would ask strange objects for their class, and some of torch's warn when
        # asked.
        if issubclass(type(thing), Tensor) and not issubclass(type(thing), FakeTensor) and not thing.is_meta:
            storage = _storage(thing)
            storages[storage.data_ptr()] = max(storage.nbytes(), storages.get(storage.data_ptr(), 0))
    storages = _outermost(storages)
    shared = _shared_segments()
    private = sum(size for at, size in storages.items() if at not in shared)
    return private, {shared[at]: size for at, size in storages.items() if shared.get(at)}


def _outermost(storages: dict[int, int]) -> dict[int, int]:
    """Without storages that are a part of another one's memory."""
    kept, end = {}, 0
    for at, size in sorted(storages.items()):
        if at + size > end:
            kept[at] = size
            end = at + size
    return kept


def _shared_segments() -> dict[int, int]:
    """Address → inode of every segment of shared memory that this process maps; 0 for control areas."""
    found = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *name = line.split(None, 5)
        if name and name[0].startswith("/memfd:"):
            found[int(span.split("-")[0], 16)] = 0 if "zeroshard control" in name[0] else int(inode)
    return found


def assert_bytes(got: float, want: float, within: float, what: str) -> None:
    """`got` within a fraction of `want`; the message has both and their ratio."""
    if not abs(got - want) <= within * want:
        wanted = f"expected {want:,.0f} within {within:.1%}, off by {got / want - 1:+.2%}"
        raise AssertionError(f"{what}: {got:,.0f} bytes, {wanted}")


class PeakBytes(TorchDispatchMode):
    """While active, counts the bytes of tensors that operations make, and the most that lived at one time.

    with PeakBytes() as peak:
        loss.backward()
    assert peak.most < 2**20
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage(tensor)._cdata for tensor in _flat((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _flat(result):
            self._meet(_storage(tensor), given)
        return result

    def _meet(self, storage: UntypedStorage, given: set[int]) -> None:
        """Count a storage that an operation made: not one that it was given, to write to or to view."""
        key = storage._cdata
        if key not in self._known and key not in given:
            self._known[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._part, key)

    def _part(self, key: int) -> None:
        self.now -= self._known.pop(key, 0)


def _storage(tensor: Tensor) -> UntypedStorage:
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


def _flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _flat(item)
