"""Buckets that several ranks add up, from unsharded parameters to this rank's rows.

Tensors of a bucket (all flat; P = this rank's shard, W = the wire: the shards of all ranks):

- `wire`    wire dtype, W, a transport buffer. Stage 1 keeps one per bucket (the whole gradient stays in
  memory); the other stages share a ring of a few.
- `landed`  gradient dtype, P. Stages 2 and 3: a buffer of its own. Stage 1: this rank's shard of the wire,
  where dtypes agree.
- `whole`   gradient dtype, full shapes. Stage 0 only: what `sharded_param.grad` shows after the shards were
  gathered back. The wire itself where dtypes and devices agree; its shards are then equal cuts, not rows
  (`FlatPackLayout`).
- `coming`  one step behind: the gradient under way. What is shown stays until it is complete.

[Note: used flags] A parameter that no rank used must keep `grad is None`, as in one process: AdamW would
decay it otherwise. One that only some ranks used gets the average in which the others count as zero. So each
shard ends with one element per slot: 1 where this rank has a gradient, else 0. After the sum every rank reads
how many ranks used each parameter, at no extra message. A rank that used it itself need not look.

[Note: own rows] Nobody else reads this rank's own rows of a bucket's gradients, so to copy them into the wire
would be a pass over memory for nothing: they are added to what the peers sent straight out of the gradients
(`OwnRows`). Those live on until the next bucket is filled: `let_go` then copies after all, if the sum is not
made yet. Not only until the sum is made: when that is depends on the peers, and memory would with it.

[Note: both ways] At stage 0, a step behind, every rank gets the sums back while it computes. The owner of a
shard deals its sum on as soon as somebody looks and all contributions are there, at any moment of the step.
Ranks may look in different orders. Over a transport that keeps one order the second way is queued behind the
first one at once: it needs no look, and no rank can differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter
from typing import cast

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from zeroshard.comm import GatherTargets, Transport, TransportBuffer, Work, in_wire, sum_spans
from zeroshard.kernels import TensorCopies
from zeroshard.kernels.passes import SumSpan
from zeroshard.layout.division import HELD_BYTES
from zeroshard.layout.sharding import ByRank, FlatPackLayout, PackLayout, ShardSpec
from zeroshard.params.sharded_param import ShardedParam, ShardedTensors
from zeroshard.tiers.ledger import MemoryLedger

from .reducer import Bucket, KeepingSink, ParamRows


def flags_on(device: torch.device, used: Sequence[bool], dtype: torch.dtype) -> Tensor:
    """A number for each parameter. A copy out of pageable memory would wait until the device has done all
    that was launched before, with every bucket; one out of pinned memory does not."""
    if device.type != "cuda":
        return torch.tensor(used, dtype=dtype, device=device)
    return torch.tensor(used, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


@dataclass(frozen=True)
class OwnShare:
    """Elements of a slot that one rank owns: where they begin in its shard and in the gradient."""

    slot: int
    at: int
    first: int
    numel: int


def shares_of(pack: PackLayout, rank: int) -> list[OwnShare]:
    """What `rank` owns of each slot; of flat packs, where its cut falls."""
    if not isinstance(pack, FlatPackLayout):
        places = zip(pack.slots, pack.offsets(rank), strict=True)
        return [OwnShare(i, at, s.rows(rank)[0] * s.row, s.held(rank)) for i, (s, at) in enumerate(places)]
    start, stop = pack.starts[rank], pack.starts[rank] + pack.shards[rank]
    found = []
    for index, (slot, at) in enumerate(zip(pack.slots, pack.full_offsets, strict=True)):
        low, high = max(at, start), min(at + slot.numel, stop)
        if low < high:
            found.append(OwnShare(index, low - start, low - at, high - low))
    return found


class OwnRows:
    """This rank's own rows of a bucket; see [Note: own rows]. `values`: its wire; `flags`: where that has
    the used flags."""

    def __init__(self, pack: PackLayout, rank: int, values: Tensor, flags: Sequence[Tensor]) -> None:
        self._values, self._rank = values, rank
        self._shard = values[pack.starts[rank] : pack.starts[rank] + pack.shards[rank]]
        width = values.element_size()
        self._own = [
            share
            for share in shares_of(pack, rank)
            if share.numel * width >= HELD_BYTES and pack.slots[share.slot].split != "copy"
        ]
        self.worth_it = bool(self._own)
        stays = {share.slot for share in self._own}
        sent = [
            (share, values[pack.starts[r] + share.at :][: share.numel])
            for r in range(pack.world)
            for share in shares_of(pack, r)
            if share.numel and not (r == rank and share.slot in stays)
        ]
        self._to = [view for _, view in sent] + list(flags)
        self._of = [share.slot for share, _ in sent]
        self._ones = [torch.ones(flag.shape, dtype=values.dtype) for flag in flags]
        shifts = [share.first for share, _ in sent] + [0] * len(flags)
        self._moves = TensorCopies(self._to, self._to, shifts=shifts, past=True)
        self._spans = list(_spans(self._own, pack.shards[rank]))
        self._grads: list[Tensor] = []
        self._added = False

    def fill(self, grads: list[Tensor]) -> bool:
        """Copy what goes to the peers, and keep the gradients; or do nothing, where they do not lie as the
        wire has them."""
        dtype = self._values.dtype
        if not all(g.dtype == dtype and g.device.type == "cpu" and g.is_contiguous() for g in grads):
            return False
        self._grads, self._added = grads, False
        self._moves.run(self._to, [grads[index] for index in self._of] + self._ones, "source")
        return True

    def add(self, out: Tensor, shards: Sequence[Tensor], scale: float) -> None:
        """`scale` times the sum of everybody's shard, in rank order."""
        grads, self._added = self._grads, True
        spans = [
            SumSpan(start, numel)
            if share is None or not grads
            else SumSpan(start, numel, grads[share.slot], share.first)
            for start, numel, share in self._spans
        ]
        sum_spans(out, shards, scale, self._rank, spans)

    @torch.no_grad()
    def let_go(self) -> None:
        """Keep the gradients no longer; copy the own rows into the wire, if they have not been added yet."""
        grads, self._grads = self._grads, []
        for share in self._own if grads and not self._added else ():
            own = grads[share.slot].view(-1)[share.first : share.first + share.numel]
            self._shard[share.at : share.at + share.numel].copy_(own)


def _spans(own: Sequence[OwnShare], length: int) -> list[tuple[int, int, OwnShare | None]]:
    """A shard from end to end: shares that stay in their gradients, and what lies between them."""
    result: list[tuple[int, int, OwnShare | None]] = []
    at = 0
    for share in own:
        if share.at > at:
            result.append((at, share.at - at, None))
        result.append((share.at, share.numel, share))
        at = share.at + share.numel
    return [*result, (at, length - at, None)] if at < length else result


_grad, _is_sparse = attrgetter("grad"), attrgetter("is_sparse")


class GradientCopies:
    """Copies the gradients of a bucket into `values`, its communication buffer. Made when the first gradients
    arrive: it has a view of where each goes."""

    def __init__(self, pack: PackLayout, values: Tensor, device: torch.device, rank: int | None) -> None:
        """`device`: of the gradients. `rank`: the one whose own rows may stay in the gradients."""
        self._pack, self._values, count = pack, values, len(pack.slots)
        self._flat = isinstance(pack, FlatPackLayout)
        # [Note: by bands] One strided view for all ranks of a band: a view for each would be most of what a
        # rank of a thousand keeps in host memory.
        bands = () if self._flat else pack.bands
        self._bands = [(band, in_wire(values, pack, band)) for band in bands]
        self._targets = self._make_targets()
        self._flags = [values[pack.full : pack.full + count]] if self._flat else []
        self._flags += [rows[..., pack.body(band.start) :][..., :count] for band, rows in self._bands]
        ones = torch.ones(count, dtype=values.dtype, device=values.device)
        self._all_flags = [ones.expand(view.shape) for view in self._flags]
        self._own_rows: OwnRows | None = None
        # The common case, made fast: every parameter is cut into rows, so that a strided view per parameter
        # and band takes consecutive parts of its gradient.
        self._sources_of: list[int] | None = None  # by view: which gradient it takes a part of
        if self._flat or pack.world == 1 or all(slot.split != "copy" for slot in pack.slots):
            self._list_views(device)
            if values.device.type == "cpu":
                self._all_flags = [flags.contiguous() for flags in self._all_flags]
            if rank is not None and (self._flat or len(self._bands) == 1):
                own_rows = OwnRows(pack, rank, values, self._flags)
                self._own_rows = own_rows if own_rows.worth_it else None

    def _list_views(self, device: torch.device) -> None:
        """All views that are not empty, and where the part of a gradient begins that each takes."""
        listed = enumerate(zip(self._targets, self._starts, strict=True))
        views = [
            (index, view, at)
            for index, (targets, starts) in listed
            for view, at in zip(targets, starts, strict=True)
            if view.numel() or len(targets) == 1
        ]
        self._sources_of = [index for index, _, _ in views]
        self._to = [view for _, view, _ in views] + self._flags
        shifts = [at for _, _, at in views] + [0] * len(self._flags)
        self._moves = TensorCopies(self._to, self._to, device, shifts=shifts if any(shifts) else None)

    def _make_targets(self) -> list[list[Tensor]]:
        """Where each parameter goes: one view for each band, with a row for each of its ranks."""
        if self._flat:
            spans = zip(self._pack.full_offsets, self._pack.slots, strict=True)
            return [[self._values[at : at + slot.numel].view(1, -1)] for at, slot in spans]
        targets: list[list[Tensor]] = [[] for _ in self._pack.slots]
        for band, rows in self._bands:
            places = zip(self._pack.offsets(band.start), band.held, strict=True)
            for views, (at, n) in zip(targets, places, strict=True):
                views.append(rows[..., at : at + n])
        return targets

    @cached_property
    def _starts(self) -> list[list[int]]:
        """For each tensor, the element of its gradient at which the part for each view begins."""
        slots, bands = self._pack.slots, self._bands
        return [[0] if self._flat else [s.rows(band.start)[0] * s.row for band, _ in bands] for s in slots]

    def _sources(self, index: int, grad: Tensor) -> list[Tensor]:
        """What goes to those views."""
        slot, flat = self._pack.slots[index], grad.reshape(-1)
        if self._flat:
            return [flat.view(1, -1)]
        if slot.split == "copy":
            return [flat.expand_as(view) for view in self._targets[index]]
        views = zip(self._targets[index], self._starts[index], strict=True)
        return [flat[at : at + view.numel()].view(view.shape) for view, at in views]

    def run(self, grads: list[Tensor | None], used: list[bool], hold: bool) -> OwnRows | None:
        """Copy the gradients. With `hold` this rank's own rows may stay in them: what keeps these is
        returned."""
        everything = all(used)
        if everything and self._sources_of is not None and not any(map(_is_sparse, grads)):
            present = cast("list[Tensor]", grads)
            if hold and self._own_rows is not None and self._own_rows.fill(present):
                return self._own_rows
            if len(self._sources_of) > len(present):
                present = [grad.contiguous() for grad in present]  # not once for each of its parts
            self._moves.run(self._to, [present[i] for i in self._sources_of] + self._all_flags, "source")
            return None
        flags = self._all_flags
        if not everything:
            ours = flags_on(self._values.device, used, self._values.dtype)
            flags = [ours.expand_as(view) for view in self._flags]
        into, out_of = self._uneven_pairs(grads)
        torch._foreach_copy_(into + self._flags, out_of + flags)
        return None

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


class ShownBucket(Bucket):
    """Gradients of several ranks, and where their sum lands: what `sharded_param.grad` shows of it, or what a
    sink is given."""

    def __init__(
        self, index: int, pack: PackLayout, params: Sequence[ShardedParam], dtype: torch.dtype, rank: int
    ) -> None:
        super().__init__(index, params, dtype)
        self.pack, self.rank = pack, rank
        self.flat = isinstance(pack, FlatPackLayout)
        self._sharded_params = [p.sharded_param for p in self.params]
        self.landed: Tensor | None = None
        self.lands_in: Tensor  # where the next sum of this rank's shard is made
        self.coming: Tensor | None = None
        self.whole: Tensor | None = None
        self._shows: ShardedTensors | None = None  # how rows are shown, where it is not `whole`
        self._grads: list[Tensor] = []  # what each `sharded_param.grad` shows, made when it first does
        self._addresses: list[int] = []  # of those gradients, when they were first shown
        # What each `sharded_param.grad` had before the gradient that is under way.
        self._aside: list[Tensor | None] | None = None

    @property
    def shown(self) -> Tensor:
        """What `sharded_param.grad` shows, flat, with the flags."""
        shown = self.whole if self.whole is not None else self.landed
        assert shown is not None
        return shown

    def used_anywhere(self, reduced: Tensor | None = None) -> list[bool]:
        """See [Note: used flags]. `reduced`: the result of the reduction, where that is not what is shown."""
        if all(self.used):
            return self.used
        counts = self.flags_in(self.shown if reduced is None else reduced)[: len(self.params)]
        return [mine or count > 0 for mine, count in zip(self.used, counts.tolist(), strict=True)]

    def flags_in(self, reduced: Tensor) -> Tensor:
        """Where a result of the reduction, laid out as `shown`, has its flags."""
        body = self.pack.full if self.whole is not None else self.pack.body(self.rank)
        return reduced[body:]

    def views_in(self, reduced: Tensor) -> list[Tensor]:
        """Each parameter's gradient there: its rows on this rank, or at stage 0 all of it."""
        slots, rank = self.pack.slots, self.rank
        if self.whole is not None:
            places = zip(slots, self.pack.full_offsets, strict=True)
            return [reduced[at : at + s.numel].view(s.shape) for s, at in places]
        places = zip(slots, self.pack.offsets(rank), strict=True)
        return [reduced[at : at + s.held(rank)].view(s.local_shape(rank)) for s, at in places]

    def redirect(self, param: ShardedParam, grad: Tensor) -> Tensor:
        """A whole gradient of this rank goes to the unsharded parameter, and to the sharded parameter
        nothing. If the bucket has left, another round takes it."""
        rows = torch.zeros_like(param.sharded_param.detach(), dtype=grad.dtype)
        param.keep_whole_grad(ShardedTensors.local(grad))
        return rows

    # ------------------------------------------------------------------ what sharded_param.grad shows

    def show_whole(self, whole: Tensor) -> None:
        """Stage 0: `sharded_param.grad` is all of the gradient, in this memory."""
        self.whole = whole

    def show_rows(self, sharded_tensors: ShardedTensors) -> None:
        """`sharded_param.grad` is this rank's rows, in DTensor wrappers that are made once."""
        self._shows = sharded_tensors

    def _make_grads(self) -> list[Tensor]:
        """Thousands of wrappers are much of what `shard()` would make, and a sink needs none."""
        views, shows = self.views_in(self.shown), self._shows
        if shows is None:
            return views
        pairs = zip(views, self.pack.slots, strict=True)
        return [shows.show(view, slot, what="the gradient") for view, slot in pairs]

    def keep_aside(self) -> None:
        """What the landing is about to overwrite is added back when it has landed."""
        if self.sink is not None:
            return
        before = list(map(_grad, self._sharded_params))
        if any(grad is not None for grad in before):
            rows = [None if grad is None else ShardedTensors.local(grad) for grad in before]
            ours = {ShardedTensors.local(grad).data_ptr() for grad in self._grads}
            self._aside = [
                grad.clone() if grad is not None and grad.data_ptr() in ours else grad for grad in rows
            ]
            # So that what a penalty on the weights adds meanwhile can be told apart.
            for sharded_param in self._sharded_params:
                sharded_param.grad = None

    def receive(self, unseen: bool) -> None:
        assert self.coming is not None
        if unseen:
            self.shown.add_(self.coming).mul_(0.5)
        else:
            self.shown.copy_(self.coming)

    def show(self, used: Sequence[bool]) -> None:
        if self.sink is not None:
            self.sink(self.for_sink(), list(used))
            return
        if not self._grads or self.whole is not None:
            self._rejoin()
        aside, self._aside = self._aside, None
        if aside is None and all(used) and all(p.grad is None for p in self._sharded_params):
            for sharded_param, grad in zip(self._sharded_params, self._grads, strict=True):
                sharded_param.grad = grad
        else:
            self._show_sum(used, aside if aside is not None else [None] * len(self.params))

    def _show_sum(self, used: Sequence[bool], aside: Sequence[Tensor | None]) -> None:
        """With what was kept `aside`, and what has been added since; parameters that nobody used may have
        none."""
        every = zip(self._sharded_params, self._grads, used, aside, strict=True)
        for param, shown, is_used, before in every:
            others = [ShardedTensors.local(grad) for grad in (before, param.grad) if grad is not None]
            if not is_used and not others:
                continue
            grad = ShardedTensors.local(shown)
            if not is_used:
                grad.copy_(others.pop(0))
            for other in others:
                grad.add_(other)
            param.grad = shown

    def _rejoin(self) -> None:
        """Make the gradients that are shown, the first time. Later, plain ones that the loop has given other
        memory (`p.grad.data = ...`) show this one again."""
        if not self._grads:
            self._grads = self._make_grads()
        if self.whole is None:
            return
        addresses = list(map(Tensor.data_ptr, self._grads))
        if addresses != self._addresses:
            if self._addresses:
                self._grads = self.views_in(self.shown)
            self._addresses = list(map(Tensor.data_ptr, self._grads))

    def for_sink(self) -> Tensor:
        """What is shown, as sinks take it."""
        return self.shown[: self.pack.full] if self.flat else self.shown

    def make_room(self) -> None:
        if isinstance(self.sink, KeepingSink):
            self.sink.make_room(self.for_sink())

    # ------------------------------------------------------------------ checkpoints

    def rows_coming(self, done: bool, every: bool) -> ParamRows:
        assert self.coming is not None
        used = self.used_anywhere(self.coming) if done else [False] * len(self.params)
        rows = zip(self.params, self.views_in(self.coming), used, strict=True)
        return [(param, views) for param, views, is_used in rows if is_used or every]

    def expect(self, names: set[str]) -> bool:
        assert self.coming is not None
        self.used = [param.name in names for param in self.params]
        if any(self.used):
            self.flags_in(self.coming).zero_()
        return any(self.used)


@dataclass(frozen=True)
class WayBack:
    """Stage 0: how a rank fetches the sums of the others. `buffer`: where they fetch its own, which each has
    from `starts`; `targets`, `cuts`: per rank, where its sum goes in `whole`, and what is fetched."""

    buffer: TransportBuffer
    starts: Sequence[int]
    targets: GatherTargets
    cuts: Sequence[list[tuple[int, int]]]


class ReducedBucket(ShownBucket):
    """Gradients that several ranks add up. See the module's docstring."""

    may_leave_late = True

    def __init__(
        self,
        index: int,
        pack: PackLayout,
        params: Sequence[ShardedParam],
        wire: TransportBuffer,
        transport: Transport,
        dtypes: tuple[torch.dtype, torch.dtype],
        device: torch.device,
        values: Tensor | None = None,
    ) -> None:
        """`dtypes`: of what travels, and of what lands. `values`: where gradients are copied to, if not to
        the wire."""
        self.wire_dtype, dtype = dtypes
        super().__init__(index, pack, params, dtype, transport.rank)
        self.wire = self.lane = wire
        self.transport, self.device = transport, device
        self._unsharded_params = [p.unsharded_param for p in self.params]
        self._values = wire.mine if values is None else values
        self._holding: OwnRows | None = None
        self._way_back: WayBack | None = None

    @cached_property
    def _copies(self) -> GradientCopies:
        """Made when the first gradients have arrived."""
        holds = self.transport.traits.adds_here and self._values is self.wire.mine
        of_grads = self._unsharded_params[0].device
        return GradientCopies(self.pack, self._values, of_grads, self.rank if holds else None)

    @torch.no_grad()
    def fill(self, hold: bool = False) -> OwnRows | None:
        """Copy the gradients of the unsharded parameters into the wire and let them go, but with `hold` this
        rank's own rows."""
        self.transport.fill(self.wire)
        with DisableTorchFunctionSubclass():  # of unsharded parameters that are `Away`
            grads: list[Tensor | None] = list(map(_grad, self._unsharded_params))
            for unsharded_param in self._unsharded_params:
                unsharded_param.grad = None
        self.used = [grad is not None for grad in grads]
        self._holding = self._copies.run(grads, self.used, hold)
        return self._holding

    def reduce(self) -> Work:
        start = self.transport.reduce
        if self._holding is not None:
            start = partial(self.transport.reduce_by, self._holding.add)
        return start("reduce", self.label, self.wire, self.pack.shards, self.lands_in, 1.0 / self.pack.world)

    # ------------------------------------------------------------------ where it lands

    @property
    def _shows_wire(self) -> bool:
        """Whether what is reduced can be shown where it lies, where a stage keeps the whole gradient."""
        return self.dtype == self.wire_dtype and self.wire.mine.device == self.device

    def make_reduced_grad(
        self, stage: int, delays: bool, sharded_tensors: ShardedTensors, ledger: MemoryLedger
    ) -> None:
        """Make the tensors that `sharded_param.grad` will show: memory and DTensor wrappers are reused every
        step. One that `delays` has room for the gradient under way, and none of it is a part of the wire,
        which the next gradient overwrites."""
        start, size = self.pack.starts[self.rank], self.pack.shards[self.rank]
        in_place = stage <= 1 and self._shows_wire and not delays
        if in_place:
            self.landed = self.wire.mine[start : start + size]
        else:
            self.landed = torch.zeros(size, dtype=self.dtype, device=self.device)
            if stage > 0:
                ledger.book("gradients", self.landed.nbytes)
        if stage == 0:
            self._make_whole(in_place, ledger)
        else:
            self.show_rows(sharded_tensors)
        self.lands_in = self.landed
        if delays:
            self.coming = torch.zeros_like(self.shown)
            ledger.book("gradients", self.coming.nbytes)
            self.lands_in = self.coming

    def _make_whole(self, in_place: bool, ledger: MemoryLedger) -> None:
        pack, self.goes_back = self.pack, True
        buffer, starts = self.wire, pack.starts
        if self.dtype != self.wire_dtype:
            # The sum is wider than what travelled: fetched through the wire it would be rounded, unlike at
            # other stages.
            key = f"{self.wire.key} {self.index} reduced"
            buffer = self.transport.allocate(key, pack.shards[self.rank], self.dtype)
            starts = (0,) * pack.world
            if buffer.mine.device == self.device:
                self.landed = buffer.mine
            ledger.book("buckets", buffer.mine.nbytes)
        if in_place:
            whole = self.wire.mine[: pack.wire]
        else:
            whole = torch.zeros(pack.wire, dtype=self.dtype, device=self.device)
            ledger.book("gradients", whole.nbytes)
        self.show_whole(whole)
        shards = PackLayout((ShardSpec(f"bucket {self.index}", (pack.wire,), pack.world),), pack.world)
        targets = GatherTargets(shards, whole, self.rank if in_place else None)
        cuts = ByRank(pack.world, partial(_cut_of, starts, pack.shards))
        self._way_back = WayBack(buffer, starts, targets, cuts)

    def lay_open(self) -> None:
        way = self._way_back
        assert way is not None
        own = way.buffer.mine[way.starts[self.rank] :][: self.pack.shards[self.rank]]
        if self.landed is not None and own.data_ptr() != self.landed.data_ptr():
            own.copy_(self.landed)

    def gather_back(self) -> Work:
        way = self._way_back
        assert way is not None
        return self.transport.gather("reduce", f"{self.label}, whole", way.buffer, way.cuts, way.targets)


def _cut_of(starts: Sequence[int], shards: Sequence[int], rank: int) -> list[tuple[int, int]]:
    return [(starts[rank], shards[rank])]


class AllReduceBucket(ReducedBucket):
    """Stage 0, a step behind: the sums go there and back while the ranks compute."""

    may_leave_late = False
    polled = True

    def make_reduced_grad(
        self, stage: int, delays: bool, sharded_tensors: ShardedTensors, ledger: MemoryLedger
    ) -> None:
        super().make_reduced_grad(stage, delays, sharded_tensors, ledger)
        assert self.landed is not None
        self.lands_in = self.landed  # which goes on to all ranks, into `coming`

    def _make_whole(self, in_place: bool, ledger: MemoryLedger) -> None:
        pack, transport = self.pack, self.transport
        shard = pack.shards[transport.rank] * self.dtype.itemsize
        self._back = transport.allocate(f"{self.wire.key} {self.index} back", shard, torch.uint8)
        self.landed = self._back.mine.view(self.dtype)
        self.show_whole(torch.zeros(pack.wire, dtype=self.dtype, device=self.device))
        ledger.book("gradients", self.shown.nbytes)
        ledger.book("buckets", self._back.mine.nbytes)

    def reduce(self) -> Work:
        """There and back; see [Note: both ways]."""
        self.transport.fill(self._back)
        return _ReduceThenGather(super().reduce(), self._all_to_all_on, self.transport.traits.keeps_order)

    def _all_to_all_on(self) -> Work:
        width, rank, world = self.dtype.itemsize, self.transport.rank, self.pack.world
        lengths = [numel * width for numel in self.pack.shards]
        offers, takes = [(0, lengths[rank])] * world, [(0, length) for length in lengths]
        return self.transport.all_to_all("reduce", self._back.key, self._back, offers, takes, self._spread)

    def _spread(self, parts: list[Tensor]) -> None:
        assert self.coming is not None
        for start, part in zip(self.pack.starts, parts, strict=True):
            values = part.view(self.dtype)
            self.coming[start : start + values.numel()].copy_(values)


class _ReduceThenGather:
    """A reduction, and behind it the gather that brings its sums to all ranks."""

    def __init__(self, first: Work, then: Callable[[], Work], at_once: bool) -> None:
        self._first, self._then = first, then
        self._second = then() if at_once else None

    def poll(self) -> bool:
        if self._second is None:
            if not self._first.poll():
                return False
            self._second = self._then()
        return self._second.poll()

    def wait(self) -> None:
        if self._second is None:
            self._first.wait()
            self._second = self._then()
        self._second.wait()
