"""The bytes that meetings of ranks take beside their wires: what a transport's operations pass through, and
what ranks that train apart keep. Integers only."""

from __future__ import annotations

from .codec import Codec
from .coding import wire_bytes
from .division import Division
from .layout import Pack, buckets, slots_for
from .policy import Local, choices_of
from .shapes import WIDTHS, Buffers, Weight


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
        each, total = max(bucket.piece(0), bucket.piece(setup.rank)), bucket.wire_numel
        even = each * world == total
        if WIDTHS[bucket.wire] == 2:
            need(bucket.wire, bucket.piece(setup.rank) * world)
            need("float32", bucket.piece(setup.rank) if bucket.landed != "float32" else 0)
        elif not even or bucket.landed != bucket.wire:
            need(bucket.wire, each + (0 if even else each * world))
        if setup.options.stage == 0 and setup.behind:
            need("uint8", each * world * WIDTHS[bucket.landed])
        elif setup.options.stage == 0:
            need(bucket.landed, each * (world + 1))
    for bundle in setup.bundles if setup.options.stage else ():
        if any(slot.split != "copy" for slot in bundle.slots):
            need(bundle.compute, sum(slot.most for slot in bundle.slots) * (world + 1))
    return sum(numel * WIDTHS[dtype] for dtype, numel in most.items())


def meeting_bytes(setup: Division) -> Buffers:
    """What ranks that train apart keep to meet: of every parameter a wire and the mean's rows, and as state
    the anchor and the momentum of the outer step."""
    total = Buffers()
    weights = [w for unit in setup.units for w in unit.weights if w.trainable]
    for policy in choices_of(setup.options.sync):
        if isinstance(policy, Local):
            for dtype, group in _chunks(setup, weights, policy.fragments):
                shapes = [(w.name, w.shape) for w in group]
                pack = Pack(tuple(slots_for(shapes, setup.world, "rows")), setup.world)
                wire, piece = pack.wire * WIDTHS[dtype], pack.pieces[setup.rank] * WIDTHS[dtype]
                total += Buffers(buckets=wire + piece, state=2 * piece)
    return total


def _chunks(setup: Division, weights: list[Weight], fragments: int) -> list[tuple[str, list[Weight]]]:
    """Parameters that meet together, with the dtype of their homes; cut as `sync.local` does."""
    sizes = {w.name: w.numel * WIDTHS[setup.dtypes(w)[1]] for w in weights}
    share, at = -(-sum(sizes.values()) // fragments), 0
    parts: list[list[Weight]] = [[] for _ in range(fragments)]
    for weight in weights:
        parts[min(at // max(share, 1), fragments - 1)].append(weight)
        at += sizes[weight.name]
    result = []
    for part in parts:
        for dtype in dict.fromkeys(setup.dtypes(w)[1] for w in part):
            by_name = {w.name: w for w in part if setup.dtypes(w)[1] == dtype}
            for names in buckets([(n, sizes[n]) for n in by_name], setup.options.bucket_bytes):
                result.append((dtype, [by_name[n] for n in names]))
    return result
