"""Computes in torch, bit for bit, what `kernels.c` computes (a NaN's payload apart), where no compiler was.

Only multiply, add, divide and square root are used, each of which IEEE 754 fixes to the last bit; torch's
lerp, addcmul and addcdiv fuse where the machine can, and would differ between machines. Chunks are small
enough to stay in cache and below the size at which torch would start threads of its own inside a worker
thread. What an update of rows is, they say themselves
(`updates`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from zeroshard.kernels import library

if TYPE_CHECKING:
    from .host_update import StateRows


_CHUNK = 32768


def _chunks(numel: int, chunk: int = _CHUNK) -> Iterator[slice]:
    return (slice(start, min(start + chunk, numel)) for start in range(0, numel, chunk))


# -- split masters


def split(master: torch.Tensor, weight: torch.Tensor, remainder: torch.Tensor, chunk: int = _CHUNK) -> None:
    """See [Note: split master] in numbers.h. On any device; `chunk`: elements at a time."""
    for part in _chunks(master.numel(), chunk):
        low, high = master[part].view(torch.int16).view(-1, 2).unbind(1)
        kind = high & 0x7FFF
        up = (low >> 15) * (kind <= 0x7F80)  # -1 where the weight is the next one
        odd = (kind == 0x7F80) & (low < 0)
        weight[part].view(torch.int16).copy_(torch.where(odd, high & -0x8000, high - up))
        remainder[part].copy_(low)


def join(weight: torch.Tensor, remainder: torch.Tensor, master: torch.Tensor, chunk: int = _CHUNK) -> None:
    """The inverse of split."""
    for part in _chunks(master.numel(), chunk):
        top, rest = weight[part].view(torch.int16), remainder[part]
        low, high = master[part].view(torch.int16).view(-1, 2).unbind(1)
        kind = top & 0x7FFF
        odd = (kind == 0) & (rest < 0)
        high.copy_(torch.where(odd, top | 0x7F80, top + (rest >> 15) * (kind <= 0x7F80)))
        low.copy_(rest)


def _signed16(bits: torch.Tensor) -> torch.Tensor:
    low = bits & 0xFFFF
    return torch.where(low >= 0x8000, low - 0x10000, low).to(torch.int16)


def _away(values: torch.Tensor) -> torch.Tensor:
    """bf16 with ties away from zero."""
    bits = values.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    half = torch.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 16) | 0x40, (bits + 0x8000) >> 16)
    return _signed16(half).view(torch.bfloat16)


def _open(
    master: torch.Tensor | None, weight: torch.Tensor | None, remainder: torch.Tensor | None
) -> torch.Tensor:
    """The fp32 master to work on: itself, or a joined copy of a split one."""
    if master is not None:
        return master
    assert weight is not None
    assert remainder is not None
    joined = torch.empty_like(remainder, dtype=torch.float32)
    join(weight, remainder, joined)
    return joined


def _close(
    values: torch.Tensor, weight: torch.Tensor | None, remainder: torch.Tensor | None, kind: int
) -> None:
    """Write the compute weight, and the remainder of a split master."""
    if weight is None:
        return
    if kind == library.SPLIT:
        assert remainder is not None
        split(values, weight, remainder)
    else:
        weight.copy_(_away(values) if kind == library.BF16_AWAY else values)


# -- updates


@torch.no_grad()
def update(
    rows: StateRows,
    grad: torch.Tensor,
    weight: torch.Tensor | None,
    numbers: Any,
    kind: int,
    taken: Any = None,
) -> None:
    """One step over all of `rows`, after `taken` was taken back; either may be None."""
    for part in _chunks(rows.numel):
        some = rows.rows(part.start, part.stop)
        out = None if weight is None else weight[part]
        master = _open(some.master, out, some.remainder)
        some.in_torch(master, grad[part], numbers, taken)
        _close(master, out, some.remainder, kind)


# -- sums


@torch.no_grad()
def sum_shards(out: torch.Tensor, sources: Sequence[torch.Tensor], scale: float, dtype: torch.dtype) -> None:
    """`out` = `scale` × the sum of `sources` in order, accumulated in `dtype`."""
    for part in _chunks(out.numel()):
        total = sources[0][part].to(dtype, copy=True)
        for source in sources[1:]:
            total += source[part].to(dtype)
        out[part].copy_(total.mul_(scale))


@torch.no_grad()
def accumulate(to: torch.Tensor, source: torch.Tensor, scale: float, dtype: torch.dtype) -> None:
    """`to` += `scale` × `source`, in `dtype`."""
    for part in _chunks(to.numel()):
        to[part].copy_(to[part].to(dtype) + source[part].to(dtype) * scale)
