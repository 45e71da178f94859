"""Describes a model, its optimizers and its batch as shapes, and finds units that are alike.

A trace of one unit is a trace of all that are alike. Blocks of one class and the same weights may still
compute otherwise: another stride, another activation, a window that every second one shifts, a checkpoint
around some. So units are compared by all that stands in them, down to the plain values in their modules. A
number that counts the units (`layer_idx`) makes no difference: what a block does otherwise for it, it mostly
decides when it is built, and keeps."""

from __future__ import annotations

import dataclasses
import enum
import math
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import FunctionType, MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from zeroshard.errors import OptionError, PlanError
from zeroshard.layout.specs import OptimizerRule, UnitSpec
from zeroshard.optim.optimizer_kinds import rule_of
from zeroshard.params.units import find_units, unit_specs

from .operations import LiveBytes


@dataclass(frozen=True)
class ExampleInputs:
    """Example inputs of the model's forward: only their shapes and dtypes matter."""

    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, batch: Any) -> ExampleInputs:
        """A tensor, a tuple or list of positional arguments, or a dict of keyword arguments."""
        if isinstance(batch, dict):
            return cls((), tuple(batch.items()))
        return cls(tuple(batch) if isinstance(batch, tuple | list) else (batch,))

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors among them."""
        return [x for x in tree_flatten((self.args, dict(self.kwargs)))[0] if isinstance(x, Tensor)]

    @cached_property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)


def tokens(text: str) -> Tensor:
    """``"8x2048"``: eight sequences of 2048 token ids."""
    if not re.fullmatch(r"\d+(x\d+)*", text):
        raise OptionError(
            f'batch={text!r} is not a shape of token ids. Write it as "8x2048", or pass example inputs.'
        )
    return torch.zeros([int(part) for part in text.split("x")], dtype=torch.int64, device="meta")


def rows_of(batch: Any) -> int:
    """Dim 0 of its first tensor that has one; 0 where there is none."""
    tensors = (x for x in tree_flatten(batch)[0] if isinstance(x, Tensor) and x.dim() > 0)
    return next((int(tensor.shape[0]) for tensor in tensors), 0)


def with_rows(batch: Any, rows: int) -> Any:
    """The same batch with another number of rows, as shapes alone. Tensors whose dim 0 is not that of the
    first stay."""
    made = tokens(batch) if isinstance(batch, str) else batch
    height = rows_of(made)
    if height == 0:
        raise OptionError("a search for the largest micro-batch needs a batch with rows: a tensor in it.")

    def one(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        shape = (rows, *value.shape[1:]) if value.dim() > 0 and value.shape[0] == height else value.shape
        return torch.empty(shape, dtype=value.dtype, device="meta")

    return tree_map(one, made)


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
) -> tuple[UnitSpec, ...]:
    """The model's units as shapes. Without optimizers every trainable parameter gets the first rule."""
    groups = [group for optimizer in optimizers or () for group in optimizer.param_groups]
    rules = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
    return unit_specs(model, find_units(model, units), rules, 0 if optimizers is None else -1)


def with_unused(units: Sequence[UnitSpec], names: Container[str]) -> tuple[UnitSpec, ...]:
    """The same units; the weights of these names get no gradient."""
    return tuple(
        replace(unit, weights=tuple(replace(w, used=w.name not in names) for w in unit.weights))
        for unit in units
    )


def rules_of(optimizers: Sequence[Optimizer] | None, gpu: bool = False) -> tuple[OptimizerRule, ...]:
    """A rule for every parameter group. How many moments it keeps, and what a step makes beside them, is
    found by a step of the same optimizer on a few small matrices. `gpu`: as torch steps there where it may
    choose."""
    if optimizers is None:
        return (OptimizerRule(),)
    return tuple(_rule(o, group, gpu) for o in optimizers for group in o.param_groups)


def texts_of(
    model: nn.Module, optimizers: Sequence[Optimizer] | None, rules: Sequence[OptimizerRule]
) -> tuple[str, ...]:
    """The rules in words, for a plan to be compared by: what is kept, and of how much."""
    groups: list[Any] = [model.parameters()]
    if optimizers is not None:
        groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    counts = [sum(p.numel() for p in params if p.requires_grad) for params in groups]
    return tuple(
        f"{rule.name} ({rule.moments + rule.factors} moments of {count:,} values)"
        for rule, count in zip(rules, counts, strict=True)
    )


def _rule(optimizer: Optimizer, group: dict[str, Any], gpu: bool) -> OptimizerRule:
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
    factors = _factors(optimizer, options) if kept else 0
    return replace(rule_of(optimizer), moments=kept - factors, temporaries=temporaries, factors=factors)


def _factors(optimizer: Optimizer, options: dict[str, Any]) -> int:
    """How many pairs of means of rows and columns it keeps of a wide matrix, in place of moments."""
    probe = nn.Parameter(torch.zeros(SIDE, 4 * SIDE))
    probe.grad = torch.ones_like(probe)
    template = _template(optimizer, options, [probe])
    template.step()
    sizes = [v.numel() for v in template.state[probe].values() if isinstance(v, Tensor) and v.dim() > 0]
    return min(sizes.count(SIDE), sizes.count(4 * SIDE))


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
    template = _template(optimizer, options, probes)
    most = 0
    for _ in range(RECTIFIED if isinstance(optimizer, torch.optim.RAdam) else 1):
        with _StateMeter() as made:
            template.step()
        most = max(most, made.most - made.alive.bytes)
    kept = [v for v in template.state[probes[0]].values() if isinstance(v, Tensor) and v.dim() > 0]
    numel = SIDE * SIDE
    return -(-sum(t.numel() for t in kept) // numel), math.ceil(most / (4 * numel) - SMALL)


def _template(optimizer: Optimizer, options: dict[str, Any], probes: list[nn.Parameter]) -> Optimizer:
    """The same optimizer for a few parameters."""
    rate = {key: options.get(key, value) for key, value in optimizer.defaults.items() if key == "lr"}
    kind = type(optimizer)
    try:
        return kind([{"params": probes, **options}], **rate)
    except TypeError:  # its own __init__ asks for more: what that has made is taken over
        fresh = Optimizer([{"params": probes, **options}], dict(optimizer.defaults)).__dict__
        template: Optimizer = object.__new__(kind)
        own = {name: value for name, value in optimizer.__dict__.items() if name != "step"}  # a scheduler's
        template.__dict__.update(own | fresh)
        return template


class _StateMeter(TorchDispatchMode):
    """Bytes of the storages that operations make: those that live, and the most that lived at one time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self.alive = LiveBytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in given and self.alive.meet(storage):
                    self.most = max(self.most, self.alive.bytes)
        return result


DEPTH = 6  # of values in values; below it, and for objects of other kinds, the type alone counts
_OWN = frozenset(vars(nn.Module())) - {"training"}  # what every module keeps for itself
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def sight(value: Any) -> tuple[Any, ...]:
    """What makes two arguments alike to a trace."""
    if isinstance(value, Tensor):
        return "tensor", value.shape, value.dtype, value.requires_grad
    return ("value", value if isinstance(value, int | float | str | bool | None) else type(value))


def mode() -> tuple[Any, ...]:
    """What a forward depends on beside its module and its arguments."""
    casts = tuple(
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in ("cpu", "cuda")
    )
    return torch.is_grad_enabled(), casts


def natures(modules: Mapping[str, nn.Module]) -> dict[str, int]:
    """A number for each module by its name, the same for those that are alike. In the order of forward or of
    registration, in which numbers of units count."""
    seen = {name: dict(_features(module)) for name, module in modules.items()}
    families: dict[Any, list[str]] = {}
    for name, features in seen.items():
        families.setdefault((type(modules[name]), *features), []).append(name)
    numbers: dict[Any, int] = {}
    found: dict[str, int] = {}
    for number, names in enumerate(families.values()):
        kept = [key for key in seen[names[0]] if not _counts([seen[name][key] for name in names])]
        for name in names:
            features = seen[name]
            found[name] = numbers.setdefault((number, *(features[key] for key in kept)), len(numbers))
    return {name: found[name] for name in modules}


def _counts(values: list[Any]) -> bool:
    """Whether a value is a number that goes up by one from unit to unit, over at least three."""
    if len(values) < 3 or any(kind is not int for kind, *_ in values):
        return False
    first = values[0][1]
    return [number for _, number in values] == list(range(first, first + len(values)))


def _features(module: nn.Module) -> list[tuple[str, tuple[Any, ...]]]:
    found: list[tuple[str, tuple[Any, ...]]] = []
    for path, inner in module.named_modules():
        found.append((path, (type(inner),)))
        for name, value in vars(inner).items():
            if name not in _OWN or (name in _HOOKS and value):
                found.append((f"{path}:{name}", plain(value)))
        for name, buffer in inner._buffers.items():
            found.append((f"{path}:{name}", sight(buffer)))
    return found


def plain(value: Any, depth: int = DEPTH) -> tuple[Any, ...]:
    """A value so that it can be compared and hashed: numbers and texts themselves, functions by their code,
    other objects by their type."""
    kind = type(value)
    if depth == 0 or isinstance(value, nn.Module):
        return (kind,)
    within: Callable[[Any], tuple[Any, ...]] = partial(plain, depth=depth - 1)
    if isinstance(value, Tensor):
        return sight(value)
    if isinstance(value, tuple | list):
        return kind, *map(within, value)
    if isinstance(value, Mapping):
        return kind, *((within(key), within(item)) for key, item in value.items())
    if isinstance(value, partial):
        return kind, within(value.func), within(value.args), within(value.keywords)
    if isinstance(value, MethodType):
        return kind, within(value.__func__)
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        return kind, value.__code__, within(value.__defaults__), within(cells)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return kind, *(within(getattr(value, f.name)) for f in dataclasses.fields(value))
    return (kind, value) if _is_simple(value) else (kind,)


def _is_simple(value: Any) -> bool:
    """Whether it is what it shows: a number, a text, a member of an enumeration, a dtype, a class, or a
    function of C."""
    simple = (int, float, complex, str, bytes, enum.Enum, type, torch.dtype, torch.device, type(len))
    return value is None or isinstance(value, simple)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # not assigned yet
        return False
