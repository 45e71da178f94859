"""Integers of eight or four bits, in blocks that share a scale.

[Note: blocks of integers]
A scale is bf16: the block's largest magnitude over 127 (7 for four bits), rounded up, so that no value is cut
off, and so that integer times scale is exact in fp32: a decoder that fuses the multiplication with an
addition gets the same bits as one that does not. The integers are value × (1 / scale) rounded to nearest,
ties to even.

Blocks whose largest magnitude is below 2⁻¹⁰⁰ become zero. A magnitude of 2¹²⁷ or more, an infinity or a NaN
makes its block's scale NaN and its integers zero; everything in it arrives as NaN, and the residual of that
block stays as it was.

Stochastic rounding: floor(value / scale + dice), the dice being a hash of the value's bits, its place in the
piece and the step, so a step can be repeated, whatever the device or the number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from zeroshard.policy import Numerics

from .blocks import HUGE, MAGNITUDE, NAN, Blocked, Run, pack, unpack, wide

_TINY = 27 << 23  # the bits of 2**-100


@dataclass(frozen=True)
class _Integers(Blocked):
    """What Int8 and Int4 have in common."""

    feedback: bool = False
    stochastic: bool = False
    numerics: ClassVar[Numerics] = "rounding"

    @property
    def levels(self) -> int:
        """The largest integer."""
        return (1 << self.bits - 1) - 1

    def _salt(self, step: int) -> int | None:
        return (step * 0x9E3779B1) & 0xFFFFFFFF if self.stochastic else None

    def _encode_run(self, run: Run, values: Tensor, salt: int | None) -> Tensor:
        scale, usable = _scale(values, self.levels)
        run.scales.copy_(scale.view(-1))
        inverse = torch.where(usable, wide(scale), 1.0).reciprocal_()
        steps = torch.where(usable, values, 0.0).mul_(inverse)
        chosen = torch.round(steps) if salt is None else self._risen(steps, values, run.start, salt)
        pack(chosen.to(torch.int8).view(torch.uint8) & ((1 << self.bits) - 1), run.packed, self.bits)
        return values - chosen.mul_(wide(scale))

    def _decode_run(self, run: Run) -> Tensor:
        sign = 1 << self.bits - 1
        raw = unpack(run.packed, self.bits, run.shape[1]).to(torch.int32)
        return ((raw ^ sign) - sign).to(torch.float32).mul_(wide(run.scales.view(-1, 1)))

    def _risen(self, steps: Tensor, values: Tensor, start: int, salt: int) -> Tensor:
        """Values in units of their scale, rounded up or down by chance."""
        place = torch.arange(start, start + steps.numel(), device=steps.device).view(steps.shape)
        shift = self.levels + 1  # makes all of them positive, where cutting off is rounding down
        risen = (steps + (_dice(values, place, salt) + shift)).to(torch.int32) - shift
        return risen.clamp_(-self.levels, self.levels).to(torch.float32)


@dataclass(frozen=True)
class Int8(_Integers):
    """Eight-bit integers, a scale for every `block`: 3.97 × fewer bytes than fp32. Numerics: rounding.

    Off by at most half a step, 1/252 of the block's largest magnitude (a whole step if `stochastic`).
    `stochastic`: rounds up or down by chance, so that the mean over steps is the value; otherwise to nearest.
    `feedback`: what rounding lost is added to the next step's values; 4 bytes a parameter of state.

    >>> Int8().round_trip(torch.tensor([1.0, -0.5, 0.001]))
    tensor([ 0.9998, -0.4999,  0.0000])
    """

    block: int = 256
    bits: ClassVar[int] = 8


@dataclass(frozen=True)
class Int4(_Integers):
    """Four-bit integers, a scale for every `block`: 7.76 × fewer bytes than fp32. Numerics: rounding.

    Off by at most half a step, 1/13.8 of the block's largest magnitude (a whole step if `stochastic`). That
    is coarse: `feedback` is on unless you say otherwise. Options as for `Int8`.

    >>> Int4().round_trip(torch.tensor([1.0, -0.5, 0.001]))
    tensor([ 1.0049, -0.4307,  0.0000])
    """

    block: int = 128
    feedback: bool = True
    bits: ClassVar[int] = 4


def _scale(values: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """The bits of each row's bf16 scale as int32, and whether it is an ordinary one."""
    top = (values.view(torch.int32) & MAGNITUDE).amax(1, keepdim=True)
    step = torch.where(top < HUGE, top, 0).view(torch.float32) * (1.0 / levels)
    up = (step.view(torch.int32) + 0xFFFF) >> 16
    usable = (top >= _TINY) & (top < HUGE)
    return torch.where(usable, up, torch.where(top < _TINY, 0, NAN)), usable


def _dice(values: Tensor, place: Tensor, salt: int) -> Tensor:
    """Uniform in [0, 1), in steps of 2⁻¹⁶."""
    mixed = (values.view(torch.int32).to(torch.int64) ^ (place * 0x9E3779B1 + salt)) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    return (mixed >> 16).to(torch.float32) * 2.0**-16
