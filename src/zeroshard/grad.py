"""The life of a gradient: arrives on a leaf → copied into its bucket's wire → reduced → lands in this rank's
rows.

Tensors of a bucket (all flat; P = this rank's piece, W = the wire: the pieces of all ranks):

- `wire`    wire dtype, W, a transport region. Stage 1 keeps one per bucket (the whole gradient stays in
  memory); the other stages share a ring of a few.
- `landed`  gradient dtype, P. Stages 2 and 3: a buffer of its own. Stage 1: this rank's piece of the wire,
  where dtypes agree.
- `whole`   gradient dtype, full shapes. Stage 0 only: what `home.grad` shows after the pieces were gathered
  back. The wire itself where dtypes and devices agree; its pieces are then equal cuts, not rows (`FlatPack`).

[Note: used flags] A parameter that no rank used must keep `grad is None`, as in one process: AdamW would
decay it otherwise. One that only some ranks used gets the average in which the others count as zero. So each
piece ends with one element per slot: 1 where this rank has a gradient, else 0. After the sum every rank reads
how many ranks used each parameter, at no extra message. A rank that used it itself need not look.

[Note: one order] Buckets are reduced in one fixed order on all ranks, whatever order they fill in; what is
not full when backward ends goes out then, with zeros. So no rank ever waits for a bucket that another rank
will not send.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from .comm import Region, Transport, Work
from .layout import FlatPack, Pack
from .native import Moves
from .pool import Ledger
from .private import Private
from .shard import Faces, Param

# Takes a bucket's reduced gradient (flat, this rank's rows) and which of its parameters any rank used; see
# `host`.
Sink = Callable[[Tensor, list[bool]], None]


class Bucket:
    """Gradients that are reduced together. With a `sink` they go there; without, `home.grad` shows them."""

    sink: Sink | None = None

    def __init__(
        self,
        index: int,
        pack: Pack,
        params: Sequence[Param],
        wire: Region,
        transport: Transport,
        dtypes: tuple[torch.dtype, torch.dtype],
        device: torch.device,
    ) -> None:
        self.index, self.pack, self.params, self.wire = index, pack, list(params), wire
        self.transport, self.device = transport, device
        self.wire_dtype, self.dtype = dtypes
        self.waiting = len(self.params)
        self.flat = isinstance(pack, FlatPack)
        self._shares = 1 if self.flat else pack.world
        self._targets = self._make_targets()
        at = [pack.full] if self.flat else [start + pack.body(r) for r, start in enumerate(pack.starts)]
        self._flags = [wire.mine[start : start + len(self.params)] for start in at]
        self._ones = torch.ones(len(self.params), dtype=self.wire_dtype, device=wire.mine.device)
        # The common case, made fast: every parameter in equal shares, so that one strided view per parameter
        # takes its gradient.
        self._equal: list[Tensor] | None = None
        if all(len(views) == 1 for views in self._targets):
            self._equal = [views[0] for views in self._targets] + self._flags
            self._moves = Moves(self._equal, self._equal)
        self.landed: Tensor | None = None
        self.whole: Tensor | None = None
        self.reduced, self.reduced_at = wire, pack.starts  # stage 0: where peers fetch each reduced piece
        self.back: list[list[Tensor]] = []  # stage 0: per rank, where its reduced piece goes in `whole`
        self.cuts: list[list[tuple[int, int]]] = []  # stage 0: per rank, where that is fetched from
        self.grads: list[Tensor] = []  # per parameter, what home.grad shows

    @property
    def label(self) -> str:
        return f"gradients {self.index} ({self.params[0].name} … {self.params[-1].name})"

    def _make_targets(self) -> list[list[Tensor]]:
        """Where each parameter goes in the wire: one strided view if all ranks have equal shares, else one
        view per rank."""
        if self.flat:
            spans = zip(self.pack.full_offsets, self.pack.slots, strict=True)
            return [[self.wire.mine[at : at + slot.numel].view(1, -1)] for at, slot in spans]
        world, result = self.pack.world, []
        offsets = [
            [start + at for at in self.pack.offsets(rank)] for rank, start in enumerate(self.pack.starts)
        ]
        for index, slot in enumerate(self.pack.slots):
            at = [offsets[rank][index] for rank in range(world)]
            held = [slot.held(rank) for rank in range(world)]
            steps = {after - before for before, after in pairwise(at)}
            if slot.split == "rows" and len(set(held)) == 1 and len(steps) == 1:
                result.append([self.wire.mine.as_strided((world, held[0]), (steps.pop(), 1), at[0])])
            else:
                result.append([self.wire.mine[start : start + n] for start, n in zip(at, held, strict=True)])
        return result

    def _sources(self, index: int, grad: Tensor) -> list[Tensor]:
        slot, flat = self.pack.slots[index], grad.reshape(-1)
        if len(self._targets[index]) == 1:
            return [flat.view(self._shares, -1)]
        return [flat[slot.rows(r)[0] * slot.row : slot.rows(r)[1] * slot.row] for r in range(self.pack.world)]

    @torch.no_grad()
    def fill(self) -> None:
        """Copy the gradients of the leaves into the wire and let them go."""
        self.transport.fill(self.wire)
        leaves = [param.leaf for param in self.params]
        grads = [leaf.grad for leaf in leaves]
        self.used = [grad is not None for grad in grads]
        everything = all(self.used)
        flags = (
            self._ones
            if everything
            else torch.tensor(self.used, dtype=self.wire_dtype, device=self._ones.device)
        )
        if everything and self._equal is not None and not any(grad.is_sparse for grad in grads):  # type: ignore[union-attr]
            self._moves.run(self._equal, grads + [flags] * len(self._flags), "source")  # type: ignore[arg-type]
        else:
            into, out_of = self._uneven_pairs(grads)
            torch._foreach_copy_(into + self._flags, out_of + [flags] * len(self._flags))
        for leaf in leaves:
            leaf.grad = None

    def _uneven_pairs(self, grads: list[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
        into: list[Tensor] = []
        out_of: list[Tensor] = []
        for index, grad in enumerate(grads):
            if grad is None:
                torch._foreach_zero_(self._targets[index])
            else:
                into += self._targets[index]
                out_of += self._sources(index, grad.to_dense() if grad.is_sparse else grad)
        return into, out_of

    def reduce(self) -> Work:
        assert self.landed is not None
        return self.transport.reduce(
            "reduce",
            f"{self.wire.key}/{self.index}",
            self.wire,
            self.pack.pieces,
            self.landed,
            1.0 / self.pack.world,
        )

    def used_anywhere(self) -> list[bool]:
        """After the reduction: which parameters any rank used; see [Note: used flags]."""
        if all(self.used):
            return self.used
        if self.whole is not None:
            counts = self.whole[self.pack.full :][: len(self.params)]
        else:
            assert self.landed is not None
            counts = self.landed[self.pack.body(self.transport.rank) :][: len(self.params)]
        return [mine or count > 0 for mine, count in zip(self.used, counts.tolist(), strict=True)]


class Gradients:
    """All buckets of a run: counts arrivals, sends what is due, lands what came back."""

    def __init__(
        self, buckets: list[Bucket], transport: Transport, faces: Faces, stage: int, ledger: Ledger
    ) -> None:
        self.buckets, self.transport, self.stage = buckets, transport, stage
        self.bucket_of = {id(p): b for b in buckets for p in b.params}
        self._next = 0
        self._flying: deque[tuple[Bucket, Work]] = deque()
        self._aside: dict[int, list[Tensor | None]] = {}
        for bucket in buckets:
            self._make_landing(bucket, faces, ledger)

    def _make_landing(self, bucket: Bucket, faces: Faces, ledger: Ledger) -> None:
        """The tensors that `home.grad` will show, made once: memory and DTensor wrappers are reused every
        step."""
        rank, pack = self.transport.rank, bucket.pack
        start, size = pack.starts[rank], pack.pieces[rank]
        in_place = (
            self.stage <= 1 and bucket.dtype == bucket.wire_dtype and bucket.wire.mine.device == bucket.device
        )
        if in_place:
            bucket.landed = bucket.wire.mine[start : start + size]
        else:
            bucket.landed = torch.zeros(size, dtype=bucket.dtype, device=bucket.device)
            if self.stage > 0:
                ledger.book("gradients", bucket.landed.nbytes)
        if self.stage == 0:
            self._make_whole(bucket, in_place, ledger)
            return
        rows = [
            bucket.landed[at : at + s.held(rank)].view(s.local_shape(rank))
            for s, at in zip(pack.slots, pack.offsets(rank), strict=True)
        ]
        bucket.grads = [faces.show(view, slot) for view, slot in zip(rows, pack.slots, strict=True)]

    def _make_whole(self, bucket: Bucket, in_place: bool, ledger: Ledger) -> None:
        pack = bucket.pack
        if bucket.dtype != bucket.wire_dtype:
            # The sum is wider than what travelled: fetched through the wire it would be rounded, unlike at
            # other stages.
            size = pack.pieces[self.transport.rank]
            key = f"{bucket.wire.key} {bucket.index} reduced"
            bucket.reduced = self.transport.allocate(key, size, bucket.dtype)
            bucket.reduced_at = (0,) * pack.world
            if bucket.reduced.mine.device == bucket.device:
                bucket.landed = bucket.reduced.mine
            ledger.book("buckets", bucket.reduced.mine.nbytes)
        if in_place:
            bucket.whole = bucket.wire.mine[: pack.wire]
        else:
            bucket.whole = torch.zeros(pack.wire, dtype=bucket.dtype, device=bucket.device)
            ledger.book("gradients", bucket.whole.nbytes)
        places = zip(pack.slots, pack.full_offsets, strict=True)
        bucket.grads = [bucket.whole[at : at + s.numel].view(s.shape) for s, at in places]
        spans = list(zip(pack.starts, pack.pieces, strict=True))
        bucket.back = [[bucket.whole[at : at + n]] for at, n in spans]
        if in_place:
            bucket.back[self.transport.rank] = []
        fetched = zip(bucket.reduced_at, pack.pieces, strict=True)
        bucket.cuts = [[(at, n)] for at, n in fetched]

    # ------------------------------------------------------------------ during backward

    def arrived(self, param: Param) -> None:
        """Autograd finished a leaf's gradient: send every bucket whose turn has come."""
        bucket = self.bucket_of[id(param)]
        bucket.waiting -= 1
        if bucket.waiting == 0:
            while self._next < len(self.buckets) and self.buckets[self._next].waiting <= 0:
                self._send(self.buckets[self._next])
            self._progress()

    def _send(self, bucket: Bucket) -> None:
        self._keep_aside(bucket)
        while any(b.wire is bucket.wire for b, _ in self._flying):
            self._land_oldest()  # the ring is full: this wire still carries an earlier bucket
        bucket.fill()
        self._flying.append((bucket, bucket.reduce()))
        self._next += 1

    def _keep_aside(self, bucket: Bucket) -> None:
        """Gradients of earlier backward passes, which the landing is about to overwrite, are added back
        when it has landed."""
        if bucket.sink is not None:
            return
        held = [p.home.grad for p in bucket.params]
        if any(g is not None for g in held):
            locals_ = [None if g is None else Faces.local(g) for g in held]
            ours = {Faces.local(g).data_ptr() for g in bucket.grads}
            self._aside[bucket.index] = [
                g.clone() if g is not None and g.data_ptr() in ours else g for g in locals_
            ]
            for param in bucket.params:
                param.home.grad = (
                    None  # so that what a penalty on the weights adds meanwhile can be told apart
                )

    def _progress(self) -> None:
        while self._flying and self._flying[0][1].poll():
            self._land_oldest()

    def _land_oldest(self) -> None:
        bucket, work = self._flying.popleft()
        work.wait()
        if self.stage > 0:
            self._show(bucket)

    # ------------------------------------------------------------------ at the end of backward

    def finish(self) -> None:
        """Send what is left, wait for everything, and give each home its gradient."""
        while self._next < len(self.buckets):
            self._send(self.buckets[self._next])
        while self._flying:
            self._land_oldest()
        if self.stage == 0:
            self._gather_whole()
        for bucket in self.buckets:
            bucket.waiting = len(bucket.params)
        self._next = 0

    def _gather_whole(self) -> None:
        """Stage 0: every rank fetches the reduced pieces of the others."""
        rank = self.transport.rank
        for bucket in self.buckets:
            own = bucket.reduced.mine[bucket.reduced_at[rank] :][: bucket.pack.pieces[rank]]
            if bucket.landed is not None and own.data_ptr() != bucket.landed.data_ptr():
                own.copy_(bucket.landed)
        self.transport.open()
        works = [
            self.transport.gather("reduce", f"{b.wire.key}/whole{b.index}", b.reduced, b.cuts, b.back)
            for b in self.buckets
        ]
        for work in works:
            work.wait()
        self.transport.fence()  # what is shown may be added to, and peers read it in place
        for bucket in self.buckets:
            self._show(bucket)

    def _show(self, bucket: Bucket) -> None:
        """Set `home.grad`, adding what earlier backward passes had left there; or hand the gradient to the
        bucket's sink."""
        if bucket.sink is not None:
            flat = bucket.whole if bucket.whole is not None else bucket.landed
            assert flat is not None
            bucket.sink(flat[: bucket.pack.full] if bucket.flat else flat, bucket.used_anywhere())
            return
        aside = self._aside.pop(bucket.index, None)
        if aside is None and all(bucket.used):
            held = [param.home.grad for param in bucket.params]
            if not any(grad is not None for grad in held):
                for param, grad in zip(bucket.params, bucket.grads, strict=True):
                    param.home.grad = grad
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
        return []

    def redirect(self, param: Param, grad: Tensor) -> Tensor:
        """Stage 0: autograd is about to add to a plain home, because it was used outside of its unit: by a
        penalty on the weights, or by a layer that was called alone. What goes to the home instead: nothing,
        as long as the leaf's bucket can take it. Later than that it stays, which is right for a penalty: it
        is the same on all ranks."""
        if self.bucket_of[id(param)].index < self._next:
            return grad
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
        self.params, self.spans, self.numel, self.dtype, self.sink = (
            list(params),
            list(spans),
            numel,
            dtype,
            sink,
        )
        self.waiting = len(self.params)
        self._padded = (
            sum(n for _, n in self.spans) < numel
        )  # padding counts towards the norm, so it must be zero

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

    def private(self) -> list[Private]:
        """Nothing travels, so nothing is left unsent."""
        return []
