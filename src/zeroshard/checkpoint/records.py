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
from pathlib import Path
from typing import Any, Protocol

import torch

from zeroshard.params.sharded_param import GuardedState

from .dtypes import dtype_name, height, row_bytes

# Bytes that move at once: what bounds memory while saving and loading (or one row, where a row is more).
CHUNK = 16 << 20

# Kinds whose absence is no error: they belong to one rank of one world size, or to one save.
OPTIONAL_KINDS = ("rank", "private", "sync", "value", "own")


@dataclass(frozen=True, slots=True)
class _MemoryRows:
    """Rows from `start` on, in memory."""

    local: torch.Tensor
    start: int

    def read(self, first: int, last: int) -> torch.Tensor:
        return self.local[first - self.start : last - self.start] if self.local.dim() else self.local

    def write(self, first: int, rows: torch.Tensor) -> None:
        with torch.no_grad():
            self.read(first, first + (rows.shape[0] if rows.dim() else 1)).copy_(rows)


@dataclass(frozen=True, slots=True)
class HeldRows:
    """This rank holds rows [start, stop) of a named tensor, wherever they rest.

    `read(start, stop)` returns those rows (any device; shape ``(stop - start, *shape[1:])``, or ``()`` for a
    tensor without dims) and may reuse its memory at the next call. `write(start, rows)` stores rows (host
    memory, of `dtype`) and must have copied them when it returns. Both take row numbers of the whole tensor,
    and are called by one thread at a time. `place` is the memory of the rows themselves where they rest in
    host memory as they are stored: then loading reads straight into it, and calls `write` for the rest only.
    `owner` is who changes them other than in an optimizer's step, and waits for a background save before.
    `also` are other names of the same tensor, which foreign checkpoints may have it under: of tied weights.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    rows: tuple[int, int]
    read: Callable[[int, int], torch.Tensor]
    write: Callable[[int, torch.Tensor], None]
    place: torch.Tensor | None = None
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
        count = local.shape[0] if local.dim() else 1
        shape = (total if total is not None else count, *local.shape[1:]) if local.dim() else ()
        plain = local.device.type == "cpu" and local.is_contiguous() and bool(local.dim())
        rows, there = (start, start + count), _MemoryRows(local, start)
        dtype, place = dtype_name(local.dtype), local if plain else None
        return cls(name, kind, tuple(shape), dtype, rows, there.read, there.write, place, owner)

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


def slot(kind: str, name: str) -> tuple[str, str]:
    """The key by which tensors are matched: parameters and buffers share a namespace, as in a state dict."""
    return ("model" if kind in ("parameter", "buffer") else kind, name)


def optional(kind: str) -> bool:
    return kind.split(":", 1)[0] in OPTIONAL_KINDS
