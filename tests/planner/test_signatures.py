"""Units that look alike and compute otherwise are traced each for itself; those that are alike, once."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from plan_models import assert_a_step_holds
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zeroshard.planner.signatures import ExampleInputs, natures, plain
from zeroshard.planner.trace import Tracer


class Block(nn.Module):
    """Two layers, and between them more or less."""

    def __init__(self, wide: bool = False, layer_idx: int = 0) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)
        self.wide, self.layer_idx = wide, layer_idx

    def forward(self, x: Tensor) -> Tensor:
        inner = self.one(x)
        if self.wide:
            inner = torch.cat([inner.exp(), inner.sin()], -1)[..., :32].tanh()
        result: Tensor = x + self.two(inner)
        return result


class Stack(nn.Module):
    """Blocks, the first of them without gradients where so many are `frozen`."""

    def __init__(self, blocks: Iterable[nn.Module], frozen: int = 0) -> None:
        super().__init__()
        self.blocks, self.frozen = nn.ModuleList(blocks), frozen

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            with torch.set_grad_enabled(number >= self.frozen):
                x = block(x)
        return x.square().mean()


def checkpointed() -> Stack:
    """Every second block by the user's own hand."""
    made = Stack(Block(wide=True) for _ in range(4))
    for block in list(made.blocks)[::2]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    return made


def resting() -> Stack:
    """Two blocks in the middle that drop nothing."""
    made = Stack(nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5)) for _ in range(4))
    for block in list(made.blocks)[1:3]:
        block.eval()
    return made


def strided() -> Stack:
    return Stack(
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, stride=stride), nn.ReLU()) for stride in (1, 1, 2, 1)
    )


def upsampled() -> Stack:
    return Stack(
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Upsample(scale_factor=factor))
        for factor in (1, 2, 1, 2)
    )


def activations() -> Stack:
    between = (nn.ReLU(), nn.GELU(), nn.Sequential(nn.Softplus(), nn.Tanh()), nn.Identity())
    return Stack(nn.Sequential(nn.Linear(32, 32), one, nn.Linear(32, 32)) for one in between)


FLAT, IMAGES = torch.zeros(16, 32), torch.zeros(2, 8, 8, 8)
CASES: dict[str, tuple[Callable[[], Stack], Tensor]] = {
    "every second one does more": (lambda: Stack(Block(wide=bool(n % 2)) for n in range(4)), FLAT),
    "strides": (strided, IMAGES),
    "upsampling": (upsampled, IMAGES),
    "activations": (activations, FLAT),
    "no gradients": (lambda: Stack((Block() for _ in range(4)), frozen=2), FLAT),
    "at rest": (resting, FLAT),
    "checkpoints": (checkpointed, FLAT),
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_blocks_with_the_same_weights_may_keep_more_or_less(name: str, recompute: bool) -> None:
    """A trace has the bytes that the operations of a real step make."""
    factory, batch = CASES[name]
    names = [f"blocks.{number}" for number in range(4)]
    segments = Tracer(factory(), names, lambda _: recompute, {}).run(ExampleInputs.of(batch), None)
    assert_a_step_holds(segments, factory(), batch, names if recompute else [])


def numbers(blocks: Iterable[nn.Module]) -> list[int]:
    return list(natures({f"blocks.{n}": block for n, block in enumerate(blocks)}).values())


def test_a_number_that_counts_the_units_makes_no_difference() -> None:
    assert numbers(Block(layer_idx=n) for n in range(5)) == [0] * 5
    assert numbers(Block(layer_idx=n) for n in (3, 4, 5)) == [0] * 3
    assert numbers(Block(n % 2 == 1, n) for n in range(4)) == [0, 1, 0, 1]
    assert numbers(Block(layer_idx=n) for n in (1, 2)) == [0, 1]  # of two nothing can be told
    assert numbers(Block(layer_idx=n) for n in (1, 2, 4)) == [0, 1, 2]


def test_hooks_and_buffers_make_a_difference() -> None:
    blocks = [Block() for _ in range(4)]
    blocks[1].register_forward_hook(lambda module, args, output: output.exp())
    blocks[2].register_buffer("mask", torch.ones(3))
    assert numbers(blocks) == [0, 1, 2, 0]


class Way(enum.Enum):
    UP = 1
    DOWN = 2


@dataclass
class Settings:
    window: int


def test_values_are_compared_by_what_they_are() -> None:
    def made(scale: float) -> Callable[[Tensor], Tensor]:
        return lambda x: x * scale

    same: list[tuple[Any, Any]] = [
        (made(1.0), made(1.0)),
        (Settings(4), Settings(4)),
        (partial(torch.add, 1), partial(torch.add, 1)),
        ({"a": [1, 2]}, {"a": [1, 2]}),
        (object(), object()),  # nothing is known of it
    ]
    others: list[tuple[Any, Any]] = [
        (made(1.0), made(2.0)),
        (Settings(4), Settings(8)),
        (partial(torch.add, 1), partial(torch.add, 2)),
        ({"a": [1, 2]}, {"a": [1, 3]}),
        (torch.relu, torch.tanh),
        (Way.UP, Way.DOWN),
        (1, True),
        (torch.zeros(3), torch.zeros(4)),
    ]
    assert all(plain(one) == plain(two) for one, two in same)
    assert all(plain(one) != plain(two) for one, two in others)
    around: list[Any] = []
    around.append(around)
    assert hash(plain(around)) == hash(plain(around))  # ends
