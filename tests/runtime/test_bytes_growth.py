"""Nothing grows: after 500 steps a rank has the tensors, files and memory that it had after the first few."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path

import models
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.testing import ranks, tensor_bytes

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files() -> int:
    """The fewest of some looks: a thread that watches the peers opens a file in /proc now and then."""
    looks = []
    for _ in range(5):
        looks.append(len(os.listdir("/proc/self/fd")))
        time.sleep(0.002)
    return min(looks)


def counts() -> dict[str, int]:
    gc.collect()
    tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
    private, shared = tensor_bytes()
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    named = sum(len(words) > 5 for words in maps)  # files and shared segments; the rest is the allocators'
    return {
        "tensors": tensors,
        "bytes": private + sum(shared.values()),
        "files": open_files(),
        "named maps": named,
        "other maps": len(maps) - named,
        "resident": resident(),
    }


def many_steps(stage: int, transport: str, steps: int) -> tuple[dict[str, int], dict[str, int]]:
    """Clipping, accumulation, evaluation and a scheduler in the loop: whatever may leave something."""
    model = models.build("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    run = zs.shard(model, optimizer, stage=stage, transport=transport, bucket_bytes=1024)
    batch = models.MLP.batch(4, dist.get_rank())

    def train() -> None:
        with run.no_sync():
            model(batch).backward()
        model(batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    _repeat(train, 300)  # until what allocators and dispatchers keep has settled
    with torch.no_grad():
        model(batch)
    before = counts()
    _repeat(train, steps)
    with torch.no_grad():
        model(batch)
    after = counts()
    run.close()
    return before, after


class Activations(nn.Module):
    """Functions that save what they give, and one that saves what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(64, 64), nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu_(torch.tanh(self.first(x)) - 0.1)
        return self.norm(self.second(x).softmax(-1).exp())


class Failing(nn.Module):
    """Fails in its last block, when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Activations() for _ in range(3))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if self.fails and number == 1:
                raise ValueError("told to")
        return x.square().mean()


def forwards_alone(stage: int, how: str, times: int) -> tuple[dict[str, int], dict[str, int]]:
    """Forwards that no backward follows: their graphs are dropped, or an error ends them."""
    torch.manual_seed(0)
    model = Failing()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run = zs.shard(model, optimizer, stage=stage)
    batch = torch.randn(256, 64)

    def alone() -> None:
        model.fails = how == "failing"
        with contextlib.suppress(ValueError):
            model(batch)
        model.fails = False

    def train() -> None:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    def turns(number: int) -> dict[str, int]:
        _repeat(alone, number)
        _repeat(train, 2)
        return counts()

    turns(5)
    found = turns(5), turns(times)
    run.close()
    return found


def _repeat(what: Callable[[], None], times: int) -> None:
    for _ in range(times):
        what()


@pytest.mark.wide(3)
@pytest.mark.parametrize(("stage", "transport"), [(3, "shm"), (3, "gloo"), (2, "shm")])
def test_no_growth(stage: int, transport: str) -> None:
    for before, after in ranks(2).run(many_steps, stage, transport, 500, timeout=120.0):
        growth = {key: after[key] - before[key] for key in before}
        # Python's allocator and the caches of torch's dispatcher breathe a little; a leak of one gradient a
        # step would be 500 tensors, and more than 2 MB.
        assert growth.pop("resident") < 1 << 20
        assert growth.pop("other maps") <= 2, "an arena of an allocator's, but not a mapping a step"
        assert growth == dict.fromkeys(growth, 0)


@pytest.mark.parametrize("how", ["dropped", "failing"])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_forward_without_a_backward_leaves_nothing(stage: int, how: str) -> None:
    for before, after in ranks(2).run(forwards_alone, stage, how, 40, timeout=120.0):
        growth = {key: after[key] - before[key] for key in before}
        # One activation a forward would be 2.5 MB.
        assert growth.pop("resident") < 2 << 20
        assert growth.pop("other maps") <= 2
        assert growth == dict.fromkeys(growth, 0)
