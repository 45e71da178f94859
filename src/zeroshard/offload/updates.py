"""Decides when each offload group is updated, and whether that update stands.

Whether the next gradient norm is expected to stay below the limit, from the norms so far. No torch.

The life of an update on the host (ZeRO-Offload): begun when its gradient lands or when the norm is known,
taken back and done again where it was too early. `part` names its tensors, `executor` carries it out.

[Note: clipping without waiting] The global norm is known only when backward ends, and by then the updates
should be almost done. While the norm has stayed clear of the limit, each part is updated as it lands, with
the gradient as it is. `optimizer.step()` then looks at the norm. Below the limit, the update was right. Above
it, every part is taken back by the inverse formula, evaluated in fp64, and done again with the clipped
gradient, in one more pass over memory, behind the next forward: equal to the plain order to fp32 rounding.
While the norm is near the limit or above it, nothing is updated before the norm is known; the update then
hides behind the next forward, unit by unit.

[Note: what is too large to be taken back] A gradient far above those before, of a loss that leaped or is no
number, leaves nothing of the state that could be told again. So an update that is to be taken back if need
be is not made where the square of its part's own gradient is over a bound, from the gradients before. Nobody
waits for that number either: it travels with the gradient, and whoever updates looks at it first.
`optimizer.step()` sees the same number, knows which updates were left out, and makes them then.

[Note: a step ahead] With delayed gradients an update may begin in the forward of the step that applies it,
while forward and backward still compute with the weights before. So its new weights wait in `held` memory,
and `optimizer.step()` lets them go: those that are done are copied then, the others when they are.

[Note: a second backward] Where there is no room for all gradients until the norm is known, those of the
units nearest the loss do not wait: what each adds to the norm is kept, and the gradient is dropped. Once the
norm is known, `optimizer.step()` runs these units backward again, one by one, from the inputs and output
gradients that `runtime/second_backward.py` kept, and each gradient is updated with as it lands. So nothing of
them is ever taken back. A unit whose gradient is the sum of several backward passes keeps it, as one does
that was called more than once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from zeroshard.errors import StateError
from zeroshard.kernels import Bound
from zeroshard.params.sharded_param import ShardedParam

from .deferred import DeferredGrads
from .group import OffloadGroup, UpdateDone, UpdatePhase
from .work import HostUpdate, SecondBackward, UpdateExecutor

UNKNOWN = 0.05  # how far a norm rises, as a difference of logarithms, before two have been seen


class NormForecast:
    """`norm` is the last one; `swing` is how far norms have lately risen from one step to the next.

    A norm that is below the limit by less than it rises in a step may exceed it the next time.

    >>> forecast = NormForecast(limit=1.0)
    >>> for norm in (0.90, 0.91, 0.92):
    ...     forecast.see(norm)
    >>> forecast.clear
    True
    >>> forecast.see(0.60)  # norms that jump about need more room
    >>> forecast.see(0.92)
    >>> forecast.clear
    False
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.norm, self.swing = 0.0, UNKNOWN

    def see(self, norm: float) -> None:
        """The norm of one more step."""
        if self.norm > 0.0 and 0.0 < norm < math.inf:
            self.swing = (self.swing + max(0.0, math.log(norm / self.norm))) / 2
        self.norm = norm

    @property
    def clear(self) -> bool:
        return math.isinf(self.limit) or self.norm * math.exp(self.swing) < self.limit


_grad = attrgetter("grad")
UNLIKE = 0.1  # by how much the square of a norm may differ between a backward and the same again
BACKLOG = 4  # parts that may wait on the device where no room was planned for all


class HostUpdates:
    """Decides when each part is updated, and whether that stands."""

    def __init__(
        self,
        parts: Sequence[OffloadGroup],
        executor: UpdateExecutor,
        clip_norm: float,
        undo: bool = True,
    ) -> None:
        self.parts, self.executor = list(parts), executor
        self.clip_norm, self.undo = clip_norm, undo
        self.forecast = NormForecast(clip_norm)
        self.ahead = any(part.held is not None for part in self.parts)  # see [Note: a step ahead]
        self.counts = {"early": 0, "late": 0, "undone": 0}  # steps by how their updates ran
        # [Note: clipping without waiting]. Nothing is known of the first norm, and it often is the largest.
        # Without `undo` no gradient can wait for the norm: there is no room for all of them.
        self._early = not math.isfinite(clip_norm) or not undo
        self._asked = 0  # parts that forward has asked for since the last step
        self._keeps_gradients = undo and (math.isfinite(clip_norm) or any(p.deferred for p in self.parts))
        # A graph leads to parameters themselves, and would compute with what is new; see `LoopHabit`.
        self.graphed = False
        self.nested = False  # some backward ran inside another, in which gradients may come twice
        self.busy = False  # an update may have begun that nobody has waited for
        self.waits = False
        self.second: SecondBackward | None = None
        self._repeated: set[int] = set()  # by id(part): those whose weights a second backward may need
        self._again: dict[int, float | Sequence[float]] = {}  # by id(part): the scales of a second backward
        self._compared: list[tuple[OffloadGroup, Tensor]] = []  # squares of norms, of both backward passes
        self._alike = False  # the first of them were

    def repeat_by(self, second: SecondBackward) -> None:
        """What runs the backward of some units a second time."""
        self.second = second
        self._repeated = {id(part) for part in self.parts if second.covers(part)}

    def wait_in_step(self, waits: bool) -> None:
        """Whether `step()` returns when its updates are done, as nothing else would wait for them."""
        self.waits = waits

    # ------------------------------------------------------------------ during backward

    def accept(self, part: OffloadGroup, flat: Tensor, used: list[bool]) -> None:
        """A reduced gradient has landed on the device."""
        self.executor.check()
        if self.second is not None and self.second.running:
            self._take_again(part, flat)
            return
        if part.deferred is not None:
            if any(used):
                self._land(part, part.deferred, flat, used)
            return
        if any(used):
            if part.update.fresh:
                flat, used = self._joined(part, flat, used)
            elif part.update.waits:
                raise StateError(
                    "a second backward before optimizer.step(): with clip_norm the update of "
                    f"`{part.params[0].name}` and others is under way already. Accumulate inside "
                    "run.no_sync(), and step after each synchronised backward; a backward whose gradients "
                    "are not wanted here (a GAN's other half) belongs inside run.no_sync() too."
                )
            part.update.land(flat, used)
            if part.measured is not None:
                part.measure(flat)
            if self.second is not None and self.second.can(part):
                part.update.drop()
            elif not part.update.awaits_end:
                self._begin(part)
        self._let_gradient_go(part)

    def _land(self, part: OffloadGroup, deferred: DeferredGrads, flat: Tensor, used: list[bool]) -> None:
        """The loop gets handles of a gradient. Where it is likely to let them alone, their update begins."""
        self._refuse_second(part)
        self.busy = True  # whoever uses weights now does so before the step
        part.update.land(flat, deferred.accept(flat, used))
        if part.measured is not None:
            torch.dot(deferred.norms, deferred.norms, out=part.measured.size[0])
        landed = deferred.landed
        if self.second is not None and landed is not None and not deferred.habit.accumulates:
            if self.second.can(part):
                landed.drop(partial(self.second.run, [part]))
                part.update.let_gradient_go()
                return
        if not part.update.awaits_end and not self.nested:
            self._begin(part)
        self._let_gradient_go(part)

    def _let_gradient_go(self, part: OffloadGroup) -> None:
        """Where what has begun is not to be taken back, or nothing has, and the loop's handles have it."""
        if not self._keeps_gradients if part.update.begun else part.deferred is not None:
            part.update.let_gradient_go()

    @staticmethod
    def _refuse_second(part: OffloadGroup) -> None:
        if part.update.begun or part.update.dropped:
            raise StateError(
                f"gradients came to `{part.params[0].name}` or others of its unit twice in one backward, as "
                "they do where parameters are used inside of a reentrant checkpoint and again elsewhere, and "
                "their update has begun with the first: the others may be those of new weights. Pass "
                "use_reentrant=False to torch.utils.checkpoint."
            )

    def _joined(self, part: OffloadGroup, flat: Tensor, used: list[bool]) -> tuple[Tensor, list[bool]]:
        """More of the gradient that came first in this backward: a block ran twice, under a reentrant
        checkpoint. Returns the sum."""
        self._refuse_second(part)
        assert part.update.flat is not None
        flat[: part.numel].add_(part.update.flat[: part.numel])
        return flat, [one or other for one, other in zip(part.update.used, used, strict=True)]

    @torch.no_grad()
    def make_room(self, part: OffloadGroup, shown: Tensor) -> None:
        """The memory where a gradient landed is about to be overwritten, by another backward or by another
        round of this one, of which this part may see nothing."""
        if not part.update.known:
            self.wait(part)
        moved = part.deferred.make_room(shown) if part.deferred is not None else None
        if part.update.flat is not None and part.update.flat.data_ptr() == shown.data_ptr():
            part.update.move(shown.clone() if moved is None else moved)

    def _begin(self, part: OffloadGroup) -> None:
        """Update a part before its step, where it is likely what that asks for and can be taken back."""
        if id(part) in self._repeated:
            return
        # What the step is likely to multiply its gradient by.
        scale = 1.0 if self._early else None
        if part.deferred is not None:
            scale = None if self.graphed else part.deferred.habit.expected
        if scale is None or not (part.reversible or not self._keeps_gradients):
            return
        if part.deferred is not None:
            part.deferred.habit.begin()
        bound = part.measured.bound(scale) if self._keeps_gradients and part.measured is not None else None
        self._start(part, scale, hold=part.held is not None, bound=bound)

    def _look(self, parts: Sequence[OffloadGroup]) -> list[float | None]:
        """The squares of the parts' gradients, where they were measured; and know which of the updates that
        were begun were left out, as their gradients were too large."""
        seen = [p.update.flat is not None and p.measured is not None and self._keeps_gradients for p in parts]
        measured = [part.size for part, has in zip(parts, seen, strict=True) if has]
        sizes = iter(torch.cat(measured).tolist() if measured else ())
        found: list[float | None] = [next(sizes) if has else None for has in seen]
        for part, size in zip(parts, found, strict=True):
            limit = part.update.limit if part.update.begun else None
            if limit is not None and size is not None and limit.exceeds(size):
                self.wait(part)
                part.update.leave_out()
        return found

    def _start(
        self,
        part: OffloadGroup,
        scale: float | Sequence[float] | None,
        undo: bool = False,
        hold: bool = False,
        bound: Bound | None = None,
        waits: bool | None = None,
    ) -> None:
        """Make a part's update due; with `undo` the one that stands is taken back first, and without a
        `scale` that is all. `hold`: see [Note: a step ahead]. `waits`: whether there is room for all
        gradients that wait for the host."""
        update = part.update
        assert update.flat is not None
        if not update.known:  # no forward has asked for it since: two updates of one part have an order
            self.wait(part)
        stands, held = update.ranges if undo else None, hold or (undo and update.holding)
        reader, done = part.let_read(), update.done
        taken = None if scale is None else part.ranges_at(scale)
        job = HostUpdate(part, update.flat, taken, self.executor.copies.here(), stands, held, reader, bound)
        before = update.begin(taken, hold, bound)
        self.busy = True
        try:
            # Gradients that wait on the device take room there; without `undo` none was planned for all.
            self.executor.submit(job, None if (self.undo or hold if waits is None else waits) else BACKLOG)
        except BaseException:
            if update.done is done:  # it was not begun
                update.withdraw(before)
                if reader is not None:
                    part.read_by(reader)
            raise

    # ------------------------------------------------------------------ step

    def squares(self) -> list[Tensor]:
        """What this rank's parts add to the square of the global norm."""
        return [part.update.squares for part in self.parts if part.update.squares is not None]

    def commit(self, norm: float, scale: float) -> None:
        """`optimizer.step()`: settle what the global norm says; `scale` is what it clips gradients by."""
        self.executor.check()
        self.forecast.see(norm)
        waiting = self._promised
        self._check_unchanged(waiting)
        self._settle_step(waiting, [scale] * len(waiting))
        self.go_on()

    def _settle_step(self, parts: Sequence[OffloadGroup], scales: Sequence[float | Sequence[float]]) -> None:
        """Let the updates stand that were begun as the step wants them, take the others back and do them
        again, and begin those that were not."""
        for part, size, scale in zip(parts, self._look(parts), scales, strict=True):
            if part.measured is not None and size is not None:
                part.measured.expect(size * scale * scale if isinstance(scale, float) else None, part.leap)
        begun = [part.update.begun for part in parts]
        stands = [
            part.update.begun and part.update.ranges == part.ranges_at(scale)
            for part, scale in zip(parts, scales, strict=True)
        ]
        undone = [part for part, has, keeps in zip(parts, begun, stands, strict=True) if has and not keeps]
        if undone:
            self._check_undo()
        self.counts["undone" if undone else "early" if all(begun) else "late"] += 1
        for part in undone:
            self.wait(part)
        # Newest first: the first unit of the forward is done first.
        due = [pair for pair, keeps in zip(zip(parts, scales, strict=True), stands, strict=True) if not keeps]
        once = [pair for pair in due if id(pair[0]) not in self._repeated]
        for part, scale in reversed(once):
            self._start(part, scale, undo=part.update.begun)
        if len(once) < len(due):
            self._repeat([pair for pair in due if id(pair[0]) in self._repeated])
        if self.ahead:
            self._let_go([part for part, keeps in zip(parts, stands, strict=True) if keeps])
        for part in parts:
            part.count()
        self._asked = 0

    def _repeat(self, due: Sequence[tuple[OffloadGroup, float | Sequence[float]]]) -> None:
        """Bring dropped gradients again, and update with each as it lands. Of these units some may have kept
        theirs."""
        assert self.second is not None
        dropped = [pair for pair in due if pair[0].update.dropped]
        self._compare()
        self._again = {id(part): scale for part, scale in dropped}
        try:
            self.second.run([part for part, _ in dropped])
        finally:
            missing, self._again = self._again, {}
        if not self._alike:
            self._compare()
        if left := [part for part, _ in dropped if id(part) in missing]:
            raise _unlike(left[0])
        for part, scale in reversed(due):  # the second backward may have led through these units
            if part.update.phase is UpdatePhase.LANDED:
                self._start(part, scale)

    def _take_again(self, part: OffloadGroup, flat: Tensor) -> None:
        """A gradient that was dropped has come again: for its update, or for whoever looks at it."""
        scale = self._again.pop(id(part), None)
        if scale is None:
            landed = part.deferred.landed if part.deferred is not None else None
            if landed is not None and landed.dropped:
                landed.move(flat)
            return
        if part.measured is not None:
            square = torch.linalg.vector_norm(flat[: part.numel], dtype=torch.float32).square()
            self._compared.append((part, torch.stack((part.size[0], square))))
            if not self._alike:
                self._compare(last=False)
        if part.deferred is not None:
            part.deferred.spend()
        part.update.come_again(flat)
        self._start(part, scale, waits=False)
        part.update.let_gradient_go()

    def _compare(self, last: bool = True) -> None:
        """Hold the gradients of second backward passes against the first; `last`: all of a step are here."""
        compared, self._compared = self._compared, []
        if not compared:
            return
        pairs = torch.stack([pair for _, pair in compared]).tolist()
        most = max(first for first, _ in pairs)
        for (part, _), (first, again) in zip(compared, pairs, strict=True):
            if abs(again - first) > UNLIKE * first + 1e-6 * most:
                raise _unlike(part)
        self._alike = self._alike or last

    def _let_go(self, parts: Sequence[OffloadGroup]) -> None:
        """The step has come: new weights may show. See [Note: a step ahead]."""
        free = self.executor.copies.here()
        for part in parts:
            if part.update.holding:
                self.executor.let_go(part, free)

    def step(self, parts: Sequence[OffloadGroup], shrinks: float) -> None:
        """Update stepped parts now, from gradients that their parameters show, in fp16 times `shrinks`; and
        see to the updates of deferred ones."""
        self.executor.check()
        self._step_deferred([(part, part.deferred) for part in parts if part.deferred is not None], shrinks)
        shown = [(part, part.reduced_grad) for part in parts if part.reduced_grad is not None]
        due = [part for part, grads in shown if grads.shown]
        replaced = [(part, grads, grads.replaced()) for part, grads in shown if grads.shown]
        for part, grads, others in replaced:
            part.update.land(*grads.collect(others))
            self._start(part, shrinks if part.grad_dtype == torch.float16 else 1.0)
        for part in due:
            self.wait(part)
            part.update.ready.wait_on_host()
            part.count()

    def _step_deferred(self, members: Sequence[tuple[OffloadGroup, DeferredGrads]], shrinks: float) -> None:
        """What the loop has made of its gradients decides: let them alone, or multiplied them by one number;
        or else."""
        self.graphed = False
        wanted = [_common_factor(part, deferred) for part, deferred in members]
        more = [shrinks if part.grad_dtype == torch.float16 else 1.0 for part, _ in members]
        wanted = [
            factor if factor is None else factor * each for factor, each in zip(wanted, more, strict=True)
        ]
        self._take_back(
            [
                part
                for (part, _), factor in zip(members, wanted, strict=True)
                if part.update.begun and (factor is None or part.replaced)
            ]
        )
        due, scales = list[OffloadGroup](), list[float | Sequence[float]]()
        for (part, deferred), factor, each in zip(members, wanted, more, strict=True):
            factors: list[float] = []
            if not part.update.begun:
                if not deferred.shown:
                    deferred.habit.drop()
                    continue
                if not part.update.known:
                    self.wait(part)  # it may still read what landed, which the loop may have changed
                part.take_replaced()
                if deferred.awaits_second:
                    shown = [param.sharded_param.grad is not None for param in deferred.params]
                    part.update.await_second(shown)
                    factors = [1.0 if own is None else own for own in deferred.factors()]
                else:
                    flat, used, factors = deferred.collect()
                    part.update.land(flat, used)
            due.append(part)
            scales.append([own * each for own in factors] if factor is None else factor)
            deferred.habit.step(factor)
        if due:
            self._settle_step(due, scales)
            if self.waits:
                self.settle()

    def go_on(self) -> None:
        """Decide how the next step's updates run, by the norms so far."""
        self._early = not self.undo or self.forecast.clear

    def _check_unchanged(self, parts: Sequence[OffloadGroup]) -> None:
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
            if part.update.begun and part.update.ranges != part.ranges_at(1.0):
                raise StateError(
                    f"hyperparameters of `{part.params[0].name}` changed between backward and "
                    "optimizer.step() (with sync=Delayed() between forward and it), and the update "
                    "has begun with the old ones. Change them after the step, as LR schedulers do."
                )

    def _check_undo(self) -> None:
        """The norm was above the limit after all: updates are taken back and done with the clipped
        gradient."""
        if not self.undo:
            raise StateError(
                f"the gradient norm {self.forecast.norm:.4g} exceeds clip_norm={self.clip_norm} after "
                "updates had begun, and no room was planned to take them back (undo=False). Load the last "
                "checkpoint and pass undo=True."
            )

    @property
    def pending(self) -> bool:
        """Whether a backward has been that a step must follow."""
        return bool(self._promised)

    @property
    def begun(self) -> list[ShardedParam]:
        """Those that the updates of that backward change."""
        return [
            p
            for part in self._promised
            for p, used in zip(part.params, part.update.used, strict=True)
            if used
        ]

    @property
    def _promised(self) -> list[OffloadGroup]:
        """Parts whose gradients the next step takes as they are."""
        return [part for part in self.parts if part.deferred is None and part.update.waits]

    def discard(self, parts: Sequence[OffloadGroup]) -> None:
        """The gradient of the last backward is not wanted after all: take back what was done with it."""
        if begun := [part for part in parts if part.update.begun]:
            self._take_back(begun)
        for part in parts:
            part.update.end()
            if part.deferred is not None:
                part.deferred.habit.drop()
                part.deferred.spend()
        if self.second is not None:
            self.second.keep(self._dropped)

    def _take_back(self, parts: Sequence[OffloadGroup]) -> None:
        """Weights and state are again those before what has begun, now."""
        self._look(parts)
        begun = [part for part in parts if part.update.begun]
        for part in begun:
            self.wait(part)
            if part.update.phase is UpdatePhase.FINAL:
                raise StateError(
                    f"the gradients of `{part.params[0].name}` and others were dropped between backward "
                    "and optimizer.step(), and their update has begun, with no room planned to take it "
                    "back. Put a backward whose gradients are not wanted inside run.no_sync(), or pass a "
                    "finite clip_norm and Offload(undo=True)."
                )
            self._start(part, None, undo=True)
        for part in begun:
            self.wait(part)
            self._let_go([part])  # a split master's other half may round otherwise
            part.update.ready.wait_on_host()
        for part in parts:
            self._let_gradient_go(part)

    def interrupt(self) -> None:
        """The plain loop computes with weights, or looks at them, where nothing of its next step may have
        begun."""
        deferred = [(part, part.deferred.habit) for part in self.parts if part.deferred is not None]
        for _, habit in deferred:
            habit.differ()
        if begun := [part for part, _ in deferred if part.update.begun]:
            self._take_back(begun)

    def wind_up(self) -> None:
        """Nothing follows: drop the gradient of a backward without a step, and wait for all that was begun.
        What no norm could have stopped, or was begun a step ahead, and cannot be taken back stands, as if its
        step had been."""
        unlimited = not math.isfinite(self.clip_norm)
        final = [p for p in self.parts if p.update.phase is UpdatePhase.FINAL]
        begun = [p for p in final if unlimited or p.update.holding]
        self._let_go(begun)
        for part in begun:
            part.count()
        self.discard(self.parts)
        self.settle()

    # ------------------------------------------------------------------ forward

    def ask(self, part: OffloadGroup) -> None:
        """Forward needs this part's weights now. It most likely will at this turn again."""
        part.update.ask(self._asked)
        self._asked += 1
        self.wait(part)

    def wait(self, part: OffloadGroup) -> None:
        """Let what is launched from here on find this part's weights."""
        self.executor.wait_for(part.update.done)
        part.update.ready.wait_on_device()
        part.update.wait_over()

    def begin_backward(self) -> None:
        """Gradients are about to land again: what no forward has asked for may still be read from there."""
        self.interrupt()
        if self.second is not None:
            self.bring_dropped()
        early = [part for part in self.parts if part.update.begun and not part.update.holding]
        # Graphs that saved these must not be followed any more.
        increment_version([p.unsharded_param for part in early for p in part.params])
        for part in self.parts:
            part.update.age()
            if not part.update.known and not part.update.holding:
                self.wait(part)

    def bring_dropped(self, last: bool = False) -> None:
        """Another backward adds to gradients that were dropped, or the run is closed, with its `last` ones:
        they come again before."""
        if self.second is None:
            return
        self.second.keep(self._dropped)
        for part in self._dropped:
            if part.deferred is not None:
                self.second.run([part])
        for part in self.parts if last else ():
            if part.deferred is not None:
                part.deferred.hide_spent()

    @property
    def _dropped(self) -> list[OffloadGroup]:
        """Those whose gradients a second backward may have to bring."""
        landed = [part.deferred.landed if part.deferred is not None else None for part in self.parts]
        return [
            part
            for part, grads in zip(self.parts, landed, strict=True)
            if part.update.dropped or (grads is not None and grads.dropped)
        ]

    def end_backward(self) -> None:
        """Nothing computes with weights any more: begin with what has waited for that."""
        for part in self.parts:
            if part.update.end_wait() or self.nested:
                landed = part.deferred.landed if part.deferred is not None else None
                waits = landed is not None and not landed.dropped
                if landed is not None and waits and part.update.fresh and not part.update.begun:
                    part.update.land(landed.flat, part.update.used)
                if part.update.fresh and part.update.phase is UpdatePhase.LANDED:
                    self._begin(part)
                self._let_gradient_go(part)
        if self.second is not None:
            self.second.keep(self._dropped)

    def finish(self, part: OffloadGroup, done: UpdateDone) -> None:
        """Wait in any thread for an update that was the last to be begun when its `done` was this event."""
        self.executor.wait_for(done)
        part.update.ready.wait_on_host()

    def drain(self) -> None:
        """Wait for the weights of all parts."""
        for part in self.parts:
            self.wait(part)
            part.update.ready.wait_on_host()

    def settle(self) -> None:
        """Wait for all that was begun: the weights, and what is written to the disk."""
        self.drain()
        for part in self.parts:
            if part.disk is not None:
                part.disk.paging.settle(part.disk.page)
        self.executor.check()
        self.busy = False

    def close(self) -> None:
        self.executor.close()


def _unlike(part: OffloadGroup) -> StateError:
    return StateError(
        f"the second backward of {part.label} gave other gradients than the first: the forward of that unit "
        "does not compute the same again (it reads what has changed meanwhile), or its parameters are used "
        "outside of its call. Pass Offload(repeat_backward=) fewer units, or 0. The update of this step is "
        "not complete: go on from the last checkpoint."
    )


def _common_factor(part: OffloadGroup, deferred: DeferredGrads) -> float | None:
    """What the loop has multiplied all gradients of a part by, as they landed. None: it has done something
    else with some of them."""
    factors = deferred.factors()
    shown = [param.sharded_param.grad is not None for param in part.params]
    known = {factor for factor, has in zip(factors, shown, strict=True) if has}
    return next(iter(known)) if shown == part.update.used and len(known) == 1 else None


def _refuse_strays(part: OffloadGroup) -> None:
    """A gradient that came to a sharded parameter itself is none of those that the host's update has begun
    with."""
    if not any(grad is not None for grad in map(_grad, part.sharded_params)):
        return
    for param in part.params:
        if param.sharded_param.grad is None:
            continue
        if param.sharded_param.grad.numel():
            raise StateError(
                f"a gradient came to `{param.name}` from outside of the model's forward (a penalty on the "
                "weights, say): with offload and clip_norm the host updates it with what came from inside "
                "alone. Compute it in the model's forward, or drop clip_norm= and clip with "
                "clip_grad_norm_()."
            )
        param.sharded_param.grad = None  # of no elements, and nothing for torch's own step
