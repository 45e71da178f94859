"""Turns plain data into JSON and back, exactly; tensors in it are handed out to be stored as tensors.

What JSON cannot say is marked by objects with one key that starts with ``$``: ``{"$tuple": […]}``,
``{"$float": "nan"}``, ``{"$bytes": "<base64>"}``, ``{"$pairs": [[key, value], …]}`` for dicts whose keys are
no plain strings, ``{"$tensor": "<name>"}``. No pickle: an object of any other type is refused with its
place."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zeroshard.errors import CheckpointError

from .records import HeldRows
from .untrusted import quoted

DEEPEST = 64  # levels of nesting: no honest value needs more, and recursion stays far from Python's limit


def pack(tree: Mapping[str, Any], copy: bool = False) -> tuple[Any, dict[str, torch.Tensor | HeldRows]]:
    """JSON data for `tree`, and its tensors, and records of such, by the name under which the data refers to
    them.

    With `copy` the tensors are copied, for a save that goes on while the caller changes them.
    """
    tensors: dict[str, torch.Tensor | HeldRows] = {}
    return _pack(dict(tree), "", tensors, copy), tensors


def _pack(value: Any, place: str, tensors: dict[str, torch.Tensor | HeldRows], copy: bool) -> Any:
    if place.count("\0") > DEEPEST:
        raise CheckpointError(
            f"{_where(place)} is nested deeper than {DEEPEST} levels; or it contains itself."
        )
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int:
        return value if abs(value) < 1 << 63 else {"$int": hex(value)}
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, torch.Tensor | HeldRows):
        return {"$tensor": _set_aside(value, place, tensors, copy)}
    if isinstance(value, bytes | bytearray):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, tuple):
        return {"$tuple": _pack_items(value, place, tensors, copy)}
    if isinstance(value, list):
        return _pack_items(value, place, tensors, copy)
    if isinstance(value, Mapping):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _pack(item, f"{place}\0{key}", tensors, copy) for key, item in value.items()}
        pairs = [
            [_pack(key, f"{place}\0key", tensors, copy), _pack(item, f"{place}\0{key}", tensors, copy)]
            for key, item in value.items()
        ]
        return {"$pairs": pairs}
    if (plain := _plain(value)) is not None:
        return _pack(plain, place, tensors, copy)
    raise CheckpointError(
        f"{_where(place)} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint "
        "cannot hold: it takes numbers, strings, bytes, None, lists, tuples, dicts and tensors. Convert it, "
        "or store its state_dict()."
    )


def _set_aside(
    value: torch.Tensor | HeldRows, place: str, tensors: dict[str, torch.Tensor | HeldRows], copy: bool
) -> str:
    """Put a tensor among `tensors`; returns its name there."""
    name = place.replace("\0", ".").strip(".") or "value"
    name = name if name not in tensors else f"{name}#{len(tensors)}"
    if isinstance(value, torch.Tensor):
        value = value.detach().clone() if copy else value.detach()
    tensors[name] = value
    return name


def _pack_items(
    items: Sequence[Any], place: str, tensors: dict[str, torch.Tensor | HeldRows], copy: bool
) -> list[Any]:
    # States of random generators are thousands of integers, and training waits for them.
    if set(map(type, items)) == {int} and min(items) > -(1 << 63) and max(items) < 1 << 63:
        return [*items]
    return [_pack(item, f"{place}\0{i}", tensors, copy) for i, item in enumerate(items)]


def _plain(value: Any) -> int | float | str | None:
    """The plain value of an enum over int or str and of a numpy scalar; None for anything else."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        item = value.item()
        return item if type(item) in (bool, int, float, str) else None
    return None


def _where(place: str) -> str:
    return "the value at " + (quoted(place.replace("\0", ".").strip(".")) if place else "the top")


def unpack(data: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """The tree that `pack` was given; `tensor(name)` supplies its tensors. Raises `CheckpointError` for
    anything malformed."""
    try:
        return _unpack(data, tensor, 0)
    except (ValueError, TypeError, OverflowError) as error:
        raise CheckpointError(f"the manifest's values are malformed: {error}.") from error


def _unpack(data: Any, tensor: Callable[[str], torch.Tensor], depth: int) -> Any:
    if depth > DEEPEST + 2:
        raise CheckpointError(f"the manifest's values are nested deeper than {DEEPEST} levels.")
    if isinstance(data, list):
        return [_unpack(item, tensor, depth + 1) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1 or not (mark := next(iter(data))).startswith("$"):
        return {key: _unpack(item, tensor, depth + 1) for key, item in data.items()}
    return _marked(mark, data[mark], tensor, depth)


def _marked(mark: str, held: Any, tensor: Callable[[str], torch.Tensor], depth: int) -> Any:
    if mark == "$tuple" and isinstance(held, list):
        return tuple(_unpack(item, tensor, depth + 1) for item in held)
    if mark == "$pairs" and isinstance(held, list):
        return {_unpack(key, tensor, depth + 1): _unpack(item, tensor, depth + 1) for key, item in held}
    if not isinstance(held, str):
        raise CheckpointError(f"the manifest's values hold a malformed {quoted(mark)}.")
    if mark == "$tensor":
        return tensor(held)
    if mark == "$float":
        return float(held)
    if mark == "$int":
        return int(held, 16)
    if mark == "$bytes":
        return base64.b64decode(held, validate=True)
    raise CheckpointError(f"the manifest's values hold an unknown mark {quoted(mark)}.")


def joined(parts: Sequence[Any]) -> dict[str, Any]:
    """Packed data for what several ranks hold parts of, `{key: {name: value}}`; the first rank's counts."""
    found: dict[str, dict[str, Any]] = {}
    for part in parts:
        for key, named in unpack(part, _no_tensor).items():
            mine = found.setdefault(key, {})
            for name, value in named.items():
                mine.setdefault(name, value)
    return {key: pack(named)[0] for key, named in found.items()}


def _no_tensor(name: str) -> torch.Tensor:
    raise CheckpointError(f"plain values refer to the tensor {quoted(name)}.")
