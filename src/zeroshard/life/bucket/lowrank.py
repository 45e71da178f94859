"""Matrices whose gradients travel as two thin factors (PowerSGD), in four rounds: the mean of P is added up
in cuts and handed to all, then that of Q. The first goes during backward, the others when it has ended.

Tensors of a bucket (fp32, flat):

- `values`  the matrices whole, one after another: gradient plus what was not sent before.
- `p`, `q`  the factors of all matrices, one after another; behind `p` one number a parameter (`users`), 1
  where this rank used it and after the mean the share of ranks that did (see [Note: used flags]).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zeroshard.codec import LowRank
from zeroshard.comm import Transport, Work
from zeroshard.comm.transport import slices
from zeroshard.count.coding import cut_of
from zeroshard.count.layout import Pack
from zeroshard.tier.pool import Ledger

from ..private import Private
from ..shard import Faces, Param
from .flags import flags_on
from .plain import Bucket


class Mean:
    """The mean over all ranks of a flat fp32 tensor, in two deals: each rank adds up one cut of it, then all
    ranks get all cuts."""

    def __init__(self, key: str, numel: int, transport: Transport, device: torch.device) -> None:
        self.key, self.transport, world = key, transport, transport.size
        self.each = cut_of(numel, world)
        self.flat = torch.zeros(self.each * world, device=device)
        self._cut = torch.zeros(self.each, device=device)
        self.wire = transport.allocate(key, 4 * self.each * world, torch.uint8)
        self._back = transport.allocate(f"{key} back", 4 * self.each, torch.uint8)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.flat, self._cut, self.wire.mine, self._back.mine))

    def reduce(self) -> Work:
        size, world, rank = 4 * self.each, self.transport.size, self.transport.rank
        self.transport.fill(self.wire)
        self.wire.mine.copy_(self.flat.view(torch.uint8))
        offers = [(size * target, size) for target in range(world)]
        return self.transport.deal(
            "reduce", self.key, self.wire, offers, [(size * rank, size)] * world, self._add
        )

    def _add(self, parts: list[Tensor]) -> None:
        for number, part in enumerate(parts):
            values = part.view(torch.float32).to(self._cut.device)
            self._cut.add_(values) if number else self._cut.copy_(values)
        self._cut.mul_(1.0 / self.transport.size)

    def spread(self, then: Callable[[], None]) -> Work:
        size, world = 4 * self.each, self.transport.size
        self.transport.fill(self._back)
        self._back.mine.copy_(self._cut.view(torch.uint8))

        def land(parts: list[Tensor]) -> None:
            self.flat.copy_(torch.cat([part.view(torch.float32) for part in parts]))
            then()

        spans = [(0, size)] * world
        return self.transport.deal("reduce", f"{self.key} back", self._back, spans, spans, land)


class LowRankBucket(Bucket):
    """See the module's docstring."""

    rounds = 3

    def __init__(
        self,
        index: int,
        pack: Pack,
        params: Sequence[Param],
        transport: Transport,
        dtypes: tuple[torch.dtype, torch.dtype],
        device: torch.device,
        codec: LowRank,
    ) -> None:
        self.codec = codec
        shapes = [slot.shape for slot in pack.slots]
        sizes = [codec.factors(shape) for shape in shapes]
        key = f"factors {codec!r} {index}"
        self._p = Mean(f"{key} p", sum(p for p, _ in sizes) + len(shapes), transport, device)
        self._q = Mean(f"{key} q", sum(q for _, q in sizes), transport, device)
        super().__init__(index, pack, params, self._p.wire, transport, dtypes, device)
        self._matrices = slices(torch.zeros(pack.full, device=device), [slot.numel for slot in pack.slots])
        self.states = [codec.state(shape, device) for shape in shapes]
        *self._ps, self._users = slices(self._p.flat, [*(p for p, _ in sizes), len(shapes)])
        self._qs = slices(self._q.flat, [q for _, q in sizes])

    @torch.no_grad()
    def fill(self, hold: bool = False) -> None:
        self.before_change()  # of residuals and bases; also by later rounds
        grads = []
        for param in self.params:
            grads.append(param.leaf.grad)
            param.leaf.grad = None
        self.used = [grad is not None for grad in grads]
        for matrix, grad, state, p in zip(self._matrices, grads, self.states, self._ps, strict=True):
            if grad is None:
                matrix.zero_()
            else:
                matrix.copy_((grad.to_dense() if grad.is_sparse else grad).reshape(-1))
            self.codec.begin(matrix, state, p)
        self._users.copy_(flags_on(self._users.device, self.used, self._users.dtype))

    def reduce(self) -> Work:
        rank, world = self.transport.rank, self.pack.world
        dense = (self.pack.wire - self.pack.pieces[rank]) * self.wire_dtype.itemsize
        if self.whole is not None:
            dense += self.pack.pieces[rank] * (world - 1) * self.wire_dtype.itemsize
        sent = 2 * 4 * (self._p.each + self._q.each) * (world - 1)
        self.transport.counters.add_spared("reduce", dense - sent)
        return self._p.reduce()

    @torch.no_grad()
    def go_on(self, number: int) -> Work:
        if number == 1:
            return self._p.spread(lambda: None)
        if number == 3:
            return self._q.spread(self._expand)
        factors = zip(self._matrices, self._ps, self.states, self._qs, strict=True)
        for matrix, p, state, q in factors:
            self.codec.middle(matrix, p, state, q)
        return self._q.reduce()

    def _expand(self) -> None:
        """The gradient of this rank's rows, or at stage 0 of all."""
        rank, pack = self.transport.rank, self.pack
        assert self.landed is not None
        out = self.landed if self.whole is None else self.whole
        offsets = pack.offsets(rank) if self.whole is None else pack.full_offsets
        factors = zip(pack.slots, self._ps, self._qs, self.states, offsets, strict=True)
        for slot, p, q, state, at in factors:
            self.codec.end(q, state)
            start, stop = slot.rows(rank) if self.whole is None else (0, slot.height)
            numel = (stop - start) * slot.row
            room = out[at : at + numel]
            near = room if room.dtype == torch.float32 else torch.empty(numel, device=room.device)
            if numel:
                self.codec.expand(p[start * self.codec.rank : stop * self.codec.rank], q, near)
            if near is not room:
                room.copy_(near)
        behind = out[pack.body(rank) :] if self.whole is None else out[pack.full :]
        behind[: len(self.params)].copy_(self._users)

    def private(self) -> list[Private]:
        found = []
        for param, state in zip(self.params, self.states, strict=True):
            found.append(
                Private(param.name, f"residual of {self.codec!r}", ((0, state["residual"]),), "mean", self)
            )
            found.append(
                Private(param.name, f"basis of {self.codec!r}", ((0, state["basis"]),), "same", self)
            )
        return found

    # ------------------------------------------------------------------ where it lands

    def make_landing(self, stage: int, faces: Faces, ledger: Ledger) -> None:
        ledger.book("state", sum(t.nbytes for state in self.states for t in state.values()))
        ledger.book("buckets", 4 * self.pack.full + self._p.nbytes + self._q.nbytes)
        super().make_landing(stage, faces, ledger)

    @property
    def _shows_wire(self) -> bool:
        return False

    def _make_whole(self, in_place: bool, ledger: Ledger) -> None:
        self.whole = torch.zeros(self.pack.wire, dtype=self.dtype, device=self.device)
        self.grads = self.views_in(self.whole)
        assert self.landed is not None
        ledger.book("gradients", self.whole.nbytes)
        ledger.book("buckets", self.landed.nbytes)
