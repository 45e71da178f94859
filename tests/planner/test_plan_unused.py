"""Parameters that a step does not use: nothing is planned that a run does not keep for them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from plan_models import ON_DEVICE, measured_step
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.testing import ranks


class Roomy(nn.Module):
    """A block with a layer that its forward leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.spare = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.two(torch.tanh(self.one(x)))
        return found


class Pooled(nn.Module):
    """A pooler that is left out, blocks with spare layers, and a last block that is not reached."""

    def __init__(self, block: type[nn.Module] = Roomy, reach: int = 3) -> None:
        super().__init__()
        self.pooler = nn.Linear(64, 200)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.head, self.reach = nn.Linear(64, 10), reach

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[: self.reach]:
            x = block(x)
        found: Tensor = self.head(x).square().mean()
        return found


class Tied(nn.Module):
    """Blocks that share a weight by twos, so that the root owns it, and one block is traced for all."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Roomy() for _ in range(6))
        for one, two in zip(self.blocks[::2], self.blocks[1::2], strict=True):
            two.one.weight = one.one.weight
            one.spare = two.spare = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


MODELS: dict[str, Any] = {
    "pooled": Pooled,
    "last block": lambda: Pooled(reach=4),
    "first block": lambda: Pooled(reach=1),
    "none": lambda: nn.Sequential(Roomy().one, *(nn.Linear(64, 64) for _ in range(3))),
    "tied": Tied,
}


def planned_and_real(name: str, options: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """By kind, what was planned and what a run holds after some steps; of the device at its fullest."""
    torch.manual_seed(0)
    model, batch = MODELS[name](), torch.randn(32, 64)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    run = zs.shard(model, optimizer, limit=2**30, batch=batch, loss=lambda y: y.square().mean(), **options)
    assert run.plan is not None

    class Squared(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = model(x).square().mean()
            return found

    device, host = measured_step(run, Squared(), optimizer, batch)
    Squared()(batch).backward()
    stats = run.stats()
    found = {kind: (stats.planned[kind], stats.live[kind]) for kind in ON_DEVICE}
    run.close()
    return found | {
        "device": (run.plan.chosen.device, device + batch.nbytes),
        "host": (stats.planned["host"] + stats.planned["staging"], host),
    }


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_one_rank_holds_what_was_planned(name: str, recompute: bool, precision: Any) -> None:
    options = {"offload": None, "recompute": recompute, "precision": precision}
    for kind, (planned, real) in planned_and_real(name, options).items():
        assert planned == real, kind


@pytest.mark.parametrize("name", MODELS)
def test_what_rests_on_the_host(name: str) -> None:
    found = planned_and_real(name, {"offload": zs.Offload()})
    assert found["host"][0] == found["host"][1]
    planned, real = found["device"]
    # What waits for the host is an upper bound; the loss and its gradient are not counted.
    assert real - 8 <= planned <= 1.1 * real


@pytest.mark.wide(2)
@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_hold_what_was_planned(name: str, stage: int) -> None:
    for offload in (None, zs.Offload()):
        options = {"stage": stage, "offload": offload, "prefetch": 1}
        for found in ranks(2).run(planned_and_real, name, options):
            for kind, (planned, real) in found.items():
                assert planned == real, (kind, offload)


def test_a_plan_names_them_and_a_run_that_uses_them_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = Pooled(reach=2), torch.randn(8, 64)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    plan = zs.plan(model, optimizer, ranks=1, limit=2**30, batch=batch, machine="H100", offload=None)
    assert "blocks.3.one.weight" in plan.unused
    assert "head.weight" not in plan.unused
    assert any("`pooler.weight` and 17 more parameters get no gradient" in why for why in plan.reasons)
    assert zs.Plan.from_json(plan.to_json()) == plan
    run = zs.shard(model, optimizer, plan=plan)
    with caplog.at_level(logging.WARNING, logger="zeroshard"):
        for reach in (2, 4):
            model.reach = reach
            model(batch).backward()
            optimizer.step()
    run.close()
    told = [record.getMessage() for record in caplog.records]
    assert any("state take" in text and "had no gradient in the traced step" in text for text in told), told
