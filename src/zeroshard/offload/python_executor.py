"""Carries host updates out by Python threads.

The threads that carry updates on the host out: gradient staged out → one pass over the state → weight
staged back. `part` names the tensors; `updates` says what is due.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from zeroshard.errors import StateError, TierError
from zeroshard.kernels import HostRoundTrip, ThreadTeam, Workers, update_rows
from zeroshard.kernels.threads import KernelTaker
from zeroshard.layout.specs import share_of
from zeroshard.tiers import CopyMark, DiskPager, StagingArena, StagingPlace, TierCopies

from .group import OffloadGroup, UpdateDone
from .work import (
    HostUpdate,
    StagedUpdate,
    UpdateExecutor,
    copy_events_of,
    count_of,
    next_of,
    travels,
    ways_of,
)

TRANSFER_WORKERS = 4  # as in kernels/post.h: parts in hand: on their way to the host, updated, or sent back


def tasks_of(
    staged: StagedUpdate, by: KernelTaker | None, workers: int | None = None
) -> list[Callable[[], None]]:
    """The updates of a part's elements, in shares for so many workers."""
    job, part, tasks = staged.job, staged.job.part, list[Callable[[], None]]()
    grad, weight = staged.grad, staged.weight
    share = max(part.numel, 1) if workers is None else share_of(part.numel, workers)
    for run, step, taken in job.steps():
        for start in range(run.start, run.stop, share):
            stop = min(start + share, run.stop)
            state = part.share(start, stop)
            whole = stop - start == part.numel
            rows = (grad, weight) if whole else (grad[start:stop], weight[start:stop])
            tasks.append(partial(update_rows, state, *rows, step, taken=taken, team=by, bound=job.bound))
    return tasks


class PythonExecutor(UpdateExecutor):
    """Transfer workers, each of which carries one part at a time from the device to the device; a native
    `team`, or `workers` where there is none, updates what they bring.

    What forward asks for first comes first: mostly what lands last in backward, and all of the root, which
    forward begins with. So the host may fall behind during backward and catch up during forward, and the two
    together hide it.
    """

    def __init__(
        self,
        arena: StagingArena,
        copies: TierCopies,
        by: ThreadTeam | Workers,
        paging: DiskPager | None = None,
    ) -> None:
        self.arena, self.copies, self.paging = arena, copies, paging
        self.team = by if isinstance(by, ThreadTeam) else None
        self.workers = by if isinstance(by, Workers) else None
        self._failure: tuple[str, BaseException] | None = None
        self._due: list[HostUpdate] = []
        lock = threading.Lock()
        self._come, self._gone = threading.Condition(lock), threading.Condition(lock)  # more is due; less is
        self._closing = False
        self._boarding = False  # a transfer worker waits for the staging memory of what it has taken up
        self._showing = threading.Lock()  # whether a part holds its weights back is asked and told under it
        if paging is not None:
            paging.failed = self._fail_at
        self._threads = [
            threading.Thread(target=self._run, name=f"zeroshard-courier-{number}", daemon=True)
            for number in range(TRANSFER_WORKERS)
        ]
        for thread in self._threads:
            thread.start()
        alive.add(self)

    # ------------------------------------------------------------------ the training thread's side

    def submit(self, job: HostUpdate, backlog: int | None = None) -> None:
        with self._come:
            while backlog is not None and len(self._due) >= backlog and self._failure is None:
                self._gone.wait(1.0)
            job.part.update.send(job.done)
            self._due.append(job)
            self._come.notify()

    def let_go(self, part: OffloadGroup, free: CopyMark) -> None:
        assert part.held is not None
        with self._showing:
            part.update.show(free)
            if part.update.done.is_set():
                self._show(part, part.held)

    def wait_for(self, done: UpdateDone) -> None:
        while not done.wait(0.5):
            self.check()
        self.check()

    def check(self) -> None:
        if self._failure is not None:
            label, error = self._failure
            raise TierError(f"the host update of {label} failed: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        with self._come:
            self._closing = True
            self._come.notify_all()
        for thread in self._threads:
            thread.join()
        for served in (self.workers, self.team):
            if served is not None:
                served.close()

    def halt(self) -> None:
        """The interpreter ends: drop what is due, and leave no thread behind."""
        self._closing = True
        self._fail(None, StateError("the interpreter is ending"))
        for thread in self._threads:
            thread.join(timeout=10)

    def forget(self) -> None:
        """This process is a child of the one that has the threads."""
        self._threads = []
        if self.team is not None:
            self.team.forget()

    # ------------------------------------------------------------------ the transfer workers' side

    def _run(self) -> None:
        if self.copies.device.type == "cuda":
            torch.cuda.set_device(self.copies.device)
        while (job := self._take_up()) is not None:
            try:
                self._carry(StagedUpdate(job, self._board(job)))
            except BaseException as error:  # it must reach the training thread, whatever it is
                self._fail(job.part, error)
            del job  # it holds a gradient, which may not outlive its update while the next is waited for

    def _take_up(self) -> HostUpdate | None:
        """The next job, as soon as there is one; None when there will be none."""
        with self._come:
            while self._failure is None and (self._boarding or not self._due):
                if self._closing and not self._due:
                    return None
                self._come.wait()
            if self._failure is not None:
                return None
            self._boarding = True
            self._gone.notify_all()
            return self._due.pop(next_of(self._due))

    def _board(self, job: HostUpdate) -> StagingPlace:
        """Staging memory for a job. Who comes first is served first, or large parts would wait for ever."""
        stage = self.arena.take(job.part.stage_bytes)
        with self._come:
            self._boarding = False
            if self._closing:
                self._come.notify_all()
            elif self._due:
                self._come.notify()
        return stage

    def _carry(self, staged: StagedUpdate) -> None:
        job, part = staged.job, staged.job.part
        if job.reader is not None:
            job.reader.copied_of(part)
        if job.held:
            part.update.ready.wait_on_host()  # the weights before have left this memory
        part.fetch()
        self._update(staged)
        self._finish(staged)

    def _update(self, staged: StagedUpdate) -> None:
        """Bring a part's gradient and update its elements: all in one call of the team, which sends the
        weights back as well, where nothing has to be done in between."""
        round_trip = self._round_trip(staged)
        if round_trip is None:
            self._fetch(staged)
        if self.workers is not None:
            self.workers.run(tasks_of(staged, None, len(self.workers)))
            return
        for task in tasks_of(staged, round_trip or self.team):
            task()

    def _round_trip(self, staged: StagedUpdate) -> HostRoundTrip | None:
        if self.team is None or not travels(staged.job.part, self.copies) or not count_of(staged.job):
            return None
        return HostRoundTrip(
            self.team, *ways_of(staged), count_of(staged.job), copy_events_of(staged.job, self.copies)
        )

    def _fetch(self, staged: StagedUpdate) -> None:
        """Send a part's gradient to the host; with a split master its weights too, which are the master's
        other half. State that rests on the disk is read meanwhile."""
        job, part = staged.job, staged.job.part
        to, of = [staged.grad], [job.flat[: part.numel]]
        if job.reads_weights:
            to += [staged.weight[strip.start : strip.stop] for strip in part.strips]
            of += [strip.target for strip in part.strips]
        if job.bound is not None:
            to, of = [*to, job.bound.size], [*of, part.size]
        self.copies.out(to, of, job.landed).wait_on_host()
        part.arrive()
        part.clear_padding(staged.grad, staged.weight)

    def _finish(self, staged: StagedUpdate) -> None:
        job, part, weight = staged.job, staged.job.part, staged.weight
        sent = self.team is not None and travels(part, self.copies) and count_of(job) and part.held is None
        part.leave()
        with self._showing:
            if sent:
                assert part.copy_events is not None
                part.update.arrive(part.copy_events[1])
            elif not part.update.holding:
                self._show(part, weight)
            self.arena.give(staged.stage, part.update.ready)
            job.done.set()

    def _show(self, part: OffloadGroup, weight: Tensor) -> None:
        """Send new weights to where the next forward finds them."""
        strips = [] if part.paged else part.strips_of(part.update.used)
        from_host = [weight[strip.start : strip.stop] for strip in strips]
        targets = [strip.target for strip in strips]
        part.update.arrive(self.copies.back(targets, from_host, part.update.free))

    def _fail(self, part: OffloadGroup | None, error: BaseException) -> None:
        """Keep an error for the training thread, and wake whoever waits for what will not come."""
        self._fail_at(part.label if part is not None else "a part", error)

    def _fail_at(self, label: str, error: BaseException) -> None:
        if self._failure is None:
            self._failure = (label, error)
        self.arena.fail(error)
        if self.paging is not None:
            self.paging.fail(label, error)
        with self._come:
            self._come.notify_all()
            self._gone.notify_all()


class ExecutorFaults(Protocol):
    def halt(self) -> None: ...

    def forget(self) -> None: ...


alive: weakref.WeakSet[ExecutorFaults] = weakref.WeakSet()


def _forget_all() -> None:
    for executor in list(alive):
        executor.forget()
    alive.clear()


os.register_at_fork(after_in_child=_forget_all)


@atexit.register
def _halt_all() -> None:
    for executor in list(alive):
        executor.halt()
