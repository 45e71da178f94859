"""A model and its optimizers as shapes: what a plan is reckoned from, and compared by."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.count.shapes import Block, Rule, Weight
from zeroshard.errors import PlanError
from zeroshard.life.step import rows_suffice
from zeroshard.life.units import find_units


def weights_of(model: nn.Module) -> dict[str, str]:
    """What a run must have in common with its plan: every parameter's dtype and shape."""
    return {
        name: shape_text(p) + ("" if p.requires_grad else " frozen") for name, p in model.named_parameters()
    }


def shape_text(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def blocks_of(
    model: nn.Module, optimizers: Sequence[Optimizer] | None, units: tuple[str, ...] | Literal["auto", "none"]
) -> tuple[Block, ...]:
    """The model's units as shapes. Without optimizers every trainable parameter gets the first rule."""
    numbers = {id(p): number for number, p in enumerate(model.parameters())}
    groups = [group for optimizer in optimizers or () for group in optimizer.param_groups]
    rule_of = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
    missing = 0 if optimizers is None else -1
    return tuple(
        Block(
            unit.name,
            tuple(
                Weight(
                    t.name,
                    tuple(t.parameter.shape),
                    str(t.parameter.dtype).removeprefix("torch."),
                    t.parameter.requires_grad,
                    numbers[id(t.parameter)],
                    rule_of.get(id(t.parameter), missing),
                )
                for t in unit.tenants
            ),
        )
        for unit in find_units(model, units)
    )


def with_unused(units: Sequence[Block], names: Container[str]) -> tuple[Block, ...]:
    """The same units; the weights of these names get no gradient."""
    return tuple(
        replace(unit, weights=tuple(replace(w, used=w.name not in names) for w in unit.weights))
        for unit in units
    )


def rules_of(optimizers: Sequence[Optimizer] | None) -> tuple[Rule, ...]:
    """A rule for every parameter group. How many moments it keeps is found by a step of the same optimizer
    on one small matrix."""
    if optimizers is None:
        return (Rule(),)
    return tuple(
        Rule(type(o).__name__, _moments(o, group), rows_suffice(o), 0 if group.get("fused") else 1)
        for o in optimizers
        for group in o.param_groups
    )


def texts_of(
    model: nn.Module, optimizers: Sequence[Optimizer] | None, rules: Sequence[Rule]
) -> tuple[str, ...]:
    """The rules in words, for a plan to be compared by: what is kept, and of how much."""
    groups: list[Any] = [model.parameters()]
    if optimizers is not None:
        groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    counts = [sum(p.numel() for p in params if p.requires_grad) for params in groups]
    return tuple(
        f"{rule.name} ({rule.moments} moments of {count:,} values)"
        for rule, count in zip(rules, counts, strict=True)
    )


def _moments(optimizer: Optimizer, group: dict[str, Any]) -> int:
    probe = nn.Parameter(torch.zeros(16, 16))
    probe.grad = torch.ones(16, 16)
    try:
        twin = _twin(optimizer, group, probe)
        twin.step()
    except Exception as error:  # an optimizer of the user's own: say that it was that
        why = f"{type(error).__name__}: {error}".rstrip(".")
        raise PlanError(
            f"how much state {type(optimizer).__name__} keeps cannot be told: its step on a matrix of 16 by "
            f"16 raises {why}. Plan without it, for AdamW, or call shard() without limit=."
        ) from error
    kept = [value for value in twin.state[probe].values() if isinstance(value, Tensor) and value.dim() > 0]
    return -(-sum(t.numel() for t in kept) // probe.numel())


def _twin(optimizer: Optimizer, group: dict[str, Any], probe: nn.Parameter) -> Optimizer:
    """The same optimizer for one parameter."""
    options = {key: value for key, value in group.items() if key not in ("params", "initial_lr")}
    rate = {key: value for key, value in optimizer.defaults.items() if key == "lr"}
    kind = type(optimizer)
    try:
        return kind([{"params": [probe], **options}], **rate)
    except TypeError:  # its own __init__ asks for more: what that has made is taken over
        fresh = Optimizer([{"params": [probe], **options}], dict(optimizer.defaults)).__dict__
        twin: Optimizer = object.__new__(kind)
        own = {name: value for name, value in optimizer.__dict__.items() if name != "step"}  # a scheduler's
        twin.__dict__.update(own | fresh)
        return twin
