"""Delayed updates: gradients reach the homes one backward later.

[Note: one behind] A bucket's wire is filled in one backward and waited for when the same bucket is about to
be filled in the next, so its reduction has the time of a whole step. It is summed into a buffer of its own
(`coming`), because `landed`, which `home.grad` shows, still has the gradient of the step before: some
transports add as soon as the pieces are there. So every bucket has its own wire at every stage.

[Note: nobody reads any more] A bucket of this backward cannot come back before every rank has sent it, and
is through with its parameters: so host updates may begin when it lands. A bucket of the last backward can:
peers may still gather the rows that it would change. Sinks get theirs at the end of backward, behind a fence;
early ones, which change no row before the step, as soon as it is there, from the next forward on.

[Note: parameters first] New parameters are needed when the next forward begins, and these gradients only in
the next backward. But both take the same way, one after another. So the last buckets of a backward, a quarter
of all, leave behind the new parameters: when the next forward has begun. All ranks do it at the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.comm import Transport, Work
from zeroshard.comm.transport import Done
from zeroshard.errors import StateError
from zeroshard.life.bucket import Bucket, EarlySink, WholeBucket
from zeroshard.life.grad import Gradients, LocalBucket, LocalGradients
from zeroshard.life.guard import Guarded
from zeroshard.life.shard import Faces, Param
from zeroshard.life.step import Update
from zeroshard.policy import Delayed
from zeroshard.tier.pool import Ledger

from .pace import Kept, Pace


class DelayedGradients(Gradients):
    """See [Note: one behind]. With `behind` off it is `Gradients`, at the price of its wires."""

    def __init__(
        self, buckets: list[Bucket], transport: Transport, faces: Faces, stage: int, ledger: Ledger
    ) -> None:
        # Stage 1 as 2: `landed` must not be a part of the wire, which the next gradient overwrites.
        super().__init__(buckets, transport, faces, min(stage, 1) * 2, ledger)
        self.behind = True
        self._coming: list[Tensor] = []
        for bucket in buckets:
            if isinstance(bucket, WholeBucket):
                self._coming.append(bucket.coming)
            else:
                self._coming.append(torch.zeros_like(bucket.shown))
                ledger.book("gradients", bucket.shown.nbytes)
        self._due: dict[int, Work] = {}  # by bucket: a reduction whose result nobody has seen
        self._late: list[Bucket] = []  # filled, to be sent in the next forward
        self._punctual = len(buckets) - max(len(buckets) // 4, 1)  # see [Note: parameters first]
        self._ready: dict[int, list[bool]] = {}  # landed, not shown: which parameters any rank used

    def advance(self) -> bool:
        """Hand early sinks what has come of the last round. Whether any of it was still on its way: in the
        first look after a backward all ranks say the same."""
        last_round = [(self.buckets[index], work) for index, work in self._due.items() if index >= self._next]
        early = [(bucket, work) for bucket, work in last_round if self._is_early(bucket)]
        for bucket, work in early:
            assert isinstance(bucket.sink, EarlySink)
            if bucket.sink.idle and work.poll():
                self._land(bucket)
        if self.stage == 0:
            self._poll()
        return bool(early)

    def _is_early(self, bucket: Bucket) -> bool:
        return self.behind and isinstance(bucket.sink, EarlySink)

    def _send(self, bucket: Bucket) -> None:
        self._keep_aside(bucket)
        self._land(bucket)
        bucket.fill()
        # Codes are short, and the next round may have another codec.
        if self.behind and bucket.index >= self._punctual and type(bucket) is Bucket:
            self._late.append(bucket)
        else:
            self._start(bucket)
        self._next += 1

    def _start(self, bucket: Bucket) -> None:
        bucket.before_change()  # of what is coming
        shown = bucket.landed
        if not isinstance(bucket, WholeBucket):
            bucket.landed = self._coming[bucket.index]
        self._due[bucket.index] = bucket.reduce()
        bucket.landed = shown

    def start_late(self) -> None:
        """The next forward has begun, or somebody wants to see what is under way."""
        late, self._late = self._late, []
        for bucket in late:
            self._start(bucket)

    @torch.no_grad()
    def _land(self, bucket: Bucket) -> None:
        """The last round's gradient of this bucket, if there is one."""
        if bucket in self._late:
            self.start_late()
        work = self._due.pop(bucket.index, None)
        if work is None:
            return
        work.wait()
        if isinstance(bucket.sink, EarlySink):
            bucket.sink.wait()
        coming, unseen = self._coming[bucket.index], self._ready.get(bucket.index)
        if unseen is None:
            bucket.shown.copy_(coming)
        else:  # no longer behind: the one under way and the one that has just come are averaged
            bucket.shown.add_(coming).mul_(0.5)
        self._ready[bucket.index] = bucket.used_anywhere()
        if self._is_early(bucket):
            assert bucket.sink is not None
            bucket.sink(bucket.for_sink(), self._ready.pop(bucket.index))

    def _progress(self) -> None:
        self.advance()
        self._poll()

    def _poll(self) -> None:
        for work in self._due.values():
            work.poll()

    def finish(self) -> None:
        """Send what is left, and show what has landed: the last round, or, when not behind, this one."""
        while self._next < len(self.buckets):
            self._send(self.buckets[self._next])
        if not self.behind:
            self.land_all()
        sinks = [self.buckets[index].sink for index in self._ready]
        if any(sink is not None and not isinstance(sink, EarlySink) for sink in sinks):
            self.transport.fence()  # see [Note: nobody reads any more]
        for bucket in self.buckets:
            bucket.waiting = len(bucket.params)
            used = self._ready.pop(bucket.index, None)
            if bucket.sink is not None:
                if used is not None:
                    bucket.sink(bucket.for_sink(), used)
            else:
                newer, bucket.used = bucket.used, used if used is not None else [False] * len(bucket.params)
                if used is None:
                    bucket.flags_in(bucket.shown).zero_()
                self._show(bucket)
                bucket.used = newer
        self._over()

    def land_all(self) -> None:
        self._poll()
        for bucket in self.buckets:
            self._land(bucket)

    @property
    def interrupted(self) -> bool:
        """A backward has begun to send and has not come to its end: peers may not have begun."""
        return self._next > 0

    def drop(self) -> None:
        """Forget the gradients that are under way. The reductions end all the same: peers wait for them."""
        self.start_late()
        for work in self._due.values():
            work.wait()
        self._due.clear()

    # ------------------------------------------------------------------ checkpoints

    def coming(self, every: bool) -> list[tuple[Param, Tensor]]:
        """Rows of the gradients under way, complete; with `every`, also of those that are not."""
        found: list[tuple[Param, Tensor]] = []
        self.start_late()
        for bucket in self.buckets:
            work, flat = self._due.get(bucket.index), self._coming[bucket.index]
            if work is not None:
                work.wait()
            used = bucket.used_anywhere(flat) if work is not None else [False] * len(bucket.params)
            rows = bucket.views_in(flat)
            found += [(p, r) for p, r, u in zip(bucket.params, rows, used, strict=True) if u or every]
        return found

    def owner_of(self, param: Param) -> Guarded:
        """Who replaces the gradient of `param` that is under way."""
        return self.bucket_of[param]

    def expect(self, names: set[str]) -> None:
        """The named gradients have been loaded into `coming`."""
        self._due.clear()
        self._late.clear()
        for bucket in self.buckets:
            bucket.used = [p.name in names for p in bucket.params]
            if any(bucket.used):
                bucket.flags_in(self._coming[bucket.index]).zero_()
                self._due[bucket.index] = Done()


class _OneBehind(Guarded):
    """In front of a bucket's sink: hands on what it got the time before."""

    def __init__(self, bucket: LocalBucket) -> None:
        self.bucket, self.sink = bucket, bucket.sink
        self.behind = True
        self.held: tuple[Tensor, list[bool]] | None = None

    def __call__(self, flat: Tensor, used: list[bool]) -> None:
        if not self.behind:
            self.sink(flat, used)
            return
        self.hand_on()
        self.held = flat, used

    def hand_on(self) -> None:
        held, self.held = self.held, None
        if held is not None:
            self.before_change()
            self.sink(*held)

    def rows(self, every: bool) -> list[tuple[Param, Tensor]]:
        """What is held of each parameter; with `every`, also of those that were not used."""
        bucket = self.bucket
        if self.held is None and every:
            device = bucket.params[0].leaf.device
            self.held = (
                torch.zeros(bucket.numel, dtype=bucket.dtype, device=device),
                [False] * len(bucket.params),
            )
        if self.held is None:
            return []
        flat, used = self.held
        each = zip(bucket.params, bucket.spans, used, strict=True)
        return [(p, flat[at : at + n].view(p.slot.local_shape(0))) for p, (at, n), u in each if u or every]

    def expect(self, names: set[str]) -> None:
        """Hold the named gradients alone."""
        if self.held is None:
            return
        flat, used = self.held[0], [p.name in names for p in self.bucket.params]
        for (at, n), wanted in zip(self.bucket.spans, used, strict=True):
            if not wanted:
                flat[at : at + n].zero_()
        self.held = (flat, used) if any(used) else None


class DelayedLocalGradients(LocalGradients, Guarded):
    """One rank: what would have been reduced is held back instead, so that the numbers are those of many."""

    def __init__(
        self, params: Sequence[Param], dtypes: Sequence[torch.dtype], buckets: Sequence[LocalBucket] = ()
    ) -> None:
        super().__init__(params, dtypes, buckets)
        self._behind = True
        self._new: dict[Param, Tensor] = {}
        self._held: dict[Param, Tensor] = {}
        self._sinks = [_OneBehind(bucket) for bucket in buckets]
        for sink in self._sinks:
            sink.bucket.sink = sink
        self._sink_of = {param: sink for sink in self._sinks for param in sink.bucket.params}

    @property
    def behind(self) -> bool:
        return self._behind

    @behind.setter
    def behind(self, value: bool) -> None:
        self._behind = value
        for sink in self._sinks:
            sink.behind = value

    @torch.no_grad()
    def _land(self, param: Param) -> None:
        grad = param.leaf.grad
        if grad is not None:
            param.leaf.grad = None
            grad = grad.to(self._dtypes[param])
            self._new[param] = self._new[param].add_(grad) if param in self._new else grad

    def start_late(self) -> None:
        """Nothing travels."""

    def advance(self) -> bool:
        """Hand early sinks what they are behind by, as above. There is no other rank to differ from."""
        held = [s for s in self._sinks if s.behind and s.held is not None and isinstance(s.sink, EarlySink)]
        for sink in held:
            assert isinstance(sink.sink, EarlySink)
            if sink.sink.idle:
                sink.hand_on()
        return bool(held)

    def finish(self) -> None:
        super().finish()
        self.before_change()  # what was held back is shown, and then anybody's to change
        if not self._behind and self._held:  # no longer behind: averaged, as above
            for param, grad in self._held.items():
                self._new[param] = grad.add_(self._new[param]).mul_(0.5) if param in self._new else grad
            self._held = {}
        self._show()
        self._held, self._new = self._new, {}
        if not self._behind:
            self.land_all()
        self._weigh()

    def live(self) -> int:
        """With those that are held back."""
        return super().live() + sum(grad.nbytes for grad in self._held.values())

    def _show(self) -> None:
        for param, grad in self._held.items():
            param.home.grad = grad if param.home.grad is None else param.home.grad.add_(grad)
        self._held = {}

    def land_all(self) -> None:
        """Show what is held back."""
        self._show()
        for sink in self._sinks:
            sink.hand_on()

    interrupted = False  # nobody waits for anything

    def drop(self) -> None:
        self._held.clear()
        for sink in self._sinks:
            sink.held = None

    def coming(self, every: bool) -> list[tuple[Param, Tensor]]:
        if every:
            for param, dtype in self._dtypes.items():
                if param not in self._held and param not in self._sink_of:
                    self._held[param] = torch.zeros_like(param.home, dtype=dtype, requires_grad=False)
        return [*self._held.items(), *(rows for sink in self._sinks for rows in sink.rows(every))]

    def owner_of(self, param: Param) -> Guarded:
        return self._sink_of.get(param, self)

    def expect(self, names: set[str]) -> None:
        self._held = {p: grad for p, grad in self._held.items() if p.name in names}
        for sink in self._sinks:
            sink.expect(names)


class DelayedPace(Pace):
    """`Delayed`, and where it is one of several choices also `EveryStep` on the same buckets."""

    gradients: DelayedGradients | DelayedLocalGradients

    def __init__(
        self, policy: Delayed, gradients: DelayedGradients | DelayedLocalGradients, rank: int
    ) -> None:
        super().__init__(gradients)
        self.policy, self.rank = policy, rank
        self.label = repr(policy)
        self.count = 0  # updates, of the warm-up only
        self._unused = False  # a backward has ended and no step has followed
        self.begun = False
        gradients.behind = self._is_warm

    @property
    def _is_warm(self) -> bool:
        return self.count >= self.policy.warmup_steps

    def advance(self) -> None:
        if not self._unused and torch.is_grad_enabled():
            self.gradients.start_late()
            self.begun = self.gradients.advance() or self.begun

    def ended(self) -> None:
        if self._unused and self.gradients.behind:
            raise StateError(
                "a second backward before optimizer.step(): with sync=Delayed() a step applies the gradient "
                "of one backward. Accumulate inside run.no_sync(), all but the last backward of a step."
            )
        self._unused = True
        super().ended()

    def step(self, update: Update, step: Callable[[], Any]) -> None:
        first, self._unused, self.begun = self._unused, False, False  # of those that step after a backward
        super().step(update, step)
        if first and not self._is_warm:
            self.count += 1
            self.gradients.behind = self._is_warm

    def forget(self, optimizer: Optimizer | None) -> bool:
        if self._unused:  # dropped instead of applied: the one that is under way, too
            self._unused = self.begun = False
            self.gradients.drop()
        return False

    def wind_up(self) -> None:
        if not self.gradients.interrupted:
            self.gradients.drop()

    # ------------------------------------------------------------------ checkpoints

    def kept(self, wanted: bool = False) -> list[Kept]:
        gradients, rank = self.gradients, self.rank
        return [
            Kept(p.name, "delayed", rows, p.slot.rows(rank)[0], p.slot.height, gradients.owner_of(p))
            for p, rows in gradients.coming(wanted)
        ]

    def values(self) -> dict[str, Any]:
        return {"delayed": [p.name for p, _ in self.gradients.coming(False)], "count": self.count}

    def adopt(self, values: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        self._unused = self.begun = False
        if self.policy.warmup_steps:
            self.count = int(values.get("count", 0))
            self.gradients.behind = self._is_warm
        self.gradients.expect(set(values.get("delayed", ())))
