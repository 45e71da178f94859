"""Pinned staging memory of a fixed size that parts of different sizes share: a few large ones need not make
room for all to be large. Whoever needs a stage when there is no room waits: that back-pressure keeps
host memory within the plan."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

from zeroshard.errors import TierError

from .copies import Mark
from .pinned import pinned
from .ring import Stage

LINE = 64
KNOWN = 256  # stages that are kept for the next time: sizes and places repeat from step to step


@dataclass
class _Span:
    """Free bytes, and the copies that still use them."""

    start: int
    stop: int
    marks: list[Mark] = field(default_factory=list)


class Arena:
    """`nbytes` of staging memory, lent in stretches: the first free one that is long enough."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self._memory = pinned(nbytes, device)
        self._free = [_Span(0, nbytes)]
        self._stages: dict[tuple[int, int], Stage] = {}
        self._changed = threading.Condition()
        self._broken: BaseException | None = None

    def take(self, nbytes: int) -> Stage:
        """A stage of so many bytes whose last copies are done; waits for room."""
        size = max(-(-nbytes // LINE), 1) * LINE
        assert size <= self.nbytes
        with self._changed:
            while (span := next((s for s in self._free if s.stop - s.start >= size), None)) is None:
                if self._broken is not None:
                    raise TierError(
                        "the host update failed, so its staging memory never came free."
                    ) from self._broken
                self._changed.wait(1.0)
            start, marks = span.start, list(span.marks)
            span.start += size
            self._free = [s for s in self._free if s.start < s.stop]
        for mark in marks:
            mark.wait_on_host()
        return self._stage(start, size)

    def _stage(self, start: int, size: int) -> Stage:
        found = self._stages.get((start, size))
        if found is None:
            if len(self._stages) >= KNOWN:
                self._stages.clear()
            found = self._stages[start, size] = Stage(self._memory[start : start + size])
        return found

    def give(self, stage: Stage, after: Mark) -> None:
        """Give a stage back; it is used again when the copy that `after` marks is done."""
        start = stage.memory.data_ptr() - self._memory.data_ptr()
        with self._changed:
            freed = _Span(start, start + stage.memory.numel(), [after])
            merged: list[_Span] = []
            for span in sorted([*self._free, freed], key=lambda s: s.start):
                if merged and merged[-1].stop == span.start:
                    merged[-1] = _Span(merged[-1].start, span.stop, _waiting(merged[-1].marks + span.marks))
                else:
                    merged.append(span)
            self._free = merged
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Wake whoever waits: no stage will come back."""
        with self._changed:
            self._broken = error
            self._changed.notify_all()


def _waiting(marks: list[Mark]) -> list[Mark]:
    return [mark for mark in marks if not mark.passed()]
