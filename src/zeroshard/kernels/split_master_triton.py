"""Split masters on a GPU, in Triton: one pass over memory, the bits of [Note: split master] in numbers.h.

MASKED programs look at where the tensor ends and take what is left over by the others.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Triton takes constants of its own kind only. The numbers are those of halves.py and numbers.h.
TILE = tl.constexpr(4096)
INFINITE = tl.constexpr(0x7F80)
HALF = tl.constexpr(0x8000)
LOW = tl.constexpr(0xFFFF)


@triton.jit
def _places(count, MASKED: tl.constexpr):
    """Of this program's elements."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    if MASKED:
        at += count // TILE * TILE
    return at


@triton.jit(do_not_specialize=["count"])
def split(master, weight, remainder, count, MASKED: tl.constexpr):
    """All as integers of their widths."""
    at = _places(count, MASKED)
    mask = (at < count) if MASKED else None
    bits = tl.load(master + at, mask=mask)
    low, high = bits & LOW, (bits >> 16) & LOW
    kind, past = high & 0x7FFF, low >= HALF
    up = (past & (kind <= INFINITE)).to(tl.int32)
    top = tl.where(past & (kind == INFINITE), high & HALF, high + up)
    tl.store(weight + at, top.to(tl.int16), mask=mask)
    tl.store(remainder + at, low.to(tl.int16), mask=mask)


@triton.jit(do_not_specialize=["count"])
def join(weight, remainder, master, count, MASKED: tl.constexpr):
    """The inverse of split."""
    at = _places(count, MASKED)
    mask = (at < count) if MASKED else None
    top = tl.load(weight + at, mask=mask).to(tl.int32) & LOW
    low = tl.load(remainder + at, mask=mask).to(tl.int32) & LOW
    kind, past = top & 0x7FFF, low >= HALF
    down = (past & (kind <= INFINITE)).to(tl.int32)
    high = tl.where(past & (kind == 0), top | INFINITE, top - down)
    tl.store(master + at, (high << 16) | low, mask=mask)
