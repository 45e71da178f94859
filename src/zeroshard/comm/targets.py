"""Where a gather puts what every rank has of some tensors: in one buffer that holds them whole.

A view for each rank and tensor is what transports ask for that copy rank by rank. With a thousand ranks those
would be most of what a process keeps in host memory, so transports that bring the pieces of all ranks at once
copy by bands: one view for each tensor, with a row for each rank. Large tensors that all ranks own equally
much of need no copy: their pieces can be brought straight to their place.

[Note: on the stage] Pieces on a transport's stage are equally long. Where the rank with most has most of
every tensor, as with ``rows``, each tensor begins at one place in all of them, and one view spans all ranks
that own equally much of that tensor, whatever they own of others: one or two views each. Else pieces are
dense, and a view spans a band.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import accumulate, islice
from typing import NamedTuple

from torch import Tensor

from zeroshard.count.layout import Band, ByRank, Lengths, Pack, Slot

from .transport import Cuts

__all__ = ["Targets", "in_wire", "totals_of"]


class Stride(NamedTuple):
    """Rows that a band of ranks has of slot number `slot`: `to` has a row for each rank, or one dimension
    where only one rank's are taken."""

    slot: int
    to: Tensor


class Targets(ByRank[list[Tensor]]):
    """`out` of a gather: by rank, flat views of its rows of every slot; and the same by bands. `own`: a rank
    whose rows are in place already."""

    def __init__(self, pack: Pack, buffer: Tensor, own: int | None = None) -> None:
        super().__init__(pack.world, partial(_of_rank, pack, buffer, own))
        self.pack, self._buffer, self._own = pack, buffer, own

    @cached_property
    def bands(self) -> list[tuple[Band, list[Stride]]]:
        """What the ranks of each band have, left out what is empty. Of copies the first rank's is taken."""
        apart = () if self._own is None else (self._own,)
        return [
            (band, self._strides(band))
            for band in self.pack.bands_around(apart)
            if band.start != self._own and any(band.held)
        ]

    def _strides(self, band: Band) -> list[Stride]:
        strides = (self._stride(index, band) for index in range(len(self.pack.slots)))
        return [stride for stride in strides if stride is not None]

    def _stride(self, index: int, band: Band) -> Stride | None:
        slot, at = self.pack.slots[index], self.pack.full_offsets[index]
        ranks, n = 1 if slot.split == "copy" else len(band), slot.held(band.start)
        if not n:
            return None
        at += slot.rows(band.start)[0] * slot.row
        rows = self._buffer[at : at + ranks * n]
        return Stride(index, rows if ranks == 1 else rows.view(ranks, n))

    @cached_property
    def straight(self) -> dict[int, Tensor]:
        """By their numbers, slots that need no copy, each of them whole."""
        places = enumerate(zip(self.pack.slots, self.pack.full_offsets, strict=True))
        return {n: self._buffer[at : at + slot.numel] for n, (slot, at) in places if slot.straight}

    @cached_property
    def each(self) -> int:
        """Elements that the rank with most has of the other slots."""
        return max(sum(self._beside(band)) for band in self.pack.bands)

    def _beside(self, band: Band) -> list[int]:
        return self._without_straight(band.held)

    def _without_straight(self, lengths: Sequence[int]) -> list[int]:
        return [0 if slot in self.straight else n for slot, n in enumerate(lengths)]

    @cached_property
    def _alike(self) -> list[int] | None:
        """Where the slots begin in every staged piece, if they can in all at one place; see [Note: on the
        stage]."""
        *starts, total = accumulate(self._without_straight(self.pack.most), initial=0)
        return starts if total == self.each else None

    def staged(self, rank: int) -> list[int]:
        """Where the slots begin in the piece of `rank` on the stage."""
        if self._alike is not None:
            return self._alike
        held = self._without_straight([slot.held(rank) for slot in self.pack.slots])
        return [*accumulate(held[:-1], initial=0)]

    @cached_property
    def strides(self) -> list[tuple[Band, list[Stride]]]:
        """What is copied off the stage; see [Note: on the stage]."""
        if self._alike is None:
            bands = self.bands
        else:
            bands = [
                (band, [stride])
                for index, slot in enumerate(self.pack.slots)
                for band in self._bands_of(slot)
                if (stride := self._stride(index, band)) is not None
            ]
        beside = ((band, [s for s in strides if s.slot not in self.straight]) for band, strides in bands)
        return [(band, strides) for band, strides in beside if strides]

    def _bands_of(self, slot: Slot) -> Iterator[Band]:
        """The ranks that own equally much of one slot. Of copies only the first rank's is taken."""
        apart = () if self._own is None else (self._own,)
        bands = Pack((slot,), self.pack.world).bands_around(apart)
        others = (band for band in bands if band.start != self._own)
        return islice(others, 1) if slot.split == "copy" else others

    @property
    def totals(self) -> Lengths:
        """Elements that each rank sends."""
        return self.pack.owned

    def in_wire(self, wire: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Targets, and what goes there out of the pieces of all ranks, laid out as the pack's wire."""
        return self._pairs(
            self.bands, lambda band: (in_wire(wire, self.pack, band), self.pack.offsets(band.start))
        )

    def in_turn(self, pieces: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The same out of the stage, where pieces begin every `each` elements, without what comes straight
        to its place."""

        def rows(band: Band) -> tuple[Tensor, list[int]]:
            found = pieces[band.start * self.each : band.stop * self.each]
            return found.view(-1, self.each), self.staged(band.start)

        return self._pairs(self.strides, rows)

    @staticmethod
    def _pairs(
        bands: Iterable[tuple[Band, list[Stride]]], rows_of: Callable[[Band], tuple[Tensor, list[int]]]
    ) -> tuple[list[Tensor], list[Tensor]]:
        to: list[Tensor] = []
        of: list[Tensor] = []
        for band, strides in bands:
            rows, offsets = rows_of(band)
            for slot, target in strides:
                found = rows[..., offsets[slot] : offsets[slot] + target.shape[-1]]
                to.append(target)
                of.append(found if target.dim() == found.dim() else found[0])
        return to, of


def _of_rank(pack: Pack, buffer: Tensor, own: int | None, rank: int) -> list[Tensor]:
    return [] if rank == own else [buffer[at : at + n] for at, n in pack.cut_of_full(rank)]


def in_wire(wire: Tensor, pack: Pack, band: Band) -> Tensor:
    """The pieces of a band's ranks in a wire: a row for each of them, or one dimension for one rank's."""
    start, step = pack.starts[band.start], pack.pieces[band.start]
    pieces = wire[start : start + len(band) * step]
    return pieces if len(band) == 1 else pieces.view(-1, step)


def totals_of(cuts: Cuts, out: Sequence[Sequence[Tensor]]) -> Lengths:
    """Elements that each rank sends in a gather."""
    return out.totals if isinstance(out, Targets) else Lengths(sum(n for _, n in cut) for cut in cuts)
