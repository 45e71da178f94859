"""Blocks of integers on a GPU, in Triton: one pass over memory, the bits of compress/quantized.py.

A program takes a tile of TILE values: some blocks of BLOCK values, a row each. SIDE is half a block for four
bits, else a block, and PAD the next power of two. MASKED programs look at where the shard ends, which keeps
them from moving sixteen bytes at a time; they take what is left over by the others. To be launched with
`enable_fp_fusion=False`: a fused multiply-add would round otherwise than the CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Triton takes constants of its own kind only. The numbers are those of integers.py and codes.h.
TILE = tl.constexpr(4096)
NAN = tl.constexpr(0x7FC0)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
TINY = tl.constexpr(27 << 23)
HUGE = tl.constexpr(254 << 23)
ROUNDER = tl.constexpr(12582912.0)
GOLDEN = tl.constexpr(0x9E3779B1)


@triton.jit
def _rows(count, BLOCK: tl.constexpr, SIDE: tl.constexpr, PAD: tl.constexpr, MASKED: tl.constexpr):
    """The numbers of this program's blocks, and their lengths."""
    ROWS: tl.constexpr = TILE * SIDE // (PAD * BLOCK)
    first = tl.program_id(0).to(tl.int64) * ROWS
    if MASKED and PAD == SIDE:
        first += count // (ROWS * BLOCK) * ROWS
    row = first + tl.arange(0, ROWS)
    return row, tl.minimum(count - row * BLOCK, BLOCK).to(tl.int32)


@triton.jit
def _wanted(values, residual, at, mask, MASKED: tl.constexpr):
    other = 0.0 if MASKED else None
    found = tl.load(values + at, mask=mask, other=other)
    if residual is not None:
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
def _whole(wanted, usable, inverse, place, salt, LEVELS: tl.constexpr):
    """Rounds values to whole multiples of their scale and returns those numbers as floats; with `salt` the
    rounding is stochastic."""
    steps = tl.where(usable[:, None], wanted, 0.0) * inverse[:, None]
    if salt is not None:
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
def _keep(residual, at, mask, left, half, MASKED: tl.constexpr):
    """What was not sent, except where something was not finite."""
    finite = (half != NAN)[:, None]
    if MASKED:
        finite = finite & mask
    tl.store(residual + at, left, mask=finite)


@triton.jit(do_not_specialize=["count", "salt"])
def encode_blocks(
    values, residual, scales, packed, count, salt,
    BLOCK: tl.constexpr, BITS: tl.constexpr, PAD: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`residual` is None without feedback, `salt` without dice."""
    LEVELS: tl.constexpr = (1 << (BITS - 1)) - 1
    SIDE: tl.constexpr = BLOCK * BITS // 8
    row, length = _rows(count, BLOCK, SIDE, PAD, MASKED)
    column = tl.arange(0, PAD)
    side = (length + (8 // BITS - 1)) // (8 // BITS)
    low_at = row[:, None] * BLOCK + column[None, :]
    low_mask = (column[None, :] < side[:, None]) if MASKED else None
    low = _wanted(values, residual, low_at, low_mask, MASKED)
    top = _largest(low)
    if BITS == 4:
        high_at = low_at + (side[:, None] if MASKED else SIDE)
        high_mask = (column[None, :] + side[:, None] < length[:, None]) if MASKED else None
        high = _wanted(values, residual, high_at, high_mask, MASKED)
        top = tl.maximum(top, _largest(high))
    half, usable = _scale(top, LEVELS)
    tl.store(scales + row, half.to(tl.int16), mask=(length > 0) if MASKED else None)
    wide = (half << 16).to(tl.float32, bitcast=True)
    inverse = tl.div_rn(1.0, tl.where(usable, wide, 1.0))
    whole = _whole(low, usable, inverse, low_at, salt, LEVELS)
    bits = whole.to(tl.int32)
    if residual is not None:
        _keep(residual, low_at, low_mask, low - whole * wide[:, None], half, MASKED)
    if BITS == 4:
        other = _whole(high, usable, inverse, high_at, salt, LEVELS)
        bits = (bits & 15) | (other.to(tl.int32) << 4)
        if residual is not None:
            _keep(residual, high_at, high_mask, high - other * wide[:, None], half, MASKED)
    tl.store(packed + row[:, None] * SIDE + column[None, :], bits.to(tl.int8), mask=low_mask)


@triton.jit
def _land(out, at, mask, value, ADD: tl.constexpr):
    if ADD:
        value += tl.load(out + at, mask=mask)
    tl.store(out + at, value, mask=mask)


@triton.jit(do_not_specialize=["count"])
def decode_blocks(
    scales, packed, out, count,
    BLOCK: tl.constexpr, BITS: tl.constexpr, PAD: tl.constexpr, ADD: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    SIDE: tl.constexpr = BLOCK * BITS // 8
    row, length = _rows(count, BLOCK, SIDE, PAD, MASKED)
    column = tl.arange(0, PAD)
    side = (length + (8 // BITS - 1)) // (8 // BITS)
    half = tl.load(scales + row, mask=(length > 0) if MASKED else None)
    wide = (half.to(tl.int32) << 16).to(tl.float32, bitcast=True)[:, None]
    low_mask = (column[None, :] < side[:, None]) if MASKED else None
    low_at = row[:, None] * BLOCK + column[None, :]
    bits = tl.load(packed + row[:, None] * SIDE + column[None, :], mask=low_mask).to(tl.int32)
    if BITS == 8:
        _land(out, low_at, low_mask, bits.to(tl.float32) * wide, ADD)
    else:
        low, high = ((bits & 15) ^ 8) - 8, bits >> 4
        _land(out, low_at, low_mask, low.to(tl.float32) * wide, ADD)
        high_mask = (column[None, :] + side[:, None] < length[:, None]) if MASKED else None
        _land(out, low_at + (side[:, None] if MASKED else SIDE), high_mask, high.to(tl.float32) * wide, ADD)


@triton.jit(do_not_specialize=["count"])
def widen(halves, out, count, ADD: tl.constexpr, MASKED: tl.constexpr):
    """out = halves, or out += halves: torch's own copy and addition of two dtypes are not vectorised."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    if MASKED:
        at += count // TILE * TILE
    mask = (at < count) if MASKED else None
    _land(out, at, mask, tl.load(halves + at, mask=mask).to(tl.float32), ADD)
