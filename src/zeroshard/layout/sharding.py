"""Decides who owns which rows of a tensor, and where they lie in a buffer. Integers only.

A *slot* is one tensor's place. A *pack* is several slots that travel together; one rank's rows of them, one
after another, are its *shard*; the shards of all ranks in rank order make a *wire*. The same slots laid out
whole make a *full* buffer."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from heapq import heappush, heapreplace
from itertools import accumulate, groupby, pairwise
from math import prod
from typing import Any, Literal, TypeVar, overload

ALIGN = 16  # elements: 32 bytes or more, what vector loads and GPU matrix units ask of an address
# Elements from which on tensors are gathered by an operation of their own. For weights of 2**20 it took NCCL
# over sockets a fifth longer than one operation for a unit; what is larger than this fills the stage.
STRAIGHT = 2**24

Split = Literal["rows", "level", "whole", "copy"]
T = TypeVar("T")


def aligned(numel: int, to: int = ALIGN) -> int:
    return -(-numel // to) * to


@dataclass(frozen=True)
class ShardSpec:
    """One tensor and how its rows (its dim 0) are divided among `world` ranks.

    - ``rows``: even chunks as `torch.chunk` makes them; the last ranks may have fewer rows or none.
    - ``level``: no rank has more than one row more than another; the ranks that do follow one another from
      `owner` on, so that over many tensors all ranks have the same.
    - ``whole``: all rows on rank `owner`, for optimizers that need whole matrices.
    - ``copy``: all rows on every rank: tensors without a dim 0, or a world of one.

    >>> ShardSpec("w", (5, 3), 2).rows(1)
    (3, 5)
    """

    name: str
    shape: tuple[int, ...]
    world: int
    split: Split = "rows"
    owner: int = 0

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def height(self) -> int:
        return self.shape[0] if self.shape else 1

    @cached_property
    def row(self) -> int:
        """The number of elements in one row."""
        return prod(self.shape[1:])

    def rows(self, rank: int) -> tuple[int, int]:
        """The first row of `rank` and the one after its last."""
        if self.split == "copy":
            return 0, self.height
        if self.split == "whole":
            return (0, self.height) if rank == self.owner else (self.height, self.height)
        if self.split == "level":
            return self._level_start(rank), self._level_start(rank + 1)
        chunk = -(-self.height // self.world)
        return min(rank * chunk, self.height), min((rank + 1) * chunk, self.height)

    def _level_start(self, rank: int) -> int:
        """`rank` times the rows that all have, and one for each rank before it that has one more."""
        each, more = divmod(self.height, self.world)
        beyond = max(self.owner + more - self.world, 0)  # those ranks may begin again at 0
        before = min(rank, beyond) + min(max(rank - self.owner, 0), more - beyond)
        return rank * each + before

    @property
    def chunked(self) -> bool:
        """Whether every rank has what `torch.chunk` would give it."""
        even = self.split == "level" and self.height % self.world == 0
        return even or self.split in ("rows", "copy")

    @cached_property
    def division(self) -> ShardSpec | None:
        """How dim 0 of it is divided, and of all that has the same rows; None where every rank has all."""
        if self.split == "copy":
            return None
        alike = self.chunked
        return _division(self.height, self.world, "rows" if alike else self.split, 0 if alike else self.owner)

    @property
    def by_rows(self) -> bool:
        """Whether several ranks have some of it."""
        return self.split in ("rows", "level")

    @property
    def straight(self) -> bool:
        """Whether shards of all ranks, one after another, are the tensor, so that between GPUs they can be
        gathered straight to their place. They begin at multiples of 16 bytes, as NCCL likes it."""
        large = self.numel >= STRAIGHT and self.by_rows
        return large and self.height % self.world == 0 and self.most % 8 == 0

    @property
    def most(self) -> int:
        """Elements that the rank with most of it owns."""
        each = 1 if self.split in ("copy", "whole") else self.world
        return -(-self.height // each) * self.row

    def held(self, rank: int) -> int:
        """Elements of this tensor that `rank` owns."""
        if self.split == "level":
            each, more = divmod(self.height, self.world)
            return (each + ((rank - self.owner) % self.world < more)) * self.row
        start, stop = self.rows(rank)
        return (stop - start) * self.row

    def edges(self) -> tuple[int, ...]:
        """The ranks, some of them perhaps beyond the last, that may own more or less than the rank before."""
        if self.split == "copy" or not self.height:
            return ()
        if self.split == "whole":
            return self.owner, self.owner + 1
        if self.split == "level":
            more = self.height % self.world
            return (self.owner, (self.owner + more) % self.world) if more else ()
        full, over = divmod(self.height, -(-self.height // self.world))
        return (full, full + 1) if over else (full,)

    @property
    def reduced(self) -> ShardSpec:
        """How its gradient is divided: by rows, also where every rank keeps the parameter whole (stage 0)."""
        copies = self.split == "copy" and bool(self.shape) and self.world > 1
        return replace(self, split="rows") if copies else self

    def local_shape(self, rank: int) -> tuple[int, ...]:
        start, stop = self.rows(rank)
        return (stop - start, *self.shape[1:]) if self.shape else ()


@lru_cache(4096)
def _division(height: int, world: int, split: Split, owner: int) -> ShardSpec:
    """One for all tensors that are divided alike: models have thousands."""
    return ShardSpec("", (height,), world, split, owner)


class ByRank(Sequence[T]):
    """Something of every rank, made when it is asked for, and kept from then on.

    >>> squares = ByRank(10_000, lambda rank: rank * rank)
    >>> squares[3], squares[-1], squares[1:3]
    (9, 99980001, [1, 4])
    """

    def __init__(self, world: int, make: Callable[[int], T]) -> None:
        self._ranks, self._make = range(world), make
        self._made: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[T]:
        return map(self._of, self._ranks)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self._of(rank) for rank in self._ranks[index]]
        return self._of(self._ranks[index])

    def _of(self, rank: int) -> T:
        if rank not in self._made:
            self._made[rank] = self.made(rank)
        return self._made[rank]

    def made(self, rank: int) -> T:
        """That of one rank, not kept."""
        return self._make(rank)


@dataclass(frozen=True)
class RankRun:
    """Neighbouring ranks, start to stop, that have `each` elements."""

    start: int
    stop: int
    each: int

    def __len__(self) -> int:
        return self.stop - self.start


class RankLengths(tuple[int, ...]):
    """Elements that every rank has of something. What takes a look at all ranks is found once: they may be
    thousands, and it is asked for with every exchange.

    >>> RankLengths((4, 4, 2)).total
    10
    """

    @cached_property
    def total(self) -> int:
        return sum(self)

    @cached_property
    def most(self) -> int:
        return max(self)

    @cached_property
    def even(self) -> bool:
        """Whether all ranks own equally many elements."""
        return min(self) == self.most

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each rank's begin, one after another."""
        return tuple(accumulate(self[:-1], initial=0))

    @cached_property
    def runs(self) -> tuple[RankRun, ...]:
        """All ranks, as few runs as can be."""
        counted = [(each, len(list(ranks))) for each, ranks in groupby(self)]
        ends = accumulate(count for _, count in counted)
        return tuple(
            RankRun(end - count, end, each) for (each, count), end in zip(counted, ends, strict=True)
        )

    @classmethod
    def of(cls, lengths: Sequence[int]) -> RankLengths:
        return lengths if isinstance(lengths, RankLengths) else cls(lengths)


@dataclass(frozen=True)
class RankBand:
    """Neighbouring ranks, start to stop, that own equally much of every slot of a pack: `held` elements. What
    is done for one rank after another can be done for all of a band at once, in strides."""

    start: int
    stop: int
    held: tuple[int, ...]

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class PackLayout:
    """Slots that travel together. `flags` reserves one element per slot behind each shard (see [Note: used
    flags]); `align`: what every slot's place is a multiple of, in elements."""

    slots: tuple[ShardSpec, ...]
    world: int
    flags: bool = False
    align: int = ALIGN

    def offsets(self, rank: int) -> list[int]:
        """Where each slot's rows begin inside the shard of `rank`."""
        result, at = [], 0
        for slot in self.slots:
            result.append(at)
            at += aligned(slot.held(rank), self.align)
        return result

    def body(self, rank: int) -> int:
        """Elements of the rows in a shard, padding included, flags not."""
        known = self._bodies.get(rank)
        if known is None:
            known = sum(aligned(slot.held(rank), self.align) for slot in self.slots)
            self._bodies[rank] = known
        return known

    @cached_property
    def _bodies(self) -> dict[int, int]:
        return {}

    @cached_property
    def tail(self) -> int:
        """Elements of the flags behind a shard's rows."""
        return aligned(len(self.slots)) if self.flags else 0

    def shard(self, rank: int) -> int:
        """Elements of one rank's shard."""
        return self.body(rank) + self.tail

    @cached_property
    def bands(self) -> tuple[RankBand, ...]:
        """All ranks, as few bands as can be: mostly one to three, however many ranks there are."""
        return self.bands_around(())

    @cached_property
    def copies(self) -> int:
        """How many copies fill a wire: one for each slot and band that has some of it."""
        return sum(n > 0 for band in self.bands for n in band.held)

    def bands_around(self, ranks: Iterable[int]) -> tuple[RankBand, ...]:
        """The same, with each of `ranks` in a band of its own."""
        edges = {edge for slot in self.slots for edge in slot.edges()}
        edges.update(edge for rank in ranks for edge in (rank, rank + 1))
        marks = [0, *sorted(edge for edge in edges if 0 < edge < self.world), self.world]
        return tuple(RankBand(a, b, tuple(slot.held(a) for slot in self.slots)) for a, b in pairwise(marks))

    @cached_property
    def shards(self) -> RankLengths:
        """Elements of every rank's shard."""
        return RankLengths(n for band in self.bands for n in [self.shard(band.start)] * len(band))

    @cached_property
    def owned(self) -> RankLengths:
        """Elements that every rank owns, without padding and flags."""
        return RankLengths(n for band in self.bands for n in [sum(band.held)] * len(band))

    @cached_property
    def most(self) -> tuple[int, ...]:
        """Elements of each slot that the rank with most of it owns."""
        return tuple(slot.most for slot in self.slots)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each rank's shard begins in the wire."""
        return self.shards.starts

    @cached_property
    def wire(self) -> int:
        return self.shards.total

    @cached_property
    def full_offsets(self) -> tuple[int, ...]:
        """Where each slot begins in a buffer that holds all of them whole."""
        result, at = [], 0
        for slot in self.slots:
            result.append(at)
            at += aligned(slot.numel, self.align)
        return tuple(result)

    @cached_property
    def full(self) -> int:
        return sum(aligned(slot.numel, self.align) for slot in self.slots)

    @cached_property
    def cuts_of_shards(self) -> Sequence[list[tuple[int, int]]]:
        """Per rank, the (offset, numel) of each slot's rows inside that rank's shard; for a gather from
        shards."""
        cuts = [list(zip(self.offsets(band.start), band.held, strict=True)) for band in self.bands]
        return [cut for band, cut in zip(self.bands, cuts, strict=True) for _ in range(len(band))]

    @cached_property
    def cuts_of_full(self) -> Sequence[list[tuple[int, int]]]:
        """Per rank, the (offset, numel) of its rows of each slot inside a full buffer; for a publish in
        place."""
        return ByRank(self.world, self.cut_of_full)

    def cut_of_full(self, rank: int) -> list[tuple[int, int]]:
        """Where the rows of one rank lie in a full buffer."""
        places = zip(self.full_offsets, self.slots, strict=True)
        return [(at + slot.rows(rank)[0] * slot.row, slot.held(rank)) for at, slot in places]


@dataclass(frozen=True)
class FlatPackLayout(PackLayout):
    """Slots whole, one after another, and then the flags, cut into equal shards wherever the cuts fall. For
    gradients that every rank gets back whole: each of them then lies in one place of the wire."""

    def shard(self, rank: int) -> int:
        return aligned(-(-(self.full + self.tail) // self.world))

    @cached_property
    def shards(self) -> RankLengths:
        return RankLengths([self.shard(0)] * self.world)

    @cached_property
    def copies(self) -> int:
        return len(self.slots)

    @cached_property
    def most(self) -> tuple[int, ...]:
        """Where the cuts fall beside a tensor, one rank owns all of it."""
        shard, found = self.shard(0), []
        for slot, at in zip(self.slots, self.full_offsets, strict=True):
            end, cut = at + slot.numel, (at // shard + 1) * shard
            found.append(slot.numel if end <= cut else max(cut - at, min(end - cut, shard)))
        return tuple(found)


def slots_for(tensors: Sequence[tuple[str, tuple[int, ...]]], world: int, split: Split) -> list[ShardSpec]:
    """Slots for named shapes. Whole tensors go, largest first, to the rank that has least so far; of tensors
    with rows of one size, what is over is dealt on where the last one ended."""
    owner: dict[str, int] = {}
    if split == "level":
        turn: dict[int, int] = {}
        for name, shape in tensors:
            if shape:
                row = prod(shape[1:])
                owner[name] = turn.get(row, 0)
                turn[row] = (owner[name] + shape[0]) % world
    if split == "whole":
        loads: list[tuple[int, int]] = []  # a heap of what ranks have so far; those after it have nothing
        for name, shape in sorted(tensors, key=lambda t: (-prod(t[1]), t[0])):
            if len(loads) < world and (not loads or loads[0] > (0, len(loads))):
                heappush(loads, (0, len(loads)))
            load, owner[name] = loads[0]
            heapreplace(loads, (load + prod(shape), owner[name]))
    return [
        ShardSpec(name, shape, world, "copy" if world == 1 or not shape else split, owner.get(name, 0))
        for name, shape in tensors
    ]


def slots_by_name(
    tensors: Sequence[tuple[str, tuple[int, ...]]], whole: Container[str], world: int, split: Split
) -> dict[str, ShardSpec]:
    """Slots for named shapes, some of which must stay whole: those are dealt apart from what `split` divides.
    With ``copy`` every rank has all of both."""
    kinds: tuple[tuple[Split, bool], ...] = ((split, False), ("copy" if split == "copy" else "whole", True))
    made = [
        slot
        for kind, chosen in kinds
        for slot in slots_for([t for t in tensors if (t[0] in whole) == chosen], world, kind)
    ]
    return {slot.name: slot for slot in made}


def owner_runs(owners: Iterable[tuple[str, Any]]) -> dict[str, int]:
    """The number of the run that each tensor stands in: neighbours that have one owner. Gradients arrive
    run by run; a bucket over two of them, an embedding and a head, would wait all backward long, and
    all that go out after it would wait too.

    >>> owner_runs([("words", "root"), ("up", "block"), ("down", "block"), ("head", "root")])
    {'words': 0, 'up': 1, 'down': 1, 'head': 2}
    """
    runs = groupby(owners, key=lambda one: one[1])
    return {name: number for number, (_, members) in enumerate(runs) for name, _ in members}


def buckets(
    sizes: Iterable[tuple[str, int]], limit: int, owner_run: Mapping[str, int] | None = None
) -> list[list[str]]:
    """Names grouped in the given order so that no group exceeds `limit` bytes, unless one tensor alone does,
    and none is of two owner_runs.

    >>> buckets([("a", 3), ("b", 4), ("c", 9), ("d", 1)], 8)
    [['a', 'b'], ['c'], ['d']]
    """
    groups: list[list[str]] = []
    room = 0
    for name, size in sizes:
        apart = bool(groups) and owner_run is not None and owner_run[name] != owner_run[groups[-1][0]]
        if not groups or size > room or apart:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= size
    return groups
