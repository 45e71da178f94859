"""Plans of models in which values decide sizes: an upper bound, and exact where every row is taken."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from plan_models import Expert, measured_step
from torch import Tensor, nn

import zeroshard as zs

WIDTH = 32


def by_nonzero(out: Tensor, mask: Tensor, x: Tensor, expert: nn.Module) -> Tensor:
    at = torch.nonzero(mask).flatten()
    return out.index_add(0, at, expert(x.index_select(0, at)))


def by_where(out: Tensor, mask: Tensor, x: Tensor, expert: nn.Module) -> Tensor:
    (at,) = torch.where(mask)
    return out.index_add_(0, at, expert(x[at]))


def by_mask(out: Tensor, mask: Tensor, x: Tensor, expert: nn.Module) -> Tensor:
    out[mask] = expert(x[mask])
    return out


def by_selection(out: Tensor, mask: Tensor, x: Tensor, expert: nn.Module) -> Tensor:
    chosen = torch.masked_select(x, mask[:, None]).view(-1, WIDTH)
    return out.masked_scatter(mask[:, None], expert(chosen))


def by_counting(out: Tensor, mask: Tensor, x: Tensor, expert: nn.Module) -> Tensor:
    return out + expert(x[: int(mask.sum())]).sum()


Route = Callable[[Tensor, Tensor, Tensor, nn.Module], Tensor]


class Routed(nn.Module):
    """A layer of experts, each of which gets those tokens that are routed to it."""

    def __init__(self, experts: int, route: Route) -> None:
        super().__init__()
        self.router, self.route = nn.Linear(WIDTH, experts), route
        self.experts = nn.ModuleList(Expert(WIDTH) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out = self.route(out, choice == number, x, expert)
        return x + out * weight[:, None]


class Model(nn.Module):
    def __init__(self, experts: int, route: Route) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Routed(experts, route) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("route", [by_nonzero, by_where, by_mask, by_selection])
def test_no_routing_takes_more_than_planned(route: Route, recompute: bool) -> None:
    for experts in (1, 4):
        torch.manual_seed(0)
        model, batch = Model(experts, route), torch.randn(64, WIDTH)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        run = zs.shard(model, optimizer, limit="1GiB", batch=batch, offload=None, recompute=recompute)
        assert run.plan is not None
        device, _ = measured_step(run, model, optimizer, batch)
        planned = run.plan.chosen.device
        run.close()
        assert device + batch.nbytes == planned if experts == 1 else device + batch.nbytes < planned


def test_the_plan_says_that_it_is_a_bound() -> None:
    said = "Where values decide how many rows there are (masks, routed tokens), all count each time"
    batch = torch.zeros(64, WIDTH)
    made = zs.plan(Model(4, by_mask), ranks=2, limit="1GiB", batch=batch)
    assert any(reason.startswith(said) for reason in made.reasons)
    with pytest.raises(zs.PlanError) as refused:
        zs.plan(Model(4, by_mask), ranks=2, limit="100KiB", batch=batch)
    assert said in str(refused.value)
    plain = zs.plan(nn.Linear(WIDTH, WIDTH), ranks=2, limit="1GiB", batch=batch)
    assert not any(reason.startswith(said) for reason in plain.reasons)


def test_numbers_that_python_would_need_are_refused() -> None:
    with pytest.raises(zs.PlanError, match="code that looks at values cannot run on shapes alone"):
        zs.plan(Model(4, by_counting), ranks=2, limit="1GiB", batch=torch.zeros(64, WIDTH))
