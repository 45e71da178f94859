"""Shows sharded parameters to the user: a DTensor that answers for the whole tensor on every rank.

Torch takes norms, sums and extremes rank by rank and leaves the result pending, to be put together when it is
used in a computation. Two things go wrong with that:

- `float(p.grad.norm())`, or of a clipped norm that is the largest of all values, reads this rank's part of it
  without a word.
- A rank without a row of a tensor has no largest value of it, and fails alone.

The subclass also tells what torch would keep to itself: that a loop has written a parameter, by whatever
name, and what a collective is for (`rank_reads`)."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import current_thread, main_thread
from typing import Any, Self

import torch
from torch import nn
from torch._C import _current_graph_task_id
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim import optimizer
from torch.utils import _foreach_utils

from zeroshard.errors import RankError, StateError
from zeroshard.layout.sharding import ShardSpec

from .dispatch_rules import be_asked
from .dtensor_lists import gathered, of_lists
from .rank_reads import ReadSubject, joined, number_in, word_for
from .write_versions import COPY, WriteVersions

_aten = torch.ops.aten
_NORMS = {_aten.linalg_vector_norm.default, _aten._foreach_norm.Scalar}
_EXTREMES = {
    _aten.max.default: -math.inf,
    _aten.amax.default: -math.inf,
    _aten.min.default: math.inf,
    _aten.amin.default: math.inf,
}
# Never communicate of themselves. A stack of pending norms, as clipping makes it, is pending.
_LOCAL = {_aten.detach.default, _aten.alias.default, _aten.stack.default, _aten._to_copy.default}
_SUMS = {_aten.sum.default, _aten.sum.dim_IntList}
# Never look at what stands in other rows, beside those that torch itself calls pointwise.
_BY_ELEMENT = {
    *("_to_copy", "bernoulli_", "clone", "copy_", "empty_like", "fill_", "full_like", "lift_fresh"),
    *("masked_fill", "masked_fill_", "native_dropout", "ones_like", "rand_like", "randn_like"),
    *("zero_", "zeros_like"),
}
# What they compute along their dims is of one row, unless the rows' own is among these.
_ALONG = {
    *("linalg_vector_norm", "sum", "amax", "amin", "max", "min", "mean", "var", "std", "logsumexp", "prod"),
    *("_softmax", "_log_softmax", "cumsum", "cumprod", "argmax", "argmin", "any", "all", "sort", "topk"),
    *("median", "norm"),
}
# Views that leave rows alone unless they are of the rows' own dim: where that stands among the arguments.
_BESIDE_ROWS = {"slice": 1, "select": 1, "split": 2, "split_with_sizes": 2, "unbind": 1, "unsqueeze": 1}
_MOVED = {"t", "transpose", "permute"}  # torch knows where the rows are then
_TORCH_S_OWN = {_aten.is_pinned.default, _aten.set_.source_Tensor}


class ShardedDTensor(DTensor):
    """What the user sees of a tensor that lies in rows on the ranks, and what torch makes of it.

    Both of torch's hooks are replaced: DTensor's own are for no subclass in some versions.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    __slots__ = ("about", "division", "writes")
    division: ShardSpec | None  # of its dim 0 among the ranks; None where it has no rows of its own
    writes: WriteVersions | None  # of parameters, and of views of them
    about: ReadSubject | None

    @staticmethod
    def of(
        seen: DTensor,
        writes: WriteVersions | None = None,
        about: ReadSubject | None = None,
        division: ShardSpec | None = None,
    ) -> ShardedDTensor:
        known = division or _chunks_of(seen)
        return ShardedDTensor.made(
            seen._local_tensor, seen._spec, writes, about, known, requires_grad=seen.requires_grad
        )

    @staticmethod
    def made(
        local: torch.Tensor,
        spec: DTensorSpec,
        writes: WriteVersions | None,
        about: ReadSubject | None,
        division: ShardSpec | None,
        requires_grad: bool = False,
    ) -> ShardedDTensor:
        """Of these rows; `spec` says what they are of."""
        made: ShardedDTensor = ShardedDTensor(local, spec, requires_grad=requires_grad)
        made.writes, made.about, made.division = writes, about, division
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        """`__new__` has done it: torch's own takes as long again."""

    @property
    def plain(self) -> DTensor:
        """Torch's own of the same rows."""
        return DTensor(self._local_tensor, self._spec, requires_grad=False)

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

    @property
    def placements(self) -> tuple[Placement, ...]:
        """As torch would take them at their word."""
        if self.uneven:
            raise StateError(
                f"a sharded tensor of shape {tuple(self.shape)} has no placements: its rows are not divided "
                "as DTensor assumes (split= level or whole, and optimizers that need whole matrices). Read "
                "it by .full_tensor() or run.gathered(), save by run.save() or run.full_state_dict()."
            )
        return self._spec.placements

    @property
    def uneven(self) -> bool:
        """Whether its rows are no chunks as torch makes them."""
        division = getattr(self, "division", None)
        return division is not None and not division.chunked

    def untyped_storage(self) -> Any:
        """Asked for by what saves memory as it lies there."""
        raise StateError(
            f"a sharded tensor of shape {tuple(self.shape)} has no memory of its own: each rank has rows of "
            "it. For safetensors and other savers of whole tensors call run.full_state_dict(rank=0) on every "
            "rank, and save what rank 0 gets."
        )

    def storage(self) -> Any:
        """As `untyped_storage`."""
        return self.untyped_storage()

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor, on every rank. Gradients that come back through it are averaged over the ranks,
        as those of parameters are."""
        return _Whole.apply(self)  # type: ignore[no-any-return, no-untyped-call]

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> DTensor:
        """As torch's own, where its rows are chunks or all of it is asked for."""
        before, after = self._spec.placements, tuple(placements or ())
        if self.uneven and before != after:
            if not all(placement.is_replicate() for placement in after):
                self.placements  # noqa: B018 (which says that it has none)
            whole = _Whole.apply(self)  # type: ignore[no-untyped-call]
            return DTensor.from_local(whole, self.device_mesh, after, run_check=False)
        if before != after and not all(placement.is_replicate() for placement in before):
            whole = all(placement.is_replicate() for placement in after)
            self.compare("full_tensor" if whole else "redistribute")
        return super().redistribute(device_mesh, placements, **options)

    def compare(self, word: str) -> None:
        """Before torch communicates."""
        about = getattr(self, "about", None)
        if about is not None:
            about.readings.compare(about, word)

    def settled(self) -> DTensor:
        """Its values put together, where every rank has a part of each. Every rank calls it."""
        if not _pending(self):
            return self.plain
        self.compare("item")
        with torch.no_grad():
            return self.plain.redistribute(placements=[Replicate()] * len(self._spec.placements))

    def settled_rows(self) -> torch.Tensor:
        """As torch puts them together, where it has divided them."""
        placements = [Replicate()] * self.device_mesh.ndim
        return self.plain.redistribute(placements=placements)._local_tensor

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
        if DTensor in types:
            args, kwargs = _faced(args), {name: _faced(one) for name, one in (kwargs or {}).items()}
        if func._schema.is_mutable:
            for writes, dtensor in _sharded_params(args[:1]):
                writes.coming(dtensor._local_tensor)
                if type(args[0]) is list:
                    increment_version(dtensor)  # torch counts what is done to lists of its own tensors only
        if not func.is_view:
            for writes, _ in _sharded_params(args):
                writes.read()
        learns = torch.is_grad_enabled() and any(f.requires_grad for _, f in _sharded_tensors(args))
        try:
            with torch.no_grad():
                made = computed(func, args, kwargs or {})
                if (
                    type(made) is ShardedDTensor
                    and _pending(made)
                    and (learns or made.dim())
                    and func not in _LOCAL
                ):
                    made = _as_whole(whole_of(made, "item"), made, made.about)
        except RankError:
            raise
        except RuntimeError as error:
            raise _explained(error) from error
        if func._schema.is_mutable and made is not None:
            return args[0]  # what it was called on
        return made

    def __float__(self) -> float:
        return float(number_in(self))

    def __int__(self) -> int:
        return int(number_in(self))

    def __index__(self) -> int:
        return operator.index(number_in(self))

    def __bool__(self) -> bool:
        return bool(number_in(self))

    def __complex__(self) -> complex:
        return complex(number_in(self))

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    @property
    def rows_of(self) -> tuple[int, int, int, int] | None:
        """Which rank has it, of how many, and from which row to before which."""
        if self.division is None:
            return None
        rank = self.device_mesh.get_local_rank()
        return (rank, self.division.world, *self.division.rows(rank))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Files need not know of this class; what they hold says which rows it is. All ranks save theirs:
        those of one are no state."""
        about = getattr(self, "about", None)
        if about is not None and _sharded(self) and current_thread() is main_thread():
            try:
                self.compare("torch.save")
            except RankError as error:
                raise RankError(
                    f"{error} What one rank saves of a sharded tensor are its own rows: for one file with "
                    "all of them call run.full_state_dict(rank=0) on every rank, and save what rank 0 gets."
                ) from None
        known = DTensor(self._local_tensor, self._spec, requires_grad=self.requires_grad)
        if self.rows_of is not None:
            known.__dict__["rows_of"] = self.rows_of
        return known.__reduce_ex__(protocol)


# Lists of them are clipped in one call, as lists of DTensors are.
for _known in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
    _known.append(ShardedDTensor)


def dtensor_of(
    local: torch.Tensor,
    spec: DTensorSpec,
    writes: WriteVersions | None,
    about: ReadSubject | None,
    division: ShardSpec | None,
) -> ShardedDTensor:
    """A sharded DTensor of these rows."""
    made = ShardedDTensor.made(local, spec, writes, about, division)
    be_asked(made)
    return made


def parameter_of(shown: torch.Tensor, requires_grad: bool) -> nn.Parameter:
    """What is shown as a parameter, in place: torch would make a second one of it."""
    if type(shown) is not ShardedDTensor:
        return nn.Parameter(shown, requires_grad=requires_grad)
    torch.Tensor.requires_grad.__set__(shown, requires_grad)  # type: ignore[attr-defined]
    shown._is_param = True
    return shown  # type: ignore[return-value]


def _neutral(func: Any, first: Any = None, *rest: Any) -> float | None:
    """What a row may hold without changing the result, where rows are reduced and none would be an error."""
    if func in _NORMS:
        kind, dim = rest[0] if rest else 2, rest[1] if len(rest) > 1 else None
        dim = None if type(first) is list else dim  # of lists: their norms' dtype
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


def _sharded_params(args: Any) -> Iterator[tuple[WriteVersions, ShardedDTensor]]:
    """Of the sharded parameters, and views of them, among what a function is called on."""
    for given in args:
        for item in given if type(given) in (list, tuple) else (given,):
            if type(item) is ShardedDTensor and item.writes is not None:
                yield item.writes, item


# ---------------------------------------------------------------------- what computes


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operation makes of sharded DTensors. Rows remain rows where no row looks at another; sums,
    norms and extremes over them are put together from those of the ranks; for all else all ranks put the
    whole tensors together first, and what is made of them is plain. What is written in place is done so by
    each rank in its rows."""
    if args and type(args[0]) is list:
        found = _of_lists(func, args, kwargs)
        if found is not None:
            return found[0]
    sharded_tensors = [dtensor for _, dtensor in _sharded_tensors((args, list(kwargs.values())))]
    if func is _aten._local_scalar_dense.default:
        return func(whole_of(args[0], "item"))
    if func is _aten.is_same_size.default:
        return args[0].shape == args[1].shape
    kept = _kept(func, args, kwargs, sharded_tensors)
    if kept is not None:
        return kept[0]
    if _foreign(args, kwargs) and not _in_backward():
        raise RuntimeError(f"{func} got mixed torch.Tensor and DTensor")
    return _of_wholes(func, args, kwargs)


def _kept(
    func: Any, args: Any, kwargs: dict[str, Any], sharded_tensors: list[ShardedDTensor]
) -> tuple[Any] | None:
    """What is made without whole tensors; None where these are needed."""
    first = args[0] if args else None
    if type(first) is list or func in _TORCH_S_OWN:
        return (_by_torch(func, args, kwargs),) if _lists_suit(func, args) else None
    if type(first) is ShardedDTensor and _pending(first):
        return (_by_torch(func, args, kwargs),) if func in _LOCAL else None
    rows = [dtensor for dtensor in sharded_tensors if dtensor.division is not None]
    if not rows:
        alike = func.is_view or func is _aten.clone.default  # a number's copy, too, as copy.deepcopy wants it
        suits = alike and not any(map(_elsewhere, sharded_tensors))
        return (_by_torch(func, args, kwargs),) if suits else None
    name, division = word(func), rows[0].division
    assert division is not None
    alone = isinstance(first, ShardedDTensor) and first.division is not None
    if alone and func.is_view:
        return _view(func, args, kwargs)
    if torch.Tag.nondeterministic_seeded in func.tags and alone and division.chunked:
        return (_by_torch(func, args, kwargs),)
    if torch.Tag.nondeterministic_seeded in func.tags:
        return None
    if torch.Tag.pointwise in func.tags or name in _BY_ELEMENT:
        return _by_element(func, args, kwargs, rows, division)
    if not isinstance(first, ShardedDTensor) or not alone or len(sharded_tensors) > 1:
        return None
    dims = _dims_of(func, args, kwargs)
    if name in _ALONG and dims and 0 not in dims and -first.dim() not in dims:
        return (_as_rows(func(first._local_tensor, *args[1:], **kwargs), first, division),)
    return _put_together(func, name, args, kwargs, first)


def word(func: Any) -> str:
    name: str = func._schema.name.partition("::")[2]
    return name


def _in_backward() -> bool:
    return _current_graph_task_id() != -1


def _of_lists(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any] | None:
    """What each rank makes of lists without asking torch; see `dtensor_lists`."""
    first, *others = args

    def by_torch(some: list[Any]) -> DTensor:
        norms = func in _NORMS  # torch 2.15 fails at their dtype, which changes nothing of how they lie
        shown = _by_torch(func, (some, *(others[:1] if norms else others)), {} if norms else kwargs)
        return shown[0] if type(shown) in (list, tuple) else shown  # type: ignore[no-any-return]

    found = of_lists(func, args, kwargs, by_torch)
    if found is None or func._schema.is_mutable:
        return None if found is None else (None,)
    word = word_for(func)
    if func is _aten.stack.default:
        ((local, spec),), about = found, _about(args)
        return (ShardedDTensor.made(local, spec, None, about and about.by(word), None),)
    made = []
    for (local, spec), one in zip(found, first, strict=True):
        division, about = one.division, one.about
        if spec.placements[0].is_partial():
            division, about = None, about and about.by(word)
        made.append(ShardedDTensor.made(local, spec, None, about, division))
    return (made,)


def _lists_suit(func: Any, args: Any) -> bool:
    """Whether lists are torch's affair: of rows element by element, and of what is pending."""
    if func is not _aten.stack.default:
        return func is not _aten.cat.default
    return not any(type(one) is not ShardedDTensor or one.division is not None for one in args[0])


def _view(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any]:
    """Other names of the same rows; a copy where a view reaches over them."""
    first, name = args[0], word(func)
    if func in _LOCAL:
        return (_by_torch(func, args, kwargs),)
    if name in _BESIDE_ROWS:
        given = kwargs.get("dim", args[_BESIDE_ROWS[name]] if len(args) > _BESIDE_ROWS[name] else 0)
        if isinstance(given, int) and given % (first.dim() + (name == "unsqueeze")):
            made = func(first._local_tensor, *args[1:], **kwargs)
            return (_as_rows(made, first, first.division, first.writes),)
    elif first.division.chunked and name in _MOVED:
        return (_by_torch(func, args, kwargs),)
    whole = whole_of(first, word_for(func))
    copy = DTensor.from_local(whole, first.device_mesh, [Replicate()], run_check=False)
    return (_shown(func(copy, *args[1:], **kwargs), func, args),)


def _by_element(
    func: Any, args: Any, kwargs: dict[str, Any], rows: list[ShardedDTensor], division: ShardSpec
) -> tuple[Any] | None:
    """On this rank's rows of all tensors; None where some are divided otherwise."""
    dims = max(dtensor.dim() for dtensor in rows)
    like = next(dtensor for dtensor in rows if dtensor.dim() == dims)
    if any(dtensor.division != division or dtensor.dim() != dims for dtensor in rows):
        return None
    if func._schema.is_mutable and not (type(args[0]) is ShardedDTensor and args[0].division is not None):
        return None
    if _in_backward() and any(
        type(tensor) is not ShardedDTensor for tensor in _tensors((args, list(kwargs.values())))
    ):
        return None  # a gradient of this rank alone: all of it is needed, to be averaged over the ranks
    start, stop = division.rows(like.device_mesh.get_local_rank())

    def part(value: Any) -> Any:
        if type(value) is ShardedDTensor:
            if value.division is not None:
                return value._local_tensor
            value = whole_of(value, word_for(func))
            if value.dim() == dims and value.shape[0] == division.height:
                return value[start:stop]
        return value

    given = [list(map(part, one)) if type(one) is list else part(one) for one in args]
    others = {name: part(value) for name, value in kwargs.items()}
    plain = [
        tensor for tensor in _tensors((args, list(kwargs.values()))) if type(tensor) is not ShardedDTensor
    ]
    if any(tensor.numel() != 1 for tensor in plain):
        return None
    if any(dtensor.dim() > dims for _, dtensor in _sharded_tensors((args, list(kwargs.values())))):
        return None
    made = func(*given, **others)
    return (args[0] if func._schema.is_mutable else _as_rows(made, like, division),)


def _dims_of(func: Any, args: Any, kwargs: dict[str, Any]) -> list[int]:
    for number, argument in enumerate(func._schema.arguments):
        if argument.name == "dim":
            given = kwargs.get("dim", args[number] if len(args) > number else argument.default_value)
            return [given] if isinstance(given, int) else list(given or ())
    return []


def _put_together(
    func: Any, name: str, args: Any, kwargs: dict[str, Any], first: ShardedDTensor
) -> tuple[Any] | None:
    """Over all rows, from what the ranks make of theirs."""
    if name == "mean" and not first.is_complex() and first.is_floating_point():
        dims = _dims_of(func, args, kwargs) or list(range(first.dim()))
        keep = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
        summed = computed(_aten.sum.dim_IntList, (first, dims, keep), kwargs)
        count = math.prod(first.shape[dim] for dim in dims)
        return (_as_whole(whole_of(summed, "mean") / count, first, first.about),)
    if func is _aten.count_nonzero.default:
        own = func(first._local_tensor)
        meta = TensorMeta(own.shape, own.stride(), own.dtype)
        spec = DTensorSpec(first.device_mesh, (Partial("sum"),), tensor_meta=meta)
        return (_shown(DTensor(own, spec, requires_grad=False), func, args),)
    if func in _NORMS or func in _EXTREMES or func in _SUMS:
        return (_by_torch(func, args, kwargs),)
    return None


def _of_wholes(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """By every rank, of the whole tensors."""
    known: dict[int, torch.Tensor] = {}

    def whole(value: Any) -> Any:
        if type(value) is ShardedDTensor:
            if id(value) not in known:
                known[id(value)] = whole_of(value, word_for(func))
            return known[id(value)]
        return [whole(one) for one in value] if type(value) in (list, tuple) else value

    given = [whole(value) for value in args]
    made = func(*given, **{name: whole(value) for name, value in kwargs.items()})
    first = args[0] if args else None
    if func._schema.is_mutable and type(first) is ShardedDTensor:
        _take_back(first, given[0])
        return first
    tensors = list(_tensors((args, list(kwargs.values()))))
    if any(type(tensor) is not ShardedDTensor and tensor.numel() != 1 for tensor in tensors):
        return made
    like = next(tensor for tensor in tensors if type(tensor) is ShardedDTensor)
    return _as_whole(made, like, like.about)


def _as_whole(made: Any, like: ShardedDTensor, about: ReadSubject | None) -> Any:
    """What all ranks have alike, as sharded DTensors; numbers are plain."""
    if type(made) in (list, tuple):
        return type(made)([_as_whole(one, like, about) for one in made])
    if type(made) is not torch.Tensor or not made.dim():
        return made
    whole = DTensor.from_local(made, like.device_mesh, [Replicate()], run_check=False)
    return ShardedDTensor.of(whole, None, about)


def _take_back(dtensor: ShardedDTensor, whole: torch.Tensor) -> None:
    """What was written into the whole tensor, in this rank's rows."""
    if dtensor.division is not None:
        start, stop = dtensor.division.rows(dtensor.device_mesh.get_local_rank())
        dtensor._local_tensor.copy_(whole[start:stop])
    elif whole is not dtensor._local_tensor:
        dtensor._local_tensor.copy_(whole)
        dtensor._spec = DTensorSpec(
            dtensor.device_mesh, (Replicate(),), tensor_meta=dtensor._spec.tensor_meta
        )


def whole_of(dtensor: Any, word: str) -> torch.Tensor:
    """All of it, plain. Every rank calls it."""
    if type(dtensor) is not ShardedDTensor:
        return dtensor  # type: ignore[no-any-return]
    if _pending(dtensor):
        return dtensor.settled()._local_tensor
    if not _sharded(dtensor):
        return dtensor._local_tensor
    dtensor.compare(word)
    if dtensor.division is None:
        apart: torch.Tensor = dtensor.settled_rows()
        return apart
    return gathered(dtensor, dtensor.division)


class _Whole(torch.autograd.Function):
    """A gradient is whole, too: the hooks of sharded parameters (`run.hooks`) take it from there."""

    @staticmethod
    def forward(ctx: Any, dtensor: ShardedDTensor) -> torch.Tensor:
        whole = whole_of(dtensor, "full_tensor")
        return whole.clone() if whole is dtensor._local_tensor else whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


def _as_rows(
    made: Any, like: ShardedDTensor, division: ShardSpec, writes: WriteVersions | None = None
) -> Any:
    """Rows that were made of rows, as sharded DTensors."""
    if type(made) in (list, tuple):
        return type(made)([_as_rows(one, like, division, writes) for one in made])
    if not isinstance(made, torch.Tensor):
        return made
    shape = torch.Size((division.height, *made.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(like.device_mesh, (Shard(0),), tensor_meta=TensorMeta(shape, stride, made.dtype))
    return ShardedDTensor.of(DTensor(made, spec, requires_grad=False), writes, like.about, division)


def _faced(value: Any) -> Any:
    """Torch's own DTensors as sharded DTensors: such as a file has, and those of the loop."""
    if type(value) is DTensor:
        return ShardedDTensor.of(value)
    return type(value)(map(_faced, value)) if type(value) in (list, tuple) else value


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif type(value) in (list, tuple):
            yield from _tensors(value)


def _sharded_tensors(values: Any) -> Iterator[tuple[int, ShardedDTensor]]:
    for number, tensor in enumerate(_tensors(values)):
        if type(tensor) is ShardedDTensor:
            yield number, tensor


def _foreign(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether there are plain tensors beside sharded DTensors."""
    tensors = list(_tensors((args, list(kwargs.values()))))
    return any(type(tensor) is not ShardedDTensor and tensor.numel() != 1 for tensor in tensors)


def _elsewhere(dtensor: ShardedDTensor) -> bool:
    """Divided, and not by rows: torch made it so."""
    return _sharded(dtensor) or _pending(dtensor)


def _chunks_of(seen: DTensor) -> ShardSpec | None:
    """How torch itself divides rows."""
    spec = seen._spec
    if len(spec.placements) == 1 and type(spec.placements[0]) is Shard and spec.placements[0].dim == 0:
        return ShardSpec("", (spec.shape[0],), spec.mesh.size())
    return None


def _by_torch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    neutral = _neutral(func, *args)
    plain = [_plain(value, neutral) for value in args]
    given = {name: _plain(value, None) for name, value in kwargs.items()}
    with nullcontext() if _stays_here(func, plain) else _heeded(_about(args), word_for(func)):
        return _shown(func(*plain, **given), func, args)


def _plain(given: Any, neutral: float | None) -> Any:
    if type(given) is ShardedDTensor:
        return given.plain if neutral is None else given.with_a_row(neutral)
    return [_plain(item, neutral) for item in given] if type(given) is list else given


def _about(args: Any) -> ReadSubject | None:
    """What a function is called on: its first argument that tells, or all of a list."""
    for given in args:
        if type(given) is ShardedDTensor and given.about is not None:
            return given.about
        if type(given) in (list, tuple):
            items = [item for item in given if isinstance(item, DTensor)]
            found = joined([getattr(item, "about", None) for item in items])
            if found is not None:
                return found
    return None


def _heeded(about: ReadSubject | None, word: str) -> AbstractContextManager[object]:
    return nullcontext() if about is None else about.readings.heeded(about, word)


def _stays_here(func: Any, args: Any) -> bool:
    """Whether torch surely computes rank by rank: all rows alike, and nothing pending. Of lists the first
    element is looked at."""
    if func in _LOCAL or func is _aten.equal.default:
        return func in _LOCAL
    firsts = [given[0] if type(given) is list and given else given for given in args]
    sharded_tensors = [given for given in firsts if isinstance(given, DTensor)]
    if any(map(_pending, sharded_tensors)):
        return False
    if func in _NORMS or func in _EXTREMES or func in _SUMS:
        return True
    alike = len({dtensor.shape for dtensor in sharded_tensors if _sharded(dtensor)}) <= 1
    return alike and (torch.Tag.pointwise in func.tags or func._schema.name.startswith("aten::_foreach_"))


def _pending(seen: DTensor) -> bool:
    """Whether ranks hold parts of its values. Called thousands of times where a model is clipped."""
    for placement in seen._spec.placements:
        if placement.is_partial():
            return True
    return False


def _shown(made: Any, func: Any, args: Any) -> Any:
    """What torch made as sharded DTensors. Lists are made of lists: each of its own."""
    viewed = args[0] if func.is_view and type(args[0]) is ShardedDTensor else None
    word = word_for(func)
    if type(made) is DTensor:
        return _shown_one(made, args[0], viewed, _about(args), word)
    if type(made) not in (list, tuple):
        return made
    if args and type(args[0]) is list and len(args[0]) == len(made):
        of, abouts = args[0], [getattr(item, "about", None) for item in args[0]]
    else:
        of, abouts = [args[0]] * len(made), [_about(args)] * len(made)
    if viewed is None and made and type(made[0]) is DTensor and _pending(made[0]):
        abouts = [about and about.by(word) for about in abouts]
    threes = zip(made, of, abouts, strict=True)
    return type(made)([_shown_one(item, one, viewed, about, "") for item, one, about in threes])


def _shown_one(
    made: Any, of: Any, viewed: ShardedDTensor | None, about: ReadSubject | None, word: str
) -> Any:
    if type(made) is not DTensor:
        return made
    if word and about is not None and _pending(made):
        about = about.by(word)
    division = of.division if type(of) is ShardedDTensor and _sharded(made) else None
    if division is not None and (made.dim() == 0 or made.shape[0] != division.height):
        division = None
    if viewed is None:
        return ShardedDTensor.of(made, None, about, division)
    # Torch has put the rows of all ranks together for a view that reaches over them, and made a copy.
    apart = _sharded(viewed) and not _sharded(made)
    return ShardedDTensor.of(made, COPY if apart else viewed.writes, about, division)


def _sharded(seen: DTensor) -> bool:
    return any(placement.is_shard() for placement in seen._spec.placements)
