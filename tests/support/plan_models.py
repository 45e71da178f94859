"""Models that are no transformers, and steps of a run whose bytes are counted from outside."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import models
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from zeroshard.layout.memory import StepSegment
from zeroshard.testing import PeakBytes

ON_DEVICE = ("parameters", "gradients", "state", "gathered", "buckets")


class Bottleneck(nn.Module):
    """A residual block: its output is saved by its own ReLU, so that the next one need not save it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.norm1(self.one(x)))
        return torch.relu(x + self.norm2(self.two(inner)))


class ResNet(nn.Module):
    def __init__(self, width: int = 16, blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(Bottleneck(width) for _ in range(blocks))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3))).float().square().mean()


class Recurrent(nn.Module):
    """Embeddings that dwarf the rest, below an LSTM."""

    def __init__(self, words: int = 3000, width: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, 48, num_layers=2, batch_first=True)
        self.head = nn.Linear(48, 20)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.words(ids))[0]).float().square().mean()


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.silu(self.up(x)))


class Mixture(nn.Module):
    """A layer of experts, all of which are asked and weighed by a router."""

    def __init__(self, width: int, experts: int = 2) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        return x + sum(weights[..., i, None] * expert(x) for i, expert in enumerate(self.experts))


class MoE(nn.Module):
    def __init__(self, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(100, width)
        self.layers = nn.ModuleList(Mixture(width) for _ in range(layers))
        self.head = nn.Linear(width, 100)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).float().square().mean()


CASES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "gpt": (lambda: models.GPT(even=True, blocks=4), torch.zeros(16, 11, dtype=torch.int64)),
    "resnet": (ResNet, torch.zeros(4, 3, 12, 12)),
    "lstm": (Recurrent, torch.zeros(4, 12, dtype=torch.int64)),
    "moe": (MoE, torch.zeros(8, 16, dtype=torch.int64)),
}


# Bytes of a generous limit for each: all that stage 0 takes on two ranks, and some more.
TOP = {"gpt": 5_500_000, "resnet": 1_210_000, "lstm": 3_480_000, "moe": 1_600_000}


def case(name: str) -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    factory, batch = CASES[name]
    torch.manual_seed(0)
    model = factory()
    return model, torch.optim.AdamW(model.parameters(), fused=True), batch


def measured_step(
    run: zs.Run, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, micro_batches: int = 1
) -> tuple[int, int]:
    """After two steps, one whose operations are watched: what the run books on the device and the most that
    operations made beside it; and the bytes of its host tier."""

    def step() -> None:
        for number in range(micro_batches):
            with run.no_sync() if number < micro_batches - 1 else nullcontext():
                model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    with PeakBytes() as peak:
        step()
    live: dict[str, Any] = run.stats().live
    kept = sum(live[kind] for kind in ON_DEVICE)
    return kept + peak.most, live["host"] + live["staging"]


def peak_of_segments(segments: list[StepSegment]) -> int:
    """The most that a step holds beside parameters and gradients."""
    most = saved = 0
    for segment in segments:
        most, saved = max(most, saved + segment.forward), saved + segment.saved
    for segment in reversed(segments):
        most, saved = max(most, saved + segment.backward), saved - segment.saved
    return most


def assert_a_step_holds(
    segments: list[StepSegment], model: nn.Module, batch: Tensor, recomputed: list[str]
) -> None:
    """A real step holds what was traced, while these modules are recomputed; gradients are let go as they
    arrive."""
    for name in recomputed:
        module = model.get_submodule(name)
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with PeakBytes() as peak:
        loss = model(batch)
        held = peak.now
        loss.backward()
    assert sum(s.saved for s in segments) + loss.nbytes == held
    assert peak_of_segments(segments) == peak.most
