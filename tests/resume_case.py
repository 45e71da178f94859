"""A training run that is cut in two: steps, a save, another process's life, a load, more steps."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import models
import numpy
import recipes
import torch
import torch.distributed as dist
from recipes import Loop, Recipe, loss_of, optimizers
from torch import Tensor

import zeroshard as zs
from zeroshard.checkpoint import PendingSave, Saved

HALF = 10


@dataclass
class Half:
    """What a run left: the weights, the losses, the data that came with a checkpoint."""

    weights: dict[str, Tensor]
    losses: list[float]
    extra: dict[str, Any] = field(default_factory=dict)
    draws: list[float] = field(default_factory=list)  # random numbers, right after the save or the load
    held: dict[str, Tensor] = field(default_factory=dict)  # whole weights and moments, at that moment


class Cut:
    """A run on this rank, at a step of its own. The batch of a step is the same for any number of ranks."""

    def __init__(self, recipe: Recipe, options: dict[str, Any], rows: int = 12) -> None:
        self.recipe, self.rows = recipe, rows
        self.losses: list[float] = []
        self.draws: list[float] = []
        self.held: dict[str, Tensor] = {}
        self.alone = not (dist.is_available() and dist.is_initialized())
        self.rank, self.world = (0, 1) if self.alone else (dist.get_rank(), dist.get_world_size())
        self.model = models.build(recipe.model)
        self.steppers = optimizers(recipe.optimizer, self.model)
        self.loop = Loop(recipe, self.model, self.steppers)
        if recipe.scheduler:
            self.loop.schedules = [recipes.scheduler(s) for s in self.steppers]
        self.run = zs.shard(self.model, self.steppers, **options)

    @property
    def company(self) -> dict[str, Any]:
        return {
            "schedulers": self.loop.schedules,
            "scalers": [self.loop.scaler] if self.recipe.scaled else [],
        }

    def train(self, first: int, last: int) -> None:
        kind = models.MLP if self.recipe.model == "mlp" else models.GPT
        for step in range(first, last):
            batch = kind.batch(self.rows, seed=step).chunk(self.world)[self.rank]
            infinite = step in self.recipe.infinite and self.rank == self.world - 1
            loss = loss_of(self.recipe, self.model, batch, infinite)
            self.loop.scaler.scale(loss).backward()
            self.losses.append(loss.item())
            self.loop._update()

    def weights(self) -> dict[str, Tensor]:
        with self.run.gathered() as whole:
            return {name: p.detach().clone() for name, p in whole.items()}

    def note(self) -> None:
        """Remember what the run is made of now."""
        self.draws = [float(torch.rand(())), random.random(), float(numpy.random.rand())]
        self.held = self.weights()
        if self.recipe.optimizer in ("muon", "adafactor"):
            return  # torch cannot put a DTensor together that lies whole on one rank
        for number, stepper in enumerate(self.steppers):
            for index, state in stepper.state_dict()["state"].items():
                for key, value in state.items():
                    whole = value.full_tensor() if hasattr(value, "full_tensor") else torch.as_tensor(value)
                    self.held[f"{number}/{index}/{key}"] = whole.detach().clone()

    def end(self, extra: dict[str, Any] | None = None) -> Half:
        weights = self.weights()
        self.run.close()
        return Half(weights, self.losses, extra or {}, self.draws, self.held)


def seed(value: int) -> None:
    for draw in (torch.manual_seed, random.seed, numpy.random.seed):
        draw(value)


def whole(recipe: Recipe, options: dict[str, Any]) -> Half:
    """Twenty steps in one go."""
    cut = Cut(recipe, options)
    cut.train(0, 2 * HALF)
    return cut.end()


def first(path: Path, recipe: Recipe, options: dict[str, Any], background: bool = False) -> Half:
    """Ten steps and a save; five more beside a background save."""
    cut = Cut(recipe, options)
    seed(7 + cut.rank)
    cut.train(0, HALF)
    saved = cut.run.save(
        path, extra={"at": HALF, "order": torch.arange(3)}, background=background, **cut.company
    )
    if background:
        assert isinstance(saved, PendingSave)
        cut.train(HALF, HALF + 5)
        saved = saved.wait()
    assert isinstance(saved, Saved)
    if not background:
        cut.note()
    return cut.end({"bytes": saved.bytes})


def second(
    path: Path, recipe: Recipe, options: dict[str, Any], strict: bool = True, again: Path | None = None
) -> Half:
    """A fresh run that goes on from the checkpoint, and first saves it again where it is asked to."""
    cut = Cut(recipe, options)
    seed(99)
    extra = cut.run.load(path, strict=strict, **cut.company)
    if again is not None:
        cut.run.save(again, **cut.company)
    cut.note()
    cut.train(HALF, 2 * HALF)
    return cut.end(extra)
