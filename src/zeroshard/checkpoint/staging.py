"""A rank's files as they will be, in host memory, so that training may change the originals while a thread
writes.

Copying and summing is one pass over memory, and disks fetch the files from there: copies into the page cache
would slow the steps beside them down by more than all else together. The memory is kept between saves: fresh
memory costs more in page faults than the copy itself.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from zeroshard.native import allocate, copy_crc32

from . import disk
from .blocks import Lanes
from .bridge import Bridge
from .elements import byte_view
from .progress import Progress
from .records import Held
from .sheets import Sheet, chunks
from .turns import gently
from .wording import os_error


class Image:
    """One file in host memory, in whole pages."""

    def __init__(self, sheet: Sheet, memory: torch.Tensor) -> None:
        self.sheet = sheet
        self._view = byte_view(memory)
        self._view[: len(sheet.header)] = sheet.header
        self._spans: list[list[Any]] = [[] for _ in sheet.tasks]

    def fill(self, number: int, held: Sequence[Held], lanes: Lanes, bridge: Bridge) -> None:
        """Copy the rows of one task, and sum them on the way."""
        task, spot = self.sheet.tasks[number], self.sheet.spots[number]
        at, sums = spot.offset, bytearray()
        for rows, block in chunks(held[task.index], task):
            data = bridge.bytes_of(rows)
            blocks = [(at + i, data[i : i + block]) for i in range(0, len(data), block)]
            for found in lanes.map(self._put, blocks):
                sums += found.to_bytes(4, "big")
            at += len(data)
        self._spans[number] = [task.index, task.start, task.stop, spot.offset, sums.hex()]

    def _put(self, block: tuple[int, memoryview]) -> int:
        at, data = block
        return copy_crc32(self._view[at : at + len(data)], data)

    def write(self, folder: Path) -> tuple[list[Any], list[list[Any]]]:
        """The file, on the device when it returns. Says what `saving.write_file` says."""
        path, size = folder / self.sheet.name, self.sheet.bytes
        try:
            disk.write_pages(path, self._view, size)
        except OSError as error:
            raise os_error(error, "writing", path) from error
        return [self.sheet.name, size, zlib.crc32(self.sheet.header)], self._spans


class Staging:
    """Memory for one rank's files. Copying again overwrites it, so the save before must be over."""

    def __init__(self) -> None:
        self.bridge = Bridge()
        self._memory: list[torch.Tensor] = []

    @property
    def bytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory)

    def copy(self, held: Sequence[Held], sheets: Sequence[Sheet], progress: Progress) -> list[Image]:
        """The files of `sheets`, filled; when it returns, all originals may change, and before that those
        whose owners `progress` lets go."""
        sizes = [-(-sheet.bytes // disk.PAGE) * disk.PAGE for sheet in sheets]
        if sizes != [memory.nbytes for memory in self._memory]:
            self._memory.clear()
            self._memory += [allocate(size, [torch.uint8])[0] for size in sizes]
        images = [Image(sheet, memory) for sheet, memory in zip(sheets, self._memory, strict=True)]
        jobs = (
            (held[task.index].owner, (image, number))
            for image in images
            for number, task in enumerate(image.sheet.tasks)
        )
        with Lanes() as lanes, self.bridge.crossing():
            for image, number in gently(progress.take_turns(jobs)):
                image.fill(number, held, lanes, self.bridge)
        return images
