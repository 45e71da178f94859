"""Measures the links between ranks, and says which strategy suits them (`zeroshard net`).

Messages of several sizes go between two ranks while the others are quiet, and then all ranks reduce together.
The advice is a pure function of what was measured, the model's size and the step's length.

It is an estimate: exchanges take their bytes at the rate that a rank reached while all ranks sent, and their
messages at the latency of the slowest link. Reductions of a step run beside its backward pass, which is two
thirds of its computation; a delayed update gives them the whole of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from time import perf_counter

import torch

from zeroshard.comm import Transport, TransportBuffer
from zeroshard.compress import Int8, TopK
from zeroshard.sizes import show_bytes
from zeroshard.sync_policies import Numerics

SIZES = (64, 4096, 65536, 2**20, 2**23)
EVERY_PAIR = 8  # ranks up to which all pairs are measured; beyond, each with its neighbour and the opposite
LEAST, MOST = 3, 200  # times that a message is sent


@dataclass(frozen=True)
class LinkSample:
    """Bytes that a rank sent, and the seconds that they took on their way."""

    size: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.size / self.seconds


@dataclass(frozen=True)
class LinkSpeed:
    """The speed of the link between two ranks. `samples`: by size, the smallest first."""

    first: int
    second: int
    inside: bool
    samples: tuple[LinkSample, ...]

    @property
    def latency(self) -> float:
        return self.samples[0].seconds

    @property
    def rate(self) -> float:
        """Bytes a second of the largest messages."""
        return self.samples[-1].rate


@dataclass(frozen=True)
class LinkSpeeds:
    """What was measured. `nodes[r]`: the node of rank r; `together`: a rank's part of a reduction of all."""

    transport: str
    nodes: tuple[int, ...]
    pairs: tuple[LinkSpeed, ...]
    together: tuple[LinkSample, ...]

    @property
    def ranks(self) -> int:
        return len(self.nodes)

    @property
    def node_count(self) -> int:
        return max(self.nodes) + 1

    def of(self, inside: bool) -> list[LinkSpeed]:
        """The links inside nodes, or those between nodes."""
        return [link for link in self.pairs if link.inside == inside]

    def typical(self, inside: bool) -> list[LinkSample]:
        """By size, the median over such links."""
        chosen = self.of(inside)
        return [
            LinkSample(row[0].size, median(sample.seconds for sample in row))
            for row in zip(*(link.samples for link in chosen), strict=True)
        ]

    @property
    def latency(self) -> float:
        """Of the slowest link."""
        return max(link.latency for link in self.pairs)

    @property
    def rate(self) -> float:
        """Bytes a second that a rank sends while all do."""
        return self.together[-1].rate


def measure(transport: Transport, seconds: float = 0.05, sizes: Sequence[int] = SIZES) -> LinkSpeeds:
    """Every rank calls it, with the same arguments. `seconds`: about as long for each size and pair."""
    ordered = sorted(sizes)
    wire = transport.allocate("net pairs", ordered[-1], torch.uint8)
    nodes = tuple(transport.nodes)
    pairs = []
    for first, second in _pairs(transport.size):
        samples = [_between(transport, wire, first, second, size, seconds) for size in ordered]
        pairs.append(LinkSpeed(first, second, nodes[first] == nodes[second], tuple(samples)))
    together = tuple(_together(transport, size, seconds) for size in ordered)
    transport.fill(wire)
    transport.barrier("net is measured")
    transport.free(wire)
    return LinkSpeeds(transport.name, nodes, tuple(pairs), together)


def _pairs(ranks: int) -> Iterator[tuple[int, int]]:
    if ranks <= EVERY_PAIR:
        yield from combinations(range(ranks), 2)
        return
    for rank in range(ranks):
        for other in ((rank + 1) % ranks, (rank + ranks // 2) % ranks):
            yield rank, other


def _between(
    transport: Transport, wire: TransportBuffer, first: int, second: int, size: int, seconds: float
) -> LinkSample:
    """There and back, halved."""
    landed = torch.empty(size, dtype=torch.uint8)
    rank, nothing = transport.rank, [(0, 0)] * transport.size

    def send(source: int, target: int) -> None:
        offers, takes = list(nothing), list(nothing)
        if rank == source:
            offers[target] = (0, size)
        if rank == target:
            takes[source] = (0, size)

        def land(parts: list[torch.Tensor]) -> None:
            if rank == target:
                landed.copy_(parts[source])

        transport.fill(wire)
        transport.all_to_all("net", "pair", wire, offers, takes, land).wait()

    def once() -> None:
        send(first, second)
        send(second, first)

    return LinkSample(size, _time(transport, once, seconds, rank in (first, second)) / 2)


def _together(transport: Transport, size: int, seconds: float) -> LinkSample:
    """A reduction to which every rank brings `size` bytes."""
    shard = max(size // 4 // transport.size, 1)
    wire = transport.allocate(f"net {size}", shard * transport.size, torch.float32)
    out = torch.empty(shard, device=transport.device)

    def once() -> None:
        transport.fill(wire)
        transport.reduce("net", "together", wire, [shard] * transport.size, out, 1.0).wait()

    took = _time(transport, once, seconds, True)
    transport.fill(wire)
    transport.free(wire)
    return LinkSample(4 * shard * (transport.size - 1), took)


def _time(transport: Transport, once: Callable[[], None], seconds: float, takes_part: bool) -> float:
    """Seconds of one call, the slowest rank's; as many calls as all ranks agree upon."""
    for _ in range(2):
        once()
    transport.barrier("net begins")
    started = perf_counter()
    once()
    first = perf_counter() - started if takes_part else 0.0
    count = max(LEAST, min(int(seconds / max(transport.max([first])[0], 1e-6)), MOST))
    transport.barrier("net goes on")
    started = perf_counter()
    for _ in range(count):
        once()
    took = perf_counter() - started if takes_part else 0.0
    return max(transport.max([took])[0] / count, 1e-9)


BACKWARD = 2 / 3
BUCKET = 25 * 2**20  # bytes of a message
TOLERATED = 0.1  # of a step, beyond the computation: up to this, the more faithful way is better
MANY = 1 << 20  # elements at which a codec's bytes are read off
STEPS = 16


@dataclass(frozen=True)
class AdvisedWay:
    """A strategy: what to pass to `shard`, the bytes that a rank sends in a step, the seconds that this
    takes, and those of them that no computation hides."""

    options: str
    numerics: Numerics
    sent: float
    exchange: float
    exposed: float


@dataclass(frozen=True)
class Advice:
    """All ways, the most faithful first, the one to take, and why."""

    ways: tuple[AdvisedWay, ...]
    best: AdvisedWay
    reasons: tuple[str, ...]


def advise(links: LinkSpeeds, parameters: float, step: float) -> Advice:
    """`parameters`: of the model, fp32; `step`: seconds that forward and backward compute."""
    share = (links.ranks - 1) / links.ranks
    whole = 4 * parameters * share
    ways = [
        _way(links, step, "stage=2", "exact", whole, whole),
        _way(links, step, 'stage=2, precision="bf16"', "rounding", whole / 2, whole / 2),
    ]
    each = links.ranks // links.node_count
    if links.node_count > 1 and each > 1:
        ways.insert(
            1, _way(links, step, 'stage=2, transport="nodes"', "rounding", whole / each, whole / each)
        )
    small = whole * Int8().wire_bytes(MANY) / (4 * MANY)
    ways += [
        _way(links, step, "stage=2, compress=zs.Int8(), gather=zs.Int8()", "rounding", small, small),
        _way(links, step, "stage=0, sync=zs.Delayed()", "approximate", 2 * whole, 0.0, hidden=1.0),
    ]
    sparse = whole * TopK(ratio=0.01).wire_bytes(MANY) / (4 * MANY)
    ways += [
        _way(links, step, "stage=0, compress=zs.TopK(ratio=0.01)", "approximate", sparse, sparse),
        _way(links, step, f"stage=0, sync=zs.Local(steps={STEPS})", "approximate", 2 * whole / STEPS, 0.0),
    ]
    best = next((way for way in ways if way.exposed <= TOLERATED * step), None)
    if best is None:
        best = min(ways, key=lambda way: way.exposed)
    return Advice(tuple(ways), best, _reasons(links, ways[0], best, step))


def _way(
    links: LinkSpeeds,
    step: float,
    options: str,
    numerics: Numerics,
    gradients: float,
    parameters: float,
    hidden: float = BACKWARD,
) -> AdvisedWay:
    sent = gradients + parameters
    messages = 2 * max(gradients / BUCKET, 1.0)
    exchange = sent / links.rate + messages * links.latency
    # New parameters are fetched while the first units compute, so a part of forward hides them too.
    room = hidden * step * gradients / sent + (1 - BACKWARD) * step * parameters / sent
    return AdvisedWay(options, numerics, sent, exchange, max(exchange - room, 0.0))


def _reasons(links: LinkSpeeds, exact: AdvisedWay, best: AdvisedWay, step: float) -> tuple[str, ...]:
    speed = f"a rank sends {show_bytes(links.rate)}/s while all send, {1e3 * links.latency:.3g} ms away"
    plain = (
        f"Exact and every step: {show_bytes(exact.sent)} in {exact.exchange:.3g} s, "
        f"{exact.exposed:.3g} s of it beside no computation ({step:.3g} s a step)."
    )
    if best is exact:
        return (f"{speed[0].upper()}{speed[1:]}.", plain, "That is hidden, or nearly: nothing to gain.")
    chosen = (
        f"{best.options}: {show_bytes(best.sent)} in {best.exchange:.3g} s, {best.exposed:.3g} s exposed "
        f"({best.numerics})."
    )
    verdict = (
        "It is the most faithful way that costs at most a tenth of a step."
        if best.exposed <= TOLERATED * step
        else "No way hides the exchange; this one leaves least of it."
    )
    return (f"{speed[0].upper()}{speed[1:]}.", plain, chosen, verdict)
