"""Units that are compiled before shard(), in both of torch's ways."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
from test_param_kinds import Stack, four, squared
from torch import nn
from torch._dynamo.utils import counters
from trained_twice import Case, Trained, assert_trained_alike, plain, sharded

from zeroshard.testing import Ranks

pytestmark = pytest.mark.ranks


def wrapped(backend: str) -> nn.Module:
    model = Stack()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend=backend)
    return model


def in_place(backend: str, blocks: int = 3) -> nn.Module:
    model = Stack()
    for block in model.blocks[:blocks]:
        block.compile(backend=backend)
    return model


def whole(backend: str) -> nn.Module:
    model = Stack()
    model.compile(backend=backend)
    return model


RECOMPUTE = {"recompute": True}
CASES = {
    "wrapped": Case(lambda: wrapped("aot_eager"), four, squared, steps=4),
    "in place": Case(lambda: in_place("aot_eager"), four, squared, steps=4),
    "wrapped, recomputed": Case(lambda: wrapped("aot_eager"), four, squared, steps=4, options=RECOMPUTE),
    "in place, recomputed": Case(lambda: in_place("aot_eager"), four, squared, steps=4, options=RECOMPUTE),
    "whole": Case(lambda: whole("aot_eager"), four, squared, steps=4),
    "inductor": Case(lambda: in_place("inductor", blocks=1), four, squared, steps=4),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """Ranks where warnings are no errors: the compiler itself uses what torch has deprecated."""
    ranks = Ranks(2, warn="ignore")
    yield ranks
    ranks.stop()


@pytest.mark.wide(2)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", ["wrapped", "in place", "wrapped, recomputed", "in place, recomputed"])
def test_equals_one_eager_process(pool: Ranks, name: str, stage: int) -> None:
    """And a block, which makes five calls, is one graph: the layers' hooks do not cut it."""
    for stats in check(pool, name, stage):
        assert stats["calls_captured"] == 5 * stats["unique_graphs"]


@pytest.mark.parametrize("stage", [2, 3])
def test_whole_model_equals_one_eager_process(pool: Ranks, stage: int) -> None:
    """And is cut at its blocks only."""
    for stats in check(pool, "whole", stage):
        assert stats["unique_graphs"] <= 5


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.slow
def test_inductor_equals_one_eager_process(pool: Ranks) -> None:
    for stats in check(pool, "inductor", 3):
        assert stats["unique_graphs"] == 1


def check(pool: Ranks, name: str, stage: int) -> list[dict[str, int]]:
    """Compare with an eager process, and return what each rank's compiler has counted."""
    answers = pool.run(trained_and_counted, name, stage, timeout=240.0)
    for each, _ in answers:
        each.params = {key.replace("_orig_mod.", ""): value for key, value in each.params.items()}
        each.updated = [key.replace("_orig_mod.", "") for key in each.updated]
    assert_trained_alike([each for each, _ in answers], plain(Case(Stack, four, squared, steps=4), 2), 1e-9)
    return [stats for _, stats in answers]


def trained_and_counted(name: str, stage: int) -> tuple[Trained, dict[str, int]]:
    torch._dynamo.reset()
    counters.clear()
    return sharded(__name__, name, stage, "auto"), dict(counters["stats"])
