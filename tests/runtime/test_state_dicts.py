"""`state_dict()` after `shard`, at every stage and tier: whole tensors, or rows that say so, never a silent
half; and they load back. The table is in docs/checkpoints.md."""

from __future__ import annotations

import math
import tempfile
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from recipes import Recipe, micro_batches
from torch import Tensor
from torch.distributed.tensor import DTensor

import zeroshard as zs
from zeroshard.testing import assert_same_bits, ranks

pytestmark = pytest.mark.ranks
WORLD, STEPS = 2, 2
RUNS: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage} for stage in (0, 1, 2, 3)},
    "host": {"stage": 2, "clip_norm": math.inf, "offload": {"optimizer": "host"}},
    "disk": {"stage": 3, "clip_norm": math.inf, "offload": {"optimizer": "disk"}},
    "disk, updated in the step": {"stage": 3, "offload": {"optimizer": "disk"}},
}


class Shown:
    """A state dict: what stands for each tensor, and the whole of it."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.rows: set[str] = set()
        self.whole: dict[str, Tensor] = {}
        for name, value in flat(state).items():
            if isinstance(value, DTensor):
                self.rows.add(name)
                assert value.to_local().numel() < value.numel() or value.numel() < 2 * WORLD, name
                self.whole[name] = value.full_tensor().clone()
            elif isinstance(value, Tensor):
                self.whole[name] = value.detach().clone()


def flat(state: dict[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in state.items():
        found |= flat(value, f"{before}{key}/") if isinstance(value, dict) else {f"{before}{key}": value}
    return found


def made(options: dict[str, Any], scratch: str) -> tuple[Any, Any, zs.Run]:
    options = dict(options)
    if "offload" in options:
        given = dict(options["offload"], threads=1, stage_bytes=4096)
        options["offload"] = zs.Offload(**given, path=scratch if given["optimizer"] == "disk" else None)
    model = models.build("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    return model, optimizer, zs.shard(model, optimizer, **options)


def shown(options: dict[str, Any]) -> list[Shown]:
    """Of model and optimizer after some steps; the same again from a fresh run that has loaded them."""
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        model, optimizer, run = made(options, one)
        for step in range(STEPS):
            for batches in micro_batches(Recipe(model="mlp"), step, WORLD):
                model(batches[dist.get_rank()]).backward()
            optimizer.step()
            optimizer.zero_grad()
        states = [model.state_dict(), optimizer.state_dict()]
        found = [Shown(state) for state in states]
        with run.gathered() as whole:  # which stand in the modules then
            assert all(model.state_dict()[name].data_ptr() == p.data_ptr() for name, p in whole.items())
        again, stepper, second = made(options, other)
        again.load_state_dict(states[0])
        stepper.load_state_dict(states[1])
        found += [Shown(again.state_dict()), Shown(stepper.state_dict())]
        second.close()
        run.close()
    return found


def plain() -> list[Shown]:
    """One process, gradients averaged in rank order."""
    model = models.build("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    params = list(model.parameters())
    for step in range(STEPS):
        for batches in micro_batches(Recipe(model="mlp"), step, WORLD):
            grads = [torch.autograd.grad(model(batch), params) for batch in batches]
        for param, *parts in zip(params, *grads, strict=True):
            param.grad = sum(parts[1:], parts[0]) * (1.0 / WORLD)
        optimizer.step()
    return [Shown(model.state_dict()), Shown(optimizer.state_dict())]


def shared(stage: int) -> tuple[Tensor, Tensor]:
    """Loaded by a module that stands in two places: what was given, and what came of it."""
    torch.manual_seed(2)
    inner = torch.nn.Linear(3, 5)
    model = torch.nn.ModuleDict({"one": inner, "two": torch.nn.ModuleList([inner])})
    given = {name: torch.randn(value.shape) for name, value in inner.state_dict().items()}
    run = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    model.load_state_dict(
        {path + name: value for name, value in given.items() for path in ("one.", "two.0.")}
    )
    with run.gathered() as whole:
        found = whole["one.weight"].detach().clone()
    run.close()
    return given["weight"], found


def test_a_module_that_stands_in_two_places_is_loaded() -> None:
    for given, found in ranks(WORLD).run(shared, 2):
        assert torch.equal(given, found)


@pytest.mark.parametrize("name", RUNS)
def test_a_state_dict_is_whole_or_says_that_it_is_rows(name: str) -> None:
    wanted = plain()
    for of_rank in ranks(WORLD).run(shown, RUNS[name]):
        for got, again, expected in zip(of_rank[:2], of_rank[2:], wanted, strict=True):
            assert_same_bits(again.whole, got.whole)
            if "offload" not in RUNS[name]:
                assert_same_bits(got.whole, expected.whole)
            for key, value in expected.whole.items():  # the host's kernel rounds a few numbers otherwise
                torch.testing.assert_close(got.whole[key], value, rtol=1e-5, atol=1e-7)
            large = {key for key, value in expected.whole.items() if value.dim()}
            assert got.rows == again.rows == (set() if name == "stage 0" else large)
