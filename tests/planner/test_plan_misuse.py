"""What `zs.plan` cannot plan, and what it says then: as `shard` does, before anything else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from zeroshard.machine import machine


class Counting(torch.optim.Optimizer):
    """An optimizer of the user's own, whose `__init__` asks for more than torch's do."""

    def __init__(self, params: Any, calls: list[int], broken: bool) -> None:
        super().__init__(params, {"broken": broken})
        self.calls = calls

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert not group["broken"], "not here"
            for p in group["params"]:
                self.state[p]["sum"] = torch.zeros_like(p)


class Idle(nn.Module):
    """Nothing to shard."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(8))


class Detached(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).detach()


def plan(model: Any = None, optimizer: Any = None, **asked: Any) -> zs.Plan:
    return zs.plan(nn.Linear(8, 8) if model is None else model, optimizer, ranks=2, limit="1GiB", **asked)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"model": 3}, r"plan\(\) takes a torch.nn.Module, not int"),
        ({"model": Idle()}, "Idle has no parameters to shard"),
        ({"optimizer": 3}, r"plan\(\) takes torch optimizers, not int"),
        (
            {"optimizer": torch.optim.SGD},
            r"plan\(\) takes torch optimizers, not the class SGD: make one of it",
        ),
        (
            {"optimizer": torch.optim.AdamW(nn.Linear(2, 2).parameters())},
            "2 of the 2 parameters of AdamW are",
        ),
        ({"machine": 3}, "machine=3 must be a name of"),
        ({"loss": 3, "batch": torch.zeros(2, 8)}, "loss=3 must be a function"),
        ({"precisions": "bf16"}, "precisions='bf16' must be a few to choose among"),
        ({"precisions": ()}, r"precisions=\(\) must be a few"),
        ({"recompute": ("blocks.*",)}, r'recompute pattern "blocks\.\*" matches none of the 0 units'),
        ({"batch": torch.zeros(0, 8)}, r"batch= holds nothing: its first tensor is of shape \(0, 8\)"),
        ({"batch": ()}, "a step of Linear without tensors among its inputs cannot be traced: TypeError"),
        ({"batch": torch.zeros(2, 7)}, r"got \[2, 7\] X \[8, 8\]\. Check the batch"),
        (
            {"model": nn.Linear(8, 8).requires_grad_(False), "batch": torch.zeros(2, 8)},
            "no parameter of the model is trainable",
        ),
        (
            {"model": Detached(), "batch": torch.zeros(2, 8)},
            "the model's output has no gradient, so no backward can be traced. Pass loss=, a function",
        ),
    ],
)
def test_what_cannot_be_planned(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(zs.ZeroShardError, match=said):
        plan(**asked)


def test_optimizers_that_have_no_meaning_on_shards() -> None:
    model = nn.Linear(8, 8)
    for optimizer, said in (
        (torch.optim.LBFGS(model.parameters()), "which no stage gives it"),
        (torch.optim.SparseAdam(list(model.parameters())), "use AdamW"),
    ):
        with pytest.raises(zs.ModelError, match=said):
            plan(model, optimizer)


def test_an_optimizer_of_the_user_s_own_is_stepped_by_a_template() -> None:
    model, calls = nn.Linear(64, 64), [1]
    optimizer = Counting(model.parameters(), calls, broken=False)
    made = plan(model, optimizer, stage=0, offload=None)
    assert made.chosen.lasting["state"] == 4 * (64 * 64 + 64)
    assert not optimizer.state
    with pytest.raises(
        zs.PlanError, match=r"how much state Counting keeps cannot be told: .* AssertionError: not"
    ):
        plan(model, Counting(model.parameters(), calls, broken=True))


def test_rates_of_a_machine_are_above_zero() -> None:
    for figure in ("network", "pcie", "efficiency"):
        with pytest.raises(zs.OptionError, match=f"{figure}=0.* of a machine must be above zero"):
            machine("H100", **{figure: 0.0})


def test_a_huge_limit_is_advised_as_it_can_be_typed() -> None:
    """Not as 1.9e+06GiB, nor rounded down."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2**22, 2**23, bias=False) for _ in range(4)))
    with pytest.raises(zs.PlanError) as refused:
        zs.plan(model, ranks=1, limit="80GiB", offload=None)
    enough = str(refused.value).split('limit="')[1].split('"')[0]
    assert zs.plan(model, ranks=1, limit=enough, offload=None).chosen.fits


def test_a_limit_of_a_node_is_advised_as_it_was_given() -> None:
    model = nn.Linear(512, 512)
    with pytest.raises(zs.PlanError, match=r'pass memory_limit_per_node="[\d.]+MiB"') as refused:
        zs.plan(model, ranks=4, memory_limit_per_node="1MiB", stage=0, offload=None)
    enough = str(refused.value).split('memory_limit_per_node="')[1].split('"')[0]
    zs.plan(model, ranks=4, memory_limit_per_node=enough, stage=0, offload=None)
    few = zs.plan(model, ranks=2, ranks_per_node=8, memory_limit_per_node=enough, stage=0, offload=None)
    assert few.limit == 2 * zs.plan(model, ranks=4, memory_limit_per_node=enough, stage=0, offload=None).limit
