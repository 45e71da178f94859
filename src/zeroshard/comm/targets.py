"""Describes where a gather puts the rows of every rank, and prepares its messages.

Its result is one buffer that holds what every rank has of some tensors. A view for each rank and tensor is
what transports ask for that copy rank by rank. With a thousand ranks those would be most of what a process
keeps in host memory, so transports that bring the shards of all ranks at once copy by bands: one view for
each tensor, with a row for each rank. Large tensors that all ranks own equally much of need no copy: their
shards can be brought straight to their place.

[Note: on the stage] Shards on a transport's stage are equally long. Where the rank with most has most of
every tensor, as with ``rows``, each tensor begins at one place in all of them, and one view spans all ranks
that own equally much of that tensor, whatever they own of others: one or two views each. Else shards are
dense, and a view spans a band.

Messages of one gather are prepared once, and used by every gather of the same key into the same tensors:

- **stage**: where the peers' short segments arrive; long ones are received into their places.
- **pack**: this rank's short segments one after another, where there are several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import accumulate, islice
from typing import NamedTuple

import torch
from torch import Tensor

from zeroshard.kernels import TensorCopies
from zeroshard.layout.division import ALONE
from zeroshard.layout.sharding import ByRank, PackLayout, RankBand, RankLengths, ShardSpec

from .transport import Cuts, Spans, TransportBuffer, slices


class BandView(NamedTuple):
    """Rows that a band of ranks has of slot number `slot`: `to` has a row for each rank, or one dimension
    where only one rank's are taken."""

    slot: int
    to: Tensor


class GatherTargets(ByRank[list[Tensor]]):
    """`out` of a gather: by rank, flat views of its rows of every slot; and the same by bands. `own`: a rank
    whose rows are in place already."""

    def __init__(self, pack: PackLayout, buffer: Tensor, own: int | None = None) -> None:
        super().__init__(pack.world, partial(_of_rank, pack, buffer, own))
        self.pack, self._buffer, self.own = pack, buffer, own

    @cached_property
    def bands(self) -> list[tuple[RankBand, list[BandView]]]:
        """What the ranks of each band have, left out what is empty. Of copies the first rank's is taken."""
        apart = () if self.own is None else (self.own,)
        return [
            (band, self._strides(band))
            for band in self.pack.bands_around(apart)
            if band.start != self.own and any(band.held)
        ]

    def _strides(self, band: RankBand) -> list[BandView]:
        strides = (self._stride(index, band) for index in range(len(self.pack.slots)))
        return [stride for stride in strides if stride is not None]

    def _stride(self, index: int, band: RankBand) -> BandView | None:
        slot, at = self.pack.slots[index], self.pack.full_offsets[index]
        ranks, n = 1 if slot.split == "copy" else len(band), slot.held(band.start)
        if not n:
            return None
        at += slot.rows(band.start)[0] * slot.row
        rows = self._buffer[at : at + ranks * n]
        return BandView(index, rows if ranks == 1 else rows.view(ranks, n))

    @cached_property
    def straight(self) -> dict[int, Tensor]:
        """By their numbers, slots that need no copy, each of them whole."""
        places = enumerate(zip(self.pack.slots, self.pack.full_offsets, strict=True))
        return {n: self._buffer[at : at + slot.numel] for n, (slot, at) in places if slot.straight}

    @cached_property
    def each(self) -> int:
        """Elements that the rank with most has of the other slots."""
        return max(sum(self._beside(band)) for band in self.pack.bands)

    def _beside(self, band: RankBand) -> list[int]:
        return self._without_straight(band.held)

    def _without_straight(self, lengths: Sequence[int]) -> list[int]:
        return [0 if slot in self.straight else n for slot, n in enumerate(lengths)]

    @cached_property
    def _alike(self) -> list[int] | None:
        """Where the slots begin in every staged shard, if they can in all at one place; see [Note: on the
        stage]."""
        *starts, total = accumulate(self._without_straight(self.pack.most), initial=0)
        return starts if total == self.each else None

    def staged(self, rank: int) -> list[int]:
        """Where the slots begin in the shard of `rank` on the stage."""
        if self._alike is not None:
            return self._alike
        held = self._without_straight([slot.held(rank) for slot in self.pack.slots])
        return [*accumulate(held[:-1], initial=0)]

    @cached_property
    def strides(self) -> list[tuple[RankBand, list[BandView]]]:
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

    def _bands_of(self, slot: ShardSpec) -> Iterator[RankBand]:
        """The ranks that own equally much of one slot. Of copies only the first rank's is taken."""
        apart = () if self.own is None else (self.own,)
        bands = PackLayout((slot,), self.pack.world).bands_around(apart)
        others = (band for band in bands if band.start != self.own)
        return islice(others, 1) if slot.split == "copy" else others

    @property
    def totals(self) -> RankLengths:
        """Elements that each rank sends."""
        return self.pack.owned

    def in_wire(self, wire: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Targets, and what goes there out of the shards of all ranks, laid out as the pack's wire."""
        return self._pairs(
            self.bands, lambda band: (in_wire(wire, self.pack, band), self.pack.offsets(band.start))
        )

    def in_turn(self, shards: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The same out of the stage, where shards begin every `each` elements, without what comes straight
        to its place."""

        def rows(band: RankBand) -> tuple[Tensor, list[int]]:
            found = shards[band.start * self.each : band.stop * self.each]
            return found.view(-1, self.each), self.staged(band.start)

        return self._pairs(self.strides, rows)

    @staticmethod
    def _pairs(
        bands: Iterable[tuple[RankBand, list[BandView]]],
        rows_of: Callable[[RankBand], tuple[Tensor, list[int]]],
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


def _of_rank(pack: PackLayout, buffer: Tensor, own: int | None, rank: int) -> list[Tensor]:
    return [] if rank == own else [buffer[at : at + n] for at, n in pack.cut_of_full(rank)]


def in_wire(wire: Tensor, pack: PackLayout, band: RankBand) -> Tensor:
    """The shards of a band's ranks in a wire: a row for each of them, or one dimension for one rank's."""
    start, step = pack.starts[band.start], pack.shards[band.start]
    shards = wire[start : start + len(band) * step]
    return shards if len(band) == 1 else shards.view(-1, step)


def totals_of(cuts: Cuts, out: Sequence[Sequence[Tensor]]) -> RankLengths:
    """Elements that each rank sends in a gather."""
    return (
        out.totals if isinstance(out, GatherTargets) else RankLengths(sum(n for _, n in cut) for cut in cuts)
    )


Out = Sequence[Sequence[torch.Tensor]]
# Memory of a name and a length that a transport buffer keeps.
Room = Callable[[str, int], torch.Tensor]


class GatherMessages:
    """`sends`, `receives`: messages by peer. `pack` before the former, `unpack` after the latter."""

    def __init__(
        self, key: str, source: TransportBuffer, cuts: Cuts, out: Out, rank: int, room: Room
    ) -> None:
        self.cuts, self.out = cuts, out
        mine, width = source.mine, source.mine.element_size()
        peers = [peer for peer in range(len(cuts)) if peer != rank]
        self.totals = [sum(numel for _, numel in segments) for segments in cuts]
        self._packed: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        parts = []
        for message in _messages(cuts[rank], width):
            segments = [mine[at : at + n] for at, n in (cuts[rank][index] for index in message)]
            if len(segments) > 1:
                lengths = [segment.numel() for segment in segments]
                pack = room(f"pack {key}", sum(lengths))
                self._packed = slices(pack, lengths), segments
                segments = [pack]
            parts += segments
        self.sends = [(peer, part) for peer in peers for part in parts]
        self._targets = [target.detach().view(-1) for target in out[rank]]
        self._sources = [mine[at : at + n] for at, n in cuts[rank]] if self._targets else []
        self.receives: list[tuple[int, torch.Tensor]] = []
        self._receive(key, mine.dtype, [(p, m) for p in peers for m in _messages(cuts[p], width)], room)
        self._packing, self._unpacking = (
            TensorCopies(*self._packed),
            TensorCopies(self._targets, self._sources),
        )

    def _receive(
        self, key: str, dtype: torch.dtype, coming: Sequence[tuple[int, list[int]]], room: Room
    ) -> None:
        cuts, out = self.cuts, self.out
        direct = [
            len(message) == 1 and _lands_directly(out[peer][message[0]], dtype) for peer, message in coming
        ]
        lengths = [
            0 if lands else sum(cuts[peer][index][1] for index in message)
            for lands, (peer, message) in zip(direct, coming, strict=True)
        ]
        stage = slices(room(f"gather {key}", sum(lengths)), lengths)
        for (peer, message), lands, part in zip(coming, direct, stage, strict=True):
            if lands:
                self.receives.append((peer, out[peer][message[0]].detach().view(-1)))
            else:
                self.receives.append((peer, part))
                self._targets += [out[peer][index].detach().view(-1) for index in message]
                self._sources += slices(part, [cuts[peer][index][1] for index in message])

    @property
    def packs(self) -> bool:
        """Whether anything is copied before it is sent."""
        return bool(self._packed[0])

    def pack(self) -> None:
        self._packing.run(*self._packed, "neither")

    def unpack(self) -> None:
        if self._targets:
            self._unpacking.run(self._targets, self._sources, "neither")


def _messages(segments: Spans, width: int) -> list[list[int]]:
    """Which segments of a gather travel as one message, the same for sender and receiver: long ones alone, so
    that they are not copied on their way, and all short ones together."""
    sizes = [numel * width for _, numel in segments]
    long = [[index] for index, size in enumerate(sizes) if size >= ALONE]
    short = [index for index, size in enumerate(sizes) if 0 < size < ALONE]
    return [*long, short] if short else long


def rooms_for(key: str, cuts: Cuts, rank: int, width: int) -> dict[str, int]:
    """What a transport buffer keeps for gathers of `key` into host memory, in elements: one segment alone is
    sent from its place and lands in its place."""
    together = [
        sum(
            segments[index][1]
            for message in _messages(segments, width)
            if len(message) > 1
            for index in message
        )
        for segments in cuts
    ]
    return {f"pack {key}": together[rank], f"gather {key}": sum(together) - together[rank]}


def _lands_directly(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a peer's message can be received into its place."""
    return target.dtype == dtype and target.device.type == "cpu"
