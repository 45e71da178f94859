"""The life of an update on the host (ZeRO-Offload): begun when its gradient lands or when the norm is known,
taken back and done again where it was too early. `part` names its tensors, `crew` carries it out.

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

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zeroshard.errors import StateError
from zeroshard.life.shard import Param

from .crew import Crew
from .due import Job
from .mail import Mail
from .outlook import Outlook
from .part import Done, Part

BACKLOG = 4  # parts that may wait on the device where no room was planned for all


class HostUpdates:
    """Decides when each part is updated, and whether that stands."""

    def __init__(self, parts: Sequence[Part], crew: Crew | Mail, clip_norm: float, undo: bool = True) -> None:
        self.parts, self.crew = list(parts), crew
        self.clip_norm, self.undo = clip_norm, undo
        self.outlook = Outlook(clip_norm)
        self.ahead = any(part.held is not None for part in self.parts)  # see [Note: a step ahead]
        self.counts = {"early": 0, "late": 0, "undone": 0}  # steps by how their updates ran
        # 8-bit moments cannot be taken back to their exact codes, nor AMSGrad's maximum to the one before, so
        # they wait for the norm.
        overlapped = [p for p in self.parts if p.landing is None]
        lossy = any(p.coded or "max_exp_avg_sq" in p.form.dtypes() for p in overlapped)
        self._reversible = not (lossy and math.isfinite(clip_norm))
        # [Note: clipping without waiting]. Nothing is known of the first norm, and it often is the largest.
        # Without `undo` no gradient can wait for the norm: there is no room for all of them.
        self._early = not math.isfinite(clip_norm) or not undo
        self._asked = 0  # parts that forward has asked for since the last step

    # ------------------------------------------------------------------ during backward

    def accept(self, part: Part, flat: Tensor, used: list[bool]) -> None:
        """A reduced gradient has landed on the device."""
        self.crew.check()
        if not any(used):
            return
        if part.flat is not None or part.taken is not None:
            raise StateError(
                "a second backward before optimizer.step(): with clip_norm the update of "
                f"`{part.params[0].name}` and others is under way already. Accumulate inside run.no_sync(), "
                "and step after each synchronised backward; a backward whose gradients are not wanted here "
                "(a GAN's other half) belongs inside run.no_sync() too."
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
        if not part.known:  # no forward has asked for it since: two updates of one part have an order
            self.wait(part)
        stands, held = part.taken if undo else None, hold or (undo and part.holding)
        before, reader, done = (part.taken, part.holding, part.known), part.let_read(), part.done
        taken = None if scale is None else part.stretches(scale)
        job = Job(part, part.flat, taken, self.crew.copies.here(), stands, held, reader)
        part.taken, part.holding, part.known = taken, hold, False
        try:
            # Gradients that wait on the device take room there; without `undo` none was planned for all.
            self.crew.submit(job, None if self.undo or hold else BACKLOG)
        except BaseException:
            if part.done is done:  # it was not begun
                part.taken, part.holding, part.known = before
                if reader is not None:
                    part.read_by(reader)
            raise

    # ------------------------------------------------------------------ step

    def squares(self) -> list[Tensor]:
        """What this rank's parts add to the square of the global norm."""
        return [part.squares for part in self.parts if part.squares is not None]

    def commit(self, norm: float, scale: float) -> None:
        """`optimizer.step()`: settle what the global norm says; `scale` is what it clips gradients by."""
        self.crew.check()
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
        free = self.crew.copies.here()
        for part in parts:
            if part.holding:
                self.crew.let_go(part, free)

    def step(self, parts: Sequence[Part], shrinks: float) -> None:
        """Update stepped parts now, from gradients that their parameters show, in fp16 times `shrinks`."""
        self.crew.check()
        due = [part for part in parts if part.landing is not None and part.landing.shown]
        for part in due:
            assert part.landing is not None
            part.flat, part.used = part.landing.collect()
            self._start(part, shrinks if part.grad_dtype == torch.float16 else 1.0)
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
            _refuse_strays(part)
            other = part.unlike(part.optimizer.state) if part.optimizer is not None else None
            if other is not None:
                raise StateError(
                    f"the optimizer's state of `{other.name}` was replaced, or its step set, by hand: with "
                    "offload and clip_norm the host has it and would not know. Change moments in place, "
                    "after `with run.gathered(): pass`, which waits for the host; for all else use "
                    "optimizer.load_state_dict(), also to go on from here."
                )
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
                "had begun, and no room was planned to take them back (undo=False). Load the last checkpoint "
                "and pass undo=True."
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

    @property
    def begun(self) -> list[Param]:
        """Those that the updates of that backward change."""
        waiting = [part for part in self.parts if part.flat is not None or part.taken is not None]
        return [p for part in waiting for p, used in zip(part.params, part.used, strict=True) if used]

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
        self.crew.wait_for(part.done)
        part.ready.wait_on_device()
        part.known = True

    def await_unasked(self) -> None:
        """Gradients are about to land again: what no forward has asked for may still be read from there."""
        for part in self.parts:
            if not part.known and not part.holding:
                self.wait(part)

    def finish(self, part: Part, done: Done) -> None:
        """Wait in any thread for an update that was the last to be begun when `part.done` was this event."""
        self.crew.wait_for(done)
        part.ready.wait_on_host()

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
        self.crew.check()

    def close(self) -> None:
        self.crew.close()


def _refuse_strays(part: Part) -> None:
    """A gradient that came to a home itself is none of those that the host's update has begun with."""
    for param in part.params:
        if param.home.grad is None:
            continue
        if param.home.grad.numel():
            raise StateError(
                f"a gradient came to `{param.name}` from outside of the model's forward (a penalty on the "
                "weights, say): with offload and clip_norm the host updates it with what came from inside "
                "alone. Compute it in the model's forward, or drop clip_norm= and clip with "
                "clip_grad_norm_()."
            )
        param.home.grad = None  # of no elements, and nothing for torch's own step
