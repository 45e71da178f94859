"""Joins nodes of several ranks: shared memory inside a node, gloo between nodes, every byte across once.

Rank r is number `local` of its node; `inner` joins the ranks of a node, `outer` the ranks of all nodes that
have the same number. Nodes have L ranks each.

- **reduce**: first inside the node. The sums of the node for this rank and its namesakes on other nodes
  replace what it had for them in its own wire, where no other rank reads. Then between nodes: 1/L of what a
  flat reduction sends there. Sums are added node by node, so they differ from flat ones in rounding, and a
  16-bit wire is rounded once more; two runs are bit-equal, and so are all stages.
- **gather**: each rank fetches the rows of its namesakes on other nodes, and hands them on inside the node.
  They stay in the node's memory until the next epoch (`cache`), so gathering again crosses no network. Where
  the gathered rows lie in the source transport buffer itself (a publish), that is the memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch._C._distributed_c10d import PrefixStore

from zeroshard.errors import OptionError, RankError
from zeroshard.layout.sharding import aligned
from zeroshard.layout.specs import TransportTraits

from .diagnosis import exits
from .gloo import GlooTransport
from .rendezvous import Rendezvous
from .shm import ShmTransport
from .sums import first_scale
from .topology import Topology
from .transport import Cuts, Land, Spans, Transport, TransportBuffer, Work, fold, slices

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Out = Sequence[Sequence[torch.Tensor]]


@dataclass
class _NodeCache:
    """What a rank keeps of other nodes for the ranks of its own.

    `memory`: the inner transport buffer that holds it, the source transport buffer's own where rows are
    fetched into place. `token`: says that it has come. `bases[l][n]`: where node n's rows begin in the memory
    of rank l of the node; empty where in place. `epoch`: of what it holds.
    """

    memory: TransportBuffer
    token: TransportBuffer
    bases: list[list[int]]
    epoch: int = -1
    plans: dict[str, tuple[Cuts, Cuts]] = field(default_factory=dict)


class NodesTransport(Transport):
    """See the module's docstring. For ranks without GPUs."""

    name = "nodes"

    def __init__(
        self, store: Store, rank: int, topology: Topology, device: torch.device, timeout: float = 600.0
    ) -> None:
        super().__init__(rank, len(topology.nodes), device)
        each = topology.ranks_per_node
        assert each is not None
        self.ranks_per_node = each
        self.traits = TransportTraits(overlaps=True, summed_first=each)
        self._count = topology.count
        self._node, self._local = divmod(rank, each)
        self._inner = self._join_node(store, timeout)
        namesakes = [node * each + self._local for node in range(self._count)]
        between = PrefixStore(f"between {self._local}", store)
        self._outer = GlooTransport(between, self._node, self._count, device, timeout, names=namesakes)
        self.place(topology.nodes)
        self._outer.place(range(self._count))
        self._inner.counters = self._outer.counters = self.counters
        self._inner.while_waiting(self._progress)
        self._outer.also(self._inner.control.waits_for)
        self._inner.also(self._outer.waits_for)
        # They know their ranks by other numbers: what is told to peers is told by this one.
        exits.unlisten(self._inner)
        exits.unlisten(self._outer)
        exits.listen(self)
        self._reduces: list[_Reduce] = []
        self._gathers: list[_Gather] = []
        self._direct: GlooTransport | None = None
        self._store, self._timeout = PrefixStore("direct", store), timeout
        self._epoch = 0
        self._handed = False  # something was handed on since the last fence

    def _join_node(self, store: Store, timeout: float) -> ShmTransport:
        """The transport inside the node; all ranks learn it if one of them cannot make it."""
        first = self._node * self.ranks_per_node
        names = range(first, first + self.ranks_per_node)
        inner, trouble = None, None
        inside = PrefixStore(f"inside {self._node}", store)
        try:
            inner = ShmTransport(inside, self._local, self.ranks_per_node, self.device, timeout, names)
        except OptionError as error:
            trouble = str(error)
        told = Rendezvous(store, self.rank, self.size, timeout).share("inside nodes", trouble)
        for text in told:
            if text is not None:
                raise OptionError(f"transport 'nodes' cannot work here: {text}")
        assert inner is not None
        return inner

    # Buffers

    def allocate(self, key: str, numel: int, dtype: torch.dtype) -> TransportBuffer:
        inner = self._inner.allocate(key, numel, dtype)
        outer = self._outer.adopt(key, inner.mine)
        return TransportBuffer(key, inner.mine, inner.lane, state={"inner": inner, "outer": outer})

    def free(self, transport_buffer: TransportBuffer) -> None:
        for name, part in sorted(transport_buffer.state.items()):
            if isinstance(part, _NodeCache):
                if part.bases:
                    self._inner.free(part.memory)
                self._inner.free(part.token)
            elif name == "outer":
                self._outer.free(part)
            elif name == "direct" and self._direct is not None:
                self._direct.free(part)
        self._inner.free(transport_buffer.state["inner"])
        transport_buffer.let_go()

    def forget(self, transport_buffer: TransportBuffer) -> None:
        relays = [part.memory for part in transport_buffer.state.values() if isinstance(part, _NodeCache)]
        for inside in (transport_buffer.state["inner"], *relays):
            self._inner.forget(inside)
        self._outer.forget(transport_buffer.state["outer"])

    def fill(self, transport_buffer: TransportBuffer) -> None:
        for work in [work for work in self._reduces if work.wire is transport_buffer]:
            work.wait()
        self._inner.fill(transport_buffer.state["inner"])
        self._outer.fill(transport_buffer.state["outer"])
        if self._direct is not None and "direct" in transport_buffer.state:
            self._direct.fill(transport_buffer.state["direct"])

    def cache(self, transport_buffer: TransportBuffer, cuts: Cuts) -> int:
        relay = self._relay(transport_buffer, cuts, in_place=False)
        return relay.memory.mine.nbytes

    def _relay(self, transport_buffer: TransportBuffer, cuts: Cuts, in_place: bool) -> _NodeCache:
        """Made once for a transport buffer, in the same order on every rank."""
        name = "relay in place" if in_place else "relay"
        held = transport_buffer.state.get(name)
        if held is None:
            token = self._inner.allocate(f"{transport_buffer.key} {name} token", 1, torch.uint8)
            bases: list[list[int]] = []
            memory = transport_buffer.state["inner"]
            if not in_place:
                bases, sizes = self._layout(cuts)
                memory = self._inner.allocate(
                    f"{transport_buffer.key} {name}", sizes[self._local], transport_buffer.mine.dtype
                )
            held = transport_buffer.state[name] = _NodeCache(memory, token, bases)
        return cast(_NodeCache, held)

    def _layout(self, cuts: Cuts) -> tuple[list[list[int]], list[int]]:
        """For every rank of this node: where the rows of each of its namesakes begin, and the size of all."""
        bases, sizes = [], []
        for local in range(self.ranks_per_node):
            starts, end = [], 0
            for node in range(self._count):
                starts.append(end)
                if node != self._node:
                    low, high = _span(cuts[node * self.ranks_per_node + local])
                    end += aligned(high - low)
            bases.append(starts)
            sizes.append(end)
        return bases, sizes

    # Traffic

    def reduce(
        self,
        kind: str,
        key: str,
        wire: TransportBuffer,
        shards: Sequence[int],
        out: torch.Tensor,
        scale: float,
    ) -> Work:
        namesakes = slices(wire.mine, shards)[self._local :: self.ranks_per_node]
        first = first_scale(self.ranks_per_node, wire.mine.element_size())
        inside = self._inner.reduce_blocks(kind, key, wire.state["inner"], shards, namesakes, first)

        def across() -> Work:
            return self._outer.reduce_from(kind, key, wire.state["outer"], namesakes, out, scale / first)

        work = _Reduce(self, wire, inside, across)
        self._reduces.append(work)
        self._progress()
        return work

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
        """Parts that are not summed do not become fewer inside a node: they go straight to their ranks."""
        if self._direct is None:
            self._direct = GlooTransport(self._store, self.rank, self.size, self.device, self._timeout)
            self._direct.place(self.nodes)
            self._direct.counters = self.counters
            exits.unlisten(self._direct)
        if "direct" not in wire.state:
            wire.state["direct"] = self._direct.adopt(wire.key, wire.mine)
        return self._direct.all_to_all(kind, key, wire.state["direct"], offers, takes, land, varies)

    def gather(self, kind: str, key: str, source: TransportBuffer, cuts: Cuts, out: Out) -> Work:
        in_place = "relay" not in source.state and len(out[self.rank]) == 0 and _disjoint(cuts)
        relay = self._relay(source, cuts, in_place)
        came = None
        if relay.epoch != self._epoch:
            came = self._fetch(kind, key, source, cuts, out, relay)
            relay.epoch = self._epoch
        work = _Gather(self, relay, came, lambda: self._hand_round(kind, key, source, cuts, out, relay))
        self._gathers.append(work)
        return work

    def _namesakes(self) -> range:
        return range(self._local, self.size, self.ranks_per_node)

    def _fetch(
        self, kind: str, key: str, source: TransportBuffer, cuts: Cuts, out: Out, relay: _NodeCache
    ) -> Work:
        """The rows of this rank's namesakes, from other nodes into the relay's memory."""
        mine = self._namesakes()
        if not relay.bases:
            there = [[] if r == self.rank else out[r] for r in mine]
            assert all(_is_there(source.mine, cuts[r], to) for r, to in zip(mine, there, strict=True) if to)
            return self._outer.gather(kind, key, source.state["outer"], [cuts[r] for r in mine], there)
        wanted, into = [], []
        for node, rank in enumerate(mine):
            low, high = _span(cuts[rank])
            start = relay.bases[self._local][node]
            wanted.append([(low, high - low)] if high > low else [])
            room = relay.memory.mine[start : start + high - low]
            into.append([room] if high > low and rank != self.rank else [])
        return self._outer.gather(kind, key, source.state["outer"], wanted, into)

    def _hand_round(
        self, kind: str, key: str, source: TransportBuffer, cuts: Cuts, out: Out, relay: _NodeCache
    ) -> list[Work]:
        """Inside the node: everyone's own rows, and what everyone has fetched."""
        each, first = self.ranks_per_node, self._node * self.ranks_per_node
        if key not in relay.plans:
            theirs = [self._relayed(cuts, relay, local) for local in range(each)]
            relay.plans[key] = (list(cuts[first : first + each]), theirs)
        own, fetched = relay.plans[key]
        others = [n for n in range(self._count) if n != self._node]
        there: list[list[torch.Tensor]] = [
            [tensor for node in others for tensor in out[node * each + local]] for local in range(each)
        ]
        if not relay.bases:
            there[self._local] = []
        inner = self._inner
        return [
            inner.gather(kind, key, source.state["inner"], own, out[first : first + each]),
            inner.gather_handed(kind, f"{key} handed", relay.token, relay.memory, fetched, there),
        ]

    def _relayed(self, cuts: Cuts, relay: _NodeCache, local: int) -> list[tuple[int, int]]:
        """Where the rows of other nodes that rank `local` fetches lie in its memory."""
        found: list[tuple[int, int]] = []
        for node in range(self._count):
            if node != self._node:
                segments = cuts[node * self.ranks_per_node + local]
                shift = relay.bases[local][node] - _span(segments)[0] if relay.bases else 0
                found += [(at + shift, numel) for at, numel in segments]
        return found

    def open(self) -> None:
        if self._handed:
            self.fence()  # what is about to be fetched goes where peers may still be reading
        self._epoch += 1
        self._inner.open()
        self._outer.open()

    def fence(self) -> None:
        for work in list(self._gathers):
            work.wait()
        self._inner.fence()
        self._outer.fence()
        self._handed = False

    def _progress(self) -> None:
        """Take shards that have come, and send sums of the node that are complete."""
        self._inner.progress()
        for work in list(self._reduces):
            work.advance()

    # Small agreements: inside every node, then between nodes

    def barrier(self, what: str) -> None:
        self._inner.barrier(what)
        self._outer.barrier(what)

    def compare(self, what: str, place: str) -> None:
        try:
            self._inner.compare(what, place)
        except RankError as error:
            self.report(str(error))  # the ranks of other nodes may agree among themselves
            raise
        self._outer.compare(what, place)

    def exchange(self, value: object, what: str = "an exchange") -> list[object]:
        return self._all(self._inner.exchange(value, what), what)

    def _all(self, inside: list[Any], what: str) -> list[Any]:
        return [item for node in cast("list[list[Any]]", self._outer.exchange(inside, what)) for item in node]

    def max(self, values: Sequence[float], what: str = "a small max") -> list[float]:
        return self._outer.max(self._inner.max(values, what), what)

    def sum(self, values: Sequence[float], what: str = "a small sum") -> list[float]:
        return fold(self._all(self._inner.exchange([float(value) for value in values], what), what), "sum")

    def broadcast(self, key: str, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        node, local = divmod(source, self.ranks_per_node)
        if self._local == local:
            self._outer.broadcast(key, tensors, node)
        self._inner.broadcast(key, tensors, local)

    # The end

    def report(self, text: str) -> None:
        for part in self._parts():
            part.report(text)

    def _parts(self) -> list[Transport]:
        return [self._inner, self._outer, *([] if self._direct is None else [self._direct])]

    def cause(self) -> str | None:
        return next((cause for part in self._parts() if (cause := part.cause()) is not None), None)

    def close(self) -> None:
        exits.unlisten(self)
        for part in self._parts():
            part.close()
        self._reduces.clear()
        self._gathers.clear()


class _Reduce:
    """A reduction inside the node, and then between the nodes."""

    __slots__ = ("_across", "_begin", "_inside", "_transport", "wire")

    def __init__(
        self, transport: NodesTransport, wire: TransportBuffer, inside: Work, begin: Callable[[], Work]
    ) -> None:
        self._transport, self.wire, self._inside, self._begin = transport, wire, inside, begin
        self._across: Work | None = None

    def advance(self) -> None:
        if self._across is None and self._inside.poll():
            self._across = self._begin()

    def poll(self) -> bool:
        self._transport._progress()
        return self._across is not None and self._across.poll() and self._ended()

    def wait(self) -> None:
        self._inside.wait()
        self.advance()
        self._transport._progress()
        assert self._across is not None
        self._across.wait()
        self._ended()

    def _ended(self) -> bool:
        if self in self._transport._reduces:
            self._transport._reduces.remove(self)
        return True


class _Gather:
    """A gather from other nodes, unless the rows are here already, and then from the ranks of this node."""

    __slots__ = ("_begin", "_came", "_ended", "_relay", "_transport")

    def __init__(
        self, transport: NodesTransport, relay: _NodeCache, came: Work | None, begin: Callable[[], list[Work]]
    ) -> None:
        self._transport, self._relay, self._came, self._begin = transport, relay, came, begin
        self._ended = False

    def poll(self) -> bool:
        # Gloo does not say whether a message is there.
        return self._ended

    def wait(self) -> None:
        if self._ended:
            return
        transport = self._transport
        if self._came is not None:
            self._came.wait()
            transport._inner.hand_on(self._relay.token)
            transport._handed = True
        for work in self._begin():
            work.wait()
        self._ended = True
        transport._gathers.remove(self)


def _span(segments: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Returns the range that covers all segments: the first element of any, and the end of the last."""
    held = [(at, at + numel) for at, numel in segments if numel]
    return (min(at for at, _ in held), max(end for _, end in held)) if held else (0, 0)


def _disjoint(cuts: Cuts) -> bool:
    """Whether no element of the transport buffer belongs to two ranks: then it can hold the rows of all."""
    held = sorted((at, at + numel) for segments in cuts for at, numel in segments if numel)
    return all(before[1] <= after[0] for before, after in pairwise(held))


def _is_there(memory: torch.Tensor, segments: Sequence[tuple[int, int]], out: Sequence[torch.Tensor]) -> bool:
    """Whether the targets of a gather are the very segments of this rank's own transport buffer."""
    start, size = memory.data_ptr(), memory.element_size()
    return all(
        numel == 0 or to.data_ptr() == start + at * size
        for (at, numel), to in zip(segments, out, strict=True)
    )
