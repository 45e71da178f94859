"""Small runs whose checkpoints and plans an earlier version wrote. With that version installed,
`python tests/support/compatibility_case.py` writes `tests/fixtures` anew.

What each rank holds right after its save is kept as a digest beside the checkpoint: a run that loads it must
hold the same bits, whatever machine it computes on.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.testing import ranks

FIXTURES = Path(__file__).parents[1] / "fixtures"
STEPS = 3


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))


class Tiny(nn.Module):
    """An embedding, two blocks that are alike, a head without a bias: no number of ranks divides all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(6, 11, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def host(**options: Any) -> dict[str, Any]:
    return {"offload": zs.Offload(threads=1, **options), "clip_norm": 0.5}


ON_DEVICE = zs.Offload(optimizer="device", master="split")
# By name: ranks, and the options of `shard`.
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "one-rank": (1, {}),
    "stage-0": (2, {"stage": 0}),
    "stage-2-bf16": (2, {"stage": 2, "precision": "bf16"}),
    "stage-3": (2, {"stage": 3}),
    "one-rank-host": (1, host()),
    "host": (2, {"stage": 3, "precision": "bf16", **host(parameters="host")}),
    "host-split": (2, {"stage": 2, "precision": "bf16", **host(master="split")}),
    "one-rank-device-split": (1, {"precision": "bf16", "offload": ON_DEVICE}),
    "host-8-bit": (2, {"stage": 3, **host(moments="int8")}),
    "host-own-step": (2, {"stage": 1, "offload": zs.Offload(threads=1)}),
    "delta": (2, {"stage": 3, "gather": zs.Delta(zs.Int4(block=32, feedback=False, stochastic=True))}),
    "feedback": (2, {"stage": 2, "compress": zs.Int8(feedback=True)}),
    "delayed": (2, {"stage": 2, "sync": zs.Delayed()}),
    "delayed-host": (2, {"stage": 3, "sync": zs.Delayed(), **host(), "clip_norm": math.inf}),
    "local": (2, {"stage": 0, "sync": zs.Local(steps=STEPS)}),
}  # fmt: skip
# By name: what is asked of `plan`.
PLANS: dict[str, dict[str, Any]] = {
    "one-rank": {"ranks": 1, "limit": "1GiB"},
    "two-ranks": {"ranks": 2, "limit": "1GiB", "stage": 3},
    "host": {"ranks": 2, "limit": "1GiB", "stage": 2, "offload": zs.Offload(threads=1), "clip_norm": 1.0},
    "eight-ranks-two-nodes": {
        "ranks": 8, "ranks_per_node": 4, "limit": "1GiB", "stage": 2, "precision": "bf16"
    },
    "thousand-ranks": {"ranks": 1000, "limit": "1GiB", "stage": 3, "compress": zs.Int8()},
}  # fmt: skip


def made() -> tuple[Tiny, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Tiny()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def planned(name: str) -> zs.Plan:
    model, optimizer = made()
    batch = (torch.zeros(4, 5, dtype=torch.int64),)
    # The figures of a machine of the table: those of the one at hand differ.
    return zs.plan(model, optimizer, batch=batch, machine="A100", **PLANS[name])


def digest(run: zs.Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of all bits of the weights and of the optimizer's state, whole, in a fixed order."""
    with run.gathered() as whole:
        held = {name: parameter.detach().clone() for name, parameter in whole.items()}
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            full = value.full_tensor() if hasattr(value, "full_tensor") else torch.as_tensor(value)
            held[f"{index}/{key}"] = full.detach()
    summed = hashlib.sha256()
    for name in sorted(held):
        tensor = held[name].contiguous().cpu()
        summed.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        summed.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return summed.hexdigest()


def steps(run: zs.Run, model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        ids = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(10 * step + run.rank))
        nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def saved(path: str, options: dict[str, Any]) -> str:
    """A few steps and a save, on this rank: the digest of what it holds then."""
    random.seed(0)
    numpy.random.seed(0)
    model, optimizer = made()
    run = zs.shard(model, optimizer, **options)
    steps(run, model, optimizer, 0, STEPS)
    run.save(path, extra={"at": STEPS})
    held = digest(run, model, optimizer)
    run.close()
    return held


def loaded(path: str, options: dict[str, Any], strict: bool = True) -> tuple[str, dict[str, Any]]:
    """A fresh run that loads it, on this rank: the digest of what it holds then, and what came
    with it. It then takes another step."""
    model, optimizer = made()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    run = zs.shard(model, optimizer, **options)
    extra = run.load(path, strict=strict)
    held = digest(run, model, optimizer)
    steps(run, model, optimizer, STEPS, STEPS + 1)
    run.close()
    return held, extra


def write(folder: Path) -> None:
    digests = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, (world, options) in RUNS.items():
            digests[name] = ranks(world).run(saved, f"{scratch}/{name}", options)
        # Together they are small: the random states of all are the same.
        with tarfile.open(folder / "checkpoints.tar.xz", "w:xz", preset=9) as archive:
            for name in RUNS:
                archive.add(f"{scratch}/{name}", name)
    folder.joinpath("digests.json").write_text(json.dumps(digests, indent=2) + "\n", encoding="utf-8")
    folder.joinpath("plans").mkdir()
    for name in PLANS:
        planned(name).write(folder / "plans" / f"{name}.json")


if __name__ == "__main__":
    write(FIXTURES)
