"""Modules inside the model: their `zero_grad`, their `load_state_dict`; and parameters written by hand."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from models import whole_weights
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.testing import ranks

STAGES = (0, 1, 2, 3)
SPLIT: dict[str, Any] = {"precision": "bf16", "offload": zs.Offload("device", master="split")}


class Net(nn.Module):
    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def made(stage: int, **options: Any) -> tuple[Net, torch.optim.Optimizer, zs.Run]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, zs.shard(model, optimizer, stage=stage, **options)


def batch(number: int, rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + rank))


def values(run: zs.Run) -> dict[str, Tensor]:
    return whole_weights(run)


# ---------------------------------------------------------------------- zero_grad


def part_zeroed(stage: int, options: dict[str, Any]) -> dict[str, Tensor]:
    model, optimizer, run = made(stage, **options)
    for step in range(2):
        with run.no_sync():
            model(batch(step, run.rank)).square().mean().backward()
        model.blocks.zero_grad()
        with pytest.raises(zs.StateError, match=r"gradients accumulated under run\.no_sync\(\) were never"):
            optimizer.step()  # of the head they are there still
        model(batch(step + 5, run.rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with run.no_sync():
        model(batch(0, run.rank)).square().mean().backward()
    model.blocks.zero_grad()
    model.head.zero_grad()  # now nothing is left
    optimizer.step()
    found = values(run)
    run.close()
    assert all("zero_grad" not in vars(module) for module in model.modules())
    return found


def plainly_zeroed(world: int) -> dict[str, Tensor]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        for number in (step, step + 5):
            torch.stack([model(batch(number, r)).square().mean() for r in range(world)]).mean().backward()
            if number == step:
                model.blocks.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.ranks
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("options", [{}, {"transport": "gloo"}])
def test_zero_grad_of_a_module_drops_what_is_its_own(stage: int, options: dict[str, Any]) -> None:
    for found in ranks(2).run(part_zeroed, stage, options):
        torch.testing.assert_close(found, plainly_zeroed(2))


@pytest.mark.parametrize("stage", STAGES)
def test_zero_grad_of_a_module_of_one_rank(stage: int) -> None:
    torch.testing.assert_close(part_zeroed(stage, {}), plainly_zeroed(1))


def test_a_copy_zeroes_its_own_gradients() -> None:
    model, _, run = made(3)
    model(batch(0, 0)).sum().backward()
    with run.gathered():
        copied = copy.deepcopy(model)
    assert all("zero_grad" not in vars(module) for module in copied.modules())
    copied(batch(0, 0)).sum().backward()
    copied.blocks.zero_grad()
    assert all(p.grad is not None for p in model.parameters())
    assert all(p.grad is None for p in copied.blocks.parameters())
    run.close()


# ---------------------------------------------------------------------- load_state_dict


def part_loaded(stage: int, options: dict[str, Any]) -> tuple[list[dict[str, Tensor]], str, Tensor]:
    """Whole tensors, DTensors of another run, and inside `gathered`; what is said of a wrong shape, which
    rank 1 alone gives; and what forward makes of it."""
    model, _, run = made(stage, **options)
    other = Net(7)
    model(batch(0, run.rank))
    model.blocks[1].load_state_dict(other.blocks[1].state_dict())
    model.head.load_state_dict({"weight": other.head.weight}, strict=False)
    found = [values(run)]
    wrong = {"0.weight": torch.zeros(6, 7 if run.rank == run.size - 1 else 6), "0.bias": torch.zeros(6)}
    with pytest.raises(zs.ZeroShardError) as caught:
        model.blocks[0].load_state_dict(wrong)
    found.append(values(run))
    given = model.blocks[1].state_dict()
    model.blocks[0].load_state_dict(other.blocks[1].state_dict() if "split" in options else given)
    with run.gathered("blocks.2.*", write=True):
        model.blocks[2].load_state_dict(other.blocks[2].state_dict())
    found.append(values(run))
    with torch.no_grad():
        made_of_it = model(batch(0, 0))
    run.close()
    return found, str(caught.value), made_of_it


def check_loaded(found: list[dict[str, Tensor]], output: Tensor, within: float) -> None:
    plain, other = Net(), Net(7)
    plain.blocks[1].load_state_dict(other.blocks[1].state_dict())
    plain.head.weight = other.head.weight
    for values in found[:2]:
        torch.testing.assert_close(values, dict(plain.named_parameters()), rtol=0, atol=0)
    for index, given in ((0, other.blocks[1]), (2, other.blocks[2])):
        plain.blocks[index].load_state_dict(given.state_dict())
    exact = found[2] if within == 0 else {n: v for n, v in found[2].items() if not n.startswith("blocks.0.")}
    want = {name: p for name, p in plain.named_parameters() if name in exact}
    torch.testing.assert_close(exact, want, rtol=0, atol=0)
    torch.testing.assert_close(output.float(), plain(batch(0, 0)), rtol=0.02 + within, atol=1e-5 + within)


@pytest.mark.ranks
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("options", [{}, {"transport": "gloo", "split": "whole"}, SPLIT])
def test_a_module_loads_as_the_model_does(stage: int, options: dict[str, Any]) -> None:
    if stage == 0 and options is not SPLIT:
        options = {name: value for name, value in options.items() if name != "split"}  # nothing is divided
    both = ranks(2).run(part_loaded, stage, options)
    for found, said, output in both:
        # What a state dict shows of a split master is its weight in 16 bits.
        check_loaded(found, output, 0.02 if options is SPLIT else 0)
        assert "`0.weight` is (6, 7) in the given state and (6, 6) in the model. Nothing was loaded." in said
    assert both[0][1] == both[1][1]


@pytest.mark.parametrize("stage", STAGES)
def test_a_module_of_one_rank_loads(stage: int) -> None:
    found, said, output = part_loaded(stage, {})
    check_loaded(found, output, 0)
    assert "Nothing was loaded" in said


def loaded_rows_of_others(stage: int) -> str:
    model, _, run = made(stage, split="whole")
    before = values(run)
    with pytest.raises(zs.ZeroShardError) as caught:
        model.blocks[0].load_state_dict(model.blocks[1].state_dict())
    after = values(run)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    run.close()
    return str(caught.value)


@pytest.mark.ranks
def test_rows_of_another_division_are_refused() -> None:
    for said in ranks(2).run(loaded_rows_of_others, 3):
        words = r"`0\.\w+` has rows \d to \d of rank (\d) of 2, and this is rank \1 of 2, with rows \d to \d"
        assert re.search(words, said), said


# ---------------------------------------------------------------------- written by hand


def write_own_rank(run: zs.Run, name: str) -> None:
    with run.gathered(name, write=True) as whole:
        for p in whole.values():
            p.data.fill_(float(run.rank))


def written_apart(stage: int) -> tuple[list[str], bool, Tensor]:
    _, _, run = made(stage)
    before, said = values(run), list[str]()
    for name in ("head.*", "head.bias"):
        with pytest.raises(zs.RankError) as caught:
            write_own_rank(run, name)
        said.append(str(caught.value))
    after = values(run)
    same = all(torch.equal(after[name], value) for name, value in before.items())
    with run.gathered("head.bias", write=True) as whole:
        whole["head.bias"].data.fill_(float(run.rank))
        torch.distributed.broadcast(whole["head.bias"].data, 0)
    bias = values(run)["head.bias"]
    run.close()
    return said, same, bias


@pytest.mark.ranks
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_that_write_different_values_are_told_so(stage: int) -> None:
    said = (
        "run.gathered(write=True): ranks have written different values into `{}`{}. Each rank keeps its own "
        "rows of what it wrote, so every rank must write the same: write on all of them, not on rank 0 "
        "alone, or call torch.distributed.broadcast(whole[name].data, 0) inside the block. Nothing was "
        "changed."
    )
    for found, same, bias in ranks(2).run(written_apart, stage):
        assert found == [said.format("head.weight", ", and 1 more differ"), said.format("head.bias", "")]
        assert same
        assert torch.equal(bias, torch.zeros(3))
