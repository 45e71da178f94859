"""The life of a parameter: SHARDED → GATHERING → FULL → SHARDED.

Tensors of a bundle (P = this rank's piece, F = the whole of its slots; both flat, padded):

- `rows`    compute dtype, P. Stage 3 only: what this rank owns, and what peers gather. In a transport region.
  None where they rest on the disk (`source`): homes then show NaN, as leaves of a released bundle do.
- `full`    compute dtype, F. Stages 0 to 2: always there, in a region where peers read it (stages 1 and 2).
  Stage 3: lent by the pool while the bundle is GATHERING or FULL.
- `master`  master dtype, P. Only where it differs from the compute dtype; else the homes are views of `rows`
  or `full`.
- `remainder`  int16, P, in place of `master` where that is split: `rows` or `full` is then its other half.

[Note: released units in backward] Between forward and backward a stage-3 bundle gives its buffer back. What
autograd saved out of it (a weight, or a view of one) is therefore saved as a `Saved`: bundle, offset, size,
stride. Unpacking gathers the bundle again, into whichever buffer the pool lends. The leaves meanwhile show a
NaN of the right shape, so that a use at a wrong moment is visible instead of silently stale.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from zeroshard.codec import Codec, Delta
from zeroshard.comm import Fetch, Region, Targets, Transport, Work
from zeroshard.count.layout import Pack
from zeroshard.errors import StateError
from zeroshard.tier import Copies, Mark, Streaming, Stretch, pinned
from zeroshard.tier.pool import Kind, Ledger, Pool

from .published import ChangedRows, CodedRows, said_of
from .shard import Param, SplitMaster

SMALL_BYTES = 1 << 16


class Residence(Enum):
    SHARDED = "sharded"
    GATHERING = "gathering"
    FULL = "full"


class Saved(NamedTuple):
    """What stands for a saved tensor that lives in a bundle's buffer. `place`: it is that parameter's leaf
    itself. `param`: whose memory it is, and `version` that one's count of changes, if it counts."""

    bundle: Bundle
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    place: int | None
    param: Param
    version: int | None


@dataclass(frozen=True)
class Rests:
    """Where a bundle rests. `resident`: its leaves are always whole on the device. `state` and `rows` name
    a tier; `splits`: both are the device, and the master is split there."""

    resident: bool
    state: Literal["device", "host", "disk"] = "device"
    rows: Literal["device", "host", "disk"] = "device"
    splits: bool = False


class Bundle:
    """Parameters of one unit, one compute dtype and one codec of `gather=`, gathered by one operation."""

    def __init__(
        self,
        key: str,
        pack: Pack,
        dtypes: tuple[torch.dtype, torch.dtype],
        rests: Rests,
        transport: Transport,
        pool: Pool,
        ledger: Ledger,
        copies: Copies,
        codec: Codec | None = None,
    ) -> None:
        self.key, self.pack, self.rests, self.copies = key, pack, rests, copies
        self._said = said_of(key)
        resident = self.resident = rests.resident
        self.dtype, self.master_dtype = dtypes
        self.transport, self.pool = transport, pool
        self.params: list[Param] = []
        self.residence = Residence.FULL if resident else Residence.SHARDED
        self.epoch = 0  # the last epoch whose rows of the peers are in `full`
        self._work: Work | None = None
        self._views: dict[int, tuple[list[Tensor], Targets]] = {}
        nothing = float("nan") if self.dtype.is_floating_point else 0
        blank = torch.full((), nothing, dtype=self.dtype, device=pool.device)
        self._blanks = [] if resident else [blank.expand(slot.shape) for slot in pack.slots]
        self._index: dict[int, int] = {}  # id(leaf) -> its place
        self.source: OnDiskRows | None = None  # where rows on the disk come from
        self.coded: CodedRows | None = None  # what travels in place of the rows
        self._stage: Tensor | None = None  # where codes arrive
        self._allocate(ledger, codec)
        self._compute, self._local = self.compute_views(), self.local_views()
        self.updated_by_host: set[int] = set()  # parameters whose compute rows the host update writes itself
        self.written_through: set[int] = set()  # and those whose home is not the master, nor a copy of it
        self._cuts = pack.cuts_of_full if resident else pack.cuts_of_pieces

    def _allocate(self, ledger: Ledger, codec: Codec | None) -> None:
        rank, device = self.transport.rank, self.pool.device
        self.full: Tensor | None = None
        self.rows: Tensor | None = None
        self.master: Tensor | None = None
        self.remainder: Tensor | None = None
        self.region: Region | None = None
        self._mirrored = False
        if self.rests.rows == "disk":
            return  # with the state of the host update
        size = self.pack.full if self.resident else self.pack.pieces[rank]
        moves = self.transport.size > 1 and any(s.split != "copy" for s in self.pack.slots)
        if moves and codec is not None and self.dtype.is_floating_point:
            width = self.dtype.itemsize
            kind_of_rows = ChangedRows if isinstance(codec, Delta) else CodedRows
            self.coded = kind_of_rows(self.key, self.pack, codec, width, self.transport, self.pool, ledger)
            moves = False
        streams = moves and self.rests.rows == "host" and self.transport.staged
        if moves and not streams:
            self.region = self.transport.allocate(self.key, size, self.dtype)
        # Where the transport's memory is not on our device (two ranks on one GPU), the region is a mirror.
        own = self.region.mine if self.region is not None and self.region.mine.device == device else None
        self._mirrored = self.region is not None and own is None
        if self.rests.rows == "host" and (own is None or own.device.type != "cpu"):
            store = pinned(size * self.dtype.itemsize, device).view(self.dtype)
        else:
            store = own if own is not None else torch.zeros(size, dtype=self.dtype, device=device)
        if streams:
            self.region = self.transport.over(self.key, store)
        self.full = store if self.resident else None
        self.rows = None if self.resident else store
        kind: Kind = "host" if store.device != device or self.rests.rows == "host" else "parameters"
        ledger.book(kind, store.nbytes)
        if self.region is not None:
            cuts = self.pack.cuts_of_full if self.resident else self.pack.cuts_of_pieces
            ledger.book("buckets", self.transport.expect(self._said, self.region, cuts))
            ledger.book(kind, 0 if self.resident else self.transport.cache(self.region, cuts))
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

    def local_views(self) -> list[Tensor]:
        """The local rows of every slot in master dtype: what homes are made of."""
        if self.master is None:
            return self.compute_views()
        return self._of_piece(self.master)

    def compute_views(self) -> list[Tensor]:
        """The local rows of every slot in compute dtype."""
        rank = self.transport.rank
        if self.rows is not None:
            return self._of_piece(self.rows)
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
        rests = self._of_piece(self.remainder)
        return [SplitMaster(near, rest) for near, rest in zip(self.compute_views(), rests, strict=True)]

    def _of_piece(self, piece: Tensor) -> list[Tensor]:
        rank = self.transport.rank
        return [
            piece[at : at + slot.held(rank)].view(slot.local_shape(rank))
            for slot, at in zip(self.pack.slots, self.pack.offsets(rank), strict=True)
        ]

    def full_views(self, buffer: Tensor) -> list[Tensor]:
        """The slots whole, in a buffer of `pack.full` elements."""
        return [
            buffer[at : at + slot.numel].view(slot.shape)
            for slot, at in zip(self.pack.slots, self.pack.full_offsets, strict=True)
        ]

    def blank(self, index: int) -> Tensor:
        """What a leaf shows while its bundle is sharded: the right shape, and NaN."""
        return self._blanks[index]

    # ------------------------------------------------------------------ verbs

    @property
    def refreshes(self) -> bool:
        """Whether `refresh` has anything to do: not where homes are views of what peers read."""
        copied = self.master is not None or self.rests.state != "device"
        return copied or self.coded is not None or self._mirrored

    @property
    def is_small(self) -> bool:
        """Whether to fetch it alone would cost more than what it brings. For bundles that stay whole."""
        own = self.resident and self.region is not None
        return own and self.pack.full * self.dtype.itemsize <= SMALL_BYTES

    def as_fetch(self) -> Fetch:
        """What a gather of a bundle that stays whole fetches, for one of many."""
        assert self.region is not None
        assert self.full is not None
        return Fetch(self._said, self.region, self._cuts, self._views_of(self.full)[1])

    @property
    def exchanges(self) -> bool:
        """Whether `exchange` has anything to do."""
        return isinstance(self.coded, ChangedRows)

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
            self.coded.encode(self._piece)
        if self._mirrored:
            assert self.region is not None
            source = self.rows if self.rows is not None else self.full
            assert source is not None
            self.region.mine.copy_(source)

    @property
    def _piece(self) -> Tensor:
        piece = self.master if self.master is not None else self.rows
        assert piece is not None
        return piece

    @torch.no_grad()
    def exchange(self) -> None:
        """Where changes travel: after `refresh` of all bundles, on all ranks."""
        if isinstance(self.coded, ChangedRows):
            self.coded.exchange("publish" if self.resident else "gather", self._piece)

    def catch_up(self) -> None:
        """Add the changes that are on their way to what is believed, which others are about to read."""
        if isinstance(self.coded, ChangedRows):
            self.coded.catch_up()

    def gather(self, epoch: int) -> None:
        """Start to fetch the peers' rows of this epoch, unless they are here or on their way."""
        stale = self.epoch < epoch
        if not stale and self.residence is not Residence.SHARDED:
            return
        if self.resident and self.region is None and self.coded is None:
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
            elif self.region is None:
                if not self.resident and self.coded is None:
                    self._fetch(out[self.transport.rank])
            else:
                self._work = self.transport.gather(kind, self._said, self.region, self._cuts, out)
        self.epoch = epoch
        self.residence = Residence.GATHERING

    def _fetch(self, out: Sequence[Tensor]) -> None:
        """One rank, rows on the host or the disk: bring them in beside the computation."""
        if self.source is not None:
            places = [[out[index] for index in members] for members in self.source.members]
            self._work = self.source.streaming.start(self.source.stretches, places)
            return
        after = self.copies.here()  # the buffer may still be read by what was launched before
        mark = self.copies.back(list(out), [view.view(-1) for view in self._compute], after)
        self._work = _Arrival(mark)

    def use_locals(self, local: list[Tensor]) -> None:
        """Master rows that live elsewhere: in the state of the host update."""
        self._local = local

    def finish(self) -> bool:
        """Complete a gather. True if the bundle became FULL by this call."""
        if self.residence is not Residence.GATHERING:
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
                for param, view in zip(self.params, self._views_of(self.full)[0], strict=True):
                    param.leaf.data = view
        self.residence = Residence.FULL
        return True

    def release(self) -> None:
        """Give the gathered buffer back. Resident bundles stay."""
        if self.resident or self.residence is Residence.SHARDED:
            return
        self.finish()
        assert self.full is not None
        for param, blank in zip(self.params, self._blanks, strict=True):
            param.leaf.data = blank
        self.pool.give(self.full)
        self.full = None
        self.residence = Residence.SHARDED

    def rejoin(self) -> None:
        """Leaves show this bundle's memory again, after somebody gave them another."""
        if self.full is not None:
            for param, view in zip(self.params, self.full_views(self.full), strict=True):
                param.leaf.data = view

    def _views_of(self, buffer: Tensor) -> tuple[list[Tensor], Targets]:
        """The slots whole, and the targets of a gather; made once per buffer."""
        cached = self._views.get(buffer.data_ptr())
        if cached is None:
            own = self.transport.rank if self.resident and self.coded is None else None
            targets = Targets(self.pack, buffer, own)
            cached = self._views[buffer.data_ptr()] = (self.full_views(buffer), targets)
        return cached

    def forget(self, gone: set[int]) -> None:
        """Buffers of the pool that were at these addresses are no more: keep no views of them."""
        self._views = {at: views for at, views in self._views.items() if at not in gone}
        region = self.coded.region if self.coded is not None else self.region
        if region is not None:
            self.transport.forget(region)

    # ------------------------------------------------------------------ what autograd saves

    def save(self, tensor: Tensor) -> Saved:
        """Stand-in for a tensor that lives in this bundle's buffer; see [Note: released units in
        backward]."""
        if len(self._index) != len(self.params):
            self._index = {id(param.leaf): index for index, param in enumerate(self.params)}
        index, offset = self._index.get(id(tensor)), int(tensor.storage_offset())
        param = self.params[bisect(self.pack.full_offsets, offset) - 1 if index is None else index]
        version = param.leaf._version
        known = version if tensor._version == version else None
        return Saved(self, offset, tensor.size(), tensor.stride(), index, param, known)

    def restore(self, saved: Saved) -> Tensor:
        assert self.full is not None
        assert self.residence is Residence.FULL
        if saved.version is not None and saved.version != saved.param.leaf._version:
            raise _changed_since(saved.param.name)
        # A backward that builds a graph (a gradient penalty) saves what it computes with, without our hooks:
        # it gets a copy that outlives the buffer. Autograd ties the copy to the leaf.
        builds_graph = torch.is_grad_enabled()
        if saved.place is not None and not builds_graph:
            return self.params[saved.place].leaf
        with torch.no_grad():
            view = torch.as_strided(self.full, saved.size, saved.stride, saved.offset)
            return view.clone() if builds_graph else view


def _changed_since(name: str) -> StateError:
    return StateError(
        f"`{name}` has been modified by an inplace operation: optimizer.step(), or the loop by hand, has "
        "changed it after the forward that this backward belongs to, and its gradients would be wrong. Step "
        "after the backward, or call the model again before it."
    )


@dataclass(frozen=True)
class OnDiskRows:
    """Where a bundle's rows on the disk are: stretches, and which of its parameters each holds."""

    streaming: Streaming
    stretches: list[Stretch]
    members: list[list[int]]


class _Arrival:
    """A copy from the host, as work."""

    def __init__(self, mark: Mark) -> None:
        self._mark = mark

    def poll(self) -> bool:
        return self._mark.passed()

    def wait(self) -> None:
        self._mark.wait_on_device()
