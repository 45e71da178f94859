"""Codes of flat CPU tensors, in one or two passes over memory. The formats and their torch version are those
of `zeroshard.codec`, which comes here first: where the kernels were not compiled, these return False and have
done nothing."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import abi, checks, loader
from .workers import Workers

# Values in a worker's share: below two of them, to wake another thread costs more than it saves.
SHARE = 1 << 18


@dataclass(frozen=True)
class Blocks:
    """How values are put into blocks. `bits` is 8, 4, 2 or 1, or 0: three-valued digits, five to a byte, and
    `large` values of a block apart. `salt` makes the dice of stochastic rounding, or is None."""

    block: int
    bits: int
    salt: int | None = None
    large: int = 0

    def packed_bytes(self, numel: int) -> int:
        """Of so many values, without their scales."""
        if self.bits:
            return -(-numel * self.bits // 8)
        whole, short = divmod(numel, self.block)
        return whole * self._digit_bytes(self.block) + self._digit_bytes(short)

    def _digit_bytes(self, numel: int) -> int:
        return -(-numel // 5) + 2 * min(self.large, numel)

    def _record(self, values: Tensor, scales: Tensor, packed: Tensor, start: int, stop: int) -> abi.Blocks:
        number = start // self.block
        return abi.Blocks(
            count=stop - start,
            first=start,
            values=values.data_ptr() + 4 * start,
            scales=scales.data_ptr() + 2 * number,
            packed=packed.data_ptr() + number * self.packed_bytes(self.block),
            block=self.block,
            bits=self.bits,
            stochastic=self.salt is not None,
            salt=self.salt or 0,
            large=self.large,
        )

    def _check(self, where: str, values: Tensor, scales: Tensor, packed: Tensor) -> None:
        numel = values.numel()
        checks.flat(where, "values", values, (torch.float32,))
        checks.flat(where, "scales", scales, (torch.int16,), -(-numel // self.block))
        checks.flat(where, "packed", packed, (torch.uint8,), self.packed_bytes(numel))

    def encode(self, values: Tensor, residual: Tensor | None, scales: Tensor, packed: Tensor) -> bool:
        """Write scales and packed bits of `values`, plus `residual`, in which stays what they do not say."""
        kernels = loader.kernels()
        if kernels is None:
            return False
        self._check("encode", values, scales, packed)
        if residual is not None:
            checks.flat("encode", "residual", residual, (torch.float32,), values.numel())

        def share(start: int, stop: int) -> None:
            record = self._record(values, scales, packed, start, stop)
            record.residual = None if residual is None else residual.data_ptr() + 4 * start
            kernels.encode_blocks(ctypes.byref(record))

        spread(values.numel(), self.block, share)
        return True

    def decode(self, scales: Tensor, packed: Tensor, out: Tensor, add: bool) -> bool:
        """Write the values into `out`, or add them to it."""
        kernels = loader.kernels()
        if kernels is None:
            return False
        self._check("decode", out, scales, packed)

        def share(start: int, stop: int) -> None:
            record = self._record(out, scales, packed, start, stop)
            record.add = add
            kernels.decode_blocks(ctypes.byref(record))

        spread(out.numel(), self.block, share)
        return True


def largest(
    values: Tensor,
    residual: Tensor,
    momentum: Tensor | None,
    inertia: float,
    places: Tensor,
    chosen: Tensor,
) -> bool:
    """Add `values` to the residual (through the momentum, if given), and take the largest magnitudes out of
    it."""
    kernels = loader.kernels()
    if kernels is None:
        return False
    numel = values.numel()
    checks.flat("largest", "values", values, (torch.float32,))
    checks.flat("largest", "residual", residual, (torch.float32,), numel)
    checks.flat("largest", "places", places, (torch.int32,))
    checks.flat("largest", "chosen", chosen, (torch.float32,), places.numel())
    if momentum is not None:
        checks.flat("largest", "momentum", momentum, (torch.float32,), numel)
    record = abi.Largest(
        count=numel,
        k=places.numel(),
        values=values.data_ptr(),
        residual=residual.data_ptr(),
        momentum=None if momentum is None else momentum.data_ptr(),
        places=places.data_ptr(),
        chosen=chosen.data_ptr(),
        inertia=inertia,
    )
    kernels.largest(ctypes.byref(record))
    return True


# The bits of a 32-bit word that are no sign.
_UNSIGNED = {torch.float32: 0x7FFFFFFF, torch.bfloat16: 0x7FFF7FFF, torch.float16: 0x7FFF7FFF}


def touched(matrix: Tensor) -> Tensor:
    """Marks the rows of a matrix, on any device, that hold anything but zeros."""
    kernels = loader.kernels()
    rows, width = matrix.shape[0], matrix.shape[1] * matrix.element_size()
    plain = matrix.device.type == "cpu" and matrix.is_contiguous()
    mask = _UNSIGNED.get(matrix.dtype)
    if kernels is None or not plain or mask is None or width % 4:
        return (matrix != 0).any(1)
    found = torch.empty(rows, dtype=torch.bool)

    def share(start: int, stop: int) -> None:
        words, to = matrix.data_ptr() + start * width, found.data_ptr() + start
        kernels.touched(ctypes.byref(abi.Touched(stop - start, width // 4, words, to, mask)))

    spread(rows, 1, share, each=max(1, width // 4))
    return found


def spread(numel: int, block: int, work: Callable[[int, int], None], each: int = 1) -> None:
    """Run `work(start, stop)` over whole blocks, on as many threads as torch may use. `each` says how many
    values an element stands for."""
    share = -(-SHARE // (block * each)) * block
    threads = torch.get_num_threads()
    if threads == 1 or numel < 2 * share:
        work(0, numel)
    else:
        _workers(threads, os.getpid()).spread(numel, share, work)


@functools.lru_cache(maxsize=1)
def _workers(threads: int, process: int) -> Workers:
    """Threads do not outlive a fork, so each process has its own."""
    return Workers(threads)
