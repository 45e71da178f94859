"""Which units of a model are alike, so that a trace of one is a trace of all of them.

Blocks of one class and the same weights may still compute otherwise: another stride, another activation, a
window that every second one shifts, a checkpoint around some. So units are compared by all that stands in
them, down to the plain values in their modules. A number that counts the units (`layer_idx`) makes no
difference: what a block does otherwise for it, it mostly decides when it is built, and keeps.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

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
