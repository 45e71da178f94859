"""A DTensor that answers for the whole tensor also where torch's own would answer for one rank, or fail.

Torch takes norms, sums and extremes rank by rank and leaves the result pending, to be put together when it is
used in a computation. Two things go wrong with that:

- `float(p.grad.norm())`, or of a clipped norm that is the largest of all values, reads this rank's part of it
  without a word.
- A rank without a row of a tensor has no largest value of it, and fails alone.

And it tells what torch would keep to itself: that a loop has written a parameter, by whatever name, and what
a collective is for (`reading`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.optim import optimizer
from torch.utils import _foreach_utils

from zeroshard.errors import RankError, StateError

from .reading import Subject, joined, word_for

__all__ = ["Face", "Writes", "face_of", "place_of"]

_aten = torch.ops.aten
_NORMS = {_aten.linalg_vector_norm.default, _aten._foreach_norm.Scalar}
_EXTREMES = {
    _aten.max.default: -math.inf,
    _aten.amax.default: -math.inf,
    _aten.min.default: math.inf,
    _aten.amin.default: math.inf,
}
# Never communicate of themselves. A stack of pending norms, as clipping makes it, is pending.
_LOCAL = {_aten.detach.default, _aten.alias.default, _aten.stack.default}
_SUMS = {_aten.sum.default, _aten.mean.default, _aten.count_nonzero.default}


class Writes:
    """What is written into the faces that hold this one, by whatever name: homes, and views of them."""

    def __init__(self) -> None:
        self.count = 0
        self.settings = 0  # how often `requires_grad` was set, or a hook registered
        self.before: Callable[[bool], None] | None = None  # told whether it is the first since `looked`
        self.before_reads: Callable[[], None] | None = None
        self.touched: set[int] = set()  # where the rows lie that were written since `looked`
        self._begun = False

    def coming(self, rows: torch.Tensor) -> None:
        """Somebody is about to write. Peers may still read the rows in place."""
        if self.before is not None:
            self.before(not self._begun)
        self._begun = True
        self.count += 1
        self.touched.add(place_of(rows))

    def read(self) -> None:
        """Somebody is about to compute with the values."""
        if self.before_reads is not None:
            self.before_reads()

    def looked(self) -> int:
        self._begun = False
        self.touched.clear()
        return self.count


def place_of(rows: torch.Tensor) -> int:
    """The same for rows and for all views of them: each home has a storage of its own."""
    return rows.untyped_storage().data_ptr()


class _Copied(Writes):
    """Of what looks like a view."""

    def coming(self, rows: torch.Tensor) -> None:
        raise StateError(
            "rows of a sharded parameter or gradient cannot be written by number (p[i].zero_()): they are on "
            "several ranks, and p[i] is a copy. Write parameters inside `with run.gathered(write=True):` and "
            "gradients as a whole: p.grad = p.grad * mask."
        )


_COPY = _Copied()


class Face(DTensor):
    """What the user sees of a tensor that lies in rows on the ranks, and what torch makes of it.

    Both of torch's hooks are replaced: DTensor's own are for no subclass in some versions.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    __slots__ = ("about", "plain", "writes")
    plain: DTensor  # torch's own of the same rows
    writes: Writes | None  # of parameters, and of views of them
    about: Subject | None

    @staticmethod
    def of(seen: DTensor, writes: Writes | None = None, about: Subject | None = None) -> Face:
        made: Face = Face(seen._local_tensor, seen._spec, requires_grad=seen.requires_grad)  # type: ignore[no-untyped-call]
        made.plain, made.writes, made.about = seen, writes, about
        return made

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Torch would change what it shows, and not the rows: the values are taken over instead."""
        alike = isinstance(value, DTensor) and value.dtype == self.dtype and value._spec == self._spec
        if not alike:
            kind = type(value).__name__ if not isinstance(value, DTensor) else "DTensor"
            raise StateError(
                f"p.data = ... of a sharded parameter or gradient of shape {tuple(self.shape)} and "
                f"{self.dtype} takes one like it, such as p.data * 2, and not a {kind} of shape "
                f"{tuple(value.shape)} and {value.dtype}. Write whole tensors inside `with "
                "run.gathered(write=True):`."
            )
        with torch.no_grad():
            self.data.copy_(value)  # as for torch, no write that autograd is told of

    @property
    def requires_grad(self) -> bool:
        return bool(torch.Tensor.requires_grad.__get__(self))  # type: ignore[attr-defined]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self._tell()
        torch.Tensor.requires_grad.__set__(self, value)  # type: ignore[attr-defined]

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        self._tell()
        super().requires_grad_(requires_grad)
        return self

    def register_hook(self, hook: Any) -> Any:
        self._tell()
        return super().register_hook(hook)  # type: ignore[no-untyped-call]

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        self._tell()
        return super().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _tell(self) -> None:
        writes = getattr(self, "writes", None)
        if writes is not None:
            writes.settings += 1

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> DTensor:
        """Also what `full_tensor()` calls."""
        before, after = self._spec.placements, tuple(placements or ())
        if before != after and not all(placement.is_replicate() for placement in before):
            whole = all(placement.is_replicate() for placement in after)
            self._compare("full_tensor" if whole else "redistribute")
        return super().redistribute(device_mesh, placements, **options)

    def _compare(self, word: str) -> None:
        """Before torch communicates."""
        about = getattr(self, "about", None)
        if about is not None:
            about.readings.compare(about, word)

    def settled(self) -> DTensor:
        """Its values put together, where every rank has a part of each. Every rank calls it."""
        if not _pending(self):
            return self.plain
        self._compare("item")
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
        if func._schema.is_mutable:
            for writes, face in _homes(args[:1]):
                writes.coming(face._local_tensor)
                if type(args[0]) is list:
                    increment_version(face)  # torch counts what is done to lists of its own tensors only
        if not func.is_view:
            for writes, _ in _homes(args):
                writes.read()
        try:
            plain = [_plain(value, neutral) for value in args]
            with nullcontext() if _stays_here(func, plain) else _heeded(_about(args), word_for(func)):
                made = func(*plain, **given)
        except RankError:
            raise
        except RuntimeError as error:
            raise _explained(error) from error
        if func._schema.is_mutable and made is not None:
            return args[0]  # what it was called on
        return _shown(made, func, args)

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        known = DTensor(self._local_tensor, self._spec, requires_grad=self.requires_grad)
        return known.__reduce_ex__(protocol)  # files need not know of this class


# Lists of them are clipped in one call, as lists of DTensors are.
for _known in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
    _known.append(Face)


_works: list[bool] = []  # whether this torch asks `Face` itself, once that is known


def face_of(seen: DTensor, writes: Writes | None = None, about: Subject | None = None) -> DTensor:
    """A face of it; itself where torch (2.11) computes with DTensors past the hooks of a subclass."""
    made = Face.of(seen, writes, about)
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


_TOLD = (
    *("got mixed", "Sharding propagation failed", "sharding strategy", "as_strided not supported"),
    "single memory location",  # what rests on the disk shows one NaN for all of its elements
)


def _explained(error: RuntimeError) -> RuntimeError:
    """What torch cannot do with DTensors is told in words of this library."""
    text = str(error).strip().split("\n")[0]
    if not any(words in str(error) for words in _TOLD):
        return error
    return StateError(
        f"a sharded parameter or gradient was used as only a whole tensor can be ({text.rstrip('.!')}). In "
        "the forward of its own module or unit a parameter is whole: use it there, or let both be in one "
        "unit (units=). Elsewhere read it inside `with run.gathered():`, or after .full_tensor()."
    )


def _homes(args: Any) -> Iterator[tuple[Writes, Face]]:
    """Of the homes, and views of them, among what a function is called on."""
    for given in args:
        for item in given if type(given) in (list, tuple) else (given,):
            if type(item) is Face and item.writes is not None:
                yield item.writes, item


def _plain(given: Any, neutral: float | None) -> Any:
    if type(given) is Face:
        return given.plain if neutral is None else given.with_a_row(neutral)
    return [_plain(item, neutral) for item in given] if type(given) is list else given


def _about(args: Any) -> Subject | None:
    """What a function is called on: its first argument that tells, or all of a list."""
    for given in args:
        if type(given) is Face and given.about is not None:
            return given.about
        if type(given) in (list, tuple):
            items = [item for item in given if isinstance(item, DTensor)]
            found = joined([getattr(item, "about", None) for item in items])
            if found is not None:
                return found
    return None


def _heeded(about: Subject | None, word: str) -> AbstractContextManager[object]:
    return nullcontext() if about is None else about.readings.heeded(about, word)


def _stays_here(func: Any, args: Any) -> bool:
    """Whether torch surely computes rank by rank: all rows alike, and nothing pending. Of lists the first
    element is looked at."""
    if func in _LOCAL or func is _aten.equal.default:
        return func in _LOCAL
    firsts = [given[0] if type(given) is list and given else given for given in args]
    faces = [given for given in firsts if isinstance(given, DTensor)]
    if any(map(_pending, faces)):
        return False
    if func in _NORMS or func in _EXTREMES or func in _SUMS:
        return True
    alike = len({face.shape for face in faces if _sharded(face)}) <= 1
    return alike and (torch.Tag.pointwise in func.tags or func._schema.name.startswith("aten::_foreach_"))


def _pending(seen: DTensor) -> bool:
    """Whether ranks hold parts of its values. Called thousands of times where a model is clipped."""
    for placement in seen._spec.placements:
        if placement.is_partial():
            return True
    return False


def _shown(made: Any, func: Any, args: Any) -> Any:
    """What torch made as faces. Lists are made of lists: each of its own."""
    viewed = args[0] if func.is_view and type(args[0]) is Face else None
    word = word_for(func)
    if type(made) is DTensor:
        return _shown_one(made, viewed, _about(args), word)
    if type(made) not in (list, tuple):
        return made
    if args and type(args[0]) is list and len(args[0]) == len(made):
        abouts = [getattr(item, "about", None) for item in args[0]]
    else:
        abouts = [_about(args)] * len(made)
    if viewed is None and made and type(made[0]) is DTensor and _pending(made[0]):
        abouts = [about and about.by(word) for about in abouts]
    pairs = zip(made, abouts, strict=True)
    return type(made)([_shown_one(item, viewed, about, "") for item, about in pairs])


def _shown_one(made: Any, viewed: Face | None, about: Subject | None, word: str) -> Any:
    if type(made) is not DTensor:
        return made
    if word and about is not None and _pending(made):
        about = about.by(word)
    if viewed is None:
        return Face.of(made, None, about)
    # Torch has put the rows of all ranks together for a view that reaches over them, and made a copy.
    apart = _sharded(viewed) and not _sharded(made)
    return Face.of(made, _COPY if apart else viewed.writes, about)


def _sharded(seen: DTensor) -> bool:
    return any(placement.is_shard() for placement in seen._spec.placements)
