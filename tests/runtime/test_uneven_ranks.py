"""Ranks that do not all come to the same parts of a model, and loops that use parameters in several ways."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from trained_twice import STAGES, Case, adamw, assert_as_one_process, in_float64, rows, same_tensors, tokens

import zeroshard as zs
from zeroshard.testing import ranks

pytestmark = pytest.mark.ranks


class Adapted(nn.Module):
    """A frozen backbone, and adapters of which a batch uses one or none."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.adapters = nn.ModuleDict({name: nn.Linear(6, 6) for name in "ab"})
        self.blocks.requires_grad_(False)

    def forward(self, given: tuple[Tensor, str]) -> Tensor:
        x, used = given
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.adapters[used](x) if used else x


def by_turns(step: int, rank: int) -> tuple[Tensor, str]:
    """In every step one rank of two uses an adapter, and in some none does."""
    used = "" if (step + rank) % 2 or step == 4 else "ab"[step // 2 % 2]
    return rows(step, rank, 6).requires_grad_(), used  # as adapters of checkpointed models want their inputs


class Experts(nn.Module):
    """Experts inside of reentrant checkpoints, which each rank comes to in other steps."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.shared = shared  # the last layer is used inside of the checkpoint, too

    def forward(self, given: tuple[Tensor, int]) -> Tensor:
        x, chosen = given
        x = torch.tanh(self.first(x))
        if chosen or self.shared:
            x = x + checkpoint(self.expert, x, chosen, use_reentrant=True)
        return self.last(x)

    def expert(self, x: Tensor, chosen: int) -> Tensor:
        x = torch.tanh(self.experts[chosen](x))
        return self.last(x) if self.shared else x


def an_expert(step: int, rank: int) -> tuple[Tensor, int]:
    return rows(step, rank, 6), (step + rank) % 3


class Looked(nn.Module):
    """An embedding that the loop looks up by itself, tied to the head inside."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x @ self.table.weight.t()


def looked_up(model: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(F.embedding(ids, model.table.weight))
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def output(model: Any, given: Any) -> Tensor:
    return model(given).square().mean()  # type: ignore[no-any-return]


class Pair(nn.Module):
    """A generator and a critic in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.makes = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.judges = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.judges(self.makes(x))  # type: ignore[no-any-return]


def hooked() -> nn.Module:
    """Hooks of before `shard()` that make the weight of a layer which is a unit, or the root."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        layers = [nn.utils.weight_norm(nn.Linear(6, 6)) for _ in range(3)]
    return nn.Sequential(*layers)


def six(step: int, rank: int) -> Tensor:
    return rows(step, rank, 6)


CASES = {
    "adapters": Case(Adapted, by_turns, output),
    "adapters, clipped": Case(Adapted, by_turns, output, clip=0.05),
    "experts in checkpoints": Case(Experts, an_expert, output),
    "a shared layer in checkpoints": Case(lambda: Experts(True), an_expert, output),
    "weight norm by hooks": Case(hooked, six, output),
    "looked up": Case(Looked, tokens, looked_up),
}
SPREAD = [name for name in CASES if name != "looked up"]
# Units that only some ranks come to are gathered without the others' help over shared memory alone.
CASES |= {f"{name}, one unit": replace(CASES[name], options={"units": "none"}) for name in SPREAD}


@pytest.mark.wide(2)
@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", SPREAD)
def test_equals_one_process(name: str, stage: int, transport: str) -> None:
    whole = (stage, transport) == (3, "gloo")
    assert_as_one_process(__name__, f"{name}, one unit" if whole else name, stage, transport=transport)


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_parameter_that_the_loop_uses_too(transport: str) -> None:
    """At stage 0, where it is plain: one bucket for all has left before the loop's own gradient comes."""
    assert_as_one_process(__name__, "looked up", 0, transport=transport)


def of_two(stage: int | None) -> dict[str, Tensor]:
    """On a rank (or, without a stage, for both): weights after some steps of two optimizers."""
    model = in_float64(Pair)
    params = list(model.parameters())
    makes, judges = adamw(params[:4]), adamw(params[4:])
    run = None if stage is None else zs.shard(model, [makes, judges], stage=stage)
    parts = [0, 1] if run is None else [dist.get_rank()]

    def loss(step: int) -> Tensor:
        return torch.stack([output(model, rows(step, part, 6)) for part in parts]).mean()

    for step in range(4):
        if run is None:
            loss(2 * step).backward()
        else:
            with run.no_sync():
                loss(2 * step).backward()
        judges.zero_grad()
        loss(2 * step + 1).backward()
        for optimizer in (makes, judges):
            optimizer.step()
            optimizer.zero_grad()
    if run is not None:
        run.close()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("stage", STAGES)
def test_zero_grad_of_one_optimizer_leaves_the_other_ones_gradients(stage: int) -> None:
    for rank, weights in enumerate(ranks(2).run(of_two, stage)):
        same_tensors(weights, of_two(None), 1e-9, f"on rank {rank}")


def evaluated_alone(stage: int, transport: str) -> list[float]:
    """Rank 0 evaluates after every step, while the others go on to a collective of their own."""
    model = in_float64(Pair)
    optimizer = adamw(model.parameters())
    run, found = zs.shard(model, optimizer, stage=stage, transport=transport), []
    for step in range(3):
        output(model, rows(step, run.rank, 6)).backward()
        optimizer.step()
        optimizer.zero_grad()
        run.publish()
        if run.rank == 0:
            with torch.no_grad():
                found.append(float(output(model, rows(9, 0, 6))))
        dist.barrier()
    with run.gathered(), torch.no_grad():
        whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    run.close()
    if run.rank == 0:
        model.load_state_dict(whole)
        assert float(output(model, rows(9, 0, 6)).detach()) == pytest.approx(found[-1], rel=1e-12)
    return found


@pytest.mark.parametrize(("stage", "transport"), [(1, "shm"), (3, "shm"), (1, "gloo"), (2, "gloo")])
def test_a_rank_may_evaluate_alone_what_all_have_published(stage: int, transport: str) -> None:
    first, second = ranks(2).run(evaluated_alone, stage, transport)
    assert len(set(first)) == 3
    assert second == []
