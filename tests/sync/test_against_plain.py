"""Policies and codecs have the bits of `by_hand`: plain PyTorch that does what the documentation says.

`benchmarks/exact/sync_by_hand.py` has every policy with every codec at every stage; these stand for
the others.
"""

from __future__ import annotations

from functools import cache

import pytest
from by_hand import Cell, Trained, sharded, trained_by_hand

import zeroshard as zs
from zeroshard.testing import assert_same_bits, ranks

pytestmark = pytest.mark.ranks
AVERAGED = zs.Nesterov(1.0, 0.0)
COPY_EVENTS = zs.OneBit(warmup_steps=2, block=64)
CELLS = [
    Cell(2, 0, compress=zs.Cast("bfloat16")),
    Cell(2, 0, compress=zs.TopK(ratio=0.1), transport="gloo"),
    Cell(2, 1, compress=zs.Int8(block=64, feedback=True), accumulate=2),
    Cell(2, 2, compress=zs.OneBit(warmup_steps=0), optimizer="sgd"),
    Cell(2, 3, compress=zs.Int4()),
    *[Cell(2, stage, zs.Delayed(), transport=way) for stage, way in ((0, "gloo"), (1, "shm"), (2, "gloo"))],
    Cell(2, 3, zs.Delayed(warmup_steps=1), zs.TopK(ratio=0.1)),
    Cell(2, 0, zs.Local(steps=2), transport="gloo"),
    Cell(2, 0, zs.Local(steps=3, outer=AVERAGED, rates=(1.0, 0.5))),
    Cell(3, 0, compress=COPY_EVENTS),
    Cell(3, 0, zs.Delayed()),
    Cell(3, 2, zs.Delayed(), COPY_EVENTS),
    Cell(3, 3, compress=zs.TopK(ratio=0.1), bucket_bytes=1),
    Cell(3, 0, zs.Local(steps=4, fragments=2), optimizer="sgd"),
]


@cache
def found(world: int) -> list[list[Trained]]:
    """By rank and cell: what all cells of a number of ranks came to, in one go."""
    return ranks(world).run(sharded, [cell for cell in CELLS if cell.world == world], timeout=300)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_rank_has_the_bits_of_what_is_done_by_hand(cell: Cell) -> None:
    number = [other for other in CELLS if other.world == cell.world].index(cell)
    expected = trained_by_hand(cell)
    for rank, told in enumerate(found(cell.world)):
        assert_same_bits(told[number].weights, expected.weights)
        if cell.compress is not None and not getattr(cell.compress, "warmup_steps", 0):
            assert told[number].errors == pytest.approx([expected.errors[rank]], rel=1e-5)
            assert expected.errors[rank] > 1e-4
