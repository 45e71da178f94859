"""Measures the links between ranks: how long messages of several sizes take between two ranks while the
others are quiet, and how long a reduction takes in which all take part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from time import perf_counter

import torch

from zeroshard.comm import Region, Transport

SIZES = (64, 4096, 65536, 2**20, 2**23)
EVERY_PAIR = 8  # ranks up to which all pairs are measured; beyond, each with its neighbour and the opposite
LEAST, MOST = 3, 200  # times that a message is sent


@dataclass(frozen=True)
class Sample:
    """Bytes that a rank sent, and the seconds that they took on their way."""

    size: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.size / self.seconds


@dataclass(frozen=True)
class Link:
    """Between two ranks. `samples`: by size, the smallest first."""

    first: int
    second: int
    inside: bool
    samples: tuple[Sample, ...]

    @property
    def latency(self) -> float:
        return self.samples[0].seconds

    @property
    def rate(self) -> float:
        """Bytes a second of the largest messages."""
        return self.samples[-1].rate


@dataclass(frozen=True)
class Links:
    """What was measured. `nodes[r]`: the node of rank r; `together`: a rank's part of a reduction of all."""

    transport: str
    nodes: tuple[int, ...]
    pairs: tuple[Link, ...]
    together: tuple[Sample, ...]

    @property
    def ranks(self) -> int:
        return len(self.nodes)

    @property
    def node_count(self) -> int:
        return max(self.nodes) + 1

    def of(self, inside: bool) -> list[Link]:
        """The links inside nodes, or those between nodes."""
        return [link for link in self.pairs if link.inside == inside]

    def typical(self, inside: bool) -> list[Sample]:
        """By size, the median over such links."""
        chosen = self.of(inside)
        return [
            Sample(row[0].size, median(sample.seconds for sample in row))
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


def measure(transport: Transport, seconds: float = 0.05, sizes: Sequence[int] = SIZES) -> Links:
    """Every rank calls it, with the same arguments. `seconds`: about as long for each size and pair."""
    ordered = sorted(sizes)
    wire = transport.allocate("net pairs", ordered[-1], torch.uint8)
    nodes = tuple(transport.nodes)
    pairs = []
    for first, second in _pairs(transport.size):
        samples = [_between(transport, wire, first, second, size, seconds) for size in ordered]
        pairs.append(Link(first, second, nodes[first] == nodes[second], tuple(samples)))
    together = tuple(_together(transport, size, seconds) for size in ordered)
    transport.fill(wire)
    transport.barrier("net is measured")
    transport.free(wire)
    return Links(transport.name, nodes, tuple(pairs), together)


def _pairs(ranks: int) -> Iterator[tuple[int, int]]:
    if ranks <= EVERY_PAIR:
        yield from combinations(range(ranks), 2)
        return
    for rank in range(ranks):
        for other in ((rank + 1) % ranks, (rank + ranks // 2) % ranks):
            yield rank, other


def _between(
    transport: Transport, wire: Region, first: int, second: int, size: int, seconds: float
) -> Sample:
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
        transport.deal("net", "pair", wire, offers, takes, land).wait()

    def once() -> None:
        send(first, second)
        send(second, first)

    return Sample(size, _time(transport, once, seconds, rank in (first, second)) / 2)


def _together(transport: Transport, size: int, seconds: float) -> Sample:
    """A reduction to which every rank brings `size` bytes."""
    piece = max(size // 4 // transport.size, 1)
    wire = transport.allocate(f"net {size}", piece * transport.size, torch.float32)
    out = torch.empty(piece, device=transport.device)

    def once() -> None:
        transport.fill(wire)
        transport.reduce("net", "together", wire, [piece] * transport.size, out, 1.0).wait()

    took = _time(transport, once, seconds, True)
    transport.fill(wire)
    transport.free(wire)
    return Sample(4 * piece * (transport.size - 1), took)


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
