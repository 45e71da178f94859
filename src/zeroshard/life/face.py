"""A DTensor that answers for the whole tensor also where torch's own would answer for one rank, or fail.

Torch takes norms, sums and extremes rank by rank and leaves the result pending, to be put together when it is
used in a computation. Two things go wrong with that:

- `float(p.grad.norm())`, or of a clipped norm that is the largest of all values, reads this rank's part of it
  without a word.
- A rank without a row of a tensor has no largest value of it, and fails alone.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import optimizer
from torch.utils import _foreach_utils

__all__ = ["Face", "face_of"]

_aten = torch.ops.aten
_NORMS = {_aten.linalg_vector_norm.default, _aten._foreach_norm.Scalar}
_EXTREMES = {
    _aten.max.default: -math.inf,
    _aten.amax.default: -math.inf,
    _aten.min.default: math.inf,
    _aten.amin.default: math.inf,
}


class Face(DTensor):
    """What the user sees of a tensor that lies in rows on the ranks, and what torch makes of it.

    Both of torch's hooks are replaced: DTensor's own are for no subclass in some versions.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    __slots__ = ("plain",)
    plain: DTensor  # torch's own of the same rows

    @staticmethod
    def of(seen: DTensor) -> Face:
        made: Face = Face(seen._local_tensor, seen._spec, requires_grad=seen.requires_grad)  # type: ignore[no-untyped-call]
        made.plain = seen
        return made

    def settled(self) -> DTensor:
        """Its values put together, where every rank has a part of each. Every rank calls it."""
        if not any(placement.is_partial() for placement in self._spec.placements):
            return self.plain
        return self.plain.redistribute(placements=[Replicate()] * len(self._spec.placements))

    def with_a_row(self, neutral: float) -> DTensor:
        """Settled; and where this rank has no row, with one that does not count."""
        own = self._local_tensor
        if own.numel() or not self.numel():
            return self.settled()
        return DTensor(own.new_full((1, *own.shape[1:]), neutral), self._spec, requires_grad=False)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _aten._local_scalar_dense.default:
            return func(args[0].settled()._local_tensor)
        neutral = _neutral(func, *args)
        given = {name: _plain(value, None) for name, value in (kwargs or {}).items()}
        made = func(*[_plain(value, neutral) for value in args], **given)
        if func._schema.is_mutable and made is not None:
            return args[0]  # what it was called on
        return _shown(made)

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        known = DTensor(self._local_tensor, self._spec, requires_grad=self.requires_grad)
        return known.__reduce_ex__(protocol)  # files need not know of this class


# Lists of them are clipped in one call, as lists of DTensors are.
for _known in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
    _known.append(Face)


_works: list[bool] = []  # whether this torch asks `Face` itself, once that is known


def face_of(seen: DTensor) -> DTensor:
    """A face of it; itself where torch (2.11) computes with DTensors past the hooks of a subclass."""
    made = Face.of(seen)
    if not _works:
        _works.append(type(made.detach()) is Face)
    return made if _works[0] else seen


def _neutral(func: Any, first: Any = None, *rest: Any) -> float | None:
    """What a row may hold without changing the result, where rows are reduced and none would be an error."""
    if func in _NORMS:
        kind, dim = rest[0] if rest else 2, rest[1] if len(rest) > 1 else None
        neutral = 0.0 if kind >= 0 else math.inf
    elif func in _EXTREMES:
        neutral, dim = _EXTREMES[func], rest[0] if rest else None
    else:
        return None
    dims = [dim] if isinstance(dim, int) else dim
    return neutral if not dims or 0 in dims or -first.dim() in dims else None


def _plain(given: Any, neutral: float | None) -> Any:
    if type(given) is Face:
        return given.plain if neutral is None else given.with_a_row(neutral)
    return [_plain(item, neutral) for item in given] if type(given) is list else given


def _shown(made: Any) -> Any:
    if type(made) in (list, tuple):
        return type(made)(_shown(item) for item in made)
    return Face.of(made) if type(made) is DTensor else made
