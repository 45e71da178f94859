"""Gradients that are reduced together, on their way from the leaves to this rank's rows.

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
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from operator import attrgetter
from typing import cast

import torch
from torch import Tensor

from zeroshard.comm import Region, Targets, Transport, Work, in_wire
from zeroshard.count.layout import ByRank, FlatPack, Pack, Slot
from zeroshard.native import Moves
from zeroshard.tier.pool import Ledger

from ..guard import Guarded
from ..private import Private
from ..shard import Faces, Param
from .flags import flags_on
from .held import HeldRows

# Takes a bucket's reduced gradient (flat, this rank's rows) and which of its parameters any rank used; see
# `zeroshard.host`.
Sink = Callable[[Tensor, list[bool]], None]


class EarlySink(ABC):
    """A sink that may be given a gradient before the backward of the step that applies it: what it makes of
    it is held back until then."""

    @abstractmethod
    def __call__(self, flat: Tensor, used: list[bool]) -> None: ...

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether it has done with the gradient before, whose memory the next one takes."""

    @abstractmethod
    def wait(self) -> None:
        """Until it has."""


_grad, _is_sparse = attrgetter("grad"), attrgetter("is_sparse")


class Bucket(Guarded):
    """Gradients that are reduced together. With a `sink` they go there; without, `home.grad` shows them."""

    sink: Sink | None = None
    rounds = 0  # after the first one, at the end of backward; see `go_on`

    def __init__(
        self,
        index: int,
        pack: Pack,
        params: Sequence[Param],
        wire: Region,
        transport: Transport,
        dtypes: tuple[torch.dtype, torch.dtype],
        device: torch.device,
        values: Tensor | None = None,
    ) -> None:
        self.index, self.pack, self.params, self.wire = index, pack, list(params), wire
        self.homes, self._leaves = [p.home for p in self.params], [p.leaf for p in self.params]
        self.values = wire.mine if values is None else values  # where gradients are copied to
        self.transport, self.device = transport, device
        self.wire_dtype, self.dtype = dtypes
        self.waiting = len(self.params)
        self.flat = isinstance(pack, FlatPack)
        self._targets: list[list[Tensor]] = []
        self._held: HeldRows | None = None
        self._holding: HeldRows | None = None
        self.landed: Tensor | None = None
        self.whole: Tensor | None = None
        self.reduced, self.reduced_at = wire, pack.starts  # stage 0: where peers fetch each reduced piece
        self.back: Sequence[list[Tensor]] = []  # stage 0: per rank, where its reduced piece goes in `whole`
        self.cuts: Sequence[list[tuple[int, int]]] = []  # stage 0: per rank, where that is fetched from
        self.grads: list[Tensor] = []  # per parameter, what home.grad shows
        self._places: list[int] = []  # where they were when they were first shown

    @property
    def label(self) -> str:
        return f"gradients {self.index} ({self.params[0].name} … {self.params[-1].name})"

    def _lay_out(self) -> None:
        """Views of where gradients go, made when the first arrive."""
        pack, values, count = self.pack, self.values, len(self.params)
        # [Note: by bands] One strided view for all ranks of a band: a view for each would be most of what a
        # rank of a thousand keeps in host memory.
        bands = () if self.flat else pack.bands
        self._bands = [(band, in_wire(values, pack, band)) for band in bands]
        self._targets = self._make_targets()
        self._flags = [values[pack.full : pack.full + count]] if self.flat else []
        self._flags += [rows[..., pack.body(band.start) :][..., :count] for band, rows in self._bands]
        ones = torch.ones(count, dtype=values.dtype, device=values.device)
        self._all_flags = [ones.expand(view.shape) for view in self._flags]
        # The common case, made fast: every parameter is cut into rows, so that a strided view per parameter
        # and band takes consecutive parts of its gradient.
        self._parts: list[int] | None = None
        if self.flat or pack.world == 1 or all(slot.split != "copy" for slot in pack.slots):
            self._list_parts()
            if values.device.type == "cpu":
                self._all_flags = [flags.contiguous() for flags in self._all_flags]
            equal = self.flat or len(self._bands) == 1
            if equal and self.transport.adds_here and values is self.wire.mine:
                self._held = HeldRows(pack, self.transport.rank, values, self._flags)

    def _list_parts(self) -> None:
        """All views that are not empty, and for each the number of the gradient it takes a part of."""
        listed = enumerate(zip(self._targets, self._starts, strict=True))
        found = [
            (index, view, at)
            for index, (views, starts) in listed
            for view, at in zip(views, starts, strict=True)
            if view.numel() or len(views) == 1
        ]
        self._parts = [index for index, _, _ in found]
        self._to = [view for _, view, _ in found] + self._flags
        shifts = [at * self._leaves[index].element_size() for index, _, at in found] + [0] * len(self._flags)
        self._moves = Moves(
            self._to, self._to, self._leaves[0].device, shifts=shifts if any(shifts) else None
        )

    def _make_targets(self) -> list[list[Tensor]]:
        """Where each parameter goes in the wire: one view for each band, with a row for each of its ranks."""
        if self.flat:
            spans = zip(self.pack.full_offsets, self.pack.slots, strict=True)
            return [[self.values[at : at + slot.numel].view(1, -1)] for at, slot in spans]
        result: list[list[Tensor]] = [[] for _ in self.pack.slots]
        for band, rows in self._bands:
            places = zip(self.pack.offsets(band.start), band.held, strict=True)
            for views, (at, n) in zip(result, places, strict=True):
                views.append(rows[..., at : at + n])
        return result

    @cached_property
    def _starts(self) -> list[list[int]]:
        """Where what goes to each of those views begins in the gradient."""
        slots, bands = self.pack.slots, self._bands
        return [[0] if self.flat else [s.rows(band.start)[0] * s.row for band, _ in bands] for s in slots]

    def _sources(self, index: int, grad: Tensor) -> list[Tensor]:
        """What goes to those views."""
        slot, flat = self.pack.slots[index], grad.reshape(-1)
        if self.flat:
            return [flat.view(1, -1)]
        if slot.split == "copy":
            return [flat.expand_as(view) for view in self._targets[index]]
        views = zip(self._targets[index], self._starts[index], strict=True)
        return [flat[at : at + view.numel()].view(view.shape) for view, at in views]

    @torch.no_grad()
    def fill(self, hold: bool = False) -> None:
        """Copy the gradients of the leaves into the wire and let them go. With `hold` this rank's own rows
        may stay where they are until they are added, or until `let_go`."""
        if not self._targets:
            self._lay_out()
        self.transport.fill(self.wire)
        self._holding = None
        grads: list[Tensor | None] = list(map(_grad, self._leaves))
        self.used = [grad is not None for grad in grads]
        everything = all(self.used)
        if everything and self._parts is not None and not any(map(_is_sparse, grads)):
            whole = cast("list[Tensor]", grads)
            held = self._held if hold else None
            if held and held.fits(whole):
                held.fill(whole)
                self._holding = held
            else:
                if len(self._parts) > len(whole):
                    whole = [grad.contiguous() for grad in whole]  # not once for each of its parts
                self._moves.run(self._to, [whole[i] for i in self._parts] + self._all_flags, "source")
        else:
            flags = self._all_flags
            if not everything:
                ours = flags_on(self.values.device, self.used, self.values.dtype)
                flags = [ours.expand_as(view) for view in self._flags]
            into, out_of = self._uneven_pairs(grads)
            torch._foreach_copy_(into + self._flags, out_of + flags)
        for leaf in self._leaves:
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
        start = self.transport.reduce
        if self._holding is not None:
            start = partial(self.transport.reduce_by, self._holding.add)
        return start("reduce", self.label, self.wire, self.pack.pieces, self.landed, 1.0 / self.pack.world)

    def let_go(self) -> None:
        """Hold gradients no longer: their memory is wanted."""
        if self._holding is not None:
            self._holding.let_go()

    def go_on(self, number: int) -> Work:
        """Start round `number`, counted from 1, when all ranks have ended the one before."""
        raise AssertionError(f"{self.label} is done after one round")

    def private(self) -> list[Private]:
        """What this rank keeps of its own from step to step, for checkpoints."""
        return []

    def used_anywhere(self, reduced: Tensor | None = None) -> list[bool]:
        """After the reduction: which parameters any rank used; see [Note: used flags]. `reduced`: its result,
        where that is not what is shown."""
        if all(self.used):
            return self.used
        counts = self.flags_in(self.shown if reduced is None else reduced)[: len(self.params)]
        return [mine or count > 0 for mine, count in zip(self.used, counts.tolist(), strict=True)]

    @property
    def shown(self) -> Tensor:
        """What `home.grad` shows, flat, with the flags."""
        shown = self.whole if self.whole is not None else self.landed
        assert shown is not None
        return shown

    def flags_in(self, reduced: Tensor) -> Tensor:
        """Where a result of the reduction, laid out as `shown`, has its flags."""
        body = self.pack.full if self.whole is not None else self.pack.body(self.transport.rank)
        return reduced[body:]

    def views_in(self, reduced: Tensor) -> list[Tensor]:
        """Each parameter's gradient there: its rows on this rank, or at stage 0 all of it."""
        slots, rank = self.pack.slots, self.transport.rank
        if self.whole is not None:
            places = zip(slots, self.pack.full_offsets, strict=True)
            return [reduced[at : at + s.numel].view(s.shape) for s, at in places]
        places = zip(slots, self.pack.offsets(rank), strict=True)
        return [reduced[at : at + s.held(rank)].view(s.local_shape(rank)) for s, at in places]

    def rejoin(self) -> None:
        """Plain gradients that the loop has given other memory (`p.grad.data = ...`) show this one again."""
        places = list(map(Tensor.data_ptr, self.grads))
        if places != self._places:
            if self._places:
                self.grads = self.views_in(self.shown)
            self._places = list(map(Tensor.data_ptr, self.grads))

    def for_sink(self) -> Tensor:
        """What is shown, as sinks take it."""
        return self.shown[: self.pack.full] if self.flat else self.shown

    # ------------------------------------------------------------------ where it lands

    @property
    def _shows_wire(self) -> bool:
        """Whether what is reduced can be shown where it lies, where a stage keeps the whole gradient."""
        return self.dtype == self.wire_dtype and self.wire.mine.device == self.device

    def make_landing(self, stage: int, faces: Faces, ledger: Ledger) -> None:
        """The tensors that `home.grad` will show, made once: memory and DTensor wrappers are reused every
        step."""
        rank, pack = self.transport.rank, self.pack
        start, size = pack.starts[rank], pack.pieces[rank]
        in_place = stage <= 1 and self._shows_wire
        if in_place:
            self.landed = self.wire.mine[start : start + size]
        else:
            self.landed = torch.zeros(size, dtype=self.dtype, device=self.device)
            if stage > 0:
                ledger.book("gradients", self.landed.nbytes)
        if stage == 0:
            self._make_whole(in_place, ledger)
            return
        rows = self.views_in(self.landed)
        pairs = zip(rows, pack.slots, strict=True)
        self.grads = [faces.show(view, slot, what="the gradient") for view, slot in pairs]

    def _make_whole(self, in_place: bool, ledger: Ledger) -> None:
        pack = self.pack
        if self.dtype != self.wire_dtype:
            # The sum is wider than what travelled: fetched through the wire it would be rounded, unlike at
            # other stages.
            size = pack.pieces[self.transport.rank]
            key = f"{self.wire.key} {self.index} reduced"
            self.reduced = self.transport.allocate(key, size, self.dtype)
            self.reduced_at = (0,) * pack.world
            if self.reduced.mine.device == self.device:
                self.landed = self.reduced.mine
            ledger.book("buckets", self.reduced.mine.nbytes)
        if in_place:
            self.whole = self.wire.mine[: pack.wire]
        else:
            self.whole = torch.zeros(pack.wire, dtype=self.dtype, device=self.device)
            ledger.book("gradients", self.whole.nbytes)
        self.grads = self.views_in(self.whole)
        pieces = Pack((Slot(f"bucket {self.index}", (pack.wire,), pack.world),), pack.world)
        self.back = Targets(pieces, self.whole, self.transport.rank if in_place else None)
        self.cuts = ByRank(pack.world, partial(_cut_of, self.reduced_at, pack.pieces))


def _cut_of(starts: Sequence[int], pieces: Sequence[int], rank: int) -> list[tuple[int, int]]:
    return [(starts[rank], pieces[rank])]
