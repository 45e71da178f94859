"""Torch's fused Adam over many tensors at once: used where it can be, and equal to the last bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zeroshard as zs
from zeroshard.optim.sharded_optimizer import FusedAdam
from zeroshard.testing import ranks

pytestmark = pytest.mark.ranks

SIZES = (1, 3, 8, 17)  # with tails, which the kernel treats otherwise than the rest


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size) for size in SIZES)

    def forward(self, x: Tensor) -> Tensor:
        parts = [layer(x[:, : layer.in_features]).square().sum() for layer in self.layers]
        return torch.stack(parts).sum()


Change = Callable[[nn.Module, Optimizer, int], None]


def nothing(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    pass


def schedule(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    optimizer.param_groups[0]["lr"] *= 0.9
    optimizer.param_groups[0]["betas"] = (0.8, 0.9)


def begin_anew(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Moments and counts of some, replaced by hand."""
    if step == 4:
        for param in list(optimizer.state)[::2]:
            state = optimizer.state[param]
            state["exp_avg"] = torch.zeros_like(state["exp_avg"])
            state["step"] = torch.tensor(1.0)


def reload(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    if step == 4:
        optimizer.load_state_dict(optimizer.state_dict())


def roll_back(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Other dicts, by all the ways there are to them."""
    if step == 3:
        optimizer.kept = copy.deepcopy(optimizer.state_dict())  # type: ignore[attr-defined]
    elif step == 5:
        optimizer.load_state_dict(optimizer.kept)  # type: ignore[attr-defined]
    elif step == 7:
        optimizer.state.clear()
    elif step == 8:
        for param in list(optimizer.state)[::2]:
            optimizer.state[param] = {}


def without_some(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    if step in (3, 4, 6):
        model.get_parameter("layers.2.weight").grad = None


def other_gradients(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    if step % 3 == 0:
        for param in model.parameters():
            param.grad = param.grad * 0.5


def hooked(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """A hook that looks at what the optimizer works on."""

    def shrink(seen: Optimizer, args: Any, kwargs: Any) -> None:
        for group in seen.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(0.5)

    if step == 4:
        optimizer.register_step_pre_hook(shrink)


def renewed(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    for param in model.parameters():
        param.grad = param.grad * 0.5


CHANGES = (nothing, schedule, begin_anew, reload, roll_back, without_some, other_gradients, hooked)


def trained(change: Change, kind: type[Optimizer], stage: int | None, **options: Any) -> list[Tensor]:
    torch.manual_seed(11)
    model = Many()
    params = list(model.parameters())
    groups = [{"params": params[:5], "weight_decay": 0.1}, {"params": params[5:], "lr": 3e-3}]
    optimizer = kind(groups, lr=1e-2, fused=True, **options)
    run = zs.shard(model, optimizer, stage=stage) if stage is not None else None
    for step in range(10):
        x = torch.randn(4, max(SIZES), generator=torch.Generator().manual_seed(step))
        model(x).backward()
        change(model, optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
    if run is not None:
        run.close()
    states = [optimizer.state[param] for param in model.parameters()]
    return [p.detach() for p in model.parameters()] + [s[key] for s in states for key in sorted(s)]


def on_rank(change: Change, stage: int, kinds: list[type[Optimizer]], **options: Any) -> list[list[Tensor]]:
    return [trained(change, kind, stage, **options) for kind in kinds]


KINDS = [torch.optim.Adam, torch.optim.AdamW]


@pytest.mark.parametrize("change", CHANGES)
def test_bit_equal_to_torch(change: Change) -> None:
    """Of whole tensors. Both ranks have the same gradients, so that their mean is exact."""
    for found in ranks(2).run(on_rank, change, 0, KINDS):
        for kind, values in zip(KINDS, found, strict=True):
            assert all(map(torch.equal, values, trained(change, kind, None)))


@pytest.mark.parametrize("options", [{"amsgrad": True}, {"maximize": True}])
def test_other_options_are_torchs(options: dict[str, Any]) -> None:
    found = ranks(2).run(partial(on_rank, **options), nothing, 0, KINDS)[0]
    for kind, values in zip(KINDS, found, strict=True):
        assert all(map(torch.equal, values, trained(nothing, kind, None, **options)))


@pytest.mark.parametrize("change", CHANGES)
def test_close_to_torch_in_rows(change: Change) -> None:
    """Rows have other tails than whole tensors: within an ulp a step."""
    expected = trained(change, torch.optim.AdamW, None)
    for stage in (1, 3):
        for rank in ranks(2).run(trained, change, torch.optim.AdamW, stage):
            for found, value in zip(rank, expected, strict=True):
                torch.testing.assert_close(found, value, rtol=2e-6, atol=1e-7)


def times_used(change: Change, stage: int, **options: Any) -> list[bool]:
    done: list[bool] = []
    run = FusedAdam.run

    def noted(self: FusedAdam, *args: Any) -> bool:
        done.append(run(self, *args))
        return done[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedAdam, "run", noted)
        trained(change, torch.optim.AdamW, stage, **options)
    return done


@pytest.mark.parametrize(("stage", "steps"), [(0, 10), (2, 9)])
def test_used_from_the_second_look_on(stage: int, steps: int) -> None:
    """Of rows there is nothing to look at in the first step: proxies are not known yet."""
    late = 10 - steps
    assert ranks(2).run(times_used, nothing, stage)[0] == [False] + [True] * (steps - 1)
    assert ranks(2).run(times_used, hooked, stage)[0] == [False] + [True] * (3 - late) + [False] * 6
    assert not any(ranks(2).run(partial(times_used, amsgrad=True), nothing, stage)[0])


def test_holds_no_gradients_that_are_new_at_every_step() -> None:
    assert times_used(nothing, 0) == [False] * 10  # of one rank
    assert not any(ranks(2).run(times_used, renewed, 0)[0])
