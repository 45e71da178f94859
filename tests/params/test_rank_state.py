"""What each rank has of its own in checkpoints: the same bits at the same number of ranks, at another one the
mean, the shared one, or zeros; told in a line."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import Tensor

import zeroshard as zs
from zeroshard.grads.reducer import Reducer
from zeroshard.layout.sharding import FlatPackLayout, PackLayout, slots_for
from zeroshard.params.rank_state import RankState, in_wire
from zeroshard.testing import ranks

SHAPES = [("a", (5, 3)), ("b", (7,)), ("c", ()), ("d", (2, 2))]


@pytest.mark.parametrize("kind", [PackLayout, FlatPackLayout])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_wire_is_cut_into_the_tensors_of_which_it_is_made(kind: type[PackLayout], world: int) -> None:
    pack = kind(tuple(slots_for(SHAPES, world, "rows")), world, True)
    flat = torch.zeros(pack.wire)
    found = in_wire(pack, flat, "residual")
    for number, private in enumerate(found):
        private.write(0, torch.arange(float(private.numel)) + 100 * number)
    for number, private in enumerate(found):
        assert torch.equal(private.read(0, private.numel), torch.arange(float(private.numel)) + 100 * number)
        if (last := private.numel) > 1:
            assert torch.equal(private.read(1, last), private.read(0, last)[1:])
    sizes = {"a": 15, "b": 7, "c": 1, "d": 4}
    assert {p.name.split("#")[0]: p.numel for p in found} == sizes
    # A tensor without rows to share out has a copy in every shard, and each copy a history.
    assert len(found) == (3 + world if kind is PackLayout else 4)
    found[0].write(2, torch.ones(3), share=0.5)
    assert found[0].read(0, 6).tolist() == [0.0, 1.0, 2.5, 3.5, 4.5, 5.0]
    found[0].reset()
    assert not found[0].read(0, 15).any()


JOINS = ("mean", "same", "reset")


class WithResiduals:
    """Gives the gradients of a run residuals, as a codec would: a function of rank, tensor and element."""

    def __init__(self, fill: bool) -> None:
        self.fill = fill
        self.made: dict[int, dict[str, Tensor]] = {}

    def __call__(self, gradients: Reducer) -> list[RankState]:
        found: list[RankState] = []
        for bucket in gradients.buckets:
            flats = self.made.get(bucket.index)
            if flats is None:
                flats = {join: torch.full((bucket.pack.wire,), -1.0) for join in JOINS}
                self.made[bucket.index] = flats
                if self.fill:
                    for private in self.records(bucket.pack, flats):
                        rank = 0 if private.join == "same" else gradients.transport.rank
                        private.write(0, torch.arange(float(private.numel)) + 1000 * rank)
            found += self.records(bucket.pack, flats)
        return found

    @staticmethod
    def records(pack: PackLayout, flats: dict[str, Tensor]) -> list[RankState]:
        return [p for join in JOINS for p in in_wire(pack, flats[join], f"{join} kind", join)]  # type: ignore[arg-type]


def held_after(path: Path, options: dict[str, Any], fill: bool) -> tuple[dict[str, Tensor], list[str]]:
    """Save what was filled in, or load; then what each record has, and what was logged."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeroshard").addHandler(handler)
    residuals = WithResiduals(fill)
    model = models.build("mlp")
    run = zs.shard(model, torch.optim.AdamW(model.parameters()), **options)
    gradients = run._runtime.gradients
    assert isinstance(gradients, Reducer)
    gradients.private = lambda: residuals(gradients)  # type: ignore[method-assign]
    run.save(path) if fill else run.load(path)
    found = {f"{p.key} {p.name}": p.read(0, p.numel).clone() for p in gradients.private()}
    run.close()
    logging.getLogger("zeroshard").removeHandler(handler)  # processes serve several tests
    return found, told


@pytest.mark.ranks
@pytest.mark.parametrize(("before", "after"), [((2, 3), (2, 0)), ((2, 0), (3, 2))], ids=str)
def test_residuals_come_back(tmp_path: Path, before: tuple[int, int], after: tuple[int, int]) -> None:
    saved = ranks(before[0]).run(held_after, tmp_path / "x", {"stage": before[1]}, True)
    loaded = ranks(after[0]).run(held_after, tmp_path / "x", {"stage": after[1]}, False)
    same_world = before[0] == after[0]
    for rank, (found, told) in enumerate(loaded):
        assert len(found) >= 3
        for name, values in found.items():
            was = saved[min(rank, before[0] - 1)][0].get(name)
            line = torch.arange(float(values.numel()))
            if same_world or name.startswith("same"):
                assert was is None or torch.equal(values, was)
            elif name.startswith("mean"):
                assert torch.equal(values, line + 500.0), name
            else:
                assert not values.any(), name
        if rank or same_world:
            assert not told or same_world
        else:
            lines = "\n".join(told)
            assert re.search(r"mean kind of \d+ tensors .* is the mean of the 2 that were saved", lines)
            assert re.search(r"reset kind of \d+ tensors .* begins at zero: it is each rank's own", lines)


@pytest.mark.ranks
def test_a_checkpoint_without_residuals_lets_them_begin_at_zero(tmp_path: Path) -> None:
    ranks(2).run(saved_plain, tmp_path / "x")
    for rank, (found, told) in enumerate(ranks(2).run(held_after, tmp_path / "x", {"stage": 2}, False)):
        assert found
        assert not [name for name, values in found.items() if values.any()], told
        assert rank or any("begins at zero: it is not in" in line for line in told)


def saved_plain(path: Path) -> None:
    model = models.build("mlp")
    run = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=2)
    run.save(path)
    run.close()
