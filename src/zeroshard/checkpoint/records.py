"""Declares what a rank holds, as the checkpoint sees it: the whole seam between the runtime and this package.

The runtime describes its tensors as `HeldRows` records and itself as a `RunSnapshot`; saving reads rows
through `HeldRows.read`, loading writes rows through `HeldRows.write`. Nothing here knows about units, tiers
or process groups.

- **rows**: a range of dim 0 of a named tensor; a tensor without dims has one row.
- **kind**: what the tensor is. ``parameter`` and ``buffer`` are the model (one namespace); ``state:<key>`` is
  the optimizer's (``state:exp_avg``); ``rank:<r>`` belongs to rank r alone (its RNG); ``private:<r>:<key>``
  is what rank r had of its own about a tensor that all ranks have (a codec's residual; ``private:same:<key>``
  where all have the same); ``sync:<key>`` belongs to the policy by which the ranks meet.
- **span**: rows of one tensor that lie in one file.
- **block**: the rows of a span that share one checksum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch

from zeroshard.errors import CheckpointError
from zeroshard.kernels import raw
from zeroshard.params.sharded_param import GuardedState

# Bytes that move at once: what bounds memory while saving and loading (or one row, where a row is more).
CHUNK = 16 << 20

# Kinds whose absence is no error: they belong to one rank of one world size, or to one save.
OPTIONAL_KINDS = ("rank", "private", "sync", "value", "own")

# Element types: all that a checkpoint can hold, by our name, safetensors' code and torch's dtype.
_TABLE: tuple[tuple[str, str, torch.dtype], ...] = (
    ("bool", "BOOL", torch.bool),
    ("uint8", "U8", torch.uint8),
    ("int8", "I8", torch.int8),
    ("float8_e5m2", "F8_E5M2", torch.float8_e5m2),
    ("float8_e4m3fn", "F8_E4M3", torch.float8_e4m3fn),
    ("uint16", "U16", torch.uint16),
    ("int16", "I16", torch.int16),
    ("float16", "F16", torch.float16),
    ("bfloat16", "BF16", torch.bfloat16),
    ("uint32", "U32", torch.uint32),
    ("int32", "I32", torch.int32),
    ("float32", "F32", torch.float32),
    ("uint64", "U64", torch.uint64),
    ("int64", "I64", torch.int64),
    ("float64", "F64", torch.float64),
    ("complex64", "C64", torch.complex64),
)
CODE = {name: code for name, code, _ in _TABLE}
NAME_OF_CODE = {code: name for name, code, _ in _TABLE}
DTYPE = {name: dtype for name, _, dtype in _TABLE}
SIZE = {name: dtype.itemsize for name, _, dtype in _TABLE}
_NAME_OF_DTYPE = {dtype: name for name, _, dtype in _TABLE}


def dtype_name(dtype: torch.dtype) -> str:
    """Our name of a torch dtype, or an error for the few that safetensors cannot hold."""
    try:
        return _NAME_OF_DTYPE[dtype]
    except KeyError:
        raise CheckpointError(
            f"tensors of {dtype} cannot be stored; a checkpoint holds {', '.join(sorted(DTYPE))}. Convert "
            "it first."
        ) from None


def convertible(stored: str, wanted: str) -> bool:
    """Whether rows stored as one dtype may be loaded into another: between floats only, where rounding is
    understood."""
    return stored == wanted or (DTYPE[stored].is_floating_point and DTYPE[wanted].is_floating_point)


def height(shape: tuple[int, ...]) -> int:
    """Rows of a tensor of this shape; a tensor without dims has one."""
    return shape[0] if shape else 1


def row_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return prod(shape[1:]) * SIZE[dtype]


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The raw bytes of a tensor, in place where it lies contiguous in host memory."""
    return byte_view(raw(tensor.detach().to("cpu").contiguous())) if tensor.numel() else memoryview(b"")


def byte_view(flat: torch.Tensor) -> memoryview:
    """The memory of a one-dimensional uint8 tensor, to read and to write."""
    array: Any = flat.numpy()  # numpy's stubs do not say that an array is a buffer
    return memoryview(array)


@dataclass(frozen=True, slots=True)
class HeldRows:
    """This rank holds rows [start, stop) of a named tensor, wherever they rest.

    In memory they are `local`. Elsewhere `source(start, stop)` returns them (any device; shape ``(stop -
    start, *shape[1:])``, or ``()`` for a tensor without dims) and may reuse its memory at the next call, and
    `sink(start, rows)` stores rows (host memory, of `dtype`) and must have copied them when it returns. Both
    take row numbers of the whole tensor, and are called by one thread at a time. `owner` is who changes them
    other than in an optimizer's step, and waits for a background save before. `also` are other names of the
    same tensor, which foreign checkpoints may have it under: of tied weights.

    A model has thousands of them, so that rows in memory are one object and no closures.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    rows: tuple[int, int]
    source: Callable[[int, int], torch.Tensor] | None
    sink: Callable[[int, torch.Tensor], None] | None
    local: torch.Tensor | None = None
    owner: GuardedState | None = None
    also: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        name: str,
        kind: str,
        local: torch.Tensor,
        start: int = 0,
        total: int | None = None,
        owner: GuardedState | None = None,
    ) -> HeldRows:
        """Rows in memory: `local` is rows [start, start + len(local)) of a tensor with `total` rows."""
        shape = tuple(local.shape)
        count = shape[0] if shape else 1
        if total is not None and total != count and shape:
            shape = (total, *shape[1:])
        dtype = dtype_name(local.dtype)
        return cls(name, kind, shape, dtype, (start, start + count), None, None, local, owner)

    def read(self, first: int, last: int) -> torch.Tensor:
        """Rows [first, last) of those that this rank holds."""
        if self.source is not None:
            return self.source(first, last)
        local, (start, stop) = self.local, self.rows
        assert local is not None
        return (
            local if not self.shape or (first, last) == (start, stop) else local[first - start : last - start]
        )

    def write(self, first: int, rows: torch.Tensor) -> None:
        if self.sink is not None:
            self.sink(first, rows)
        else:
            with torch.no_grad():
                self.read(first, first + (rows.shape[0] if rows.dim() else 1)).copy_(rows)

    @property
    def place(self) -> torch.Tensor | None:
        """The memory of the rows where they rest in host memory as they are stored: loading reads straight
        into it, and calls `write` for the rest only."""
        local = self.local
        plain = (
            local is not None and self.sink is None and local.device.type == "cpu" and local.is_contiguous()
        )
        return local if plain else None

    @property
    def height(self) -> int:
        return height(self.shape)

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.shape, self.dtype)


@dataclass(frozen=True)
class RunSnapshot:
    """All that one rank wants saved, or wants loaded into.

    `values` is plain data (see `values.py`) and is the same on every rank: rank 0's is stored. `own` is this
    rank's alone; it comes back to the rank of that number. Tensors may stand anywhere in either, and in `own`
    also records of them, without a name. A background save copies tensors among the values at once, those
    among the own like all that is held. `parts` are values, by key and name, of which ranks may hold
    different ones: joined, they are stored among the values.
    """

    held: Sequence[HeldRows]
    values: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)


class SavePeers(Protocol):
    """How ranks talk while saving and loading. `exchange` is also the only barrier.

    A background save calls it from its own thread while training goes on, so it must not share a process
    group with the training collectives: give it a group or a store of its own. It raises when a rank does not
    answer.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def exchange(self, value: Any, what: str) -> list[Any]:
        """Everyone's value (JSON data) in rank order; `what` names the moment for a message about a rank that
        is missing."""
        ...


@dataclass(frozen=True)
class NoPeers:
    """The peers of a single rank."""

    rank: int = 0
    size: int = 1

    def exchange(self, value: Any, what: str) -> list[Any]:
        return [value]


@dataclass(frozen=True)
class SaveResult:
    """A finished save. `after_failure` says how the background save before it failed, if it did."""

    path: Path
    bytes: int
    seconds: float
    removed: tuple[Path, ...] = ()
    after_failure: str | None = None


@dataclass(frozen=True)
class LoadResult:
    """What a load brought: the values, this rank's own (None when the checkpoint has no such rank), and what
    did not match.

    `absent` are targets that kept what they had, as (kind, name); `unused` are stored tensors nobody wanted;
    `converted` are targets that were stored in another float dtype.
    """

    path: Path
    values: dict[str, Any]
    own: dict[str, Any] | None
    world: int
    absent: tuple[tuple[str, str], ...] = ()
    unused: tuple[tuple[str, str], ...] = ()
    converted: tuple[tuple[str, str], ...] = ()


def namespace(kind: str) -> str:
    """Where a name stands for one tensor: parameters and buffers share a namespace, as in a state dict."""
    return "model" if kind in ("parameter", "buffer") else kind


def optional(kind: str) -> bool:
    return kind.split(":", 1)[0] in OPTIONAL_KINDS
