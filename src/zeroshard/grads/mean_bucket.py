"""Buckets of matrices whose gradients travel as means of short vectors (`MeanCodec`, such as `LowRank`).

Each exchange is two rounds: the mean is added up in cuts, one a rank, and the cuts are handed to all. The
first round goes during backward, the others when it has ended.

Tensors of a bucket (fp32, flat):

- `matrices`  the matrices whole, one after another, which the codec may change.
- `flat`      of each exchange: what travels of all matrices, one after another; behind those of the first one
  number a parameter (`users`), 1 where this rank used it and after the mean the share of ranks that did (see
  [Note: used flags]).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zeroshard.comm import Transport, Work
from zeroshard.comm.transport import slices
from zeroshard.compress import MeanCodec
from zeroshard.layout.codes import cut_of
from zeroshard.layout.sharding import PackLayout
from zeroshard.params.rank_state import RankState
from zeroshard.params.sharded_param import ShardedParam, ShardedTensors
from zeroshard.tiers.ledger import MemoryLedger

from .bucket import ReducedBucket, flags_on


class MeanExchange:
    """The mean over all ranks of a flat fp32 tensor, in two rounds: each rank adds up one cut of it, then all
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
        return self.transport.all_to_all(
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
        return self.transport.all_to_all("reduce", f"{self.key} back", self._back, spans, spans, land)


class MeanBucket(ReducedBucket):
    """See the module's docstring."""

    may_leave_late = False

    def __init__(
        self,
        index: int,
        pack: PackLayout,
        params: Sequence[ShardedParam],
        transport: Transport,
        dtypes: tuple[torch.dtype, torch.dtype],
        device: torch.device,
        codec: MeanCodec,
    ) -> None:
        self.codec = codec
        shapes = [slot.shape for slot in pack.slots]
        lengths = list(zip(*(codec.lengths(shape) for shape in shapes), strict=True))
        self._exchanges = [
            MeanExchange(
                f"means {codec!r} {index} {number}",
                sum(sizes) + (0 if number else len(shapes)),
                transport,
                device,
            )
            for number, sizes in enumerate(lengths)
        ]
        self.rounds = 2 * len(lengths) - 1
        super().__init__(index, pack, params, self._exchanges[0].wire, transport, dtypes, device)
        whole = slices(torch.zeros(pack.full, device=device), [slot.numel for slot in pack.slots])
        self._matrices = [matrix.view(shape[0], -1) for matrix, shape in zip(whole, shapes, strict=True)]
        self.states = [codec.state(shape, device) for shape in shapes]
        vectors = [
            slices(exchange.flat, sizes) for exchange, sizes in zip(self._exchanges, lengths, strict=True)
        ]
        self._sent = list(zip(*vectors, strict=True))  # of each matrix, by exchange
        self._users = self._exchanges[0].flat[sum(lengths[0]) :][: len(shapes)]

    @torch.no_grad()
    def fill(self, hold: bool = False) -> None:
        self.before_change()  # of the codec's state; also by later rounds
        grads = [param.take_grad() for param in self.params]
        self.used = [grad is not None for grad in grads]
        for matrix, grad in zip(self._matrices, grads, strict=True):
            if grad is None:
                matrix.zero_()
            else:
                matrix.copy_(grad.reshape(matrix.shape))
        self._send(0)
        self._users.copy_(flags_on(self._users.device, self.used, self._users.dtype))

    def _send(self, number: int) -> None:
        for matrix, sent, state in zip(self._matrices, self._sent, self.states, strict=True):
            self.codec.send(number, matrix, sent, state)

    def reduce(self) -> Work:
        rank, world = self.transport.rank, self.pack.world
        dense = (self.pack.wire - self.pack.shards[rank]) * self.wire_dtype.itemsize
        if self.whole is not None:
            dense += self.pack.shards[rank] * (world - 1) * self.wire_dtype.itemsize
        sent = 2 * 4 * sum(exchange.each for exchange in self._exchanges) * (world - 1)
        self.transport.counters.add_spared("reduce", dense - sent)
        return self._exchanges[0].reduce()

    @torch.no_grad()
    def go_on(self, number: int) -> Work:
        exchange = self._exchanges[number // 2]
        if number % 2:
            return exchange.spread(self._expand if number == self.rounds else lambda: None)
        self._send(number // 2)
        return exchange.reduce()

    def _expand(self) -> None:
        """The gradient of this rank's rows, or at stage 0 of all."""
        rank, pack = self.transport.rank, self.pack
        assert self.landed is not None
        out = self.landed if self.whole is None else self.whole
        offsets = pack.offsets(rank) if self.whole is None else pack.full_offsets
        for slot, sent, state, at in zip(pack.slots, self._sent, self.states, offsets, strict=True):
            self.codec.finish(sent, state)
            start, stop = slot.rows(rank) if self.whole is None else (0, slot.height)
            if start < stop:
                rows = out[at : at + (stop - start) * slot.row].view(stop - start, slot.row)
                near = rows if rows.dtype == torch.float32 else torch.empty(rows.shape, device=rows.device)
                self.codec.expand(sent, start, stop, near)
                if near is not rows:
                    rows.copy_(near)
        behind = out[pack.body(rank) :] if self.whole is None else out[pack.full :]
        behind[: len(self.params)].copy_(self._users)

    def private(self) -> list[RankState]:
        return [
            RankState(
                param.name,
                f"{name} of {self.codec!r}",
                ((0, tensor),),
                "mean" if name == "residual" else "same",
                self,
            )
            for param, state in zip(self.params, self.states, strict=True)
            for name, tensor in state.items()
        ]

    # ------------------------------------------------------------------ where it lands

    def make_reduced_grad(
        self, stage: int, delays: bool, sharded_tensors: ShardedTensors, ledger: MemoryLedger
    ) -> None:
        ledger.book("state", sum(t.nbytes for state in self.states for t in state.values()))
        ledger.book("buckets", 4 * self.pack.full + sum(exchange.nbytes for exchange in self._exchanges))
        super().make_reduced_grad(stage, delays, sharded_tensors, ledger)

    @property
    def _shows_wire(self) -> bool:
        return False

    def _make_whole(self, in_place: bool, ledger: MemoryLedger) -> None:
        self.show_whole(torch.zeros(self.pack.wire, dtype=self.dtype, device=self.device))
        assert self.landed is not None
        ledger.book("gradients", self.shown.nbytes)
        ledger.book("buckets", self.landed.nbytes)
