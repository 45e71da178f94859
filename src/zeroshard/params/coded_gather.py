"""Gathers parameters through a codec (`gather=`).

Once a step each rank encodes its rows of a gather group; peers fetch the code and decode it. All ranks, the
owner too, compute with what comes out, so that they agree to the bit; the master rows stay exact and are
encoded afresh, so nothing adds up.

- `transport_buffer`  uint8, this rank's code, which peers read.
- `stage`   uint8, the codes of all other ranks as they arrive; the caller's.
- `believed` fp32, the shards of all ranks: with `Delta`, what all ranks take the rows to be. Codes are of the
  difference; all ranks start to fetch them at one point of the step, and add them before they look at it.
- `drawn`   int64, how often rows were encoded: the seed of codecs that draw, so it is in checkpoints.
- a scratch of fp32 numbers, the length of the longest shard, lent by the pool while a shard is decoded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zeroshard.comm import GatherTargets, Transport, Work
from zeroshard.compress import Codec
from zeroshard.compress.base import padded
from zeroshard.layout.codes import holes
from zeroshard.layout.sharding import PackLayout
from zeroshard.layout.specs import ROOT
from zeroshard.tiers.ledger import Kind, MemoryLedger

from .rank_state import RankState, in_wire
from .sharded_param import GuardedState

if TYPE_CHECKING:
    from .gather_group import BufferPool


def said_of(key: str) -> str:
    """A gather group, by its key, as errors name it: ``blocks.3/0`` is parameters of the unit `blocks.3`."""
    unit, _, number = key.rpartition("/")
    which = "the root" if unit == ROOT else f"unit {unit}"
    return f"parameters of {which}" + (f", part {number}" if number != "0" else "")


class CodedGather(GuardedState):
    """One gather group's rows as codes."""

    at_hand = False  # what is gathered need not be fetched

    def __init__(
        self,
        key: str,
        pack: PackLayout,
        codec: Codec,
        itemsize: int,
        transport: Transport,
        pool: BufferPool,
        ledger: MemoryLedger,
    ) -> None:
        self.key, self.pack, self.codec, self.transport, self.pool = key, pack, codec, transport, pool
        rank, world = transport.rank, pack.world
        self._bodies = [pack.body(r) for r in range(world)]
        self._sizes = [codec.wire_bytes(numel) for numel in self._bodies]
        self.transport_buffer = transport.allocate(key, padded(self._sizes[rank]), torch.uint8)
        self._mirrored = self.transport_buffer.mine.device != pool.device
        kind: Kind = "host" if self._mirrored else "parameters"
        self.cuts = [[(0, size)] if size else [] for size in self._sizes]
        ledger.book(
            kind, self.transport_buffer.mine.nbytes + transport.cache(self.transport_buffer, self.cuts)
        )
        self._at = [sum(map(padded, self._sizes[:r])) for r in range(world)]
        self._turn, self.drawn = 0, torch.zeros(1, dtype=torch.int64)
        held = sum(slot.held(rank) for slot in pack.slots)
        self._ratio = held * itemsize / self._sizes[rank] if self._sizes[rank] else 1.0
        self._begin(ledger)

    def _begin(self, ledger: MemoryLedger) -> None:
        """Memory of a kind of rows of its own."""

    @property
    def stage_bytes(self) -> int:
        return sum(map(padded, self._sizes))

    def encode(self, shard: Tensor) -> None:
        """This rank's newest rows, in the layout of a shard, for the peers to fetch."""
        rank = self.transport.rank
        numel, size = self._bodies[rank], self._sizes[rank]
        scratch = self._take() if self.at_hand or shard.dtype != torch.float32 else None
        values = shard[:numel] if scratch is None else scratch[:numel].copy_(shard[:numel])
        self._prepare(values)
        code = torch.empty(size, dtype=torch.uint8, device=values.device) if self._mirrored else None
        self._turn += 1
        self.before_change()
        self.drawn += 1
        self.codec.encode(
            values, self.transport_buffer.mine[:size] if code is None else code, {}, int(self.drawn)
        )
        if code is not None:
            self.transport_buffer.mine[:size].copy_(code)
        if scratch is not None:
            self.pool.give(scratch)

    def _prepare(self, values: Tensor) -> None:
        """Make of the rows what is encoded: the rows."""

    def repeat(self, last: bool) -> None:
        """The rows that were loaded had been encoded before they were saved: draw as then."""
        self.drawn -= int(last)

    def fetch(self, kind: str, stage: Tensor) -> Work:
        rank = self.transport.rank
        out = [
            [stage[at : at + size]] if size and r != rank else []
            for r, (at, size) in enumerate(zip(self._at, self._sizes, strict=True))
        ]
        before = self.sent(kind)
        work = self.transport.gather(kind, said_of(self.key), self.transport_buffer, self.cuts, out)
        self.count(kind, before)
        return _Fetch(self, kind, work)

    def sent(self, kind: str) -> int:
        return self.transport.counters.sent.get(kind, 0)

    def count(self, kind: str, before: int) -> None:
        """What has been sent since is so much shorter than the rows are."""
        self.transport.counters.add_spared(kind, round((self.sent(kind) - before) * (self._ratio - 1.0)))

    def spread(self, stage: Tensor | None, out: GatherTargets) -> None:
        """Decode what has come, and this rank's own, to where the rows of each rank go."""
        assert stage is not None
        scratch = self._take()
        for rank, size in enumerate(self._sizes):
            if size == 0:
                continue
            values = scratch[: self._bodies[rank]]
            self.codec.decode(self._code(rank, stage).to(values.device), values, add=False)
            shards = [values[start : start + n] for start, n in self.pack.cuts_of_shards[rank]]
            torch._foreach_copy_(out.made(rank), shards)
        self.pool.give(scratch)

    def private(self) -> list[RankState]:
        """For checkpoints: the same on all ranks."""
        if not self.codec.draws:
            return []
        return [RankState(f"({self.key})", f"draws of {self.codec!r}", ((0, self.drawn),), "same", self)]

    def _code(self, rank: int, stage: Tensor) -> Tensor:
        size, at = self._sizes[rank], self._at[rank]
        return self.transport_buffer.mine[:size] if rank == self.transport.rank else stage[at : at + size]

    def _take(self) -> Tensor:
        return self.pool.take(max(self._bodies), torch.float32, self)


class DeltaGather(CodedGather):
    """Codes of what has changed; see `Delta`."""

    at_hand = True

    def _begin(self, ledger: MemoryLedger) -> None:
        self._coming: tuple[Tensor, Work] | None = None  # changes that are not in `believed` yet
        self._known = False  # the next rows are believed already: nothing is sent
        self.believed = torch.zeros(self.pack.wire, device=self.pool.device)
        self._holes = [self.believed[at : at + n] for at, n in holes(self.pack)]
        ledger.book("parameters", self.believed.nbytes)

    def repeat(self, last: bool) -> None:
        """They are believed already, as far as their code went."""
        self._known = last and bool(self.believed.any())

    def encode(self, shard: Tensor) -> None:
        if not self._known:
            super().encode(shard)

    def _prepare(self, values: Tensor) -> None:
        self.catch_up()
        values.sub_(self._believed(self.transport.rank))

    def _believed(self, rank: int) -> Tensor:
        at = self.pack.starts[rank]
        return self.believed[at : at + self._bodies[rank]]

    def exchange(self, kind: str, shard: Tensor) -> None:
        """Start to fetch the changes of all ranks. Every rank calls it once a step, after `encode`. Where
        nothing is believed yet, the rows travel as they are."""
        if self._known:
            self._known = False
            return
        if self._turn == 1 and not bool(self.believed.any()):
            self._settle(kind, shard)
            return
        stage = self.pool.take(self.stage_bytes, torch.uint8, self)
        self._coming = stage, self.fetch(kind, stage)
        if not self.transport.traits.overlaps:
            self.catch_up()

    @torch.no_grad()
    def catch_up(self) -> None:
        """Add to what is believed the changes that are on their way."""
        coming, self._coming = self._coming, None
        if coming is None:
            return
        stage, work = coming
        work.wait()
        self.before_change()
        for rank, size in enumerate(self._sizes):
            if size:
                values = self._believed(rank)
                self.codec.decode(self._code(rank, stage).to(values.device), values, add=True)
        if self._holes:
            torch._foreach_zero_(self._holes)
        self.pool.give(stage)

    def _settle(self, kind: str, shard: Tensor) -> None:
        """Make what is believed the rows themselves: their bytes, in as many parts as a code has room for."""
        self.before_change()
        bodies, sizes = self._bodies, self._sizes
        scratch, own = self._take(), self.transport.rank
        raw = scratch[: bodies[own]].copy_(shard[: bodies[own]]).view(torch.uint8)
        parts = max(-(-4 * numel // size) for numel, size in zip(bodies, sizes, strict=True) if size)
        for number in range(parts):
            self.transport.fence()  # peers have read the last part
            part = raw[number * sizes[own] : (number + 1) * sizes[own]]
            self.transport_buffer.mine[: part.numel()].copy_(part)
            self.transport.open()
            stage = self.pool.take(self.stage_bytes, torch.uint8, self)
            self.fetch(kind, stage).wait()
            for rank, size in enumerate(sizes):
                if size:
                    whole = self._believed(rank).view(torch.uint8)
                    into = whole[number * size : (number + 1) * size]
                    into.copy_(self._code(rank, stage)[: into.numel()])
            self.pool.give(stage)
        self.pool.give(scratch)

    def spread(self, stage: Tensor | None, out: GatherTargets) -> None:
        self.catch_up()
        to, of = out.in_wire(self.believed)
        if to:
            torch._foreach_copy_(to, of)

    def private(self) -> list[RankState]:
        """What is believed, too."""
        believed = in_wire(self.pack, self.believed, f"believed, {self.codec!r}", "same", self)
        return [*super().private(), *believed]


class _Fetch:
    """A gather of codes that counts what it sends, also what is sent only while somebody waits for it."""

    __slots__ = ("_kind", "_rows", "_work")

    def __init__(self, rows: CodedGather, kind: str, work: Work) -> None:
        self._rows, self._kind, self._work = rows, kind, work

    def poll(self) -> bool:
        return self._work.poll()

    def wait(self) -> None:
        before = self._rows.sent(self._kind)
        self._work.wait()
        self._rows.count(self._kind, before)
