"""Copies by bands: for all ranks at once what rank by rank gives, in a number of views that does not grow."""

from __future__ import annotations

import itertools
import random
from unittest.mock import patch

import pytest
import torch

from zeroshard.comm import GatherTargets, NcclTransport, TransportBuffer, in_wire
from zeroshard.comm.targets import totals_of
from zeroshard.comm.transport import Cuts
from zeroshard.layout.sharding import PackLayout, Split, slots_for

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


def pack_of(split: Split, world: int, flags: bool = False) -> PackLayout:
    shapes = random.Random(world).sample(SHAPES, len(SHAPES))
    return PackLayout(
        tuple(slots_for([(f"p{n}", s) for n, s in enumerate(shapes)], world, split)), world, flags
    )


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
    """Out of a wire, and out of shards without padding that begin at equal distances: laid out as on the
    stage, and dense."""
    pack, own = pack_of(split, world), world // 2 if in_place else None
    torch.manual_seed(0)
    whole = [torch.rand(slot.numel) for slot in pack.slots]
    each = max(sum(band.held) for band in pack.bands)
    wire = torch.full((pack.wire,), -1.0)
    stage, dense = (torch.full((world * each,), -1.0) for _ in range(2))
    expected = torch.full((pack.full,), -2.0)
    by_rank = GatherTargets(pack, expected, own)
    for rank in range(world):
        at, places = rank * each, zip(pack.offsets(rank), by_rank.staged(rank), strict=True)
        for slot, values, (offset, staged) in zip(pack.slots, whole, places, strict=True):
            n, first = slot.held(rank), slot.rows(rank)[0] * slot.row
            rows = values[first : first + n]
            wire[pack.starts[rank] + offset :][:n] = dense[at : at + n] = rows
            stage[rank * each + staged :][:n] = rows
            at += n
    for rank, targets in enumerate(by_rank):
        cut = pack.cuts_of_shards[rank] if targets else []
        for target, (offset, n) in zip(targets, cut, strict=True):
            target.copy_(wire[pack.starts[rank] + offset :][:n])
    assert not (in_place and by_rank[world // 2])
    for in_turn in (False, True):
        buffer = torch.full((pack.full,), -2.0)
        out = GatherTargets(pack, buffer, own)
        to, of = out.in_turn(stage) if in_turn else out.in_wire(wire)
        if to:
            torch._foreach_copy_(to, of)
        assert torch.equal(buffer, expected)
        assert len(to) <= (2 * len(pack.slots) + 3) * len(pack.slots)
        if in_turn and split == "rows":
            assert len(to) <= 4 * len(pack.slots)
    # Between GPUs, with targets by bands and by rank.
    nccl, cuts = object.__new__(NcclTransport), pack.cuts_of_full
    for by_bands in (True, False):
        buffer = torch.full((pack.full,), -2.0)
        out = GatherTargets(pack, buffer, own)
        nccl._copy_out(stage if by_bands else dense, each, cuts, out if by_bands else list(out))
        assert torch.equal(buffer, expected)
        assert totals_of(cuts, out) == tuple(sum(n for _, n in cut) for cut in cuts)


class Peers:
    """Ranks over NCCL one after another: first all say what they would send, then each gets that of all."""

    def __init__(self, pack: PackLayout, world: int) -> None:
        self.ranks = [object.__new__(NcclTransport) for _ in range(world)]
        self.sent: list[list[torch.Tensor]] = []
        for rank, transport in enumerate(self.ranks):
            transport.rank, transport.size, transport.device = rank, world, torch.device("cpu")
            transport._stages = {}

    def gather(
        self, rank: int, source: TransportBuffer, cuts: Cuts, out: GatherTargets
    ) -> list[tuple[int, int]]:
        """Lengths of what was brought, and of this rank's part in it."""
        transport, brought = self.ranks[rank], list[tuple[int, int]]()

        def bring(whole: list[torch.Tensor], mine: list[torch.Tensor]) -> None:
            brought.extend((a.numel(), b.numel()) for a, b in zip(whole, mine, strict=True))
            if len(self.sent) < len(self.ranks):
                self.sent.append([part.clone() for part in mine])
                return
            for number, to in enumerate(whole):
                to.copy_(torch.cat([sent[number] for sent in self.sent]))

        with patch.object(NcclTransport, "_bring", staticmethod(bring)):
            transport._fetch(source, cuts, out)
        return brought


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_large_even_tensors_come_straight_to_their_place(world: int, in_place: bool, on_host: bool) -> None:
    """The others, in the same launch, by way of the stage, which has no room for the large ones."""
    shapes = [(7, 4), (64, 3), (5,), (1024, 2), (), (96,), (1023, 2), (4096,)]
    with patch("zeroshard.layout.sharding.STRAIGHT", 1000):
        pack = PackLayout(
            tuple(slots_for([(f"p{n}", s) for n, s in enumerate(shapes)], world, "rows")), world
        )
        assert [slot.straight for slot in pack.slots] == [s in ((1024, 2), (4096,)) for s in shapes]
        torch.manual_seed(0)
        expected = torch.full((pack.full,), -2.0)
        for slot, at in zip(pack.slots, pack.full_offsets, strict=True):
            expected[at : at + slot.numel] = torch.rand(slot.numel)
        peers, cuts = Peers(pack, world), pack.cuts_of_full if in_place else pack.cuts_of_shards
        for turn, rank in itertools.product(range(2), range(world)):
            buffer = torch.full((pack.full,), -2.0)
            mine = buffer if in_place else torch.full((pack.shards[rank],), -1.0)
            for (to, n), (of, _) in zip(cuts[rank], pack.cut_of_full(rank), strict=True):
                mine[to : to + n] = expected[of : of + n]
            out = GatherTargets(pack, buffer, rank if in_place else None)
            transport_buffer = TransportBuffer("rows", mine, state={"host": True} if on_host else {})
            brought = peers.gather(rank, transport_buffer, cuts, out)
            assert brought[:2] == [(2048, 2048 // world), (4096, 4096 // world)]
            assert brought[2:] == [(out.each * world, out.each)]
            if turn:
                assert torch.equal(buffer, expected)
            past = sum(length for _, length in brought[:2]) if on_host else 0
            assert peers.ranks[rank]._stages[torch.float32].numel() == out.each * (world + 1) + past


def test_shards_of_a_band_are_rows_of_the_wire() -> None:
    pack = pack_of("rows", 7, flags=True)
    wire = torch.arange(pack.wire)
    for band in pack.bands:
        rows = in_wire(wire, pack, band).view(len(band), -1)
        for rank, row in zip(range(band.start, band.stop), rows, strict=True):
            assert torch.equal(row, wire[pack.starts[rank] :][: pack.shards[rank]])
