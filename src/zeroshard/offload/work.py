"""The queue of host updates that are due, and how each travels to the host and back.

Updates that are due, and those on their way to the host.

[Note: saved meanwhile] A background save copies a part when the updates from before it are done, and the next
update of the part waits for the copy. So an update from before a save never waits for one from after it.

A part's way to the host and back as C code goes it: by addresses, sizes and events. See [Note: without the
interpreter] in `kernels/transfer.py`.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from zeroshard.kernels import Bound, CopyEvents, CopySpec, HostStep
from zeroshard.params.sharded_param import BackgroundReader
from zeroshard.tiers import CopyMark, StagingPlace, TierCopies

from .group import OffloadGroup, StepRange, UpdateDone


@dataclass(frozen=True)
class HostUpdate:
    """An update that is due. `landed`: when its gradient is complete on the device. `taken`: an update with
    this gradient that stands, and is taken back first; then without `ranges` that is all. `held`: the
    weights that go with the state are those that its part holds back. `reader`: still copies the state before
    it. `bound`: see [Note: what is too large to be taken back] in `updates`. `done`: set when all of it is,
    unless C code carries it."""

    part: OffloadGroup
    flat: Tensor
    ranges: list[StepRange] | None
    landed: CopyMark
    taken: list[StepRange] | None = None
    held: bool = False
    reader: BackgroundReader | None = None
    bound: Bound | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def steps(self) -> list[tuple[StepRange, HostStep | None, HostStep | None]]:
        """Elements, what is done with them, and what is taken back before. The two differ in the gradient's
        scale alone, so they cover the same elements."""
        runs, taken = self.ranges, self.taken
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


class UpdateExecutor(Protocol):
    """Carries host updates out, beside the training thread, which is the only one to call it."""

    copies: TierCopies

    def submit(self, job: HostUpdate, backlog: int | None = None) -> None:
        """Make an update due; from then on its part's `done` tells of it. `backlog`: while so many wait on
        the device, this one is not added."""

    def let_go(self, part: OffloadGroup, free: CopyMark) -> None:
        """New weights that a part holds back may show, from the moment `free` on."""

    def wait_for(self, done: UpdateDone) -> None:
        """Until an update is done, or will never be."""

    def check(self) -> None:
        """Raise in the training thread what failed on the way."""

    def close(self) -> None:
        """End the threads, after what is due."""


class SecondBackward(Protocol):
    """Runs the backward of units a second time; see [Note: a second backward] in `updates`."""

    running: bool

    def covers(self, part: OffloadGroup) -> bool:
        """Whether the backward of its unit is one that runs twice."""

    def can(self, part: OffloadGroup) -> bool:
        """Whether the gradient that has just landed can be brought again."""

    def keep(self, parts: Sequence[OffloadGroup]) -> None:
        """Gradients of these were dropped; nothing else will be brought again."""

    def run(self, parts: Sequence[OffloadGroup]) -> None:
        """Bring the gradients of these, those nearest the loss first."""


@dataclass(frozen=True)
class StagedUpdate:
    """An update, and its staging memory: `grad` and `weight` as it has them."""

    job: HostUpdate
    stage: StagingPlace

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


def next_of(due: Sequence[HostUpdate]) -> int:
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
        return min(range(ready), key=lambda at: (due[at].part.update.turn, -at))
    return 0


def travels(part: OffloadGroup, copies: TierCopies) -> bool:
    """Whether C code can carry its updates: nothing has to be done between the copies and the update. A page
    has to be waited for, and padding of 8-bit moments cleared; weights that rest on the host are not sent."""
    near = part.targets[0].device.type == copies.device.type
    kernel = part.form.update.kernel != ""
    return copies.native and part.disk is None and not part.coded and near and kernel


def count_of(job: HostUpdate) -> int:
    """Calls of a kernel that an update takes; none where this rank has no rows of what was used."""
    return sum(run.start < run.stop for run, _, _ in job.steps())


def ways_of(staged: StagedUpdate) -> tuple[list[CopySpec], list[CopySpec]]:
    """What is copied out, and what back: nothing where a part holds its weights back."""
    job, part, weight = staged.job, staged.job.part, staged.weight
    assert job.flat.dtype == part.grad_dtype
    start, width = weight.data_ptr(), part.weight_dtype.itemsize

    def sent(used: list[bool]) -> list[CopySpec]:
        return [
            CopySpec(strip.target.data_ptr(), start + strip.start * width, (strip.stop - strip.start) * width)
            for strip in part.strips_of(used)
        ]

    out = [CopySpec(staged.grad.data_ptr(), job.flat.data_ptr(), part.numel * part.grad_dtype.itemsize)]
    if job.reads_weights:
        out += [CopySpec(here, there, nbytes) for there, here, nbytes in sent([True] * len(part.params))]
    if job.bound is not None:
        out.append(CopySpec(job.bound.size.data_ptr(), part.size.data_ptr(), part.size.nbytes))
    return out, sent(part.update.used) if part.held is None else []


def copy_events_of(job: HostUpdate, copies: TierCopies) -> CopyEvents | None:
    """The events of one way. None where nothing runs beside."""
    arrived, ready = (mark.handle for mark in job.part.events(copies))
    if copies.copy_streams is None:
        return None
    assert arrived is not None
    assert ready is not None
    return CopyEvents(copies.copy_streams, job.landed.handle, arrived, ready)
