"""Counts the bytes that a rank holds, for what, and when, for any number of ranks. Integers only.

`MemoryModel.held` repeats, size by size, what `build` allocates: for a run on the CPU its figures are those
of `run.stats()`, to the byte. Here stand also how evenly ranks are loaded, and the ZeRO paper's table for
orientation."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from zeroshard.options import Options

from .division import ModelLayout, gradients_of
from .placement import (
    OffloadBuffers,
    Placement,
    Rest,
    TierBudget,
    TierBytes,
    TierRequest,
    UnitDemand,
    arrange,
)
from .prefetch import Sizes, most_lent, staging_bytes
from .specs import BLOCKS, GRAIN, REQUEST, WIDTHS, BufferBytes, OffloadGroupSpec, OptimizerRule
from .traffic import meeting_bytes, stage_bytes

WIDEN_BYTES = 512 * 2**20  # what a step widens at a time on a GPU, as in `step`
# What setups that differ in the units that they recompute have in common.
_SAME = (
    "places",
    "slots",
    "gather_groups",
    "small",
    "parts",
    "buckets",
    "stage",
    "update",
    "held",
    "arriving",
    "holding",
    "trainable",
    "_dtypes",
    "_owner_runs",
)


@dataclass(frozen=True)
class MemoryModel(ModelLayout):
    """A division and its bytes, each reckoned once."""

    @cached_property
    def places(self) -> Placement:
        """The tier of every unit."""
        offload, labels = self.options.offload, [unit.label for unit in self.units]
        if self.placement is not None:
            return self.placement
        if offload is None:
            return Placement.uniform(labels, "device")
        if offload.optimizer != "auto" and offload.parameters != "auto":
            return Placement.uniform(labels, offload.optimizer, offload.parameters)
        return placed(self)

    @cached_property
    def held(self) -> BufferBytes:
        """Every lasting buffer of a rank once its run has taken a step or two."""
        return (
            _weights(self)
            + gradients_of(self)
            + meeting_bytes(self)
            + _host(self)
            + BufferBytes(state=_moments(self, host=False).total(), gathered=gathered(self))
        )

    def recomputing(self, recompute: tuple[str, ...] | bool) -> MemoryModel:
        """The same with other units recomputed: no lasting buffer depends on it, but for units that are
        gathered while others wait for gradients."""
        made = replace(self, options=replace(self.options, recompute=recompute))
        same = [name for name in _SAME if name != "held" or not (self.visits or self.waiting)]
        made.__dict__.update({name: getattr(self, name) for name in same})
        return made

    @cached_property
    def stage(self) -> int:
        """`stage_bytes` of this, reckoned once."""
        return stage_bytes(self)

    @cached_property
    def update(self) -> int:
        """Temporaries of torch's own step on the device: gradients widened to the master's dtype, split
        masters joined, and what the optimizer makes."""
        widened = joined = 0
        sizes: list[list[int]] = [[] for _ in self.rules]
        for gather_group in (b for b in self.gather_groups if self.state_rest(b) == "device"):
            for weight, slot in zip(gather_group.weights, gather_group.slots, strict=True):
                if weight.updated:
                    size = slot.held(self.rank) * WIDTHS[gather_group.master]
                    widens = self.grad_dtypes(weight)[1] != gather_group.master
                    widened += size * widens
                    joined += size * self.splits(gather_group)
                    sizes[weight.rule].append(size)
        total, largest = sum(map(sum, sizes)), max((max(own) for own in sizes if own), default=0)
        elementwise = all(rule.by_rows for rule in self.rules)
        chunk = min(total, max(WIDEN_BYTES, largest)) if (widened or joined) and elementwise else total
        made = (_passing(rule, own, chunk) for rule, own in zip(self.rules, sizes, strict=True))
        return min(widened, chunk) + min(joined, chunk) + max(made, default=0)

    @cached_property
    def demands(self) -> tuple[list[UnitDemand], OffloadBuffers]:
        """What every unit takes in each tier, and what offloading itself takes."""
        labels = [unit.label for unit in self.units]

        def there(rest: Rest) -> MemoryModel:
            return self.placed_as(Placement.uniform(labels, rest, "device" if rest == "device" else "host"))

        near, host, disk = there("device"), there("host"), there("disk")
        weights = [_weights_by_unit(near), _weights_by_unit(host), Counter[str]()]
        for part in disk.parts:
            weights[2][part.unit] += part.weight_bytes()
        state = [_state_by_unit(way, away) for way, away in ((near, False), (host, True), (disk, True))]
        demands = [
            UnitDemand(
                unit.label,
                TierBytes(*(s[unit.name] for s in state)),
                TierBytes(*(w[unit.name] for w in weights)),
            )
            for unit in self.units
        ]
        passing = _host(disk).host - _moments(disk, host=True).total()  # and gradients that the loop sees
        lent = gathered(host) if self.world == 1 else 0
        return demands, OffloadBuffers(lent, _host(host).staging, passing, _blocks(disk.parts))

    def placed_as(self, placement: Placement) -> MemoryModel:
        """The same with every unit's tiers decided. What does not depend on them is not reckoned again."""
        made = replace(self, placement=placement)
        shared = ("slots", "gather_groups", "small", "_dtypes", "_owner_runs")
        made.__dict__.update({name: getattr(self, name) for name in shared})
        return made

    def bundled_as(self, options: Options) -> MemoryModel:
        """Other options that divide and gather group tensors in the same way."""
        made = replace(self, options=options)
        shared = ("slots", "gather_groups", "trainable", "_dtypes", "_owner_runs")
        made.__dict__.update({name: getattr(self, name) for name in shared})
        return made

    def reducing(self, options: Options, behind: bool) -> MemoryModel:
        """The same division with gradients that travel otherwise; `behind`: that may land a step late."""
        made = self.bundled_as(options)
        made.__dict__.update(parts=self.parts, behind=behind)
        return made

    def within(self, device_bytes: int | None) -> MemoryModel:
        """The same ``auto`` with another share of the device."""
        offload = self.options.offload
        assert offload is not None
        made = self.bundled_as(replace(self.options, offload=replace(offload, device_bytes=device_bytes)))
        made.__dict__["demands"] = self.demands
        return made


def _weights(setup: MemoryModel) -> BufferBytes:
    rank, total = setup.rank, BufferBytes()
    for gather_group in setup.gather_groups:
        numel = (
            gather_group.full
            if setup.keeps(gather_group)
            else gather_group.body(rank) + setup.cached(gather_group)
        )
        size = WIDTHS[gather_group.compute] * numel
        if setup.rows_rest(gather_group) != "disk":
            total += BufferBytes(host=size) if setup.streams(gather_group) else BufferBytes(parameters=size)
        total += BufferBytes(
            parameters=setup.codes_held(gather_group), state=setup.master_bytes(gather_group)
        )
    return total


def _host(setup: MemoryModel) -> BufferBytes:
    offload = setup.options.offload
    moments = _moments(setup, host=True).total()
    if offload is None:
        return BufferBytes(host=moments)
    int8, host, disk, staged = offload.moments == "int8", 0, [], []
    for part in setup.parts:
        landed = setup.grad_dtypes(part.weights[0])[1]
        if part.kernel:
            staged.append(part.stage_bytes(landed))
        if part.rest == "disk":
            disk.append(part.disk_bytes(int8))
        else:
            host += part.state_bytes(int8)
        host += _beside(setup, part)
    host += sum(map(setup.frozen_bytes, setup.gather_groups))
    staging = staging_bytes(staged, offload.stages)
    staging += _blocks([part for part in setup.parts if part.paged])
    frames = min(offload.stages, len(disk) + 1) * max(*disk, GRAIN) if disk else 0
    early = sum(part.native for part in setup.parts)
    norms = sum(len(part.weights) for part in setup.parts if part.native) if setup.options.defers else 0
    squares = 4 * (3 * early + 1 + norms) if early else 0  # of norms
    return BufferBytes(host=host + frames + moments, buckets=squares, staging=staging, disk=sum(disk))


def placed(setup: MemoryModel) -> Placement:
    """What ``auto`` comes to: every unit's bytes in each tier, within the budgets of the options."""
    offload = setup.options.offload
    assert offload is not None
    request = TierRequest(
        offload.optimizer, offload.parameters, _parameter_rests(setup, offload.path is not None)
    )
    budget = TierBudget(offload.device_bytes, offload.host_bytes, None if offload.path is not None else 0)
    demands, buffering = setup.demands
    return arrange(demands, budget, request, buffering)


def _blocks(parts: Sequence[OffloadGroupSpec]) -> int:
    """The ring that weights on the disk pass through."""
    return BLOCKS * min(REQUEST, max((part.weight_bytes() for part in parts), default=0))


def _parameter_rests(setup: MemoryModel, disk: bool) -> tuple[Rest, ...]:
    """The tiers that parameters can rest in: the device where they stay whole, the disk on one rank."""
    if setup.world > 1 and not setup.options.shards_params:
        return ("device",)
    return ("device", "host", "disk") if setup.world == 1 and disk else ("device", "host")


def _beside(setup: MemoryModel, part: OffloadGroupSpec) -> int:
    """Host memory beside a part's state: for gradients that the loop sees, or, where updates may begin a step
    early, for the weights after them."""
    if not part.native:
        return part.numel * WIDTHS[setup.grad_dtypes(part.weights[0])[1]]
    return part.numel * WIDTHS[part.compute] if setup.behind and not part.paged else 0


def _weights_by_unit(setup: MemoryModel) -> Counter[str]:
    total = Counter[str]()
    for b in setup.gather_groups:
        total[b.unit] += WIDTHS[b.compute] * (b.full if setup.keeps(b) else b.body(setup.rank))
    return total


def _state_by_unit(setup: MemoryModel, away: bool) -> Counter[str]:
    """Master and moments of every unit, in the tier that this setup puts all of them in."""
    offload = setup.options.offload
    assert offload is not None
    int8, total = offload.moments == "int8", _moments(setup, host=away)
    for part in setup.parts:
        if part.rest == "disk":  # gradients that the loop sees are not there
            total[part.unit] += part.disk_bytes(int8)
        else:
            total[part.unit] += part.state_bytes(int8) + _beside(setup, part)
    for b in setup.gather_groups:
        total[b.unit] += setup.master_bytes(b)
        if setup.state_rest(b) == "host":
            total[b.unit] += setup.frozen_bytes(b)
    return total


def _moments(setup: MemoryModel, host: bool) -> Counter[str]:
    """By unit, state that torch's own optimizer makes at its first step, beside the rows that it updates.
    Scalars are not counted."""
    total = Counter[str]()
    native = {w.name for part in setup.parts if part.kernel for w in part.weights}
    for gather_group in setup.gather_groups:
        if (setup.state_rest(gather_group) != "device") == host:
            width = WIDTHS[gather_group.master]
            for weight, slot in zip(gather_group.weights, gather_group.slots, strict=True):
                if weight.updated and weight.shape and weight.name not in native:
                    held = slot.held(setup.rank)
                    kept = setup.rules[weight.rule].kept(weight.shape, held) + setup.freezes(weight) * held
                    total[gather_group.unit] += width * kept
    return total


def gathered(setup: MemoryModel) -> int:
    """Bytes of the pool's buffers after a training step; see `lending`."""
    stages, scratches = {unit.name: Sizes() for unit in setup.units}, set[int]()
    changes = list[int]()
    for gather_group in setup.gather_groups:
        if setup.codes(gather_group):
            ranks = range(setup.world)
            stage = sum(setup.code_bytes(gather_group, r) for r in ranks)
            if setup.changes(gather_group):
                changes.append(stage)
            else:
                stages[gather_group.unit][stage, "uint8"] += 1
            scratches.add(max(gather_group.body(rank) for rank in ranks))
    at_once = setup.traits.overlaps and setup.resident  # all are published at once
    most = most_lent(setup.lends, stages, setup.ahead, at_once, setup.course)
    lasting = sum(number * numel * WIDTHS[dtype] for (numel, dtype), number in most.items())
    # Changes arrive all at once, or, where gathers do not overlap, one after another in the same memory.
    arriving = sum(changes if setup.traits.overlaps else set(changes))
    return lasting + arriving + sum(numel * WIDTHS["float32"] for numel in scratches)


def _passing(rule: OptimizerRule, sizes: list[int], chunk: int) -> int:
    """What one parameter group's step makes of tensors of these sizes, a chunk at a time."""
    every, first, second = rule.temporaries
    largest, next_one = [*heapq.nlargest(2, sizes), 0, 0][:2]
    return every * min(sum(sizes), chunk) + first * largest + second * next_one


# An element that is trained takes so many times the bytes of one that is not: gradient, moments. Where a step
# does not use it, it has a gradient's place alone.
TRAINED, UNUSED = 4, 2


def heaviest(setup: MemoryModel) -> MemoryModel:
    """The same, seen from the rank that owns most; of several from the first."""
    factors = {name: TRAINED if w.used else UNUSED for name, w in setup.trainable.items()}
    loads = _loads(setup, factors)
    return replace(setup, rank=max(loads, key=lambda rank: (loads[rank], -rank))) if loads else setup


def imbalance(setup: MemoryModel) -> float:
    """How much more than the mean the fullest rank owns: 0.01 is 1 %. Nothing where nothing is divided."""
    total = sum(slot.numel for slot in setup.slots.values() if slot.split != "copy")
    return max(_loads(setup, {}).values()) * setup.world / total - 1.0 if total else 0.0


def _loads(setup: MemoryModel, factors: Mapping[str, int]) -> dict[int, int]:
    """Elements of divided tensors that a rank owns, each times its tensor's factor: for the ranks that own
    more or less than the one before."""
    changes = Counter[int]()
    for name, slot in setup.slots.items():
        factor, before = factors.get(name, 1), 0
        for rank in sorted({0, *slot.edges()}) if slot.split != "copy" else ():
            if rank < setup.world:
                held = slot.held(rank) * factor
                changes[rank] += held - before
                before = held
    ranks = sorted(changes)
    return dict(zip(ranks, accumulate(changes[rank] for rank in ranks), strict=True))


def closed_form(numel: int, world: int, stage: int, width: int = 2, state: int = 12) -> float:
    """The ZeRO paper's table: bytes of a rank for `numel` parameters that take `width` bytes, as do their
    gradients, and `state` bytes of optimizer state each (fp32 master and Adam: 12). Without padding,
    gathered units, buckets and activations.

    >>> [round(closed_form(7_500_000_000, 64, stage) / 1e9, 2) for stage in range(4)]
    [120.0, 31.41, 16.64, 1.88]
    """
    shared = [state * (stage >= 1), width * (stage >= 2), width * (stage >= 3)]
    return numel * (2 * width + state - sum(shared) + sum(shared) / world)
