"""Gradients that a loop asks for by tensors: of sharded parameters they are right or refused, never a part;
of inputs they are torch's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import functional

import zeroshard as zs
from zeroshard.runtime import asked_gradients
from zeroshard.runtime.runtime import CheckedBackward
from zeroshard.runtime.wrapper_words import note
from zeroshard.testing import ranks

X = torch.linspace(-1, 1, 10).view(2, 5)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def params(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


def loss(model: nn.Module) -> Any:
    return model(X).square().mean()


def penalty(model: nn.Module) -> Any:
    return sum(p.square().sum() for p in model.parameters())


def grads(model: nn.Module) -> list[Any]:
    return [p.grad for p in model.parameters()]


def backward_of(value: Callable[[nn.Module], Any], **options: Any) -> Callable[[nn.Module], list[Any]]:
    def run(model: nn.Module) -> list[Any]:
        value(model).backward(**{k: v(model) if callable(v) else v for k, v in options.items()})
        return grads(model)

    return run


def edges(model: nn.Module) -> Any:
    return [torch.autograd.graph.get_gradient_edge(p) for p in model.parameters()]


def twice(model: nn.Module) -> list[Any]:
    found = torch.autograd.grad(loss(model), params(model), create_graph=True)
    sum(grad.square().sum() for grad in found).backward()
    return grads(model)


def of_inputs(model: nn.Module) -> list[Any]:
    y = X.clone().requires_grad_()
    out = model(y).square().mean()
    (found,) = torch.autograd.grad(out, y, create_graph=True)
    (out + found.square().sum()).backward()
    return [found, *grads(model)]


def both(model: nn.Module) -> Any:
    return loss(model) + penalty(model)


REFUSED: dict[str, Callable[[nn.Module], Any]] = {
    "grad": lambda m: torch.autograd.grad(loss(m), params(m)),
    "of one": lambda m: torch.autograd.grad(loss(m), m[0].weight),  # type: ignore[index]
    "unused": lambda m: torch.autograd.grad(loss(m), params(m), allow_unused=True),
    "materialised": lambda m: torch.autograd.grad(loss(m), params(m), materialize_grads=True),
    "with a penalty": lambda m: torch.autograd.grad(both(m), params(m)),
    "two outputs": lambda m: torch.autograd.grad([penalty(m), loss(m)], params(m)),
    "with a graph": lambda m: torch.autograd.grad(both(m), params(m), create_graph=True),
    "by edges": lambda m: torch.autograd.grad(both(m), edges(m)),
    "backward": backward_of(loss, inputs=params),
    "backward of both": backward_of(both, inputs=params),
    "backward of one": backward_of(both, inputs=lambda m: [m[0].weight]),
    "backward by torch": lambda m: torch.autograd.backward(both(m), inputs=params(m)),
    "gradients of gradients": twice,
    "vjp": lambda m: torch.autograd.grad(m(X), params(m), grad_outputs=torch.ones(2, 3)),
}
RIGHT: dict[str, Callable[[nn.Module], list[Any]]] = {
    "of a penalty": lambda m: list(torch.autograd.grad(penalty(m), params(m))),
    "both": backward_of(both),
    "of inputs": of_inputs,
    "jacobian": lambda m: [functional.jacobian(m, X)],
    "vjp": lambda m: [functional.vjp(lambda y: m(y).sum(), X)[1]],
    "hessian": lambda m: [functional.hessian(lambda y: m(y).square().sum(), X)],
}


def whole(value: Any) -> Tensor:
    found: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found.detach()


def sharded(stage: int, **options: Any) -> tuple[nn.Module, Any]:
    model = net()
    return model, zs.shard(model, torch.optim.AdamW(model.parameters()), stage=stage, **options)


def refused(stage: int, options: dict[str, Any]) -> None:
    model, run = sharded(stage, **options)
    for ask in REFUSED.values():
        with pytest.raises(zs.StateError, match=r"`0.weight`.*that part would be missing.*loss.backward\(\)"):
            ask(model)
        model.zero_grad()
    backward_of(both)(model)  # and nothing is left behind
    plain = net()
    both(plain).backward()
    for mine, want in zip(grads(model), grads(plain), strict=True):
        assert torch.allclose(whole(mine), want, atol=1e-6)
    run.close()
    assert len(torch.autograd.grad(both(model), params(model))) == 4  # a plain model again


def right(stage: int) -> None:
    for ask in RIGHT.values():
        model, run = sharded(stage)
        for mine, want in zip(ask(model), ask(net()), strict=True):
            assert torch.allclose(whole(mine), whole(want), atol=1e-6)
        run.close()


@pytest.mark.parametrize("options", [{}, {"units": "none"}, {"recompute": True}], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_would_be_a_part_is_refused(stage: int, options: dict[str, Any]) -> None:
    refused(stage, options)


@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_whole_is_right(stage: int) -> None:
    right(stage)


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_it_is_so_on_two_ranks(stage: int) -> None:
    ranks(2).run(refused, stage, {})
    ranks(2).run(right, stage)


def test_a_step_pays_one_call_and_torch_has_its_own_back() -> None:
    own, (model, run) = torch.autograd._engine_run_backward, sharded(2)  # type: ignore[attr-defined]
    (other, another), looked = sharded(3), []
    checked = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    assert isinstance(checked, CheckedBackward)
    refuse, checked._looks = checked._looks, lambda *_: looked.append(1)
    try:
        loss(model).backward()
        assert looked == []
        torch.autograd.grad(penalty(other), params(other))
        assert looked == [1]
    finally:
        checked._looks = refuse
    run.close()
    assert torch.autograd._engine_run_backward is checked  # type: ignore[attr-defined]
    another.close()
    left = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    assert left is own or asked_gradients._watched  # of runs that other tests have left open


MODULE = """
import torch, zeroshard as zs
model = torch.nn.Sequential(torch.nn.Linear(2, 2))
run = zs.shard(model)
assert not hasattr(model, "module")
assert getattr(model, "module", None) is None
model.module.weight
"""


def test_asked_for_a_wrapper_s_module_the_script_is_told_what_to_type() -> None:
    done = subprocess.run([sys.executable, "-c", MODULE], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "AttributeError: 'Sequential' object has no attribute 'module'" in done.stderr
    assert done.stderr.rstrip().endswith(
        "zeroshard: zs.shard() changes the model in place, and there is no wrapper around it: where a script "
        "for DDP says model.module, write model."
    )


def test_a_model_that_has_a_module_of_its_own_and_others_are_left_alone() -> None:
    model = nn.Module()
    model.module = nn.Linear(2, 2)
    run = zs.shard(model)
    assert model.module.weight.shape == (2, 2)
    run.close()
    error = AttributeError("nothing", name="module", obj=model)
    note(error, lambda module: False)
    note(ValueError("module"), lambda module: True)
    assert not hasattr(error, "__notes__")
