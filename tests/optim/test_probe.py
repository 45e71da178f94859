"""Optimizers that are not torch's: those that look past the parameter that they update are found out before
they train ranks apart, and those that do not are left alone. And what ranks compare while they train."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from misused import Net
from test_wrappers import Passing
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import zeroshard as zs
from zeroshard.optim.probe import Findings, try_out
from zeroshard.testing import ranks

WORLD = 2


class Own(Optimizer):
    """Signs, with a momentum: each parameter by itself."""

    def __init__(self, params: Any, lr: float = 1e-2, **more: Any) -> None:
        super().__init__(params, {"lr": lr, **more})
        self.model_like = list(self.param_groups[0]["params"])  # its own list of them

    def factor(self) -> float | Tensor:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        factor = self.factor()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    held = self.state[p].setdefault("held", torch.zeros_like(p))
                    held.lerp_(p.grad, 0.1)
                    p.add_(held * factor, alpha=-group["lr"])

    @property
    def grads(self) -> list[Tensor]:
        return [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]


class ByNorm(Own):
    """As Lamb with `pre_norm`: a norm over all gradients that leaves no trace."""

    def factor(self) -> Tensor:
        total = torch.stack([g.square().sum() for g in self.grads]).sum().sqrt()
        return 1 / (1 + total)


class Finds(Own):
    """As Prodigy and D-Adaptation: a step size that is found from all of them, and stands in the group."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, d=1e-6, fsdp_in_use=False)

    def factor(self) -> float:
        group = self.param_groups[0]
        group["d"] = group["d"] * 1.1 + 1e-6 * sum(float(g.abs().sum()) for g in self.grads)
        return float(group["d"])


class Careful(ByNorm):
    """As LoRARite: passes over gradients of usual size."""

    def factor(self) -> Tensor:
        return super().factor() * all(bool(g.abs().max() < 0.1) for g in self.grads[:1])


class Noisy(Own):
    def factor(self) -> Tensor:
        return torch.rand(())


class Talks(Own):
    def factor(self) -> Tensor:
        total = torch.ones(1)
        dist.all_reduce(total)
        return total


class Evaluates(Own):
    """As SAM: gradients at another point, in the midst of a step."""

    def step(self, closure: Any = None) -> None:
        if closure is None:
            raise RuntimeError("needs a closure")
        with torch.enable_grad():
            closure()
        super().step()


class Fails(Own):
    def factor(self) -> float:
        raise RuntimeError("not on copies")


class Beside(Passing):
    """Changes gradients before it passes a step on."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = p.grad.sign()
        return self.optimizer.step(closure)


def test_what_is_found_out() -> None:
    for kind, found in (
        (Own, Findings()),
        (ByNorm, Findings(across=True)),
        (Finds, Findings(across=True)),
        (Careful, Findings(across=True)),
        (Noisy, Findings(draws=True)),
        (Talks, Findings()),  # nobody to talk to here: it fails, and nothing is known
        (Evaluates, Findings(evaluates=True)),
        (Fails, Findings()),
    ):
        model, before = Net(), torch.get_rng_state()
        values = [p.clone() for p in model.parameters()]
        optimizer = kind(model.parameters())
        group = dict(optimizer.param_groups[0])
        torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which puts a step of its own on it
        optimizer.register_step_pre_hook(lambda *_: pytest.fail("the user's hooks are not for copies"))
        optimizer.step = lambda *_: pytest.fail("nor is the optimizer's own step")  # type: ignore
        torch.set_rng_state(before)
        assert try_out(optimizer) == found, kind
        assert torch.equal(torch.get_rng_state(), before)
        assert not optimizer.state
        assert group.items() <= optimizer.param_groups[0].items()
        assert all(map(torch.equal, values, model.parameters()))
        assert all(p.grad is None for p in model.parameters())
    assert try_out(Own([nn.Parameter(torch.ones(3))])) == Findings()
    assert try_out(Own([nn.Parameter(torch.ones(3, dtype=torch.bfloat16))] * 1)) == Findings()


def test_one_process_has_everything() -> None:
    for kind in (Own, ByNorm, Finds, Noisy, Fails):
        model = Net()
        zs.shard(model, kind(model.parameters())).close()
    model = Net()
    with pytest.raises(zs.ModelError, match=r"Evaluates calls its closure in the midst of a step, and grad"):
        zs.shard(model, Evaluates(model.parameters()))
    with pytest.raises(
        zs.ModelError, match=r"Beside does more in its step than SGD, which it has inside, an"
    ):
        zs.shard(model, Beside(SGD(model.parameters(), 1e-2)))


class Around(Passing):
    """Has a state beside, and looks like a whole optimizer."""

    @property
    def state(self) -> Any:
        return {}


class Early(Own):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.state["total"] = 0  # type: ignore


def test_wrappers_and_state_that_cannot_be_divided() -> None:
    model = Net()
    with pytest.raises(
        zs.ModelError, match=r"Around has no groups and state of its own, but those of an opt"
    ):
        zs.shard(model, Around(SGD(model.parameters(), 1e-2)))
    with pytest.raises(
        zs.ModelError, match=r"Early has stepped already.* Or it makes whole state when it is"
    ):
        zs.shard(model, Early(model.parameters()))
    Own(model.parameters())


def refused(kind: Callable[..., Optimizer], stage: int) -> str:
    model = Net()
    with pytest.raises(zs.ModelError) as told:
        zs.shard(model, kind(model.parameters()), stage=stage)  # type: ignore[arg-type]
    return str(told.value)


def trained(kind: Callable[..., Optimizer], stage: int | None) -> list[Tensor]:
    torch.manual_seed(0)
    model = Net()
    optimizer = kind(model.parameters())
    run = None if stage is None else zs.shard(model, optimizer, stage=stage)  # type: ignore[arg-type]
    data = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(1))
    for batch in data:
        part = batch if run is None else batch[2 * run.rank : 2 * run.rank + 2]
        model(part).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if run is not None:
        run.close()
    return [p.detach() for p in model.parameters()]


@pytest.mark.ranks
def test_step_sizes_over_all_parameters_need_all_of_them() -> None:
    pool = ranks(WORLD)
    for stage in (1, 2, 3):
        one, other = pool.run(refused, ByNorm, stage)
        assert one == other
        said = f"at stage {stage} each of 2 ranks has a part of them: they would train with different ones."
        assert one.endswith(f"{said} Pass stage=0.")
        assert "looks at all parameters for the update of each" in one
    said = "Pass stage=0, or Finds(..., fsdp_in_use=True), which adds up over GPUs."
    assert pool.run(refused, Finds, 2)[0].endswith(said)
    assert "Talks calls other processes in its step, and exp" in pool.run(refused, Talks, 1)[0]
    for kind, stages in ((ByNorm, [0]), (Finds, [0]), (Own, [0, 1, 2, 3])):
        expected = trained(kind, None)
        for stage in stages:
            for found in pool.run(trained, kind, stage):
                for ours, theirs in zip(found, expected, strict=True):
                    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)


@pytest.mark.parametrize("kind", [ByNorm, Finds])
def test_plans_know_the_stage_that_such_optimizers_need(kind: type[Own]) -> None:
    model = Net()
    optimizer = kind(model.parameters())
    plan = zs.plan(model, optimizer, ranks=WORLD, limit="1GiB")
    assert {candidate.stage for candidate in plan.candidates} == {0}
    with pytest.raises(zs.ModelError, match="at stage 3 each") as refused:
        zs.plan(model, optimizer, ranks=WORLD, limit="1GiB", stage=3)
    assert "stage=0" in str(refused.value)
    assert (
        len({c.stage for c in zs.plan(model, Own(model.parameters()), ranks=WORLD, limit="1GiB").candidates})
        > 1
    )
    with pytest.raises(zs.ModelError, match="calls its closure in the midst of a step"):
        zs.plan(model, Evaluates(model.parameters()), ranks=1, limit="1GiB")


def limited(kind: type[Own]) -> list[int]:
    model = Net()
    run = zs.shard(model, kind(model.parameters()), limit="1GiB")
    assert run.plan is not None
    stage = run.plan.chosen.stage
    run.close()
    return [stage]


@pytest.mark.ranks
def test_a_limit_knows_it_too() -> None:
    assert ranks(WORLD).run(limited, ByNorm) == [[0], [0]]


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("zeroshard").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def warned(kind: Any, stage: int, seeds: list[int] | None) -> list[str]:
    """What is said while ranks train: each on batches of its own, or on those of these seeds."""
    torch.manual_seed(0)  # or ranks would differ, and say so, where tests before have drawn
    heard, model = Heard(), Net()
    optimizer = kind(model.parameters())
    run = zs.shard(model, optimizer, stage=stage)
    for step in range(5):
        seed = 10 * step + run.rank if seeds is None else seeds[step]
        model(torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    logging.getLogger("zeroshard").removeHandler(heard)
    return heard.texts


@pytest.mark.ranks
def test_the_same_batches_on_all_ranks_are_told_once() -> None:
    pool = ranks(WORLD)
    for stage in (0, 3):
        first, second = pool.run(warned, AdamW, stage, [1, 2, 3, 4, 5])
        assert second == []
        assert [text.partition(":")[0] for text in first] == [
            "all 2 ranks were given the same batches in the first 3 steps"
        ]
    for seeds in (None, [1, 1, 1, 1, 1]):  # one batch for ever is meant
        assert pool.run(warned, AdamW, 3, seeds) == [[], []]
    (text,) = pool.run(warned, Noisy, 2, None)[0]
    assert text.startswith("Noisy draws random numbers in its step: each rank draws for its own parameters")
    (text,) = pool.run(warned, Noisy, 0, None)[0]
    assert "seed all ranks alike (torch.manual_seed)" in text


class Listing(AdamW):
    """Keeps matrices in a list, as SOAP its preconditioners."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for state in self.state.values():
            state.setdefault("seen", [torch.zeros(2), None])
        return loss


def test_state_that_a_save_would_refuse_is_told_of_by_shard(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    zs.shard(model, Listing(model.parameters())).close()
    (text,) = (record.getMessage() for record in caplog.records)
    assert text.startswith("Listing keeps tensors in a list (`seen`), which run.save() refuses")
    assert "run.full_optimizer_state_dict()" in text


def rates_by_rank(stage: int, at: int) -> str:
    model = Net()
    optimizer = AdamW([{"params": model.blocks[0].parameters()}, {"params": model.blocks[1].parameters()}])
    run = zs.shard(model, optimizer, stage=stage)
    for _ in range(at - 1):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    optimizer.param_groups[1]["lr"] = 1e-3 / (1 + run.rank)  # as a scheduler by this rank's loss
    with pytest.raises(zs.StateError) as told:
        optimizer.step()
    run.close()
    return str(told.value)


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_learning_rates_that_differ_between_ranks(stage: int) -> None:
    for at in (1, 3, 100):
        one, other = ranks(WORLD).run(rates_by_rank, stage, at)
        assert one == other
        said = f"after step {at} the ranks go by different numbers: `lr` of group 1 of AdamW is 0.001 on rank"
        assert one.startswith(f"{said} 0, 0.0005 on rank 1.")


class Averages(Own):
    """As a schedule-free optimizer: between training and evaluation it moves parameters to an average."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, learning=True)

    def _swap(self, learning: bool) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if group["learning"] != learning and "held" in self.state[p]:
                    p.data.lerp_(self.state[p]["held"], 0.5 if not learning else -1.0)
            group["learning"] = learning

    def train(self) -> None:
        self._swap(True)

    def eval(self) -> None:
        self._swap(False)


def alternated(stage: int | None) -> list[Tensor]:
    """Outputs in evaluation, and whole parameters at the end."""
    torch.manual_seed(0)
    model = Net()
    optimizer = Averages(model.parameters())
    run = None if stage is None else zs.shard(model, optimizer, stage=stage)
    found = []
    for step in range(4):
        optimizer.train()
        batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        part = batch if run is None else batch[2 * run.rank : 2 * run.rank + 2]
        model(part).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.eval()
        with torch.no_grad():
            found.append(model(torch.ones(1, 3)))
    if run is not None:
        run.close()
    return [*found, *(p.detach() for p in model.parameters())]


@pytest.mark.ranks
def test_optimizers_that_tell_training_from_evaluation() -> None:
    expected = alternated(None)
    for stage in (0, 1, 2, 3):
        for found in ranks(WORLD).run(alternated, stage):
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)
