"""The life of a gradient: arrives on a leaf → copied into its bucket's wire → reduced → lands in this rank's
rows.

What a bucket is made of: see `bucket`.

[Note: one order] Buckets are reduced in one fixed order on all ranks, whatever order they fill in; what is
not full when backward ends goes out then, with zeros. So no rank ever waits for a bucket that another rank
will not send.

[Note: the way back] At stage 0 every rank fetches the sums of the others: beside backward if the transport
lets it, else when backward has ended. Over one that keeps one order the way back is queued behind the way
there at once, so that all ranks do it in the same place. Over a `direct` one a sum goes back as soon as it
has landed: the link has work while the last sums are waited for. A peer's sum may be received where this
rank's part of it is sent from: it cannot come before the peer has all parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from zeroshard.comm import Transport, Work
from zeroshard.tier.pool import Ledger

from .bucket import Bucket, Desk, Sink
from .private import Private
from .shard import Faces, Param
from .spans import span

_grad = attrgetter("grad")


class Gradients:
    """All buckets of a run: counts arrivals, sends what is due, lands what came back. `desk`: of those that
    travel through codecs."""

    desk: Desk | None = None

    def __init__(
        self, buckets: list[Bucket], transport: Transport, faces: Faces, stage: int, ledger: Ledger
    ) -> None:
        self.buckets, self.transport, self.stage = buckets, transport, stage
        self.bucket_of = {p: b for b in buckets for p in b.params}
        self._next = 0
        self._flying: deque[tuple[Bucket, Work]] = deque()
        self._holder: Bucket | None = None  # was sent last, and may hold gradients; see `bucket.held`
        self._there_and_back = stage == 0 and transport.keeps_order  # see [Note: the way back]
        self._returning: list[Work] = []
        self._aside: dict[int, list[Tensor | None]] = {}
        for bucket in buckets:
            bucket.make_landing(stage, faces, ledger)

    # ------------------------------------------------------------------ during backward

    def arrived(self, param: Param) -> None:
        """Autograd finished a leaf's gradient: send every bucket whose turn has come."""
        bucket = self.bucket_of[param]
        bucket.waiting -= 1
        if bucket.waiting == 0:
            while self._next < len(self.buckets) and self.buckets[self._next].waiting <= 0:
                self._send(self.buckets[self._next])
            self._progress()

    def _send(self, bucket: Bucket) -> None:
        with span(f"reduce {bucket.label}"):
            self._begin(bucket)

    def _begin(self, bucket: Bucket) -> None:
        self._keep_aside(bucket)
        self._progress()
        self._let_go()
        while any(b.wire is bucket.wire for b, _ in self._flying):
            self._land_oldest()  # the ring is full: this wire still carries an earlier bucket
        bucket.fill(hold=True)
        self._holder = bucket
        work = bucket.reduce()
        if self._there_and_back and not bucket.rounds:
            work = self._gather_back(bucket)
        self._flying.append((bucket, work))
        self._next += 1

    def _let_go(self) -> None:
        holder, self._holder = self._holder, None
        if holder is not None:
            holder.let_go()

    def _keep_aside(self, bucket: Bucket) -> None:
        """Gradients of earlier backward passes, which the landing is about to overwrite, are added back
        when it has landed."""
        if bucket.sink is not None:
            return
        held = list(map(_grad, bucket.homes))
        if any(g is not None for g in held):
            locals_ = [None if g is None else Faces.local(g) for g in held]
            ours = {Faces.local(g).data_ptr() for g in bucket.grads}
            self._aside[bucket.index] = [
                g.clone() if g is not None and g.data_ptr() in ours else g for g in locals_
            ]
            for param in bucket.params:  # what a penalty on the weights adds meanwhile can be told apart
                param.home.grad = None

    def _progress(self) -> None:
        while self._flying and self._flying[0][1].poll():
            self._land_oldest()

    def _land_oldest(self) -> None:
        bucket, work = self._flying.popleft()
        work.wait()
        if bucket.rounds:
            return
        if self.stage > 0 or self._there_and_back:
            self._show(bucket)
        elif self.transport.direct:
            self._lay_open(bucket)
            self._returning.append(self._gather_back(bucket))

    # ------------------------------------------------------------------ at the end of backward

    def finish(self) -> None:
        """Send what is left, wait for everything, and give each home its gradient."""
        while self._next < len(self.buckets):
            self._send(self.buckets[self._next])
        while self._flying:
            self._land_oldest()
        self._let_go()
        self._go_on()
        if self.stage == 0 and not self._there_and_back:
            self._gather_whole()
        for bucket in self.buckets:
            bucket.waiting = len(bucket.params)
        self._over()

    def _over(self) -> None:
        self._next = 0
        if self.desk is not None:
            self.desk.over()

    def _go_on(self) -> None:
        """Further rounds of the buckets that need them, all buckets together."""
        last = max((bucket.rounds for bucket in self.buckets), default=0)
        for number in range(1, last + 1):
            going = [bucket for bucket in self.buckets if bucket.rounds >= number]
            for work in [bucket.go_on(number) for bucket in going]:
                work.wait()
        for bucket in self.buckets:
            if bucket.rounds:
                self._show(bucket)

    def _gather_whole(self) -> None:
        """Stage 0: every rank fetches the reduced pieces of the others."""
        buckets = [bucket for bucket in self.buckets if not bucket.rounds]
        if not buckets:
            return
        if not self.transport.direct:
            for bucket in buckets:
                self._lay_open(bucket)
            self.transport.open()
            self._returning = [self._gather_back(bucket) for bucket in buckets]
        for work in self._returning:
            work.wait()
        self._returning.clear()
        self.transport.fence()  # what is shown may be added to, and peers read it in place
        for bucket in buckets:
            self._show(bucket)

    def _lay_open(self, bucket: Bucket) -> None:
        """Put this rank's sum where the others fetch it."""
        rank = self.transport.rank
        own = bucket.reduced.mine[bucket.reduced_at[rank] :][: bucket.pack.pieces[rank]]
        if bucket.landed is not None and own.data_ptr() != bucket.landed.data_ptr():
            own.copy_(bucket.landed)

    def _gather_back(self, bucket: Bucket) -> Work:
        key = f"{bucket.label}, whole"
        return self.transport.gather("reduce", key, bucket.reduced, bucket.cuts, bucket.back)

    def _show(self, bucket: Bucket) -> None:
        """Set `home.grad`, adding what earlier backward passes had left there; or hand the gradient to the
        bucket's sink."""
        if bucket.sink is not None:
            bucket.sink(bucket.for_sink(), bucket.used_anywhere())
            return
        if self.stage == 0:
            bucket.rejoin()
        aside = self._aside.pop(bucket.index, None)
        if aside is None and all(bucket.used):
            held = list(map(_grad, bucket.homes))
            if not any(grad is not None for grad in held):
                for home, grad in zip(bucket.homes, bucket.grads, strict=True):
                    home.grad = grad
                return
        for index, (param, used) in enumerate(zip(bucket.params, bucket.used_anywhere(), strict=True)):
            before, late = aside[index] if aside is not None else None, param.home.grad
            parts = [Faces.local(part) for part in (before, late) if part is not None]
            if not used and not parts:
                continue
            grad = Faces.local(bucket.grads[index])
            if not used:
                grad.copy_(parts.pop(0))
            for part in parts:
                grad.add_(part)
            param.home.grad = bucket.grads[index]

    def private(self) -> list[Private]:
        """What this rank has of its own and goes into checkpoints: of codecs that keep what they did not
        send. It may change in backward."""
        mine = [private for bucket in self.buckets for private in bucket.private()]
        return mine + (self.desk.private() if self.desk is not None else [])

    def errors(self) -> dict[str, float]:
        """By codec: what it loses; see [Note: what is measured]."""
        return self.desk.errors() if self.desk is not None else {}

    def redirect(self, param: Param, grad: Tensor) -> Tensor:
        """Stage 0: autograd is about to add to a plain home, because it was used outside of its unit: by a
        penalty on the weights, or by a layer that was called alone. It goes to the leaf, and to the home
        nothing. If the leaf's bucket has left, another round takes it."""
        with torch.no_grad():
            mine = grad.to(param.leaf.dtype)
            param.leaf.grad = mine.clone() if param.leaf.grad is None else param.leaf.grad + mine
        return torch.zeros_like(grad)


class LocalBucket:
    """One rank: gradients that go to a sink together, in one flat tensor made on the spot (and freed when
    the sink lets it go)."""

    def __init__(
        self,
        params: Sequence[Param],
        spans: Sequence[tuple[int, int]],
        numel: int,
        dtype: torch.dtype,
        sink: Sink,
    ) -> None:
        self.params, self.spans = list(params), list(spans)
        self.numel, self.dtype, self.sink = numel, dtype, sink
        self.waiting = len(self.params)
        # Padding counts towards the norm, so it must be zero.
        self._padded = sum(n for _, n in self.spans) < numel

    @torch.no_grad()
    def send(self) -> None:
        grads = [p.leaf.grad for p in self.params]
        used = [g is not None for g in grads]
        if not any(used):
            return
        device = self.params[0].leaf.device
        flat = (torch.empty if all(used) and not self._padded else torch.zeros)(
            self.numel, dtype=self.dtype, device=device
        )
        pairs = [
            (flat[at : at + n], g.reshape(-1))
            for (at, n), g in zip(self.spans, grads, strict=True)
            if g is not None
        ]
        torch._foreach_copy_([to for to, _ in pairs], [of for _, of in pairs])
        for param in self.params:
            param.leaf.grad = None
        self.sink(flat, used)


class LocalGradients:
    """One rank: nothing travels. The leaf's gradient itself becomes the home's, or goes to a sink with its
    bucket."""

    buckets: tuple[Bucket, ...] = ()

    def __init__(
        self, params: Sequence[Param], dtypes: Sequence[torch.dtype], buckets: Sequence[LocalBucket] = ()
    ) -> None:
        self.most = 0  # bytes of gradients when a backward ended, at its most
        self._dtypes = dict(zip(params, dtypes, strict=True))
        self._local_buckets = list(buckets)
        self._bucket_of = {param: bucket for bucket in buckets for param in bucket.params}

    def arrived(self, param: Param) -> None:
        bucket = self._bucket_of.get(param)
        if bucket is None:
            self._land(param)
            return
        bucket.waiting -= 1
        if bucket.waiting == 0:
            bucket.send()

    @torch.no_grad()
    def _land(self, param: Param) -> None:
        grad = param.leaf.grad
        if grad is None:
            return
        param.leaf.grad = None
        grad = grad.to(self._dtypes[param])
        param.home.grad = grad if param.home.grad is None else param.home.grad.add_(grad)

    def finish(self) -> None:
        """Land what was accumulated without synchronisation and not used since, and send buckets that did
        not fill."""
        for param in self._dtypes:
            if param not in self._bucket_of:
                self._land(param)
        for bucket in self._local_buckets:
            bucket.send()
            bucket.waiting = len(bucket.params)
        self._weigh()

    def _weigh(self) -> None:
        self.most = max(self.most, self.live())

    def live(self) -> int:
        """Bytes of the gradients that homes show, but for those that go to a sink."""
        grads = [param.home.grad for param in self._dtypes if param not in self._bucket_of]
        return sum(grad.nbytes for grad in grads if grad is not None)

    def abandon(self, accumulated: bool) -> None:
        """A backward died half way: forget which gradients have arrived, and what waits for the rest of its
        bucket; unless it was `accumulated` without synchronisation, which `zero_grad` drops."""
        for bucket in self._local_buckets:
            bucket.waiting = len(bucket.params)
            for param in bucket.params:
                param.leaf.grad = param.leaf.grad if accumulated else None

    def errors(self) -> dict[str, float]:
        return {}

    def private(self) -> list[Private]:
        """Nothing travels, so nothing is left unsent."""
        return []
