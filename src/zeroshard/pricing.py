"""What one way to run costs: bytes from `memory` and `timeline`, seconds from the machine's figures. No
torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .codec import Codec, LowRank
from .machine import Machine
from .memory import Setup
from .shapes import WIDTHS, Bucket
from .timeline import Segment


@dataclass(frozen=True)
class Seconds:
    """An estimate of a step: its `parts`, and the `step` as a whole, where what overlaps counts by its
    longest part."""

    parts: dict[str, float]
    step: float


def sent_by_rank(setup: Setup) -> dict[str, int]:
    """Bytes that a rank sends in a step on average: pieces to the other N - 1. Padding, flags and
    agreements are left out; of a codec for rows, all rows count."""
    if setup.world == 1:
        return {}
    others = setup.world - 1
    reduced = sum(_travels(b, b.wire) for b in setup.buckets) * others // setup.world
    if setup.options.stage == 0:
        back = [b for b in setup.buckets if not isinstance(b.codec, LowRank)]  # factors go to all already
        return {"reduce": reduced + sum(_travels(b, b.landed) for b in back) * others // setup.world}
    size, gather = {unit.name: 0 for unit in setup.units}, setup.options.gather
    published = 0
    for bundle in setup.bundles:
        numel = sum(slot.numel for slot in bundle.slots if slot.split != "copy")
        coded = gather is not None and setup.codes(bundle)
        moved = gather.wire_bytes(numel) if gather and coded else numel * WIDTHS[bundle.compute]
        if setup.keeps(bundle):
            published += moved
        else:
            size[bundle.unit] += moved
    sent = {"reduce": reduced}
    if published or setup.resident:
        sent["publish"] = published * others // setup.world
    if not setup.resident:
        kept = size[setup.units[0].name] + (size[setup.units[-1].name] if len(setup.units) > 1 else 0)
        sent["gather"] = (2 * sum(size.values()) - kept) * others // setup.world
    return sent


def _travels(bucket: Bucket, dtype: str) -> int:
    """Bytes of a bucket's whole gradient on its way."""
    codec, numel = bucket.codec, sum(w.numel for w in bucket.weights)
    if isinstance(codec, LowRank):
        return 2 * WIDTHS["float32"] * sum(sum(codec.factors(w.shape)) for w in bucket.weights)
    return codec.wire_bytes(numel) if isinstance(codec, Codec) else numel * WIDTHS[dtype]


def seconds_of(
    setup: Setup, segments: Sequence[Segment], machine: Machine, ranks_per_node: int, sent: dict[str, int]
) -> Seconds:
    """Communication, copies and the overlapped host update run beside the computation, except for gathers
    that nothing announces (`prefetch=0`) and transports that this thread drives (shared memory)."""
    work = sum(s.flops + (s.back or s.flops * (3 if setup.recomputes(s.unit) else 2)) for s in segments)
    narrow = any(WIDTHS[b.compute] <= 2 for b in setup.bundles)
    compute = work / ((machine.half if narrow else machine.full) * machine.efficiency)
    compute += sum(s.moved for s in segments) / machine.memory_rate
    rate = machine.link if setup.world <= ranks_per_node else machine.network
    exchange = sum(sent.values()) / rate + _messages(setup) * machine.latency
    alone = exchange if not setup.overlaps else sent.get("gather", 0) / rate if not _ahead(setup) else 0.0
    parts = {"compute": compute, "exchange": exchange}
    beside = {"compute": compute, "exchange": exchange - alone}
    held, width = _held(setup), min((WIDTHS[b.compute] for b in setup.bundles), default=4)
    touched = {rest: count * _touched(setup, width) for rest, count in held.items()}
    touched["device"] += held["device"] * _widened(setup, width)
    last = 0.0  # what comes after all that runs side by side
    if touched["device"]:
        parts["update"] = last = touched["device"] / machine.memory_rate
    away = held["host"] + held["disk"]
    if away or setup.streamed:
        streamed = sum(b.body(setup.rank) for b in setup.bundles if setup.streams(b))
        # Gradients go out while weights come in; streamed weights come in twice more, forward and backward.
        parts["copies"] = beside["copies"] = (away + 2 * streamed) * width / machine.pcie
    if away:
        # The copies of gradients and weights go through the same memory.
        through = touched["host"] + touched["disk"] + 2 * away * width
        update = through * ranks_per_node / machine.host_rate
        parts["host update"] = update
        native = bool(setup.parts) and all(part.native for part in setup.parts)
        beside, last = (beside | {"host update": update}, last) if native else (beside, last + update)
    if held["disk"]:
        parts["disk"] = beside["disk"] = 2 * setup.held.disk * ranks_per_node / machine.disk_rate
    return Seconds(parts, max(beside.values()) + alone + last)


def _ahead(setup: Setup) -> bool:
    return setup.options.prefetch > 0 or setup.resident


def _messages(setup: Setup) -> float:
    """Exchanges of a step, each as deep as a tree over the ranks: what small buckets cost."""
    if setup.world == 1:
        return 0.0
    gathers = sum(1 if setup.keeps(bundle) else 2 for bundle in setup.bundles)
    return (len(setup.buckets) + gathers) * math.log2(setup.world)


def _held(setup: Setup) -> dict[str, int]:
    """Elements that this rank updates, by the tier that their state rests in."""
    held = {"device": 0, "host": 0, "disk": 0}
    for bundle in setup.bundles:
        held[setup.state_rest(bundle)] += sum(slot.held(setup.rank) for slot in bundle.slots)
    return held


def _touched(setup: Setup, width: int) -> int:
    """Bytes that an update reads and writes for each element: master, moments, gradient, weight."""
    master = max((WIDTHS[b.master] for b in setup.bundles), default=4)
    moments = max((rule.moments for rule in setup.rules), default=0)
    return 2 * master * (1 + moments) + 2 * width


def _widened(setup: Setup, width: int) -> int:
    """Bytes for each element on the device beside that: torch's own step needs the gradient in the master's
    dtype, written and read, and reads the master again to make the weight."""
    master = max((WIDTHS[b.master] for b in setup.bundles), default=4)
    return 3 * master if width < master else 0
