"""Copies of many tensors by one call. Torch spends a microsecond on each of them, which is most of the cost
where parameters are small."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from operator import add

import torch
from torch import Tensor

from . import abi, loader

# Below, one thread is faster than to wake torch's others.
SMALL = 1 << 20


class Moves:
    """Copies between two lists of tensors, one of which changes from call to call; torch does them where not
    all are in the CPU's memory.

    `to` are flat and contiguous, or have two dimensions of which the last is contiguous: then their rows take
    consecutive parts of the source. Sources are contiguous, and as long as their targets; or longer, and
    `shifts` says how many bytes of each come before what is copied.

    >>> moves = Moves(to=[torch.zeros(4)], source=[torch.zeros(4)])
    >>> moves.run(to=[target := torch.zeros(4)], source=[torch.arange(4.0)])
    >>> target
    tensor([0., 1., 2., 3.])
    """

    def __init__(
        self,
        to: Sequence[Tensor],
        source: Sequence[Tensor],
        device: torch.device | None = None,
        shifts: Sequence[int] | None = None,
        past: bool = False,
    ) -> None:
        """`device`: of the sources to come, where those given only stand for them. `past`: long copies go
        past the caches, since another core is to read them."""
        count = len(to)
        pairs = list(zip(to, source, strict=True))
        self.nbytes = sum(target.nbytes for target in to)
        self._dtypes = [target.dtype for target in to]
        self._plain = all(
            target.device.type == "cpu"
            and target.device == (device or of.device)
            and target.dtype == of.dtype
            and (target.dim() < 2 or target.stride(-1) == 1)
            for target, of in pairs
        )
        rows = [(1, target.numel()) if target.dim() < 2 else tuple(target.shape) for target in to]
        sizes = [target.element_size() for target in to]
        steps = [
            target.stride(0) * size if target.dim() == 2 else 0
            for target, size in zip(to, sizes, strict=True)
        ]
        self._to = _addresses(to)
        self._source = _addresses(source)
        self._shifts, self._past = shifts, past
        self._bytes = (ctypes.c_int64 * count)(*(n * size for (_, n), size in zip(rows, sizes, strict=True)))
        self._times = (ctypes.c_int64 * count)(*(times for times, _ in rows))
        self._step = (ctypes.c_int64 * count)(*steps)
        self._count = count
        self._fit = self._plain and self._fits(source)

    def run(self, to: Sequence[Tensor], source: Sequence[Tensor], moved: str = "both") -> None:
        """Copy. Targets are laid out as those given first; `moved` says whose addresses may differ from
        theirs and from those of the last call: ``to``, ``source``, ``both`` or ``neither``."""
        kernels = loader.kernels()
        if moved in ("to", "both"):
            self._to = _addresses(to)
        if moved in ("source", "both"):
            self._source = _addresses(source, self._shifts)
            self._fit = self._plain and self._fits(source)
        alone = self.nbytes < SMALL or torch.get_num_threads() == 1
        if kernels is None or not alone or not self._fit:
            with torch.no_grad():
                torch._foreach_copy_(list(to), self._shaped(to, source))
            return
        address = ctypes.addressof
        kernels.move(
            ctypes.byref(
                abi.Moves(
                    self._count,
                    address(self._to),
                    address(self._source),
                    address(self._bytes),
                    address(self._times),
                    address(self._step),
                    self._past,
                )
            )
        )

    def _shaped(self, to: Sequence[Tensor], source: Sequence[Tensor]) -> list[Tensor]:
        if self._shifts is None:
            return [of.reshape(t.shape) for t, of in zip(to, source, strict=True)]
        shifted = zip(to, source, self._shifts, strict=True)
        return [of if of.shape == t.shape else _part(of, t, shift) for t, of, shift in shifted]

    def _fits(self, source: Sequence[Tensor]) -> bool:
        return all(map(Tensor.is_contiguous, source)) and [of.dtype for of in source] == self._dtypes


def _part(source: Tensor, like: Tensor, shift: int) -> Tensor:
    """What lies so many bytes behind the beginning, in one call: there may be a part for each band."""
    flat = source if source.is_contiguous() else source.contiguous()
    steps = (like.shape[-1], 1)[-like.dim() :]
    return flat.as_strided(like.shape, steps, flat.storage_offset() + shift // flat.element_size())


def _addresses(
    tensors: Sequence[Tensor], shifts: Sequence[int] | None = None
) -> ctypes.Array[ctypes.c_void_p]:
    found: Iterable[int] = map(Tensor.data_ptr, tensors)
    if shifts is not None:
        found = map(add, found, shifts)
    return (ctypes.c_void_p * len(tensors))(*found)
