"""The threads that carry updates on the host out: gradient staged out → one pass over the state → weight
staged back. `part` names the tensors; `updates` says what is due.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from zeroshard.count.shapes import share_of
from zeroshard.errors import StateError, TierError
from zeroshard.native import AdamRows, Team, Workers, adam_update, sgd_update
from zeroshard.tier import Arena, Copies, Mark, Paging, Stage

from .due import Countdown, Job, Staged, next_of
from .part import Part

AT_ONCE = 2  # parts that are updated
AHEAD = 2  # parts on their way to the host while one is updated


class Crew:
    """A thread that stages, and the workers that update, by themselves or through a `team`.

    What forward asks for first comes first: mostly what lands last in backward, and all of the root, which
    forward begins with. So the host may fall behind during backward and catch up during forward, and the two
    together hide it.
    """

    def __init__(
        self,
        arena: Arena,
        copies: Copies,
        workers: Workers,
        team: Team | None = None,
        paging: Paging | None = None,
    ) -> None:
        self.arena, self.copies, self.workers, self.team, self.paging = arena, copies, workers, team, paging
        self._failure: tuple[str, BaseException] | None = None
        self._due: list[Job] = []
        self._changed = threading.Condition()
        self._closing = False
        self._busy = threading.Semaphore(AT_ONCE)
        self._showing = threading.Lock()  # whether a part holds its weights back is asked and told under it
        if paging is not None:
            paging.failed = self._fail_at
        self._thread = threading.Thread(target=self._run, name="zeroshard-offload", daemon=True)
        self._thread.start()
        _alive.add(self)

    # ------------------------------------------------------------------ the training thread's side

    def submit(self, job: Job, backlog: int | None = None) -> None:
        """Make an update due. `backlog`: while so many wait on the device, this one is not added."""
        with self._changed:
            while backlog is not None and len(self._due) >= backlog and self._failure is None:
                self._changed.wait(1.0)
            self._due.append(job)
            self._changed.notify_all()

    def let_go(self, part: Part, free: Mark) -> None:
        """New weights that a part holds back may show, from the moment `free` on."""
        assert part.held is not None
        with self._showing:
            part.holding, part.free = False, free
            if part.done.is_set():
                self._show(part, part.held)

    def wait_for(self, done: threading.Event) -> None:
        """Until an update is done, or will never be."""
        while not done.wait(0.5):
            self.check()
        self.check()

    def check(self) -> None:
        """Raise in the training thread what failed in a worker."""
        if self._failure is not None:
            label, error = self._failure
            raise TierError(f"the host update of {label} failed: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """End the threads, after what is due."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self.workers.close()
        if self.team is not None:
            self.team.close()

    def halt(self) -> None:
        """The interpreter ends: drop what is due, and leave no thread behind."""
        self._closing = True
        self._fail(None, StateError("the interpreter is ending"))
        self._thread.join(timeout=10)

    # ------------------------------------------------------------------ the workers' side

    def _run(self) -> None:
        if self.copies.device.type == "cuda":
            torch.cuda.set_device(self.copies.device)
        staged: deque[Staged] = deque()
        held: Job | None = None  # for which there was no room
        while self._wait_for_work(bool(staged) or held is not None):
            job = None
            try:
                while len(staged) < AHEAD and (job := held or self._next_due(idle=not staged)) is not None:
                    held = None
                    blocked = bool(staged) and job.reader is not None  # [Note: saved meanwhile]
                    stage = None if blocked else self.arena.take(job.part.stage_bytes, wait=not staged)
                    if stage is None:  # what is staged has to go on first
                        held = job
                        break
                    staged.append(self._stage(job, stage))
                job = staged[0].job
                self._update(staged.popleft())
            except BaseException as error:  # it must reach the training thread, whatever it is
                self._fail(job.part if job is not None else None, error)
            if self._failure is not None:
                return
            job = None

    def _wait_for_work(self, staged: bool) -> bool:
        with self._changed:
            while not staged and not self._due and not self._closing:
                self._changed.wait()
            return staged or bool(self._due)

    def _next_due(self, idle: bool) -> Job | None:
        with self._changed:
            at = next_of(self._due, idle)
            if at is None:
                return None
            self._changed.notify_all()
            return self._due.pop(at)

    def _stage(self, job: Job, stage: Stage) -> Staged:
        """Send a part's gradient to the host; with a split master its weights too, which are the master's
        other half. State that rests on the disk is read meanwhile."""
        part = job.part
        if job.reader is not None:
            job.reader.copied_of(part)
        if job.held:
            part.ready.wait_on_host()  # the weights before have left this memory
        part.fetch()
        to, of = [stage.view(part.grad_dtype, part.numel)], [job.flat[: part.numel]]
        there = job.held and job.taken is not None  # what is taken back left its weights there
        if part.splits and not part.paged and not there:
            weights = self._weights_in(job, stage)
            to += [weights[strip.start : strip.stop] for strip in part.strips]
            of += [strip.target for strip in part.strips]
        return Staged(job, stage, self.copies.out(to, of, job.landed))

    @staticmethod
    def _weights_in(job: Job, stage: Stage) -> Tensor:
        part, kept = job.part, job.part.held if job.held else job.part.weights
        if kept is not None:
            return kept
        offset = 0 if part.in_place else part.numel * part.grad_dtype.itemsize
        return stage.view(part.weight_dtype, part.numel, offset)

    def _update(self, staged: Staged) -> None:
        """Hand out a part's elements: to a worker that hands them on to the team, or share by share to all
        workers where there is none. Whoever finishes last sends the weights back.

        Two parts are in the workers' hands at a time, so that no thread idles while the last share of a part
        is done.
        """
        part, stage = staged.job.part, staged.stage
        staged.arrived.wait_on_host()
        part.arrive()
        grad, weight = stage.view(part.grad_dtype, part.numel), self._weights_in(staged.job, stage)
        part.clear_padding(grad, weight)
        share = share_of(part.numel, len(self.workers)) if self.team is None else max(part.numel, 1)
        shares = [
            (step, taken, at, min(at + share, run.stop))
            for run, step, taken in staged.job.steps()
            for at in range(run.start, run.stop, share)
        ]
        self._busy.acquire()
        if not shares:  # this rank has no rows of any of them
            self._finish(staged, weight)
            return
        left = Countdown(len(shares), partial(self._finish, staged, weight))
        for step, taken, start, stop in shares:
            state = part.share(start, stop)
            update: Callable[..., None] = adam_update if isinstance(state, AdamRows) else sgd_update
            given = state, grad[start:stop], weight[start:stop], step
            task = partial(update, *given, taken=taken, team=self.team)
            self.workers.submit(partial(self._work, part, task, left))

    def _work(self, part: Part, task: Callable[[], None], left: Countdown) -> None:
        try:
            task()
            left.one_done()
        except BaseException as error:
            self._fail(part, error)

    def _finish(self, staged: Staged, weight: Tensor) -> None:
        part = staged.job.part
        part.leave()
        with self._showing:
            if not part.holding:
                self._show(part, weight)
            self.arena.give(staged.stage, part.ready)
            self._busy.release()
            staged.job.done.set()

    def _show(self, part: Part, weight: Tensor) -> None:
        """Send new weights to where the next forward finds them."""
        strips = [] if part.paged else part.strips_of(part.used)
        from_host = [weight[strip.start : strip.stop] for strip in strips]
        part.ready = self.copies.back([strip.target for strip in strips], from_host, part.free)

    def _fail(self, part: Part | None, error: BaseException) -> None:
        """Keep an error for the training thread, and wake whoever waits for what will not come."""
        self._fail_at(part.label if part is not None else "a part", error)

    def _fail_at(self, label: str, error: BaseException) -> None:
        if self._failure is None:
            self._failure = (label, error)
        self.arena.fail(error)
        if self.paging is not None:
            self.paging.fail(label, error)
        self._busy.release()
        with self._changed:
            self._changed.notify_all()


_alive: weakref.WeakSet[Crew] = weakref.WeakSet()
os.register_at_fork(after_in_child=_alive.clear)  # a child has none of their threads


@atexit.register
def _halt_all() -> None:
    for crew in list(_alive):
        crew.halt()
