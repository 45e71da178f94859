"""Makes the buckets of a run: which gradients travel together, through which codec, over which wires."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zeroshard.codec import Codec, Compression, LowRank, Rows
from zeroshard.comm import Region, Transport
from zeroshard.config import Options
from zeroshard.count.coding import rows_spans, wire_bytes
from zeroshard.count.layout import ALIGN, FlatPack, Pack, buckets, stretches
from zeroshard.count.wires import rooms_of, turns_of
from zeroshard.life.bucket import Bucket, CodedBucket, Desk, LowRankBucket, RowsBucket, WholeBucket
from zeroshard.life.shard import Param
from zeroshard.routes import bucket_limit, codec_for
from zeroshard.tier.pool import Kind, Ledger


@dataclass(frozen=True)
class Sort:
    """Gradients that may share a bucket: what travels, what `p.grad` is, and the codec between."""

    wire: torch.dtype
    landed: torch.dtype
    codec: Compression | None

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        return self.wire, self.landed


def sort_of(param: Param, options: Options) -> Sort:
    """A parameter that computes in master precision reduces in it too."""
    precision, codec = options.precision, codec_for(options.compress, param.name, param.slot.shape)
    if precision is None or param.leaf.dtype == getattr(torch, precision.master):
        return Sort(param.leaf.dtype, param.leaf.dtype, codec)
    return Sort(getattr(torch, precision.wire), getattr(torch, precision.landed), codec)


class Wiring:
    """All ranks make the same buckets in the same order: the transport's regions depend on it. `delays`:
    every bucket has a wire of its own at any stage."""

    def __init__(
        self,
        options: Options,
        transport: Transport,
        device: torch.device,
        ledger: Ledger,
        delays: bool,
        align: int = ALIGN,
    ) -> None:
        self.options, self.transport, self.device, self.ledger = options, transport, device, ledger
        self.delays, self.align = delays, align
        self.desk: Desk | None = None

    def buckets(self, params: Sequence[Param], together: Sequence[Sequence[Param]]) -> list[Bucket]:
        """Buckets of `params`, which come in the order in which gradients arrive. Those of a group of
        `together` make a bucket of their own."""
        place = {p.name: n for n, p in enumerate(params)}
        sorts = {p.name: sort_of(p, self.options) for p in params}
        groups: dict[Sort, list[list[Param]]] = {}
        for group in together:
            groups.setdefault(sorts[group[0].name], []).append(list(group))
        taken = {p.name for group in together for p in group}
        by_name = {p.name: p for p in params}
        stretch = stretches((p.name, p.name in taken) for p in params)
        for sort in dict.fromkeys(sorts.values()):
            rest = [p for p in params if sorts[p.name] == sort and p.name not in taken]
            sizes = [(p.name, p.leaf.numel() * sort.wire.itemsize) for p in rest]
            for names in buckets(sizes, bucket_limit(sort.codec, self.options.bucket_bytes), stretch):
                groups.setdefault(sort, []).append([by_name[n] for n in names])
        made: list[_Made] = []
        for sort, members in groups.items():
            members.sort(key=lambda ps: min(place[p.name] for p in ps))
            packs = [self._pack(ps, sort) for ps in members]
            wires = self._wires(packs, sort)
            made += [_Made(sort, *each) for each in zip(members, packs, wires, strict=True)]
        self._lay_desk(made)
        return [self._bucket(index, each) for index, each in enumerate(made)]

    def _pack(self, params: Sequence[Param], sort: Sort) -> Pack:
        by_rows = self.options.stage > 0 or isinstance(sort.codec, Rows)
        kind = Pack if by_rows else FlatPack
        slots = tuple(p.slot.reduced for p in params)
        return kind(slots, self.transport.size, flags=True, align=self.align)

    def _wires(self, packs: list[Pack], sort: Sort) -> Sequence[Region | None]:
        """A wire per bucket: its own up to stage 1, where the whole gradient stays; from stage 2 on a few
        take turns. A coded gradient stays on its wire at no stage; factors have wires of their own."""
        codec, key = sort.codec, f"gradients {sort.wire}"
        if isinstance(codec, LowRank):
            return [None] * len(packs)
        if codec is None:
            keeps = self.delays or not self.options.shards_grads
            wires = self._ring(key, [pack.wire for pack in packs], sort.wire, keeps)
        elif isinstance(codec, Codec):
            sizes = [wire_bytes(codec, pack, sort.wire.itemsize) for pack in packs]
            wires = self._ring(f"{key} {codec!r}", sizes, torch.uint8, self.delays)
        else:
            spans = [rows_spans(pack.slots[0], sort.wire.itemsize) for pack in packs]
            sizes = [sum(length for _, length in each) for each in spans]
            wires = self._ring(f"{key} {codec!r}", sizes, torch.uint8, self.delays)
        stage, near = self.options.stage, wires[0].mine.device == self.device
        in_place = sort.wire == sort.landed and near and not self.delays
        shown = codec is None and (stage == 1 or (stage == 0 and in_place))
        kind: Kind = "gradients" if shown else "buckets"
        self.ledger.book(kind, sum(region.mine.nbytes for region in dict.fromkeys(wires)))
        if codec is None:
            self._receive(wires, packs)
        return wires

    def _receive(self, wires: list[Region], packs: list[Pack]) -> None:
        """Make room for what peers send."""
        most: dict[Region, int] = {}
        for wire, pack in zip(wires, packs, strict=True):
            most[wire] = max(most.get(wire, 0), pack.pieces[self.transport.rank])
        self.ledger.book("buckets", sum(self.transport.receive(*one) for one in most.items()))

    def _ring(self, key: str, sizes: list[int], dtype: torch.dtype, keeps: bool) -> list[Region]:
        """The wire of each bucket; see `rooms_of`. `keeps`: every one has its own."""
        rooms = sizes if keeps else rooms_of(sizes)
        wires = [self.transport.allocate(f"{key} {i}", room, dtype) for i, room in enumerate(rooms)]
        return wires if keeps else [wires[turn] for turn in turns_of(sizes, rooms)]

    def _lay_desk(self, made: list[_Made]) -> None:
        """Memory that the coded buckets share, as large as the largest needs."""
        rank = self.transport.rank
        users = [each for each in made if isinstance(each.sort.codec, (Codec, Rows))]
        coded = [each for each in users if isinstance(each.sort.codec, Codec)]
        narrow = [each.pack.pieces[rank] for each in users if each.sort.landed.itemsize < 4]
        wires = [each.wire.mine for each in coded if each.wire is not None]
        away = [wire.numel() for wire in wires if wire.device != self.device]
        longest = max((each.pack.wire for each in coded), default=0)
        codecs = {each.sort.codec for each in made if each.sort.codec is not None}
        if codecs:
            sizes = longest, max(narrow, default=0), max(away, default=0)
            self.desk = Desk(self.device, codecs, sizes, self.ledger)

    def _bucket(self, index: int, made: _Made) -> Bucket:
        sort, codec, transport, wire = made.sort, made.sort.codec, self.transport, made.wire
        if isinstance(codec, LowRank):
            return LowRankBucket(index, made.pack, made.params, transport, sort.dtypes, self.device, codec)
        assert wire is not None
        if codec is None:
            kind = WholeBucket if self.delays and self.options.stage == 0 else Bucket
            return kind(index, made.pack, made.params, wire, transport, sort.dtypes, self.device)
        assert self.desk is not None
        if isinstance(codec, Rows):
            return RowsBucket(index, made.pack, made.params, wire, transport, sort.dtypes, self.desk, codec)
        assert isinstance(codec, Codec)
        return CodedBucket(index, made.pack, made.params, wire, transport, sort.dtypes, self.desk, codec)


@dataclass(frozen=True)
class _Made:
    """What a bucket is made from."""

    sort: Sort
    params: list[Param]
    pack: Pack
    wire: Region | None
