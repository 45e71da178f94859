"""Blocks of integers on a GPU, in Triton: one pass over memory, the bits of codec/integers.py.

A program takes ROWS blocks of BLOCK values; SIDE is half a block for four bits, else a block, and PAD the
next power of two. Launched with `enable_fp_fusion=False`: a fused multiply-add would round otherwise than the
CPU. MASKED programs look at where the piece ends, which keeps them from moving sixteen bytes at a time; only
the last few are.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Triton takes constants of its own kind only. The numbers are those of integers.py and codes.h.
NAN = tl.constexpr(0x7FC0)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
TINY = tl.constexpr(27 << 23)
HUGE = tl.constexpr(254 << 23)
ROUNDER = tl.constexpr(12582912.0)
GOLDEN = tl.constexpr(0x9E3779B1)


@triton.jit
def _tile(first, count, BLOCK: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr):
    """The blocks of this program: their numbers, their lengths, and the columns of a side."""
    row = first + tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    length = tl.minimum(count - row * BLOCK, BLOCK).to(tl.int32)
    return row, length, tl.arange(0, PAD)


@triton.jit
def _wanted(values, residual, at, mask, FEEDBACK: tl.constexpr, MASKED: tl.constexpr):
    other = 0.0 if MASKED else None
    found = tl.load(values + at, mask=mask, other=other)
    if FEEDBACK:
        found += tl.load(residual + at, mask=mask, other=other)
    return found


@triton.jit
def _largest(wanted):
    return tl.max(wanted.to(tl.int32, bitcast=True) & MAGNITUDE, axis=1)


@triton.jit
def _scale(top, LEVELS: tl.constexpr):
    """The bits of the bf16 scale, rounded up, and whether it is an ordinary one."""
    step = top.to(tl.float32, bitcast=True) * (1.0 / LEVELS)
    up = (step.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    usable = (top >= TINY) & (top < HUGE)
    return tl.where(usable, up, tl.where(top < TINY, 0, NAN)), usable


@triton.jit
def _whole(
    wanted,
    usable,
    inverse,
    place,
    salt,
    LEVELS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Whole numbers of scales, as floats."""
    steps = tl.where(usable[:, None], wanted, 0.0) * inverse[:, None]
    if STOCHASTIC:
        mixed = wanted.to(tl.uint32, bitcast=True) ^ (place.to(tl.uint32) * GOLDEN + salt.to(tl.uint32))
        mixed = (mixed ^ (mixed >> 16)) * 0x45D9F3B
        mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6D
        dice = (mixed >> 16).to(tl.float32) * 1.52587890625e-05 + (LEVELS + 1)
        risen = (steps + dice).to(tl.int32) - (LEVELS + 1)
        whole = tl.minimum(tl.maximum(risen, -LEVELS), LEVELS).to(tl.float32)
    else:
        whole = (steps + ROUNDER) - ROUNDER
    return whole


@triton.jit
def _keep(residual, at, mask, wanted, whole, half, wide, MASKED: tl.constexpr):
    """What was not sent, except where something was not finite."""
    finite = (half != NAN)[:, None]
    if MASKED:
        finite = finite & mask
    tl.store(residual + at, wanted - whole * wide[:, None], mask=finite)


@triton.jit(do_not_specialize=["first", "count", "salt"])
def encode_blocks(
    values, residual, scales, packed, first, count, salt,
    BLOCK: tl.constexpr, SIDE: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr,
    FEEDBACK: tl.constexpr, STOCHASTIC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    row, length, column = _tile(first, count, BLOCK, PAD, ROWS)
    low_at = row[:, None] * BLOCK + column[None, :]
    side = (length + (BLOCK // SIDE - 1)) // (BLOCK // SIDE)
    low_mask = (column[None, :] < side[:, None]) if MASKED else None
    low = _wanted(values, residual, low_at, low_mask, FEEDBACK, MASKED)
    top = _largest(low)
    if SIDE < BLOCK:
        high_at = low_at + (side[:, None] if MASKED else SIDE)
        high_mask = (column[None, :] + side[:, None] < length[:, None]) if MASKED else None
        high = _wanted(values, residual, high_at, high_mask, FEEDBACK, MASKED)
        top = tl.maximum(top, _largest(high))
    half, usable = _scale(top, LEVELS)
    tl.store(scales + row, half.to(tl.int16), mask=(length > 0) if MASKED else None)
    wide = (half << 16).to(tl.float32, bitcast=True)
    inverse = tl.div_rn(1.0, tl.where(usable, wide, 1.0))
    whole = _whole(low, usable, inverse, low_at, salt, LEVELS, STOCHASTIC)
    bits = whole.to(tl.int32)
    if FEEDBACK:
        _keep(residual, low_at, low_mask, low, whole, half, wide, MASKED)
    if SIDE < BLOCK:
        other = _whole(high, usable, inverse, high_at, salt, LEVELS, STOCHASTIC)
        bits = (bits & 15) | (other.to(tl.int32) << 4)
        if FEEDBACK:
            _keep(residual, high_at, high_mask, high, other, half, wide, MASKED)
    tl.store(packed + row[:, None] * SIDE + column[None, :], bits.to(tl.int8), mask=low_mask)


@triton.jit
def _land(out, at, mask, value, ADD: tl.constexpr):
    if ADD:
        value += tl.load(out + at, mask=mask)
    tl.store(out + at, value, mask=mask)


@triton.jit(do_not_specialize=["first", "count"])
def decode_blocks(
    scales, packed, out, first, count,
    BLOCK: tl.constexpr, SIDE: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr,
    ADD: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    row, length, column = _tile(first, count, BLOCK, PAD, ROWS)
    half = tl.load(scales + row, mask=(length > 0) if MASKED else None)
    wide = (half.to(tl.int32) << 16).to(tl.float32, bitcast=True)[:, None]
    side = (length + (BLOCK // SIDE - 1)) // (BLOCK // SIDE)
    low_mask = (column[None, :] < side[:, None]) if MASKED else None
    low_at = row[:, None] * BLOCK + column[None, :]
    bits = tl.load(packed + row[:, None] * SIDE + column[None, :], mask=low_mask).to(tl.int32)
    if SIDE == BLOCK:
        _land(out, low_at, low_mask, bits.to(tl.float32) * wide, ADD)
    else:
        low, high = ((bits & 15) ^ 8) - 8, bits >> 4
        _land(out, low_at, low_mask, low.to(tl.float32) * wide, ADD)
        high_mask = (column[None, :] + side[:, None] < length[:, None]) if MASKED else None
        _land(out, low_at + (side[:, None] if MASKED else SIDE), high_mask, high.to(tl.float32) * wide, ADD)


@triton.jit(do_not_specialize=["first", "count"])
def add_halves(halves, out, first, count, PAD: tl.constexpr, MASKED: tl.constexpr) -> None:
    """out += halves: torch's own addition of two dtypes is not vectorised."""
    at = (first + tl.program_id(0).to(tl.int64)) * PAD + tl.arange(0, PAD)
    mask = (at < count) if MASKED else None
    _land(out, at, mask, tl.load(halves + at, mask=mask).to(tl.float32), True)
