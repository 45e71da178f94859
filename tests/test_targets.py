"""Copies by bands: for all ranks at once what rank by rank gives, in a number of views that does not grow."""

from __future__ import annotations

import random

import pytest
import torch

from zeroshard.comm import NcclTransport, Targets, in_wire
from zeroshard.comm.targets import totals_of
from zeroshard.count.layout import Pack, Split, slots_for

WORLDS = (1, 2, 3, 7, 16, 300)
SHAPES: list[tuple[int, ...]] = [
    (),
    (0, 3),
    (1,),
    (5, 3),
    (16, 2),
    (24,),
    (33, 1),
    (7, 4),
    (1000,),
    (1001, 2),
]


def pack_of(split: Split, world: int, flags: bool = False) -> Pack:
    shapes = random.Random(world).sample(SHAPES, len(SHAPES))
    return Pack(tuple(slots_for([(f"p{n}", s) for n, s in enumerate(shapes)], world, split)), world, flags)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("split", ["rows", "level", "whole"])
def test_ranks_of_a_band_own_equally_much(split: Split, world: int) -> None:
    pack = pack_of(split, world)
    for bands in (pack.bands, pack.bands_around([world // 2])):
        assert [rank for band in bands for rank in range(band.start, band.stop)] == list(range(world))
        for band in bands:
            for rank in range(band.start, band.stop):
                assert band.held == tuple(slot.held(rank) for slot in pack.slots)
    assert len(pack.bands) <= 2 * len(pack.slots) + 1
    alone = [band for band in pack.bands_around([world // 2]) if band.start == world // 2]
    assert [len(band) for band in alone] == [1]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("split", ["rows", "level", "whole"])
@pytest.mark.parametrize("in_place", [True, False])
def test_by_bands_comes_what_rank_by_rank_comes(split: Split, world: int, in_place: bool) -> None:
    """Out of a wire, and out of pieces without padding that begin at equal distances."""
    pack, own = pack_of(split, world), world // 2 if in_place else None
    torch.manual_seed(0)
    whole = [torch.rand(slot.numel) for slot in pack.slots]
    each = max(sum(band.held) for band in pack.bands)
    wire, tight = torch.full((pack.wire,), -1.0), torch.full((world * each,), -1.0)
    for rank in range(world):
        at = rank * each
        for slot, values, offset in zip(pack.slots, whole, pack.offsets(rank), strict=True):
            n, first = slot.held(rank), slot.rows(rank)[0] * slot.row
            wire[pack.starts[rank] + offset :][:n] = tight[at : at + n] = values[first : first + n]
            at += n
    expected = torch.full((pack.full,), -2.0)
    by_rank = Targets(pack, expected, own)
    for rank, targets in enumerate(by_rank):
        cut = pack.cuts_of_pieces[rank] if targets else []
        for target, (offset, n) in zip(targets, cut, strict=True):
            target.copy_(wire[pack.starts[rank] + offset :][:n])
    assert not (in_place and by_rank[world // 2])
    for pieces, apart in ((wire, None), (tight, each)):
        buffer = torch.full((pack.full,), -2.0)
        to, of = Targets(pack, buffer, own).pairs(pieces, apart)
        if to:
            torch._foreach_copy_(to, of)
        assert torch.equal(buffer, expected)
        assert len(to) <= (2 * len(pack.slots) + 3) * len(pack.slots)
    # Between GPUs, with targets by bands and by rank.
    nccl, cuts = object.__new__(NcclTransport), pack.cuts_of_full
    for by_bands in (True, False):
        buffer = torch.full((pack.full,), -2.0)
        out = Targets(pack, buffer, own)
        nccl._copy_out(tight, each, cuts, out if by_bands else list(out))
        assert torch.equal(buffer, expected)
        assert totals_of(cuts, out) == [sum(n for _, n in cut) for cut in cuts]


def test_pieces_of_a_band_are_rows_of_the_wire() -> None:
    pack = pack_of("rows", 7, flags=True)
    wire = torch.arange(pack.wire)
    for band in pack.bands:
        rows = in_wire(wire, pack, band).view(len(band), -1)
        for rank, row in zip(range(band.start, band.stop), rows, strict=True):
            assert torch.equal(row, wire[pack.starts[rank] :][: pack.pieces[rank]])
