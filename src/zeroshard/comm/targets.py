"""Where a gather puts what every rank has of some tensors: in one buffer that holds them whole.

A view for each rank and tensor is what transports ask for that copy rank by rank. With a thousand ranks those
would be most of what a process keeps in host memory, so transports that bring the pieces of all ranks at once
copy by bands: one view for each tensor, with a row for each rank. Large tensors that all ranks own equally
much of need no copy: their pieces can be brought straight to their place.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import cached_property, partial
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from zeroshard.count.layout import Band, ByRank, Pack

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
        found = []
        cut = zip(self.pack.slots, self.pack.cut_of_full(band.start), strict=True)
        for index, (slot, (at, n)) in enumerate(cut):
            ranks = 1 if slot.split == "copy" else len(band)
            if n:
                rows = self._buffer[at : at + ranks * n]
                found.append(Stride(index, rows if ranks == 1 else rows.view(ranks, n)))
        return found

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
        return [0 if slot in self.straight else held for slot, held in enumerate(band.held)]

    def in_wire(self, wire: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Targets, and what goes there out of the pieces of all ranks, laid out as the pack's wire."""
        return self._pairs(lambda band: (in_wire(wire, self.pack, band), self.pack.offsets(band.start)), ())

    def in_turn(self, pieces: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The same where pieces begin every `each` elements, and have neither padding nor slots that come
        straight to their place."""

        def rows(band: Band) -> tuple[Tensor, list[int]]:
            found = pieces[band.start * self.each : band.stop * self.each]
            return found.view(-1, self.each), [0, *accumulate(self._beside(band))]

        return self._pairs(rows, self.straight) if self.each else ([], [])

    def _pairs(
        self, rows_of: Callable[[Band], tuple[Tensor, list[int]]], without: Container[int]
    ) -> tuple[list[Tensor], list[Tensor]]:
        to: list[Tensor] = []
        of: list[Tensor] = []
        for band, strides in self.bands:
            rows, offsets = rows_of(band)
            for slot, target in strides:
                if slot not in without:
                    found = rows[..., offsets[slot] : offsets[slot] + band.held[slot]]
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


def totals_of(cuts: Cuts, out: Sequence[Sequence[Tensor]]) -> list[int]:
    """Elements that each rank sends in a gather."""
    if isinstance(out, Targets):
        return [total for band in out.pack.bands for total in [sum(band.held)] * len(band)]
    return [sum(numel for _, numel in segments) for segments in cuts]
