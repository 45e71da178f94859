"""Lets ranks train apart and meet every few steps (local SGD, DiLoCo).

Tensors of a chunk (parameters that meet together, at most `bucket_bytes`; P = this rank's shard by rows):

- `wire`      master dtype, the shards of all ranks: this rank's parameters on their way to the mean.
- `anchor`    master dtype, P, a transport buffer: the parameters as of the last meeting, after the outer
  update. Peers gather it; at a meeting all ranks' parameters become the anchors.
- `mean`      master dtype, P: the mean of the ranks' parameters.
- `momentum`  master dtype, P: the outer optimizer's.

Anchor and momentum are sharded by rows like the state of stage 1: together 8 bytes a parameter divided by the
ranks. The inner optimizer's state stays each rank's own.

[Note: left out] A `GradScaler` leaves out the step of a rank whose gradient overflowed, and of no other. The
others meet all the same, so a backward whose gradients are dropped counts as a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.comm import Transport
from zeroshard.errors import OptionError
from zeroshard.grads import Reducer
from zeroshard.layout.traffic import chunks, meeting_pack
from zeroshard.optim.sharded_optimizer import ShardedOptimizer
from zeroshard.params.sharded_param import ShardedParam
from zeroshard.sync_policies import Local, Nesterov
from zeroshard.tiers.ledger import MemoryLedger

from .strategy import SavedRows, SyncState, SyncStrategy


class MeetingChunk:
    """Parameters that meet together; see the module's docstring."""

    def __init__(
        self, key: str, params: Sequence[ShardedParam], transport: Transport, ledger: MemoryLedger
    ) -> None:
        self.key, self.params, self.transport = key, list(params), transport
        world, rank, dtype = transport.size, transport.rank, params[0].local.dtype
        self.pack = meeting_pack([(p.name, p.slot.shape) for p in params], world)
        self.wire = transport.allocate(f"{key} wire", self.pack.wire, dtype)
        self.anchor = transport.allocate(f"{key} anchor", self.pack.shards[rank], dtype)
        self.mean, self.momentum = (torch.zeros_like(self.anchor.mine) for _ in range(2))
        ledger.book("buckets", self.wire.mine.nbytes + self.mean.nbytes)
        ledger.book("state", self.anchor.mine.nbytes + self.momentum.nbytes)

    def _rows(self, rank: int) -> list[Tensor]:
        """A rank's rows of every parameter, flat, as they are in this rank's own copy."""
        return [
            p.local.view(-1)[s.rows(rank)[0] * s.row : s.rows(rank)[1] * s.row]
            for p, s in zip(self.params, self.pack.slots, strict=True)
        ]

    def _places(self, flat: Tensor, rank: int) -> list[Tensor]:
        """Where those rows lie in a shard."""
        return [flat[at : at + n] for at, n in self.pack.cuts_of_shards[rank]]

    @torch.no_grad()
    def settle(self) -> None:
        """The parameters are the same on all ranks: begin from here."""
        own = self.transport.rank
        torch._foreach_copy_(self._places(self.anchor.mine, own), self._rows(own))

    @torch.no_grad()
    def send(self) -> Any:
        self.transport.fill(self.wire)
        into, out_of = [], []
        for rank, start in enumerate(self.pack.starts):
            into += self._places(self.wire.mine[start:], rank)
            out_of += self._rows(rank)
        torch._foreach_copy_(into, out_of)
        scale = 1.0 / self.transport.size
        return self.transport.reduce("outer", self.key, self.wire, self.pack.shards, self.mean, scale)

    @torch.no_grad()
    def update(self, outer: Nesterov) -> None:
        """The outer step on this rank's rows; `mean` becomes what the round has changed."""
        delta = torch.sub(self.anchor.mine, self.mean, out=self.mean)
        self.momentum.mul_(outer.momentum).add_(delta)
        self.anchor.mine.sub_(delta.add_(self.momentum, alpha=outer.momentum), alpha=outer.lr)

    def fetch(self) -> Any:
        cuts, out = self.pack.cuts_of_shards, [self._rows(rank) for rank in range(self.transport.size)]
        return self.transport.gather("outer", self.key, self.anchor, cuts, out)

    def kept(self) -> list[SavedRows]:
        """The momentum, by rows, so that any number of ranks can load it."""
        rank = self.transport.rank
        return [
            SavedRows(s.name, "momentum", rows.view(s.local_shape(rank)), s.rows(rank)[0], s.height)
            for s, rows in zip(self.pack.slots, self._places(self.momentum, rank), strict=True)
        ]


class LocalSync(SyncStrategy):
    """`Local` at work."""

    apart = True

    def __init__(
        self,
        policy: Local,
        gradients: Reducer,
        transport: Transport,
        updates: Sequence[ShardedOptimizer],
    ) -> None:
        super().__init__(gradients)
        self.policy, self.transport, self.updates = policy, transport, updates
        self.label = repr(policy)
        self.count = 0
        self._moved = False  # the parameters were written while all ranks were equal: anchors are old
        self._unused = False  # a backward has ended, and neither a step nor `zero_grad` has followed
        self._buffers: list[Tensor] = []
        self.fragments: list[list[MeetingChunk]] = []
        if policy.rates is not None and len(policy.rates) != transport.size:
            raise OptionError(
                f"Local.rates has {len(policy.rates)} factors and there are {transport.size} ranks: give one "
                "a rank."
            )

    def divide(self, params: Sequence[ShardedParam], limit: int, ledger: MemoryLedger) -> None:
        """Cut the trainable parameters into fragments, and those into chunks; see `meeting.chunks`."""
        by_name = {p.name: p for p in params}
        members = [(p.name, str(p.local.dtype), p.local.nbytes) for p in params]
        for number, part in enumerate(chunks(members, self.policy.fragments, limit)):
            self.fragments.append([])
            for place, (dtype, names) in enumerate(part):
                key = f"outer {number} {dtype} {place}"
                chunk = MeetingChunk(key, [by_name[name] for name in names], self.transport, ledger)
                self.fragments[-1].append(chunk)
        self.settle()

    def start(self) -> None:
        """Begin a round after steps that were taken together; what the last one drove at is forgotten."""
        self.count = 0
        for chunk in self._chunks:
            chunk.momentum.zero_()
        self.settle()

    def settle(self) -> None:
        """All ranks are equal: anchors are the parameters as they are."""
        self._moved = False
        self.transport.fence()
        for chunk in self._chunks:
            chunk.settle()

    @property
    def _chunks(self) -> list[MeetingChunk]:
        return [chunk for fragment in self.fragments for chunk in fragment]

    # ------------------------------------------------------------------ steps

    def ended(self) -> None:
        self._unused = True
        super().ended()

    def rewritten(self) -> None:
        """What is loaded or set by hand between two rounds is no step that the outer optimizer enlarges."""
        self._moved = self._moved or self.untimely() is None

    def step(self, update: ShardedOptimizer, step: Callable[[], Any]) -> None:
        if self._moved:
            self.settle()
        with self._at_own_rate(update):
            super().step(update, step)
        if update is self.updates[-1]:
            self.turn()

    def forget(self, optimizer: Optimizer | None) -> bool:
        """See [Note: left out]."""
        return self._unused and optimizer in (None, self.updates[-1].optimizer)

    def turn(self) -> None:
        if self._moved:  # and this rank has left the step out
            self.settle()
        self._unused = False
        self.count += 1
        steps, parts = self.policy.steps, len(self.fragments)
        due = [n for n in range(parts) if (self.count + n * steps // parts) % steps == 0]
        if due:
            self._meet([chunk for n in due for chunk in self.fragments[n]])

    @contextmanager
    def _at_own_rate(self, update: ShardedOptimizer) -> Iterator[None]:
        rates = self.policy.rates
        if rates is None:
            yield
            return
        groups = update.optimizer.param_groups
        before = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * rates[self.transport.rank]
        try:
            yield
        finally:
            for group, rate in zip(groups, before, strict=True):
                group["lr"] = rate

    def meet(self) -> None:
        """All fragments now, unless all ranks are equal already."""
        if self.untimely() is not None:
            self._meet(self._chunks)
            self.count = 0

    @torch.no_grad()
    def _meet(self, chunks: Sequence[MeetingChunk]) -> None:
        works = [chunk.send() for chunk in chunks]
        self.transport.fence()  # peers have read the anchors of the last meeting
        for chunk, work in zip(chunks, works, strict=True):
            work.wait()
            chunk.update(self.policy.outer)
        self.transport.open()
        for work in [chunk.fetch() for chunk in chunks]:
            work.wait()
        if self._buffers:
            self.transport.broadcast("buffers", [buffer.data for buffer in self._buffers])

    def take_buffers(self, buffers: list[Tensor]) -> None:
        self._buffers = buffers

    # ------------------------------------------------------------------ checkpoints

    def untimely(self) -> str | None:
        apart = len(self.fragments) > 1 and self.count > 0
        if not apart and self.count % self.policy.steps == 0:
            return None
        when = (
            "fragments meet at different steps"
            if apart
            else f"it is step {self.count % self.policy.steps} of {self.policy.steps} since they met"
        )
        return (
            f"with sync=Local(...) the ranks' parameters differ ({when}), and a checkpoint holds one model. "
            "Call run.synchronise() first, which lets the ranks meet now, or save after a meeting"
        )

    def state(self, wanted: bool = False) -> SyncState:
        """The inner optimizers' state is each rank's own, and a checkpoint's is one rank's."""
        rows = [row for chunk in self._chunks for row in chunk.kept()]
        values, own = {"count": self.count}, {"inner": self._inner()}
        return replace(super().state(wanted), rows=rows, values=values, own=own)

    def _inner(self) -> list[dict[str, dict[str, Tensor]]]:
        found = []
        for update in self.updates:
            states = {p.name: update.optimizer.state.get(p.sharded_param, {}) for p in update.params.values()}
            found.append(
                {
                    name: {key: value for key, value in state.items() if isinstance(value, Tensor)}
                    for name, state in states.items()
                }
            )
        return found

    @torch.no_grad()
    def adopt(self, values: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        self.count = int(values.get("count", 0)) % self.policy.steps
        if "count" not in values:
            for chunk in self._chunks:
                chunk.momentum.zero_()
        for update, loaded in zip(self.updates, own.get("inner", ()), strict=False):
            for param in update.params.values():
                state, given = update.optimizer.state.get(param.sharded_param, {}), loaded.get(param.name)
                if given is not None and not given:
                    state.clear()  # this rank had not used it; the dict stays: proxies know it
                for key, value in (given or {}).items():
                    if isinstance(state.get(key), Tensor):
                        state[key].copy_(value)
        self.settle()
