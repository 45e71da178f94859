"""A rank's own rows are added straight out of their gradients: the bits of a copy, and no gradient kept for
longer than until the next bucket."""

from __future__ import annotations

from dataclasses import replace

import models
import pytest
import torch
from torch import Tensor

import zeroshard as zs
from zeroshard.comm import sum_spans
from zeroshard.comm.sums import sum_shards
from zeroshard.grads import bucket as held
from zeroshard.grads.bucket import OwnRows, shares_of
from zeroshard.kernels import library
from zeroshard.kernels.passes import SumSpan
from zeroshard.layout import memory
from zeroshard.layout.memory import MemoryModel
from zeroshard.layout.sharding import FlatPackLayout, PackLayout, slots_for
from zeroshard.options import Options
from zeroshard.planner.signatures import blocks_of, rules_of
from zeroshard.testing import assert_same_bits, ranks

WAYS = ("copied", "held", "let go")


class Counted(OwnRows):
    """Counts sums that were made out of gradients; lets go at once where it is told to."""

    added = 0
    early = False

    def fill(self, grads: list[Tensor]) -> bool:
        took = super().fill(grads)
        if self.early:
            self.let_go()
        return took

    def add(self, out: Tensor, shards: list[Tensor], scale: float) -> None:  # type: ignore[override]
        Counted.added += bool(self._grads)
        super().add(out, shards, scale)


def train(way: str, stage: int, transport: str) -> dict[str, Tensor]:
    held.HELD_BYTES = 1 << 30 if way == "copied" else 4
    Counted.added, Counted.early = 0, way == "let go"
    torch.manual_seed(0)
    model = models.GPT(even=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = zs.shard(model, optimizer, stage=stage, transport=transport, bucket_bytes=8192)
    for step in range(2):
        for part in range(2):  # the second is added to what the first has left
            model(models.GPT.batch(2, seed=10 * step + 2 * part + run.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    assert (Counted.added > 0) == (way == "held"), (way, Counted.added)
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def assert_same_in_all_ways(cases: list[tuple[int, str]]) -> None:
    from zeroshard.grads import bucket as plain

    before = held.HELD_BYTES, plain.OwnRows
    plain.OwnRows = Counted  # type: ignore[misc]
    try:
        for stage, transport in cases:
            copied, *others = (train(way, stage, transport) for way in WAYS)
            for other in others:
                assert_same_bits(other, copied)
    finally:
        held.HELD_BYTES, plain.OwnRows = before  # type: ignore[misc]


@pytest.mark.ranks
def test_held_and_copied_rows_give_the_same_bits() -> None:
    ranks(2).run(assert_same_in_all_ways, [(0, "shm"), (1, "gloo"), (3, "shm")])


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("split", ["rows", "whole", "level"])
def test_parts_cover_every_element_once(flat: bool, split: str) -> None:
    slots = tuple(slots_for([("a", (7, 3)), ("b", (64,)), ("c", (1, 5)), ("d", (150,))], 3, split))  # type: ignore[arg-type]
    pack = (FlatPackLayout if flat else PackLayout)(slots, 3, flags=True)
    for index, slot in enumerate(slots):
        parts = [part for rank in range(3) for part in shares_of(pack, rank) if part.slot == index]
        seen = sorted(n for part in parts for n in range(part.first, part.first + part.numel))
        assert seen == list(range(slot.numel))
        assert pack.most[index] == max(part.numel for part in parts)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("count", [2, 3])
def test_a_sum_of_spans(count: int, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long spans go past the caches, and their ends do not; one source lies elsewhere."""
    if not compiled:
        monkeypatch.setattr(library, "kernels", lambda: None)
    draw, numel = torch.Generator().manual_seed(count), 80_021
    sources = [torch.randn(numel, generator=draw) for _ in range(count)]
    expected = torch.empty(numel)
    total = sources[0].clone()
    for source in sources[1:]:
        total += source
    expected.copy_(total / 2)
    apart = [*sources]
    apart[1] = torch.full((numel,), float("nan"))
    apart[1][:5] = sources[1][:5]
    elsewhere = torch.cat([torch.zeros(3), sources[1]])
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            out = torch.zeros(numel + 1)[1:] if threads == 2 else torch.zeros(numel)
            spans = [
                SumSpan(0, 5),
                SumSpan(5, 70_000, elsewhere, 8),
                SumSpan(70_005, numel - 70_005, elsewhere, 70_008),
            ]
            sum_spans(out, apart, 0.5, 1, spans)
            assert torch.equal(out, expected)
            sum_shards(out.zero_(), sources, 0.5)
            assert torch.equal(out, expected)
        finally:
            torch.set_num_threads(before)


def test_a_plan_counts_what_is_held() -> None:
    """When a bucket has left, its gradients are still there, and those of the one before are not."""
    model = models.Tower(256, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    units, rules = blocks_of(model, [optimizer], "auto"), rules_of([optimizer])
    setup = MemoryModel(units, Options(stage=2, bucket_bytes=4 * 256 * 257), 2, rules)
    for staged in (False, True):
        arrivals = memory._Arrivals(
            replace(setup, traits=replace(setup.traits, staged=staged)), unsynced=False
        )
        for bucket in setup.buckets:
            for weight in bucket.weights:
                arrivals.add(weight)
            large = any(weight.numel == 256 * 256 for weight in bucket.weights)
            assert arrivals.now == (sum(4 * w.numel for w in bucket.weights) if large and not staged else 0)
