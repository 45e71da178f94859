"""How long a step of one way to run takes, estimated from the machine's figures. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zeroshard.compress import Codec, Delta, MeanCodec
from zeroshard.layout.memory import MemoryModel, StepSegment
from zeroshard.layout.specs import WIDTHS, BucketSpec
from zeroshard.layout.traffic import SentBytes
from zeroshard.machine import Machine

# Launches that take Python as long as our hooks on a unit take, and as a checkpoint takes beside its kernels:
# in forward and in backward. And as sending a part to the host takes, and its share of `optimizer.step()`.
HOOKED, RECOMPUTED, SENT, STEPPED = (5, 12), (24, 51), 12, 4
# And as one gather takes.
GATHERED = 14
# Launches for each weight that rests off the device, in forward and in backward: what autograd saves of it
# has to be found again in the buffer that it comes in. Where only its state does, next to nothing.
STREAMED = (4, 5)
# Launches for each rank's shard of what travels through a codec: its code, its flags, and the decoding.
CODED = 3
# Parts ahead of one that lands: transfer workers have taken four up, of which one is half done or already
# leaves.
IN_HAND = 3


@dataclass(frozen=True)
class StepSeconds:
    """An estimate of a step: its `parts`, and the `step` as a whole, where what overlaps counts by its
    longest part."""

    parts: dict[str, float]
    step: float


def seconds_of(
    setup: MemoryModel, segments: Sequence[StepSegment], machine: Machine, sent: SentBytes
) -> StepSeconds:
    """Communication, copies and the overlapped host update run beside the computation, except for gathers
    that nothing announces (`prefetch=0`) and transports that this thread drives (shared memory)."""
    computed = _compute(setup, segments, machine)
    compute = sum(computed) + (coding := _coding(setup, machine))
    exchange = _exchange(setup, machine, sent)
    gathers = sent.total.get("gather", 0) / max(sum(sent.total.values()), 1)
    announced = setup.options.prefetch > 0 or setup.resident
    alone = exchange if not setup.traits.overlaps else 0.0 if announced else exchange * gathers
    # Stage 0: sums go back to all ranks beside backward; as codes, when it is over. Between GPUs each can be
    # updated as soon as it is back.
    whole = setup.reduces and setup.options.stage == 0
    at_end = whole and (not machine.gpu or bool(setup.options.compress))
    if whole and setup.traits.overlaps and setup.options.compress:
        alone = exchange / 2
    parts = {"compute": compute, "exchange": exchange} | ({"codecs": coding} if coding else {})
    beside = {"compute": compute, "exchange": exchange - alone}
    held, width = _held(setup), min((WIDTHS[b.compute] for b in setup.gather_groups), default=4)
    each, widened = _touched(setup, width)
    touched = {rest: count * each for rest, count in held.items()}
    last = awaited = 0.0  # what comes after all that runs side by side; for what the next forward waits
    if touched["device"]:
        parts["update"] = touched["device"] / (machine.update_rate or machine.memory_rate)
        parts["update"] += held["device"] * widened / machine.memory_rate
        # Behind both; the host goes on with its own updates meanwhile.
        beside = {what: taken + parts["update"] for what, taken in beside.items()}
    away = held["host"] + held["disk"]
    streams = [b.pack.body(setup.rank) for b in setup.gather_groups if b.rows != "device"]
    if away or streams:
        # Gradients go out while weights come in; streamed weights come in twice more, forward and backward.
        parts["copies"] = beside["copies"] = (away + 2 * sum(streams)) * width / machine.pcie
    if away:
        update = (touched["host"] + touched["disk"]) * sent.each / machine.host_rate
        parts["host update"] = update
        if setup.parts and all(part.native for part in setup.parts):
            # Between its last update and the next gradient the host waits for the root.
            root = sum(_compute(setup, [s for s in segments if not s.unit], machine))
            beside["host update"] = update + root + (computed[1] if at_end else 0.0)
            behind = update - (0.0 if at_end else computed[1])
            awaited = _awaited(setup, update / away, width / machine.pcie, behind)
        else:
            last += update
    if held["disk"]:
        parts["disk"] = beside["disk"] = 2 * setup.held.disk * sent.each / machine.disk_rate
    if machine.gpu:  # elsewhere operations run when they are called, and have it among their own time
        beside_it = parts["host update"] if "host update" in beside else 0.0
        launched = _launched(setup, segments, machine, computed[1], beside_it)
        # Backward is over when the norm is known: the device has nothing to do until the step has been. The
        # host updates meanwhile.
        stepped = STEPPED * machine.launch * sum(part.native for part in setup.parts)
        first = _gathered_first(setup) * GATHERED * machine.launch
        parts["interpreter"] = sum(launched) + stepped + first
        awaited = max(awaited, stepped)
        # The device waits for Python in each pass that it is faster in, and makes up for it in no other.
        late = sum(max(late - work, 0.0) for late, work in zip(launched, computed, strict=True))
        beside["compute"] += late + first
    beside["compute"] += awaited
    return StepSeconds(parts, max(beside.values()) + alone + last)


def _compute(setup: MemoryModel, segments: Sequence[StepSegment], machine: Machine) -> tuple[float, float]:
    """Forward and backward: products by their operations, all else by the bytes that it moves, and a gap for
    every kernel."""
    narrow = any(WIDTHS[b.compute] <= 2 for b in setup.gather_groups)
    best = machine.half if narrow else machine.full
    ahead, behind = best * machine.efficiency, best * (machine.back_efficiency or machine.efficiency)

    def rest(moved: int, kernels: int) -> float:
        return moved / machine.memory_rate + kernels * machine.gap

    again = sum(s.flops for s in segments if (s.unit in setup.recomputed))
    back = sum(s.back or s.flops * (3 if (s.unit in setup.recomputed) else 2) for s in segments)
    twice = [s for s in segments if s.unit in setup.repeated]  # computed again, and backward again
    again += sum(s.flops for s in twice)
    back += sum(max(s.back, 3 * s.flops) for s in twice)
    return (
        sum(s.flops for s in segments) / ahead
        + rest(sum(s.moved for s in segments), sum(s.kernels for s in segments)),
        again / ahead
        + (back - again) / behind
        + rest(
            sum(s.moved_back for s in (*segments, *twice)), sum(s.kernels_back for s in (*segments, *twice))
        ),
    )


def _exchange(setup: MemoryModel, machine: Machine, sent: SentBytes) -> float:
    """Both links at once, and what every message costs."""
    inside, between = sent.inside / machine.link, sent.through_port(machine.gpu) / machine.network
    return max(inside, between) + _latency(setup, machine)


def _launched(
    setup: MemoryModel, segments: Sequence[StepSegment], machine: Machine, back: float, update: float
) -> tuple[float, float]:
    """What Python takes for forward and for backward, which takes the device `back` seconds. While the host
    updates, Python is slower: for `update` seconds, in backward and, as far as that is too short for them, in
    the next forward."""
    launches = [sum(s.kernels for s in segments), sum(s.kernels_back for s in segments)]
    for unit in (s.unit for s in segments if s.unit):
        for number in range(2):
            launches[number] += HOOKED[number] + RECOMPUTED[number] * (unit in setup.recomputed)
    launches[1] += SENT * sum(part.native for part in setup.parts)
    if setup.world > 1:
        launches = [count + GATHERED * sum(not b.keeps for b in setup.gather_groups) for count in launches]
    weights = sum(len(b.weights) for b in setup.gather_groups if b.rows != "device")
    launches = [count + each * weights for count, each in zip(launches, STREAMED, strict=True)]
    if setup.reduces:
        launches[1] += sum(_launches_to_send(bucket) for bucket in setup.buckets)
    forward, backward = (count * machine.launch for count in launches)
    inside = min(update, max(back, backward))
    return _dragged(forward, update - inside, machine.drag), _dragged(backward, inside, machine.drag)


def _gathered_first(setup: MemoryModel) -> int:
    """Gathers that are called before the device has anything to do: of all that stays there, which a step
    has made stale, and of what the first unit needs."""
    if setup.world == 1 or setup.options.stage == 0:
        return 0
    return sum(gather_group.keeps for gather_group in setup.gather_groups) + (not setup.resident)


def _launches_to_send(bucket: BucketSpec) -> int:
    """Beyond a copy for each gradient, which the rest has been timed with: more where some ranks have less of
    it than others; and codecs take each rank's shard by itself."""
    if isinstance(bucket.codec, Codec):
        return CODED * bucket.pack.world
    return max(bucket.pack.copies - len(bucket.slots), 0)


def _dragged(seconds: float, updating: float, drag: float) -> float:
    """Python's time for what takes it so long alone, beside so many seconds of the host's updates."""
    return seconds + min(seconds * drag, updating * drag / (1 + drag))


def _awaited(setup: MemoryModel, update: float, copy: float, behind: float) -> float:
    """The round trip of the gradient that lands last, at seconds an element: out, updated after those that
    the host has taken up if it is `behind` backward by so many seconds, and back. The next forward begins
    with that weight."""
    first = min((part for part in setup.parts), key=lambda part: min(w.number for w in part.weights))
    number = min((w.number for unit in setup.units for w in unit.weights if w.trainable), default=0)
    if all(w.number != number for w in first.weights):
        return 0.0  # it is updated on the device
    others = sorted(part.numel for part in setup.parts if part is not first)
    taken = min(len(others), IN_HAND) * others[len(others) // 2] if others else 0
    return first.numel * (update + 2 * copy) + min(taken * update, max(behind, 0.0))


def _coding(setup: MemoryModel, machine: Machine) -> float:
    """Gradients are encoded once and decoded where they land; rows are encoded once and decoded whole, as
    often as they are gathered."""
    moved = 0.0
    for bucket in setup.buckets if setup.reduces else ():
        if isinstance(bucket.codec, Codec):
            numel = sum(w.numel for w in bucket.weights)
            moved += _encoded(bucket.codec, numel, machine.gpu) + _decoded(bucket.codec, numel, machine.gpu)
        elif isinstance(bucket.codec, MeanCodec):  # read, its means, their product, and what was not sent
            moved += 5 * WIDTHS["float32"] * sum(w.numel for w in bucket.weights)
    for gather_group in setup.gather_groups:
        if gather_group.codec is not None:
            whole = sum(slot.numel for slot in gather_group.slots)
            moved += _encoded(gather_group.codec, gather_group.pack.body(setup.rank), machine.gpu)
            gathers = 1 if gather_group.keeps or isinstance(gather_group.codec, Delta) else 2
            moved += gathers * _decoded(gather_group.codec, whole, machine.gpu)
    return moved / machine.memory_rate


def _encoded(codec: Codec, numel: int, gpu: bool) -> float:
    """Bytes that take as long to copy as encoding takes: values read, what is kept of them read and written,
    codes written."""
    kept = 3 if codec.feedback else 1
    return (WIDTHS["float32"] * kept * numel + codec.wire_bytes(numel)) * _slowness(codec, gpu)[0]


def _decoded(codec: Codec, numel: int, gpu: bool) -> float:
    """The same for codes read and added to sums."""
    return (2 * WIDTHS["float32"] * numel + codec.wire_bytes(numel)) * _slowness(codec, gpu)[1]


def _slowness(codec: Codec, gpu: bool) -> tuple[float, float]:
    """How many times longer than a copy of the same bytes it takes to encode and to decode."""
    inner = codec.codec if isinstance(codec, Delta) else codec
    return inner.slower_on_gpu if gpu else inner.slower_on_cpu


def _latency(setup: MemoryModel, machine: Machine) -> float:
    """What a step's exchanges take beside their bytes, one after another: what small buckets cost. NCCL
    passes shards on along a ring through all devices of all nodes; the ranks of other transports are as deep
    as a tree."""
    if setup.world == 1:
        return 0.0
    gathers = sum(1 if gather_group.keeps else 2 for gather_group in setup.gather_groups)
    each = machine.latency * math.log2(setup.world)
    if machine.gpu:
        each = machine.latency + ring_seconds(setup.world, machine)
    return (len(setup.buckets) + gathers) * each


def ring_seconds(world: int, machine: Machine) -> float:
    """What a ring's hops take: one less than it has ranks, of which one less than it has nodes leave one."""
    nodes = -(-world // machine.node)
    return (world - nodes) * machine.hop + (nodes - 1) * machine.node_hop


def _held(setup: MemoryModel) -> dict[str, int]:
    """Elements that this rank updates, by the tier that their state rests in."""
    held = {"device": 0, "host": 0, "disk": 0}
    for gather_group in setup.gather_groups:
        held[gather_group.state] += sum(slot.held(setup.rank) for slot in gather_group.slots)
    return held


def _touched(setup: MemoryModel, width: int) -> tuple[int, int]:
    """Bytes that an update reads and writes for each element: master, moments, gradient, weight. And those
    that it does on the device beside: torch's own step needs the gradient in the master's dtype, written and
    read, and reads the master again to make the weight."""
    master = max((WIDTHS[b.master] for b in setup.gather_groups), default=4)
    moments = max((rule.moments for rule in setup.rules), default=0)
    return 2 * master * (1 + moments) + 2 * width, 3 * master if width < master else 0
