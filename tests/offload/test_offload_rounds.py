"""Gradients that are reduced more than once before the step, with updates on the host under way."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
from models import whole_weights
from offload_loop import furthest
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from zeroshard.errors import StateError
from zeroshard.testing import ranks

WIDTH, STEPS, CLIP = 6, 5, 0.5
Loop = Literal["two losses", "inputs", "twice elsewhere", "twice"]


class Branched(nn.Module):
    """A trunk, a side way of its own, and a frozen unit. Vectors in, the mean loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)) for _ in range(3))
        self.side = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())])
        self.frozen = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, way: str) -> Tensor:
        if way == "trunk":
            for block in self.trunk:
                x = x + torch.tanh(block(x))
        elif way == "twice":  # the trunk's first block, again and again
            for block in (*self.trunk, self.trunk[0]):
                x = x + torch.tanh(checkpoint(block, x, use_reentrant=True))
        elif way == "frozen":
            return self.frozen[0](x).square().mean()
        if way in ("side", "trunk and side"):
            x = self.side[0](x)
        if way == "trunk and side":
            for block in self.trunk:
                x = x + torch.tanh(block(x))
            for _ in range(2):
                x = x + checkpoint(self.side[0], x, use_reentrant=True)
        return (x - 1.0).square().mean()


def make() -> tuple[Branched, list[Optimizer]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Branched()
    adamw = torch.optim.AdamW(model.trunk.parameters(), lr=0.01)
    return model, [adamw, torch.optim.RMSprop(model.side.parameters(), lr=0.01)]


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * rank + step))


def losses_of(model: nn.Module, loop: Loop, step: int, rank: int) -> list[Tensor]:
    x = batch(step, rank)
    ways = {
        "two losses": ["trunk", "side"],
        "inputs": ["trunk", "frozen"],
        "twice elsewhere": ["trunk and side"],
        "twice": ["twice"],
    }
    found: list[Tensor] = []
    for way in ways[loop]:
        found.append(model(x.clone().requires_grad_(way in ("frozen", "twice", "trunk and side")), way))
    return found


def plain(loop: Loop, world: int, clip: float) -> dict[str, Tensor]:
    model, optimizers = make()
    for step in range(STEPS):
        for rank in range(world):
            for loss in losses_of(model, loop, step, rank):
                (loss / world).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def trained(loop: Loop, stage: int, clip: float, offload: dict[str, Any]) -> dict[str, Tensor]:
    model, optimizers = make()
    where = zs.Offload(stage_bytes=256, threads=1, **offload)
    run = zs.shard(model, optimizers, stage=stage, offload=where, clip_norm=clip)
    for step in range(STEPS):
        for loss in losses_of(model, loop, step, run.rank):
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = whole_weights(run)
    run.close()
    return found


@pytest.mark.ranks
@pytest.mark.wide(2)
@pytest.mark.parametrize("clip", [CLIP, 100.0], ids=["late", "early"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("loop", ["two losses", "inputs", "twice elsewhere", "twice"])
def test_another_round_leaves_the_gradients_that_wait(loop: Loop, stage: int, clip: float) -> None:
    wanted = plain(loop, 2, clip)
    assert furthest(wanted, plain("two losses", 1, clip))[0] > 1e-3
    for got in ranks(2).run(trained, loop, stage, clip, {}):
        assert furthest(got, wanted)[0] <= 2e-6


@pytest.mark.parametrize("clip", [CLIP, 100.0], ids=["late", "early"])
@pytest.mark.parametrize("loop", ["two losses", "inputs", "twice elsewhere", "twice"])
def test_one_rank_adds_what_comes_late(loop: Loop, clip: float) -> None:
    assert furthest(trained(loop, 3, clip, {}), plain(loop, 1, clip))[0] <= 2e-6


@pytest.mark.ranks
@pytest.mark.parametrize("loop", ["two losses", "inputs", "twice elsewhere", "twice"])
@pytest.mark.parametrize("world", [1, 2])
def test_updates_that_never_wait(world: int, loop: Loop) -> None:
    """Without a limit no gradient is kept."""
    wanted = plain(loop, world, math.inf)
    found = [trained(loop, 3, math.inf, {})] if world == 1 else ranks(2).run(trained, loop, 3, math.inf, {})
    for got in found:
        assert furthest(got, wanted)[0] <= 2e-6


class Partly(nn.Module):
    """Uses a weight openly and inside of a checkpoint, which no call of a module tells of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        def directly(y: Tensor) -> Tensor:
            return torch.tanh(y @ self.layer.weight)

        return (self.layer(x) + checkpoint(directly, x, use_reentrant=True)).sum()


def test_weights_that_are_new_before_they_are_used_again() -> None:
    model = Partly()
    optimizer = torch.optim.AdamW(model.parameters())
    run = zs.shard(model, optimizer, offload=zs.Offload(threads=1), clip_norm=math.inf)
    loss = model(batch(0, 0).requires_grad_())
    with pytest.raises(
        StateError, match=r"gradients came to `layer\.\w+`.* twice in one backward.*reentrant"
    ):
        loss.backward()
    run.close()


@pytest.mark.parametrize("stage", [0, 3])
def test_another_backward_through_weights_that_are_new_already(stage: int) -> None:
    """Its forward was made with those before."""
    model, optimizers = make()
    where = zs.Offload(stage_bytes=256, threads=1)
    run = zs.shard(model, optimizers, stage=stage, offload=where, clip_norm=math.inf)
    inputs = [batch(step, 0).requires_grad_() for step in range(2)]
    losses = [model(x, "trunk") for x in inputs]
    losses[0].backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(losses[1], inputs[1])
    optimizers[0].step()
    run.close()


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 1])
def test_units_whose_state_is_on_the_device(stage: int) -> None:
    """Their gradients may take a round of which the host's see nothing."""
    where = {"optimizer": "auto", "device_bytes": 2200}
    for loop in ("two losses", "twice elsewhere"):
        wanted = plain(loop, 2, 100.0)  # type: ignore[arg-type]
        for got in ranks(2).run(trained, loop, stage, 100.0, where):
            assert furthest(got, wanted)[0] <= 5e-6
