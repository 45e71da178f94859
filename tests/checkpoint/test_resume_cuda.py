"""Exact resume on a GPU: state on the device, on the host, with a split master, beside a background save."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import Tensor

import zeroshard as zs
from zeroshard.checkpoint import PendingSave
from zeroshard.testing import assert_same_bits

pytestmark = pytest.mark.cuda

HALF = 6
HOST: dict[str, Any] = {"precision": "bf16", "clip_norm": math.inf}
KINDS: dict[str, dict[str, Any]] = {
    "device": {"precision": "bf16"},
    "host": {**HOST, "offload": zs.Offload()},
    "split": {**HOST, "offload": zs.Offload(master="split")},
    "streamed": {**HOST, "offload": zs.Offload(parameters="host")},
    "8-bit": {**HOST, "offload": zs.Offload(moments="int8")},
}


class Noisy(torch.nn.Module):
    """Draws from the GPU's random numbers, so that they are part of the run."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = models.build("mlp"), torch.nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.inner(self.drop(x))
        return loss


def made(options: dict[str, Any], fused: bool) -> tuple[Noisy, torch.optim.Optimizer, zs.Run]:
    model = Noisy().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    return model, optimizer, zs.shard(model, optimizer, **options)


def train(model: Noisy, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        model(models.MLP.batch(8, seed=step).cuda()).backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(run: zs.Run) -> dict[str, Tensor]:
    with run.gathered() as whole:
        return {name: p.detach().cpu().clone() for name, p in whole.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("background", [False, True], ids=["blocking", "background"])
def test_a_run_on_a_gpu_goes_on_with_the_same_bits(tmp_path: Path, kind: str, background: bool) -> None:
    options, fused = KINDS[kind], kind == "device"
    torch.manual_seed(3)
    model, optimizer, run = made(options, fused)
    train(model, optimizer, 0, HALF)
    saved = run.save(tmp_path / "half", background=background)
    train(model, optimizer, HALF, 2 * HALF)
    if isinstance(saved, PendingSave):
        saved.wait()
    wanted = weights(run)
    run.close()
    torch.manual_seed(99)
    model, optimizer, run = made(options, fused)
    run.load(tmp_path / "half")
    train(model, optimizer, HALF, 2 * HALF)
    assert_same_bits(weights(run), wanted)
    run.close()


@pytest.mark.parametrize(("before", "after"), [("device", "split"), ("split", "device"), ("host", "device")])
def test_a_tier_gets_what_another_saved(tmp_path: Path, before: str, after: str) -> None:
    torch.manual_seed(3)
    model, optimizer, run = made(KINDS[before], False)
    train(model, optimizer, 0, HALF)
    run.save(tmp_path / "half")
    wanted = weights(run)
    run.close()
    model, optimizer, run = made(KINDS[after], False)
    run.load(tmp_path / "half")
    assert_same_bits(weights(run), wanted)
    train(model, optimizer, HALF, 2 * HALF)
    run.close()
