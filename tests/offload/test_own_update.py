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
from kernel_values import BF16, F16, F32, both_paths, built, rough
from offload_loop import (
    CLIP,
    OPTIMIZERS,
    THREE_SPIKES,
    Case,
    batch,
    furthest,
    make_model,
    offloaded,
    on_disk,
    parts,
    plain,
    trained,
)
from torch import Tensor, nn
from torch.optim import Optimizer

import zeroshard as zs
from zeroshard import kernels
from zeroshard.extend import HostStep, StateRows, register_host_update
from zeroshard.kernels import host_update
from zeroshard.kernels.updates.lion import LionRows, LionStep
from zeroshard.layout.memory import MemoryModel
from zeroshard.planner.signatures import blocks_of, rules_of
from zeroshard.testing import assert_same_bits, ranks

assert both_paths


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
    """Optimizers of the loop, and what is registered, for one test."""
    monkeypatch.setattr(host_update, "_registered", {})
    monkeypatch.setitem(OPTIMIZERS, "named", lambda params: Named(params, lr=0.01, momentum=0.9))
    monkeypatch.setitem(OPTIMIZERS, "sign", lambda params: Sign(params, lr=1e-3))
    monkeypatch.setitem(OPTIMIZERS, "lion", lambda params: Lion(params, foreach=True))
    register_host_update(Lion, "lion")
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


# -- Lion


class Lion(Optimizer):
    """As `lion_pytorch.Lion` computes it; `foreach`: all parameters at once."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.1,
        foreach: bool = False,
        cautious: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "foreach": foreach, "cautious": cautious})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            means = [self.state[p].setdefault("exp_avg", torch.zeros_like(p)) for p in params]
            if group["foreach"] and params:
                self._update(group, params, [p.grad for p in params], means)
            else:
                for p, mean in zip(params, means, strict=True):
                    self._update(group, [p], [p.grad], [mean])

    @staticmethod
    def _update(group: dict[str, Any], params: list[Tensor], grads: list[Any], means: list[Tensor]) -> None:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        torch._foreach_mul_(params, 1.0 - lr * group["weight_decay"])
        signs = torch._foreach_mul(means, beta1)
        torch._foreach_add_(signs, grads, alpha=1.0 - beta1)
        torch._foreach_sign_(signs)
        if group["cautious"]:
            torch._foreach_mul_(signs, 0.5)
        torch._foreach_add_(params, signs, alpha=-lr)
        torch._foreach_mul_(means, beta2)
        torch._foreach_add_(means, grads, alpha=1.0 - beta2)


VARIANTS: list[dict[str, Any]] = [
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "decoupled": False, "grad_scale": 0.3},
    {"weight_decay": 0.1, "fixed": True, "maximize": True},
]


@built
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_lion_in_c_and_torch_has_the_same_bits(assert_both_same: Any, variant: dict[str, Any]) -> None:
    for grad, weight, split in ((F32, F32, False), (BF16, BF16, True), (F16, BF16, False)):

        def made(grad: torch.dtype = grad, weight: torch.dtype = weight, split: bool = split) -> list[Tensor]:
            out, rest = kernels.split(rough(1031, 1))
            master = {"remainder": rest} if split else {"master": rough(1031, 1)}
            rows = LionRows(rough(1031, 2), **master)
            out = out if weight == BF16 else torch.zeros(1031, dtype=weight)
            for step in (1, 2):
                kernels.update_rows(rows, rough(1031, 3 + step).to(grad), out, LionStep(1e-2, **variant))
            return [*(t for t in vars(rows).values() if t is not None), out]

        assert_both_same(made)


@pytest.mark.parametrize("foreach", [False, True])
def test_how_far_lion_is_from_its_own_loop(foreach: bool) -> None:
    """The momentum by the rounding that fusing leaves out, and weights not at all unless a mean is nothing
    but rounding, where its sign is either: here of none among 10,000 in 50 steps."""
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(10_000))
    optimizer = Lion([param], foreach=foreach)
    rows = LionRows(torch.zeros(10_000), param.detach().clone())
    for number in range(50):
        param.grad = torch.randn(10_000)
        step = LionRows.step_of(optimizer.param_groups[0], number + 1, 1.0)
        kernels.update_rows(rows, param.grad, None, step)
        optimizer.step()
    assert rows.master is not None
    assert torch.equal(rows.master, param.detach())
    apart = (rows.exp_avg - optimizer.state[param]["exp_avg"]).abs().max()
    assert apart <= 4 * torch.finfo(F32).eps * rows.exp_avg.abs().max()


def test_a_step_of_lion_is_checked_and_cannot_be_taken_back() -> None:
    with pytest.raises(zs.OptionError, match=r"LionStep: beta1=0\.9 and beta2=1\.0 must be below 1"):
        LionStep(1e-3, beta2=1.0)
    step, rows = LionStep(1e-3), LionRows(torch.zeros(4), torch.zeros(4))
    with pytest.raises(zs.OptionError, match=r"`exp_avg` of LionRows cannot be taken back"):
        kernels.update_rows(rows, torch.zeros(4), None, step, taken=step)
    limit = kernels.Bound(torch.full((1,), 2.0), 1.0)
    kernels.update_rows(rows, torch.ones(4), None, step, bound=limit)
    assert not rows.exp_avg.any()


# -- in a run


@pytest.mark.parametrize("where", ["host", "disk", "parameters"])
def test_lion_waits_for_the_norm_and_has_the_numbers_of_its_own_loop(where: str, tmp_path: Path) -> None:
    offload = {"host": parts(), "disk": on_disk(tmp_path), "parameters": parts(parameters="host")}[where]
    case = Case("lion", steps=THREE_SPIKES, skips=where == "host")
    found, want = trained(1, case, 3, offload), plain(case)
    assert found.stats is not None
    assert found.stats.updates == {"early": 0, "late": case.steps, "undone": 0}
    distance, name = furthest(found.weights, want.weights)
    assert distance <= 1e-6, name
    means = [{n: state["exp_avg"] for n, state in run.state.items()} for run in (found, want)]
    assert furthest(*means)[0] <= 1e-6


def test_where_nothing_is_clipped_updates_begin_in_backward() -> None:
    case = Case("lion", steps=12, clip=math.inf)
    found = trained(1, case, 0, parts())
    assert found.stats is not None
    assert found.stats.updates == {"early": 12, "late": 0, "undone": 0}
    assert furthest(found.weights, plain(case).weights)[0] <= 1e-6


def test_a_split_master_has_the_bits_of_a_plain_one() -> None:
    case = Case("lion", steps=12)
    split = trained(1, case, 2, parts(master="split"), "bf16")
    whole = trained(1, case, 2, parts(), "bf16", "ties away")
    assert_same_bits(split.weights, whole.weights)


def lion_loop(offload: zs.Offload | None, scaled: bool = False, folder: Path | None = None) -> list[Tensor]:
    """Two groups, clipped by hand; saved and gone on with half way where there is a folder."""

    def built_() -> tuple[Any, Lion]:
        model = make_model()
        matrices = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": matrices, "lr": 2e-3}, {"params": others, "weight_decay": 0.0}]
        return model, Lion(groups)

    model, optimizer = built_()
    options: dict[str, Any] = {"precision": "fp16"} if scaled else {}
    run = zs.shard(model, optimizer, offload=offload, **options) if offload or scaled else None
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=256.0)
    for step in range(8):
        if step == 4 and folder is not None and run is not None:
            run.save(folder / "half")
            run.close()
            model, optimizer = built_()
            run = zs.shard(model, optimizer, offload=offload, **options)
            run.load(folder / "half")
        scaler.scale(model(batch(step, 0))).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    if run is not None:
        run.close()
    return [p.detach().clone() for p in model.parameters()]


def test_a_plain_loop_with_groups_and_a_resume(tmp_path: Path) -> None:
    want, found, again = lion_loop(None), lion_loop(parts()), lion_loop(parts(), folder=tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    assert max(float((a - b).abs().max()) for a, b in zip(found, want, strict=True)) <= 1e-6


def test_a_loss_scaler() -> None:
    """The plain loop's handles take its factor; on the device its own step sees unscaled gradients."""
    want, found = lion_loop(None, scaled=True), lion_loop(parts(), scaled=True)
    far = [float((a - b).abs().gt(1e-5).float().mean()) for a, b in zip(found, want, strict=True)]
    assert max(far) <= 0.05  # in fp16 some means are nothing but rounding


@pytest.mark.ranks
def test_lion_on_two_ranks() -> None:
    first, second = ranks(2).run(lion_case)
    assert_same_bits(first, second)
    distance, name = furthest(first, plain(Case("lion", steps=8, spikes=()), world=2).weights)
    assert distance <= 1e-5, name


def lion_case() -> dict[str, Tensor]:
    host_update._registered[Lion] = LionRows
    OPTIMIZERS["lion"] = lambda params: Lion(params, foreach=True)
    return offloaded(Case("lion", steps=8, spikes=()), {"stage": 2, "offload": parts()}).weights


def test_an_option_that_the_update_does_not_know_is_refused() -> None:
    model = nn.Linear(8, 8)
    optimizer = Lion(model.parameters(), cautious=True)
    with pytest.raises(zs.OptionError, match=r"update of Lion is registered as LionRows, and computes some"):
        zs.shard(model, optimizer, offload=zs.Offload(), clip_norm=1.0)


@pytest.mark.parametrize("optimizer", ["host", "disk"])
def test_its_bytes_are_what_a_plan_counts(optimizer: Any, tmp_path: Path) -> None:
    model = make_model()
    lion = Lion(model.parameters())
    units, rules = blocks_of(model, [lion], "auto"), rules_of([lion])
    offload = zs.Offload(optimizer, path=str(tmp_path) if optimizer == "disk" else None)
    run = zs.shard(model, lion, stage=0, offload=offload, clip_norm=1.0)
    held = MemoryModel(units, run.options, run.size, rules, run.rank, placement=run.placement).held
    for step in range(2):
        model(batch(step, 0)).backward()
        lion.step()
        lion.zero_grad()
    live = run.stats().live
    run.close()
    assert {kind: live[kind] for kind in ("host", "disk", "state")} == {
        "host": held.host,
        "disk": held.disk,
        "state": held.state,
    }
