"""Buckets whose gradients travel through a codec.

Each rank's shard is encoded by itself and dealt to its owner, who decodes the contributions of all ranks in
rank order and adds them up in fp32. A part of the wire is the code of one shard, then a byte for each
parameter: whether the sender used it (see [Note: used flags], which here are not among the numbers).

At stage 0 the owner encodes the sum once more and deals it to everybody; it takes the decoded one too, so
that all ranks have the same bits.

State of the codec (what it has not sent) is laid out as the wire is: this rank's part in every shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroshard.comm import Transport, TransportBuffer, Work
from zeroshard.compress import Codec
from zeroshard.compress.base import padded
from zeroshard.kernels.codes import Parts
from zeroshard.layout.codes import Span, WireParts, back_bytes, bodies_of, holes, holes_of_shard
from zeroshard.layout.sharding import PackLayout, RankLengths, RankRun
from zeroshard.params.rank_state import RankState, in_wire
from zeroshard.params.sharded_param import ShardedParam, ShardedTensors
from zeroshard.tiers.ledger import MemoryLedger

from .bucket import ReducedBucket, flags_on
from .codec_workspace import CodecWorkspace


@dataclass(frozen=True)
class Uncoded(Codec):
    """No codec: what travels before one is active."""

    dtype: torch.dtype = torch.float32
    numerics = "exact"

    def wire_bytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def encode(self, values: Tensor, code: Tensor, state: dict[str, Tensor], step: int) -> None:
        code.view(self.dtype).copy_(values)

    def decode(self, code: Tensor, out: Tensor, add: bool) -> None:
        values = code.view(self.dtype)
        out.add_(values) if add else out.copy_(values)


@dataclass(frozen=True)
class CodecRoute:
    """A codec, and where the codes of all shards lie on its wire. Ranks may be thousands: what is done for
    each is done for all with equally much at once."""

    codec: Codec
    way: WireParts
    bodies: Sequence[Span]

    @classmethod
    def of(cls, codec: Codec, bodies: Sequence[Span], flags: int = 0) -> CodecRoute:
        return cls(codec, WireParts.of(codec.wire_bytes, bodies, flags), bodies)

    def codes(self, run: RankRun, wire: Tensor) -> Tensor:
        """The parts of the wire for a run of ranks, one a row."""
        at, length = self.way.spans[run.start]
        return wire[at : at + len(run) * length].view(len(run), length)

    def values(self, run: RankRun, tensor: Tensor) -> Tensor:
        """Their shards in a tensor that is laid out as the pack's wire, one a row."""
        at, _ = self.bodies[run.start]
        step = self.bodies[run.start + 1][0] - at if len(run) > 1 else run.each
        return tensor.as_strided((len(run), run.each), (step, 1), tensor.storage_offset() + at)


class CodedBucket(ReducedBucket):
    """See the module's docstring. `wire` is a transport buffer of bytes, `coding.wire_bytes` long or
    longer."""

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
        codec: Codec,
    ) -> None:
        super().__init__(index, pack, params, wire, transport, dtypes, workspace.device, workspace.values)
        self.workspace, self.codec = workspace, codec
        self._bodies = bodies_of(pack)
        self._runs = RankLengths(numel for _, numel in self._bodies).runs
        self._routes = self._routes_of(self.wire_dtype, len(self.params))
        self.state = codec.state(pack.wire, workspace.device)
        gaps = holes(pack)
        self._holes = [workspace.values[at : at + n] for at, n in gaps]
        self._state_holes = [tensor[at : at + n] for tensor in self.state.values() for at, n in gaps]
        self._mirrored = wire.mine.device != workspace.device

    def _routes_of(self, dtype: torch.dtype, flags: int = 0) -> dict[Codec | None, CodecRoute]:
        """For each codec that a step may travel through; None: for values as they are, in `dtype`."""
        ways: dict[Codec | None, Codec] = {codec: codec for codec in (self.codec, *self.codec.early)}
        ways[None] = Uncoded(dtype)
        return {codec: CodecRoute.of(way, self._bodies, flags) for codec, way in ways.items()}

    # ------------------------------------------------------------------ the way to the owners

    @property
    def _route(self) -> CodecRoute:
        return self._routes[self.codec.at(self.workspace.turn)]

    @torch.no_grad()
    def fill(self, hold: bool = False) -> None:
        """Copy the gradients of the unsharded parameters to the workspace, let them go, and encode every
        shard."""
        self.before_change()  # of what the codec keeps; also by later rounds
        super().fill()
        if self._holes:
            torch._foreach_zero_(self._holes)
        route, workspace, rank = self._route, self.workspace, self.transport.rank
        codec, way = route.codec, route.way
        into = workspace.code if self._mirrored else self.wire.mine
        flags = flags_on(into.device, self.used, torch.uint8)
        for run in self._runs:
            code, size = route.codes(run, into), way.codes[run.start]
            if size:
                values = route.values(run, workspace.values)
                state = {name: route.values(run, tensor) for name, tensor in self.state.items()}
                seed = workspace.seed(self.index, rank, run.start)
                codec.encode_shards(values, code[:, :size], state, seed)
                if run.start <= rank < run.stop and codec is self.codec and workspace.measures:
                    workspace.compare(codec, values[rank - run.start], code[rank - run.start, :size])
            tail = padded(size)
            code[:, tail : tail + len(flags)] = flags
        if self._state_holes:
            torch._foreach_zero_(self._state_holes)
        if self._mirrored:
            self.wire.mine[: way.nbytes].copy_(into[: way.nbytes])

    def reduce(self) -> Work:
        route, out, rank = self._route, self.lands_in, self.transport.rank
        spans, shards = route.way.spans, self.pack.shards
        self._count(shards.total - shards[rank], route.way.nbytes - spans[rank][1])
        takes = [spans[rank]] * self.pack.world
        return self.transport.all_to_all(
            "reduce", self.label, self.wire, spans, takes, lambda parts: self._land(parts, route, out)
        )

    def _count(self, numel: int, sent: int) -> None:
        self.transport.counters.add_spared("reduce", numel * self.wire_dtype.itemsize - sent)

    def _land(self, parts: list[Tensor], route: CodecRoute, out: Tensor) -> None:
        """Add up the contributions to this rank's shard."""
        rank = self.transport.rank
        (_, numel), size = self._bodies[rank], route.way.codes[rank]
        total = out if out.dtype == torch.float32 else self.workspace.total[: out.numel()]
        here = self._near(parts)
        route.codec.decode_parts(here, total[:numel])
        total[:numel].mul_(1.0 / self.pack.world)
        counts = here.tally(padded(size), len(self.params))
        if self.whole is not None:
            self.whole[self.pack.full :][: len(self.params)].copy_(counts)
        else:
            total[numel:][: len(self.params)].copy_(counts)
            for at, n in holes_of_shard(self.pack, rank):
                total[at : at + n].zero_()
        if total is not out:
            out.copy_(total)

    def _near(self, parts: list[Tensor]) -> Parts:
        """What has come, on the device where it is decoded."""
        return Parts(part.to(self.workspace.device) for part in parts) if self._mirrored else Parts(parts)

    def private(self) -> list[RankState]:
        def key(name: str) -> str:
            return f"{name} of {self.codec!r}"

        records = [
            private
            for name, tensor in self.state.items()
            for private in in_wire(self.pack, tensor, key(name), owner=self)
        ]
        if self.rounds:
            records += [
                RankState(
                    f"(sum of {self.label}, {tensor.numel()})", key(name), ((0, tensor),), "reset", self
                )
                for name, tensor in self._again.items()
                if tensor.numel()
            ]
        return records

    # ------------------------------------------------------------------ stage 0: back to everybody

    def make_reduced_grad(
        self, stage: int, delays: bool, sharded_tensors: ShardedTensors, ledger: MemoryLedger
    ) -> None:
        ledger.book("state", sum(tensor.nbytes for tensor in self.state.values()))
        super().make_reduced_grad(stage, delays, sharded_tensors, ledger)

    @property
    def _shows_wire(self) -> bool:
        return False

    def _make_whole(self, in_place: bool, ledger: MemoryLedger) -> None:
        rank, pack = self.transport.rank, self.pack
        self.rounds = 1
        self._back = self._routes_of(self.dtype)
        room = back_bytes(self.codec, self._bodies[rank][1], self.dtype.itemsize)
        self._back_wire = self.transport.allocate(f"{self.wire.key} {self.index} back", room, torch.uint8)
        first, numel = self._bodies[rank]
        self._again = self.codec.state(numel, self.device)
        cuts = [(max(at, first) - first, min(at + n, first + numel) - first) for at, n in holes(pack)]
        self._again_holes = [
            tensor[at:end] for tensor in self._again.values() for at, end in cuts if at < end
        ]
        self.show_whole(torch.zeros(pack.wire, dtype=self.dtype, device=self.device))
        assert self.landed is not None
        ledger.book("buckets", self._back_wire.mine.nbytes + self.landed.nbytes)
        ledger.book("state", sum(tensor.nbytes for tensor in self._again.values()))
        ledger.book("gradients", self.shown.nbytes)

    @torch.no_grad()
    def go_on(self, number: int) -> Work:
        """Encode the sum of this rank's shard for everybody."""
        rank, workspace, wire, landed = self.transport.rank, self.workspace, self._back_wire, self.landed
        assert landed is not None
        route = self._back[self.codec.at(workspace.turn)]
        size, numel = route.way.codes[rank], self._bodies[rank][1]
        self.transport.fill(wire)
        values = (
            landed[:numel]
            if landed.dtype == torch.float32
            else workspace.values[:numel].copy_(landed[:numel])
        )
        into = workspace.code if self._mirrored else wire.mine
        route.codec.encode(values, into[:size], self._again, workspace.seed(self.index, rank, rank) ^ 1)
        if self._again_holes:
            torch._foreach_zero_(self._again_holes)
        if self._mirrored:
            wire.mine[:size].copy_(into[:size])
        lengths = [length for _, length in route.way.spans]
        others = self.pack.world - 1
        self._count(self.pack.shards[rank] * others, lengths[rank] * others)
        offers, takes = [(0, lengths[rank])] * self.pack.world, [(0, length) for length in lengths]
        return self.transport.all_to_all(
            "reduce", wire.key, wire, offers, takes, lambda parts: self._spread(parts, route)
        )

    def _spread(self, parts: list[Tensor], route: CodecRoute) -> None:
        whole = self.whole
        assert whole is not None
        for run in self._runs:
            here = self._near(parts[run.start : run.stop])
            out = route.values(run, whole)
            if out.dtype == torch.float32:
                route.codec.decode_parts(here, out)
                continue
            total = self.workspace.total[: run.each]
            for number, row in enumerate(out):
                route.codec.decode_parts(Parts(here[number : number + 1]), total)
                row.copy_(total)
        for at, n in holes(self.pack):
            whole[at : at + n].zero_()
