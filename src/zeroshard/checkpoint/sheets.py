"""How a rank's rows lie in its files, before anything is written: names, order, headers, blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from zeroshard.errors import CheckpointError

from .elements import SIZE
from .ranges import Task, block_rows, into_files
from .records import CHUNK, Held
from .tensorfile import Spot, header_of
from .turns import gently
from .wording import quoted

BLOCK = 4 << 20  # bytes that share a checksum: small enough that reading part of a span reads little more
FILE_LIMIT = 4 << 30  # bytes of one rank file


@dataclass(frozen=True)
class Sheet:
    """One file of one rank: the rows of `tasks` one after another, each at its spot."""

    name: str
    header: bytes
    tasks: list[Task]
    spots: list[Spot]

    @property
    def bytes(self) -> int:
        return self.spots[-1].offset + self.spots[-1].bytes if self.spots else len(self.header)


def sheets_of(held: Sequence[Held], tasks: Sequence[Task], rank: int, size: int) -> list[Sheet]:
    """The files of rank `rank` of `size`, which writes the rows in `tasks`."""
    # Larger elements first: then every tensor begins at a multiple of its element size.
    ordered = sorted(tasks, key=lambda task: -SIZE[held[task.index].dtype])
    found = []
    for part, group in enumerate(into_files(ordered, [item.row_bytes for item in held], FILE_LIMIT)):
        table = []
        for task in gently(group):
            item = held[task.index]
            shape = (task.stop - task.start, *item.shape[1:]) if item.shape else ()
            table.append((f"{item.kind}:{item.name}[{task.start}:{task.stop}]", item.dtype, shape))
        header, spots = header_of(table, {"format": "pt", "by": "zeroshard"})
        name = f"rank-{rank:05d}-of-{size:05d}" + (f"-{part:04d}" if part else "") + ".safetensors"
        found.append(Sheet(name, header, group, spots))
    return found


def chunks(held: Held, task: Task) -> Iterator[tuple[torch.Tensor, int]]:
    """The rows of a task, some at a time, each with the bytes of its blocks: those share a checksum."""
    width = held.row_bytes
    if not width:
        return
    block = block_rows(width, BLOCK)
    step = block * max(1, CHUNK // (block * width))
    for start in range(task.start, task.stop, step):
        stop = min(start + step, task.stop)
        rows = held.read(start, stop)
        if rows.nbytes != (stop - start) * width:
            raise CheckpointError(
                f"{quoted(held.name)} ({held.kind}): reading rows {start} to {stop} gave {rows.nbytes} "
                f"bytes, expected {(stop - start) * width}."
            )
        yield rows, block * width
