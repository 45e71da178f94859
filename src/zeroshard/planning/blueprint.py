"""A model and its optimizers as shapes: what a plan is reckoned from, and compared by."""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, UntypedStorage, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zeroshard.count.shapes import Block, Rule, Weight
from zeroshard.errors import PlanError
from zeroshard.life.step import rows_suffice
from zeroshard.life.units import find_units

SIDE = 16  # of the matrices that optimizers are tried on
SMALL = 0.2  # of a matrix: counters, rows and columns
RECTIFIED = 6  # steps after which RAdam does what it does from then on


def weights_of(model: nn.Module) -> dict[str, str]:
    """What a run must have in common with its plan: every parameter's dtype and shape."""
    return {
        name: shape_text(p) + ("" if p.requires_grad else " frozen") for name, p in model.named_parameters()
    }


def shape_text(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def numel_of(text: str) -> int:
    """The elements of a tensor, of its `shape_text`.

    >>> numel_of("int64 (4, 128)")
    512
    """
    return math.prod(map(int, re.findall(r"\d+", text.partition("(")[2])))


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


def rules_of(optimizers: Sequence[Optimizer] | None, gpu: bool = False) -> tuple[Rule, ...]:
    """A rule for every parameter group. How many moments it keeps, and what a step makes beside them, is
    found by a step of the same optimizer on a few small matrices. `gpu`: as torch steps there where it may
    choose."""
    if optimizers is None:
        return (Rule(),)
    return tuple(_rule(o, group, gpu) for o in optimizers for group in o.param_groups)


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


def _rule(optimizer: Optimizer, group: dict[str, Any], gpu: bool) -> Rule:
    options = _options(group, gpu)
    counts = (1,) if options.get("fused") else (1, 3, 5)
    try:
        tried = [_stepped(optimizer, options, count) for count in counts]
    except Exception as error:  # an optimizer of the user's own: say that it was that
        why = f"{type(error).__name__}: {error}".rstrip(".")
        raise PlanError(
            f"how much state {type(optimizer).__name__} keeps cannot be told: its step on a matrix of 16 by "
            f"16 raises {why}. Plan without it, for AdamW, or call shard() without limit=."
        ) from error
    kept, alone = tried[0]
    every = three = 0
    if len(tried) > 1:
        three = tried[1][1]
        every = -(-max(tried[2][1] - three, 0) // 2)
    temporaries = every, max(alone - every, 0), max(three - alone - 2 * every, 0)
    return Rule(type(optimizer).__name__, kept, rows_suffice(optimizer), temporaries)


def _options(group: dict[str, Any], gpu: bool) -> dict[str, Any]:
    """Those of a group, for matrices on the CPU: what only a GPU takes, and keeps no more for, is left out.
    Where torch may choose on a GPU it takes foreach."""
    options = {key: value for key, value in group.items() if key not in ("params", "initial_lr")}
    moving = isinstance(options.get("lr"), Tensor)
    chooses = options.get("foreach", False) is None and not (
        options.get("fused") or options.get("differentiable") or (moving and not options.get("capturable"))
    )
    if gpu and chooses:
        options["foreach"] = True
    if options.get("capturable"):
        options["capturable"] = False
        if moving:
            options["lr"] = float(options["lr"])
    return options


def _stepped(optimizer: Optimizer, options: dict[str, Any], count: int) -> tuple[int, int]:
    """Of a step of its twin on so many matrices: how many of their size it keeps for each, and the most that
    it makes beside those, rounded up but for what is small."""
    probes = [nn.Parameter(torch.zeros(SIDE, SIDE)) for _ in range(count)]
    for probe in probes:
        probe.grad = torch.ones(SIDE, SIDE)
    twin = _twin(optimizer, options, probes)
    most = 0
    for _ in range(RECTIFIED if isinstance(optimizer, torch.optim.RAdam) else 1):
        with _Made() as made:
            twin.step()
        most = max(most, made.most - made.now)
    kept = [v for v in twin.state[probes[0]].values() if isinstance(v, Tensor) and v.dim() > 0]
    numel = SIDE * SIDE
    return -(-sum(t.numel() for t in kept) // numel), math.ceil(most / (4 * numel) - SMALL)


def _twin(optimizer: Optimizer, options: dict[str, Any], probes: list[nn.Parameter]) -> Optimizer:
    """The same optimizer for a few parameters."""
    rate = {key: options.get(key, value) for key, value in optimizer.defaults.items() if key == "lr"}
    kind = type(optimizer)
    try:
        return kind([{"params": probes, **options}], **rate)
    except TypeError:  # its own __init__ asks for more: what that has made is taken over
        fresh = Optimizer([{"params": probes, **options}], dict(optimizer.defaults)).__dict__
        twin: Optimizer = object.__new__(kind)
        own = {name: value for name, value in optimizer.__dict__.items() if name != "step"}  # a scheduler's
        twin.__dict__.update(own | fresh)
        return twin


class _Made(TorchDispatchMode):
    """Bytes of the storages that operations make: those that live, and the most that lived at one time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in given | self._known:
                    self._meet(storage)
        return result

    def _meet(self, storage: UntypedStorage) -> None:
        self._known.add(storage._cdata)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._part, storage._cdata, storage.nbytes())

    def _part(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
