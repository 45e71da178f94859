"""A step taken back: the state before it to fp32 rounding, the same bits from C and from torch, and in one
pass with the step that is done instead."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from kernel_values import BF16, F32, adam_state, both_paths, built, contents, each_path, rough
from torch import Tensor

from zeroshard import kernels
from zeroshard.errors import OptionError
from zeroshard.kernels import AdamRows, AdamStep, SgdRows, SgdStep

FIXTURES = (both_paths, each_path)
COUNT = 1031
ADAM = [
    {},
    {"weight_decay": 0.1, "maximize": True},
    {"weight_decay": 0.1, "decoupled": False},
    {"beta1": 0.3},
    {"beta2": 0.0},
    {"step": 1},
]
SGD = [
    {},
    {"weight_decay": 0.1, "maximize": True},
    {"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    {"momentum": 0.9, "first": True},
]


def aged(step: AdamStep, split: bool) -> tuple[AdamRows, Tensor]:
    """State that steps with ordinary gradients have made, none before a first step."""
    state, weight = adam_state(COUNT, 3, False, {"master": "split"} if split else {})
    state.exp_avg.zero_()
    state.exp_avg_sq.zero_()
    for count in range(1, step.step):
        kernels.update_rows(state, torch.randn(COUNT), weight, replace(step, step=count))
    return state, weight


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("variant", ADAM, ids=str)
def test_adam_before_a_step(path: str, variant: dict[str, object], split: bool) -> None:
    torch.manual_seed(1)
    taken = AdamStep(**({"lr": 1e-2, "step": 7, "grad_scale": 0.5} | variant))  # type: ignore[arg-type]
    state, weight = aged(taken, split)
    grad, before = torch.randn(COUNT).to(BF16), [*contents(state), weight.clone()]
    kernels.update_rows(state, grad, weight, taken)
    assert not torch.equal(weight, before[-1])
    kernels.update_rows(state, grad, weight, None, taken=taken)
    found, wanted = ([*map(torch.Tensor.float, tensors)] for tensors in ([*contents(state), weight], before))
    if split:  # a master is its two halves
        found[2], wanted[2] = (kernels.join(t[3].to(BF16), t[2].to(torch.int16)) for t in (found, wanted))
    if taken.beta2 == 0.0:  # the squares before are gone, and of no account
        found[1] = wanted[1]
    for now, then in zip(found, wanted, strict=True):
        error = (now - then).abs().max() / then.abs().max().clamp(min=1e-30)
        assert error < (5e-3 if now is found[-1] else 5e-7), float(error)
    if taken.step == 1:
        assert not state.exp_avg.any()
        assert not state.exp_avg_sq.any()


@pytest.mark.parametrize("variant", SGD, ids=str)
def test_sgd_before_a_step(path: str, variant: dict[str, object]) -> None:
    torch.manual_seed(1)
    taken = SgdStep(lr=0.1, grad_scale=0.5, **variant)  # type: ignore[arg-type]
    ran = torch.zeros(COUNT) if taken.first else torch.randn(COUNT)
    state = SgdRows(torch.randn(COUNT), momentum=ran if "momentum" in variant else None)
    grad, before = torch.randn(COUNT), contents(state)
    kernels.update_rows(state, grad, None, taken)
    assert not torch.equal(contents(state)[0], before[0])
    kernels.update_rows(state, grad, None, None, taken=taken)
    for now, then in zip(contents(state), before, strict=True):
        torch.testing.assert_close(now, then, rtol=1e-6, atol=1e-6)


@built
@pytest.mark.parametrize("variant", ADAM, ids=str)
def test_adam_taken_back_is_bit_equal_in_c_and_torch(assert_both_same, variant) -> None:
    taken = AdamStep(**({"lr": 1e-2, "step": 7} | variant))
    steps = [None, replace(taken, grad_scale=0.3)]
    for split, grad, edges, step in itertools.product([False, True], [F32, BF16], [False, True], steps):

        def run(split=split, grad=grad, edges=edges, step=step) -> list[Tensor]:
            state, weight = adam_state(COUNT, 3, edges, {"master": "split"} if split else {})
            kernels.update_rows(state, rough(COUNT, 5, edges).to(grad), weight, step, taken=taken)
            return [*contents(state), weight]

        assert_both_same(run)


@built
@pytest.mark.parametrize("variant", SGD, ids=str)
def test_sgd_taken_back_is_bit_equal_in_c_and_torch(assert_both_same, variant) -> None:
    taken = SgdStep(lr=0.1, **variant)
    for grad, step in itertools.product([F32, BF16], [None, replace(taken, grad_scale=0.3)]):

        def run(grad=grad, step=step) -> list[Tensor]:
            buffer = rough(COUNT, 4) if "momentum" in variant else None
            state, weight = SgdRows(rough(COUNT, 3), momentum=buffer), torch.zeros(COUNT, dtype=BF16)
            kernels.update_rows(state, rough(COUNT, 5).to(grad), weight, step, taken=taken)
            return [*contents(state), weight]

        assert_both_same(run)


def test_one_pass_is_both_passes(path: str) -> None:
    """Also where the new weight takes the gradient's place."""
    taken = AdamStep(lr=1e-2, step=7, weight_decay=0.1)
    once, weight = adam_state(COUNT, 3, False, {})
    twice, grad = adam_state(COUNT, 3, False, {})[0], rough(COUNT, 5, False).to(BF16)
    kernels.update_rows(twice, grad, weight, None, taken=taken)
    kernels.update_rows(twice, grad, weight, replace(taken, grad_scale=0.3))
    place = grad.clone()
    kernels.update_rows(once, place, place, replace(taken, grad_scale=0.3), taken=taken)
    assert torch.equal(place, weight)
    assert all(torch.equal(a, b) for a, b in zip(contents(once), contents(twice), strict=True))


def test_what_cannot_be_taken_back_is_refused() -> None:
    grad, step = torch.zeros(4), AdamStep(lr=0.1, step=2)
    for rows in (AdamRows.zeros(4, amsgrad=True), AdamRows.zeros(4, moments="int8")):
        with pytest.raises(OptionError, match="cannot be taken back"):
            kernels.update_rows(rows, grad, None, step, taken=step)
    with pytest.raises(OptionError, match="update_rows: neither a step nor one to take back"):
        kernels.update_rows(AdamRows.zeros(4), grad, None, None)
    with pytest.raises(OptionError, match="update_rows: neither a step nor one to take back"):
        kernels.update_rows(SgdRows(torch.zeros(4)), grad, None, None)
