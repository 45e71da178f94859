"""Codes in blocks: the scale of every block, then a few bits for every value.

[Note: layout of blocks]
First the scales, bf16, one for each block; then the bytes of all blocks, each block's after the other's. The
values of a block lie in planes: with four bits a value, the first half of a block has the low bits of its
bytes, the second half the high ones; with two bits, the first quarter has bits 0 and 1; with one, the first
eighth has bit 0. So neighbours in a register stay neighbours, and packing vectorises everywhere. The last
block may be short; its planes are then as long as it needs, and what is left of the last one is zero.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from zeroshard.compress import gpu
from zeroshard.errors import OptionError
from zeroshard.field_checks import check_fields
from zeroshard.kernels.codes import BlockFormat, Parts

from .base import RESIDUALS, Codec, Residual, check, check_residual, padded, wide_residual

NAN = 0x7FC0  # the bits of a bf16 scale that says: not all finite
MAGNITUDE = 0x7FFFFFFF
HUGE = 254 << 23  # the bits of 2**127: sizes from here on count as overflowed
_LANES = 16


class BlockRun(NamedTuple):
    """Blocks of equal length."""

    shape: tuple[int, int]  # blocks, values of each
    start: int  # of the first value, in the shard
    scales: Tensor  # int16: the bits of bf16
    packed: Tensor  # uint8, a row for each block

    def of(self, values: Tensor) -> Tensor:
        """The part of a shard that this run stands for, a row for each block."""
        return values[self.start : self.start + self.shape[0] * self.shape[1]].view(self.shape)


@dataclass(frozen=True)
class BlockCodec(Codec):
    """What codecs in blocks have in common. `block` is a multiple of 16. `residual`: the dtype in which what
    was not sent is kept; "bfloat16" is half the memory, rounded once a step."""

    block: int = 256
    residual: Residual = field(default="float32", kw_only=True)
    bits: ClassVar[int]

    def __post_init__(self) -> None:
        check_fields(self)
        if not 16 <= self.block <= 65536 or self.block % 16:
            raise OptionError(
                f"{type(self).__name__}(block={self.block!r}): a multiple of 16 from 16 to 65536 is needed."
            )
        check_residual(type(self).__name__, self.residual, self.feedback)

    @property
    def draws(self) -> bool:
        return False

    @property
    def residual_dtype(self) -> torch.dtype:
        return RESIDUALS[self.residual]

    def wire_bytes(self, numel: int) -> int:
        return self.scale_bytes(numel) + padded(self._packed_bytes(numel))

    def scale_bytes(self, numel: int) -> int:
        """Where the packed values begin."""
        return padded(2 * -(-numel // self.block))

    def _form(self, step: int = 0) -> BlockFormat:
        """As the kernels take it."""
        return BlockFormat(self.block, self.bits, self._salt(step))

    def _packed_bytes(self, numel: int) -> int:
        return self._form().packed_bytes(numel)

    def encode(self, values: Tensor, code: Tensor, state: dict[str, Tensor], step: int) -> None:
        check(self, values, code)
        if not self.feedback:
            self._encode(values, code, None, step)
            return
        with wide_residual(state) as residual:
            self._encode(values, code, residual, step)

    def _encode(self, values: Tensor, code: Tensor, residual: Tensor | None, step: int) -> None:
        scales, packed = self._parts(code, values.numel())
        form = self._form(step)
        _clear_gaps(code, 2 * scales.numel(), self.scale_bytes(values.numel()), packed.numel())
        if values.device.type == "cpu" and form.encode(values, residual, scales, packed):
            return
        if values.device.type == "cuda" and gpu.encode(form, values, residual, scales, packed):
            return
        for run in self._runs(scales, packed, values.numel()):
            kept = None if residual is None else run.of(residual)
            wanted = run.of(values) if kept is None else run.of(values) + kept
            left = self._encode_run(run, wanted, form.salt)
            if kept is not None:
                torch.where((run.scales == NAN).view(-1, 1), kept, left, out=kept)

    def encode_shards(self, values: Tensor, code: Tensor, state: dict[str, Tensor], step: int) -> None:
        residual = state["residual"] if self.feedback else None
        if values.device.type == "cpu" and (residual is None or residual.dtype == torch.float32):
            numel = values.shape[1]
            form, at = self._form(step), self.scale_bytes(numel)
            if form.encode_shards(values, residual, code, at, self._salts(step, len(values))):
                _clear_gaps(code, 2 * -(-numel // self.block), at, self._packed_bytes(numel))
                return
        super().encode_shards(values, code, state, step)

    def decode_parts(self, parts: Parts, out: Tensor) -> None:
        at = self.scale_bytes(out.shape[-1])
        if out.device.type != "cpu" or not self._form().decode_parts(parts, at, out):
            super().decode_parts(parts, out)

    def decode(self, code: Tensor, out: Tensor, add: bool) -> None:
        check(self, out, code, "out")
        scales, packed = self._parts(code, out.numel())
        form = self._form()
        if out.device.type == "cpu" and form.decode(scales, packed, out, add):
            return
        if out.device.type == "cuda" and gpu.decode(form, scales, packed, out, add):
            return
        for run in self._runs(scales, packed, out.numel()):
            part, values = run.of(out), self._decode_run(run)
            part.add_(values) if add else part.copy_(values)

    def _salt(self, step: int) -> int | None:
        """What dice are made of, if there are any."""
        return None

    def _salts(self, step: int, count: int) -> Tensor | None:
        """Those of `count` steps, as int32."""
        return None

    @abstractmethod
    def _encode_run(self, run: BlockRun, values: Tensor, salt: int | None) -> Tensor:
        """Write the scales and bits of a run; what they do not say of the values."""

    @abstractmethod
    def _decode_run(self, run: BlockRun) -> Tensor:
        """The values of a run, a row for each block."""

    def _parts(self, code: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """The scales' bits as int16, and the packed values."""
        at = self.scale_bytes(numel)
        scales = code[: 2 * -(-numel // self.block)].view(torch.int16)
        return scales, code[at : at + self._packed_bytes(numel)]

    def _runs(self, scales: Tensor, packed: Tensor, numel: int) -> Iterator[BlockRun]:
        """The whole blocks, then the short one."""
        whole, short = divmod(numel, self.block)
        size = whole * self._packed_bytes(self.block)
        if whole:
            yield BlockRun((whole, self.block), 0, scales[:whole], packed[:size].view(whole, -1))
        if short:
            yield BlockRun((1, short), whole * self.block, scales[whole:], packed[size:].view(1, -1))


def _clear_gaps(code: Tensor, scales: int, at: int, packed: int) -> None:
    """Zeros behind the scales and behind the packed values, of one code or of a row each."""
    for start, stop in ((scales, at), (at + packed, code.shape[-1])):
        if start < stop:
            code[..., start:stop].zero_()


def pack(values: Tensor, to: Tensor, bits: int) -> None:
    """Rows of uint8 values below 2**`bits` into planes."""
    count, width = 8 // bits, to.shape[1]
    short = count * width - values.shape[1]
    planes = torch.nn.functional.pad(values, (0, short)).view(-1, count, width)
    to.copy_(planes[:, 0])
    for number in range(1, count):
        to.bitwise_or_(planes[:, number] << (number * bits))


def unpack(packed: Tensor, bits: int, width: int) -> Tensor:
    """Back: `width` uint8 values a row."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).view(1, -1, 1)
    planes = (packed.unsqueeze(1) >> shifts) & ((1 << bits) - 1)
    return planes.flatten(1)[:, :width]


def wide(scales: Tensor) -> Tensor:
    """The bits of bf16 numbers as fp32 numbers."""
    return (scales.to(torch.int32) << 16).view(torch.float32)


def mean_scale(values: Tensor) -> Tensor:
    """The bits of each row's mean magnitude in bf16, as int32. Value i is added to lane i mod 16, and the
    lanes are folded in halves: an order that every device can keep to."""
    count = values.shape[1]
    filled = torch.nn.functional.pad(values.abs(), (0, -count % _LANES)).view(len(values), -1, _LANES)
    lanes = filled[:, 0].clone()
    for index in range(1, filled.shape[1]):
        lanes += filled[:, index]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    total = lanes.view(torch.int32)
    mean = (lanes * (1.0 / count)).view(torch.int32)
    nearest = (mean + 0x7FFF + ((mean >> 16) & 1)) >> 16
    return torch.where((total >= 0) & (total < HUGE), nearest, NAN)
