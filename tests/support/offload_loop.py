"""One training loop, run offloaded in the ways that must agree, and in plain PyTorch as the reference.

The model has no parameter whose gradient is zero but for rounding (as the key bias of attention is): Adam
would blow that rounding up to whole steps, in any two runs that differ in one bit.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial, partialmethod
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import zeroshard as zs
from zeroshard.kernels import split
from zeroshard.layout.memory import MemoryModel, heaviest
from zeroshard.offload import build as place
from zeroshard.offload import python_executor
from zeroshard.offload.group import OffloadGroup
from zeroshard.offload.updates import HostUpdates
from zeroshard.options import Options
from zeroshard.params.gather_group import GatherGroup
from zeroshard.planner.signatures import blocks_of, rules_of
from zeroshard.runtime import build
from zeroshard.testing import assert_same_bits, ranks

VOCABULARY, LENGTH, WIDTH, HIDDEN = 41, 8, 20, 33
CLIP = 4.0
LONG = "RECIPE_STEPS" in os.environ  # --wide (`conftest.py`)
# Factors of the loss: alone, twice in a row, and with a calm step between.
SPIKED = (9, 20, 21, 35, 37) if LONG else (3, 9, 10, 18, 20)
SPIKES = dict(zip(SPIKED, (40.0, 25.0, 25.0, 60.0, 30.0), strict=True))
STEPS, THREE_SPIKES = (50, 24) if LONG else (22, 14)

Pace = Literal["overlapped", "waited", "delayed", "ties away"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Tokens in, the mean loss out. `tied`: one matrix for embedding and head."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, skip: int | None = None, biased: bool = True) -> Tensor:
        x = self.tokens(tokens[:, :-1])
        for index, block in enumerate(self.blocks):
            if index != skip:
                x = block(x)
        # `biased=False` leaves out one parameter in the middle of its unit.
        x = self.norm(x) if biased else F.layer_norm(x, (WIDTH,), self.norm.weight)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens[:, 1:].flatten())


def make_model(tied: bool = False) -> GPT:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return GPT(tied)


def batch(step: int, rank: int, micro: int = 0, rows: int = 2) -> Tensor:
    draw = torch.Generator().manual_seed(100_000 * rank + 100 * step + micro)
    return torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=draw)


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1),
    "adam": partial(torch.optim.Adam, lr=1e-3, weight_decay=0.01),
    "amsgrad": partial(torch.optim.AdamW, lr=1e-3, amsgrad=True),
    "sgd": partial(torch.optim.SGD, lr=0.02),
    "momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=0.01),
    "nesterov": partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.01),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2),
}


@dataclass(frozen=True)
class Case:
    """What is trained. Where things rest is an option of `shard`."""

    optimizer: str = "adamw"
    steps: int = STEPS
    accumulate: int = 1
    tied: bool = False
    skips: bool = False  # every third step leaves out a block, and every fourth a bias
    clip: float = CLIP
    spikes: tuple[int, ...] = tuple(SPIKES)
    device: str = "cpu"


@dataclass
class Trained:
    weights: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    stats: zs.Stats | None = None
    state: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    rests: set[tuple[str, str]] = field(default_factory=set)  # of state and parameters, in some unit


def on_disk(path: Path, **given: Any) -> zs.Offload:
    """State on the disk, in shards small enough that there are several."""
    return zs.Offload("disk", path=str(path), stage_bytes=4096, threads=2, **given)


def thirds(options: dict[str, Any], world: int, parameters: str = "device", **given: Any) -> zs.Offload:
    """`auto` with budgets for which all three tiers hold something: state, with parameters on the device; or
    parameters, which come before state, so that all of that is on the disk then."""
    model = make_model()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    units, rules = blocks_of(model, [optimizer], "auto"), rules_of([optimizer])
    given = {"stages": 2, "device_bytes": 0, **given}  # few frames, or they alone take more than the model
    for size in (given.pop("stage_bytes"), 1024, 256):
        some = zs.Offload(optimizer="auto", parameters=parameters, stage_bytes=size, **given)  # type: ignore[arg-type]
        whole = Options(offload=some, **{"clip_norm": CLIP} | options)
        demands, needed = heaviest(MemoryModel(units, whole, world, rules)).demands
        first, second = demands[:2]
        passing = needed.staging + needed.frames
        if parameters != "device":
            near = needed.streaming + first.parameters.device
            far = passing + needed.blocks + second.parameters.host
            return replace(some, device_bytes=near, host_bytes=far)
        near = sum(d.parameters.device for d in demands) + first.state.device
        far = passing + second.state.host
        if far < needed.staging + sum(d.state.host for d in demands[1:]):  # else all of it fits on the host
            return replace(some, device_bytes=near, host_bytes=far)
    raise AssertionError("what passes through host memory is larger than the model")


def loss_of(case: Case, model: nn.Module, step: int, rank: int, micro: int) -> Tensor:
    skip = 1 if case.skips and step % 3 == 0 else None
    tokens = batch(step, rank, micro).to(case.device)
    loss: Tensor = model(tokens, skip, not (case.skips and step % 4 == 1))
    factor = SPIKES.get(step, 1.0) if step in case.spikes else 1.0
    return loss * factor / case.accumulate


@contextmanager
def paced(sync_strategy: Pace, seed: int = 0) -> Iterator[None]:
    """How the host's work runs: beside the training thread, so with random delays, or waited for at once.

    "ties away": a plain master rounds to bf16 as a split one must, where a value lies half way between two.
    """
    with ExitStack() as stack:
        if sync_strategy == "waited":
            start = HostUpdates._start

            def start_and_wait(self: HostUpdates, part: OffloadGroup, *options: Any, **more: Any) -> None:
                start(self, part, *options, **more)
                self.wait(part)
                part.update.ready.wait_on_host()

            stack.enter_context(patch.object(HostUpdates, "_start", start_and_wait))
        elif sync_strategy == "ties away":
            away = partial(python_executor.update_rows, ties="away")
            stack.enter_context(patch.object(python_executor, "update_rows", away))
            stack.enter_context(
                patch.object(GatherGroup, "refresh", partialmethod(refresh_away, GatherGroup.refresh))
            )
        elif sync_strategy == "delayed":
            draw, lock = random.Random(seed), threading.Lock()

            def delay() -> None:
                with lock:
                    seconds = draw.choice((0.0, 0.0, 0.0, 0.001, 0.004))
                time.sleep(seconds)

            def later(update: Callable[..., None], *args: Any, **kwargs: Any) -> None:
                delay()
                update(*args, **kwargs)
                delay()

            stack.enter_context(patch.object(build, "TierCopies", partial(build.TierCopies, delay=delay)))
            stack.enter_context(patch.object(place, "DiskPager", partial(place.DiskPager, delay=delay)))
            slow = partial(later, python_executor.update_rows)
            stack.enter_context(patch.object(python_executor, "update_rows", slow))
        yield


def refresh_away(self: GatherGroup, plain: Callable[..., None], *how: bool) -> None:
    """Weights of a plain master on the device, rounded as a split one must."""
    plain(self, *how)
    if self.memory.master is not None:
        for weight, master in zip(*self.views(), strict=True):
            if weight.dtype == torch.bfloat16:
                weight.copy_(split(master.reshape(-1))[0].view(weight.shape))


def repeatable(device: str) -> None:
    """Sums in the same order in every run, on a GPU too. Before its first use."""
    if device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def offloaded(
    case: Case, options: dict[str, Any], sync_strategy: Pace = "overlapped", seed: int = 0
) -> Trained:
    """The plain loop with `shard(..., offload=...)`; on a rank of the default group where there is one."""
    repeatable(case.device)
    joined = dist.is_available() and dist.is_initialized()
    rank, told = dist.get_rank() if joined else 0, Trained()
    model = make_model(case.tied).to(case.device)
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    with paced(sync_strategy, seed):
        run = zs.shard(model, optimizer, **{"clip_norm": case.clip} | options)
    with paced(sync_strategy, seed):
        for step in range(case.steps):
            for micro in range(case.accumulate):
                with run.no_sync() if micro < case.accumulate - 1 else nullcontext():
                    loss = loss_of(case, model, step, rank, micro)
                    loss.backward()
            told.losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        told.stats = run.stats()
        told.rests = {(place.optimizer, place.parameters) for place in run.placement}
        run.close()
    told.weights = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    told.state = named_state(model, optimizer)
    return told


def named_state(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    names = {p: name for name, p in model.named_parameters()}
    held = {names[p]: state for p, state in optimizer.state.items()}
    return {n: {k: v.cpu().clone() for k, v in s.items() if isinstance(v, Tensor)} for n, s in held.items()}


def plain(case: Case, world: int = 1) -> Trained:
    """One process, plain PyTorch: every rank's gradient in turn, averaged, clipped and applied by torch."""
    model, told = make_model(case.tied).to(case.device), Trained()
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    for step in range(case.steps):
        for rank in range(world):
            for micro in range(case.accumulate):
                loss = loss_of(case, model, step, rank, micro)
                loss.backward()
            if rank == 0:
                told.losses.append(loss.item())
        for p in model.parameters():
            if p.grad is not None:
                p.grad /= world
        nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()
    told.weights = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    told.state = named_state(model, optimizer)
    return told


def furthest(got: dict[str, Tensor], want: dict[str, Tensor]) -> tuple[float, str]:
    """The largest difference of any element, and whose it is."""
    assert got.keys() == want.keys()
    return max((float((got[name] - want[name]).abs().max()), name) for name in want)


plain_once = cache(plain)


def parts(**options: Any) -> zs.Offload:
    """Several parts in each unit, so that they overtake one another."""
    return zs.Offload(stage_bytes=4096, threads=2, **options)


@cache
def trained(world: int, case: Case, stage: int, offload: zs.Offload, precision: str | None = None,
            sync_strategy: Pace = "overlapped", seed: int = 0) -> Trained:  # fmt: skip
    options = {"stage": stage, "offload": offload, "precision": precision}
    if world == 1:
        return offloaded(case, options, sync_strategy, seed)
    told: list[Trained] = ranks(world).run(offloaded, case, options, sync_strategy, seed)
    assert_same_bits(told[1].weights, told[0].weights)
    assert told[1].stats is not None
    assert told[0].stats is not None
    assert told[1].stats.updates == told[0].stats.updates
    return told[0]
