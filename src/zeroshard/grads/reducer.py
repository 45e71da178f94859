"""The way of gradients: counted as they arrive, sent in buckets, landed in this rank's rows.

The life of a gradient: arrives on an unsharded parameter → copied into its bucket's wire → reduced → lands in
this rank's rows, now or one backward later. One rank goes the same way with buckets that have no wire
(`OwnBucket`); what others are made of, see `bucket`.

[Note: one order] Buckets are reduced in one fixed order on all ranks, whatever order they fill in; what is
not full when backward ends goes out then, with zeros. So no rank ever waits for a bucket that another rank
will not send.

[Note: the way back] At stage 0 every rank fetches the sums of the others: beside backward if the transport
lets it, else when backward has ended. Over one that keeps one order the way back is queued behind the way
there at once, so that all ranks do it in the same place. Over a `direct` one a sum goes back as soon as it
has landed: the link has work while the last sums are waited for. A peer's sum may be received where this
rank's part of it is sent from: it cannot come before the peer has all parts.

[Note: one behind] With `sync=Delayed()` a bucket's wire is filled in one backward and waited for when the
same bucket is about to be filled in the next, so its reduction has the time of a whole step. It is summed
into a buffer of its own (`Bucket.coming`), because what `sharded_param.grad` shows still is the gradient of
the step before: some transports add as soon as the shards are there. So every bucket has its own wire at
every stage.

[Note: nobody reads any more] A bucket of this backward cannot come back before every rank has sent it, and
is through with its parameters: so host updates may begin when it lands. A bucket of the last backward can:
peers may still gather the rows that it would change. Sinks get theirs at the end of backward, behind a fence;
early ones, which change no row before the step, as soon as it is there, from the next forward on. One rank
has no peers: its sinks get theirs at once.

[Note: parameters first] New parameters are needed when the next forward begins, and delayed gradients only in
the next backward. But both take the same way, one after another. So the last buckets of a backward, a quarter
of all, leave behind the new parameters: when the next forward has begun. All ranks do it at the same place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Protocol

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from zeroshard.comm import Transport, Work
from zeroshard.comm.transport import DoneWork
from zeroshard.params.rank_state import RankState
from zeroshard.params.sharded_param import GuardedState, ShardedParam
from zeroshard.profiling import span

from .codec_workspace import CodecWorkspace

HELD = 2**40  # what a bucket waits for that does not leave before backward ends

# Takes a bucket's reduced gradient (flat, this rank's rows) and which of its parameters any rank used; see
# `zeroshard.offload`.
Sink = Callable[[Tensor, list[bool]], None]
ParamRows = list[tuple[ShardedParam, Tensor]]
_grad, _nbytes = attrgetter("grad"), attrgetter("nbytes")


class KeepingSink(ABC):
    """A sink that goes on reading a gradient where it has landed, until the step."""

    @abstractmethod
    def __call__(self, flat: Tensor, used: list[bool]) -> None: ...

    @abstractmethod
    def make_room(self, shown: Tensor) -> None:
        """Done with `shown`, where the gradient before has landed: it is about to be overwritten, perhaps
        with zeros, as no rank need use these parameters again."""


class EarlySink(KeepingSink):
    """A sink that may be given a gradient before the backward of the step that applies it: what it makes of
    it is held back until then."""

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether it has done with the gradient before, whose memory the next one takes."""


class HeldGrads(Protocol):
    """Gradients that a bucket needs until they are added."""

    def let_go(self) -> None:
        """Keep them no longer: their memory is wanted."""


class Bucket(GuardedState, ABC):
    """Gradients that leave together: `fill`, `reduce`, and when the work is done `receive` and `show`. With
    a `sink` they go there; without, `sharded_param.grad` shows them."""

    rounds = 0  # after the first one, at the end of backward; see `go_on`
    may_leave_late = False  # see [Note: parameters first]
    polled = False  # its reduction goes on when somebody looks
    goes_back = False  # stage 0: all ranks fetch the sums of their owners; see [Note: the way back]

    def __init__(self, index: int, params: Sequence[ShardedParam], dtype: torch.dtype) -> None:
        self.index, self.params, self.dtype = index, list(params), dtype
        self.label = f"gradients {index} ({self.params[0].name} … {self.params[-1].name})"
        self.sink: Sink | None = None
        self.used: list[bool] = []  # which of the parameters had a gradient here when it was filled
        self.lane: object = self  # memory that only one bucket under way can have: a wire
        self.waiting = len(self.params)  # gradients that have yet to arrive

    def hand_to(self, sink: Sink) -> None:
        """Let `sink` have what lands."""
        self.sink = sink

    # ------------------------------------------------------------------ arrivals

    def arrived(self, param: ShardedParam) -> bool:
        """A gradient is there. Whether it was the last one."""
        self.waiting -= 1
        if self.waiting > HELD // 2:
            param.widen_sum()
        return self.waiting == 0

    def hold_back(self) -> None:
        """Wait for the end of backward."""
        self.waiting = max(self.waiting, HELD)

    def await_all(self) -> None:
        """All gradients are to come again."""
        self.waiting = len(self.params)

    def redirect(self, param: ShardedParam, grad: Tensor) -> Tensor:
        """Autograd is about to add `grad` to a sharded parameter, because it was used outside of its unit: by
        a penalty on the weights, or by a layer that was called alone. What it shall add instead."""
        return grad

    def abandon(self, accumulated: bool) -> None:
        """A backward died half way: forget which gradients have arrived, and what waits for the rest of its
        bucket; unless it was `accumulated` without synchronisation, which `zero_grad` drops."""
        self.await_all()
        for param in self.params if self.sink is not None and not accumulated else ():
            param.unsharded_param.grad = None

    # ------------------------------------------------------------------ the way

    def keep_aside(self) -> None:
        """Save what earlier backward passes left in the memory where the next gradient lands."""

    @abstractmethod
    def fill(self, hold: bool = False) -> HeldGrads | None:
        """Take the gradients of the unsharded parameters. With `hold` some may stay where they are until they
        are added: what keeps these is returned."""

    @abstractmethod
    def reduce(self) -> Work:
        """Start the sum over all ranks."""

    def go_on(self, number: int) -> Work:
        """Start round `number`, counted from 1, when all ranks have ended the one before."""
        raise AssertionError(f"{self.label} is done after one round")

    def lay_open(self) -> None:
        """Put this rank's sum where the others fetch it."""
        raise AssertionError(f"{self.label} is not fetched")

    def gather_back(self) -> Work:
        """Start to fetch the sums of the others."""
        raise AssertionError(f"{self.label} is not fetched")

    def used_anywhere(self) -> list[bool]:
        """After the reduction: which parameters any rank used."""
        return self.used

    # ------------------------------------------------------------------ where it lands

    def make_room(self) -> None:
        """Tells all buckets that the gradients which are shown are about to be overwritten."""

    @abstractmethod
    def receive(self, unseen: bool) -> None:
        """One behind: what has come is what is shown next. `unseen`: so is what came before it, and both are
        averaged."""

    @abstractmethod
    def show(self, used: Sequence[bool]) -> None:
        """Add what has landed to `sharded_param.grad`, or hand it to the sink. `used`: of which parameters
        any rank has a gradient."""

    # ------------------------------------------------------------------ checkpoints

    def private(self) -> list[RankState]:
        """What this rank keeps of its own from step to step."""
        return []

    @abstractmethod
    def rows_coming(self, done: bool, every: bool) -> ParamRows:
        """One behind: rows of the gradients under way, complete if `done`; with `every` also of those that
        are not, into which a load may write."""

    @abstractmethod
    def expect(self, names: set[str]) -> bool:
        """Called when the named gradients have been loaded to where `rows_coming` said. Returns whether this
        bucket has any of them."""


class OwnBucket(Bucket):
    """One rank's gradients, which nobody adds to: each becomes its sharded parameter's when it arrives, in
    the memory that autograd gave it."""

    def __init__(
        self, index: int, params: Sequence[ShardedParam], dtype: torch.dtype, delays: bool = False
    ) -> None:
        super().__init__(index, params, dtype)
        self._delays = delays
        self._sharded_params = [p.sharded_param for p in self.params]
        self._unsharded_params = [p.unsharded_param for p in self.params]
        # Gradients of this backward, those under way, and those that are shown next.
        self._arrived: dict[ShardedParam, Tensor] = {}
        self._coming: dict[ShardedParam, Tensor] = {}
        self._landed: dict[ShardedParam, Tensor] = {}

    def arrived(self, param: ShardedParam) -> bool:
        """It need not wait for the others."""
        grad, sharded_param = param.take_grad(), param.sharded_param
        if grad is not None:
            if not self._delays and grad.dtype is self.dtype and sharded_param.grad is None:
                sharded_param.grad = grad
            else:
                self._add(param, grad)
        return False

    @torch.no_grad()
    def _add(self, param: ShardedParam, grad: Tensor) -> None:
        grad = grad.to(self.dtype)
        if self._delays:
            self._arrived[param] = self._arrived[param].add_(grad) if param in self._arrived else grad
        else:
            param.add_grad(grad)

    def fill(self, hold: bool = False) -> None:
        with DisableTorchFunctionSubclass():  # they may be `Away`
            left = list(map(_grad, self._unsharded_params))
        for param, grad in zip(self.params, left, strict=True):
            if (
                grad is not None
            ):  # it was accumulated without synchronisation, and the parameter not used since
                self.arrived(param)
        arrived = self._arrived
        self.used = [p in arrived for p in self.params] if arrived else [False] * len(self.params)

    def reduce(self) -> Work:
        self._coming, self._arrived = self._arrived, {}
        return DoneWork()

    @torch.no_grad()
    def receive(self, unseen: bool) -> None:
        self.before_change()  # what is shown is anybody's to change
        grads, self._coming = self._coming, {}
        if unseen:
            for param, grad in self._landed.items():
                grads[param] = grads[param].add_(grad) if param in grads else grad
            for grad in grads.values():
                grad.mul_(0.5)
        self._landed = grads

    @torch.no_grad()
    def show(self, used: Sequence[bool]) -> None:
        grads, self._landed = self._landed, {}
        for param, grad in grads.items():
            param.add_grad(grad)

    def live_bytes(self) -> int:
        shown = [grad for grad in map(_grad, self._sharded_params) if grad is not None]
        return sum(map(_nbytes, (*shown, *self._coming.values())))

    def rows_coming(self, done: bool, every: bool) -> ParamRows:
        for param in self.params if every else ():
            if param not in self._coming:
                blank = torch.zeros_like(param.sharded_param, dtype=self.dtype, requires_grad=False)
                self._coming[param] = blank
        return list(self._coming.items())

    def expect(self, names: set[str]) -> bool:
        self._coming = {param: grad for param, grad in self._coming.items() if param.name in names}
        self.used = [param in self._coming for param in self.params]
        return any(self.used)


class PackedBucket(Bucket):
    """One rank's gradients for a sink: in one flat tensor that is made on the spot, and freed when the sink
    lets it go. `spans`: where each begins in it and how many elements it has; `numel`: how many there are."""

    def __init__(
        self,
        index: int,
        params: Sequence[ShardedParam],
        dtype: torch.dtype,
        delays: bool,
        spans: Sequence[tuple[int, int]],
        numel: int,
    ) -> None:
        super().__init__(index, params, dtype)
        self._delays, self._spans, self._numel = delays, list(spans), numel
        # Padding counts towards the norm, so it must be zero.
        self._padded = sum(n for _, n in spans) < numel
        self._coming: Tensor | None = None
        self._landed: Tensor | None = None

    def _flat(self, make: Callable[..., Tensor]) -> Tensor:
        return make(self._numel, dtype=self.dtype, device=self.params[0].unsharded_param.device)

    @torch.no_grad()
    def fill(self, hold: bool = False) -> None:
        grads = [param.take_grad() for param in self.params]
        self.used = [grad is not None for grad in grads]
        if not any(self.used):
            return
        flat = self._flat(torch.zeros if self._padded or not all(self.used) else torch.empty)
        places = zip(self._spans, grads, strict=True)
        pairs = [(flat[at : at + n], grad.reshape(-1)) for (at, n), grad in places if grad is not None]
        torch._foreach_copy_([room for room, _ in pairs], [grad for _, grad in pairs])
        if self._delays:
            self._coming = flat
        else:
            self._landed = flat

    def reduce(self) -> Work:
        return DoneWork()

    @torch.no_grad()
    def receive(self, unseen: bool) -> None:
        self.before_change()
        flat, self._coming = self._coming, None
        if unseen and self._landed is not None:
            flat = self._landed if flat is None else flat.add_(self._landed)
            flat.mul_(0.5)
        self._landed = flat

    def show(self, used: Sequence[bool]) -> None:
        assert self.sink is not None
        flat, self._landed = self._landed, None
        if flat is not None:
            self.sink(flat, list(used))

    def rows_coming(self, done: bool, every: bool) -> ParamRows:
        if self._coming is None and every:
            self._coming, self.used = self._flat(torch.zeros), [False] * len(self.params)
        if (flat := self._coming) is None:
            return []
        places = zip(self.params, self._spans, self.used, strict=True)
        return [
            (param, flat[at : at + n].view(param.slot.local_shape(0)))
            for param, (at, n), used in places
            if used or every
        ]

    def expect(self, names: set[str]) -> bool:
        self.used = [param.name in names for param in self.params]
        if not any(self.used):
            self._coming = None
            return False
        assert self._coming is not None
        for (at, n), used in zip(self._spans, self.used, strict=True):
            if not used:
                self._coming[at : at + n].zero_()
        return True


class Reducer:
    """All buckets of a run: counts arrivals, sends what is due, lands what came back. Where it `delays`,
    buckets have room for a gradient under way, and land one backward later while it is `behind`.
    `workspace`: of those that travel through codecs."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        transport: Transport,
        delays: bool = False,
        workspace: CodecWorkspace | None = None,
    ) -> None:
        self.buckets, self.transport, self.workspace = list(buckets), transport, workspace
        self.bucket_of = {param: bucket for bucket in buckets for param in bucket.params}
        self.most = 0  # bytes of gradients that are nobody's buffers when a backward ended, at their most
        self._delays = self._behind = delays
        self._alone = transport.size == 1  # no peer waits for a bucket, nor reads rows
        self._unsent = dict.fromkeys(self.buckets)  # in this backward, in the order in which they go out
        self._flying: dict[Bucket, Work] = {}  # reductions whose results nobody has seen
        self._held: HeldGrads | None = None  # of the bucket that was sent last; see `OwnRows`
        self._returning: list[Work] = []
        self._late: list[Bucket] = []  # filled, to be sent in the next forward
        self._punctual = len(self.buckets) - max(len(self.buckets) // 4, 1)  # [Note: parameters first]
        self._landed: dict[Bucket, list[bool]] = {}  # not shown yet: which parameters any rank used

    # ------------------------------------------------------------------ during backward

    def hold_back(self, params: Iterable[ShardedParam]) -> None:
        """More than one gradient of these will come in the next backward: they are added up until it ends."""
        for bucket in {self.bucket_of[param] for param in params if param in self.bucket_of}:
            bucket.hold_back()

    def arrived(self, param: ShardedParam) -> None:
        """Autograd finished an unsharded parameter's gradient: send every bucket whose turn has come."""
        bucket = self.bucket_of[param]
        if bucket.arrived(param):
            if self._alone:
                self._send(bucket)
            while not self._alone and self._unsent and (first := next(iter(self._unsent))).waiting <= 0:
                self._send(first)
            self._progress()

    def _send(self, bucket: Bucket) -> None:
        with span(f"reduce {bucket.label}"):
            bucket.keep_aside()
            if self._delays:
                self._land_last_round(bucket)
            else:
                self._progress()
                if self._held is not None:
                    self._held.let_go()
                while any(other.lane is bucket.lane for other in self._flying):
                    self._land(next(iter(self._flying)))  # of a ring, this wire carries an earlier bucket
                if bucket.sink is not None:
                    bucket.make_room()
            self._held = bucket.fill(hold=not self._delays)
            self._unsent.pop(bucket, None)
            # Codes are short, and the next round may have another codec.
            if self._behind and bucket.may_leave_late and bucket.index >= self._punctual:
                self._late.append(bucket)
            else:
                self._start(bucket)

    def _start(self, bucket: Bucket) -> None:
        if self._delays:
            bucket.before_change()  # of what is coming
        work = bucket.reduce()
        if bucket.goes_back and self.transport.traits.keeps_order:
            work = bucket.gather_back()
        self._flying[bucket] = work

    def start_late(self) -> None:
        """The next forward has begun, or somebody wants to see what is under way."""
        late, self._late = self._late, []
        for bucket in late:
            self._start(bucket)

    def _progress(self) -> None:
        if self._delays:
            self.advance()
            self._poll()
        else:
            while self._flying and self._flying[oldest := next(iter(self._flying))].poll():
                self._land(oldest)

    def _land(self, bucket: Bucket) -> None:
        self._flying.pop(bucket).wait()
        if bucket.rounds:
            return
        if self._delays:
            self._receive(bucket)
        elif not bucket.goes_back or self.transport.traits.keeps_order:
            bucket.show(bucket.used_anywhere())
        elif self.transport.traits.direct:
            bucket.lay_open()
            self._returning.append(bucket.gather_back())

    # ------------------------------------------------------------------ at the end of backward

    def finish(self) -> None:
        """Send what is left, wait for everything that is to be seen now, and give each sharded parameter its
        gradient."""
        for bucket in list(self._unsent):
            self._send(bucket)
        if self._delays:
            self._show_received()
        else:
            while self._flying:
                self._land(next(iter(self._flying)))
            if self._held is not None:
                self._held.let_go()
            if any(bucket.rounds for bucket in self.buckets):
                self._go_on()
            if any(bucket.goes_back for bucket in self.buckets) and not self.transport.traits.keeps_order:
                self._gather_whole()
        for bucket in self.buckets:
            bucket.await_all()
        self._unsent = dict.fromkeys(self.buckets)
        if self._alone:
            self.most = max(self.most, self.live_bytes())
        if self.workspace is not None:
            self.workspace.over()

    @contextmanager
    def once_more(self) -> Iterator[None]:
        """Some gradients come that have come already, and count for no backward."""
        unsent = dict(self._unsent)
        try:
            yield
        finally:
            self._unsent = unsent

    def land_again(self, params: Iterable[ShardedParam]) -> None:
        """The one rank has run the backward of these a second time: their buckets leave as they are."""
        for bucket in dict.fromkeys(self.bucket_of[param] for param in params if param in self.bucket_of):
            if 0 < bucket.waiting < len(bucket.params):
                self._send(bucket)
            bucket.await_all()
        while self._flying:
            self._land(next(iter(self._flying)))

    def _go_on(self) -> None:
        """Further rounds of the buckets that need them, all buckets together."""
        for number in range(1, max(bucket.rounds for bucket in self.buckets) + 1):
            going = [bucket for bucket in self.buckets if bucket.rounds >= number]
            for work in [bucket.go_on(number) for bucket in going]:
                work.wait()
        for bucket in self.buckets:
            if bucket.rounds:
                bucket.show(bucket.used_anywhere())

    def _gather_whole(self) -> None:
        """Stage 0: every rank fetches the reduced shards of the others."""
        buckets = [bucket for bucket in self.buckets if bucket.goes_back]
        if not self.transport.traits.direct:
            for bucket in buckets:
                bucket.lay_open()
            self.transport.open()
            self._returning = [bucket.gather_back() for bucket in buckets]
        for work in self._returning:
            work.wait()
        self._returning.clear()
        self.transport.fence()  # what is shown may be added to, and peers read it in place
        for bucket in buckets:
            bucket.show(bucket.used_anywhere())

    def live_bytes(self) -> int:
        """Bytes of gradients that are nobody's buffers; all others are in the ledger."""
        return sum(bucket.live_bytes() for bucket in self.buckets if isinstance(bucket, OwnBucket))

    def forget_peak(self) -> None:
        """The most from now on."""
        self.most = 0

    def redirect(self, param: ShardedParam, grad: Tensor) -> Tensor:
        """See `Bucket.redirect`."""
        return self.bucket_of[param].redirect(param, grad)

    def abandon(self, accumulated: bool) -> None:
        """A backward died half way on the only rank; see `Bucket.abandon`."""
        for bucket in self.buckets:
            bucket.abandon(accumulated)
        self._unsent = dict.fromkeys(self.buckets)

    # ------------------------------------------------------------------ one behind

    def delay(self, behind: bool) -> None:
        """Land one backward later from now on, or in the same one."""
        assert self._delays
        self._behind = behind

    @property
    def behind(self) -> bool:
        return self._behind

    @property
    def interrupted(self) -> bool:
        """Whether a backward has begun to send and has not come to its end: peers may not have begun."""
        return not self._alone and len(self._unsent) < len(self.buckets)

    def advance(self) -> bool:
        """Hand early sinks what has come of the last round. Whether any of it was still on its way: in the
        first look after a backward all ranks say the same."""
        early = [bucket for bucket in self._flying if bucket in self._unsent and self._is_early(bucket)]
        for bucket in early:
            assert isinstance(bucket.sink, EarlySink)
            if bucket.sink.idle and self._flying[bucket].poll():
                self._land(bucket)
        for bucket, work in self._flying.items():
            if bucket.polled:
                work.poll()
        return bool(early)

    def _land_last_round(self, bucket: Bucket) -> None:
        if bucket in self._late:
            self.start_late()
        if bucket in self._flying:
            self._land(bucket)

    def _is_early(self, bucket: Bucket) -> bool:
        return self._behind and isinstance(bucket.sink, EarlySink)

    def _poll(self) -> None:
        for work in self._flying.values():
            work.poll()

    @torch.no_grad()
    def _receive(self, bucket: Bucket) -> None:
        """The gradient of the last round is there; without `behind` the one of this round, too."""
        bucket.make_room()
        bucket.receive(bucket in self._landed)
        self._landed[bucket] = bucket.used_anywhere()
        # See [Note: nobody reads any more].
        if self._is_early(bucket) or (self._behind and self._alone and bucket.sink is not None):
            bucket.show(self._landed.pop(bucket))

    def _show_received(self) -> None:
        """Show what has landed: the last round, or, when not behind, this one."""
        if not self._behind:
            self.land_all()
        late = [bucket.sink for bucket in self._landed if not isinstance(bucket.sink, EarlySink)]
        if any(sink is not None for sink in late):
            self.transport.fence()  # see [Note: nobody reads any more]
        for bucket in self.buckets:
            used = self._landed.pop(bucket, None)
            if used is not None or bucket.sink is None:
                bucket.show(used if used is not None else [False] * len(bucket.params))

    def land_all(self) -> None:
        """Wait for all that is under way."""
        self.start_late()
        self._poll()
        for bucket in self.buckets:
            if bucket in self._flying:
                self._land(bucket)

    def drop(self) -> None:
        """Forget the gradients that are under way. The reductions end all the same: peers wait for them."""
        self.start_late()
        for bucket, work in self._flying.items():
            work.wait()
            bucket.expect(set())
        self._flying.clear()

    # ------------------------------------------------------------------ checkpoints

    def private(self) -> list[RankState]:
        """What this rank has of its own and goes into checkpoints: of codecs that keep what they did not
        send. It may change in backward."""
        of_buckets = [private for bucket in self.buckets for private in bucket.private()]
        return of_buckets + (self.workspace.private() if self.workspace is not None else [])

    def errors(self) -> dict[str, float]:
        """By codec: what it loses; see [Note: what is measured]."""
        return self.workspace.errors() if self.workspace is not None else {}

    def rows_coming(self, every: bool) -> list[tuple[Bucket, ShardedParam, Tensor]]:
        """Rows of the gradients under way, complete, and who replaces them; with `every`, also of those that
        are not."""
        self.start_late()
        for work in self._flying.values():
            work.wait()
        return [
            (bucket, param, rows)
            for bucket in self.buckets
            for param, rows in bucket.rows_coming(bucket in self._flying, every)
        ]

    def expect(self, names: set[str]) -> None:
        """The named gradients have been loaded into the rows that are coming."""
        self._late.clear()
        self._flying = {bucket: DoneWork() for bucket in self.buckets if bucket.expect(names)}
