"""What a training run is made of, run three ways: sharded on ranks, in one process on the whole batch, and in
one process that plays the ranks one after another.

The third is the sharpest reference. It averages the ranks' gradients in rank order, as data-parallel training
is defined to do, so a sharded run must not only come close to it: it must have its bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any

import models
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import zeroshard as zs
from zeroshard.testing import assert_same_bits, ranks

ROWS = 4  # of a micro-batch on one rank
# What is compared bit for bit differs after few steps or never; with --wide runs are longer (`conftest.py`).
STEPS = int(os.environ.get("RECIPE_STEPS", "4"))


def few(steps: int, least: int = STEPS) -> int:
    """So many steps with --wide, otherwise no more than are needed."""
    return steps if "RECIPE_STEPS" in os.environ else min(steps, least)


@dataclass(frozen=True)
class Recipe:
    """How to train. Every field is something that a user writes in the loop; options of `shard` are not in
    here.
    """

    model: str = "gpt"
    optimizer: str = "adamw"
    steps: int = STEPS
    accumulate: int = 1
    no_sync: bool = False
    clip: float | None = None
    checkpointing: models.Checkpointing = ""
    scheduler: str = ""  # built "before" or "after" shard()
    scaled: bool = False  # GradScaler
    infinite: tuple[int, ...] = ()  # steps in which the last rank's gradient overflows


@dataclass
class Trained:
    """What a run left. The losses are those of one rank, or of the whole batch."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    stats: zs.Stats | None = None


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
}


def optimizers(name: str, model: nn.Module) -> list[Optimizer]:
    """Muon takes matrices only, so it comes with AdamW for the rest."""
    params = list(model.parameters())
    if name != "muon":
        return [OPTIMIZERS[name](params)]
    matrices = [p for p in params if p.dim() == 2]
    return [torch.optim.Muon(matrices, lr=0.01), OPTIMIZERS["adamw"]([p for p in params if p.dim() != 2])]


def scheduler(optimizer: Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: (step + 1) / 5 if step < 5 else 0.8**step)


def micro_batches(recipe: Recipe, step: int, world: int) -> Iterator[list[Tensor]]:
    """Per micro-batch, what every rank gets."""
    kind = models.MLP if recipe.model == "mlp" else models.GPT
    for micro in range(recipe.accumulate):
        whole = kind.batch(ROWS * world, seed=1000 * step + micro)
        yield list(whole.chunk(world))


def loss_of(recipe: Recipe, model: nn.Module, batch: Tensor, infinite: bool) -> Tensor:
    loss = model(batch, True) if infinite else model(batch)
    return loss / recipe.accumulate


class Loop:
    """The plain PyTorch loop. What differs between the three ways is where gradients come from."""

    def __init__(self, recipe: Recipe, model: nn.Module, steppers: Sequence[Optimizer]) -> None:
        self.recipe, self.model, self.steppers, self.told = recipe, model, list(steppers), Trained()
        self.schedules = [scheduler(s) for s in steppers] if recipe.scheduler == "before" else []
        # A small interval, so that the scale also grows within twenty steps.
        self.scaler = torch.amp.GradScaler("cpu", enabled=recipe.scaled, init_scale=1024.0, growth_interval=7)

    def train(self, backward: Callable[[int, Callable[[Tensor], Tensor]], float]) -> None:
        """`backward(step, scale)` leaves gradients in the model and returns the loss."""
        if self.recipe.scheduler == "after":
            self.schedules = [scheduler(s) for s in self.steppers]
        for step in range(self.recipe.steps):
            self.told.losses.append(backward(step, self.scaler.scale))
            self._update()

    def _update(self) -> None:
        recipe, told = self.recipe, self.told
        for stepper in self.steppers:
            if recipe.clip is not None and recipe.scaled:
                self.scaler.unscale_(stepper)
        if recipe.clip is not None:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
            told.norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        for stepper in self.steppers:
            self.scaler.step(stepper)
        self.scaler.update()
        told.scales.append(self.scaler.get_scale())
        for schedule in self.schedules:
            schedule.step()
        told.rates.append(self.steppers[0].param_groups[0]["lr"])
        for stepper in self.steppers:
            stepper.zero_grad()


def sharded(recipe: Recipe, options: dict[str, Any]) -> Trained:
    """On a rank of the default group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = models.build(recipe.model, recipe.checkpointing)
    steppers = optimizers(recipe.optimizer, model)
    loop = Loop(recipe, model, steppers)
    run = zs.shard(model, steppers, **options)

    def backward(step: int, scale: Callable[[Tensor], Tensor]) -> float:
        total = 0.0
        for micro, batches in enumerate(micro_batches(recipe, step, world)):
            infinite = step in recipe.infinite and rank == world - 1
            last = micro == recipe.accumulate - 1
            with run.no_sync() if recipe.no_sync and not last else nullcontext():
                loss = loss_of(recipe, model, batches[rank], infinite)
                scale(loss).backward()
            total += loss.item()
        return total

    loop.train(backward)
    with run.gathered() as whole:
        loop.told.weights = {name: p.detach().clone() for name, p in whole.items()}
    loop.told.stats = run.stats()
    run._runtime.transport.close()
    return loop.told


def whole_batch(recipe: Recipe, world: int) -> Trained:
    """One process that never heard of ranks."""
    model = models.build(recipe.model, recipe.checkpointing)
    loop = Loop(recipe, model, optimizers(recipe.optimizer, model))

    def backward(step: int, scale: Callable[[Tensor], Tensor]) -> float:
        total = 0.0
        for batches in micro_batches(recipe, step, world):
            loss = loss_of(recipe, model, torch.cat(batches), step in recipe.infinite)
            scale(loss).backward()
            total += loss.item()
        return total

    loop.train(backward)
    loop.told.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return loop.told


def rank_by_rank(recipe: Recipe, world: int, precision: zs.Precision | None = None) -> Trained:
    """One process that computes every rank's gradient and averages them in rank order, in plain PyTorch.

    With a precision: weights in 16 bits and an fp32 master, the average taken in fp32 and rounded once.
    """
    master = models.build(recipe.model, recipe.checkpointing)
    model = models.build(recipe.model, recipe.checkpointing)
    narrow = precision is not None
    if precision is not None:
        for name, p in model.named_parameters():
            if not any(fnmatchcase(name, pattern) for pattern in precision.keep):
                p.data = p.data.to(getattr(torch, precision.compute))
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.forward = partial(_in_its_dtype, module, module.forward)
    loop = Loop(recipe, master, optimizers(recipe.optimizer, master))
    pairs = list(zip(master.parameters(), model.parameters(), strict=True))

    def backward(step: int, scale: Callable[[Tensor], Tensor]) -> float:
        total = 0.0
        with torch.no_grad():
            for sharded_param, unsharded_param in pairs:
                unsharded_param.copy_(sharded_param)
        for batches in _rounds(recipe, step, world):
            sums: list[Tensor | None] = [None] * len(pairs)
            for rank, batch in enumerate(batches):
                own: list[Tensor | None] = [None] * len(pairs)
                for part in batch:
                    part = (
                        part.to(getattr(torch, precision.compute))
                        if narrow and part.is_floating_point()
                        else part
                    )
                    loss = loss_of(recipe, model, part, step in recipe.infinite and rank == world - 1)
                    scale(loss).backward()
                    _widen(own, pairs, precision)
                    total += loss.item() / world
                _add(sums, own, pairs, precision)
            _land(sums, pairs, world, precision)
        return total

    loop.train(backward)
    loop.told.weights = {name: p.detach().clone() for name, p in master.named_parameters()}
    return loop.told


def _in_its_dtype(norm: nn.LayerNorm, plain: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A norm that is kept in another dtype than that of its surroundings."""
    return plain(x.to(norm.weight.dtype)).to(x.dtype)


def _rounds(recipe: Recipe, step: int, world: int) -> Iterator[list[list[Tensor]]]:
    """Per reduction, the micro-batches of every rank: one reduction a micro-batch, or one for all of them."""
    micros = list(micro_batches(recipe, step, world))
    if recipe.no_sync:
        yield [[micro[rank] for micro in micros] for rank in range(world)]
    else:
        for micro in micros:
            yield [[batch] for batch in micro]


def _wire(sharded_param: Tensor, unsharded_param: Tensor, precision: zs.Precision | None) -> torch.dtype:
    kept = precision is None or unsharded_param.dtype == sharded_param.dtype
    return unsharded_param.dtype if kept else getattr(torch, precision.wire)


def _widen(
    own: list[Tensor | None], pairs: list[tuple[Tensor, Tensor]], precision: zs.Precision | None
) -> None:
    """A micro-batch's gradients onto those of one rank, in the dtype that would travel if that is wider."""
    for index, (sharded_param, unsharded_param) in enumerate(pairs):
        if unsharded_param.grad is not None:
            widest = max(
                unsharded_param.dtype,
                _wire(sharded_param, unsharded_param, precision),
                key=lambda dtype: dtype.itemsize,
            )
            grad, before = unsharded_param.grad.to(widest), own[index]
            own[index] = grad if before is None else before + grad
            unsharded_param.grad = None


def _add(
    sums: list[Tensor | None],
    own: list[Tensor | None],
    pairs: list[tuple[Tensor, Tensor]],
    precision: zs.Precision | None,
) -> None:
    """One rank's gradients onto the sums, through the dtype that would have travelled."""
    for index, (sharded_param, unsharded_param) in enumerate(pairs):
        mine, before = own[index], sums[index]
        if mine is not None:
            grad = mine.to(_wire(sharded_param, unsharded_param, precision)).float()
            sums[index] = grad if before is None else before + grad


def _land(
    sums: list[Tensor | None], pairs: list[tuple[Tensor, Tensor]], world: int, precision: zs.Precision | None
) -> None:
    for total, (sharded_param, unsharded_param) in zip(sums, pairs, strict=True):
        if total is not None:
            kept = precision is None or unsharded_param.dtype == sharded_param.dtype
            landed = (total * (1.0 / world)).to(torch.float32 if kept else getattr(torch, precision.landed))
            sharded_param.grad = (
                landed.float()
                if sharded_param.grad is None
                else (landed + sharded_param.grad.to(landed.dtype)).float()
            )


def mean_losses(of_ranks: Sequence[Trained]) -> list[float]:
    """The loss of the whole batch: ranks have equal shares of it."""
    return [sum(losses) / len(losses) for losses in zip(*(t.losses for t in of_ranks), strict=True)]


@cache
def on_ranks(world: int, recipe: Recipe, **options: Any) -> list[Trained]:
    """The recipe on `world` processes; the ranks' weights agree to the bit, whatever the recipe."""
    trained: list[Trained] = ranks(world).run(sharded, recipe, options)
    for other in trained[1:]:
        assert_same_bits(other.weights, trained[0].weights)
    return trained


# One process's results do not change within a session, and many tests compare with the same.
whole_batch_once = cache(whole_batch)
rank_by_rank_once = cache(rank_by_rank)
