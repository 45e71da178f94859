"""Copies a rank's rows into host memory as its files will be, so that training may go on.

How they lie there (names, order, headers, blocks) is decided before anything is written. Copying and summing
is one pass over memory, and disks fetch the files from there: copies into the page cache would slow the steps
beside them down by more than all else together. The memory is kept between saves: fresh memory costs more in
page faults than the copy itself."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint import durable_files
from zeroshard.errors import CheckpointError
from zeroshard.kernels import allocate, copy_crc32
from zeroshard.tiers.staging import pinned

from .pacing import CopyProgress, gently
from .ranges import FilePlan, RankRows, block_rows
from .records import CHUNK, HeldRows, as_bytes, byte_view
from .tensor_file import BlockThreads
from .untrusted import os_error, quoted

BLOCK = 4 << 20  # bytes that share a checksum: small enough that reading part of a span reads little more


def chunks(held: HeldRows, task: RankRows) -> Iterator[tuple[torch.Tensor, int]]:
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
        self._sums = [""] * len(file_plan.tasks)

    def fill(self, number: int, held: Sequence[HeldRows], lanes: BlockThreads, bridge: DeviceBridge) -> None:
        """Copy the rows of one task, and sum them on the way."""
        task, at, view, sums = (
            self.file_plan.tasks[number],
            self.file_plan.offsets[number],
            self._view,
            bytearray(),
        )

        def put(block: tuple[int, memoryview]) -> int:
            place, data = block
            return copy_crc32(view[place : place + len(data)], data)

        for rows, block in chunks(held[task.index], task):
            data = bridge.bytes_of(rows)
            blocks = [(at + i, data[i : i + block]) for i in range(0, len(data), block)]
            for total in lanes.map(put, blocks):
                sums += total.to_bytes(4, "big")
            at += len(data)
        self._sums[number] = sums.hex()

    def write(self, folder: Path) -> tuple[list[Any], list[str]]:
        """The file, on the device when it returns. Says what `saving.write_file` says."""
        path, size = folder / self.file_plan.name, self.file_plan.bytes
        try:
            durable_files.write_pages(path, self._view, size)
        except OSError as error:
            raise os_error(error, "writing", path) from error
        return [self.file_plan.name, size, zlib.crc32(self.file_plan.header)], self._sums


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
