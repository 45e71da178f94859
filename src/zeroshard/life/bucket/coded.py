"""Gradients that travel through a codec.

Each rank's piece is encoded by itself and dealt to its owner, who decodes the contributions of all ranks in
rank order and adds them up in fp32. A part of the wire is the code of one piece, then a byte for each
parameter: whether the sender used it (see [Note: used flags], which here are not among the numbers).

At stage 0 the owner encodes the sum once more and deals it to everybody; it takes the decoded one too, so
that all ranks have the same bits.

State of the codec (what it has not sent) is laid out as the wire is: this rank's part in every piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroshard.codec import Codec
from zeroshard.codec.base import padded
from zeroshard.comm import Region, Transport, Work
from zeroshard.count.coding import Span, Way, back_bytes, bodies_of, holes, holes_of_piece
from zeroshard.count.layout import Pack
from zeroshard.tier.pool import Ledger

from ..private import Private, in_wire
from ..shard import Faces, Param
from .desk import Desk
from .flags import flags_on
from .plain import Bucket


@dataclass(frozen=True)
class AsIs(Codec):
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
class Route:
    """A codec, and where the codes of all pieces lie on its wire."""

    codec: Codec
    way: Way

    @classmethod
    def of(cls, codec: Codec, bodies: Sequence[Span], flags: int = 0) -> Route:
        return cls(codec, Way.of(codec.wire_bytes, bodies, flags))


class CodedBucket(Bucket):
    """See the module's docstring. `wire` is a region of bytes, `coding.wire_bytes` long or longer."""

    def __init__(
        self,
        index: int,
        pack: Pack,
        params: Sequence[Param],
        wire: Region,
        transport: Transport,
        dtypes: tuple[torch.dtype, torch.dtype],
        desk: Desk,
        codec: Codec,
    ) -> None:
        super().__init__(index, pack, params, wire, transport, dtypes, desk.device, desk.values)
        self.desk, self.codec = desk, codec
        self._bodies = bodies_of(pack)
        self._routes = self._routes_of(self.wire_dtype, len(self.params))
        self.state = codec.state(pack.wire, desk.device)
        self._states = [self._state_of(at, numel) for at, numel in self._bodies]
        gaps = holes(pack)
        self._holes = [desk.values[at : at + n] for at, n in gaps]
        self._state_holes = [tensor[at : at + n] for tensor in self.state.values() for at, n in gaps]
        self._mirrored = wire.mine.device != desk.device

    def _routes_of(self, dtype: torch.dtype, flags: int = 0) -> dict[Codec | None, Route]:
        """For each codec that a step may travel through; None: for values as they are, in `dtype`."""
        ways: dict[Codec | None, Codec] = {codec: codec for codec in (self.codec, *self.codec.early)}
        ways[None] = AsIs(dtype)
        return {codec: Route.of(way, self._bodies, flags) for codec, way in ways.items()}

    def _state_of(self, at: int, numel: int) -> dict[str, Tensor]:
        return {name: tensor[at : at + numel] for name, tensor in self.state.items()}

    # ------------------------------------------------------------------ the way to the owners

    @property
    def _route(self) -> Route:
        return self._routes[self.codec.at(self.desk.turn)]

    @torch.no_grad()
    def fill(self, hold: bool = False) -> None:
        """Copy the gradients of the leaves to the desk, let them go, and encode every piece."""
        self.before_change()  # of what the codec keeps; also by later rounds
        super().fill()
        if self._holes:
            torch._foreach_zero_(self._holes)
        route, desk, rank = self._route, self.desk, self.transport.rank
        codec, way = route.codec, route.way
        into = desk.code if self._mirrored else self.wire.mine
        flags = flags_on(into.device, self.used, torch.uint8)
        for target, ((at, _), size) in enumerate(zip(way.spans, way.codes, strict=True)):
            start, numel = self._bodies[target]
            values, code = desk.values[start : start + numel], into[at : at + size]
            codec.encode(values, code, self._states[target], desk.seed(self.index, rank, target))
            if target == rank and codec is self.codec and desk.measures:
                desk.compare(codec, values, code)
            tail = at + padded(size)
            into[tail : tail + len(flags)] = flags
        if self._state_holes:
            torch._foreach_zero_(self._state_holes)
        if self._mirrored:
            self.wire.mine[: way.nbytes].copy_(into[: way.nbytes])

    def reduce(self) -> Work:
        route, out, rank = self._route, self.landed, self.transport.rank
        assert out is not None
        spans, pieces = route.way.spans, self.pack.pieces
        self._count(sum(pieces) - pieces[rank], sum(n for _, n in spans) - spans[rank][1])
        takes = [spans[rank]] * self.pack.world
        return self.transport.deal(
            "reduce", self.label, self.wire, spans, takes, lambda parts: self._land(parts, route, out)
        )

    def _count(self, numel: int, sent: int) -> None:
        self.transport.counters.add_spared("reduce", numel * self.wire_dtype.itemsize - sent)

    def _land(self, parts: list[Tensor], route: Route, out: Tensor) -> None:
        """Add up the contributions to this rank's piece."""
        rank = self.transport.rank
        (_, numel), size = self._bodies[rank], route.way.codes[rank]
        total = out if out.dtype == torch.float32 else self.desk.total[: out.numel()]
        here = [part.to(out.device) for part in parts] if self._mirrored else parts
        for number, part in enumerate(here):
            route.codec.decode(part[:size], total[:numel], add=number > 0)
        total[:numel].mul_(1.0 / self.pack.world)
        tail = padded(size)
        counts = torch.stack([part[tail : tail + len(self.params)] for part in here]).sum(0)
        if self.whole is not None:
            self.whole[self.pack.full :][: len(self.params)].copy_(counts)
        else:
            total[numel:][: len(self.params)].copy_(counts)
            for at, n in holes_of_piece(self.pack, rank):
                total[at : at + n].zero_()
        if total is not out:
            out.copy_(total)

    def private(self) -> list[Private]:
        def key(name: str) -> str:
            return f"{name} of {self.codec!r}"

        records = [
            private
            for name, tensor in self.state.items()
            for private in in_wire(self.pack, tensor, key(name), owner=self)
        ]
        if self.rounds:
            records += [
                Private(f"(sum of {self.label}, {tensor.numel()})", key(name), ((0, tensor),), "reset", self)
                for name, tensor in self._again.items()
                if tensor.numel()
            ]
        return records

    # ------------------------------------------------------------------ stage 0: back to everybody

    def make_landing(self, stage: int, faces: Faces, ledger: Ledger) -> None:
        ledger.book("state", sum(tensor.nbytes for tensor in self.state.values()))
        super().make_landing(stage, faces, ledger)

    @property
    def _shows_wire(self) -> bool:
        return False

    def _make_whole(self, in_place: bool, ledger: Ledger) -> None:
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
        self.whole = torch.zeros(pack.wire, dtype=self.dtype, device=self.device)
        self.grads = self.views_in(self.whole)
        assert self.landed is not None
        ledger.book("buckets", self._back_wire.mine.nbytes + self.landed.nbytes)
        ledger.book("state", sum(tensor.nbytes for tensor in self._again.values()))
        ledger.book("gradients", self.whole.nbytes)

    @torch.no_grad()
    def go_on(self, number: int) -> Work:
        """Encode the sum of this rank's piece for everybody."""
        rank, desk, wire, landed = self.transport.rank, self.desk, self._back_wire, self.landed
        assert landed is not None
        route = self._back[self.codec.at(desk.turn)]
        size, numel = route.way.codes[rank], self._bodies[rank][1]
        self.transport.fill(wire)
        values = (
            landed[:numel] if landed.dtype == torch.float32 else desk.values[:numel].copy_(landed[:numel])
        )
        into = desk.code if self._mirrored else wire.mine
        route.codec.encode(values, into[:size], self._again, desk.seed(self.index, rank, rank) ^ 1)
        if self._again_holes:
            torch._foreach_zero_(self._again_holes)
        if self._mirrored:
            wire.mine[:size].copy_(into[:size])
        lengths = [length for _, length in route.way.spans]
        others = self.pack.world - 1
        self._count(self.pack.pieces[rank] * others, lengths[rank] * others)
        offers, takes = [(0, lengths[rank])] * self.pack.world, [(0, length) for length in lengths]
        return self.transport.deal(
            "reduce", wire.key, wire, offers, takes, lambda parts: self._spread(parts, route)
        )

    def _spread(self, parts: list[Tensor], route: Route) -> None:
        whole = self.whole
        assert whole is not None
        for part, size, (at, numel) in zip(parts, route.way.codes, self._bodies, strict=True):
            code, out = part[:size].to(whole.device), whole[at : at + numel]
            total = out if out.dtype == torch.float32 else self.desk.total[:numel]
            route.codec.decode(code, total, add=False)
            if total is not out:
                out.copy_(total)
        for at, n in holes(self.pack):
            whole[at : at + n].zero_()
