"""Decides which rank writes which rows, and which stored rows a rank must read. Integers only."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from zeroshard.errors import CheckpointError

from .dtypes import SIZE, height, row_bytes
from .pacing import gently
from .records import slot
from .untrusted import quoted, some

# Bytes: rows that several ranks hold are divided among them above this, and go to one of them below.
SHARE = 1 << 20


@dataclass(frozen=True, slots=True)
class RowHolder:
    """`rank` holds rows [start, stop), as its record number `index`."""

    rank: int
    index: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class WriteTask:
    """Write rows [start, stop) of record number `index`."""

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
    holders: tuple[RowHolder, ...]


def merge(descriptions: Sequence[Sequence[Any]]) -> list[DescribedTensor]:
    """One record per tensor from every rank's list of ``[kind, name, shape, dtype, start, stop]``.

    Raises where ranks disagree about a tensor; the text is the same on every rank, since all see the same
    lists.
    """
    holders: dict[tuple[str, str], list[RowHolder]] = {}
    looks: dict[tuple[str, str], tuple[str, tuple[int, ...], str, int]] = {}
    for rank, description in enumerate(descriptions):
        for index, (kind, name, shape, dtype, start, stop) in enumerate(gently(description)):
            key = slot(kind, name)
            look = looks.setdefault(key, (kind, tuple(shape), dtype, rank))
            if look[:3] != (kind, tuple(shape), dtype):
                raise CheckpointError(
                    f"ranks disagree about {quoted(name)}: it is a {look[0]} of {look[1]} {look[2]} on rank "
                    f"{look[3]} and a {kind} of {tuple(shape)} {dtype} on rank {rank}. Every rank must build "
                    "the same model and optimizer."
                )
            holders.setdefault(key, []).append(RowHolder(rank, index, start, stop))
    tensors = []
    for key, held in holders.items():
        kind, shape, dtype, _ = looks[key]
        tensors.append(DescribedTensor(kind, key[1], shape, dtype, tuple(held)))
    return tensors


def assign(tensors: Sequence[DescribedTensor], world: int) -> list[list[WriteTask]]:
    """For each rank the rows it writes: every row of every tensor exactly once, copies shared out evenly by
    bytes."""
    tasks: list[list[WriteTask]] = [[] for _ in range(world)]
    load = [0] * world
    for tensor in gently(tensors):
        width = row_bytes(tensor.shape, tensor.dtype)
        for holder, start, stop in _shares(tensor, width, load):
            tasks[holder.rank].append(WriteTask(holder.index, start, stop))
            load[holder.rank] += (stop - start) * width
    return tasks


def _shares(tensor: DescribedTensor, width: int, load: list[int]) -> Iterator[tuple[RowHolder, int, int]]:
    rows = height(tensor.shape)
    held = sorted((h for h in tensor.holders if h.start < h.stop), key=lambda h: (h.start, h.rank))
    edges = sorted({0, rows, *(h.start for h in held), *(h.stop for h in held)})
    if edges[0] < 0 or edges[-1] > rows:
        raise CheckpointError(
            f"{quoted(tensor.name)} ({tensor.kind}) has {rows} rows, and a rank says it holds others."
        )
    active: list[RowHolder] = []
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
            yield active[0], start, stop
        elif (stop - start) * width < SHARE or stop - start < len(active):
            yield min(active, key=lambda h: (load[h.rank], h.rank)), start, stop
        else:
            for i, holder in enumerate(active):
                count = stop - start
                yield holder, start + count * i // len(active), start + count * (i + 1) // len(active)


def into_files(tasks: Sequence[WriteTask], widths: Sequence[int], limit: int) -> list[list[WriteTask]]:
    """Tasks grouped into files of at most `limit` bytes, cut between rows. A row that is larger has a file of
    its own."""
    files: list[list[WriteTask]] = []
    room = 0
    for task in tasks:
        start, width = task.start, widths[task.index]
        while start < task.stop:
            if not files or room < width:
                files.append([])
                room = limit
            count = task.stop - start if not width else min(task.stop - start, max(1, room // width))
            whole = start == task.start and start + count == task.stop
            files[-1].append(task if whole else WriteTask(task.index, start, start + count))
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
