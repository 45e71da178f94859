"""Rounds values to 16 bits, 8 or 4 bits, 2 bits, three values, or 1 bit.

[Note: blocks of integers] `Int8` and `Int4`: integers in blocks that share a scale.
A scale is bf16: the block's largest magnitude over 127 (7 for four bits), rounded up, so that no value is cut
off, and so that integer times scale is exact in fp32: a decoder that fuses the multiplication with an
addition gets the same bits as one that does not. The integers are value × (1 / scale) rounded to nearest,
ties to even.

Blocks whose largest magnitude is below 2⁻¹⁰⁰ become zero. A magnitude of 2¹²⁷ or more, an infinity or a NaN
makes its block's scale NaN and its integers zero; everything in it arrives as NaN, and the residual of that
block stays as it was.

Stochastic rounding: floor(value / scale + dice), the dice being a hash of the value's bits, its place in the
shard and the step, so a step can be repeated, whatever the device or the number of threads.

[Note: blocks of digits] `Ternary`: three values of a block's size, five to a byte, and the few largest of the
block apart. The bytes of a block: its digits (0, 1: plus, 2: minus) in five planes, then the places of the
large values, largest first, and what these are in units of the size. Scales are those of [Note: layout of
blocks].

`TwoBit`: a value's sign, and whether it is large for its block. `OneBit`: its sign, times the mean magnitude
of its block. `Cast`: sixteen bits, rounded to nearest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from zeroshard.compress import gpu
from zeroshard.errors import OptionError
from zeroshard.field_checks import check_fields
from zeroshard.kernels import accumulate, cast
from zeroshard.kernels.codes import BlockFormat, spread
from zeroshard.sync_policies import Numerics

from .base import SEEDS, Codec, check, check_freeze, check_steps, check_warmup, padded
from .blocks import HUGE, MAGNITUDE, NAN, BlockCodec, BlockRun, mean_scale, pack, unpack, wide

Half = Literal["bfloat16", "float16"]


@dataclass(frozen=True)
class Cast(Codec):
    """bf16 or fp16: 2 × fewer bytes. Numerics: rounding.

    Off by at most 2⁻⁸ of a value in bf16, 2⁻¹¹ in fp16 within its range; fp16 overflows to infinity from
    65,520 and has steps of 6e-8 near zero, so it is for gradients that a loss scale keeps in range.

    >>> Cast("bfloat16").round_trip(torch.tensor([1.0, 1.001, 3.14159]))
    tensor([1.0000, 1.0000, 3.1406])
    """

    dtype: Half = "bfloat16"
    numerics: ClassVar[Numerics] = "rounding"

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def draws(self) -> bool:
        return False

    def wire_bytes(self, numel: int) -> int:
        return padded(2 * numel)

    def encode(self, values: Tensor, code: Tensor, state: dict[str, Tensor], step: int) -> None:
        check(self, values, code)
        code[2 * values.numel() :].zero_()
        halves = self._halves(code, values.numel())
        if values.device.type == "cpu":
            spread(values.numel(), 1, lambda start, stop: cast(halves[start:stop], values[start:stop]))
        else:
            halves.copy_(values)

    def decode(self, code: Tensor, out: Tensor, add: bool) -> None:
        check(self, out, code, "out")
        halves = self._halves(code, out.numel())
        if out.device.type == "cpu":
            land = accumulate if add else cast
            spread(out.numel(), 1, lambda start, stop: land(out[start:stop], halves[start:stop]))
        elif out.device.type != "cuda" or not gpu.widen(halves, out, add):
            out.add_(halves) if add else out.copy_(halves)

    def _halves(self, code: Tensor, numel: int) -> Tensor:
        return code[: 2 * numel].view(getattr(torch, self.dtype))


_TINY = 27 << 23  # the bits of 2**-100


@dataclass(frozen=True)
class _Integers(BlockCodec):
    """What Int8 and Int4 have in common."""

    feedback: bool = False
    stochastic: bool = False
    numerics: ClassVar[Numerics] = "rounding"

    @property
    def draws(self) -> bool:
        return self.stochastic

    @property
    def levels(self) -> int:
        """The largest integer."""
        return (1 << self.bits - 1) - 1

    def _salt(self, step: int) -> int | None:
        return (step * 0x9E3779B1) & 0xFFFFFFFF if self.stochastic else None

    def _salts(self, step: int, count: int) -> Tensor | None:
        steps = torch.arange(step, step + count).remainder_(SEEDS)
        return (steps * 0x9E3779B1).to(torch.int32) if self.stochastic else None

    def _encode_run(self, run: BlockRun, values: Tensor, salt: int | None) -> Tensor:
        scale, usable = _scale(values, self.levels)
        run.scales.copy_(scale.view(-1))
        inverse = torch.where(usable, wide(scale), 1.0).reciprocal_()
        steps = torch.where(usable, values, 0.0).mul_(inverse)
        chosen = torch.round(steps) if salt is None else self._risen(steps, values, run.start, salt)
        pack(chosen.to(torch.int8).view(torch.uint8) & ((1 << self.bits) - 1), run.packed, self.bits)
        return values - chosen.mul_(wide(scale))

    def _decode_run(self, run: BlockRun) -> Tensor:
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


# In units of the block's mean magnitude: what small and large values become, and where the border is. For
# normally distributed values four levels at equal distances are best about there. All are so short that
# their product with a bf16 scale is exact.
SMALL, LARGE, BORDER = 0.625, 1.875, 1.25


@dataclass(frozen=True)
class TwoBit(BlockCodec):
    """Signs, and one of two sizes, 0.625 or 1.875 of the mean magnitude of the `block`: 15.5 × fewer bytes
    than fp32. Numerics: approximate.

    Loses a third of normally distributed values, where `OneBit` loses 60 %, and needs no warm-up.
    `feedback`: what was not sent is kept and sent later (4 bytes a parameter of state); on unless you say
    otherwise, as for ``gather=Delta(TwoBit(feedback=False))``.

    >>> TwoBit().round_trip(torch.tensor([1.0, -0.5, 0.25, 0.25]))
    tensor([ 0.9375, -0.3125,  0.3125,  0.3125])
    """

    feedback: bool = True
    numerics: ClassVar[Numerics] = "approximate"
    bits: ClassVar[int] = 2

    def _encode_run(self, run: BlockRun, values: Tensor, salt: int | None) -> Tensor:
        scale = mean_scale(values)
        run.scales.copy_(scale.view(-1))
        large = values.abs() > wide(scale) * BORDER
        negative = (values.view(torch.int32) < 0) & (scale != NAN)
        pack(negative.to(torch.uint8) | (large.to(torch.uint8) << 1), run.packed, 2)
        return values - _value(negative, large, scale)

    def _decode_run(self, run: BlockRun) -> Tensor:
        codes = unpack(run.packed, 2, run.shape[1])
        return _value((codes & 1).to(torch.bool), codes > 1, run.scales.view(-1, 1))


def _value(negative: Tensor, large: Tensor, scale: Tensor) -> Tensor:
    mean = wide(scale)
    size = torch.where(large, mean * LARGE, mean * SMALL)
    return torch.where(negative, -size, size)


# In units of the block's mean magnitude: what a value becomes, and from where on it does. Short, so that
# their product with a bf16 scale is exact.
SIZE, TERNARY_BORDER = 2.0, 1.0
_POWERS = (1, 3, 9, 27, 81)
_LEVELS = 127


@dataclass(frozen=True)
class Ternary(BlockCodec):
    """Minus, nothing or plus twice the mean magnitude of the `block`, and its `large` largest values as
    multiples of that: 16.5 × fewer bytes than fp32. Numerics: approximate.

    A gradient has few large values, and those must not wait, as they do where `TwoBit` cuts them off. No
    warm-up is needed. `block`: at most 256. `feedback`: what was not sent is kept and sent later (4 bytes a
    parameter of state); on unless you say otherwise.

    >>> Ternary(large=1).round_trip(torch.tensor([1.0, -1.0, 0.5, 8.0, -3.0, 2.5, 0.0, 0.0]))
    tensor([ 0.,  0.,  0.,  8., -4.,  4.,  0.,  0.])
    """

    block: int = 240
    large: int = 4
    feedback: bool = True
    numerics: ClassVar[Numerics] = "approximate"
    bits: ClassVar[int] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block > 256:
            raise OptionError(f"Ternary(block={self.block}): at most 256, so that a byte can say a place.")
        if not 0 <= self.large <= self.block:
            raise OptionError(f"Ternary(large={self.large}): a number from 0 to {self.block} is needed.")

    def _form(self, step: int = 0) -> BlockFormat:
        return BlockFormat(self.block, self.bits, large=self.large)

    def _encode_run(self, run: BlockRun, values: Tensor, salt: int | None) -> Tensor:
        scale = mean_scale(values)
        run.scales.copy_(scale.view(-1))
        size, finite = wide(scale) * SIZE, scale != NAN
        big = (values.abs() > wide(scale) * TERNARY_BORDER) & finite
        digits = torch.where(big, 1 + (values < 0).to(torch.uint8), 0).to(torch.uint8)
        places = torch.where(finite, self._largest(values), 0)
        ratios = values.gather(1, places) / torch.where(size > 0, size, 1.0)
        levels = torch.where(finite, ratios.round().clamp(-_LEVELS, _LEVELS), 0.0).to(torch.int8)
        digits.scatter_(1, places, 0)
        width = -(-run.shape[1] // 5)
        filled = torch.nn.functional.pad(digits, (0, 5 * width - run.shape[1])).view(-1, 5, width)
        powers = torch.tensor(_POWERS, dtype=torch.int32, device=digits.device).view(1, 5, 1)
        run.packed[:, :width] = (filled * powers).sum(1).to(torch.uint8)
        run.packed[:, width : width + places.shape[1]] = places.to(torch.uint8)
        run.packed[:, width + places.shape[1] :] = levels.view(torch.uint8)
        return values - self._decode_run(run)

    def _largest(self, values: Tensor) -> Tensor:
        """Returns the places of the largest values, a row for each block; of equal values the first ones."""
        bits = values.abs().view(torch.int32).to(torch.int64)
        order = torch.arange(255, 255 - values.shape[1], -1, device=values.device)
        found: Tensor = ((bits << 8) + order).topk(min(self.large, values.shape[1]), 1).indices
        return found

    def _decode_run(self, run: BlockRun) -> Tensor:
        count, width = min(self.large, run.shape[1]), -(-run.shape[1] // 5)
        packed = run.packed[:, :width].unsqueeze(1)
        powers = torch.tensor(_POWERS, dtype=torch.uint8, device=packed.device).view(1, 5, 1)
        digits = (packed // powers % 3).flatten(1)[:, : run.shape[1]]
        signs = (digits == 1).float() - (digits == 2).float()
        places, levels = run.packed[:, width : width + count], run.packed[:, width + count :]
        signs.scatter_(1, places.to(torch.int64), levels.contiguous().view(torch.int8).float())
        return signs * (wide(run.scales.view(-1, 1)) * SIZE)


@dataclass(frozen=True)
class OneBit(BlockCodec):
    """Signs, and the mean magnitude of every `block`: 30.1 × fewer bytes than fp32. Numerics: approximate.

    What was not sent is kept and sent later (error feedback; 4 bytes a parameter of state). The first
    `warmup_steps` steps travel as they are, or through the codec `warmup`, e.g. ``Int4()``: signs serve once
    the optimizer's second moments have settled. `feedback` is to be turned off for changes of parameters
    only: ``gather=Delta(OneBit(feedback=False, warmup_steps=0))``.

    `freeze`: Adam's second moments stay as the warm-up leaves them (as in 1-bit Adam). Without it they follow
    what arrives, which says the same size of all values of a block. For Adam and AdamW; 4 more bytes a
    parameter, divided as the optimizer's state is.

    >>> codec = OneBit(warmup_steps=10)
    >>> codec.active(9), codec.active(10)
    (False, True)
    >>> codec.round_trip(torch.tensor([1.0, -0.5, 0.25, 0.25]))
    tensor([ 0.5000, -0.5000,  0.5000,  0.5000])
    """

    warmup_steps: int = 100
    freeze: bool = False
    warmup: Codec | None = None
    feedback: bool = True
    numerics: ClassVar[Numerics] = "approximate"
    slower_on_gpu = (10.1, 5.9)
    bits: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_steps("OneBit", self.warmup_steps)
        check_freeze("OneBit", self.freeze, self.warmup_steps)
        check_warmup("OneBit", self, self.warmup, self.warmup_steps)

    @property
    def freezes(self) -> bool:
        return self.freeze

    def active(self, step: int) -> bool:
        return step >= self.warmup_steps

    @property
    def early(self) -> tuple[Codec, ...]:
        return () if self.warmup is None else (self.warmup,)

    def at(self, step: int) -> Codec | None:
        return self if self.active(step) else self.warmup

    def _encode_run(self, run: BlockRun, values: Tensor, salt: int | None) -> Tensor:
        scale = mean_scale(values)
        run.scales.copy_(scale.view(-1))
        negative = (values.view(torch.int32) < 0) & (scale != NAN)
        pack(negative.to(torch.uint8), run.packed, 1)
        return values - _signed(negative, scale)

    def _decode_run(self, run: BlockRun) -> Tensor:
        negative = unpack(run.packed, 1, run.shape[1]).to(torch.bool)
        return _signed(negative, run.scales.view(-1, 1))


def _signed(negative: Tensor, scale: Tensor) -> Tensor:
    """Minus the scale where `negative`, else the scale."""
    size = wide(scale)
    return torch.where(negative, -size, size)
