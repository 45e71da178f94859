"""How many bytes the way of the gradients takes: wires, landings, and what codecs keep. Integers only; what
`wiring` makes, size by size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from zeroshard.codec import Codec, Compression, LowRank, Rows

from .coding import back_bytes, bodies_of, cut_of, rows_bytes, wire_bytes
from .shapes import WIDTHS, Bucket, Buffers

# Dtypes of wire and gradient, and the codec between.
Sort = tuple[str, str, Compression | None]
# Own rows of at least so many bytes stay in their gradients until they are added; see `bucket.held`.
HELD_BYTES = 1 << 15
ALONE = 1 << 18  # bytes; shorter segments of a gather over messages travel together
RING = 3  # wires in flight from stage 2 on: one filling, one travelling, one being summed


def rooms_of(sizes: Sequence[int]) -> list[int]:
    """How large the wires of a ring are that buckets of these sizes share, the largest first. Of so many
    neighbours as there are wires, each has one: so the first is as large as the largest bucket, the second as
    large as the second of any such neighbours. One tensor above all others, an embedding, counts once.

    >>> rooms_of([9, 4, 5, 4, 3, 4, 9])
    [9, 5, 4]
    """
    count = min(RING, len(sizes))
    windows = [sorted(sizes[i : i + count], reverse=True) for i in range(len(sizes) - count + 1)]
    return [max(room) for room in zip(*windows, strict=True)]


def turns_of(sizes: Sequence[int], rooms: Sequence[int]) -> list[int]:
    """Which of the wires each bucket takes: one that is large enough and that those before and behind it do
    not use, nor, if it can be, those beside them. What few wires are large enough for chooses first.

    >>> turns_of([4, 4, 4, 4], [4, 4, 4])
    [0, 1, 2, 0]
    >>> turns_of([9, 4, 5, 4, 3, 4, 9], [9, 5, 4])
    [0, 2, 1, 0, 2, 1, 0]
    """
    taken: dict[int, int] = {}
    fits = [[wire for wire, room in enumerate(rooms) if size <= room] for size in sizes]

    def distance(index: int, wire: int) -> int:
        near = (d for d in range(1, RING) if wire in (taken.get(index - d), taken.get(index + d)))
        return next(near, RING)

    for index in sorted(range(len(sizes)), key=lambda index: len(fits[index])):
        taken[index] = max(fits[index], key=partial(distance, index))
    return [taken[index] for index in range(len(sizes))]


def gradients_of(buckets: Sequence[Bucket], stage: int, travel: bool, rank: int, behind: bool) -> Buffers:
    """Wires and landings. Where gradients do not travel there is neither: the leaf's gradient becomes the
    home's, and lasts until `zero_grad`. One step behind, each bucket has its own wire and lands twice."""
    if not travel:
        alone = [b for b in buckets if b.part is None]
        once = sum(w.numel * WIDTHS[b.landed] for b in alone for w in b.weights if w.used)
        return Buffers(gradients=2 * once if behind else once)
    groups: dict[Sort, list[Bucket]] = {}
    for bucket in buckets:
        groups.setdefault((bucket.wire, bucket.landed, bucket.codec), []).append(bucket)
    users = [bucket for bucket in buckets if isinstance(bucket.codec, (Codec, Rows))]
    narrow = [bucket.piece(rank) for bucket in users if WIDTHS[bucket.landed] < 4]
    coded = [bucket.wire_numel for bucket in users if isinstance(bucket.codec, Codec)]
    total = Buffers(buckets=4 * max(coded, default=0) + 4 * max(narrow, default=0))
    for (_, _, codec), members in groups.items():
        if codec is None:
            total += _plain(members, stage, rank, behind)
        elif isinstance(codec, Codec):
            total += _coded(members, codec, stage, rank, behind)
        elif isinstance(codec, LowRank):
            total += sum((_factors(bucket, codec, stage, rank) for bucket in members), Buffers())
        else:
            total += _rows(members, stage, rank, behind)
    return total


def _plain(members: list[Bucket], stage: int, rank: int, behind: bool) -> Buffers:
    """Buckets of one pair of dtypes that travel as they are."""
    wire, dtype = members[0].wire, members[0].landed
    sizes = [bucket.wire_numel for bucket in members]
    numel = sum(rooms_of(sizes) if stage > 1 and not behind else sizes)
    wires = numel * WIDTHS[wire]
    pieces = sum(b.piece(rank) for b in members) * WIDTHS[dtype]
    if stage == 0 and behind:
        return Buffers(gradients=2 * numel * WIDTHS[dtype], buckets=wires + pieces)
    if stage == 0:  # where dtypes agree, the wire is the gradient
        whole = Buffers(gradients=numel * WIDTHS[dtype])
        return whole if dtype == wire else whole + Buffers(buckets=wires + pieces)
    landed = 2 * pieces if behind else pieces if stage > 1 or dtype != wire else 0
    return Buffers(gradients=wires + landed) if stage == 1 else Buffers(gradients=landed, buckets=wires)


def _coded(members: list[Bucket], codec: Codec, stage: int, rank: int, behind: bool) -> Buffers:
    """Buckets that travel through a codec: at any stage a ring of short wires (one step behind, one
    each), and what it has not sent."""
    total = Buffers()
    wire, landed = WIDTHS[members[0].wire], WIDTHS[members[0].landed]
    sizes = [wire_bytes(codec, bucket.pack, wire) for bucket in members]
    total += Buffers(
        buckets=sum(sizes if behind else rooms_of(sizes)),
        state=sum(codec.state_bytes(bucket.wire_numel) for bucket in members),
    )
    for bucket in members:
        pieces = bucket.piece(rank) * landed
        if stage > 0:
            total += Buffers(gradients=2 * pieces if behind else pieces)
            continue
        _, own = bodies_of(bucket.pack)[rank]
        total += Buffers(
            gradients=bucket.wire_numel * landed,
            buckets=pieces + back_bytes(codec, own, landed),
            state=codec.state_bytes(own),
        )
    return total


def _rows(members: list[Bucket], stage: int, rank: int, behind: bool) -> Buffers:
    """Parameters of which only the rows that were touched travel: room for all of them."""
    wire, landed = WIDTHS[members[0].wire], WIDTHS[members[0].landed]
    slots = [bucket.slots[0] for bucket in members]
    sizes = [sum(rows_bytes(slot, r, wire) for r in range(slot.world)) for slot in slots]
    total = Buffers(buckets=sum(sizes if behind else rooms_of(sizes)))
    for bucket, slot in zip(members, slots, strict=True):
        pieces = bucket.piece(rank) * landed
        if stage > 0:
            total += Buffers(gradients=2 * pieces if behind else pieces)
        else:
            back = rows_bytes(slot, rank, landed)
            total += Buffers(gradients=(bucket.full + 1) * landed, buckets=pieces + back)
    return total


def _factors(bucket: Bucket, codec: LowRank, stage: int, rank: int) -> Buffers:
    """Matrices that travel as thin ones: the matrices, what was not sent, the factors and their wires."""
    world, sizes = bucket.slots[0].world, [codec.factors(slot.shape) for slot in bucket.slots]
    cuts = cut_of(sum(p for p, _ in sizes) + len(sizes), world) + cut_of(sum(q for _, q in sizes), world)
    pieces, landed = bucket.piece(rank), WIDTHS[bucket.landed]
    return Buffers(
        gradients=landed * (pieces if stage > 0 else bucket.wire_numel),
        state=sum(codec.state_bytes(slot.shape) for slot in bucket.slots),
        buckets=4 * bucket.full + 4 * 2 * cuts * (world + 1) + (0 if stage > 0 else pieces * landed),
    )
