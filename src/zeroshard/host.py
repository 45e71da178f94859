"""The life of an update on the host (ZeRO-Offload): gradient lands → staged out → one pass over the state →
weight staged back. `part` names its tensors.

[Note: clipping without waiting] The global norm is known only when backward ends, and by then the updates
should be almost done. While the norm has stayed clear of the limit, each part is updated as it lands, with
the gradient as it is. `optimizer.step()` then looks at the norm. Below the limit, the update was right. Above
it, every part is taken back by the inverse formula, evaluated in fp64, and done again with the clipped
gradient, in one more pass over memory, behind the next forward: equal to the plain order to fp32 rounding.
While the norm is near the limit or above it, nothing is updated before the norm is known; the update then
hides behind the next forward, unit by unit.

[Note: a step ahead] With delayed gradients an update may begin in the forward of the step that applies it,
while forward and backward still compute with the weights before. So its new weights wait in `held` memory,
and `optimizer.step()` lets them go: those that are done are copied then, the others when they are.
"""

from __future__ import annotations

import atexit
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from .due import Countdown, Job, Staged, next_of
from .errors import StateError, TierError
from .native import AdamRows, Team, Workers, adam_update, sgd_update
from .outlook import Outlook
from .part import Part
from .shapes import share_of
from .tier import Arena, Copies, Stage

AT_ONCE = 2  # parts that are updated
AHEAD = 2  # parts on their way to the host while one is updated
BACKLOG = 4  # parts that may wait on the device where no room was planned for all


class HostUpdates:
    """Runs the parts on worker threads.

    What forward asks for first comes first: mostly what lands last in backward, and all of the root, which
    forward begins with. So the host may fall behind during backward and catch up during forward, and the two
    together hide it.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        arena: Arena,
        copies: Copies,
        workers: Workers,
        clip_norm: float,
        undo: bool = True,
        team: Team | None = None,
    ) -> None:
        self.parts, self.arena, self.copies, self.workers = list(parts), arena, copies, workers
        self.team = team
        self.clip_norm, self.undo = clip_norm, undo
        self.outlook = Outlook(clip_norm)
        self.counts = {"early": 0, "late": 0, "undone": 0}  # steps by how their updates ran
        # 8-bit moments cannot be taken back to their exact codes, nor AMSGrad's maximum to the one before, so
        # they wait for the norm.
        overlapped = [p for p in self.parts if p.landing is None]
        lossy = any(p.coded or "max_exp_avg_sq" in p.form.dtypes() for p in overlapped)
        self._reversible = not (lossy and math.isfinite(clip_norm))
        # [Note: clipping without waiting]. Nothing is known of the first norm, and it often is the largest.
        # Without `undo` no gradient can wait for the norm: there is no room for all of them.
        self._early = not math.isfinite(clip_norm) or not undo
        self._failure: tuple[str, BaseException] | None = None
        self._due: list[Job] = []
        self._asked = 0  # parts that forward has asked for since the last step
        self._changed = threading.Condition()
        self._closing = False
        self._busy = threading.Semaphore(AT_ONCE)
        self._showing = threading.Lock()  # whether a part holds its weights back is asked and told under it
        self.paging = next((part.disk.paging for part in self.parts if part.disk is not None), None)
        if self.paging is not None:
            self.paging.failed = self._fail_at
        self._thread = threading.Thread(target=self._run, name="zeroshard-offload", daemon=True)
        self._thread.start()
        _alive.add(self)

    # ------------------------------------------------------------------ during backward

    def accept(self, part: Part, flat: Tensor, used: list[bool]) -> None:
        """A reduced gradient has landed on the device."""
        self.check()
        if not any(used):
            return
        if part.flat is not None or part.taken is not None:
            raise StateError(
                "a second backward before optimizer.step(): with clip_norm the update of "
                f"`{part.params[0].name}` and others "
                "is under way already. Accumulate inside run.no_sync(), and step after each synchronised "
                "backward; a backward "
                "whose gradients are not wanted here (a GAN's other half) belongs inside run.no_sync() too."
            )
        part.flat, part.used = flat, used
        if math.isfinite(self.clip_norm):
            part.squares = part.square_sum(flat)
        if self._early:
            self._start(part, 1.0, hold=part.held is not None)
            if not self._keeps_gradients:
                part.flat = None

    @property
    def _keeps_gradients(self) -> bool:
        return math.isfinite(self.clip_norm) and self.undo

    def _start(self, part: Part, scale: float | None, undo: bool = False, hold: bool = False) -> None:
        """Make a part's update due; with `undo` the one that stands is taken back first, and without a
        `scale` that is all. `hold`: see [Note: a step ahead]."""
        assert part.flat is not None
        stands, held = part.taken if undo else None, hold or (undo and part.holding)
        part.taken = None if scale is None else part.stretches(scale)
        part.holding = hold
        job = Job(part, part.flat, part.taken, self.copies.here(), stands, held, part.let_read())
        part.done = job.done
        with self._changed:
            # Gradients that wait on the device take room there; without `undo` none was planned for all of
            # them.
            while not (self.undo or hold) and len(self._due) >= BACKLOG and self._failure is None:
                self._changed.wait(1.0)
            self._due.append(job)
            self._changed.notify_all()

    @staticmethod
    def _weights_in(job: Job, stage: Stage) -> Tensor:
        part, kept = job.part, job.part.held if job.held else job.part.weights
        if kept is not None:
            return kept
        return stage.view(
            part.weight_dtype, part.numel, 0 if part.in_place else part.numel * part.grad_dtype.itemsize
        )

    # ------------------------------------------------------------------ worker side

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

    # ------------------------------------------------------------------ step

    def squares(self) -> list[Tensor]:
        """What this rank's parts add to the square of the global norm."""
        return [part.squares for part in self.parts if part.squares is not None]

    def commit(self, norm: float, scale: float) -> None:
        """`optimizer.step()`: settle what the global norm says; `scale` is what it clips gradients by."""
        self.check()
        self.outlook.see(norm)
        waiting = [part for part in self.parts if part.flat is not None or part.taken is not None]
        self._check_unchanged(waiting)
        if not self._early:
            self.counts["late"] += 1
            for part in reversed(waiting):  # newest first: the first unit of the forward is done first
                self._start(part, scale)
        elif not scale >= 1.0 and waiting:  # a NaN spoils the weights, as with torch's own clipping
            self._redo(waiting, scale)
        else:
            self.counts["early"] += 1
            self._let_go(waiting)
        for part in waiting:
            self._count(part)
        self._asked = 0
        self.go_on()

    def _let_go(self, parts: Sequence[Part]) -> None:
        """The step has come: new weights may show. See [Note: a step ahead]."""
        free = self.copies.here()
        for part in parts:
            if part.holding:
                assert part.held is not None
                with self._showing:
                    part.holding, part.free = False, free
                    if part.done.is_set():
                        self._show(part, part.held)

    def step(self, parts: Sequence[Part]) -> None:
        """Update stepped parts now, from the gradients that their parameters show."""
        self.check()
        due = [part for part in parts if part.landing is not None and part.landing.shown]
        for part in due:
            assert part.landing is not None
            part.flat, part.used = part.landing.collect()
            self._start(part, 1.0)
        for part in due:
            self.wait(part)
            part.ready.wait_on_host()
            self._count(part)

    @staticmethod
    def _count(part: Part) -> None:
        """One more update, which stands."""
        part.steps = [count + used for count, used in zip(part.steps, part.used, strict=True)]
        for shown, count in zip(part.shown_steps, part.steps, strict=True):
            shown.fill_(count)
        part.flat = part.squares = part.taken = None

    def go_on(self) -> None:
        """Decide how the next step's updates run, by the norms so far."""
        self._early = not self.undo or (self._reversible and self.outlook.clear)

    def _check_unchanged(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if part.taken is not None and part.taken != part.stretches(1.0):
                raise StateError(
                    f"hyperparameters of `{part.params[0].name}` changed between backward and "
                    "optimizer.step() (with sync=Delayed() between forward and it), and the update "
                    "has begun with the old ones. Change them after the step, as LR schedulers do."
                )

    def _redo(self, parts: Sequence[Part], scale: float) -> None:
        """The norm was above the limit after all: take the updates back and do them with the clipped
        gradient."""
        if not self.undo:
            raise StateError(
                f"the gradient norm {self.outlook.norm:.4g} exceeds clip_norm={self.clip_norm} after updates "
                "had begun, and no room was "
                "planned to take them back (undo=False). Load the last checkpoint and pass undo=True."
            )
        self.counts["undone"] += 1
        for part in parts:
            self.wait(part)
        for part in reversed(parts):
            self._start(part, scale, undo=True)

    @property
    def pending(self) -> bool:
        """Whether a backward has been that no step has followed."""
        return any(part.flat is not None or part.taken is not None for part in self.parts)

    def discard(self, parts: Sequence[Part]) -> None:
        """The gradient of the last backward is not wanted after all: take back what was done with it."""
        for part in parts:
            if part.taken is not None:
                self.wait(part)
                if part.flat is None:
                    raise StateError(
                        f"the gradients of `{part.params[0].name}` and others were dropped between backward "
                        "and optimizer.step(), and their update has begun, with no room planned to take it "
                        "back. Put a backward whose gradients are not wanted inside run.no_sync(), or pass a "
                        "finite clip_norm and Offload(undo=True)."
                    )
                self._start(part, None, undo=True)
                self.wait(part)
                part.ready.wait_on_host()
            part.flat = part.squares = part.taken = None

    def wind_up(self) -> None:
        """Nothing follows: drop the gradient of a backward without a step, and wait for all that was begun.
        What was begun a step ahead and cannot be taken back stands, as if its step had been."""
        ahead = [part for part in self.parts if part.holding and part.flat is None]
        self._let_go(ahead)
        for part in ahead:
            self._count(part)
        self.discard(self.parts)
        self.settle()

    # ------------------------------------------------------------------ forward

    def ask(self, part: Part) -> None:
        """Forward needs this part's weights now. It most likely will at this turn again."""
        part.turn, self._asked = self._asked, self._asked + 1
        self.wait(part)

    def wait(self, part: Part) -> None:
        """Let what is launched from here on find this part's weights."""
        self._wait_for(part.done)
        part.ready.wait_on_device()

    def finish(self, part: Part, done: threading.Event) -> None:
        """Wait in any thread for an update that was the last to be begun when `part.done` was this event."""
        self._wait_for(done)
        part.ready.wait_on_host()

    def _wait_for(self, done: threading.Event) -> None:
        while not done.wait(0.5):
            self.check()
        self.check()

    def drain(self) -> None:
        """Wait for the weights of all parts."""
        for part in self.parts:
            self.wait(part)
            part.ready.wait_on_host()

    def settle(self) -> None:
        """Wait for all that was begun: the weights, and what is written to the disk."""
        self.drain()
        for part in self.parts:
            if part.disk is not None:
                part.disk.paging.settle(part.disk.page)
        self.check()

    def check(self) -> None:
        """Raise in the training thread what failed in a worker."""
        if self._failure is not None:
            label, error = self._failure
            raise TierError(f"the host update of {label} failed: {type(error).__name__}: {error}") from error

    def close(self) -> None:
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


_alive: weakref.WeakSet[HostUpdates] = weakref.WeakSet()


@atexit.register
def _halt_all() -> None:
    for updates in list(_alive):
        updates.halt()
