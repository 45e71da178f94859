"""Modules inside the model: their `zero_grad`, their `load_state_dict`; and parameters written by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
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
    with run.gathered() as whole:
        return {name: p.detach().clone() for name, p in whole.items()}


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
