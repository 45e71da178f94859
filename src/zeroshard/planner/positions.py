"""Finds how far positions reach that a model makes itself, so that longer micro-batches are refused.

Fake tensors have no values, and torch looks up any index in them. The greatest value of what `arange` made is
known without values, and follows through what is done to positions: views, casts, a number added, the count
of a mask. Token ids are values of the user's: nothing is known of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from zeroshard.errors import PlanError

_aten = torch.ops.aten
_SAME = {
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.reshape.default,
    _aten.expand.default,
    _aten.unsqueeze.default,
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
    _aten.transpose.int,
    _aten.permute.default,
    _aten.t.default,
    _aten.alias.default,
    _aten.detach.default,
    _aten.clone.default,
    _aten.repeat.default,
    _aten._to_copy.default,
    _aten.lift_fresh_copy.default,
}
_RANGES: dict[
    Any, tuple[tuple[int | None, int], ...]
] = {  # where start, end and step stand, or what they are
    _aten.arange.default: ((None, 0), (0, 0), (None, 1)),
    _aten.arange.start: ((0, 0), (1, 0), (None, 1)),
    _aten.arange.start_step: ((0, 0), (1, 0), (2, 1)),
}


class Positions:
    """Of one trace. `named` finds the weight that a tensor is."""

    def __init__(self, named: Callable[[Tensor], str]) -> None:
        self._named = named
        self._greatest: Any = WeakIdKeyDictionary()

    def see(self, func: Any, args: Any, result: Any) -> None:
        """An operation that was called."""
        if func is _aten.embedding.default:
            self._look_up(args[0], args[1])
        elif func is _aten.index_select.default:
            self._look_up(args[0], args[2], args[1])
        elif func is _aten.index.Tensor:
            for dim, index in enumerate(args[1]):
                self._look_up(args[0], index, dim)
        elif func._schema.is_mutable:
            self._greatest.pop(args[0] if args else None, None)
        elif isinstance(result, Tensor) and not result.is_floating_point():
            greatest = self._reach(func, args, result)
            if greatest is not None:
                self._greatest[result] = greatest

    def _reach(self, func: Any, args: Any, result: Tensor) -> float | None:
        if func in _RANGES:
            return _last(
                *(default if at is None or at >= len(args) else args[at] for at, default in _RANGES[func])
            )
        if func is _aten.ne.Scalar:
            return 1
        known = self._greatest.get(args[0]) if args and isinstance(args[0], Tensor) else None
        if known is None:
            return None
        if func in _SAME:
            return float(known)
        if func is _aten.slice.Tensor:
            return float(known) if result.shape == args[0].shape else None
        if func is _aten.cumsum.default:
            return float(known) * args[0].shape[args[1]] if args[0].dim() else float(known)
        return self._combined(func, known, args)

    def _combined(self, func: Any, known: float, args: Any) -> float | None:
        """Of a sum or a product with a number, or with another tensor of which something is known."""
        if func not in (_aten.add.Tensor, _aten.add.Scalar, _aten.mul.Tensor, _aten.mul.Scalar):
            return None
        other = self._greatest.get(args[1]) if isinstance(args[1], Tensor) else args[1]
        if not isinstance(other, int | float) or other < 0 or len(args) > 2:
            return None
        return known + other if func in (_aten.add.Tensor, _aten.add.Scalar) else known * other

    def _look_up(self, table: Any, index: Any, dim: int = 0) -> None:
        greatest = self._greatest.get(index) if isinstance(index, Tensor) else None
        rows = table.shape[dim]
        if greatest is not None and greatest >= rows:
            name = self._named(table)
            where = f"`{name}`" if name else "a table"
            raise PlanError(
                f"the micro-batch is too long for the model: it looks up position {int(greatest):,} in "
                f"{where}, which has {rows:,} rows, numbered from 0. Give shorter "
                "sequences with batch=, or build the model with more positions."
            )


def _last(start: float, end: float, step: float) -> float:
    """The greatest of a range."""
    count = max(math.ceil((end - start) / step), 0)
    return max(start, start + (count - 1) * step) if count else 0.0
