"""How many bytes a rank holds, for what, and when. Integers only: no torch, no memory, any number of ranks.

`buffers_of` repeats, size by size, what `build` allocates: for a run on the CPU its figures are those of
`run.stats()`, to the byte.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from zeroshard.config import Options

from .division import Division
from .lending import Sizes, most_lent, staging_bytes
from .meeting import meeting_bytes, stage_bytes
from .placement import Budget, Buffering, Bytes, Demand, Placement, Rest, Wish, arrange
from .shapes import BLOCKS, GRAIN, REQUEST, WIDTHS, Buffers, Part, Rule
from .wires import gradients_of

WIDEN_BYTES = 512 * 2**20  # what a step widens at a time on a GPU, as in `step`
# What setups that differ in the units that they recompute have in common.
_SAME = (
    "places",
    "slots",
    "bundles",
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
    "_stretches",
)


@dataclass(frozen=True)
class Setup(Division):
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
    def held(self) -> Buffers:
        """`buffers_of` this, reckoned once."""
        return buffers_of(self)

    def recomputing(self, recompute: tuple[str, ...] | bool) -> Setup:
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
        """`update_bytes` of this, reckoned once."""
        return update_bytes(self)

    @cached_property
    def demands(self) -> tuple[list[Demand], Buffering]:
        """See `demands_of`."""
        return demands_of(self)

    def placed_as(self, placement: Placement) -> Setup:
        """The same with every unit's tiers decided. What does not depend on them is not reckoned again."""
        made = replace(self, placement=placement)
        shared = ("slots", "bundles", "small", "_dtypes", "_stretches")
        made.__dict__.update({name: getattr(self, name) for name in shared})
        return made

    def bundled_as(self, options: Options) -> Setup:
        """Other options that divide and bundle tensors in the same way."""
        made = replace(self, options=options)
        shared = ("slots", "bundles", "trainable", "_dtypes", "_stretches")
        made.__dict__.update({name: getattr(self, name) for name in shared})
        return made

    def within(self, device_bytes: int | None) -> Setup:
        """The same ``auto`` with another share of the device."""
        offload = self.options.offload
        assert offload is not None
        made = self.bundled_as(replace(self.options, offload=replace(offload, device_bytes=device_bytes)))
        made.__dict__["demands"] = self.demands
        return made


def buffers_of(setup: Setup) -> Buffers:
    """Every lasting buffer of a rank once its run has taken a step or two."""
    return (
        _weights(setup)
        + gradients_of(setup.buckets, setup.options.stage, setup.reduces, setup.rank, setup.behind)
        + meeting_bytes(setup)
        + _host(setup)
        + Buffers(state=_moments(setup, host=False).total(), gathered=gathered(setup))
    )


def _weights(setup: Setup) -> Buffers:
    rank, total = setup.rank, Buffers()
    for bundle in setup.bundles:
        numel = bundle.full if setup.keeps(bundle) else bundle.body(rank) + setup.cached(bundle)
        size = WIDTHS[bundle.compute] * numel
        if setup.rows_rest(bundle) != "disk":
            total += Buffers(host=size) if setup.streams(bundle) else Buffers(parameters=size)
        total += Buffers(parameters=setup.codes_held(bundle), state=setup.master_bytes(bundle))
    return total


def _host(setup: Setup) -> Buffers:
    offload = setup.options.offload
    moments = _moments(setup, host=True).total()
    if offload is None:
        return Buffers(host=moments)
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
    staging = staging_bytes(staged, offload.stages)
    staging += _blocks([part for part in setup.parts if part.paged])
    berths = min(offload.stages, len(disk) + 1) * max(*disk, GRAIN) if disk else 0
    early, clip = sum(part.native for part in setup.parts), setup.options.clip_norm
    squares = 4 * (early + 1) if early and clip is not None and math.isfinite(clip) else 0  # of norms
    return Buffers(host=host + berths + moments, buckets=squares, staging=staging, disk=sum(disk))


def placed(setup: Setup) -> Placement:
    """What ``auto`` comes to: every unit's bytes in each tier, within the budgets of the options."""
    offload = setup.options.offload
    assert offload is not None
    wish = Wish(offload.optimizer, offload.parameters, _parameter_rests(setup, offload.path is not None))
    budget = Budget(offload.device_bytes, offload.host_bytes, None if offload.path is not None else 0)
    demands, buffering = setup.demands
    return arrange(demands, budget, wish, buffering)


def demands_of(setup: Setup) -> tuple[list[Demand], Buffering]:
    """What every unit takes in each tier, and what offloading itself takes."""
    labels = [unit.label for unit in setup.units]

    def there(rest: Rest) -> Setup:
        return setup.placed_as(Placement.uniform(labels, rest, "device" if rest == "device" else "host"))

    near, host, disk = there("device"), there("host"), there("disk")
    weights = [_weights_by_unit(near), _weights_by_unit(host), Counter[str]()]
    for part in disk.parts:
        weights[2][part.unit] += part.weight_bytes()
    state = [_state_by_unit(way, away) for way, away in ((near, False), (host, True), (disk, True))]
    demands = [
        Demand(unit.label, Bytes(*(s[unit.name] for s in state)), Bytes(*(w[unit.name] for w in weights)))
        for unit in setup.units
    ]
    passing = _host(disk).host - _moments(disk, host=True).total()  # and gradients that the loop sees
    lent = gathered(host) if setup.world == 1 else 0
    return demands, Buffering(lent, _host(host).staging, passing, _blocks(disk.parts))


def _blocks(parts: Sequence[Part]) -> int:
    """The ring that weights on the disk pass through."""
    return BLOCKS * min(REQUEST, max((part.weight_bytes() for part in parts), default=0))


def _parameter_rests(setup: Setup, disk: bool) -> tuple[Rest, ...]:
    """The tiers that parameters can rest in: the device where they stay whole, the disk on one rank."""
    if setup.world > 1 and not setup.options.shards_params:
        return ("device",)
    return ("device", "host", "disk") if setup.world == 1 and disk else ("device", "host")


def _beside(setup: Setup, part: Part) -> int:
    """Host memory beside a part's state: for gradients that the loop sees, or, where updates may begin a step
    early, for the weights after them."""
    if not part.native:
        return part.numel * WIDTHS[setup.grad_dtypes(part.weights[0])[1]]
    return part.numel * WIDTHS[part.compute] if setup.behind and not part.paged else 0


def _weights_by_unit(setup: Setup) -> Counter[str]:
    total = Counter[str]()
    for b in setup.bundles:
        total[b.unit] += WIDTHS[b.compute] * (b.full if setup.keeps(b) else b.body(setup.rank))
    return total


def _state_by_unit(setup: Setup, away: bool) -> Counter[str]:
    """Master and moments of every unit, in the tier that this setup puts all of them in."""
    offload = setup.options.offload
    assert offload is not None
    int8, total = offload.moments == "int8", _moments(setup, host=away)
    for part in setup.parts:
        if part.rest == "disk":  # gradients that the loop sees are not there
            total[part.unit] += part.disk_bytes(int8)
        else:
            total[part.unit] += part.state_bytes(int8) + _beside(setup, part)
    for b in setup.bundles:
        total[b.unit] += setup.master_bytes(b)
    return total


def _moments(setup: Setup, host: bool) -> Counter[str]:
    """By unit, state that torch's own optimizer makes at its first step, beside the rows that it updates.
    Scalars are not counted."""
    total = Counter[str]()
    native = {w.name for part in setup.parts if part.kernel for w in part.weights}
    for bundle in setup.bundles:
        if (setup.state_rest(bundle) != "device") == host:
            width = WIDTHS[bundle.master]
            for weight, slot in zip(bundle.weights, bundle.slots, strict=True):
                if weight.updated and weight.shape and weight.name not in native:
                    kept = setup.rules[weight.rule].moments + setup.freezes(weight)
                    total[bundle.unit] += slot.held(setup.rank) * width * kept
    return total


def gathered(setup: Setup) -> int:
    """Bytes of the pool's buffers after a training step; see `lending`."""
    stages, scratches = {unit.name: Sizes() for unit in setup.units}, set[int]()
    changes = list[int]()
    for bundle in setup.bundles:
        if setup.codes(bundle):
            ranks = range(setup.world)
            stage = sum(setup.code_bytes(bundle, r) for r in ranks)
            if setup.changes(bundle):
                changes.append(stage)
            else:
                stages[bundle.unit][stage, "uint8"] += 1
            scratches.add(max(bundle.body(rank) for rank in ranks))
    at_once = setup.overlaps and setup.resident  # all are published at once
    most = most_lent(setup.lends, stages, setup.ahead, at_once, setup.course)
    lasting = sum(number * numel * WIDTHS[dtype] for (numel, dtype), number in most.items())
    # Changes arrive all at once, or, where gathers do not overlap, one after another in the same memory.
    arriving = sum(changes if setup.overlaps else set(changes))
    return lasting + arriving + sum(numel * WIDTHS["float32"] for numel in scratches)


def update_bytes(setup: Setup) -> int:
    """Temporaries of torch's own step on the device: gradients widened to the master's dtype, split masters
    joined, and what the optimizer makes."""
    widened = joined = 0
    sizes: list[list[int]] = [[] for _ in setup.rules]
    for bundle in (b for b in setup.bundles if setup.state_rest(b) == "device"):
        for weight, slot in zip(bundle.weights, bundle.slots, strict=True):
            if weight.updated:
                size = slot.held(setup.rank) * WIDTHS[bundle.master]
                widens = setup.grad_dtypes(weight)[1] != bundle.master
                widened += size * widens
                joined += size * setup.splits(bundle)
                sizes[weight.rule].append(size)
    total, largest = sum(map(sum, sizes)), max((max(own) for own in sizes if own), default=0)
    elementwise = all(rule.by_rows for rule in setup.rules)
    chunk = min(total, max(WIDEN_BYTES, largest)) if (widened or joined) and elementwise else total
    made = (_passing(rule, own, chunk) for rule, own in zip(setup.rules, sizes, strict=True))
    return min(widened, chunk) + min(joined, chunk) + max(made, default=0)


def _passing(rule: Rule, sizes: list[int], chunk: int) -> int:
    """What one parameter group's step makes of tensors of these sizes, a chunk at a time."""
    every, first, second = rule.temporaries
    largest, next_one = [*heapq.nlargest(2, sizes), 0, 0][:2]
    return every * min(sum(sizes), chunk) + first * largest + second * next_one
