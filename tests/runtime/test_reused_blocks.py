"""Blocks that run several times in a step under reentrant checkpoints, each of which gives its parameters a
gradient of its own: on all ranks or on one, and with gradients that are shown a step later."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from models import whole_weights
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from zeroshard.testing import ranks

STEPS, WIDTH = 5, 6
Case = Literal["openly too", "an adapter", "an adapter of one rank", "a block of one rank"]
CASES: tuple[Case, ...] = ("openly too", "an adapter", "an adapter of one rank", "a block of one rank")


class Net(nn.Module):
    """Blocks, which are units, and an adapter, which is of the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.adapter = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor, case: Case, rank: int) -> Tensor:
        x = self.first(x)
        for block in self.blocks[:3]:
            x = x + block(x)
        if case == "openly too":
            again: nn.Module | None = self.blocks[0]
        elif case == "an adapter" or rank == 0:
            again = self.blocks[3] if case == "a block of one rank" else self.adapter
        else:
            again = None
        for _ in range(2 if again is not None else 0):
            x = x + checkpoint(again, x, use_reentrant=True)
        return (x - 1).square().mean()


def make() -> tuple[Net, torch.optim.Optimizer]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)


def batch(step: int, rank: int, micro: int) -> Tensor:
    seed = 1000 * micro + 100 * rank + step
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def plain(case: Case, delayed: bool, micros: int, world: int) -> dict[str, Tensor]:
    model, optimizer = make()
    last: list[Tensor | None] = [None] * len(list(model.parameters()))
    for step in range(STEPS):
        for rank in range(world):
            for micro in range(micros):
                (model(batch(step, rank, micro), case, rank) / world).backward()
        if delayed:
            now = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            for parameter, grad in zip(model.parameters(), last, strict=True):
                parameter.grad = grad
            last = now
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def trained(case: Case, delayed: bool, micros: int, stage: int, options: dict[str, Any]) -> dict[str, Tensor]:
    model, optimizer = make()
    sync = zs.Delayed() if delayed else zs.EveryStep()
    run = zs.shard(model, optimizer, stage=stage, sync=sync, bucket_bytes=256, **options)
    for step in range(STEPS):
        for micro in range(micros - 1):
            with run.no_sync():
                model(batch(step, run.rank, micro), case, run.rank).backward()
        model(batch(step, run.rank, micros - 1), case, run.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = whole_weights(run)
    run.close()
    return found


OPTIONS: list[dict[str, Any]] = [{}, {"offload": zs.Offload(threads=1), "clip_norm": 1e3}]


def several(case: Case, stage: int) -> list[dict[str, Tensor]]:
    return [
        trained(case, delayed, micros, stage, options)
        for options in OPTIONS
        for delayed in (False, True)
        for micros in (1, 2)
    ]


def wanted(case: Case, world: int) -> list[dict[str, Tensor]]:
    return [
        plain(case, delayed, micros, world) for _ in OPTIONS for delayed in (False, True) for micros in (1, 2)
    ]


def check(found: list[dict[str, Tensor]], right: list[dict[str, Tensor]]) -> None:
    for got, want in zip(found, right, strict=True):
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks
@pytest.mark.wide(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_gradients_of_a_block_that_runs_twice(case: Case, stage: int) -> None:
    right = wanted(case, 2)
    for found in ranks(2).run(several, case, stage):
        check(found, right)


@pytest.mark.parametrize("case", CASES[:2])
def test_one_rank(case: Case) -> None:
    check(several(case, 3), wanted(case, 1))


def in_bf16() -> dict[str, Tensor]:
    return trained("openly too", False, 1, 2, {"precision": zs.Precision("bfloat16", reduce="float32")})


@pytest.mark.ranks
def test_gradients_are_added_up_in_the_dtype_that_travels() -> None:
    right = plain("openly too", False, 1, 2)
    for found in ranks(2).run(in_bf16):
        for name, value in right.items():
            torch.testing.assert_close(found[name], value, rtol=0.1, atol=0.02)
