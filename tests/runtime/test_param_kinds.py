"""Parameters that break assumptions: tied, frozen, of several dtypes, tiny, uneven, unused by some ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from trained_twice import (
    STAGES,
    Case,
    Training,
    assert_as_one_process,
    assert_trained_alike,
    plain,
    rows,
    sharded,
    tokens,
    train,
)

import zeroshard as zs
from zeroshard.comm import control
from zeroshard.comm.diagnosis import waits
from zeroshard.testing import ranks

pytestmark = pytest.mark.ranks


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks between two layers: units are found by themselves."""

    def __init__(self, width: int = 6, depth: int = 3, out: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.last = nn.Linear(width, out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Tied(nn.Module):
    """Embedding and head are one parameter; so are two projections of different blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[2].up.weight = self.blocks[0].up.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class SharedBlock(nn.Module):
    """One block under two names, and a parameter of the root used between."""

    def __init__(self) -> None:
        super().__init__()
        block = Block(4)
        self.blocks = nn.ModuleList([block, Block(4), block])
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * self.gain
        return x


class Lora(nn.Module):
    """A frozen linear layer with a trainable detour."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, width) / width)
        self.b = nn.Parameter(torch.zeros(width, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x)) + x @ self.a.T @ self.b.T


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 6).requires_grad_(False)
        self.layers = nn.ModuleList(Lora(6) for _ in range(3))
        self.layers[1].requires_grad_(False)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Dtypes(nn.Module):
    """Float32, bfloat16 and float64 in one unit, and an integer parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4, 6, dtype=torch.float64)
        self.plain = nn.Linear(6, 6, dtype=torch.float32)
        self.narrow = nn.Linear(6, 6, dtype=torch.bfloat16)
        self.shift = nn.Parameter(torch.arange(5), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.plain(torch.tanh(self.wide(x)).float())
        x = x + self.narrow(x.bfloat16()).float()
        return x.double() * self.shift.sum() * self.mask.sum()


class Tiny(nn.Module):
    """No dim 0, one element, fewer rows than ranks, and rows that do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.one = nn.Parameter(torch.ones(1))
        self.three = nn.Parameter(torch.randn(3, 4))
        self.uneven = nn.Linear(3, 7)
        self.odd = nn.Linear(7, 1)
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.scale * (x @ self.three.T) + self.one
        return self.odd(torch.tanh(self.uneven(x))) + self.empty.sum()


class Complex(nn.Module):
    """Complex parameters, also one without a dimension, beside real ones and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 7), nn.Linear(7, 2)
        self.turns = nn.Parameter(torch.randn(7, dtype=torch.complex128))
        self.turn = nn.Parameter(torch.tensor(1 + 2j, dtype=torch.complex128))
        self.factor = nn.Parameter(torch.tensor([3]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.first(x) * self.turns * self.turn).abs()) * self.factor


class Branches(nn.Module):
    """Which branch runs depends on the data; one never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.branches = nn.ModuleList(Block() for _ in range(3))
        self.never = nn.Linear(6, 6)

    def forward(self, batch: tuple[Tensor, int]) -> Tensor:
        x, which = batch
        return self.branches[which](self.stem(x))


class Experts(nn.Module):
    """Two layers of experts; a rank runs those its tokens were routed to."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.layers = nn.ModuleList(nn.ModuleDict({str(i): Block() for i in range(4)}) for _ in range(2))

    def forward(self, batch: tuple[Tensor, list[int]]) -> Tensor:
        x, route = batch
        x = self.stem(x)
        for layer in self.layers:
            x = x + sum(layer[str(i)](x) for i in route)
        return x


class Mixture(nn.Module):
    """Experts that stand in one module, which every rank calls, whatever its route."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(3))
        self.gate = nn.Linear(6, 6)

    def forward(self, x: Tensor, route: list[int]) -> Tensor:
        return self.gate(x) + sum(self.experts[i](x) for i in route if i < 3)


class Mixtures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.layers = nn.ModuleList(Mixture() for _ in range(2))

    def forward(self, batch: tuple[Tensor, list[int]]) -> Tensor:
        x, route = batch
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x, route)
        return x


def squared(model: nn.Module, batch: object) -> Tensor:
    return model(batch).pow(2).mean()


def next_token(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def frozen_stack() -> nn.Module:
    model = Stack()
    model.first.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    model.last.bias.requires_grad_(False)
    return model


def four(step: int, rank: int) -> Tensor:
    return rows(step, rank, 4)


def by_rank(step: int, rank: int) -> tuple[Tensor, int]:
    return four(step, rank), rank % 2


def by_step(step: int, rank: int) -> tuple[Tensor, int]:
    return four(step, rank), (step + rank) % 2 if step < 4 else 2


def routed(step: int, rank: int) -> tuple[Tensor, list[int]]:
    return four(step, rank), [(rank + step) % 3, 3] if (rank + step) % 2 else []


def adagrad(params: Iterable[Any]) -> Optimizer:
    """Has a state before its first step."""
    return torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.2)


CASES = {
    "stack": Case(Stack, four, squared),
    "stack clipped": Case(Stack, four, squared, clip=0.5),
    "stack in small buckets": Case(Stack, four, squared, options={"bucket_bytes": 256}),
    "tied": Case(Tied, tokens, next_token),
    "shared block": Case(SharedBlock, four, squared),
    "frozen": Case(frozen_stack, four, squared),
    "lora": Case(Adapted, four, squared, clip=0.1),
    "dtypes": Case(Dtypes, four, squared, steps=4, tolerance=2e-2),
    "tiny": Case(Tiny, four, squared, clip=0.5),
    "adagrad": Case(Tiny, four, squared, optimizer=adagrad),
    "complex": Case(Complex, four, squared, clip=0.5),
    "branch by rank": Case(Branches, by_rank, squared),
    "branch by step": Case(Branches, by_step, squared, clip=0.5),
    "experts": Case(Experts, routed, squared),
    "experts in small buckets": Case(Experts, routed, squared, options={"bucket_bytes": 256}),
    "experts as units": Case(Experts, routed, squared, options={"units": ("layers.*.*",)}),
    "experts within units": Case(Mixtures, routed, squared),
}


@pytest.mark.wide(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process_on_two_ranks(name: str, stage: int) -> None:
    assert_as_one_process(__name__, name, stage)


def test_clip_norm_of_complex_parameters() -> None:
    case = CASES["complex"]
    ours = replace(case, clip=None, options={"clip_norm": case.clip}, tolerance=1e-6)
    assert_trained_alike([train(Training(ours, [0], ours.options))], plain(case, 1), ours.tolerance)


@pytest.mark.wide(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["tied", "tiny", "branch by step", "experts as units"])
def test_equals_one_process_on_four_ranks(name: str, stage: int) -> None:
    assert_as_one_process(__name__, name, stage, world=4)


@pytest.mark.wide(2)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ["stack clipped", "tied", "dtypes", "tiny", "lora", "experts within units"])
def test_equals_one_process_over_gloo(name: str, stage: int) -> None:
    assert_as_one_process(__name__, name, stage, transport="gloo")


@pytest.mark.wide(2)
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("name", ["branch by step", "experts"])
def test_units_that_only_some_ranks_use_over_gloo(name: str, stage: int) -> None:
    assert_as_one_process(__name__, name, stage, transport="gloo")


def unit_of_one_rank() -> None:
    """Over gloo a gather needs every rank: stage 3 cannot work, and says so."""
    control.FOREIGN_PATIENCE = waits.PATIENCE = 1.5  # of this process
    said = (
        r"rank 0 waits for its gather \[parameters of unit branches\.0\] \(called at .*; rank 1 waits for "
        r"its gather \[parameters of unit branches\.1\] \(called at .*run\.kept_full\(\), which gathers all"
    )
    with pytest.raises(zs.RankError, match=said):
        sharded(__name__, "branch by rank", 3, "gloo")


def test_units_that_only_some_ranks_use_at_stage_3_over_gloo() -> None:
    ranks(2).run(unit_of_one_rank)
