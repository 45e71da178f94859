"""The bytes that meetings of ranks take beside their wires: what a transport's operations pass through, and
what ranks that train apart keep. Integers only."""

from __future__ import annotations

from collections.abc import Sequence

from zeroshard.codec import Codec
from zeroshard.policy import Local, choices_of

from .coding import wire_bytes
from .division import Division
from .layout import Pack, Slot, buckets, slots_for
from .shapes import WIDTHS, Bucket, Buffers, Bundle
from .wires import ALONE, rooms_of, turns_of


def stage_bytes(setup: Division) -> int:
    """Device memory that a staged transport keeps for what passes through it: one stage for each dtype, as
    large as its largest operation needs. No kind of `run.stats()` has it."""
    if not setup.staged or setup.world == 1:
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
        own, total = bucket.piece(setup.rank), bucket.wire_numel
        each = max(bucket.piece(0), own)
        even = each * world == total
        if WIDTHS[bucket.wire] == 2:
            need(bucket.wire, own * world)
            need("float32", own if bucket.landed != "float32" else 0)
        elif not even or bucket.landed != bucket.wire:
            need(bucket.wire, each + (0 if even else each * world))
        if setup.options.stage == 0 and setup.behind:
            need("uint8", each * world * WIDTHS[bucket.landed])
        elif setup.options.stage == 0 and not Slot("", (each * world,), world).straight:
            need(bucket.landed, each * (world + 1))
    for bundle in setup.bundles if setup.options.stage else ():
        if any(slot.split != "copy" for slot in bundle.slots):
            staged = sum(slot.most for slot in bundle.slots if not slot.straight) * (world + 1)
            past = sum(slot.most for slot in bundle.slots if slot.straight)
            need(bundle.compute, staged + (past if setup.streams(bundle) else 0))
    return sum(numel * WIDTHS[dtype] for dtype, numel in most.items())


def received_bytes(setup: Division) -> int:
    """Memory that messages arrive in, and leave from: a stage for each wire, and one for each bundle of what
    is short."""
    if not setup.direct or setup.world == 1:
        return 0
    sorts: dict[tuple[str, str], list[Bucket]] = {}
    for bucket in setup.buckets if setup.reduces else ():
        if bucket.codec is None:
            sorts.setdefault((bucket.wire, bucket.landed), []).append(bucket)
    total = sum(_short_bytes(setup, bundle) for bundle in setup.bundles)
    for (wire, _), members in sorts.items():
        sizes = [bucket.wire_numel for bucket in members]
        own = setup.behind or not setup.options.shards_grads
        most: dict[int, int] = {}
        for turn, bucket in zip(
            range(len(sizes)) if own else turns_of(sizes, rooms_of(sizes)), members, strict=True
        ):
            most[turn] = max(most.get(turn, 0), bucket.piece(setup.rank))
        total += (setup.world - 1) * sum(most.values()) * WIDTHS[wire]
    return total


def _short_bytes(setup: Division, bundle: Bundle) -> int:
    """What a gather of a bundle passes through on all ranks together: segments that do not travel alone."""
    if setup.codes(bundle) or all(slot.split == "copy" for slot in bundle.slots):
        return 0
    width, total = WIDTHS[bundle.compute], 0
    for band in Pack(bundle.slots, setup.world).bands:
        short = [n * width for n in band.held if 0 < n * width < ALONE]
        total += len(band) * sum(short) if len(short) > 1 else 0
    return total


def meeting_bytes(setup: Division) -> Buffers:
    """What messages arrive in. And what ranks that train apart keep to meet: of every parameter a wire and
    the mean's rows, and as state the anchor and the momentum of the outer step."""
    total = Buffers(buckets=received_bytes(setup))
    for policy in choices_of(setup.options.sync):
        if isinstance(policy, Local):
            for dtype, names in (chunk for part in _chunks(setup, policy) for chunk in part):
                shapes = [(name, setup.trainable[name].shape) for name in names]
                pack = Pack(tuple(slots_for(shapes, setup.world, "rows")), setup.world)
                wire, piece = pack.wire * WIDTHS[dtype], pack.pieces[setup.rank] * WIDTHS[dtype]
                total += Buffers(buckets=wire + piece, state=2 * piece)
    return total


def _chunks(setup: Division, policy: Local) -> list[list[tuple[str, list[str]]]]:
    masters = {w.name: setup.dtypes(w)[1] for w in setup.trainable.values()}
    members = [(w.name, masters[w.name], w.numel * WIDTHS[masters[w.name]]) for w in setup.trainable.values()]
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
