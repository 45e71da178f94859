"""A training run that is cut in two: steps, a save, another process's life, a load, more steps."""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import models
import numpy
import recipes
import torch
import torch.distributed as dist
from recipes import Loop, Recipe, loss_of, optimizers
from torch import Tensor

import zeroshard as zs
from zeroshard.checkpoint import PendingSave, SaveResult
from zeroshard.checkpoint.staging import FileImage
from zeroshard.kernels import update_rows
from zeroshard.offload import python_executor as host_updates
from zeroshard.sync import AdaptiveSync

HALF, ROWS = 10, 12  # steps of a half and rows of a batch, unless a function is told otherwise
GPT = Recipe()
MLP = Recipe(model="mlp")
DECAYED = Recipe(scheduler="after")
SCALED = Recipe(model="mlp", scaled=True, infinite=(6, 12))  # an overflow in each half
CLIPPED = {"clip_norm": 0.5, "precision": "bf16"}
BELOW = {"clip_norm": math.inf}
LOCAL = zs.Local(steps=5)
SWITCH = 5  # the step at which adaptive runs change over: what they measure would differ each time


@dataclass(frozen=True)
class Disk:
    """`Offload` with a folder of its own on the disk, made by each rank."""

    options: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, **options: Any) -> Disk:
        return cls(tuple(options.items()))

    def offload(self, path: str) -> zs.Offload:
        return zs.Offload(threads=1, stage_bytes=4096, path=path, **dict(self.options))


def host(**options: Any) -> zs.Offload:
    return zs.Offload(threads=1, **options)


# Every kind of state that a run can have: a recipe and the options of `shard`. Each goes on with the same
# bits at the same number of ranks.
MATRIX: dict[str, tuple[Recipe, dict[str, Any]]] = {
    **{f"stage {stage}": (DECAYED, {"stage": stage, "precision": "bf16"}) for stage in (0, 1, 2, 3)},
    "fp32, stage 3": (GPT, {"stage": 3}),
    "accumulation": (Recipe(accumulate=2, no_sync=True), {"stage": 2}),
    **{f"{name}, stage 2": (Recipe(optimizer=name), {"stage": 2}) for name in ("sgd", "muon", "adafactor")},
    "fp16 scaler": (SCALED, {"stage": 2, "precision": "fp16"}),
    "fp16 scaler, host": (SCALED, {"stage": 2, "precision": "fp16", "offload": host()}),
    "host, plain master": (DECAYED, {**BELOW, "stage": 3, "precision": "bf16", "offload": host()}),
    "host, split master, clipped": (GPT, {**CLIPPED, "stage": 2, "offload": host(master="split")}),
    "host, 8-bit moments": (GPT, {**CLIPPED, "stage": 3, "offload": host(moments="int8")}),
    "host, the optimizer's own step": (GPT, {"stage": 1, "offload": host()}),
    "host, parameters too": (GPT, {**BELOW, "stage": 3, "offload": host(parameters="host")}),
    "host, momentum": (Recipe(optimizer="sgd"), {**BELOW, "offload": host()}),
    "disk": (GPT, {**BELOW, "stage": 3, "precision": "bf16", "offload": Disk.of(optimizer="disk")}),
    "disk, split master, clipped": (
        DECAYED, {**CLIPPED, "stage": 2, "offload": Disk.of(optimizer="disk", master="split")}
    ),
    "disk, 8-bit moments": (
        GPT, {**CLIPPED, "stage": 3, "offload": Disk.of(optimizer="disk", moments="int8")}
    ),
    "disk, momentum": (Recipe(optimizer="sgd"), {**BELOW, "stage": 2, "offload": Disk.of(optimizer="disk")}),
    "auto: device, host and disk": (
        GPT,
        {**CLIPPED, "stage": 3,
         "offload": Disk.of(optimizer="auto", stages=2, device_bytes=50_000, host_bytes=75_000)},
    ),
    "delayed, stage 2": (GPT, {"stage": 2, "sync": zs.Delayed()}),
    "delayed, stage 3, host": (GPT, {**BELOW, "stage": 3, "sync": zs.Delayed(), "offload": host()}),
    "local": (DECAYED, {"stage": 0, "sync": LOCAL}),
    "local, rates": (GPT, {"stage": 0, "sync": zs.Local(steps=5, rates=(1.0, 0.5))}),
    "adaptive": (GPT, {"stage": 0, "sync": zs.Adaptive(choices=(zs.EveryStep(), LOCAL), window=500)}),
    "adaptive, delayed": (
        GPT, {"stage": 2, "sync": zs.Adaptive(choices=(zs.Delayed(), zs.EveryStep()), window=500)}
    ),
    "int8 with feedback": (GPT, {"stage": 2, "compress": zs.Int8(feedback=True)}),
    "top-k": (GPT, {"stage": 3, "compress": zs.TopK(0.05, warmup_steps=4, freeze=True, ramp_steps=4)}),
    "1-bit": (
        GPT, {"stage": 1, "compress": zs.OneBit(warmup_steps=4, warmup=zs.Int4(), residual="bfloat16")}
    ),
    "changes": (GPT, {"stage": 3, "gather": zs.Delta(zs.Int4(block=32, feedback=False, stochastic=True))}),
    "low rank and rows": (GPT, {"stage": 2, "compress": {"tokens.*": zs.Rows(), "*": zs.LowRank(rank=2)}}),
    "int8 with feedback, host": (
        GPT, {**BELOW, "stage": 2, "compress": zs.Int8(feedback=True), "offload": host()}
    ),
}  # fmt: skip
# Those that stand for the others too; `benchmarks/checkpoints/resume.py` has them all.
SHORT = [
    *("stage 0", "stage 3", "muon, stage 2", "adafactor, stage 2", "accumulation", "fp16 scaler"),
    *("host, plain master", "host, split master, clipped", "host, momentum"),
    *("host, the optimizer's own step", "disk, split master, clipped", "disk, 8-bit moments"),
    *("auto: device, host and disk", "delayed, stage 3, host", "local, rates", "adaptive"),
    *("top-k", "changes"),
]


@dataclass
class Half:
    """What a run left: the weights, the losses, the data that came with a checkpoint."""

    weights: dict[str, Tensor]
    losses: list[float]
    extra: dict[str, Any] = field(default_factory=dict)
    draws: list[float] = field(default_factory=list)  # random numbers, right after the save or the load
    held: dict[str, Tensor] = field(default_factory=dict)  # whole weights and moments, at that moment
    rests: set[str] = field(default_factory=set)  # tiers in use


class Cut:
    """A run on this rank, at a step of its own. The batch of a step is the same for any number of ranks."""

    def __init__(self, recipe: Recipe, options: dict[str, Any], rows: int = ROWS) -> None:
        self.recipe, self.rows = recipe, rows
        self.losses: list[float] = []
        self.draws: list[float] = []
        self.held: dict[str, Tensor] = {}
        self.alone = not (dist.is_available() and dist.is_initialized())
        self.rank, self.world = (0, 1) if self.alone else (dist.get_rank(), dist.get_world_size())
        self.model = models.build(recipe.model)
        self.steppers = optimizers(recipe.optimizer, self.model)
        self.scratch = tempfile.TemporaryDirectory(prefix="zeroshard-resume-")
        offload = options.get("offload")
        if isinstance(offload, Disk):
            options = {**options, "offload": offload.offload(self.scratch.name)}
        self.loop = Loop(recipe, self.model, self.steppers)
        if recipe.scheduler:
            self.loop.schedules = [recipes.scheduler(s) for s in self.steppers]
        self.run = zs.shard(self.model, self.steppers, **options)

    @property
    def extra_state(self) -> dict[str, Any]:
        return {
            "schedulers": self.loop.schedules,
            "scalers": [self.loop.scaler] if self.recipe.scaled else [],
        }

    def train(self, first: int, last: int) -> None:
        kind = models.MLP if self.recipe.model == "mlp" else models.GPT
        sync_strategy = self.run._runtime.sync_strategy
        for step in range(first, last):
            if step == SWITCH and isinstance(sync_strategy, AdaptiveSync):
                sync_strategy._switch(1, "the case says so")
            for micro in range(self.recipe.accumulate):
                whole = kind.batch(self.rows, seed=step + 1000 * micro)
                infinite = step in self.recipe.infinite and self.rank == self.world - 1
                last = micro == self.recipe.accumulate - 1
                with nullcontext() if last else self.run.no_sync():
                    loss = loss_of(self.recipe, self.model, whole.chunk(self.world)[self.rank], infinite)
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
        rests = {tier for tier in ("device", "host", "disk") if self.run.placement.has(tier)}
        self.run.close()
        self.scratch.cleanup()
        return Half(weights, self.losses, extra or {}, self.draws, self.held, rests)


def seed(value: int) -> None:
    for draw in (torch.manual_seed, random.seed, numpy.random.seed):
        draw(value)


def whole(recipe: Recipe, options: dict[str, Any], half: int = HALF, rows: int = ROWS) -> Half:
    """Both halves in one go."""
    cut = Cut(recipe, options, rows)
    cut.train(0, 2 * half)
    return cut.end()


def first(
    path: Path,
    recipe: Recipe,
    options: dict[str, Any],
    background: bool = False,
    half: int = HALF,
    rows: int = ROWS,
) -> Half:
    """Half of the steps and a save; five more beside a background save."""
    cut = Cut(recipe, options, rows)
    seed(7 + cut.rank)
    cut.train(0, half)
    if "gather" in options:
        cut.weights()  # looked at between step and save, weights have been sent already
    saved = cut.run.save(
        path, extra={"at": half, "order": torch.arange(3)}, background=background, **cut.extra_state
    )
    if background:
        assert isinstance(saved, PendingSave)
        cut.train(half, half + 5)
        saved = saved.wait()
    assert isinstance(saved, SaveResult)
    if not background:
        cut.note()
    return cut.end({"bytes": saved.bytes})


def beside(path: Path, recipe: Recipe, options: dict[str, Any], steps: int = 3) -> tuple[Half, Half]:
    """Some steps and a background save, which copies with random delays while two more steps go on, and host
    updates with random delays too; and the same with a blocking save and without delays."""
    halves = []
    for background in (True, False):
        seed(7)
        cut = Cut(recipe, options)
        with slowed(cut.rank) if background else nullcontext():
            cut.train(0, steps)
            saved = cut.run.save(path / str(background), background=background, **cut.extra_state)
            cut.train(steps, steps + 2)
            if isinstance(saved, PendingSave):
                saved.wait()
        halves.append(cut.end())
    return halves[0], halves[1]


@contextmanager
def slowed(rank: int) -> Iterator[None]:
    draw = random.Random(rank)

    def later(work: Callable[..., None], *given: Any, **more: Any) -> None:
        time.sleep(draw.choice((0.0, 0.0, 0.001, 0.006)))
        work(*given, **more)

    with ExitStack() as stack:
        fill = FileImage.fill
        stack.enter_context(patch.object(FileImage, "fill", lambda *given: later(fill, *given)))
        stack.enter_context(patch.object(host_updates, "update_rows", partial(later, update_rows)))
        yield


def second(
    path: Path,
    recipe: Recipe,
    options: dict[str, Any],
    strict: bool = True,
    again: Path | None = None,
    half: int = HALF,
    rows: int = ROWS,
) -> Half:
    """A fresh run that goes on from the checkpoint, and first saves it again where it is asked to."""
    cut = Cut(recipe, options, rows)
    seed(99)
    extra = cut.run.load(path, strict=strict, **cut.extra_state)
    if again is not None:
        cut.run.save(again, **cut.extra_state)
    cut.note()
    cut.train(half, 2 * half)
    return cut.end(extra)


def by_hand(recipe: Recipe, worlds: tuple[int, int], half: int = HALF, rows: int = ROWS) -> dict[str, Tensor]:
    """The same training in plain PyTorch and one process: the batch cut as for so many ranks in the first and
    in the second half, gradients averaged in rank order."""
    model = models.build(recipe.model)
    steppers = optimizers(recipe.optimizer, model)
    params = list(model.parameters())
    kind = models.MLP if recipe.model == "mlp" else models.GPT
    for step in range(2 * half):
        world = worlds[step >= half]
        total: list[Tensor] = []
        for part in kind.batch(rows, seed=step).chunk(world):
            grads = torch.autograd.grad(loss_of(recipe, model, part, False), params)
            total = [a + b for a, b in zip(total, grads, strict=True)] if total else list(grads)
        for param, grad in zip(params, total, strict=True):
            param.grad = grad * (1.0 / world)
        for stepper in steppers:
            stepper.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def without_key_bias(name: str, difference: Tensor) -> Tensor:
    """A difference of weights without the bias of attention's keys, which changes nothing: softmax takes the
    same off all of them. Its gradient is zero but for rounding, and Adam makes steps of any gradient."""
    if not name.endswith("qkv.bias"):
        return difference
    width = len(difference) // 3
    return torch.cat([difference[:width], difference[2 * width :]])
