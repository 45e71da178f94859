"""Layout in integers: every row has one owner, nothing overlaps, and what is cut up can be put together
again.
"""

from __future__ import annotations

import random
from itertools import pairwise
from math import prod

import pytest
import torch
from counting import calls_of

from zeroshard.layout.sharding import (
    ALIGN,
    PackLayout,
    RankLengths,
    ShardSpec,
    Split,
    aligned,
    buckets,
    owner_runs,
    slots_for,
)

WORLDS = (1, 2, 3, 4, 7, 64)


def shapes(seed: int, count: int = 12) -> list[tuple[str, tuple[int, ...]]]:
    """Named shapes of all kinds: without a dimension, empty, with fewer rows than ranks, with odd ones."""
    draw = random.Random(seed)
    kinds = [(), (0,), (1,), (3, 5), (0, 4), (64, 2)]
    odd = [tuple(draw.randint(1, 90) for _ in range(draw.randint(1, 3))) for _ in range(count - len(kinds))]
    return [(f"p{n}", shape) for n, shape in enumerate(draw.sample(kinds + odd, count))]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("seed", range(5))
def test_rows_are_what_torch_chunk_gives(world: int, seed: int) -> None:
    for name, shape in shapes(seed):
        if not shape:
            continue
        slot = ShardSpec(name, shape, world)
        whole = torch.arange(slot.numel).reshape(shape)
        chunks = list(whole.chunk(world)) if shape[0] else []
        for rank in range(world):
            start, stop = slot.rows(rank)
            expected = chunks[rank] if rank < len(chunks) else whole[:0]
            assert torch.equal(whole[start:stop], expected)
            assert slot.local_shape(rank) == tuple(expected.shape)
            assert slot.held(rank) == expected.numel()


@pytest.mark.parametrize("world", WORLDS)
def test_every_row_has_one_owner(world: int) -> None:
    splits: tuple[Split, ...] = ("rows", "whole")
    for split in splits:
        for slot in slots_for(shapes(1), world, split):
            owners = [0] * slot.height
            for rank in range(world):
                start, stop = slot.rows(rank)
                for row in range(start, stop):
                    owners[row] += 1
            assert owners == [world if slot.split == "copy" else 1] * slot.height


def test_no_bucket_is_of_two_runs_of_owners() -> None:
    owners = [("words", "root"), ("up", "block"), ("down", "block"), ("norm", "root"), ("head", "root")]
    owner_run = owner_runs(owners)
    assert buckets([("words", 1), ("norm", 1), ("head", 1)], 100, owner_run) == [["words"], ["norm", "head"]]
    assert buckets([("up", 1), ("down", 100)], 100, owner_run) == [["up"], ["down"]]


def test_without_a_dimension_or_with_one_rank_all_have_a_copy() -> None:
    assert [slot.split for slot in slots_for([("a", ()), ("b", (4,))], 2, "rows")] == ["copy", "rows"]
    assert [slot.split for slot in slots_for([("a", ()), ("b", (4,))], 2, "whole")] == ["copy", "whole"]
    assert [slot.split for slot in slots_for([("a", ()), ("b", (4,))], 1, "rows")] == ["copy", "copy"]
    scalar = ShardSpec("a", (), 2, "copy")
    assert (scalar.numel, scalar.rows(1), scalar.held(1), scalar.local_shape(1)) == (1, (0, 1), 1, ())


@pytest.mark.parametrize("world", [2, 3, 16])
@pytest.mark.parametrize("seed", range(5))
def test_whole_tensors_are_spread_evenly(world: int, seed: int) -> None:
    """Largest first, to whom has least: nobody has more than the average and one largest tensor."""
    slots = [slot for slot in slots_for(shapes(seed, 60), world, "whole") if slot.split == "whole"]
    load = [sum(slot.held(rank) for slot in slots) for rank in range(world)]
    assert sum(load) == sum(slot.numel for slot in slots)
    assert max(load) <= sum(load) / world + max(slot.numel for slot in slots)


@pytest.mark.parametrize("world", [1, 2, 5, 100])
@pytest.mark.parametrize("seed", range(4))
def test_a_whole_tensor_goes_to_the_first_rank_that_has_least(world: int, seed: int) -> None:
    tensors = shapes(seed, 60)
    load, owner = [0] * world, {}
    for name, shape in sorted(tensors, key=lambda t: (-prod(t[1]), t[0])):
        owner[name] = load.index(min(load))
        load[owner[name]] += prod(shape)
    slots = slots_for(tensors, world, "whole")
    assert {slot.name: slot.owner for slot in slots} == owner


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("flags", [False, True])
@pytest.mark.parametrize("split", ["rows", "whole"])
def test_places_are_aligned_and_apart(world: int, flags: bool, split: Split) -> None:
    pack = PackLayout(tuple(slots_for(shapes(2), world, split)), world, flags)
    for rank in range(world):
        end = 0
        for slot, at in zip(pack.slots, pack.offsets(rank), strict=True):
            assert at == aligned(end)
            end = at + slot.held(rank)
        assert pack.body(rank) == aligned(end)
        assert pack.shards[rank] - pack.body(rank) == (aligned(len(pack.slots)) if flags else 0)
        assert pack.starts[rank] == sum(pack.shards[:rank])
    assert pack.wire == sum(pack.shards)
    ends = [at + slot.numel for slot, at in zip(pack.slots, pack.full_offsets, strict=True)]
    assert all(at % ALIGN == 0 for at in pack.full_offsets)
    assert all(end <= at for end, at in zip(ends, pack.full_offsets[1:], strict=False))
    assert ends[-1] <= pack.full


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("split", ["rows", "whole"])
@pytest.mark.parametrize("seed", range(3))
def test_shards_put_together_are_the_whole(world: int, split: Split, seed: int) -> None:
    """A gather from shards, and a publish between full buffers, both give every rank all of every tensor."""
    pack = PackLayout(tuple(slots_for(shapes(seed), world, split)), world)
    whole = {slot.name: torch.rand(slot.shape) for slot in pack.slots}
    shards = [torch.full((pack.shards[rank],), -1.0) for rank in range(world)]
    for rank in range(world):
        for slot, at in zip(pack.slots, pack.offsets(rank), strict=True):
            start, stop = slot.rows(rank)
            rows = whole[slot.name][start:stop] if slot.shape else whole[slot.name]
            shards[rank][at : at + slot.held(rank)] = rows.reshape(-1)
    full = torch.full((pack.full,), -1.0)
    for rank, (from_shard, to_full) in enumerate(zip(pack.cuts_of_shards, pack.cuts_of_full, strict=True)):
        for (at, numel), (to, count) in zip(from_shard, to_full, strict=True):
            assert numel == count
            full[to : to + numel] = shards[rank][at : at + numel]
    for slot, at in zip(pack.slots, pack.full_offsets, strict=True):
        assert torch.equal(full[at : at + slot.numel].view(slot.shape), whole[slot.name])


@pytest.mark.parametrize("seed", range(20))
def test_buckets_keep_order_and_limit(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [(f"p{n}", draw.randint(1, 50)) for n in range(draw.randint(1, 60))]
    limit = draw.randint(1, 120)
    groups = buckets(sizes, limit)
    assert [name for group in groups for name in group] == [name for name, _ in sizes]
    size = dict(sizes)
    for group in groups:
        assert len(group) == 1 or sum(size[name] for name in group) <= limit
    for first, second in pairwise(groups):
        assert sum(size[name] for name in [*first, second[0]]) > limit, "the next would have fitted"


def test_no_tensors_no_buckets() -> None:
    assert buckets([], 100) == []


def test_ten_thousand_ranks_cost_a_call_each() -> None:
    def lay_out() -> None:
        slots = slots_for([(f"blocks.{n}.weight", (8192, 8192)) for n in range(8)], 10_000, "rows")
        pack = PackLayout(tuple(slots), 10_000, flags=True)
        assert pack.wire >= 8 * 8192 * 8192
        assert sum(slot.held(9_999) for slot in slots) == 0

    assert calls_of(lay_out) < 2 * 10_000


@pytest.mark.parametrize("lengths", [(5,), (4, 4, 4), (3, 3, 2, 0, 0), (0, 0), (1, 2, 2, 1)])
def test_lengths_are_counted_as_they_are(lengths: tuple[int, ...]) -> None:
    found = RankLengths.of(list(lengths))
    assert (found, found.total, found.most) == (lengths, sum(lengths), max(lengths))
    assert found.even == (len(set(lengths)) == 1)
    assert found.starts == tuple(sum(lengths[:rank]) for rank in range(len(lengths)))
    assert [run.each for run in found.runs for _ in range(len(run))] == list(lengths)
    assert [rank for run in found.runs for rank in range(run.start, run.stop)] == list(range(len(lengths)))
    assert RankLengths.of(found) is found


def test_a_wire_is_filled_by_a_copy_for_each_tensor_and_band() -> None:
    named: list[tuple[str, tuple[int, ...]]] = [("even", (1024, 8)), ("uneven", (2816, 8)), ("few", (3,))]
    assert PackLayout(tuple(slots_for(named, 8, "rows")), 8).copies == 5  # of 3 rows 3 ranks have one
    assert PackLayout(tuple(slots_for(named, 1024, "rows")), 1024).copies == 8
