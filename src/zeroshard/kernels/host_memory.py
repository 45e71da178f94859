"""Places state in host memory so that a kernel over several arrays at once runs at the memory's speed.

Arrays that start at the same offset within a page share cache sets and look alike to the processor's store
forwarding and way prediction; a kernel over four of them then runs at half speed or less. So each array of a
group starts at another offset. Huge pages spare address translation and make the first touch cheap."""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable, Sequence

import torch

_PAGE = 4096
_LINE = 64
_HUGE = 2 << 20


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, its own memory. Not by `view` alone: one element is contiguous
    whatever its stride, that of a transposed tensor too, and a view of another width is refused then."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _place(numel: int, dtypes: Sequence[torch.dtype]) -> tuple[list[int], int]:
    """The offset of each array in one mapping, and the size of the mapping."""
    apart = _PAGE // max(1, len(dtypes)) // _LINE * _LINE
    offsets, end = [], 0
    for index, dtype in enumerate(dtypes):
        offset = end + (index * apart - end) % _PAGE
        offsets.append(offset)
        end = offset + numel * dtype.itemsize
    return offsets, end


def allocate(numel: int, dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """Zeroed flat tensors of `numel` elements, one for each dtype, in one mapping that is freed with the last
    of them. At most a page for each tensor is spent on placement."""
    offsets, size = _place(numel, dtypes)
    if numel == 0 or not hasattr(mmap, "MAP_ANONYMOUS"):
        return [torch.zeros(numel, dtype=dtype, device="cpu") for dtype in dtypes]
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return [
        torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset)
        for offset, dtype in zip(offsets, dtypes, strict=True)
    ]


def trim() -> None:
    """Give freed memory back to the system. glibc keeps what was freed below a block in use, and no tensor of
    the same size fits there again once a small object has taken a part of it. Other libraries have no such
    call, nor that need."""
    give_back = _trimmer()
    if give_back is not None:
        give_back(0)


@functools.cache
def _trimmer() -> Callable[[int], int] | None:
    try:
        found = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    found.argtypes, found.restype = [ctypes.c_size_t], ctypes.c_int
    return found
