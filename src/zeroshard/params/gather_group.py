"""A gather group: parameters of one unit that are all-gathered and released together.

The life of a parameter: SHARDED → GATHERING → FULL → SHARDED.

Tensors of a gather group (P = this rank's shard, F = the whole of its slots; both flat, padded):

- `rows`    compute dtype, P. Stage 3 only: what this rank owns, and what peers gather. In a transport buffer.
  None where they rest on the disk (`source`): sharded parameters then show NaN, as unsharded parameters of
  a released gather group do.
- `full`    compute dtype, F. Stages 0 to 2: always there, in a transport buffer where peers read it (stages 1
  and 2). Stage 3: lent by the pool while the gather group is GATHERING or FULL.
- `master`  master dtype, P. Only where it differs from the compute dtype; else the sharded parameters are
  views of `rows` or `full`.
- `remainder`  int16, P, in place of `master` where that is split: `rows` or `full` is then its other half.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from zeroshard.comm import GatherRequest, GatherTargets, Transport, TransportBuffer, Work
from zeroshard.compress import Codec, Delta
from zeroshard.layout.sharding import PackLayout
from zeroshard.tiers import CopyMark, PageSegment, TierCopies, WeightStream, pinned
from zeroshard.tiers.ledger import Kind, MemoryLedger

from .coded_gather import CodedGather, DeltaGather, said_of
from .sharded_param import ShardedParam, SplitMaster

SMALL_BYTES = 1 << 16


class BufferPool:
    """Lends flat buffers; a buffer given back is lent again to whoever asks for the same size and dtype.

    Why not the allocators: on the CPU a fresh 128 MiB tensor costs 61 ms of page faults; on the GPU buffers
    of changing sizes fragment. The sizes that a run needs are few and known, so nothing grows after the first
    step.
    """

    def __init__(self, device: torch.device, ledger: MemoryLedger) -> None:
        self.device, self._ledger = device, ledger
        self._idle: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        self.lent: dict[int, object] = {}  # address of a lent buffer -> who has it

    def take(self, numel: int, dtype: torch.dtype, owner: object) -> Tensor:
        idle = self._idle[numel, dtype]
        if idle:
            buffer = idle.pop()
        else:
            self._ledger.book("gathered", numel * dtype.itemsize)
            # Plain memory even when asked for inside inference mode: a buffer outlives the caller's mode.
            with torch.inference_mode(False):
                buffer = torch.empty(numel, dtype=dtype, device=self.device)
        self.lent[buffer.data_ptr()] = owner
        return buffer

    def give(self, buffer: Tensor) -> None:
        del self.lent[buffer.data_ptr()]
        self._idle[buffer.numel(), buffer.dtype].append(buffer)

    @property
    def known(self) -> set[int]:
        """Addresses of all buffers."""
        return {buffer.data_ptr() for idle in self._idle.values() for buffer in idle} | self.lent.keys()

    def drop(self, but: Collection[int] = ()) -> set[int]:
        """Let the idle buffers go, `but` those at these addresses. Returns the addresses of what went:
        whoever keeps views of it must let them go, too."""
        before = self.known
        for key, idle in self._idle.items():
            kept = [buffer for buffer in idle if buffer.data_ptr() in but]
            self._ledger.book("gathered", sum(map(_nbytes, kept)) - sum(map(_nbytes, idle)))
            self._idle[key] = kept
        return before - self.known


def _nbytes(buffer: Tensor) -> int:
    return buffer.nbytes


class ParamState(Enum):
    SHARDED = "sharded"
    GATHERING = "gathering"
    FULL = "full"


@dataclass(frozen=True)
class GatherGroupPlacement:
    """Where a gather group rests. `resident`: its unsharded parameters are always whole on the device.
    `state` and `rows` name a tier; `splits`: both are the device, and the master is split there."""

    resident: bool
    state: Literal["device", "host", "disk"] = "device"
    rows: Literal["device", "host", "disk"] = "device"
    splits: bool = False


class GatherGroup:
    """Parameters of one unit, one compute dtype and one codec of `gather=`, gathered by one operation."""

    def __init__(
        self,
        key: str,
        pack: PackLayout,
        dtypes: tuple[torch.dtype, torch.dtype],
        rests: GatherGroupPlacement,
        transport: Transport,
        pool: BufferPool,
        ledger: MemoryLedger,
        copies: TierCopies,
        codec: Codec | None = None,
    ) -> None:
        self.key, self.pack, self.rests, self.copies = key, pack, rests, copies
        self._said = said_of(key)
        resident = self.resident = rests.resident
        self.dtype, self.master_dtype = dtypes
        self.transport, self.pool = transport, pool
        self.params: list[ShardedParam] = []
        self.residence = ParamState.FULL if resident else ParamState.SHARDED
        self.epoch = 0  # the last epoch whose rows of the peers are in `full`
        self._work: Work | None = None
        self._views: dict[int, tuple[list[Tensor], GatherTargets]] = {}
        nothing = float("nan") if self.dtype.is_floating_point else 0
        blank = torch.full((), nothing, dtype=self.dtype, device=pool.device)
        self._blanks = [] if resident else [blank.expand(slot.shape) for slot in pack.slots]
        self.source: DiskRows | None = None  # where rows on the disk come from
        self.coded: CodedGather | None = None  # what travels in place of the rows
        self._stage: Tensor | None = None  # where codes arrive
        self._allocate(ledger, codec)
        self._compute = self._compute_views()
        self._local = self._compute if self.master is None else self._of_shard(self.master)
        self.updated_by_host: set[int] = set()  # parameters whose compute rows the host update writes itself
        self.written_through: set[int] = (
            set()
        )  # and those whose sharded parameter is not the master, nor a copy of it
        self._cuts = pack.cuts_of_full if resident else pack.cuts_of_shards

    def _allocate(self, ledger: MemoryLedger, codec: Codec | None) -> None:
        rank, device = self.transport.rank, self.pool.device
        self.full: Tensor | None = None
        self.rows: Tensor | None = None
        self.master: Tensor | None = None
        self.remainder: Tensor | None = None
        self.transport_buffer: TransportBuffer | None = None
        self._mirrored = False
        if self.rests.rows == "disk":
            return  # with the state of the host update
        size = self.pack.full if self.resident else self.pack.shards[rank]
        moves = self.transport.size > 1 and any(s.split != "copy" for s in self.pack.slots)
        if moves and codec is not None and self.dtype.is_floating_point:
            width = self.dtype.itemsize
            kind_of_rows = DeltaGather if isinstance(codec, Delta) else CodedGather
            self.coded = kind_of_rows(self.key, self.pack, codec, width, self.transport, self.pool, ledger)
            moves = False
        streams = moves and self.rests.rows == "host" and self.transport.traits.staged
        if moves and not streams:
            self.transport_buffer = self.transport.allocate(self.key, size, self.dtype)
        # Where the transport's memory is not on our device (two ranks on one GPU), the transport buffer is
        # a mirror.
        own = (
            self.transport_buffer.mine
            if self.transport_buffer is not None and self.transport_buffer.mine.device == device
            else None
        )
        self._mirrored = self.transport_buffer is not None and own is None
        if self.rests.rows == "host" and (own is None or own.device.type != "cpu"):
            store = pinned(size * self.dtype.itemsize, device).view(self.dtype)
        else:
            store = own if own is not None else torch.zeros(size, dtype=self.dtype, device=device)
        if streams:
            self.transport_buffer = self.transport.over(self.key, store)
        self.full = store if self.resident else None
        self.rows = None if self.resident else store
        kind: Kind = "host" if store.device != device or self.rests.rows == "host" else "parameters"
        ledger.book(kind, store.nbytes)
        if self.transport_buffer is not None:
            cuts = self.pack.cuts_of_full if self.resident else self.pack.cuts_of_shards
            ledger.book("buckets", self.transport.expect(self._said, self.transport_buffer, cuts))
            ledger.book(kind, 0 if self.resident else self.transport.cache(self.transport_buffer, cuts))
        # Rows that rest off the device are a copy of a master on it; so are those that were decoded.
        copied = self.rests.rows != "device" or (self.coded is not None and self.resident)
        own_master = self.master_dtype != self.dtype or copied
        if self.rests.splits:
            self.remainder = torch.zeros(self.pack.body(rank), dtype=torch.int16, device=device)
            ledger.book("state", self.remainder.nbytes)
        elif own_master and self.rests.state == "device":
            self.master = torch.zeros(self.pack.body(rank), dtype=self.master_dtype, device=device)
            ledger.book("state", self.master.nbytes)

    # ------------------------------------------------------------------ views

    def views(self) -> tuple[list[Tensor], list[Tensor]]:
        """The local rows of every slot, in compute dtype and in master dtype: what sharded parameters are
        made of."""
        return self._compute, self._local

    def _compute_views(self) -> list[Tensor]:
        rank = self.transport.rank
        if self.rows is not None:
            return self._of_shard(self.rows)
        if self.full is None:
            return list(self._blanks)  # on the disk; one rank has all of it
        return [
            self.full[at : at + n].view(slot.local_shape(rank))
            for slot, (at, n) in zip(self.pack.slots, self.pack.cut_of_full(rank), strict=True)
        ]

    def split_masters(self) -> list[SplitMaster]:
        """Of every slot, where the master is split on the device; else none."""
        if self.remainder is None:
            return []
        rests = self._of_shard(self.remainder)
        return [SplitMaster(near, rest) for near, rest in zip(self._compute, rests, strict=True)]

    def _of_shard(self, shard: Tensor) -> list[Tensor]:
        rank = self.transport.rank
        return [
            shard[at : at + slot.held(rank)].view(slot.local_shape(rank))
            for slot, at in zip(self.pack.slots, self.pack.offsets(rank), strict=True)
        ]

    def full_views(self, buffer: Tensor) -> list[Tensor]:
        """The slots whole, in a buffer of `pack.full` elements."""
        return [
            buffer[at : at + slot.numel].view(slot.shape)
            for slot, at in zip(self.pack.slots, self.pack.full_offsets, strict=True)
        ]

    def blank(self, index: int) -> Tensor:
        """What an unsharded parameter shows while its gather group is sharded: the right shape, and NaN."""
        return self._blanks[index]

    # ------------------------------------------------------------------ verbs

    @property
    def refreshes(self) -> bool:
        """Whether `refresh` has anything to do. There is nothing where sharded parameters are views of the
        memory that peers read."""
        copied = self.master is not None or self.rests.state != "device"
        return copied or self.coded is not None or self._mirrored

    @property
    def is_small(self) -> bool:
        """Whether to fetch it alone would cost more than what it brings. For gather groups that stay
        whole."""
        own = self.resident and self.transport_buffer is not None
        return own and self.pack.full * self.dtype.itemsize <= SMALL_BYTES

    def as_fetch(self) -> GatherRequest:
        """What a gather of a gather group that stays whole fetches, for one of many."""
        assert self.transport_buffer is not None
        assert self.full is not None
        return GatherRequest(self._said, self.transport_buffer, self._cuts, self._views_of(self.full)[1])

    @property
    def exchanges(self) -> bool:
        """Whether `exchange` has anything to do."""
        return isinstance(self.coded, DeltaGather)

    @torch.no_grad()
    def refresh(self, written: bool = False, repeats: bool = False) -> None:
        """Bring this rank's compute rows up to date with its master rows, and the peers' window with the
        compute rows.

        `written`: someone wrote the master rows, so that those which the host updates are out of date too.
        `repeats`: what was loaded had been shown to the peers before it was saved.
        """
        if self.master is not None:
            if self.rows is not None:
                self.rows[: self.master.numel()].copy_(self.master)
            elif self.coded is None:
                torch._foreach_copy_(self._compute, self._local)
        elif self.rests.state != "device":
            for index, (row, local) in enumerate(zip(self._compute, self._local, strict=True)):
                if row.data_ptr() == local.data_ptr() or index in self.written_through:
                    continue
                if written or index not in self.updated_by_host:
                    row.copy_(local)
        if self.coded is not None:
            self.coded.repeat(repeats)
            self.coded.encode(self._shard)
        if self._mirrored:
            assert self.transport_buffer is not None
            source = self.rows if self.rows is not None else self.full
            assert source is not None
            self.transport_buffer.mine.copy_(source)

    @property
    def _shard(self) -> Tensor:
        shard = self.master if self.master is not None else self.rows
        assert shard is not None
        return shard

    @torch.no_grad()
    def exchange(self) -> None:
        """Where changes travel: after `refresh` of all gather groups, on all ranks."""
        if isinstance(self.coded, DeltaGather):
            self.coded.exchange("publish" if self.resident else "gather", self._shard)

    def catch_up(self) -> None:
        """Add the changes that are on their way to what is believed, which others are about to read."""
        if isinstance(self.coded, DeltaGather):
            self.coded.catch_up()

    def gather(self, epoch: int) -> None:
        """Start to fetch the peers' rows of this epoch, unless they are here or on their way."""
        stale = self.epoch < epoch
        if not stale and self.residence is not ParamState.SHARDED:
            return
        if self.resident and self.transport_buffer is None and self.coded is None:
            self.epoch = epoch  # what it holds is all there is
            return
        if self._work is not None:
            self._work.wait()  # of an earlier epoch, in which this rank did not use it; peers may
            self._work = None
        with torch.inference_mode(False), torch.no_grad():
            if self.full is None:
                self.full = self.pool.take(self.pack.full, self.dtype, self)
            _, out = self._views_of(self.full)
            kind = "publish" if self.resident else "gather"
            if self.coded is not None and not self.coded.at_hand:
                if self._stage is None:
                    self._stage = self.pool.take(self.coded.stage_bytes, torch.uint8, self.coded)
                self._work = self.coded.fetch(kind, self._stage)
            elif self.transport_buffer is None:
                if not self.resident and self.coded is None:
                    self._fetch(out[self.transport.rank])
            else:
                self._work = self.transport.gather(kind, self._said, self.transport_buffer, self._cuts, out)
        self.epoch = epoch
        self.residence = ParamState.GATHERING

    def _fetch(self, out: Sequence[Tensor]) -> None:
        """One rank, rows on the host or the disk: bring them in beside the computation."""
        if self.source is not None:
            places = [[out[index] for index in members] for members in self.source.members]
            self._work = self.source.streaming.start(self.source.segments, places)
            return
        after = self.copies.here()  # the buffer may still be read by what was launched before
        mark = self.copies.back(list(out), [view.view(-1) for view in self._compute], after)
        self._work = _Arrival(mark)

    def use_locals(self, local: list[Tensor]) -> None:
        """Master rows that live elsewhere: in the state of the host update."""
        self._local = local

    def finish(self) -> bool:
        """Complete a gather. True if the gather group became FULL by this call."""
        if self.residence is not ParamState.GATHERING:
            return False
        assert self.full is not None
        with torch.inference_mode(False), torch.no_grad():
            if self._work is not None:
                self._work.wait()
                self._work = None
            if self.coded is not None and (self.coded.at_hand or self._stage is not None):
                self.coded.spread(self._stage, self._views_of(self.full)[1])
            if self._stage is not None:
                self.pool.give(self._stage)
                self._stage = None
            if not self.resident:
                self._show(self._views_of(self.full)[0])
        self.residence = ParamState.FULL
        return True

    def release(self) -> None:
        """Give the gathered buffer back. Resident gather groups stay."""
        if self.resident or self.residence is ParamState.SHARDED:
            return
        self.finish()
        assert self.full is not None
        self._show(self._blanks)
        self.pool.give(self.full)
        self.full = None
        self.residence = ParamState.SHARDED

    def rejoin(self) -> None:
        """Leaves show this gather group's memory again, after somebody gave them another."""
        if self.full is not None:
            self._show(self.full_views(self.full))

    def _show(self, views: Sequence[Tensor]) -> None:
        with DisableTorchFunctionSubclass():  # they may be `Away`
            for param, view in zip(self.params, views, strict=True):
                param.unsharded_param.data = view

    def _views_of(self, buffer: Tensor) -> tuple[list[Tensor], GatherTargets]:
        """The slots whole, and the targets of a gather; made once per buffer."""
        cached = self._views.get(buffer.data_ptr())
        if cached is None:
            own = self.transport.rank if self.resident and self.coded is None else None
            targets = GatherTargets(self.pack, buffer, own)
            cached = self._views[buffer.data_ptr()] = (self.full_views(buffer), targets)
        return cached

    def whole(self, index: int) -> Tensor:
        """A parameter's values, while the gather group is FULL."""
        assert self.full is not None
        return self._views_of(self.full)[0][index]

    def forget(self, gone: set[int]) -> None:
        """Buffers of the pool that were at these addresses are no more: keep no views of them."""
        self._views = {at: views for at, views in self._views.items() if at not in gone}
        transport_buffer = self.coded.transport_buffer if self.coded is not None else self.transport_buffer
        if transport_buffer is not None:
            self.transport.forget(transport_buffer)


@dataclass(frozen=True)
class DiskRows:
    """Where a gather group's rows on the disk are: segments, and which of its parameters each holds."""

    streaming: WeightStream
    segments: list[PageSegment]
    members: list[list[int]]


class _Arrival:
    """A copy from the host, as work."""

    def __init__(self, mark: CopyMark) -> None:
        self._mark = mark

    def poll(self) -> bool:
        return self._mark.passed()

    def wait(self) -> None:
        self._mark.wait_on_device()
