"""An embedding's gradient, of which only the rows that were touched travel.

One parameter a bucket. A part of the wire is two int64 (bytes of the part that count, whether the sender used
the parameter), then the code of the destination's rows; its length varies from step to step. Rows are added
where the dense sum would add zeros, in its order, so the sum is the dense one: in rank order, or inside every
node and then node by node.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeroshard.comm import Transport, TransportBuffer, Work, first_scale
from zeroshard.compress import Rows
from zeroshard.layout.codes import ROWS_HEAD, rows_spans
from zeroshard.layout.sharding import PackLayout
from zeroshard.params.sharded_param import ShardedParam
from zeroshard.tiers.ledger import MemoryLedger

from .bucket import ReducedBucket
from .codec_workspace import CodecWorkspace


class SparseBucket(ReducedBucket):
    """See the module's docstring. `wire` is a transport buffer of bytes with room for all rows."""

    may_leave_late = False

    def __init__(
        self,
        index: int,
        pack: PackLayout,
        params: Sequence[ShardedParam],
        wire: TransportBuffer,
        transport: Transport,
        dtypes: tuple[torch.dtype, torch.dtype],
        workspace: CodecWorkspace,
        codec: Rows,
    ) -> None:
        super().__init__(index, pack, params, wire, transport, dtypes, workspace.device)
        self.workspace, self.codec = workspace, codec
        (self._slot,) = pack.slots
        self._spans = rows_spans(self._slot, self.wire_dtype.itemsize)

    def _matrix(self, flat: Tensor, rank: int) -> Tensor:
        return flat[: self._slot.held(rank)].view(-1, self._slot.row)

    @torch.no_grad()
    def fill(self, hold: bool = False) -> None:
        """Encode every rank's rows of the unsharded parameter's gradient, and let it go."""
        self.transport.fill(self.wire)
        grad, slot = self.params[0].take_grad(), self._slot
        self.used = [grad is not None]
        dense = None if grad is None else grad.reshape(-1, slot.row)
        self._sent = 0
        for rank, (at, length) in enumerate(self._spans):
            start, stop = slot.rows(rank)
            rows = self._nothing if dense is None else dense[start:stop].to(self.wire_dtype).contiguous()
            used = self._write(rows, self.wire.mine[at : at + length], dense is not None)
            self._sent += used if rank != self.transport.rank else 0

    @property
    def _nothing(self) -> Tensor:
        return torch.empty(0, self._slot.row, dtype=self.wire_dtype, device=self.device)

    def _write(self, rows: Tensor, part: Tensor, used: bool) -> int:
        """A part of a wire; returns how many of its bytes count."""
        near = part if part.device == rows.device else torch.empty_like(part, device=rows.device)
        total = ROWS_HEAD + self.codec.encode(rows, near[ROWS_HEAD:])
        near[:ROWS_HEAD].view(torch.int64).copy_(torch.tensor([total, int(used)]))
        if near is not part:
            part[:total].copy_(near[:total])
        return total

    def reduce(self) -> Work:
        out, rank, shards = self.lands_in, self.transport.rank, self.pack.shards
        dense = (sum(shards) - shards[rank]) * self.wire_dtype.itemsize
        self.transport.counters.add_spared("reduce", dense - self._sent)
        takes = [self._spans[rank]] * self.pack.world
        return self.transport.all_to_all(
            "reduce",
            self.label,
            self.wire,
            self._spans,
            takes,
            lambda parts: self._land(parts, out),
            varies=True,
        )

    def _land(self, parts: list[Tensor], out: Tensor) -> None:
        rank = self.transport.rank
        total = out if out.dtype.itemsize >= 4 else self.workspace.total[: out.numel()]
        body = self._matrix(total, rank)
        self._add([part[ROWS_HEAD:].to(out.device) for part in parts], body)
        users = sum(int(part[8:ROWS_HEAD].view(torch.int64)) for part in parts)
        flags = self.whole[self.pack.full :] if self.whole is not None else total[self.pack.body(rank) :]
        flags[0] = users
        if total is not out:
            out.copy_(total)

    def _add(self, codes: list[Tensor], body: Tensor) -> None:
        """The mean of all ranks' rows, in the order and with the rounding of the transport's `reduce`."""
        each = self.transport.traits.summed_first
        if each == 1:
            for number, code in enumerate(codes):
                self.codec.decode(code, body, add=number > 0)
            body.mul_(1.0 / self.pack.world)
            return
        first = first_scale(each, self.wire_dtype.itemsize)
        body.zero_()
        for start in range(0, len(codes), each):
            places, rows = self._sum(codes[start : start + each], body)
            body.index_add_(0, places, rows.mul_(first).to(self.wire_dtype).to(body.dtype))
        body.mul_(1.0 / self.pack.world / first)

    def _sum(self, codes: list[Tensor], like: Tensor) -> tuple[Tensor, Tensor]:
        """Places and sums of the rows that any of these ranks touched."""
        read = [self.codec.read(code, self._slot.row) for code in codes]
        places = torch.cat([places for places, _ in read]).unique()
        total = like.new_zeros(len(places), self._slot.row)
        for at, rows in read:
            total.index_add_(0, torch.searchsorted(places, at), rows.to(total.dtype))
        return places, total

    # ------------------------------------------------------------------ stage 0: back to everybody

    @property
    def _shows_wire(self) -> bool:
        return False

    def _make_whole(self, in_place: bool, ledger: MemoryLedger) -> None:
        assert self.landed is not None
        self.rounds = 1
        self.flat = True  # `whole` is laid out as those of other buckets at stage 0
        self._back_spans = rows_spans(self._slot, self.dtype.itemsize)
        room = self._back_spans[self.transport.rank][1]
        self._back = self.transport.allocate(f"{self.wire.key} {self.index} back", room, torch.uint8)
        self.show_whole(torch.zeros(self.pack.full + 1, dtype=self.dtype, device=self.device))
        ledger.book("buckets", self._back.mine.nbytes + self.landed.nbytes)
        ledger.book("gradients", self.shown.nbytes)

    @torch.no_grad()
    def go_on(self, number: int) -> Work:
        """The rows of this rank's sum that are not zero, for everybody."""
        rank, world, wire = self.transport.rank, self.pack.world, self._back
        assert self.landed is not None
        self.transport.fill(wire)
        used = self._write(self._matrix(self.landed, rank), wire.mine, True)
        dense = self.pack.shards[rank] * self.wire_dtype.itemsize
        self.transport.counters.add_spared("reduce", (dense - used) * (world - 1))
        lengths = [length for _, length in self._back_spans]
        offers, takes = [(0, lengths[rank])] * world, [(0, length) for length in lengths]
        return self.transport.all_to_all("reduce", wire.key, wire, offers, takes, self._spread, varies=True)

    def _spread(self, parts: list[Tensor]) -> None:
        assert self.whole is not None
        whole = self.whole[: self._slot.numel].view(-1, self._slot.row)
        for rank, part in enumerate(parts):
            start, stop = self._slot.rows(rank)
            self.codec.decode(part[ROWS_HEAD:].to(self.device), whole[start:stop], add=False)
