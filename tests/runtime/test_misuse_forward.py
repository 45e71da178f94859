"""Misuse that shows when a sharded model computes, or when its parameters are used like whole tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_param_kinds import Stack, four, squared
from torch import Tensor, nn
from trained_twice import Case, Training, plain_turn

import zeroshard as zs
from zeroshard.testing import ranks

pytestmark = pytest.mark.ranks


def test_modules_of_torchscript() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it is going
        model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    said = r"`1` is a TorchScript module, which takes no hooks\. Pass the module that it was scripted from"
    with pytest.raises(zs.ModelError, match=said):
        zs.shard(model)


def look_up(kind: type[nn.Module]) -> str:
    model = nn.Sequential(kind(5, 3, max_norm=0.5), nn.Linear(3, 2))
    with pytest.raises(zs.ModelError) as caught:
        zs.shard(model, torch.optim.SGD(model.parameters()))
    return str(caught.value)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_rows_that_a_lookup_scales(kind: type[nn.Module]) -> None:
    texts = ranks(2).run(look_up, kind)
    assert texts == [texts[0]] * 2
    assert texts[0].startswith(f"`0` ({kind.__name__}) has max_norm=0.5: its forward writes the rows that it")
    model = nn.Sequential(kind(5, 3, max_norm=0.5))
    with pytest.raises(zs.ModelError, match=r"each rank looks up others\. Drop max_norm"):
        zs.shard(model, precision="bf16")
    zs.shard(model).close()  # on one rank it is the optimizer's own memory


def add_a_stranger() -> None:
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters())
    zs.shard(model, optimizer, stage=1)
    model.last = nn.Linear(6, 3)
    said = (
        r"add_param_group\(\): a parameter of shape \(3, 6\) was not in the model when zs\.shard\(\) was ca"
    )
    with pytest.raises(zs.ModelError, match=said):
        optimizer.add_param_group({"params": model.last.parameters()})
    assert len(optimizer.param_groups) == 1


def test_parameters_that_came_after_shard() -> None:
    ranks(2).run(add_a_stranger)


class Elsewhere(Stack):
    """Computes with a weight of a block outside of that block."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ F.linear(self.blocks[1].down.bias, self.blocks[0].up.weight)[:5]


class Gives(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, list[Tensor]]]:
        return self.norm(self.inner(x)), {"weights": [self.inner.weight.t()]}


class Given(Stack):
    """A block hands its weight to the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gives() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x, given = block(x)
            x = x @ given["weights"][0]
        return self.last(x)


class InPlace(Stack):
    """Changes what a block has kept for its backward: plain PyTorch refuses it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x).mul_(1.5)
        return self.last(x)


def forward_of(build: Callable[[], nn.Module]) -> Callable[[int], None]:
    def attempt(stage: int) -> None:
        training = Training(Case(build, four, squared), [dist.get_rank()], {"stage": stage})
        plain_turn(training, 0)

    return attempt


def transformed(stage: int) -> None:
    training = Training(Case(Stack, four, squared), [dist.get_rank()], {"stage": stage})
    torch.func.grad(lambda x: training.model(x).sum())(four(0, 0))


def by_number(stage: int) -> None:
    training = Training(Case(Stack, four, squared), [dist.get_rank()], {"stage": stage})
    training.model.last.weight.data[0].zero_()


ATTEMPTS: dict[str, tuple[Callable[[int], None], str, tuple[int, ...]]] = {
    "elsewhere": (
        forward_of(Elsewhere),
        r"was used as only a whole tensor can be \(.*\)\. In the forward of its own module .*gathered",
        (1, 3),
    ),
    "given away": (
        forward_of(Given),
        r"the forward of blocks\.0 returned a parameter, or a view of one, of shape \(6, 6\): stage 3 lets",
        (3,),
    ),
    "in place": (
        forward_of(InPlace),
        r"one of the variables needed for gradient computation, .*DoubleTensor of shape \(4, 6\), has been ",
        (3,),
    ),
    "torch.func": (
        transformed,
        r"a forward inside torch\.func \(grad, .*\) of a sharded model: parameters cannot be gathered there",
        (1, 3),
    ),
    "by number": (
        by_number,
        r"rows of a sharded parameter or gradient cannot be written by number .* p\[i\] is a copy\. Write",
        (1, 3),
    ),
}


def refuse(name: str) -> None:
    attempt, said, stages = ATTEMPTS[name]
    for stage in stages:
        with pytest.raises(zs.StateError, match=said):
            attempt(stage)


@pytest.mark.parametrize("name", ATTEMPTS)
def test_what_only_whole_tensors_can_do(name: str) -> None:
    ranks(2).run(refuse, name)
