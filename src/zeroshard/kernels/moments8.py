"""Stores Adam's moments in 8 bits (numerics: `rounding`): blocks of 256 elements, three fp32 scales a block.

Format of a block, scales (unit, low, high):

- `exp_avg_sq`, uint8: 0 is zero; 1..255 are float bit patterns evenly spaced from that of `low`, the smallest
  non-zero element, to that of `high`, the largest. Even steps of the pattern are near-even steps of the
  logarithm, so no small element becomes zero, under which its update would explode. Rounding is stochastic,
  since a moment with beta2 = 0.999 moves by a thousandth a step and would never leave its code otherwise; the
  dice are a hash of the element's bits and the step number, so a step is reproducible whatever the threads.
- `exp_avg`, int8: code × unit × sqrt(`exp_avg_sq` as stored). Relative to the root, elements of different
  size share a block without loss, and the ratio is what the update uses.

A non-finite element makes its block non-finite. This module is the format in torch; `moments8.h` is the same
in C."""

from __future__ import annotations

import torch

from zeroshard.kernels import checks

from .library import BLOCK

_LEVELS = 254.0
_INFINITY = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF
_TINY = 1e-30  # a ratio below this moves no weight, and its inverse would overflow


def scale_count(numel: int) -> int:
    """The length of the scales of `numel` elements."""
    return 3 * -(-numel // BLOCK)


def salt(step: int) -> int:
    """What makes the dice of one step differ from those of the next."""
    return (step * 0x9E3779B1) & 0xFFFFFFFF


def encode(
    exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, step: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp32 moments as (int8 codes, uint8 codes, fp32 scales)."""
    checks.flat("encode", "exp_avg", exp_avg, (torch.float32,))
    numel = exp_avg.numel()
    checks.flat("encode", "exp_avg_sq", exp_avg_sq, (torch.float32,), numel)
    bits = _blocks(exp_avg_sq).view(torch.int32).to(torch.int64) & _MAGNITUDE
    bits = bits.clamp_max(_INFINITY)  # a NaN's own pattern differs from machine to machine
    high = bits.amax(1, keepdim=True)
    low = torch.minimum(torch.where(bits == 0, _MAGNITUDE, bits).amin(1, keepdim=True), high)
    density = torch.full_like(low, _LEVELS, dtype=torch.float32).div((high - low).clamp_min(1))
    levels = ((bits - low).clamp_min(0).to(torch.float32) * density + _dice(bits, salt(step))).to(torch.int64)
    squares = torch.where(bits == 0, 0, 1 + levels.clamp_max(254))
    root = root_of(_decode_squares(squares, low, high))
    means, unit = _encode_means(_blocks(exp_avg), root)
    scales = torch.cat([unit, _floats(low), _floats(high)], 1)
    return (
        means.to(torch.int8).reshape(-1)[:numel],
        squares.to(torch.uint8).reshape(-1)[:numel],
        scales.reshape(-1),
    )


def decode(
    exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The fp32 moments that the codes stand for."""
    checks.flat("decode", "exp_avg", exp_avg, (torch.int8,))
    numel = exp_avg.numel()
    checks.flat("decode", "exp_avg_sq", exp_avg_sq, (torch.uint8,), numel)
    checks.flat("decode", "scales", scales, (torch.float32,), scale_count(numel))
    unit, low, high = (scales.view(-1, 3)[:, index : index + 1] for index in range(3))
    squares = _decode_squares(_blocks(exp_avg_sq).to(torch.int64), _bits(low), _bits(high))
    means = (_blocks(exp_avg).to(torch.float32) * unit) * root_of(squares)
    return means.reshape(-1)[:numel], squares.reshape(-1)[:numel]


def root_of(values: torch.Tensor) -> torch.Tensor:
    """The square root of fp32 values, correctly rounded. torch.sqrt may not be: MKL's is off by one in the
    last place for one value in six. From fp64, off by one there or not, the rounding to fp32 is always
    right."""
    return values.to(torch.float64).sqrt_().to(torch.float32)


def _encode_means(means: torch.Tensor, root: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of blocks of `exp_avg`, and the unit of each block."""
    ratio = torch.where(root == 0, 0.0, means / root)
    top = (ratio.view(torch.int32) & _MAGNITUDE).amax(1, keepdim=True)
    largest = top.view(torch.float32)
    finite = top < _INFINITY
    usable = finite & (largest > _TINY)
    inverse = torch.where(usable, torch.full_like(largest, 127.0).div(largest), 0.0)
    # (A Python number divided by a tensor would be a product with its reciprocal, rounded twice.)
    codes = torch.round(torch.where(finite, ratio, 0.0) * inverse)
    return codes, torch.where(finite, torch.where(usable, largest / 127.0, 0.0), torch.inf)


def _decode_squares(codes: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    pitch = (high - low).to(torch.float32) / _LEVELS
    bits = low + ((codes - 1).to(torch.float32) * pitch).to(torch.int64)
    return _floats(torch.where(codes == 0, 0, torch.minimum(bits, high)))


def _dice(bits: torch.Tensor, salted: int) -> torch.Tensor:
    """Uniform in [0, 1): the multipliers are below 2**31, so no product leaves 64 bits."""
    mixed = bits ^ salted
    mixed = ((mixed ^ (mixed >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    mixed = mixed ^ (mixed >> 16)
    return (mixed >> 8).to(torch.float32) * 2.0**-24


def _blocks(values: torch.Tensor) -> torch.Tensor:
    """Blocks as rows; the last one filled up with zeros, which no scale looks at."""
    short = -values.numel() % BLOCK
    return torch.nn.functional.pad(values, (0, short)).view(-1, BLOCK) if short else values.view(-1, BLOCK)


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int32).to(torch.int64)


def _floats(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).view(torch.float32)
