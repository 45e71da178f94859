"""Computes in torch, bit for bit, what `kernels.c` computes (a NaN's payload apart), where no compiler was.

Only multiply, add, divide and square root are used, each of which IEEE 754 fixes to the last bit; torch's
lerp, addcmul and addcdiv fuse where the machine can, and would differ between machines. Chunks are small
enough to stay in cache and below the size at which torch would start threads of its own inside a worker
thread. A step is taken back as `adam_back` and `sgd_back` do it, see [Note: taking back] in adam.h."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from zeroshard.kernels import library, moments8

if TYPE_CHECKING:
    from .adam import AdamNumbers, AdamRows
    from .sgd import SgdNumbers, SgdRows


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
def adam(
    rows: AdamRows,
    grad: torch.Tensor,
    weight: torch.Tensor | None,
    numbers: AdamNumbers | None,
    kind: int,
    taken: AdamNumbers | None = None,
) -> None:
    """One step over all of `rows`, after `taken` was taken back."""
    for part in _chunks(rows.numel):
        some = rows.rows(part.start, part.stop)
        out = None if weight is None else weight[part]
        master = _open(some.master, out, some.remainder)
        mean, square = some.exp_avg, some.exp_avg_sq
        if some.scales is not None:
            mean, square = moments8.decode(mean, square, some.scales)
        if taken is not None:
            adam_back(master, mean, square, grad[part], taken)
        if numbers is not None:
            _adam_chunk(master, mean, square, some.max_exp_avg_sq, grad[part], numbers)
        if some.scales is not None and numbers is not None:
            codes = moments8.encode(mean.contiguous(), square.contiguous(), numbers.step)
            for stored, code in zip((some.exp_avg, some.exp_avg_sq, some.scales), codes, strict=True):
                stored.copy_(code)
        _close(master, out, some.remainder, kind)


def _adam_chunk(
    master: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    peak: torch.Tensor | None,
    grad: torch.Tensor,
    numbers: AdamNumbers,
) -> None:
    grad = grad.to(torch.float32) * numbers.grad_scale
    if numbers.coupled:
        grad = grad + master * numbers.decay
    else:
        master.mul_(numbers.decay)
    if numbers.lerp < 0.5:
        mean.add_((grad - mean).mul_(numbers.lerp))
    else:
        mean.copy_(grad - (grad - mean).mul_(1.0 - numbers.lerp))
    square.mul_(numbers.beta2).add_((grad * numbers.gain2).mul_(grad))
    if peak is not None:
        torch.maximum(peak, square, out=peak)
        square = peak
    master.add_((mean * numbers.stride).div_(moments8.root_of(square).div_(numbers.bias).add_(numbers.eps)))


@torch.no_grad()
def sgd(
    rows: SgdRows,
    grad: torch.Tensor,
    weight: torch.Tensor | None,
    numbers: SgdNumbers | None,
    kind: int,
    taken: SgdNumbers | None = None,
) -> None:
    """One step over all of `rows`, after `taken` was taken back."""
    for part in _chunks(rows.numel):
        some = rows.rows(part.start, part.stop)
        out = None if weight is None else weight[part]
        master = _open(some.master, out, some.remainder)
        if taken is not None:
            sgd_back(master, some.momentum, grad[part], taken)
        if numbers is not None:
            _sgd_chunk(master, some.momentum, grad[part], numbers)
        _close(master, out, some.remainder, kind)


def _sgd_chunk(
    master: torch.Tensor, momentum: torch.Tensor | None, grad: torch.Tensor, numbers: SgdNumbers
) -> None:
    change = grad.to(torch.float32) * numbers.grad_scale
    if numbers.decays:
        change = change + master * numbers.decay
    if momentum is not None:
        if numbers.first:
            momentum.copy_(change)
        else:
            momentum.mul_(numbers.inertia).add_(change * numbers.gain)
        change = change + momentum * numbers.inertia if numbers.nesterov else momentum
    master.add_(change * numbers.stride)


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


def adam_back(
    master: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, grad: torch.Tensor, numbers: AdamNumbers
) -> None:
    """The master and the moments before a step, in place."""
    n, rest = numbers, 1.0 - numbers.lerp
    m, v, x = mean.double(), square.double(), master.double()
    g = (grad.to(torch.float32) * n.grad_scale).double()
    before = x - n.stride * m / (v.sqrt() / n.bias + n.eps)
    if n.coupled:
        g = g + n.decay * before
    else:
        before = before / n.decay
    master.copy_(before)
    if n.step == 1:  # exactly, where the difference of two large numbers would leave a rest
        mean.zero_()
        square.zero_()
        return
    part = m - n.lerp * g
    older = torch.where(part.abs() <= 2.0**-23 * m.abs(), 0.0, part) / rest
    mean.copy_(older)
    if n.beta2 == 0.0:
        square.zero_()
        return
    share = rest * rest / n.beta2
    least = n.gain2 * (1.0 - share) / (n.lerp * n.lerp) if share < 1.0 else 0.0
    left, floor = (v - n.gain2 * g * g) / n.beta2, older * older * least
    square.copy_(torch.where(left < floor, floor, left))


def sgd_back(
    master: torch.Tensor, momentum: torch.Tensor | None, grad: torch.Tensor, numbers: SgdNumbers
) -> None:
    """The master and the momentum before a step, in place."""
    n = numbers
    x, g = master.double(), (grad.to(torch.float32) * n.grad_scale).double()
    decay = n.decay if n.decays else 0.0
    ran = torch.zeros_like(x) if momentum is None else momentum.double()
    if momentum is None or n.nesterov:
        before = (x - n.stride * (g + n.inertia * ran)) / (1.0 + n.stride * decay)
    else:
        before = x - n.stride * ran
    master.copy_(before)
    if momentum is None:
        return
    if n.first:
        momentum.zero_()
    else:
        momentum.copy_((ran - n.gain * (g + decay * before)) / n.inertia)
