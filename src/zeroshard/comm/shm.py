"""Joins the ranks of one host, which read one another's memory in place.

A pull model without threads: a rank only announces that its wire is ready, and the owner of each shard adds
it straight out of the peers' memory when it polls or waits. So nothing is copied to be sent.

- **wire**: a transport buffer of N shards, one memfd per rank. Its lane counts `posted` (my shards are ready)
  and `consumed` (I have taken mine from everybody); `fill` waits for the peers' `consumed` before the wire is
  written again.
- **source** of a gather: read in place when the peers' epoch has come; protected by `fence`, which all ranks
  pass before anyone overwrites rows."""

from __future__ import annotations

import json
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, cast

import torch

from zeroshard.comm import bounce
from zeroshard.comm import control as memfd
from zeroshard.errors import RankError, StateError, TierError
from zeroshard.kernels import TensorCopies

from .control import AWAY, EPOCH, MAX_LANES, Control, consumed, posted
from .diagnosis import exits
from .diagnosis.stacks import StackProbe, named, started
from .diagnosis.waits import LONG, asked_for, look_after
from .pull import GatherCopies, PeerGather, PeerReduce, totals
from .stuck import show_and_end
from .sums import sum_shards
from .targets import GatherTargets
from .transport import (
    Add,
    Cuts,
    GatherRequest,
    Land,
    Spans,
    SummingTransport,
    TransportBuffer,
    Work,
    fold,
    length_of,
    parts_of,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


_TOGETHER = 64  # buffers that ranks tell one another in one message: each holds a descriptor until then
# A rank that allocates fewer than another.
_NONE: list[object] = [0, -1, 0, "none", "", -1, None]


@dataclass(frozen=True)
class _NewBuffer:
    buffer: TransportBuffer
    descriptor: int
    told: list[object]


class ShmTransport(SummingTransport):
    """Shared memory between ranks of one host. Ranks may be processes, or threads that share a store."""

    name = "shm"

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        device: torch.device | None = None,
        timeout: float = 600.0,
        names: Sequence[int] | None = None,
    ) -> None:
        super().__init__(rank, size, device if device is not None else torch.device("cpu"))
        self.control = Control(store, rank, size, timeout, names)
        self.control.while_waiting(self.progress)
        self.reductions: list[PeerReduce] = []
        self.gathers: list[PeerGather] = []
        self._stacks = StackProbe()
        self._away: Callable[[], str | None] = lambda: None
        self._epoch = 0
        self._lanes_used = 0
        self._lanes_free: list[int] = []
        self._bounces: dict[int, TransportBuffer] = {}
        self._news: list[_NewBuffer] = []  # which peers have not mapped yet
        self._puts_off = False
        self._closed = threading.Event()
        exits.listen(self)
        look_after(self, self._closed, 1.0)

    # Buffers

    def allocate(self, key: str, numel: int, dtype: torch.dtype) -> TransportBuffer:
        lane, nbytes = self._take_lane(), numel * dtype.itemsize
        fd, trouble, view = -1, None, torch.empty(0, dtype=dtype)
        try:
            fd = memfd.create(key, nbytes)
            view = memfd.open_peer(os.getpid(), fd, numel, dtype)
        except OSError as error:
            trouble = f"rank {self.rank} has no {nbytes} bytes of shared memory for '{key}': {error}"
        buffer = TransportBuffer(key, view, lane)
        self._news.append(_NewBuffer(buffer, fd, [os.getpid(), fd, numel, key, str(dtype), lane, trouble]))
        if trouble is not None or not self._puts_off or len(self._news) == _TOGETHER:
            self._map_peers()
        return buffer

    @contextmanager
    def allocating(self) -> Iterator[None]:
        self._puts_off = True
        try:
            yield
            self._map_peers()
        finally:
            self._puts_off = False
            self._close_descriptors()

    def _map_peers(self) -> None:
        """See the peers' buffers of the same names. A rank keeps its descriptors until all have."""
        if not self._news:
            return
        keys = [new.buffer.key for new in self._news]
        what = ", ".join(dict.fromkeys((keys[0], keys[-1])))
        try:
            mine = [new.told for new in self._news]
            told = [
                cast("list[list[object]]", json.loads(text))
                for text in self._exchange(f"new buffers, '{keys[0]}' first", mine)
            ]
            for number in range(max(map(len, told))):
                self._compare_transport_buffers(
                    [buffers[number] if number < len(buffers) else _NONE for buffers in told]
                )
            for number, new in enumerate(self._news):
                dtype = new.buffer.mine.dtype
                new.buffer.peers += [
                    new.buffer.mine
                    if rank == self.rank
                    else memfd.open_peer(*cast("tuple[int, int, int]", buffers[number][:3]), dtype)
                    for rank, buffers in enumerate(told)
                ]
            self._exchange(f"buffers {what} mapped", None)
        finally:
            self._close_descriptors()

    def _close_descriptors(self) -> None:
        while self._news:
            new = self._news.pop()
            if new.descriptor >= 0:
                os.close(new.descriptor)

    def _take_lane(self) -> int:
        if self._lanes_free:
            return self._lanes_free.pop()
        if self._lanes_used == MAX_LANES:
            raise StateError(f"more than {MAX_LANES} buffers on one transport: make units or buckets larger")
        self._lanes_used += 1
        return self._lanes_used - 1

    def _compare_transport_buffers(self, told: list[list[object]]) -> None:
        troubles = [item[6] for item in told if item[6] is not None]
        if troubles:
            raise TierError(
                f"{troubles[0]}. Free memory, enlarge the container's limit (or that of files: ulimit -f), "
                "or use more ranks."
            )
        for rank, item in enumerate(told):
            if item[3:6] != told[0][3:6]:
                raise RankError(
                    f"ranks allocate different buffers: rank 0 {told[0][3]} ({told[0][4]}), rank {rank} "
                    f"{item[3]} ({item[4]}). Every rank must build the same model; check code that depends "
                    "on the rank."
                )

    def free(self, transport_buffer: TransportBuffer) -> None:
        self._lanes_free.append(transport_buffer.lane)
        transport_buffer.let_go()

    def fill(self, transport_buffer: TransportBuffer) -> None:
        for work in [work for work in self.reductions if work.wire is transport_buffer]:
            work.wait()
        control, lane = self.control, transport_buffer.lane
        target = control.own(posted(lane))
        if not control.reached(consumed(lane), target):
            with self.counters.waiting("fill"):
                control.wait(
                    consumed(lane), target, lambda: f"peers to take their shards [{transport_buffer.key}]"
                )

    # Traffic

    def reduce_by(
        self,
        add: Add,
        kind: str,
        key: str,
        wire: TransportBuffer,
        shards: Sequence[int],
        out: torch.Tensor,
        scale: float,
    ) -> Work:
        return self.reduce_blocks(kind, key, wire, shards, [out], scale, add)

    def reduce_blocks(
        self,
        kind: str,
        key: str,
        wire: TransportBuffer,
        shards: Sequence[int],
        outs: Sequence[torch.Tensor],
        scale: float,
        add: Add = sum_shards,
    ) -> Work:
        """As `reduce`, of a wire with several blocks of shards one after another, a shard for every rank in
        each: the sum of this rank's shard of block b goes to `outs[b]`."""
        sums = list(zip(outs, self._sums_for_me(key, wire, shards), strict=True))
        for first in range(0, len(shards), self.size):
            self._count_reduce(kind, shards[first : first + self.size], wire.mine.element_size())

        def take() -> None:
            for out, sources in sums:
                add(out, sources, scale)

        return self._post(kind, key, wire, take)

    def all_to_all(
        self,
        kind: str,
        key: str,
        wire: TransportBuffer,
        offers: Spans,
        takes: Spans,
        land: Land,
        varies: bool = False,
    ) -> Work:
        parts = [peer[at : at + length] for peer, (at, length) in zip(wire.peers, takes, strict=True)]
        if not varies:
            self._count_all_to_all(kind, [n for _, n in offers], [n for _, n in takes])
            return self._post(kind, key, wire, lambda: land(parts))
        sent = [length_of(part) for part in parts_of(wire.mine, offers)]

        def take() -> None:
            used = [length_of(part) for part in parts]
            self._count_all_to_all(kind, sent, used)
            land([part[:length] for part, length in zip(parts, used, strict=True)])

        return self._post(kind, key, wire, take)

    def _post(self, kind: str, key: str, wire: TransportBuffer, take: Callable[[], None]) -> PeerReduce:
        """My shards are ready; `take` is called when everybody's are."""
        turn = self.control.own(posted(wire.lane)) + 1
        work = PeerReduce(self, kind, key, wire, turn, take)
        self.control.publish(posted(wire.lane), turn)
        self.reductions.append(work)
        return work

    def _sums_for_me(
        self, key: str, wire: TransportBuffer, shards: Sequence[int]
    ) -> list[list[torch.Tensor]]:
        """Per block, every rank's shard for this rank."""
        cached = wire.state.get(key)
        if cached is None or cached[0] != shards:
            starts = [0, *accumulate(shards)]
            mine = range(self.rank, len(shards), self.size)
            views = [[wires[starts[i] : starts[i] + shards[i]] for wires in wire.peers] for i in mine]
            cached = wire.state[key] = (list(shards), views)
        return cast("list[list[torch.Tensor]]", cached[1])

    def gather(
        self, kind: str, key: str, source: TransportBuffer, cuts: Cuts, out: Sequence[Sequence[torch.Tensor]]
    ) -> Work:
        return self._gather(kind, key, source, cuts, out, (EPOCH, self._epoch))

    def hand_on(self, token: TransportBuffer) -> None:
        """What peers fetch from this rank by `gather_handed` with this token is in its place."""
        self.control.publish(posted(token.lane), self.control.own(posted(token.lane)) + 1)

    def gather_handed(
        self,
        kind: str,
        key: str,
        token: TransportBuffer,
        source: TransportBuffer,
        cuts: Cuts,
        out: Sequence[Sequence[torch.Tensor]],
    ) -> Work:
        """As `gather`, of what every rank hands on itself: waits for as many `hand_on` as this rank made."""
        ready = (posted(token.lane), self.control.own(posted(token.lane)))
        return self._gather(kind, key, source, cuts, out, ready)

    def _gather(
        self,
        kind: str,
        key: str,
        source: TransportBuffer,
        cuts: Cuts,
        out: Sequence[Sequence[torch.Tensor]],
        ready: tuple[int, int],
    ) -> Work:
        own = out.own != self.rank if isinstance(out, GatherTargets) else len(out[self.rank]) > 0
        slot = f"{key} {own}"
        cached = source.prepared.get(slot)
        if cached is None or cached.cuts != cuts:
            targets, views = self._pairs(source, cuts, out)
            moves = TensorCopies(targets, views)
            cached = source.prepared[slot] = GatherCopies(cuts, views, moves, totals(cuts), out, targets)
        work = PeerGather(self, kind, key, ready, cached, out)
        self.gathers.append(work)
        self._count_gather(kind, cached.totals, source.mine.element_size())
        return work

    def _pairs(
        self, source: TransportBuffer, cuts: Cuts, out: Sequence[Sequence[torch.Tensor]]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The tensors that a gather fills, and what of the peers' memory goes there."""
        targets = [to for tensors in out for to in tensors]
        views = [
            source.peers[rank][at : at + numel].view(to.shape)
            for rank, segments in enumerate(cuts)
            if rank != self.rank or out[rank]
            for (at, numel), to in zip(segments, out[rank], strict=True)
        ]
        return targets, views

    def gather_all(self, kind: str, fetches: Sequence[GatherRequest]) -> None:
        """By one list of copies, made once."""
        state, ready = fetches[0].source.state, (EPOCH, self._epoch)
        if state.get("all", (None,))[0] is not fetches:
            pairs = [self._pairs(*fetch[1:]) for fetch in fetches]
            to, of = ([tensor for pair in pairs for tensor in pair[side]] for side in (0, 1))
            rows = [[n * fetch.source.mine.element_size() for n in totals(fetch.cuts)] for fetch in fetches]
            state["all"] = fetches, TensorCopies(to, of), to, of, list(map(sum, zip(*rows, strict=True)))
        if not self.control.reached(*ready):
            with self.counters.waiting(kind):
                self.control.wait(*ready, lambda: f"its {kind} [{fetches[0].key}, {len(fetches)} in all]")
        _, moves, to, of, nbytes = state["all"]
        moves.run(to, of, "neither")
        self._count_gather(kind, nbytes, 1)

    def open(self) -> None:
        self._epoch += 1
        self.control.publish(EPOCH, self._epoch)

    def fence(self) -> None:
        self.control.usual.beat()
        for work in list(self.gathers):
            work.wait()
        with self.counters.waiting("fence"):
            self.control.exchange("the fence before an update", b"")

    def progress(self) -> None:
        """Take shards that have come while this rank waits, so that a peer can fill its wire again."""
        for work in list(self.reductions):
            work.poll()

    def while_waiting(self, progress: Callable[[], object]) -> None:
        """Call `progress` again and again while this rank waits, in place of this transport's own."""
        self.control.while_waiting(progress)

    def also(self, away: Callable[[], str | None]) -> None:
        """Tell peers that this rank waits in another transport."""
        self._away = away

    # Small agreements

    def _exchange(self, label: str, value: object) -> list[bytes]:
        with self.counters.waiting("agree"):
            return self.control.exchange(label, json.dumps(value).encode())

    def barrier(self, what: str) -> None:
        with self.counters.waiting("barrier"):
            self.control.exchange(f"barrier '{what}'", b"")

    def compare(self, what: str, place: str) -> None:
        with self.counters.waiting("agree"):
            self.control.exchange(asked_for(what, place), b"")

    def max(self, values: Sequence[float], what: str = "a small max") -> list[float]:
        return self._fold("max", values, what)

    def sum(self, values: Sequence[float], what: str = "a small sum") -> list[float]:
        return self._fold("sum", values, what)

    def _fold(self, how: str, values: Sequence[float], what: str) -> list[float]:
        with self.counters.waiting("agree"):
            rows = self.control.exchange(what, struct.pack(f"{len(values)}d", *values))
        return fold([struct.unpack(f"{len(row) // 8}d", row) for row in rows], how)

    def exchange(self, value: object, what: str = "an exchange") -> list[object]:
        return [json.loads(text) for text in self._exchange(what, value)]

    def broadcast(self, key: str, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        sends = self.rank == source
        buffer, room = self._bounces.get(source), bounce.room(tensors)
        if buffer is not None and buffer.peers[source].numel() < room:
            self.free(self._bounces.pop(source))
            buffer = None
        if buffer is None:
            mine = room if sends else 0
            buffer = self._bounces[source] = self.allocate(f"broadcast from {source}", mine, torch.uint8)
            self._map_peers()
        with self.counters.waiting("broadcast"):
            label = f"broadcast '{key}'"
            whole = buffer.peers[source]
            bounce.broadcast(tensors, whole, sends, lambda start, stop: self.control.exchange(label, b""))
            # The next broadcast starts at the first half again, which a slow peer may still be reading.
            self.control.exchange(label, b"")
        if bounce.is_large(tensors):
            self.free(self._bounces.pop(source))
        self._count_broadcast(tensors, source)

    # The end

    def report(self, text: str) -> None:
        self.control.leave(text)

    def look(self) -> None:
        """What the guard does: let waiting peers know if this rank is in a collective of torch, and end it
        if they are in others, or have ended because it did not come."""
        self.control.publish(AWAY, int(self._away() is not None))
        blamed = self.control.blamed()
        if blamed is not None:
            show_and_end(self.control.name, blamed, self._stacks.thread)
        label = self._stacks.collective(LONG)
        told = {} if label is None else started()
        self.control.tell_foreign(None if label is None else named(label, told), told)
        trouble = None if label is None else self.control.desynchronised(time.monotonic())
        if trouble is not None:
            self.report(trouble)
            exits.give_up(self.rank, trouble)

    def cause(self) -> str | None:
        return self.control.cause()

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        exits.unlisten(self)
        self.control.leave()
        self.reductions.clear()
        self.gathers.clear()
        self._bounces.clear()
