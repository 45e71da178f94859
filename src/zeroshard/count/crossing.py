"""What a rank sends in a step, by kind and by link. Integers only; the closed forms are those that the
transports count by.

N ranks on nodes of L, K = N/L nodes. Of every byte a flat exchange sends (N-1)/N, and (N-L)/N leaves the
node. An exchange in two levels (`transport="nodes"`, `node_cache=True`) sends (L-1)/L inside the node and
(K-1)/N to other nodes. Codes of gradients go from every rank to every rank, so they are always flat.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from zeroshard.codec import Codec, LowRank

from .division import Division
from .lending import times_gathered
from .shapes import WIDTHS, Bucket, Bundle


@dataclass
class Sent:
    """Bytes that a rank sends in a step on average, in `total` and of those `between` nodes, by kind.
    `dealt`: of what goes between nodes, codes that every rank sends to every rank."""

    world: int
    each: int  # ranks of a node
    levels: bool  # whether exchanges have two levels
    total: dict[str, int] = field(default_factory=dict)
    between: dict[str, int] = field(default_factory=dict)
    dealt: int = 0

    def add(self, kind: str, size: int, deal: bool = False, cached: bool = False) -> None:
        """An exchange of `size` bytes among all ranks; `cached`: the node has what comes from others."""
        if self.levels and not deal:
            inside = size * (self.each - 1) // self.each
            between = 0 if cached else size * (self.world // self.each - 1) // self.world
            self._count(kind, inside + between, between)
            return
        between = size * (self.world - self.each) // self.world
        self._count(kind, size * (self.world - 1) // self.world, between)
        self.dealt += between if deal else 0

    def _count(self, kind: str, total: int, between: int) -> None:
        self.total[kind] = self.total.get(kind, 0) + total
        if self.each < self.world:
            self.between[kind] = self.between.get(kind, 0) + between

    def through_port(self, rings: bool) -> int:
        """Bytes that take this rank's share of its node's port. Where one library joins all ranks in `rings`,
        as NCCL does, every byte enters a node once, and its ranks share that."""
        between = sum(self.between.values())
        return self.dealt + (between - self.dealt) // (self.each if rings and not self.levels else 1)

    @property
    def inside(self) -> int:
        """Bytes to ranks of the same node."""
        return sum(self.total.values()) - sum(self.between.values())


def sent_by_rank(setup: Division, ranks_per_node: int | None = None, passes: int = 1) -> Sent:
    """What goes to other ranks in a step of so many forward and backward passes. Padding, flags and
    agreements are left out; of a codec for rows, all rows count."""
    world, each = setup.world, min(ranks_per_node or setup.world, setup.world)
    asked = setup.options.node_cache or setup.options.transport == "nodes"
    sent = Sent(world, each, asked and 1 < each < world)
    if world == 1:
        return sent
    for bucket in setup.buckets if setup.reduces else ():
        sent.add("reduce", _travels(bucket, bucket.wire), isinstance(bucket.codec, Codec))
        if setup.options.stage == 0 and not isinstance(bucket.codec, LowRank):  # factors go to all already
            sent.add("reduce", _travels(bucket, bucket.landed), isinstance(bucket.codec, Codec))
    if setup.options.stage == 0:
        return sent
    times = Counter[str]() if setup.resident else times_gathered(setup.lends, setup.ahead, setup.course)
    for bundle in setup.bundles:
        size = _gathered(setup, bundle)
        if setup.keeps(bundle):
            sent.add("publish", size)
            continue
        for number in range(1 if setup.changes(bundle) else passes * times[bundle.unit]):
            sent.add("gather", size, cached=setup.options.node_cache and number > 0)
    return sent


def _gathered(setup: Division, bundle: Bundle) -> int:
    """Bytes of a bundle's rows on all ranks, as they travel."""
    numel, codec = sum(slot.numel for slot in bundle.slots if slot.split != "copy"), bundle.codec
    return codec.wire_bytes(numel) if codec and setup.codes(bundle) else numel * WIDTHS[bundle.compute]


def _travels(bucket: Bucket, dtype: str) -> int:
    """Bytes of a bucket's whole gradient on its way."""
    codec, numel = bucket.codec, sum(w.numel for w in bucket.weights)
    if isinstance(codec, LowRank):
        return 2 * WIDTHS["float32"] * sum(sum(codec.factors(w.shape)) for w in bucket.weights)
    return codec.wire_bytes(numel) if isinstance(codec, Codec) else numel * WIDTHS[dtype]
