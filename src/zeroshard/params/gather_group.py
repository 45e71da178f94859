"""A gather group: parameters of one unit that are all-gathered and released together, and what autograd saves
of their memory.

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

[Note: released units in backward] Between forward and backward a stage-3 gather group gives its buffer back.
What autograd saved out of it (a weight, or a view of one) is therefore saved as a `SavedView`: gather group,
offset, size, stride. Unpacking gathers the group again, into whichever buffer the pool lends. The unsharded
parameters meanwhile show a NaN of the right shape, so that a use at a wrong moment is visible instead of
silently stale.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol
from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch._subclasses.fake_tensor import FakeTensor

from zeroshard.comm import GatherRequest, GatherTargets, Transport, TransportBuffer, Work
from zeroshard.compress import Codec, Delta
from zeroshard.errors import StateError
from zeroshard.layout.sharding import PackLayout
from zeroshard.tiers import CopyMark, PageSegment, TierCopies, WeightStream, pinned
from zeroshard.tiers.ledger import Kind, MemoryLedger

from .coded_gather import CodedGather, DeltaGather, said_of
from .resharded import copy_of, is_copied
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

    def lender_of(self, tensor: Tensor) -> GatherGroup | None:
        """The gather group in whose lent buffer the tensor lies."""
        if not self.lent or isinstance(tensor, FakeTensor):  # which has no address: another model is traced
            return None
        try:
            owner = self.lent.get(tensor.untyped_storage().data_ptr())
        except RuntimeError:  # a wrapper without memory of its own, such as the DTensor of another unit
            return None
        return owner if owner is not None and isinstance(owner, GatherGroup) else None

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


@dataclass(frozen=True)
class GroupMemory:
    """A gather group's memory on this rank, by the names at the top of this file, but for buffers that the
    pool lends. `coded`: what travels in place of the rows. `mirrored`: the transport's memory is not on our
    device (two ranks on one GPU), and the transport buffer is a copy."""

    full: Tensor | None = None
    rows: Tensor | None = None
    master: Tensor | None = None
    remainder: Tensor | None = None
    transport_buffer: TransportBuffer | None = None
    coded: CodedGather | None = None
    mirrored: bool = False

    @property
    def shard(self) -> Tensor:
        """This rank's newest rows, as they lie in a shard."""
        shard = self.master if self.master is not None else self.rows
        assert shard is not None
        return shard


def allocate_group(
    key: str,
    pack: PackLayout,
    dtypes: tuple[torch.dtype, torch.dtype],
    rests: GatherGroupPlacement,
    transport: Transport,
    pool: BufferPool,
    ledger: MemoryLedger,
    codec: Codec | None,
) -> GroupMemory:
    """Make a gather group's memory, and book it. `dtypes`: to compute in, and of the master."""
    (dtype, master_dtype), rank, device = dtypes, transport.rank, pool.device
    if rests.rows == "disk":
        return GroupMemory()  # it is with the state of the host update
    size = pack.full if rests.resident else pack.shards[rank]
    moves = transport.size > 1 and any(slot.split != "copy" for slot in pack.slots)
    coded: CodedGather | None = None
    if moves and codec is not None and dtype.is_floating_point:
        kind_of_rows = DeltaGather if isinstance(codec, Delta) else CodedGather
        coded = kind_of_rows(key, pack, codec, dtype.itemsize, transport, pool, ledger)
        moves = False
    streams = moves and rests.rows == "host" and transport.traits.staged
    buffer = transport.allocate(key, size, dtype) if moves and not streams else None
    own = buffer.mine if buffer is not None and buffer.mine.device == device else None
    mirrored = buffer is not None and own is None
    if rests.rows == "host" and (own is None or own.device.type != "cpu"):
        store = pinned(size * dtype.itemsize, device).view(dtype)
    else:
        store = own if own is not None else torch.zeros(size, dtype=dtype, device=device)
    if streams:
        buffer = transport.over(key, store)
    kind: Kind = "host" if store.device != device or rests.rows == "host" else "parameters"
    ledger.book(kind, store.nbytes)
    if buffer is not None:
        cuts = pack.cuts_of_full if rests.resident else pack.cuts_of_shards
        ledger.book("buckets", transport.expect(said_of(key), buffer, cuts))
        ledger.book(kind, 0 if rests.resident else transport.cache(buffer, cuts))
    # Rows that rest off the device are a copy of a master on it; so are those that were decoded.
    copied = rests.rows != "device" or (coded is not None and rests.resident)
    master: Tensor | None = None
    remainder: Tensor | None = None
    if rests.splits:
        remainder = torch.zeros(pack.body(rank), dtype=torch.int16, device=device)
        ledger.book("state", remainder.nbytes)
    elif (master_dtype != dtype or copied) and rests.state == "device":
        master = torch.zeros(pack.body(rank), dtype=master_dtype, device=device)
        ledger.book("state", master.nbytes)
    full, rows = (store, None) if rests.resident else (None, store)
    return GroupMemory(full, rows, master, remainder, buffer, coded, mirrored)


class GroupRows:
    """This rank's rows of a gather group, in compute dtype and in master dtype: what sharded parameters are
    made of."""

    def __init__(
        self, pack: PackLayout, rank: int, memory: GroupMemory, master_dtype: torch.dtype, on_device: bool
    ) -> None:
        """`on_device`: the state is, and so are the masters."""
        self._pack, self.rank, self._memory, self._on_device = pack, rank, memory, on_device
        self.master_dtype = master_dtype
        self.compute: list[Tensor] = []  # of every slot; none on the disk
        if memory.rows is not None:
            self.compute = self._of_shard(memory.rows)
        elif memory.full is not None:
            self.compute = [
                memory.full[at : at + n].view(slot.local_shape(rank))
                for slot, (at, n) in zip(pack.slots, pack.cut_of_full(rank), strict=True)
            ]
        self.local = self.compute if memory.master is None else self._of_shard(memory.master)
        self.updated_by_host: set[int] = set()  # parameters whose compute rows the host update writes itself
        # And those whose sharded parameter is not the master, nor a copy of it.
        self.written_through: set[int] = set()

    def _of_shard(self, shard: Tensor) -> list[Tensor]:
        return [
            shard[at : at + slot.held(self.rank)].view(slot.local_shape(self.rank))
            for slot, at in zip(self._pack.slots, self._pack.offsets(self.rank), strict=True)
        ]

    def split_masters(self) -> list[SplitMaster]:
        """Of every slot, where the master is split on the device; else none."""
        if self._memory.remainder is None:
            return []
        rests = self._of_shard(self._memory.remainder)
        return [SplitMaster(near, rest) for near, rest in zip(self.compute, rests, strict=True)]

    def show_nothing(self, blanks: Sequence[Tensor]) -> None:
        """The rows are on the disk; one rank has all of them."""
        self.compute = self.local = list(blanks)

    def use_locals(self, local: list[Tensor]) -> None:
        """Master rows that live elsewhere: in the state of the host update."""
        self.local = local

    @property
    def refreshes(self) -> bool:
        """Whether `refresh` has anything to do: not where sharded parameters are views of what peers read."""
        memory = self._memory
        copied = memory.master is not None or not self._on_device
        return copied or memory.coded is not None or memory.mirrored

    def refresh(self, written: bool, repeats: bool) -> None:
        """Bring this rank's compute rows up to date with its master rows, and the peers' window with the
        compute rows.

        `written`: someone wrote the master rows, so that those which the host updates are out of date too.
        `repeats`: what was loaded had been shown to the peers before it was saved.
        """
        memory = self._memory
        if memory.master is not None:
            if memory.rows is not None:
                memory.rows[: memory.master.numel()].copy_(memory.master)
            elif memory.coded is None:
                torch._foreach_copy_(self.compute, self.local)
        elif not self._on_device:
            for index, (row, local) in enumerate(zip(self.compute, self.local, strict=True)):
                if row.data_ptr() == local.data_ptr() or index in self.written_through:
                    continue
                if written or index not in self.updated_by_host:
                    row.copy_(local)
        if memory.coded is not None:
            memory.coded.repeat(repeats)
            memory.coded.encode(memory.shard)
        if memory.mirrored:
            assert memory.transport_buffer is not None
            source = memory.rows if memory.rows is not None else memory.full
            assert source is not None
            memory.transport_buffer.mine.copy_(source)


class WholeViews:
    """A gather group's slots whole, in whichever buffer they are; made once per buffer. `own_rank`: its rows
    are in that buffer already."""

    def __init__(self, pack: PackLayout, blanks: list[Tensor], own_rank: int | None) -> None:
        self._pack, self._own_rank = pack, own_rank
        self.blanks = blanks  # what stands for them while the group is sharded: the right shapes, and NaN
        self._views: dict[int, tuple[list[Tensor], GatherTargets]] = {}

    def of(self, buffer: Tensor) -> tuple[list[Tensor], GatherTargets]:
        """In a buffer of `pack.full` elements; and the targets of a gather."""
        cached = self._views.get(buffer.data_ptr())
        if cached is None:
            targets = GatherTargets(self._pack, buffer, self._own_rank)
            cached = self._views[buffer.data_ptr()] = (self.make(buffer), targets)
        return cached

    def make(self, buffer: Tensor) -> list[Tensor]:
        return [
            buffer[at : at + slot.numel].view(slot.shape)
            for slot, at in zip(self._pack.slots, self._pack.full_offsets, strict=True)
        ]

    def forget(self, gone: set[int]) -> None:
        """Buffers of the pool that were at these addresses are no more."""
        self._views = {at: views for at, views in self._views.items() if at not in gone}


class PeerRows:
    """How the peers' rows of a gather group come, as they are or as codes."""

    def __init__(
        self, key: str, pack: PackLayout, resident: bool, memory: GroupMemory, transport: Transport
    ) -> None:
        self._said, self._memory, self._transport = said_of(key), memory, transport
        self._cuts = pack.cuts_of_full if resident else pack.cuts_of_shards
        self._kind = "publish" if resident else "gather"
        self._codes: Tensor | None = None  # where codes arrive

    def start(self, targets: GatherTargets, pool: BufferPool) -> Work | None:
        """Fetch them; None where nothing travels."""
        memory = self._memory
        if memory.coded is not None and not memory.coded.at_hand:
            if self._codes is None:
                self._codes = pool.take(memory.coded.stage_bytes, torch.uint8, memory.coded)
            return memory.coded.fetch(self._kind, self._codes)
        if memory.transport_buffer is None:
            return None
        return self._transport.gather(self._kind, self._said, memory.transport_buffer, self._cuts, targets)

    def decode(self, targets: GatherTargets, pool: BufferPool) -> None:
        """Codes have come: make rows of them."""
        coded, codes = self._memory.coded, self._codes
        if coded is not None and (coded.at_hand or codes is not None):
            coded.spread(codes, targets)
        if codes is not None:
            pool.give(codes)
            self._codes = None

    def request(self, targets: GatherTargets) -> GatherRequest:
        """What `start` fetches, for one call that fetches for many gather groups."""
        assert self._memory.transport_buffer is not None
        return GatherRequest(self._said, self._memory.transport_buffer, self._cuts, targets)

    def exchange(self) -> None:
        """Where changes travel: fetch them, after `refresh` of all gather groups, on all ranks."""
        if isinstance(self._memory.coded, DeltaGather):
            self._memory.coded.exchange(self._kind, self._memory.shard)

    def forget(self) -> None:
        """Keep nothing that was made for buffers of the pool that are no more."""
        memory = self._memory
        buffer = memory.coded.transport_buffer if memory.coded is not None else memory.transport_buffer
        if buffer is not None:
            self._transport.forget(buffer)


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
        self.key, self.pack, self.rests, self.pool, self.dtype = key, pack, rests, pool, dtypes[0]
        self.params: list[ShardedParam] = []
        self.residence = ParamState.FULL if rests.resident else ParamState.SHARDED
        self.epoch = 0  # the last epoch whose rows of the peers are in `full`
        memory = self.memory = allocate_group(key, pack, dtypes, rests, transport, pool, ledger, codec)
        self.full = memory.full  # where the pool lends it, only while the group is gathered
        self.own = GroupRows(pack, transport.rank, memory, dtypes[1], rests.state == "device")
        nothing = float("nan") if self.dtype.is_floating_point else 0
        blank = torch.full((), nothing, dtype=self.dtype, device=pool.device)
        blanks = [] if rests.resident else [blank.expand(slot.shape) for slot in pack.slots]
        if rests.rows == "disk":
            self.own.show_nothing(blanks)
        own_rank = transport.rank if rests.resident and memory.coded is None else None
        self._whole = WholeViews(pack, blanks, own_rank)
        self._peers = PeerRows(key, pack, rests.resident, memory, transport)
        # Where the only rank's rows come from, if they rest off the device.
        self._source: RowSource = HostRows(copies, self.own)
        self._work: Work | None = None

    def read_from(self, source: RowSource) -> None:
        """Rows on the disk come from here."""
        self._source = source

    # ------------------------------------------------------------------ views

    def views(self) -> tuple[list[Tensor], list[Tensor]]:
        """The local rows of every slot, in compute dtype and in master dtype."""
        return self.own.compute, self.own.local

    def full_views(self, buffer: Tensor) -> list[Tensor]:
        """The slots whole, in a buffer of `pack.full` elements."""
        return self._whole.make(buffer)

    def blank(self, index: int) -> Tensor:
        """What an unsharded parameter shows while its gather group is sharded: the right shape, and NaN."""
        return self._whole.blanks[index]

    # ------------------------------------------------------------------ verbs

    @property
    def is_small(self) -> bool:
        """Whether to fetch it alone would cost more than what it brings. For gather groups that stay
        whole."""
        own = self.rests.resident and self.memory.transport_buffer is not None
        return own and self.pack.full * self.dtype.itemsize <= SMALL_BYTES

    def as_fetch(self) -> GatherRequest:
        """What a gather of a gather group that stays whole fetches, for one of many."""
        assert self.full is not None
        return self._peers.request(self._whole.of(self.full)[1])

    @property
    def exchanges(self) -> bool:
        """Whether `exchange` has anything to do."""
        return isinstance(self.memory.coded, DeltaGather)

    @torch.no_grad()
    def refresh(self, written: bool = False, repeats: bool = False) -> None:
        """See `GroupRows.refresh`."""
        self.own.refresh(written, repeats)

    @torch.no_grad()
    def exchange(self) -> None:
        """See `PeerRows.exchange`."""
        self._peers.exchange()

    def catch_up(self) -> None:
        """Add the changes that are on their way to what is believed, which others are about to read."""
        if isinstance(self.memory.coded, DeltaGather):
            self.memory.coded.catch_up()

    def gather(self, epoch: int) -> None:
        """Start to fetch the peers' rows of this epoch, unless they are here or on their way."""
        stale, resident = self.epoch < epoch, self.rests.resident
        if not stale and self.residence is not ParamState.SHARDED:
            return
        travels = self.memory.transport_buffer is not None or self.memory.coded is not None
        if resident and not travels:
            self.epoch = epoch  # what it holds is all there is
            return
        if self._work is not None:
            self._work.wait()  # of an earlier epoch, in which this rank did not use it; peers may
            self._work = None
        with torch.inference_mode(False), torch.no_grad():
            if self.full is None:
                self.full = self.pool.take(self.pack.full, self.dtype, self)
            targets = self._whole.of(self.full)[1]
            if travels:
                self._work = self._peers.start(targets, self.pool)
            else:
                self._work = self._source.fetch(targets[self.own.rank])
        self.epoch = epoch
        self.residence = ParamState.GATHERING

    def finish(self) -> bool:
        """Complete a gather. True if the gather group became FULL by this call."""
        if self.residence is not ParamState.GATHERING:
            return False
        assert self.full is not None
        with torch.inference_mode(False), torch.no_grad():
            if self._work is not None:
                self._work.wait()
                self._work = None
            if self.memory.coded is not None:
                self._peers.decode(self._whole.of(self.full)[1], self.pool)
            if not self.rests.resident:
                self._show(self._whole.of(self.full)[0])
        self.residence = ParamState.FULL
        return True

    def release(self) -> None:
        """Give the gathered buffer back. Resident gather groups stay."""
        if self.rests.resident or self.residence is ParamState.SHARDED:
            return
        self.finish()
        assert self.full is not None
        self._show(self._whole.blanks)
        self.pool.give(self.full)
        self.full = None
        self.residence = ParamState.SHARDED

    def rejoin(self) -> None:
        """Unsharded parameters show this gather group's memory again, after somebody gave them another."""
        if self.full is not None:
            self._show(self._whole.make(self.full))

    def _show(self, views: Sequence[Tensor]) -> None:
        with DisableTorchFunctionSubclass():  # they may be `Away`
            for param, view in zip(self.params, views, strict=True):
                param.unsharded_param.data = view

    def whole(self, index: int) -> Tensor:
        """A parameter's values, while the gather group is FULL."""
        assert self.full is not None
        return self._whole.of(self.full)[0][index]

    def forget(self, gone: set[int]) -> None:
        """Buffers of the pool that were at these addresses are no more: keep no views of them."""
        self._whole.forget(gone)
        self._peers.forget()


def whole_of(gather_group: ref[GatherGroup], index: int) -> Tensor:
    """`GatherGroup.whole`, for what must not keep the group."""
    group = gather_group()
    assert group is not None
    return group.whole(index)


class RowSource(Protocol):
    """Where the only rank's rows come from, when they rest off the device."""

    def fetch(self, out: Sequence[Tensor]) -> Work:
        """Bring them to these views, one a parameter, beside the computation."""


@dataclass(frozen=True)
class HostRows:
    """Rows in host memory."""

    copies: TierCopies
    own: GroupRows

    def fetch(self, out: Sequence[Tensor]) -> Work:
        after = self.copies.here()  # the buffer may still be read by what was launched before
        return _Arrival(self.copies.back(list(out), [view.view(-1) for view in self.own.compute], after))


@dataclass(frozen=True)
class DiskRows:
    """Rows on the disk: segments, and which of a gather group's parameters each holds."""

    streaming: WeightStream
    segments: list[PageSegment]
    members: list[list[int]]

    def fetch(self, out: Sequence[Tensor]) -> Work:
        places = [[out[index] for index in members] for members in self.members]
        return self.streaming.start(self.segments, places)


class _Arrival:
    """A copy from the host, as work."""

    def __init__(self, mark: CopyMark) -> None:
        self._mark = mark

    def poll(self) -> bool:
        return self._mark.passed()

    def wait(self) -> None:
        self._mark.wait_on_device()


class SavedView(NamedTuple):
    """What stands for a saved tensor that lives in a gather group's buffer. `itself`: it is an unsharded
    parameter. `param`: whose memory it is, and `version` that one's count of changes, if it counts."""

    gather_group: GatherGroup
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    itself: bool
    param: ShardedParam
    version: int | None

    def restore(self) -> Tensor:
        """The tensor again, in the buffer that the group has now."""
        with DisableTorchFunctionSubclass():  # it may be `Away`
            version = self.param.unsharded_param._version
        if self.version is not None and self.version != version:
            raise _changed_since(self.param.name)
        # A backward that builds a graph (a gradient penalty) saves what it computes with, without our hooks:
        # it gets a copy that outlives the buffer. Autograd ties the copy to the unsharded parameter.
        builds_graph = torch.is_grad_enabled()
        if self.itself and not builds_graph:
            return self.param.unsharded_param
        buffer = self.gather_group.full
        assert buffer is not None
        with torch.no_grad():
            view = torch.as_strided(buffer, self.size, self.stride, self.offset)
            return copy_of(view)[0] if builds_graph else view


def _changed_since(name: str) -> StateError:
    return StateError(
        f"`{name}` has been modified by an inplace operation: optimizer.step(), or the loop by hand, has "
        "changed it after the forward that this backward belongs to, and its gradients would be wrong. Step "
        "after the backward, or call the model again before it."
    )


class SavedTensors:
    """Intercepts what autograd saves while units run: a tensor in a gathered buffer becomes a `SavedView`,
    all others pass through.

    Autograd applies only the innermost pair of saved-tensor hooks, and `torch.utils.checkpoint` brings its
    own. So ours is pushed wherever a foreign pair is on top, and hands it everything that is not ours.
    Checkpointing counts what it saves in the first pass and in the recomputation; both go through the same
    module hooks, so both counts leave out the same tensors.
    """

    def __init__(self, pool: BufferPool, ensure: Callable[[GatherGroup], None]) -> None:
        self.pool, self._ensure = pool, ensure
        self._pushed: list[bool] = []

    def watch(self) -> Callable[[], None]:
        """From now on go in front of every pair that others push, wherever they do: inside a unit's forward
        nobody calls us between theirs and what a unit saves. Returns how to end it."""
        _watching.add(self)
        vars(torch._C._autograd)[_PUSH] = _push_behind_ours
        return partial(_unwatch, ref(self))

    def push(self) -> None:
        """Make ours the pair on top, if gradients are being recorded."""
        needed = torch.is_grad_enabled()
        top = torch._C._autograd._top_saved_tensors_default_hooks(True) if needed else None
        owner = getattr(top[0], "__self__", None) if top is not None else None
        ours = owner is self or (isinstance(owner, _ComposedHooks) and owner.ours is self)
        needed = needed and not ours
        self._pushed.append(needed)
        if needed:
            pack = self.pack if top is None else _ComposedHooks(self, *top).pack
            _push(pack, self._unpack)

    def pop(self) -> None:
        if self._pushed.pop():
            torch._C._autograd._pop_saved_tensors_default_hooks()

    def abandon(self) -> None:
        """A forward was interrupted: take off all that was pushed."""
        while self._pushed:
            self.pop()

    def pack(self, tensor: Tensor) -> SavedView | Tensor | tuple[Tensor, int]:
        gather_group = self.pool.lender_of(tensor)
        if gather_group is None:
            # What a node saves of its own output must not lead back to it: Python cannot see that cycle, and
            # a graph that no backward follows would never go. Autograd ties what it unpacks to the graph.
            return (tensor if tensor.is_leaf else tensor.detach()), tensor._version
        if tensor.dtype != gather_group.dtype:
            # A view in another dtype cannot be found again by offset; it is rare and small, so it is copied.
            return tensor.clone()
        params, offset = gather_group.params, int(tensor.storage_offset())
        param = params[bisect(gather_group.pack.full_offsets, offset) - 1]
        if not tensor.numel():  # several may begin there
            param = next((other for other in params if other.unsharded_param is tensor), param)
        itself, version = param.unsharded_param is tensor, param.unsharded_param._version
        known = version if tensor._version == version else None
        return SavedView(gather_group, offset, tensor.size(), tensor.stride(), itself, param, known)

    def _unpack(self, packed: Any) -> Tensor:
        if type(packed) is tuple:  # what most are, of many
            return self._unchanged(*packed)
        if isinstance(packed, SavedView):
            self._ensure(packed.gather_group)
            return packed.restore()
        if isinstance(packed, _OtherHooks):
            return packed.unpack(packed.value)
        assert isinstance(packed, Tensor)
        return packed

    @staticmethod
    def _unchanged(tensor: Tensor, version: int) -> Tensor:
        """What was saved. Autograd looks at its version itself where there are no hooks."""
        if tensor._version != version:
            raise StateError(
                f"one of the variables needed for gradient computation, a {tensor.type()} of shape "
                f"{tuple(tensor.shape)}, has been modified by an inplace operation: it is at version "
                f"{tensor._version}, not {version}. Find it with torch.autograd.set_detect_anomaly(True)."
            )
        return tensor


@dataclass(frozen=True)
class _OtherHooks:
    unpack: Callable[[Any], Tensor]
    value: Any


class _ComposedHooks:
    """Our pack in front of someone else's pair."""

    def __init__(
        self, ours: SavedTensors, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
    ) -> None:
        self.ours, self._pack, self._unpack = ours, pack, unpack

    def pack(self, tensor: Tensor) -> Any:
        # What is a copy now was lent in the first forward.
        if self.ours.pool.lender_of(tensor) is not None or is_copied(tensor):
            saved = self.ours.pack(tensor)
            # Of what another's hooks save torch does not ask whether it has changed since, and a checkpoint
            # computes again with the weights as they are.
            return saved._replace(version=None) if isinstance(saved, SavedView) else saved
        return _OtherHooks(self._unpack, self._pack(tensor))


_push = torch._C._autograd._push_saved_tensors_default_hooks
_PUSH = _push.__name__
_watching: WeakSet[SavedTensors] = WeakSet()


def _push_behind_ours(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
    for ours in list(_watching):
        pack, unpack = _ComposedHooks(ours, pack, unpack).pack, ours._unpack
    _push(pack, unpack)


def _unwatch(saved: ref[SavedTensors]) -> None:
    gone = saved()
    if gone is not None:
        _watching.discard(gone)
    if not _watching:
        vars(torch._C._autograd)[_PUSH] = _push
