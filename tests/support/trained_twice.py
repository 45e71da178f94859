"""A hard model as data, trained twice: by one plain process on the whole batch, and sharded over ranks.

Almost everything computes in float64, where the two differ by 1e-12 if the mathematics agree: a wrong scale,
a stale row or a missing gradient cannot hide behind rounding.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

import zeroshard as zs
from zeroshard.testing import ranks

STAGES = (0, 1, 2, 3)


def adamw(params: Iterable[Any]) -> Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


class Training:
    """A model in training: by a rank on its part of the data (`run` is its handle), or by one process."""

    def __init__(
        self, case: Case, parts: list[int], options: dict[str, Any] | None = None, device: str = "cpu"
    ) -> None:
        self.case, self.parts, self.device = case, parts, device
        self.model, self.optimizer = fresh(case, device)
        self.run = None if options is None else zs.shard(self.model, self.optimizer, **options)
        self.losses: list[float] = []

    def loss(self, step: int) -> Tensor:
        """The mean loss over the parts that this process trains on."""
        batches = [self.case.batch(step, part) for part in self.parts]
        losses = [self.case.loss(self.model, moved(batch, self.device)) for batch in batches]
        total = torch.stack(losses).mean()
        self.losses.append(total.item())
        return total


def plain_turn(training: Training, step: int) -> None:
    """One step of the loop that everybody writes."""
    training.loss(step).backward()
    update(training)


def update(training: Training) -> None:
    clip = training.case.clip
    if clip is not None:
        nn.utils.clip_grad_norm_([p for p in training.model.parameters() if p.grad is not None], clip)
    training.optimizer.step()
    training.optimizer.zero_grad()


@dataclass(frozen=True)
class Case:
    """`build` makes the model, `batch(step, rank)` one rank's part of the data, `loss` a number from both."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Any]
    loss: Callable[[Any, Any], Tensor]
    optimizer: Callable[[Iterable[Any]], Optimizer] = adamw
    options: dict[str, Any] = field(default_factory=dict)
    turn: Callable[[Training, int], None] = plain_turn
    steps: int = 6
    clip: float | None = None
    tolerance: float = 1e-9


@dataclass
class Trained:
    losses: list[float]
    params: dict[str, Tensor]
    updated: list[str]  # parameters for which the optimizer made a state: those that ever had a gradient


def rows(step: int, rank: int, width: int, height: int = 4) -> Tensor:
    """Random rows that depend on step and rank alone."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(height, width, generator=generator, dtype=torch.float64)


def tokens(step: int, rank: int, count: int = 11, shape: tuple[int, ...] = (3, 5)) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(count, shape, generator=generator)


def in_float64(build: Callable[[], nn.Module]) -> nn.Module:
    """The model that `build` makes, from one seed, in float64."""
    torch.manual_seed(7)
    torch.set_default_dtype(torch.float64)
    try:
        return build()
    finally:
        torch.set_default_dtype(torch.float32)


def moved(batch: Any, device: str) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)


def fresh(case: Case, device: str = "cpu") -> tuple[nn.Module, Optimizer]:
    model = in_float64(case.build).to(device)
    return model, case.optimizer([p for p in model.parameters() if p.is_floating_point() or p.is_complex()])


def plain(case: Case, world: int, device: str = "cpu") -> Trained:
    """One process on the parts of all ranks."""
    return train(Training(case, list(range(world)), device=device))


def sharded(module: str, name: str, stage: int, transport: str, device: str = "cpu") -> Trained:
    """On a rank: the same by `zs.shard`. Losses are this rank's own."""
    case: Case = importlib.import_module(module).CASES[name]
    options = {"stage": stage, "transport": transport, **case.options}
    return train(Training(case, [dist.get_rank()], options, device))


def train(training: Training) -> Trained:
    for step in range(training.case.steps):
        training.case.turn(training, step)
    model = training.model
    names = [n for n, p in model.named_parameters() if p.is_floating_point() or p.is_complex()]
    updated = [names[i] for i in training.optimizer.state_dict()["state"]]
    if training.run is not None:
        training.run.close()
    values = {n: p.detach().cpu().clone() for n, p in model.named_parameters()}
    return Trained(training.losses, values, sorted(name for name in updated if values[name].numel()))


def assert_as_one_process(
    module: str, name: str, stage: int, world: int = 2, transport: str = "auto"
) -> None:
    """Train both ways and compare losses, parameters, and which parameters were ever updated."""
    case: Case = importlib.import_module(module).CASES[name]
    trained = ranks(world).run(sharded, module, name, stage, transport)
    assert_trained_alike(trained, plain(case, world), case.tolerance)


def assert_trained_alike(trained: list[Trained], expected: Trained, tolerance: float) -> None:
    mean = [sum(losses) / len(trained) for losses in zip(*(t.losses for t in trained), strict=True)]
    assert mean == pytest.approx(expected.losses, rel=tolerance, abs=tolerance)
    for rank, got in enumerate(trained):
        same_tensors(got.params, expected.params, tolerance, f"on rank {rank}")
    assert set().union(*(t.updated for t in trained)) == set(expected.updated)


def same_tensors(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float, where: str) -> None:
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert got[key].dtype == value.dtype, key
        torch.testing.assert_close(got[key], value, rtol=tolerance, atol=tolerance,
                                   msg=lambda text, key=key: f"{key} {where}: {text}")  # fmt: skip
