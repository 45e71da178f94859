"""Units whose backward runs twice: no gradient of theirs waits for the norm, and no number changes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from offload_loop import CLIP, OPTIMIZERS, SPIKES, batch, make_model, on_disk, paced
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from zeroshard.offload.deferred import GradHandle
from zeroshard.offload.group import OffloadGroup
from zeroshard.offload.updates import HostUpdates
from zeroshard.runtime.second_backward import RepeatedUnits
from zeroshard.testing import assert_same_bits, ranks

STEPS = 8
ALWAYS, NEVER = 0.05, 1e9  # limits that clip in every step, and in none
Loop = Callable[["Training", int], None]


def host(repeat: int, **more: Any) -> zs.Offload:
    return zs.Offload(stage_bytes=4096, threads=2, repeat_backward=repeat, **more)


class Training:
    """One run and what it has come to."""

    def __init__(
        self,
        repeat: int,
        optimizer: str = "adamw",
        limit: float | None = ALWAYS,
        model: nn.Module | None = None,
        offload: zs.Offload | None = None,
        **options: Any,
    ) -> None:
        self.model = make_model() if model is None else model
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        given = {"stage": 0, "recompute": True, "clip_norm": limit} | options
        self.run = zs.shard(self.model, self.optimizer, offload=offload or host(repeat), **given)
        self.norms: list[float] = []

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def loss(self, step: int, micro: int = 0) -> Tensor:
        loss: Tensor = self.model(batch(step, 0, micro)) * SPIKES.get(step, 1.0)
        return loss

    @property
    def updates(self) -> HostUpdates:
        found = self.run._runtime.host_updates
        assert found is not None
        return found

    @property
    def second(self) -> RepeatedUnits:
        found = self.updates.second
        assert isinstance(found, RepeatedUnits)
        return found

    def train(self, loop: Loop, steps: int = STEPS) -> dict[str, Tensor]:
        torch.manual_seed(11)
        for step in range(steps):
            loop(self, step)
        return self.end()

    def end(self) -> dict[str, Tensor]:
        self.run.close()
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def clipped_by_shard(training: Training, step: int) -> None:
    training.loss(step).backward()
    training.optimizer.step()
    training.optimizer.zero_grad()


def readme(training: Training, step: int) -> None:
    training.loss(step).backward()
    training.norms.append(float(clip_grad_norm_(training.params, ALWAYS)))
    training.optimizer.step()
    training.optimizer.zero_grad()


def check(loop: Loop, repeat: int = 2, steps: int = STEPS, **options: Any) -> None:
    """The same bits as of a run whose gradients wait."""
    torch.manual_seed(5)
    want = Training(0, **options)
    weights = want.train(loop, steps)
    torch.manual_seed(5)
    got = Training(repeat, **options)
    assert_same_bits(got.train(loop, steps), weights)
    assert got.norms == want.norms
    assert got.second.most > 0, "some backward has run twice"


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd", "momentum"])
@pytest.mark.parametrize("limit", [ALWAYS, NEVER], ids=["always", "never"])
def test_clipped_by_shard(optimizer: str, limit: float) -> None:
    check(clipped_by_shard, optimizer=optimizer, limit=limit)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage(stage: int) -> None:
    check(clipped_by_shard, stage=stage)


@pytest.mark.parametrize("repeat", [1, 3])
def test_the_plain_loop(repeat: int) -> None:
    check(readme, repeat, limit=None)


def test_a_split_master() -> None:
    check(clipped_by_shard, offload=None, precision="bf16")
