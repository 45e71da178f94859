"""Copies a rank's rows into host memory as its files will be, so that training may go on.

How they lie there (names, order, headers, blocks) is decided before anything is written. Copying and summing
is one pass over memory, and disks fetch the files from there: copies into the page cache would slow the steps
beside them down by more than all else together. The memory is kept between saves: fresh memory costs more in
page faults than the copy itself."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint import durable_files
from zeroshard.errors import CheckpointError
from zeroshard.kernels import allocate, copy_crc32
from zeroshard.tiers.staging import pinned

from .dtypes import SIZE, as_bytes, byte_view
from .pacing import CopyProgress, gently
from .ranges import WriteTask, block_rows, into_files
from .records import CHUNK, HeldRows
from .tensor_file import BlockThreads, header_of
from .untrusted import os_error, quoted

BLOCK = 4 << 20  # bytes that share a checksum: small enough that reading part of a span reads little more
METADATA = {"format": "pt", "by": "zeroshard"}  # of a rank's files
FILE_LIMIT = 4 << 30  # bytes of one rank file


@dataclass(frozen=True)
class FilePlan:
    """One file of one rank: the rows of `tasks` one after another, each at its offset."""

    name: str
    header: bytes
    tasks: list[WriteTask]
    offsets: list[int]  # where their rows begin
    bytes: int


def file_plans_of(
    held: Sequence[HeldRows], tasks: Sequence[WriteTask], rank: int, size: int
) -> list[FilePlan]:
    """The files of rank `rank` of `size`, which writes the rows in `tasks`."""
    # Larger elements first: then every tensor begins at a multiple of its element size.
    ordered = sorted(tasks, key=lambda task: -SIZE[held[task.index].dtype])
    found = []
    for part, group in enumerate(into_files(ordered, [item.row_bytes for item in held], FILE_LIMIT)):
        table = (_in_file(held[task.index], task) for task in gently(group))
        header, offsets, end = header_of(table, METADATA)
        name = f"rank-{rank:05d}-of-{size:05d}" + (f"-{part:04d}" if part else "") + ".safetensors"
        found.append(FilePlan(name, header, group, offsets, end))
    return found


def _in_file(held: HeldRows, task: WriteTask) -> tuple[str, str, tuple[int, ...]]:
    """The key, dtype and shape of a task's rows in their file."""
    shape = (task.stop - task.start, *held.shape[1:]) if held.shape else ()
    return f"{held.kind}:{held.name}[{task.start}:{task.stop}]", held.dtype, shape


def chunks(held: HeldRows, task: WriteTask) -> Iterator[tuple[torch.Tensor, int]]:
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


class DeviceBridge:
    """On a GPU, a stream of its own and page-locked memory for a chunk, so that the kernels of training
    neither wait for copies nor overtake them. Without one, nothing: rows are read where they are."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._reduced_grad: torch.Tensor | None = None

    def begin(self) -> None:
        """In the thread that trains: what it has launched by now is what rows will show."""
        if torch.cuda.is_initialized():
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    @contextmanager
    def crossing(self) -> Iterator[None]:
        """In the thread that copies, around all of `bytes_of` and the reading of rows."""
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield

    def bytes_of(self, rows: torch.Tensor) -> memoryview:
        """The rows in host memory; those of a GPU until the next call."""
        if self._stream is None or rows.device != self._stream.device or rows.nbytes > CHUNK:
            return as_bytes(rows)
        if self._reduced_grad is None:
            self._reduced_grad = pinned(CHUNK, rows.device)
        place = self._reduced_grad[: rows.nbytes]
        place.view(rows.dtype).view(rows.shape).copy_(rows.detach(), non_blocking=True)
        self._stream.synchronize()
        return byte_view(place)


class FileImage:
    """One file in host memory, in whole pages."""

    def __init__(self, file_plan: FilePlan, memory: torch.Tensor) -> None:
        self.file_plan = file_plan
        self._view = byte_view(memory)
        self._view[: len(file_plan.header)] = file_plan.header
        self._spans: list[list[Any]] = [[] for _ in file_plan.tasks]

    def fill(self, number: int, held: Sequence[HeldRows], lanes: BlockThreads, bridge: DeviceBridge) -> None:
        """Copy the rows of one task, and sum them on the way."""
        task, offset = self.file_plan.tasks[number], self.file_plan.offsets[number]
        at, sums = offset, bytearray()
        for rows, block in chunks(held[task.index], task):
            data = bridge.bytes_of(rows)
            blocks = [(at + i, data[i : i + block]) for i in range(0, len(data), block)]
            for found in lanes.map(self._put, blocks):
                sums += found.to_bytes(4, "big")
            at += len(data)
        self._spans[number] = [task.index, task.start, task.stop, offset, sums.hex()]

    def _put(self, block: tuple[int, memoryview]) -> int:
        at, data = block
        return copy_crc32(self._view[at : at + len(data)], data)

    def write(self, folder: Path) -> tuple[list[Any], list[list[Any]]]:
        """The file, on the device when it returns. Says what `saving.write_file` says."""
        path, size = folder / self.file_plan.name, self.file_plan.bytes
        try:
            durable_files.write_pages(path, self._view, size)
        except OSError as error:
            raise os_error(error, "writing", path) from error
        return [self.file_plan.name, size, zlib.crc32(self.file_plan.header)], self._spans


class SaveStaging:
    """Memory for one rank's files. Copying again overwrites it, so the save before must be over."""

    def __init__(self) -> None:
        self.bridge = DeviceBridge()
        self._memory: list[torch.Tensor] = []

    @property
    def bytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory)

    def copy(
        self, held: Sequence[HeldRows], file_plans: Sequence[FilePlan], progress: CopyProgress
    ) -> list[FileImage]:
        """The files of `file_plans`, filled; when it returns, all originals may change, and before that those
        whose owners `progress` lets go."""
        sizes = [-(-file_plan.bytes // durable_files.PAGE) * durable_files.PAGE for file_plan in file_plans]
        if sizes != [memory.nbytes for memory in self._memory]:
            self._memory.clear()
            self._memory += [allocate(size, [torch.uint8])[0] for size in sizes]
        images = [
            FileImage(file_plan, memory) for file_plan, memory in zip(file_plans, self._memory, strict=True)
        ]
        jobs = (
            (held[task.index].owner, (image, number))
            for image in images
            for number, task in enumerate(image.file_plan.tasks)
        )
        with BlockThreads() as lanes, self.bridge.crossing():
            for image, number in gently(progress.take_turns(jobs)):
                image.fill(number, held, lanes, self.bridge)
        return images
