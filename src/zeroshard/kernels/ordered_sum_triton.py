"""Sums in rank order on a GPU, in Triton: one pass over memory, the bits of adding one shard after another.

MASKED programs look at where the shard ends and take what is left over by the others.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Triton takes constants of its own kind only. TILE is that of ordered.py: small, since a rank of a thousand
# has few elements and all multiprocessors are to have some. STEP: loads that are on their way at once.
TILE = tl.constexpr(256)
STEP = tl.constexpr(16)


@triton.jit(do_not_specialize=["count", "ranks", "scale"])
def sum_in_order(shards, out, count, ranks, scale, MASKED: tl.constexpr):
    """`shards`: `ranks` times `count` numbers of 16 bits; `out`: fp32."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    if MASKED:
        at += count // TILE * TILE
    mask = at < count
    total = tl.load(shards + at, mask=mask, other=0.0).to(tl.float32)
    shard = shards + at
    for first in range(1, ranks, STEP):
        number = tl.zeros([TILE], tl.int32) + first
        for rank in tl.static_range(STEP):
            shard += count
            here = number < ranks - rank
            more = tl.load(shard, mask=mask & here, other=0.0).to(tl.float32)
            total = tl.where(here, total + more, total)
    tl.store(out + at, total * scale, mask=mask)
