"""Updates that are due, and those on their way to the host.

[Note: saved meanwhile] A background save copies a part when the updates from before it are done, and the next
update of the part waits for the copy. So an update from before a save never waits for one from after it.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from zeroshard.life.guard import Reader
from zeroshard.native import AdamStep, SgdStep
from zeroshard.tier import Mark, Stage

from .part import Part, Stretch


@dataclass(frozen=True)
class Job:
    """An update that is due. `landed`: when its gradient is complete on the device. `taken`: an update with
    this gradient that stands, and is taken back first; then without `stretches` that is all. `held`: the
    weights that go with the state are those that its part holds back. `reader`: still copies the state before
    it. `done`: set when all of it is, unless C code carries it."""

    part: Part
    flat: Tensor
    stretches: list[Stretch] | None
    landed: Mark
    taken: list[Stretch] | None = None
    held: bool = False
    reader: Reader | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def steps(self) -> list[tuple[Stretch, AdamStep | SgdStep | None, AdamStep | SgdStep | None]]:
        """Elements, what is done with them, and what is taken back before. The two differ in the gradient's
        scale alone, so they cover the same elements."""
        runs, taken = self.stretches, self.taken
        if runs is None:
            assert taken is not None
            return [(run, None, run.step) for run in taken]
        if taken is None:
            return [(run, run.step, None) for run in runs]
        return [(run, run.step, old.step) for run, old in zip(runs, taken, strict=True)]

    @property
    def reads_weights(self) -> bool:
        """Whether it needs the weights of the device, which are one half of a split master. What is taken
        back left its own where it is."""
        left = self.held and self.taken is not None
        return self.part.splits and not self.part.paged and not left


@dataclass(frozen=True)
class Staged:
    """An update, and its staging memory: `grad` and `weight` as it has them."""

    job: Job
    stage: Stage

    @property
    def grad(self) -> Tensor:
        return self.stage.view(self.job.part.grad_dtype, self.job.part.numel)

    @property
    def weight(self) -> Tensor:
        """Where the new weights are written; with a split master, where the old ones are, too."""
        part, kept = self.job.part, self.job.part.held if self.job.held else self.job.part.weights
        if kept is not None:
            return kept
        offset = 0 if part.in_place else part.numel * part.grad_dtype.itemsize
        return self.stage.view(part.weight_dtype, part.numel, offset)


def next_of(due: Sequence[Job]) -> int:
    """Which of the jobs, in the order in which they were launched, the host takes next. Of those whose
    gradient is there, the one whose weights forward asks for first; of several, or before any forward has
    asked, the newest.

    The training thread launches far ahead of the device, so the newest job may be the last to be ready: where
    none is ready, the oldest, which will be first.

    Jobs from before a save lie in front of those with a reader, and go first; see [Note: saved
    meanwhile]."""
    old = next((at for at, job in enumerate(due) if job.reader is not None), 0)
    due = due[:old] if old else due
    ready = bisect_left(due, True, key=lambda job: not job.landed.passed())
    if ready:
        return min(range(ready), key=lambda at: (due[at].part.turn, -at))
    return 0
