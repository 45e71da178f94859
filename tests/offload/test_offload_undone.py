"""What was begun early and is taken back, on ranks of which one is slow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import models
import pytest
import torch
from offload_loop import furthest
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.offload import python_executor
from zeroshard.offload.build import OffloadedState
from zeroshard.testing import assert_same_bits, ranks

pytestmark = pytest.mark.ranks
STEPS, LR, CLIP = 8, 0.05, 1e3


@contextmanager
def slow(seconds: float) -> Iterator[None]:
    """Updates of this rank take so much longer, one way or back."""
    plain = python_executor.update_rows

    def slowly(*args: Any, **kwargs: Any) -> None:
        time.sleep(seconds)
        plain(*args, **kwargs)

    def no_native(*_: Any) -> None:
        """Transfer workers in C would not pass here."""

    with (
        patch.object(python_executor, "update_rows", slowly),
        patch.object(OffloadedState, "_executor_in", no_native),
    ):
        yield


def batch(step: int, rank: int) -> Tensor:
    return models.MLP.batch(3, seed=100 * rank + step)


def evaluate(model: nn.Module, run: zs.Run, rank: int) -> None:
    with torch.no_grad():
        model(batch(99, rank))


def accumulate(model: nn.Module, run: zs.Run, rank: int) -> None:
    with run.no_sync():
        model(batch(98, rank)).backward()
    model.zero_grad()


def keep_full(model: nn.Module, run: zs.Run, rank: int) -> None:
    with run.kept_full():
        for step in (97, 96):
            model(batch(step, rank))


def nothing(model: nn.Module, run: zs.Run, rank: int) -> None:
    pass


BETWEEN: dict[str, Callable[[nn.Module, zs.Run, int], None]] = {
    "training": nothing,
    "evaluation": evaluate,
    "no_sync": accumulate,
    "kept_full": keep_full,
}


def trained(stage: int, between: str, options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Every second step is skipped; of the others, the losses."""
    model, losses = models.build("mlp"), list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    run = zs.shard(model, optimizer, stage=stage, bucket_bytes=1024, **({"clip_norm": CLIP} | options))
    for step in range(STEPS):
        loss = model(batch(step, run.rank))
        loss.backward()
        if step % 2:
            optimizer.zero_grad()
            BETWEEN[between](model, run, run.rank)
            continue
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    found = models.whole_weights(run)
    counts = run.stats().updates
    assert counts["early"] > 0
    run.close()
    return losses, found


def unevenly(stage: int, between: str, options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """The last rank is slow."""
    last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    with slow(0.01 if last else 0.0):
        return trained(stage, between, options)


def plain(world: int) -> tuple[list[list[float]], dict[str, Tensor]]:
    model, losses = models.build("mlp"), [list[float]() for _ in range(world)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for step in range(0, STEPS, 2):
        for rank in range(world):
            loss = model(batch(step, rank))
            (loss / world).backward()
            losses[rank].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("stage", "between"), [*((3, b) for b in BETWEEN), (1, "training"), (2, "no_sync")])
def test_skipped_steps_are_taken_back_on_all_ranks(stage: int, between: str, world: int) -> None:
    options = {"offload": zs.Offload(stage_bytes=1024, threads=1), "transport": "shm"}
    losses, weights = plain(world)
    told = ranks(world).run(unevenly, stage, between, options)
    for rank, (found, ended) in enumerate(told):
        assert found == pytest.approx(losses[rank], rel=2e-5)
        assert furthest(ended, weights)[0] <= 2e-5
        assert_same_bits(ended, told[0][1])


def clipped(stage: int, options: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    """No step is skipped; of every third the loss leaps, and its updates are taken back in the step."""
    model = models.build("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = zs.shard(model, optimizer, stage=stage, bucket_bytes=1024, clip_norm=3.0, **options)
    for step in range(9):
        (model(batch(step, run.rank)) * (8.0 if step % 3 == 2 else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            evaluate(model, run, run.rank)
    found = models.whole_weights(run)
    undone = run.stats().updates["undone"]
    run.close()
    return found, undone


def clipped_unevenly(stage: int, options: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    with slow(0.01 if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1 else 0.0):
        return clipped(stage, options)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", [1, 3])
def test_clipped_steps_are_taken_back_on_all_ranks(stage: int, world: int) -> None:
    model = models.build("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(9):
        for rank in range(world):
            (model(batch(step, rank)) * (8.0 if step % 3 == 2 else 1.0) / world).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 3.0)
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    options = {"offload": zs.Offload(stage_bytes=1024, threads=1), "transport": "shm"}
    for found, undone in ranks(world).run(clipped_unevenly, stage, options):
        assert undone > 0
        assert furthest(found, weights)[0] <= 2e-5
