"""Codes of flat CPU tensors, in one or two passes over memory. The formats and their torch version are those
of `zeroshard.compress`, which comes here first: where the kernels were not compiled, these return False and
have done nothing."""

from __future__ import annotations

import ctypes
import functools
import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroshard.errors import OptionError
from zeroshard.kernels import checks, library

from .threads import Workers

# Values in a worker's share: below two of them, to wake another thread costs more than it saves.
SHARE = 1 << 18


@dataclass(frozen=True)
class BlockFormat:
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

    def _record(
        self,
        values: Tensor,
        scales: Tensor | None,
        packed: Tensor | None,
        start: int,
        stop: int,
        residual: Tensor | None = None,
        add: bool = False,
    ) -> library.BlocksRecord:
        number = start // self.block
        return library.BlocksRecord(
            count=stop - start,
            first=start,
            values=values.data_ptr() + 4 * start,
            residual=None if residual is None else residual.data_ptr() + 4 * start,
            scales=None if scales is None else scales.data_ptr() + 2 * number,
            packed=None if packed is None else packed.data_ptr() + number * self.packed_bytes(self.block),
            block=self.block,
            bits=self.bits,
            stochastic=self.salt is not None,
            add=add,
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
        kernels = library.kernels()
        if kernels is None:
            return False
        self._check("encode", values, scales, packed)
        if residual is not None:
            checks.flat("encode", "residual", residual, (torch.float32,), values.numel())

        def share(start: int, stop: int) -> None:
            record = self._record(values, scales, packed, start, stop, residual)
            kernels.encode_blocks(ctypes.byref(record))

        spread(values.numel(), self.block, share)
        return True

    def decode(self, scales: Tensor, packed: Tensor, out: Tensor, add: bool) -> bool:
        """Write the values into `out`, or add them to it."""
        kernels = library.kernels()
        if kernels is None:
            return False
        self._check("decode", out, scales, packed)

        def share(start: int, stop: int) -> None:
            record = self._record(out, scales, packed, start, stop, add=add)
            kernels.decode_blocks(ctypes.byref(record))

        spread(out.numel(), self.block, share)
        return True

    def encode_shards(
        self, values: Tensor, residual: Tensor | None, code: Tensor, at: int, salts: Tensor | None
    ) -> bool:
        """As `encode`, of a shard a row: scales go to the beginning of its row of `code`, packed values `at`
        bytes behind them. `salts`: int32, the dice of each."""
        kernels = library.kernels()
        count, numel = values.shape
        if kernels is None or kernels.encode_shards is None or numel >= 2 * SHARE:
            return False
        write, packed = kernels.encode_shards, at + self.packed_bytes(numel)
        checks.matrix("encode", "values", values, torch.float32, (count, numel))
        checks.matrix("encode", "code", code[:, :packed], torch.uint8, (count, packed))
        if residual is not None:
            checks.matrix("encode", "residual", residual, torch.float32, (count, numel), values.stride(0))

        def share(start: int, stop: int) -> None:
            row = code[start]
            kept = None if residual is None else residual[start]
            record = self._record(values[start], row, row[at:], 0, numel, kept)
            given = None if salts is None else salts[start:].data_ptr()
            shards = library.ShardsRecord(record, stop - start, values.stride(0), code.stride(0), given)
            write(ctypes.byref(shards))

        spread(count, 1, share, each=numel)
        return True

    def decode_parts(self, parts: Parts, at: int, out: Tensor) -> bool:
        """Write what each part says into its row of `out`, or into a flat one the sum of all, in their order.
        Each begins with scales, and `at` bytes behind those are the packed values."""
        kernels = library.kernels()
        if kernels is None or kernels.decode_parts is None:
            return False
        decode, numel, step = kernels.decode_parts, out.shape[-1], 0
        if out.dim() == 2:
            checks.matrix("decode", "out", out, torch.float32, (len(parts), numel))
            out, step = out[0], out.stride(0)
        checks.flat("decode", "out", out, (torch.float32,))
        parts.check(at + self.packed_bytes(numel))

        def share(start: int, stop: int) -> None:
            record = self._record(out, None, None, start, stop)
            number = start // self.block
            packed = at + number * self.packed_bytes(self.block)
            decode(
                ctypes.byref(library.PartsRecord(record, len(parts), step, parts.address, 2 * number, packed))
            )

        spread(numel, self.block, share, each=len(parts))
        return True


class Parts(list[Tensor]):
    """What all ranks have sent to this one, flat uint8 tensors in rank order; kernels take them in one call.
    They may be thousands."""

    @functools.cached_property
    def address(self) -> int:
        """Where the addresses of all of them stand."""
        self._addresses = array("Q", map(Tensor.data_ptr, self))
        return self._addresses.buffer_info()[0]

    @functools.cached_property
    def shortest(self) -> int:
        return min(map(Tensor.numel, self))

    def check(self, length: int) -> None:
        """Raise unless each has so many bytes."""
        checks.flat("parts", "the first", self[0], (torch.uint8,))
        if self.shortest < length:
            raise OptionError(f"parts: one holds {self.shortest} bytes; {length} are needed")

    def tally(self, at: int, count: int) -> Tensor:
        """The sum over all parts of each of `count` bytes, fp32."""
        kernels = library.kernels()
        if kernels is None or kernels.tally is None or self[0].device.type != "cpu":
            return torch.stack([part[at : at + count] for part in self]).sum(0, dtype=torch.float32)
        self.check(at + count)
        marks = torch.empty(count)
        kernels.tally(ctypes.byref(library.TallyRecord(count, len(self), self.address, at, marks.data_ptr())))
        return marks


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
    kernels = library.kernels()
    if kernels is None:
        return False
    numel = values.numel()
    checks.flat("largest", "values", values, (torch.float32,))
    checks.flat("largest", "residual", residual, (torch.float32,), numel)
    checks.flat("largest", "places", places, (torch.int32,))
    checks.flat("largest", "chosen", chosen, (torch.float32,), places.numel())
    if momentum is not None:
        checks.flat("largest", "momentum", momentum, (torch.float32,), numel)
    record = library.LargestRecord(
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
    kernels = library.kernels()
    rows, width = matrix.shape[0], matrix.shape[1] * matrix.element_size()
    plain = matrix.device.type == "cpu" and matrix.is_contiguous()
    mask = _UNSIGNED.get(matrix.dtype)
    if kernels is None or not plain or mask is None or width % 4:
        return (matrix != 0).any(1)
    found = torch.empty(rows, dtype=torch.bool)

    def share(start: int, stop: int) -> None:
        words, to = matrix.data_ptr() + start * width, found.data_ptr() + start
        kernels.touched(ctypes.byref(library.TouchedRecord(stop - start, width // 4, words, to, mask)))

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
