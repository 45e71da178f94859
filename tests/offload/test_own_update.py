"""Optimizers that are not torch's, updated on the host: registered by a name, or with rows of one's own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from offload_loop import CLIP, OPTIMIZERS, Case, furthest, offloaded, on_disk, parts, plain, trained
from torch import Tensor
from torch.optim import Optimizer

import zeroshard as zs
from zeroshard.extend import HostStep, StateRows, register_host_update
from zeroshard.kernels import host_update
from zeroshard.testing import assert_same_bits, ranks


class Named(torch.optim.SGD):
    """SGD, under another name."""


class Doubled(torch.optim.SGD):
    """SGD, but twice as far."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        super().step()


class Sign(Optimizer):
    """The sign of a mean, added in fp32."""

    def __init__(self, params: Any, lr: float, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.copy_(mean * group["beta"] + p.grad * (1.0 - group["beta"]))
                p.copy_(p - mean.sign() * group["lr"])


@dataclass(frozen=True)
class SignStep(HostStep):
    lr: float
    beta: float
    grad_scale: float

    def numbers(self) -> SignStep:
        return self


@dataclass(frozen=True)
class SignRows(StateRows):
    shown: ClassVar[Mapping[str, str]] = {"mean": "mean"}

    mean: Tensor
    master: Tensor | None = None
    remainder: Tensor | None = None

    @classmethod
    def step_of(cls, group: Mapping[str, Any], count: int, scale: float) -> SignStep:
        return SignStep(float(group["lr"]), float(group["beta"]), scale)

    def update(self, master: Tensor, grad: Tensor, numbers: SignStep) -> None:
        grad = grad.float() * numbers.grad_scale
        self.mean.copy_(self.mean * numbers.beta + grad * (1.0 - numbers.beta))
        master.copy_(master - self.mean.sign() * numbers.lr)


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two optimizers of the loop, registered for one test."""
    monkeypatch.setattr(host_update, "_registered", {})
    monkeypatch.setitem(OPTIMIZERS, "named", lambda params: Named(params, lr=0.01, momentum=0.9))
    monkeypatch.setitem(OPTIMIZERS, "sign", lambda params: Sign(params, lr=1e-3))
    yield
    trained.cache_clear()


def test_a_class_that_computes_the_same_has_the_bits_of_torchs() -> None:
    register_host_update(Named, "sgd")
    for optimizer, update in (("named", "early"), ("momentum", "early")):
        found = trained(1, Case(optimizer, steps=12), 0, parts())
        assert found.stats is not None
        assert found.stats.updates[update] > 0
    distance, name = furthest(found.weights, plain(Case("momentum", steps=12)).weights)
    assert distance <= 1e-6, name


@pytest.mark.parametrize("stage", [0, 3])
def test_rows_of_ones_own_update_themselves(stage: int, tmp_path: Path) -> None:
    """They say nothing of taking back, so every update waits for the norm."""
    register_host_update(Sign, SignRows)
    case = Case("sign", steps=12, spikes=())
    want = plain(case)
    for offload in (parts(), on_disk(tmp_path)):
        found = trained(1, case, stage, offload)
        assert found.stats is not None
        assert found.stats.updates == {"early": 0, "late": 12, "undone": 0}
        distance, name = furthest(found.weights, want.weights)
        assert distance <= 1e-6, name
        means = [{n: state["mean"] for n, state in run.state.items()} for run in (found, want)]
        assert furthest(*means)[0] <= 1e-6


def rank_case(case: Case) -> dict[str, Tensor]:
    register_host_update(Sign, SignRows)
    OPTIMIZERS["sign"] = lambda params: Sign(params, lr=1e-3)
    return offloaded(case, {"stage": 2, "offload": parts()}).weights


def told_apart() -> str:
    host_update._registered.clear()  # the rank may have had another test
    if dist.get_rank() == 0:
        register_host_update(Sign, SignRows)
    model = torch.nn.Linear(8, 8)
    with pytest.raises(zs.RankError) as raised:
        zs.shard(model, Sign(model.parameters(), 0.1), offload=zs.Offload(), clip_norm=CLIP)
    return str(raised.value)


@pytest.mark.ranks
def test_two_ranks() -> None:
    case = Case("sign", steps=6, spikes=())
    first, second = ranks(2).run(rank_case, case)
    assert_same_bits(first, second)
    distance, name = furthest(first, plain(case, world=2).weights)
    assert distance <= 1e-5, name


@pytest.mark.ranks
def test_ranks_that_registered_different_things_are_told_so() -> None:
    first, second = ranks(2).run(told_apart)
    assert first == second
    assert "Sign" in first


def test_what_computes_something_else_is_refused() -> None:
    register_host_update(Doubled, "sgd")
    model = torch.nn.Linear(8, 8)
    optimizer = Doubled(model.parameters(), lr=0.1)
    with pytest.raises(
        zs.OptionError, match=r"update of Doubled is registered as SgdRows, and computes something"
    ):
        zs.shard(model, optimizer, offload=zs.Offload(), clip_norm=math.inf)
    zs.shard(model, optimizer, clip_norm=math.inf).close()  # on the device its own step runs


def test_what_cannot_be_registered() -> None:
    with pytest.raises(zs.OptionError, match=r"is no class of optimizers; pass the class itself"):
        register_host_update(torch.optim.SGD(torch.nn.Linear(2, 2).parameters()), "sgd")  # type: ignore[arg-type]
    with pytest.raises(zs.OptionError, match=r"AdamW is torch's own; register a subclass"):
        register_host_update(torch.optim.AdamW, "sgd")
    with pytest.raises(
        zs.OptionError, match=r"there is no update 'adan'\. Did you mean \"adam\"\? There are"
    ):
        register_host_update(Named, "adan")
    with pytest.raises(zs.OptionError, match=r"is no update; pass one of adam, .*subclass of StateRows"):
        register_host_update(Named, Named)  # type: ignore[arg-type]


def test_no_step_of_rows_that_lose_what_was_is_taken_back() -> None:
    rows = SignRows(torch.zeros(4), torch.zeros(4))
    assert not SignRows.step_of({"lr": 0.1, "beta": 0.9}, 1, 1.0).invertible
    with pytest.raises(AssertionError, match="cannot be taken back"):
        rows.take_back(torch.zeros(4), torch.zeros(4), None)
