"""Parameters that are used without a call of their module: by a method that a checkpoint calls again, by a
closure that took them in forward, by a `torch.autograd.Function` that kept them. At stage 3 they are away by
then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from trained_twice import rows, same_tensors

import zeroshard as zs
from zeroshard.testing import ranks

pytestmark = pytest.mark.ranks


class Block(nn.Module):
    def __init__(self, way: Callable[[Block, Tensor], Tensor]) -> None:
        super().__init__()
        self.way = way
        self.weight = nn.Parameter(torch.randn(6, 6) / 3)
        self.linear = nn.Linear(6, 6)
        self.several = nn.ParameterList([torch.randn(6, 6) / 3 for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)

    def method(self, x: Tensor) -> Tensor:
        h = torch.tanh(x @ self.weight)
        h = torch.tanh(self.linear(h)) * self.weight[0]
        h = nn.functional.linear(h, self.linear.weight.t().contiguous(), self.linear.bias)
        for one in self.several:
            h = torch.tanh(h @ one.t())
        return x + h


class Kept(torch.autograd.Function):
    """A product that keeps the weight where autograd does not look."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(x)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] @ ctx.weight.t(), x.t() @ grads[0]


def reentrant(block: Block, x: Tensor) -> Tensor:
    return checkpoint(block.method, x, use_reentrant=True)


def plain(block: Block, x: Tensor) -> Tensor:
    return checkpoint(block.method, x, use_reentrant=False)


def closure(block: Block, x: Tensor) -> Tensor:
    weight = block.weight
    return checkpoint(lambda x: x + torch.tanh(block.linear(x) @ weight) * weight[1], x, use_reentrant=False)


def nested(block: Block, x: Tensor) -> Tensor:
    def outer(x: Tensor) -> Tensor:
        return torch.tanh(checkpoint(block.method, x @ block.weight, use_reentrant=False)) * block.weight[2]

    return checkpoint(outer, x, use_reentrant=False)


def repeated(block: Block, x: Tensor) -> Tensor:
    def steps(x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.tanh(x @ block.weight + x)
        return x

    return checkpoint(steps, x, use_reentrant=True)


def handed_back(block: Block, x: Tensor) -> Tensor:
    """Hooks of another, inside a unit's forward, that keep what they are given."""
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        return torch.tanh(block.linear(torch.tanh(x @ block.weight.t()))) + x @ block.weight


def handed_back_again(block: Block, x: Tensor) -> Tensor:
    return checkpoint(lambda x: handed_back(block, x @ block.weight.detach()), x, use_reentrant=False)


def kept(block: Block, x: Tensor) -> Tensor:
    return torch.tanh(Kept.apply(x, block.weight))


class Stack(nn.Module):
    """Blocks that are given a parameter of the model itself."""

    def __init__(self, way: Callable[[Block, Tensor], Tensor], hands: bool, frozen: bool) -> None:
        super().__init__()
        self.hands = hands
        self.shift = nn.Parameter(torch.randn(6))
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block(way) for _ in range(4))
        if frozen:
            self.blocks.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.hands:
                x = checkpoint(lambda x, block=block: block(x * self.shift), x, use_reentrant=False)
            else:
                x = block(x)
        return x


WAYS = [(way, False, False) for way in (reentrant, plain, closure, nested, repeated, kept)]
WAYS += [(way, False, False) for way in (handed_back, handed_back_again)]
WAYS += [(way, False, True) for way in (reentrant, plain, closure)]  # a frozen block waits for no gradient
WAYS += [(way, True, False) for way in (plain, kept, Block.method)]


def trained(stage: int | None) -> list[dict[str, Tensor]]:
    """Each way with one process on the batches of two, or on two ranks."""
    found = []
    for way, hands, frozen in WAYS:
        torch.manual_seed(1)
        model = Stack(way, hands, frozen).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = None if stage is None else zs.shard(model, optimizer, stage=stage)
        parts = [0, 1] if run is None else [torch.distributed.get_rank()]
        for step in range(3):
            losses = [model(rows(step, part, 6)).square().mean() for part in parts]
            torch.stack(losses).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if run is not None:
            run.close()
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return found


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.wide(2)), 3])
def test_gradients_equal_those_of_one_process(stage: int) -> None:
    expected = trained(None)
    for got in ranks(2).run(trained, stage):
        for (way, *more), mine, others in zip(WAYS, got, expected, strict=True):
            same_tensors(mine, others, 1e-9, f"{way.__name__} {more}")


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def misused() -> list[str]:
    """What is said where an unsharded parameter is used that no backward has brought, or is written in
    one."""
    model = Keeps()
    run = zs.shard(model, torch.optim.SGD(model.parameters()), stage=3)
    said = []
    held: list[Tensor] = []
    inner = model.blocks[0]
    inner[0].register_forward_pre_hook(lambda module, args: held.append(module.weight))
    loss = model(torch.ones(2, 4)).sum()
    assert held[0].shape == (4, 4)
    assert held[0].grad is None
    with pytest.raises(zs.StateError, match="was kept from a forward") as refused:
        held[0].sum()
    said.append(str(refused.value))

    def write(grad: Tensor) -> None:
        with torch.no_grad(), pytest.raises(zs.StateError, match="was written outside of the forward") as why:
            held[0].mul_(2)
        said.append(str(why.value))

    loss.register_hook(write)
    loss.backward()
    run.close()
    with pytest.raises(zs.StateError, match=r"before run.close\(\)"):
        held[0].sum()
    return said


def test_what_is_away_says_so() -> None:
    for said in ranks(2).run(misused):
        assert len(said) == 2
        assert all("`blocks.0.0.weight`" in text for text in said)
