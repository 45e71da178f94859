"""Counts the bytes that a rank sends in a step, by kind and by link, and what sending takes of the device.

The closed forms are those that the transports count by. Integers only.

N ranks on nodes of L, K = N/L nodes. Of every byte a flat exchange sends (N-1)/N, and (N-L)/N leaves the
node. An exchange in two levels (`transport="nodes"`, `node_cache=True`) sends (L-1)/L inside the node and
(K-1)/N to other nodes. Codes of gradients go from every rank to every rank, so they are always flat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from zeroshard.compress import Codec, Delta, MeanCodec
from zeroshard.sync_policies import Local, choices_of

from .codes import wire_bytes
from .division import ALONE, ModelLayout
from .sharding import PackLayout, ShardSpec, buckets, slots_for
from .specs import WIDTHS, BucketSpec, BufferBytes, GatherGroupSpec


@dataclass
class SentBytes:
    """Bytes that a rank sends in a step on average, in `total` and of those `between` nodes, by kind.
    `reductions`: of what goes between nodes, codes that every rank sends to every rank."""

    world: int
    each: int  # ranks of a node
    levels: bool  # whether exchanges have two levels
    total: dict[str, int] = field(default_factory=dict)
    between: dict[str, int] = field(default_factory=dict)
    reductions: int = 0

    def add(self, kind: str, size: int, all_to_all: bool = False, cached: bool = False) -> None:
        """An exchange of `size` bytes among all ranks; `cached`: the node has what comes from others."""
        if self.levels and not all_to_all:
            between = 0 if cached else size * (self.world // self.each - 1) // self.world
            total = size * (self.each - 1) // self.each + between
        else:
            between = size * (self.world - self.each) // self.world
            total = size * (self.world - 1) // self.world
        self.total[kind] = self.total.get(kind, 0) + total
        if self.each < self.world:
            self.between[kind] = self.between.get(kind, 0) + between
        self.reductions += between if all_to_all else 0

    def through_port(self, rings: bool) -> int:
        """Bytes that take this rank's share of its node's port. Where one library joins all ranks in `rings`,
        as NCCL does, every byte enters a node once, and its ranks share that."""
        between = sum(self.between.values())
        return self.reductions + (between - self.reductions) // (
            self.each if rings and not self.levels else 1
        )

    @property
    def inside(self) -> int:
        """Bytes to ranks of the same node."""
        return sum(self.total.values()) - sum(self.between.values())


def sent_by_rank(setup: ModelLayout, ranks_per_node: int | None = None, passes: int = 1) -> SentBytes:
    """What goes to other ranks in a step of so many forward and backward passes. Padding, flags and
    agreements are left out; of a codec for rows, all rows count."""
    world, each = setup.world, min(ranks_per_node or setup.world, setup.world)
    asked = setup.options.node_cache or setup.options.transport == "nodes"
    sent = SentBytes(world, each, asked and 1 < each < world)
    if world == 1:
        return sent
    for bucket in setup.buckets if setup.reduces else ():
        sent.add("reduce", _travels(bucket, bucket.wire), isinstance(bucket.codec, Codec))
        if setup.options.stage == 0 and not isinstance(bucket.codec, MeanCodec):  # means go to all already
            sent.add("reduce", _travels(bucket, bucket.landed), isinstance(bucket.codec, Codec))
    if setup.options.stage == 0:
        return sent
    times = Counter[str]() if setup.resident else setup.unit_gathers.lent.times
    for gather_group in setup.gather_groups:
        size = _gathered(setup, gather_group)
        if gather_group.keeps:
            sent.add("publish", size)
            continue
        changes = isinstance(gather_group.codec, Delta)
        for number in range(1 if changes else passes * times[gather_group.unit]):
            sent.add("gather", size, cached=setup.options.node_cache and number > 0)
    return sent


def _gathered(setup: ModelLayout, gather_group: GatherGroupSpec) -> int:
    """Bytes of a gather group's rows on all ranks, as they travel."""
    numel, codec = sum(slot.numel for slot in gather_group.slots if slot.split != "copy"), gather_group.codec
    return codec.wire_bytes(numel) if codec else numel * WIDTHS[gather_group.compute]


def _travels(bucket: BucketSpec, dtype: str) -> int:
    """Bytes of a bucket's whole gradient on its way."""
    codec, numel = bucket.codec, sum(w.numel for w in bucket.weights)
    if isinstance(codec, MeanCodec):
        return 2 * WIDTHS["float32"] * sum(sum(codec.lengths(w.shape)) for w in bucket.weights)
    return codec.wire_bytes(numel) if isinstance(codec, Codec) else numel * WIDTHS[dtype]


def stage_bytes(setup: ModelLayout) -> int:
    """Device memory that a staged transport keeps for what passes through it: one stage for each dtype, as
    large as its largest operation needs. No kind of `run.stats()` has it."""
    if not setup.traits.staged or setup.world == 1:
        return 0
    most: dict[str, int] = {}

    def need(dtype: str, numel: int) -> None:
        most[dtype] = max(most.get(dtype, 0), numel)

    world = setup.world
    for bucket in setup.buckets if setup.reduces else ():
        if bucket.codec is not None:
            if isinstance(bucket.codec, Codec):
                need("uint8", wire_bytes(bucket.codec, bucket.pack, WIDTHS[bucket.wire]))
            continue
        own, total = bucket.pack.shard(setup.rank), bucket.wire_numel
        each = max(bucket.pack.shard(0), own)
        even = each * world == total
        if WIDTHS[bucket.wire] == 2:
            need(bucket.wire, own * world)
            need("float32", own if bucket.landed != "float32" else 0)
        elif not even or bucket.landed != bucket.wire:
            need(bucket.wire, each + (0 if even else each * world))
        if setup.options.stage == 0 and setup.behind:
            need("uint8", each * world * WIDTHS[bucket.landed])
        elif setup.options.stage == 0 and not ShardSpec("", (each * world,), world).straight:
            need(bucket.landed, each * (world + 1))
    for gather_group in setup.gather_groups if setup.options.stage else ():
        if any(slot.split != "copy" for slot in gather_group.slots):
            staged = sum(slot.most for slot in gather_group.slots if not slot.straight) * (world + 1)
            past = sum(slot.most for slot in gather_group.slots if slot.straight)
            need(gather_group.compute, staged + (past if gather_group.rows != "device" else 0))
    return sum(numel * WIDTHS[dtype] for dtype, numel in most.items())


def received_bytes(setup: ModelLayout) -> int:
    """Memory that messages arrive in, and leave from: a stage for each wire, and one for each gather group of
    what is short."""
    if not setup.traits.direct or setup.world == 1:
        return 0
    total = sum(_short_bytes(setup, gather_group) for gather_group in setup.gather_groups)
    for ring in setup.rings if setup.reduces else ():
        most: dict[int, int] = {}
        for turn, number in zip(ring.turns, ring.buckets, strict=True):
            most[turn] = max(most.get(turn, 0), setup.buckets[number].pack.shard(setup.rank))
        if ring.codec is None:
            total += (setup.world - 1) * sum(most.values()) * WIDTHS[ring.dtype]
    return total


def _short_bytes(setup: ModelLayout, gather_group: GatherGroupSpec) -> int:
    """What a gather of a gather group passes through on all ranks together: segments that do not travel
    alone."""
    if gather_group.codec is not None or all(slot.split == "copy" for slot in gather_group.slots):
        return 0
    width, total = WIDTHS[gather_group.compute], 0
    for band in gather_group.pack.bands:
        short = [n * width for n in band.held if 0 < n * width < ALONE]
        total += len(band) * sum(short) if len(short) > 1 else 0
    return total


def meeting_bytes(setup: ModelLayout) -> BufferBytes:
    """What messages arrive in. And what ranks that train apart keep to meet: of every parameter a wire and
    the mean's rows, and as state the anchor and the momentum of the outer step."""
    total = BufferBytes(buckets=received_bytes(setup))
    for policy in choices_of(setup.options.sync):
        if isinstance(policy, Local):
            for dtype, names in (chunk for part in _chunks(setup, policy) for chunk in part):
                shapes = [(name, setup.tensors.trainable[name].shape) for name in names]
                pack = meeting_pack(shapes, setup.world)
                wire, shard = pack.wire * WIDTHS[dtype], pack.shards[setup.rank] * WIDTHS[dtype]
                total += BufferBytes(buckets=wire + shard, state=2 * shard)
    return total


def meeting_pack(shapes: Sequence[tuple[str, tuple[int, ...]]], world: int) -> PackLayout:
    """How parameters of which every rank has its own lie when ranks meet: by rows at any stage."""
    return PackLayout(tuple(slots_for(shapes, world, "rows")), world)


def _chunks(setup: ModelLayout, policy: Local) -> list[list[tuple[str, list[str]]]]:
    masters = {name: master for name, (_, master) in setup.tensors.dtypes.items()}
    trainable = setup.tensors.trainable.items()
    members = [(name, masters[name], w.numel * WIDTHS[masters[name]]) for name, w in trainable]
    return chunks(members, policy.fragments, setup.options.bucket_bytes)


def chunks(
    members: Sequence[tuple[str, str, int]], fragments: int, limit: int
) -> list[list[tuple[str, list[str]]]]:
    """Who meets together. `members`: name, dtype and bytes of every parameter. They are cut into fragments of
    about the same size, and each of those into chunks of one dtype and at most `limit` bytes.

    >>> chunks([("a", "f", 4), ("b", "f", 4), ("c", "f", 8), ("d", "h", 2)], fragments=2, limit=8)
    [[('f', ['a', 'b']), ('f', ['c'])], [('h', ['d'])]]
    """
    share, at = -(-sum(size for _, _, size in members) // fragments), 0
    parts: list[list[tuple[str, str, int]]] = [[] for _ in range(fragments)]
    for member in members:
        parts[min(at // max(share, 1), fragments - 1)].append(member)
        at += member[2]
    return [
        [
            (dtype, names)
            for dtype in dict.fromkeys(of for _, of, _ in part)
            for names in buckets([(name, size) for name, of, size in part if of == dtype], limit)
        ]
        for part in parts
    ]
