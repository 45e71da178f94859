"""Copies of what a rank will write, in host memory, so that training may change the originals while a thread
writes.

The memory is kept between saves: fresh memory costs more in page faults than the copy itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from zeroshard.checkpoint.elements import DTYPE
from zeroshard.checkpoint.ranges import Task
from zeroshard.checkpoint.records import CHUNK, Held

Key = tuple[str, str, int, int]


class Staging:
    """One copy of one rank's share. Copying again overwrites it, so the save before must be over."""

    def __init__(self) -> None:
        self._buffers: dict[Key, torch.Tensor] = {}

    @property
    def bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def copy(self, held: Sequence[Held], tasks: Sequence[Task]) -> list[Held]:
        """Records that read from copies of the rows in `tasks`; rows of no task cannot be read from them."""
        buffers: dict[Key, torch.Tensor] = {}
        parts: dict[int, list[tuple[int, int, torch.Tensor]]] = {}
        for task in tasks:
            item = held[task.index]
            key = (item.kind, item.name, task.start, task.stop)
            buffers[key] = self._filled(item, task, self._buffers.pop(key, None))
            parts.setdefault(task.index, []).append((task.start, task.stop, buffers[key]))
        self._buffers = buffers
        return [
            replace(item, read=_Copy(parts[index]).read) if index in parts else item
            for index, item in enumerate(held)
        ]

    def _filled(self, item: Held, task: Task, buffer: torch.Tensor | None) -> torch.Tensor:
        shape = (task.stop - task.start, *item.shape[1:]) if item.shape else ()
        if buffer is None or buffer.shape != shape or buffer.dtype != DTYPE[item.dtype]:
            buffer = torch.empty(shape, dtype=DTYPE[item.dtype])
        step = max(1, CHUNK // item.row_bytes) if item.row_bytes else task.stop - task.start
        for start in range(task.start, task.stop, step):
            stop = min(start + step, task.stop)
            place = buffer[start - task.start : stop - task.start] if item.shape else buffer
            place.copy_(item.read(start, stop).detach().reshape(place.shape))
        return buffer


class _Copy:
    def __init__(self, parts: list[tuple[int, int, torch.Tensor]]) -> None:
        self.parts = parts

    def read(self, start: int, stop: int) -> torch.Tensor:
        for first, last, buffer in self.parts:
            if first <= start and stop <= last:
                return buffer[start - first : stop - first] if buffer.dim() else buffer
        raise AssertionError(f"rows {start} to {stop} were not copied")
