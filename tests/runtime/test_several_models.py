"""Several models in one process: adversaries, a teacher, an average of weights."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from test_param_kinds import Block
from torch import Tensor, nn
from trained_twice import STAGES, adamw, in_float64, rows, same_tensors

import zeroshard as zs
from zeroshard.testing import ranks

pytestmark = pytest.mark.ranks
STEPS = 6
WORLD = 2


class Net(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.first = nn.Linear(inside, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(6, outside)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def mean(values: list[Tensor]) -> Tensor:
    return torch.stack(values).mean()


def adversaries(how: str, stages: tuple[int, int] | None, parts: list[int]) -> dict[str, Tensor]:
    """A generator and a discriminator; `how` keeps the generator's step off the discriminator."""
    g, d = in_float64(lambda: Net(3, 4)), in_float64(lambda: Net(4, 1))
    of_g, of_d = adamw(g.parameters()), adamw(d.parameters())
    runs = [] if stages is None else [zs.shard(g, of_g, stage=stages[0]), zs.shard(d, of_d, stage=stages[1])]
    for step in range(STEPS):
        if how == "toggle":
            d.requires_grad_(True)
        losses = []
        for part in parts:
            fake = g(rows(step, part, 3)).detach()
            losses.append(d(fake).sigmoid().mean() - d(rows(step + 100, part, 4)).sigmoid().mean())
        mean(losses).backward()
        of_d.step()
        of_d.zero_grad()
        if how == "toggle":
            d.requires_grad_(False)
        mean([-d(g(rows(step, part, 3))).sigmoid().mean() for part in parts]).backward()
        of_g.step()
        of_g.zero_grad()
        if how == "detach":
            d.zero_grad()
    return finish(runs, {"g": g, "d": d})


def finish(runs: list[zs.Run], models: dict[str, nn.Module]) -> dict[str, Tensor]:
    for run in runs:
        run.close()
    return {f"{k}.{n}": p.detach().clone() for k, m in models.items() for n, p in m.named_parameters()}


def adversaries_on_rank(how: str, stages: tuple[int, int]) -> dict[str, Tensor]:
    return adversaries(how, stages, [dist.get_rank()])


@pytest.mark.parametrize("stages", [(0, 0), (1, 1), (2, 2), (3, 3), (3, 1), (0, 3)])
@pytest.mark.parametrize("how", ["toggle", "detach"])
def test_adversaries(how: str, stages: tuple[int, int]) -> None:
    expected = adversaries(how, None, list(range(WORLD)))
    for rank, got in enumerate(ranks(WORLD).run(adversaries_on_rank, how, stages)):
        same_tensors(got, expected, 1e-9, f"on rank {rank}")


def teacher_and_average(stage: int | None, parts: list[int]) -> dict[str, Tensor]:
    """A frozen teacher, sharded too, and an exponential average of the student, copied before shard()."""
    student, teacher = in_float64(lambda: Net(3, 2)), in_float64(lambda: Net(3, 2)).requires_grad_(False)
    average = copy.deepcopy(student)
    optimizer = adamw(student.parameters())
    trained = [(student, optimizer), (average, None), (teacher, None)]
    runs = [] if stage is None else [zs.shard(m, o, stage=stage) for m, o in trained]
    with torch.no_grad(), runs[2].gathered("last.*", write=True) if runs else nullcontext():
        teacher.last.weight.mul_(3)
    for step in range(STEPS):
        batches = [rows(step, part, 3) for part in parts]
        mean([(student(x) - teacher(x)).pow(2).mean() for x in batches]).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mine, its in zip(average.parameters(), student.parameters(), strict=True):
                mine.lerp_(its, 0.3)
        for run in runs[1:2]:
            run.publish()
    seen = {"average's output": average(rows(0, 0, 3)).detach()}
    return finish(runs, {"student": student, "teacher": teacher, "average": average}) | seen


def teacher_on_rank(stage: int) -> dict[str, Tensor]:
    return teacher_and_average(stage, [dist.get_rank()])


@pytest.mark.parametrize("stage", STAGES)
def test_teacher_and_average(stage: int) -> None:
    expected = teacher_and_average(None, list(range(WORLD)))
    for rank, got in enumerate(ranks(WORLD).run(teacher_on_rank, stage)):
        same_tensors(got, expected, 1e-9, f"on rank {rank}")


def two_optimizers(stage: int | None, parts: list[int]) -> dict[str, Tensor]:
    """One model whose parameters are split between two optimizers that step at different times."""
    model = in_float64(lambda: Net(3, 2))
    slow = torch.optim.SGD(model.first.parameters(), lr=0.1, momentum=0.9)
    groups = [{"params": model.blocks[0].parameters()}, {"params": model.blocks[1].parameters(), "lr": 1e-3}]
    fast = adamw(groups)
    runs = [] if stage is None else [zs.shard(model, [slow, fast], stage=stage)]
    for step in range(STEPS):
        mean([model(rows(step, p, 3)).pow(2).mean() for p in parts]).backward()
        fast.step()
        fast.zero_grad()
        if step % 3 == 2:
            slow.step()
            slow.zero_grad()
        model.last.zero_grad()
    return finish(runs, {"model": model})


def two_optimizers_on_rank(stage: int) -> dict[str, Tensor]:
    return two_optimizers(stage, [dist.get_rank()])


@pytest.mark.parametrize("stage", STAGES)
def test_two_optimizers_of_one_model(stage: int) -> None:
    expected = two_optimizers(None, list(range(WORLD)))
    for rank, got in enumerate(ranks(WORLD).run(two_optimizers_on_rank, stage)):
        same_tensors(got, expected, 1e-9, f"on rank {rank}")


def both_in_one_graph(stage: int | None, parts: list[int]) -> dict[str, Any]:
    """Encoder and decoder are models of their own, trained by one loss."""
    encoder, decoder = in_float64(lambda: Net(3, 6)), in_float64(lambda: Net(6, 3))
    optimizers = [adamw(encoder.parameters()), adamw(decoder.parameters())]
    trained = zip((encoder, decoder), optimizers, strict=True)
    runs = [] if stage is None else [zs.shard(m, o, stage=stage) for m, o in trained]
    for step in range(STEPS):
        losses = []
        for part in parts:
            x = rows(step, part, 3)
            losses.append((decoder(encoder(x)) - x).pow(2).mean() + encoder(x).pow(2).mean())
        mean(losses).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return finish(runs, {"encoder": encoder, "decoder": decoder})


def both_on_rank(stage: int) -> dict[str, Any]:
    return both_in_one_graph(stage, [dist.get_rank()])


@pytest.mark.parametrize("stage", STAGES)
def test_two_models_in_one_graph(stage: int) -> None:
    expected = both_in_one_graph(None, list(range(WORLD)))
    for rank, got in enumerate(ranks(WORLD).run(both_on_rank, stage)):
        same_tensors(got, expected, 1e-9, f"on rank {rank}")


def plan_beside_an_open_run() -> str:
    """Tracing a model on fake tensors meets the hooks of the other one, which look at addresses."""
    batch = torch.zeros(4, 11, dtype=torch.int64)
    first, second = models.build("gpt"), models.build("gpt")
    open_run = zs.shard(first, torch.optim.AdamW(first.parameters()), stage=3)
    first(batch).backward()
    planned: dict[str, Any] = {"stage": 3, "recompute": True, "offload": None, "batch": batch}
    run = zs.shard(second, torch.optim.AdamW(second.parameters()), limit="64MiB", **planned)
    second(batch).backward()
    assert run.plan is not None
    run.close()
    open_run.close()
    return str(run.plan.chosen.settings)


def test_a_model_is_planned_beside_an_open_run() -> None:
    one, other = ranks(2).run(plan_beside_an_open_run)
    assert one == other
    assert one
