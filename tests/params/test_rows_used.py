"""Losses and loops that use a sharded parameter itself train as in one process; what cannot be so is refused
where it is written. Files of rows say whose they are."""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zeroshard as zs
from zeroshard.testing import ranks

pytestmark = pytest.mark.ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    "whole on each": {"stage": 0},
    "rows": {"stage": 3, "split": "rows"},
    "level": {"stage": 2, "split": "level"},
    "one rank each": {"stage": 3, "split": "whole"},
}
Loss = Callable[[nn.Module, Tensor, int], Tensor]


def squares(model: nn.Module) -> Tensor:
    return sum(p.square().sum() for p in model.parameters())  # type: ignore[return-value]


def ewc(model: nn.Module) -> Tensor:
    old = {name: p.detach().clone() * 0.5 for name, p in model.named_parameters()}
    terms = [((old[name] ** 2) * (p - old[name]) ** 2).sum() for name, p in model.named_parameters()]
    return torch.stack(terms).sum()


def orthogonal(model: nn.Module) -> Tensor:
    weight = model[0].weight
    return (weight @ weight.T - torch.eye(weight.shape[0]).sum() / 9).square().mean()


LOSSES: dict[str, Loss] = {
    "squares": lambda m, x, r: m(x).square().mean() + 0.01 * squares(m),
    "norms": lambda m, x, r: (
        m(x).square().mean() + 0.1 * torch.stack([p.norm() for p in m.parameters()]).sum()
    ),
    "each its own share": lambda m, x, r: (r + 1) * (m(x).square().mean() + 0.1 * squares(m)),
    "penalty alone": lambda m, x, r: squares(m) * 0.3 * (r + 2),
    "means": lambda m, x, r: m(x).mean() + sum(p.abs().mean() + p.max() for p in m.parameters()),
    "ewc": lambda m, x, r: m(x).square().mean() + ewc(m),
    "orthogonal": lambda m, x, r: m(x).square().mean() + orthogonal(m),
    "normalized": lambda m, x, r: (
        m(x).mean() + (nn.functional.normalize(m[0].weight, dim=-1).sum(0) ** 3).sum() + m[2].weight.std()
    ),
}


def made() -> nn.Sequential:
    draw, model = torch.Generator().manual_seed(0), nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=draw)
    return model


def batch(rank: int) -> Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(7 + rank))


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def agc(model: nn.Module) -> None:
    """Adaptive gradient clipping, as it is written everywhere."""

    def unitwise(t: Tensor) -> Tensor:
        return t.norm(2.0) if t.dim() <= 1 else t.norm(2.0, dim=tuple(range(1, t.dim())), keepdim=True)

    for p in model.parameters():
        largest = unitwise(p.detach()).clamp_(min=1e-3).mul_(0.05)
        norm = unitwise(p.grad.detach())
        clipped = p.grad.detach() * (largest / norm.clamp(min=1e-6))
        p.grad.detach().copy_(torch.where(norm < largest, p.grad.detach(), clipped))


def trained(layout: str) -> dict[str, Any]:
    """Gradients and weights of each loss, in two steps of micro-batches, apart and together."""
    told: dict[str, Any] = {}
    rank = dist.get_rank()
    for name, loss in LOSSES.items():
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = zs.shard(model, optimizer, **LAYOUTS[layout])
        if name == "squares":  # by a backward of its own
            model(batch(rank)).square().mean().backward()
            (0.01 * squares(model)).backward()
        else:
            loss(model, batch(rank), rank).backward()
        told[name] = [whole(p.grad) for p in model.parameters()]
        agc(model)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        assert type(norm) is Tensor
        told[f"{name}, clipped"] = [norm, *(whole(p.grad) for p in model.parameters())]
        with run.no_sync():
            loss(model, batch(rank), rank).backward()
        loss(model, batch(rank), rank).backward()
        optimizer.step()
        told[f"{name}, stepped"] = [whole(p) for p in model.parameters()]
        run.close()
    model = made()
    run = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), **LAYOUTS[layout])
    grads = torch.autograd.grad(squares(model), list(model.parameters()))
    told["asked for"] = [whole(grad) for grad in grads]
    assert all(p.grad is None for p in model.parameters())
    model(batch(rank)).mean().backward()
    told["after asking"] = [whole(p.grad) for p in model.parameters()]
    run.close()
    return told


def plain(world: int) -> dict[str, Any]:
    told: dict[str, Any] = {}

    def backward(loss: Loss) -> None:
        for rank in range(world):
            (loss(model, batch(rank), rank) / world).backward()

    for name, loss in LOSSES.items():
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        backward(loss)
        told[name] = [p.grad.clone() for p in model.parameters()]
        agc(model)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        told[f"{name}, clipped"] = [norm, *(p.grad.clone() for p in model.parameters())]
        backward(loss)
        backward(loss)
        optimizer.step()
        told[f"{name}, stepped"] = [p.detach().clone() for p in model.parameters()]
    model = made()
    told["asked for"] = [2 * p.detach() for p in model.parameters()]
    backward(lambda m, x, r: m(x).mean())
    told["after asking"] = [p.grad for p in model.parameters()]
    return told


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_that_use_parameters_themselves_train_as_in_one_process(layout: str, world: int) -> None:
    expected = plain(world)
    for told in ranks(world).run(trained, layout, timeout=300):
        assert told.keys() == expected.keys()
        for name, tensors in expected.items():
            for one, other in zip(told[name], tensors, strict=True):
                torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6, msg=lambda m: f"{name}: {m}")  # noqa: B023


def averaged() -> None:
    """Copies of the weights that follow them, as plain modules: inside of `run.gathered()`."""
    model, expected = made(), made()
    run = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    with pytest.raises(zs.StateError, match=r"copy\.deepcopy\(\) of a sharded model: .* `with run\.gathered"):
        AveragedModel(model)
    with run.gathered():
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        target = copy.deepcopy(model)
    with pytest.raises(
        zs.StateError, match=r"used as only a whole tensor can be .* `with run\.gathered\(\):`"
    ):
        [ema.update_parameters(model) for _ in range(2)]
    with torch.no_grad():
        for t, p in zip(target.parameters(), model.parameters(), strict=True):
            for follow in (lambda: t.mul_(0.9).add_(p, alpha=0.1), lambda: t.data.copy_(p.data)):  # noqa: B023
                with pytest.raises(
                    zs.StateError, match=r"used as only a whole tensor can be .*run\.gathered"
                ):
                    follow()
    model(batch(0)).mean().backward()
    with pytest.raises(zs.StateError, match="used as only a whole tensor can be"):
        model(batch(0)) @ model[2].weight
    with run.gathered():
        ema.n_averaged.fill_(1)
        for p in ema.module.parameters():
            p.data.zero_()
        ema.update_parameters(model)
    for p, q in zip(ema.module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q * 0.5)
    run.close()


def test_averages_of_weights_are_taken_of_whole_ones() -> None:
    ranks(2).run(averaged)


def saved(split: str, mode: str, folder: str) -> list[str]:
    model = made()
    optimizer = torch.optim.AdamW(model.parameters())
    run = zs.shard(model, optimizer, stage=3, split=split)
    model(batch(0)).sum().backward()
    optimizer.step()
    me, told = dist.get_rank(), []
    if mode == "alone":
        with pytest.raises(zs.RankError) as caught:
            model(batch(0)) if me else torch.save(model.state_dict(), f"{folder}/alone.pt")
        return [str(caught.value)]
    for what, item in (("model", model), ("optimizer", optimizer)):
        torch.save(item.state_dict(), f"{folder}/{what}{me}.pt")
        run.full_state_dict()  # where ranks meet
        before = {name: value.to_local().clone() for name, value in model.state_dict().items()}
        item.load_state_dict(torch.load(f"{folder}/{what}{me}.pt"))
        for name, value in model.state_dict().items():
            assert torch.equal(value.to_local(), before[name])
        with pytest.raises(zs.ZeroShardError) as caught:
            item.load_state_dict(torch.load(f"{folder}/{what}0.pt"))
        told.append(str(caught.value))
    safetensors = pytest.importorskip("safetensors.torch")
    with pytest.raises(
        zs.StateError, match=r"has no memory of its own.*safetensors .* run\.full_state_dict\(rank=0\)"
    ):
        safetensors.save_file(model.state_dict(), f"{folder}/{me}.safetensors")
    if split != "rows":
        with pytest.raises(
            zs.StateError, match=r"has no placements: its rows are not divided as DTensor assumes"
        ):
            model[0].weight.placements  # noqa: B018
    run.close()
    return told


@pytest.mark.parametrize("split", ["rows", "whole"])
def test_files_of_rows_say_whose_they_are(split: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for told in ranks(2).run(saved, split, "each", folder):
            for text, what in zip(told, (r"load_state_dict: `0\.", r"`exp_avg` of `"), strict=True):
                assert re.search(
                    what + r".* has rows \d to \d of rank 0 of 2, and this is rank 1 of 2", text
                ), text
                assert "Load whole tensors: save run.full_state_dict(rank=0), called on every rank" in text
        first, other = ranks(2).run(saved, split, "alone", folder)
        assert "rank 0 waits for all ranks to compute torch.save of `0.weight`" in other[0]
        assert re.search(
            r"What one rank saves .* are its own rows: .* run.full_state_dict\(rank=0\)", first[0]
        )
