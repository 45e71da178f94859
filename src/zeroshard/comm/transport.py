"""What every transport offers: transport buffers, a reduce, a gather, and a few small agreements. See
`Transport`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch

from zeroshard.errors import RankError
from zeroshard.layout.sharding import RankLengths
from zeroshard.layout.specs import TransportTraits

from .sums import sum_shards

Spans = Sequence[tuple[int, int]]
Cuts = Sequence[Spans]
Land = Callable[[list[torch.Tensor]], None]
# Makes the sum of shards: (out, shards in rank order, scale).
Add = Callable[[torch.Tensor, Sequence[torch.Tensor], float], None]

# Bytes in front of a part whose length varies: an int64 that says how many count, itself included.
HEAD = 8


class Work(Protocol):
    """A started operation."""

    def poll(self) -> bool:
        """Make progress without blocking. True when complete; may be asked again."""

    def wait(self) -> None:
        """Complete it; may be called again. Raises `RankError` if a peer failed."""


class DoneWork:
    """Work that was complete when it was started."""

    def poll(self) -> bool:
        return True

    def wait(self) -> None:
        return None


@dataclass(eq=False)
class TransportBuffer:
    """Memory that a transport gave out. `mine` is flat; its length may differ by rank.

    `lane` numbers the transport buffer alike on every rank. `peers` are the same transport buffers of all
    ranks where they can be read in place. `state` is the transport's own: views cached by key, operations
    that still read the transport buffer. `prepared`: what gathers out of it were prepared with, by key; see
    `Transport.forget`.
    """

    key: str
    mine: torch.Tensor
    lane: int = 0
    peers: list[torch.Tensor] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    prepared: dict[str, Any] = field(default_factory=dict)

    def let_go(self) -> None:
        """Gives the memory back, and forgets what was prepared with it."""
        self.mine = self.mine.new_empty(0)
        for kept in (self.peers, self.state, self.prepared):
            kept.clear()


class GatherRequest(NamedTuple):
    """What one gather fetches; see `Transport.gather`."""

    key: str
    source: TransportBuffer
    cuts: Cuts
    out: Sequence[Sequence[torch.Tensor]]


@dataclass
class Counters:
    """Bytes sent and received, and seconds waited for peers, by kind of traffic. `spared`: bytes that codecs
    kept from being sent; `between`: of the bytes sent, those that left the node."""

    sent: dict[str, int] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)
    waited: dict[str, float] = field(default_factory=dict)
    spared: dict[str, int] = field(default_factory=dict)
    between: dict[str, int] = field(default_factory=dict)

    def add_sent(self, kind: str, count: int, between: int = 0) -> None:
        self.sent[kind] = self.sent.get(kind, 0) + count
        self.between[kind] = self.between.get(kind, 0) + between

    def add_received(self, kind: str, count: int) -> None:
        self.received[kind] = self.received.get(kind, 0) + count

    def add_spared(self, kind: str, count: int) -> None:
        self.spared[kind] = self.spared.get(kind, 0) + count

    def add_waited(self, kind: str, seconds: float) -> None:
        self.waited[kind] = self.waited.get(kind, 0.0) + seconds

    @contextmanager
    def waiting(self, kind: str) -> Iterator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            self.add_waited(kind, perf_counter() - start)

    def snapshot(self) -> Counters:
        return Counters(
            dict(self.sent),
            dict(self.received),
            dict(self.waited),
            dict(self.spared),
            dict(self.between),
        )

    def reset(self) -> None:
        self.sent.clear()
        self.received.clear()
        self.waited.clear()
        self.spared.clear()
        self.between.clear()


class Transport(ABC):
    """Moves shards between the ranks of one group. One per `shard`; all ranks make it in the same order.

    Transport buffers are a symmetric heap: every rank allocates and frees in the same order. `reduce` and
    `gather` start an operation and name it by a `key`, which always comes with the same shards, or cuts and
    shapes; `kind` is what `counters` books it under.
    """

    name: str = ""
    traits = TransportTraits()

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.counters = Counters()
        self.nodes: Sequence[int] = [0] * size
        self._far: list[int] = []
        self._near = list(range(size))

    def place(self, nodes: Sequence[int]) -> None:
        """Say which node each rank is on, so that traffic is counted by link."""
        self.nodes = nodes
        self._far = [rank for rank, node in enumerate(nodes) if node != nodes[self.rank]]
        self._near = [rank for rank, node in enumerate(nodes) if node == nodes[self.rank]]

    def cache(self, transport_buffer: TransportBuffer, cuts: Cuts) -> int:
        """Keep inside the node what gathers of `transport_buffer` bring from other nodes, until the next
        epoch. Collective. The bytes that it costs this rank: none where nothing is kept."""
        return 0

    @abstractmethod
    def allocate(self, key: str, numel: int, dtype: torch.dtype) -> TransportBuffer:
        """Zero-filled memory, reused for ever. Collective in call order; `numel` may differ by rank."""

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Peers may learn of what is allocated in here at its end: nothing of it moves before."""
        yield

    def receive(self, wire: TransportBuffer, most: int) -> int:
        """Make room for what every peer sends in reductions, shards of up to `most` elements. The bytes that
        it costs this rank: none where shards are read in place, or pass through device memory."""
        return 0

    def expect(self, key: str, source: TransportBuffer, cuts: Cuts) -> int:
        """The same for gathers of `key`."""
        return 0

    def forget(self, transport_buffer: TransportBuffer) -> None:
        """Tensors that gathers out of `transport_buffer` went to are no more: do not keep their memory."""
        transport_buffer.prepared.clear()

    def over(self, key: str, memory: torch.Tensor) -> TransportBuffer:
        """A transport buffer over flat host memory that the caller has, for a staged transport: what that
        gathers passes through its stage on the device anyway. `fence` then waits on the host as well."""
        assert self.traits.staged
        return TransportBuffer(key, memory, state={"host": True})

    @abstractmethod
    def free(self, transport_buffer: TransportBuffer) -> None:
        """Give a transport buffer back, in the same order on every rank, once this rank has no open work
        on it."""

    @abstractmethod
    def fill(self, transport_buffer: TransportBuffer) -> None:
        """Block until every peer has taken what was last moved out of `transport_buffer`: it may be
        written again."""

    @abstractmethod
    def reduce(
        self,
        kind: str,
        key: str,
        wire: TransportBuffer,
        shards: Sequence[int],
        out: torch.Tensor,
        scale: float,
    ) -> Work:
        """Sum each rank's shard over all ranks.

        `wire.mine[:sum(shards)]` holds N shards in rank order, `shards[r]` elements for rank r; the list is
        the same on all ranks. When complete, `out` (flat, `shards[rank]` elements, any float dtype) is
        `scale` times the sum in rank order, added in fp32 for 16-bit wires. `out` may be this rank's own
        shard of the wire.
        """

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
        """As `reduce`, with a sum made by `add`: this rank's own shard may then lie elsewhere. Only where
        its traits say `adds_here`."""
        raise AssertionError(f"{self.name} does not add here")

    @abstractmethod
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
        """Bytes from every rank to every rank, in an order of turns that the wire shares with `reduce`.

        `offers[r]` is the (offset, length) in this rank's wire (uint8) of what goes to rank r, `takes[r]` the
        place in rank r's wire of what is for this rank. Offers may overlap: all the same, they are a gather.
        When complete, `land` has been called with the N parts for this rank, in rank order; it must not keep
        them. With `varies` each part begins with an int64, how many of its bytes count, itself included: only
        those travel.
        """

    @abstractmethod
    def gather(
        self, kind: str, key: str, source: TransportBuffer, cuts: Cuts, out: Sequence[Sequence[torch.Tensor]]
    ) -> Work:
        """Fetch segments of the peers' transport buffers.

        `cuts[r]` lists (offset, numel) in rank r's transport buffer; `out[r]` the contiguous tensors they go
        to, of any dtype and device. `out[rank]` is empty where this rank's own rows are in place already.
        """

    def gather_all(self, kind: str, fetches: Sequence[GatherRequest]) -> None:
        """Several gathers from beginning to end. The same list every time, or equal ones in their place."""
        for work in [self.gather(kind, *fetch) for fetch in fetches]:
            work.wait()

    @abstractmethod
    def open(self) -> None:
        """My transport buffers now hold the next epoch, and peers may read them."""

    @abstractmethod
    def fence(self) -> None:
        """Before rows that peers may read in place are overwritten: all ranks have come to this point."""

    @abstractmethod
    def broadcast(self, key: str, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """Overwrite `tensors` on every rank with those of `source`."""

    @abstractmethod
    def barrier(self, what: str) -> None:
        """Block until every rank is at the barrier of the same name."""

    @abstractmethod
    def compare(self, what: str, place: str) -> None:
        """Block until this rank knows that its peers ask torch for the same: `what`, which is empty for what
        has no name. Messages about ranks that ask for something else, or are elsewhere, say `place`, too."""

    @abstractmethod
    def max(self, values: Sequence[float], what: str = "a small max") -> list[float]:
        """The element-wise maximum over all ranks. Messages about ranks that are elsewhere say `what`."""

    @abstractmethod
    def sum(self, values: Sequence[float], what: str = "a small sum") -> list[float]:
        """The element-wise sum over all ranks, added in rank order."""

    @abstractmethod
    def exchange(self, value: object, what: str = "an exchange") -> list[object]:
        """A small JSON value from every rank to every rank, in rank order. `what` for: errors say it."""

    @abstractmethod
    def report(self, text: str) -> None:
        """Leave a note that this rank failed, for peers that wait for it."""

    def cause(self) -> str | None:
        """Why a peer failed, if that is known."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Give everything back. May be called again."""

    def _count_reduce(self, kind: str, shards: Sequence[int], itemsize: int) -> None:
        mine, total = shards[self.rank], _total(shards)
        far = total - sum(shards[rank] for rank in self._near) if self._far else 0  # to other nodes
        self.counters.add_sent(kind, (total - mine) * itemsize, far * itemsize)
        self.counters.add_received(kind, mine * (self.size - 1) * itemsize)

    def _count_all_to_all(self, kind: str, sent: Sequence[int], received: Sequence[int]) -> None:
        """Counts the bytes to and from each rank, without what a rank keeps for itself."""
        far = sum(sent[rank] for rank in self._far)
        self.counters.add_sent(kind, sum(sent) - sent[self.rank], far)
        self.counters.add_received(kind, sum(received) - received[self.rank])

    def _count_gather(self, kind: str, totals: Sequence[int], itemsize: int) -> None:
        """`totals`: elements that each rank offers."""
        mine = totals[self.rank] * itemsize
        self.counters.add_sent(kind, mine * (self.size - 1), mine * len(self._far))
        self.counters.add_received(kind, _total(totals) * itemsize - mine)

    def _count_broadcast(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        total = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if self.rank == source:
            self.counters.add_sent("broadcast", total * (self.size - 1), total * len(self._far))
        else:
            self.counters.add_received("broadcast", total)


class SummingTransport(Transport):
    """A transport whose sums are made on this side, by the thread that waits: a subclass says how by
    `reduce_by`."""

    traits = TransportTraits(adds_here=True)

    def reduce(
        self,
        kind: str,
        key: str,
        wire: TransportBuffer,
        shards: Sequence[int],
        out: torch.Tensor,
        scale: float,
    ) -> Work:
        return self.reduce_by(sum_shards, kind, key, wire, shards, out, scale)


def slices(flat: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Consecutive parts of a flat tensor, from its beginning."""
    ends = list(accumulate(lengths))
    return [flat[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def parts_of(flat: torch.Tensor, spans: Spans) -> list[torch.Tensor]:
    """The spans of a flat tensor."""
    return [flat[at : at + length] for at, length in spans]


def length_of(part: torch.Tensor) -> int:
    """How many bytes of a part count, where that varies."""
    return int(part[:HEAD].view(torch.int64).item()) if part.numel() else 0


def fold(rows: Sequence[Sequence[float]], how: str) -> list[float]:
    """Combine one row per rank element by element, in rank order."""
    lengths = [len(row) for row in rows]
    if len(set(lengths)) > 1:
        raise RankError(
            f"ranks disagree about the length of a small {how}: {lengths} values by rank. "
            "Every rank must run the same program; check code that depends on the rank."
        )
    columns = zip(*rows, strict=True)
    return [max(column) if how == "max" else _ordered_sum(column) for column in columns]


def _ordered_sum(column: Sequence[float]) -> float:
    # Not the builtin: it compensates from Python 3.12 on, so two Python versions would differ.
    total = 0.0
    for value in column:
        total += value
    return total


def _total(lengths: Sequence[int]) -> int:
    """Of all ranks, which may be thousands: what a layout has is added up once."""
    return lengths.total if isinstance(lengths, RankLengths) else sum(lengths)
