"""Plans of models whose blocks are no chain: outputs that are kept for later, blocks that are used several
times or in another order than they stand in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from plan_models import ON_DEVICE, measured_step
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.planner.signatures import ExampleInputs
from zeroshard.planner.trace import Tracer
from zeroshard.testing import ranks

WIDTH, BLOCKS = 64, 6


class Block(nn.Module):
    """`keeps`: its backward needs its output."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.keeps = keeps

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.two(torch.tanh(self.one(self.norm(x))))
        return torch.relu(found) if self.keeps else found


class Model(nn.Module):
    """`path`: how it goes through its blocks. `wide`: how many outputs its head takes together."""

    def __init__(self, path: Callable[[Model, Tensor], Tensor], keeps: bool = False, wide: int = 1) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(wide * WIDTH, 10)
        self.blocks = nn.ModuleList(Block(keeps) for _ in range(BLOCKS))
        self.scales, self.path = nn.Parameter(torch.ones(BLOCKS)), path

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.path(self, self.stem(x))).square().mean()

    def outputs(self, x: Tensor) -> Iterator[Tensor]:
        for block in self.blocks:
            x = block(x)
            yield x


def concatenated(model: Model, x: Tensor) -> Tensor:
    return torch.cat(list(model.outputs(x)), -1)


def weighed(model: Model, x: Tensor) -> Tensor:
    found = [scale * one for scale, one in zip(model.scales.unbind(), model.outputs(x), strict=True)]
    return torch.stack(found).sum(0)


def averaged(model: Model, x: Tensor) -> Tensor:
    return torch.stack(list(model.outputs(x))).mean(0)


def bridged(model: Model, x: Tensor) -> Tensor:
    """As a UNet: the second half gets what the first half made, the last first."""
    kept = []
    for block in model.blocks[: BLOCKS // 2]:
        x = block(x)
        kept.append(x)
    for block in model.blocks[BLOCKS // 2 :]:
        x = block(x + kept.pop())
    return x


def through(*numbers: int) -> Callable[[Model, Tensor], Tensor]:
    def path(model: Model, x: Tensor) -> Tensor:
        for number in numbers:
            x = model.blocks[number](x)
        return x

    return path


class Layers(nn.Module):
    """The first layer's weight is not wanted again: its input has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def frozen(count: int) -> Model:
    """Backward comes to the last blocks alone."""
    model = Model(through(*range(6)))
    for module in (model.stem, *model.blocks[:count]):
        module.requires_grad_(False)
    return model


PATHS: dict[str, Callable[[bool], nn.Module]] = {
    "concatenated": lambda keeps: Model(concatenated, keeps, BLOCKS),
    "weighed": lambda keeps: Model(weighed, keeps),
    "averaged": lambda keeps: Model(averaged, keeps),
    "bridged": lambda keeps: Model(bridged, keeps),
    "again": lambda keeps: Model(through(*range(6), *range(6)), keeps),
    "there and back": lambda keeps: Model(through(*range(6), *reversed(range(6))), keeps),
    "each twice": lambda keeps: Model(through(*(n // 2 for n in range(12))), keeps),
    "one five times": lambda keeps: Model(through(0, 0, 0, 0, 0, 1, 2, 3, 4, 5), keeps),
    "backwards": lambda keeps: Model(through(*reversed(range(6))), keeps),
    "mixed": lambda keeps: Model(through(3, 0, 4, 1, 3, 5, 2, 0), keeps),
    "four frozen": lambda _: frozen(4),
    "all frozen": lambda _: frozen(6),
    "layers": lambda _: Layers(),
    "some": lambda keeps: Model(through(4, 1, 5), keeps),
}


def planned_and_real(path: str, keeps: bool, options: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """By kind, what was planned and what a run holds after some steps; of the device at its fullest."""
    torch.manual_seed(0)
    model, batch = PATHS[path](keeps), torch.randn(256, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    run = zs.shard(model, optimizer, limit=2**30, batch=batch, offload=None, **options)
    assert run.plan is not None
    device, _ = measured_step(run, model, optimizer, batch)
    before = run.stats()
    model(batch).backward()
    stats = run.stats()
    run._runtime.transport.close()  # nobody goes on with the model
    found = {kind: (stats.planned[kind], stats.live[kind]) for kind in ON_DEVICE}
    sent = (stats - before).sent.get("gather", 0)
    return found | {
        "device": (run.plan.chosen.device, device + batch.nbytes),
        "sent": (run.plan.chosen.sent.get("gather", 0), sent),
    }


@pytest.mark.wide(2)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_one_rank_holds_what_was_planned(path: str, keeps: bool, recompute: bool) -> None:
    for kind, (planned, real) in planned_and_real(path, keeps, {"recompute": recompute}).items():
        assert planned == real, kind


@pytest.mark.wide(3)
@pytest.mark.ranks
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_ranks_gather_what_was_planned(path: str, recompute: bool) -> None:
    for found in ranks(2).run(planned_and_real, path, False, {"stage": 3, "recompute": recompute}):
        for kind, (planned, real) in found.items():
            assert planned == real, kind


@pytest.mark.wide(4)
@pytest.mark.ranks
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_what_is_gathered_ahead_was_planned(path: str, recompute: bool) -> None:
    for ahead in (1, 2):
        options = {"stage": 3, "transport": "gloo", "prefetch": ahead, "recompute": recompute}
        for found in ranks(2).run(planned_and_real, path, False, options):
            for kind in ("gathered", "sent"):
                planned, real = found[kind]
                assert planned == real, (kind, ahead)


def traces(path: str) -> list[int]:
    """How many blocks each trace of a step really computed."""
    made: list[int] = []

    class Counting(Tracer):
        def _trace(self, *given: Any) -> None:
            made.append(0)
            super()._trace(*given)

        def _compute(self, *given: Any) -> Any:
            made[-1] += 1
            return super()._compute(*given)

    names = [f"blocks.{number}" for number in range(BLOCKS)]
    Counting(PATHS[path](False), names, lambda _: False, {}).run(
        ExampleInputs.of(torch.zeros(4, WIDTH)), None
    )
    return made


def test_blocks_are_traced_once_where_the_same_lives_around_them() -> None:
    assert traces("backwards") == [1]
    for path in ("concatenated", "averaged", "weighed"):  # other gradients wait around each or some of them
        first, second = traces(path)
        assert first < second <= BLOCKS
