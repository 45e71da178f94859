"""Decides which rank writes which rows, into which file, and which stored rows a rank must read. Integers
only.

A save is planned from what all ranks tell of their rows. A model has thousands of tensors, most of which one
rank holds whole: such a tensor costs one record of the plan, and the plan stays from save to save."""

from __future__ import annotations

import hashlib
import marshal
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from zeroshard.errors import CheckpointError

from .pacing import gently
from .records import SIZE, HeldRows, height, namespace, row_bytes
from .tensor_file import header_of
from .untrusted import quoted, some

# Bytes: rows that several ranks hold are divided among them above this, and go to one of them below.
SHARE = 1 << 20
METADATA = {"format": "pt", "by": "zeroshard"}  # of a rank's files
FILE_LIMIT = 4 << 30  # bytes of one rank file


@dataclass(frozen=True, slots=True)
class RankRows:
    """Rows [start, stop) of record number `index` of `rank`: those that it holds, or is to write."""

    rank: int
    index: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class DescribedTensor:
    """One tensor as all ranks together describe it."""

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    holders: list[RankRows]


def describe(held: Sequence[HeldRows]) -> dict[str, list[Any]]:
    """What a rank tells of its rows: the kinds, shapes and dtypes that there are, and of each record the
    number of its own, name, first and last row, one after another. Raises for what could not be read back."""
    looks: dict[tuple[str, tuple[int, ...], str], int] = {}
    seen: dict[str, set[str]] = {}
    told: list[Any] = []
    for item in gently(held):
        kind, name = item.kind, item.name
        look = (kind, item.shape, item.dtype)
        number = looks.get(look)
        if number is None:
            check_description(kind, name, item.shape, item.dtype)
            number = looks[look] = len(looks)
        if not name or len(name) > 4096:
            check_description(kind, name, item.shape, item.dtype)
        names = seen.setdefault(namespace(kind), set())
        if name in names:
            raise CheckpointError(f"{quoted(name)} ({kind}) is given twice.")
        names.add(name)
        told += (number, name, *item.rows)
    return {"looks": [[kind, list(shape), dtype] for kind, shape, dtype in looks], "held": told}


def merge(descriptions: Sequence[Any]) -> list[DescribedTensor]:
    """One record per tensor, from what every rank told (`describe`).

    Raises where ranks disagree about a tensor; the text is the same on every rank, since all see the same
    lists.
    """
    tensors: list[DescribedTensor] = []
    known: dict[str, dict[str, DescribedTensor]] = {}
    for rank, description in enumerate(descriptions):
        looks = [(kind, tuple(shape), dtype) for kind, shape, dtype in description["looks"]]
        told = description["held"]
        for index, at in enumerate(gently(range(0, len(told), 4))):
            number, name, start, stop = told[at : at + 4]
            kind, shape, dtype = looks[number]
            rows, named = RankRows(rank, index, start, stop), known.setdefault(namespace(kind), {})
            tensor = named.get(name)
            if tensor is None:
                tensor = named[name] = DescribedTensor(kind, name, shape, dtype, [rows])
                tensors.append(tensor)
                continue
            if (tensor.kind, tensor.shape, tensor.dtype) != (kind, shape, dtype):
                raise CheckpointError(
                    f"ranks disagree about {quoted(name)}: it is a {tensor.kind} of {tensor.shape} "
                    f"{tensor.dtype} on rank {tensor.holders[0].rank} and a {kind} of {shape} {dtype} on "
                    f"rank {rank}. Every rank must build the same model and optimizer."
                )
            tensor.holders.append(rows)
    return tensors


def assign(tensors: Sequence[DescribedTensor], world: int) -> list[list[RankRows]]:
    """For each rank the rows it writes: every row of every tensor exactly once, copies shared out evenly by
    bytes."""
    tasks: list[list[RankRows]] = [[] for _ in range(world)]
    load = [0] * world
    for tensor in gently(tensors):
        width, only = row_bytes(tensor.shape, tensor.dtype), tensor.holders[0]
        alone = len(tensor.holders) == 1 and (only.start, only.stop) == (0, height(tensor.shape))
        for rows in tensor.holders if alone else _shares(tensor, width, load):
            if rows.start < rows.stop:
                tasks[rows.rank].append(rows)
                load[rows.rank] += (rows.stop - rows.start) * width
    return tasks


def _shares(tensor: DescribedTensor, width: int, load: list[int]) -> Iterator[RankRows]:
    rows = height(tensor.shape)
    held = sorted((h for h in tensor.holders if h.start < h.stop), key=lambda h: (h.start, h.rank))
    edges = sorted({0, rows, *(h.start for h in held), *(h.stop for h in held)})
    if edges[0] < 0 or edges[-1] > rows:
        raise CheckpointError(
            f"{quoted(tensor.name)} ({tensor.kind}) has {rows} rows, and a rank says it holds others."
        )
    active: list[RankRows] = []
    at = 0
    for start, stop in pairwise(edges):
        active = [h for h in active if h.stop > start]
        while at < len(held) and held[at].start <= start:
            active.append(held[at])
            at += 1
        if not active:
            raise CheckpointError(
                f"rows {start} to {stop} of {quoted(tensor.name)} ({tensor.kind}, {rows} rows) are held by "
                "no rank, so the checkpoint would have a hole. The ranks' row ranges must cover the tensor."
            )
        if len(active) == 1:
            yield replace(active[0], start=start, stop=stop)
        elif (stop - start) * width < SHARE or stop - start < len(active):
            least = min(active, key=lambda h: (load[h.rank], h.rank))
            yield replace(least, start=start, stop=stop)
        else:
            for i, holder in enumerate(active):
                count = stop - start
                first, last = start + count * i // len(active), start + count * (i + 1) // len(active)
                yield replace(holder, start=first, stop=last)


class FilePlan(NamedTuple):
    """One file of one rank: the rows of `tasks` one after another, each at its offset."""

    name: str
    header: bytes
    tasks: list[RankRows]
    offsets: list[int]  # where their rows begin
    bytes: int


class SavePlan:
    """Who writes what and how it lies in files, from what all ranks hold. Kept from save to save, since the
    next mostly finds the same, and Python for thousands of tensors is what holds training up most."""

    def __init__(self) -> None:
        self.tensors: list[DescribedTensor] = []
        self._tasks: list[list[RankRows]] = []
        self._of = b""  # the digest of what the ranks hold
        self._file_plans: list[FilePlan] | None = None

    def make(self, descriptions: list[Any]) -> None:
        """For ranks that hold these rows; raises where they cannot be put together."""
        # Version 2 of marshal says the same of equal lists.
        digest = hashlib.sha256(marshal.dumps(descriptions, 2)).digest()
        if digest != self._of:
            self._of, self._file_plans = b"", None
            self.tensors = merge(descriptions)
            self._tasks = assign(self.tensors, len(descriptions))
            self._of = digest

    def file_plans(self, held: Sequence[HeldRows], rank: int) -> list[FilePlan]:
        """The files of `rank`: always the same rank's."""
        if self._file_plans is None:
            # Larger elements first: then every tensor begins at a multiple of its element size.
            ordered = sorted(self._tasks[rank], key=lambda task: -SIZE[held[task.index].dtype])
            self._file_plans = []
            for part, tasks in enumerate(into_files(ordered, held, FILE_LIMIT)):
                table = (
                    (
                        f"{item.kind}:{item.name}[{start}:{stop}]",
                        item.dtype,
                        item.shape and (stop - start, *item.shape[1:]),
                    )
                    for task in gently(tasks)
                    for item, start, stop in ((held[task.index], task.start, task.stop),)
                )
                header, offsets, end = header_of(table, METADATA)
                number = f"-{part:04d}" if part else ""
                name = f"rank-{rank:05d}-of-{len(self._tasks):05d}{number}.safetensors"
                self._file_plans.append(FilePlan(name, header, tasks, offsets, end))
        return self._file_plans


def into_files(tasks: Sequence[RankRows], held: Sequence[HeldRows], limit: int) -> list[list[RankRows]]:
    """Tasks grouped into files of at most `limit` bytes, cut between rows. A row that is larger has a file of
    its own."""
    files: list[list[RankRows]] = []
    room = 0
    for task in gently(tasks):
        start, width = task.start, held[task.index].row_bytes
        while start < task.stop:
            if not files or room < width:
                files.append([])
                room = limit
            count = task.stop - start if not width else min(task.stop - start, max(1, room // width))
            whole = start == task.start and start + count == task.stop
            files[-1].append(task if whole else replace(task, start=start, stop=start + count))
            room = max(0, room - count * width)
            start += count
    return files


def overlaps(spans: Sequence[tuple[int, int]], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(span number, first row, last row) for each of the sorted, disjoint `spans` that has rows of [start,
    stop).

    >>> list(overlaps([(0, 4), (4, 8), (8, 9)], 3, 8))
    [(0, 3, 4), (1, 4, 8)]
    """
    if start >= stop:
        return
    for number in range(max(0, bisect_right(spans, (start, 1 << 62)) - 1), len(spans)):
        first, last = spans[number]
        if first >= stop:
            return
        if last > start:
            yield number, max(first, start), min(last, stop)


def block_rows(width: int, block: int) -> int:
    """Rows that share one checksum when a row has `width` bytes."""
    return max(1, block // width) if width else 1 << 62


def check_description(kind: str, name: str, shape: tuple[int, ...], dtype: str) -> None:
    """Refuse a record that could not be read back, where the message still can say whose fault it is."""
    if dtype not in SIZE:
        raise CheckpointError(
            f"{quoted(name)} ({kind}) has dtype {dtype!r}; known are {some(sorted(SIZE), limit=20)}."
        )
    if not name or not kind or len(name) > 4096 or len(kind) > 256:
        raise CheckpointError(
            f"a tensor named {quoted(name)} of kind {kind!r} cannot be stored: too long, or empty."
        )
    if any(dim < 0 for dim in shape) or len(shape) > 32:
        raise CheckpointError(f"{quoted(name)} ({kind}) has the impossible shape {shape}.")
