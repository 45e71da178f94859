"""Second moments that a codec freezes: beside plain arithmetic; and what does not go with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import models
import pytest
import torch
from codecs_for_tests import Same
from torch import Tensor

import zeroshard as zs
from zeroshard.testing import ranks

LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.95), 1e-8, 0.1
WARM, STEPS = 3, 7


@dataclass(frozen=True)
class Freezing(Same):
    """Loses nothing, and freezes second moments after its warm-up."""

    freezes = True


def train(options: dict[str, Any], fused: bool) -> dict[str, Tensor]:
    model = models.build("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), LR, BETAS, EPS, DECAY, fused=fused)
    run = zs.shard(model, optimizer, compress=Freezing(WARM), **options)
    for step in range(STEPS):
        loss = torch.tensor(0.0)
        for rank in range(run.size):  # the same batches on all ranks, so that one process can say what is due
            loss = loss + model(models.MLP.batch(4, seed=10 * step + rank)) / run.size
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = models.whole_weights(run)
    run.close()
    return weights


def by_hand(world: int) -> dict[str, Tensor]:
    """AdamW whose second moment is no longer followed after the warm-up."""
    model = models.build("mlp").double()
    held: dict[str, list[Tensor]] = {}
    for step in range(STEPS):
        model.zero_grad()
        for rank in range(world):
            batch = models.MLP.batch(4, seed=10 * step + rank).double()
            (model(batch) / world).backward()
        for name, p in model.named_parameters():
            assert p.grad is not None
            g, t = p.grad, step + 1
            m, v = held.setdefault(name, [torch.zeros_like(g), torch.zeros_like(g)])
            m.mul_(BETAS[0]).add_(g, alpha=1 - BETAS[0])
            if step < WARM:
                v.mul_(BETAS[1]).addcmul_(g, g, value=1 - BETAS[1])
            kept = v / (1 - BETAS[1] ** min(t, WARM))
            late = (1 - BETAS[1]) / (1 - BETAS[1] ** t) * g * g if step >= WARM else torch.zeros_like(g)
            follows = late if step >= WARM else kept
            size = torch.where(v > 0, kept + late, follows).sqrt() + EPS
            with torch.no_grad():
                p.mul_(1 - LR * DECAY).addcdiv_(m / (1 - BETAS[0] ** t), size, value=-LR)
    return {name: p.detach().float() for name, p in model.named_parameters()}


@pytest.mark.ranks
@pytest.mark.parametrize(("stage", "fused"), [(0, True), (1, False), (3, True)])
def test_the_update_divides_by_what_the_warm_up_left(stage: int, fused: bool) -> None:
    found, expected = ranks(2).run(train, {"stage": stage}, fused)[0], by_hand(2)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [zs.OneBit, zs.TopK])
def test_freezing_needs_a_warm_up(kind: Any) -> None:
    with pytest.raises(zs.OptionError, match="as the warm-up leaves them, and there is none"):
        kind(warmup_steps=0, freeze=True)
    with pytest.raises(zs.OptionError, match="pass True or False"):
        kind(warmup_steps=5, freeze=1)
    assert kind(warmup_steps=5, freeze=True).freezes
    assert not kind(warmup_steps=5).freezes


FROZEN = zs.OneBit(warmup_steps=5, freeze=True)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"compress": FROZEN, "offload": zs.Offload(), "stage": 1}, "with offload= the host updates them"),
        (
            {"sync": zs.Adaptive([zs.EveryStep(), zs.EveryStep(compress=FROZEN)])},
            "Adaptive goes from one way to another",
        ),
    ],
)
def test_what_freezing_does_not_go_with(options: dict[str, Any], text: str) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(zs.OptionError, match=text):
        zs.shard(model, torch.optim.AdamW(model.parameters()), **options)


def other_optimizer(kind: str, settings: dict[str, Any]) -> str:
    model = torch.nn.Linear(2, 2)
    optimizer = getattr(torch.optim, kind)(model.parameters(), **settings)
    with pytest.raises(zs.OptionError) as told:
        zs.shard(model, optimizer, compress=FROZEN)
    return str(told.value)


@pytest.mark.ranks
def test_freezing_is_for_adam() -> None:
    for told in ranks(2).run(other_optimizer, "SGD", {}):
        assert "SGD is neither Adam nor AdamW" in told
    for told in ranks(2).run(other_optimizer, "Adam", {"amsgrad": True}):
        assert "amsgrad=True keeps the largest of them" in told
