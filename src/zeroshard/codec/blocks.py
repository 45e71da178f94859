"""Integers of eight or four bits, in blocks that share a scale.

[Note: blocks of integers]
A code is the scales of all blocks, then the integers of all blocks. A scale is bf16: the block's largest
magnitude over 127 (7 for four bits), rounded up, so that no value is cut off, and so that integer times scale
is exact in fp32: a decoder that fuses the multiplication with an addition gets the same bits as one that does
not. The integers are value × (1 / scale) rounded to nearest, ties to even; four-bit ones stand two to a byte,
the first half of a block in the low bits and its second half in the high bits, which vectorises everywhere.
The last block may be short; of an odd number of four-bit integers the last high half is zero.

Blocks whose largest magnitude is below 2⁻¹⁰⁰ become zero. A magnitude of 2¹²⁷ or more, an infinity or a NaN
makes its block's scale NaN and its integers zero; everything in it arrives as NaN, and the residual of that
block stays as it was.

Stochastic rounding: floor(value / scale + dice), the dice being a hash of the value's bits, its place in the
piece and the step, so a step can be repeated, whatever the device or the number of threads.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from zeroshard.codec.base import Codec, check, padded
from zeroshard.errors import OptionError
from zeroshard.policy import Numerics

_TINY = 27 << 23  # the bits of 2**-100
_HUGE = 254 << 23  # and of 2**127
_NAN = 0x7FC0
_MAGNITUDE = 0x7FFFFFFF


@dataclass(frozen=True)
class _Blocks(Codec):
    """What Int8 and Int4 have in common."""

    block: int = 0
    feedback: bool = False
    stochastic: bool = False
    numerics: ClassVar[Numerics] = "rounding"
    bits: ClassVar[int]

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not isinstance(self.block, int) or not 16 <= self.block <= 65536 or self.block % 16:
            raise OptionError(f"{name}(block={self.block!r}): a multiple of 16 from 16 to 65536 is needed.")
        for option in ("feedback", "stochastic"):
            if not isinstance(getattr(self, option), bool):
                raise OptionError(f"{name}({option}={getattr(self, option)!r}): pass True or False.")

    @property
    def levels(self) -> int:
        """The largest integer."""
        return (1 << self.bits - 1) - 1

    def wire_bytes(self, numel: int) -> int:
        return self._integers_at(numel) + padded(self._integer_bytes(numel))

    def _integers_at(self, numel: int) -> int:
        return padded(2 * -(-numel // self.block))

    def _integer_bytes(self, numel: int) -> int:
        return -(-numel * self.bits // 8)

    def encode(self, values: Tensor, code: Tensor, state: dict[str, Tensor], step: int) -> None:
        check(self, values, code)
        residual = state["residual"] if self.feedback else None
        code.zero_()
        for rows, start, scales, integers in self._runs(code, values.numel()):
            end = start + rows[0] * rows[1]
            kept = None if residual is None else residual[start:end].view(rows)
            wanted = values[start:end].view(rows)
            wanted = wanted if kept is None else wanted + kept
            scale, usable = _scale(wanted, self.levels)
            scales.copy_(scale.view(-1))
            wide = _wide(scale)
            inverse = torch.where(usable, wide, 1.0).reciprocal_()
            steps = torch.where(usable, wanted, 0.0).mul_(inverse)
            chosen = self._rounded(steps, wanted, start, step)
            self._pack(chosen, integers)
            if kept is not None:
                left = wanted - chosen.to(torch.float32).mul_(wide)
                torch.where(scale == _NAN, kept, left, out=kept)

    def decode(self, code: Tensor, out: Tensor, add: bool) -> None:
        check(self, out, code, "out")
        for rows, start, scales, integers in self._runs(code, out.numel()):
            wide = _wide(scales.view(-1, 1))
            values = self._unpack(integers, rows[1]).to(torch.float32).mul_(wide)
            part = out[start : start + rows[0] * rows[1]].view(rows)
            part.add_(values) if add else part.copy_(values)

    def _runs(self, code: Tensor, numel: int) -> Iterator[tuple[tuple[int, int], int, Tensor, Tensor]]:
        """The whole blocks, then the short one: (blocks, elements of each), the first element's place, the
        scales' bits as int16, the integers' bytes, a row per block."""
        at = self._integers_at(numel)
        scales = code[: 2 * -(-numel // self.block)].view(torch.int16)
        whole, short = divmod(numel, self.block)
        wide = self._integer_bytes(self.block)
        if whole:
            yield (whole, self.block), 0, scales[:whole], code[at : at + whole * wide].view(whole, wide)
        if short:
            at += whole * wide
            last = code[at : at + self._integer_bytes(short)].view(1, -1)
            yield (1, short), whole * self.block, scales[whole:], last

    def _rounded(self, steps: Tensor, values: Tensor, start: int, step: int) -> Tensor:
        """Values in units of their scale as whole numbers."""
        if not self.stochastic:
            return torch.round(steps).to(torch.int8)
        place = torch.arange(start, start + steps.numel(), device=steps.device).view(steps.shape)
        shift = self.levels + 1  # makes all of them positive, where cutting off is rounding down
        risen = (steps + (_dice(values, place, step) + shift)).to(torch.int32) - shift
        return risen.clamp_(-self.levels, self.levels).to(torch.int8)

    @staticmethod
    @abstractmethod
    def _pack(chosen: Tensor, integers: Tensor) -> None:
        """Whole numbers, a row per block, into the bytes of a code."""

    @staticmethod
    @abstractmethod
    def _unpack(integers: Tensor, width: int) -> Tensor:
        """Back: `width` whole numbers a row."""


@dataclass(frozen=True)
class Int8(_Blocks):
    """Eight-bit integers, a scale for every `block`: 3.97 × fewer bytes than fp32. Numerics: rounding.

    Off by at most half a step, 1/252 of the block's largest magnitude (a whole step if `stochastic`).
    `stochastic`: rounds up or down by chance, so that the mean over steps is the value; otherwise to nearest.
    `feedback`: what rounding lost is added to the next step's values; 4 bytes a parameter of state.

    >>> Int8().round_trip(torch.tensor([1.0, -0.5, 0.001]))
    tensor([ 0.9998, -0.4999,  0.0000])
    """

    block: int = 256
    bits: ClassVar[int] = 8

    @staticmethod
    def _pack(chosen: Tensor, integers: Tensor) -> None:
        integers.view(torch.int8).copy_(chosen)

    @staticmethod
    def _unpack(integers: Tensor, width: int) -> Tensor:
        return integers.view(torch.int8)


def _scale(values: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """The bits of each row's bf16 scale as int32, and whether it is an ordinary one."""
    top = (values.view(torch.int32) & _MAGNITUDE).amax(1, keepdim=True)
    step = torch.where(top < _HUGE, top, 0).view(torch.float32) * (1.0 / levels)
    up = (step.view(torch.int32) + 0xFFFF) >> 16
    usable = (top >= _TINY) & (top < _HUGE)
    return torch.where(usable, up, torch.where(top < _TINY, 0, _NAN)), usable


def _wide(scale: Tensor) -> Tensor:
    """The bits of bf16 numbers as fp32 numbers."""
    return (scale.to(torch.int32) << 16).view(torch.float32)


def _dice(values: Tensor, place: Tensor, step: int) -> Tensor:
    """Uniform in [0, 1), in steps of 2⁻¹⁶."""
    salt = (step * 0x9E3779B1) & 0xFFFFFFFF
    mixed = (values.view(torch.int32).to(torch.int64) ^ (place * 0x9E3779B1 + salt)) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    return (mixed >> 16).to(torch.float32) * 2.0**-16
