"""The one sum: pieces of all ranks added in rank order. Every transport that adds on the host uses it.

It goes through the operands in chunks that stay in the cache, so that widening, adding and scaling read and
write main memory once, and needs no temporary of the operands' size. With a chunk-sized accumulator the
result may overwrite any one of the operands.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

__all__ = ["sum_pieces"]

# 2^16 fp32 values are 256 KiB a thread: operands and result of one chunk stay in the second-level cache.
_CHUNK = 1 << 16
# A copy to another device costs a fixed ~10 us, so chunks that leave the host are large.
_CHUNK_AWAY = 1 << 22

_scratch = threading.local()


def sum_pieces(out: torch.Tensor, sources: Sequence[torch.Tensor], scale: float) -> None:
    """`out = scale * (((s0 + s1) + s2) + ...)`, added in fp32, or in fp64 where sources are fp64.

    All are flat and of one length; `out` may be one of the sources, and of another dtype or device.
    """
    numel = out.numel()
    if numel == 0:
        return
    dtype = torch.float64 if sources[0].dtype == torch.float64 else torch.float32
    away = out.device.type != "cpu"
    chunk = min(_CHUNK_AWAY if away else _CHUNK * torch.get_num_threads(), numel)
    direct = out.dtype == dtype and not away and _may_accumulate_in(out, sources)
    total = out if direct else _accumulator("total", chunk, dtype)
    for start in range(0, numel, chunk):
        stop = min(start + chunk, numel)
        part = total[start:stop] if direct else total[: stop - start]
        _add([source[start:stop] for source in sources], part)
        if scale != 1.0:
            part.mul_(scale)
        if not direct:
            out[start:stop].copy_(part)


def _add(sources: Sequence[torch.Tensor], total: torch.Tensor) -> None:
    """`total` = the sources in order."""
    if sources[0].dtype == total.dtype:
        if len(sources) == 1:
            if total.data_ptr() != sources[0].data_ptr():
                total.copy_(sources[0])
            return
        torch.add(sources[0], sources[1], out=total)
        for source in sources[2:]:
            total.add_(source)
        return
    total.copy_(sources[0])
    wide = _accumulator("wide", total.numel(), total.dtype)[: total.numel()]
    for source in sources[1:]:
        wide.copy_(source)
        total.add_(wide)


def _may_accumulate_in(out: torch.Tensor, sources: Sequence[torch.Tensor]) -> bool:
    """Whether no source is lost before it is added: the first two are read as `out` is first written."""
    start, stop = _extent(out)
    return all(stop <= first or last <= start for first, last in map(_extent, sources[2:]))


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    return start, start + tensor.numel() * tensor.element_size()


def _accumulator(name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """This thread's reused scratch memory: ranks may be threads."""
    key = f"{name} {dtype}"
    held: torch.Tensor | None = getattr(_scratch, key, None)
    if held is None or held.numel() < numel:
        held = torch.empty(numel, dtype=dtype)
        setattr(_scratch, key, held)
    return held
