"""Counts the bytes that a rank holds, for what, and when, for any number of ranks. Integers only.

`MemoryModel.held` repeats, size by size, what `build` allocates: for a run on the CPU its figures are those
of `run.stats()`, to the byte. `step_moments` adds what lives for a part of a step: forward and backward of
every segment, and the update. Here stand also how evenly ranks are loaded, and the ZeRO paper's table for
orientation."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from zeroshard.compress import Delta
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
from .prefetch import staging_bytes
from .specs import (
    BLOCKS,
    GRAIN,
    REQUEST,
    WIDTHS,
    BufferBytes,
    GatherGroupSpec,
    OffloadGroupSpec,
    OptimizerRule,
    ParamSpec,
)
from .traffic import meeting_bytes, stage_bytes

WIDEN_BYTES = 512 * 2**20  # what a step widens at a time on a GPU, as in `step`
# What setups have in common that differ in the units that they recompute alone.
_SAME = (
    "tensors",
    "places",
    "gather_groups",
    "small",
    "parts",
    "buckets",
    "stage",
    "update",
    "held",
    "arriving",
    "codecs",
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
            + BufferBytes(state=_torch_state(self, host=False).total(), gathered=gathered(self))
        )

    def recomputing(self, recompute: tuple[str, ...] | bool) -> MemoryModel:
        """The same with other units recomputed: no lasting buffer depends on it, but for units that are
        gathered while others wait for gradients."""
        made = replace(self, options=replace(self.options, recompute=recompute))
        same = [name for name in _SAME if name != "held" or not (self.visits or self.unit_gathers.waiting)]
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
        for gather_group in (g for g in self.gather_groups if g.state == "device"):
            for weight, slot in zip(gather_group.weights, gather_group.slots, strict=True):
                if weight.updated:
                    size = slot.held(self.rank) * WIDTHS[gather_group.master]
                    widens = self.tensors.grad_dtypes[weight.name][1] != gather_group.master
                    widened += size * widens
                    joined += size * gather_group.splits
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
        passing = _host(disk).host - _torch_state(disk, host=True).total()  # and gradients that the loop sees
        lent = gathered(host) if self.world == 1 else 0
        return demands, OffloadBuffers(lent, _host(host).staging, passing, _blocks(disk.parts))

    def placed_as(self, placement: Placement) -> MemoryModel:
        """The same with every unit's tiers decided. What does not depend on them is not reckoned again."""
        made = replace(self, placement=placement)
        made.__dict__.update(tensors=self.tensors, small=self.small)
        return made

    def grouped_as(self, options: Options) -> MemoryModel:
        """Other options that divide and gather group tensors in the same way."""
        made = replace(self, options=options)
        made.__dict__.update(tensors=self.tensors)
        return made

    def reducing(self, options: Options, behind: bool) -> MemoryModel:
        """The same division with gradients that travel otherwise; `behind`: that may land a step late."""
        made = self.grouped_as(options)
        made.__dict__.update(parts=self.parts, behind=behind)
        return made

    def within(self, device_bytes: int | None) -> MemoryModel:
        """The same ``auto`` with another share of the device."""
        offload = self.options.offload
        assert offload is not None
        made = self.grouped_as(replace(self.options, offload=replace(offload, device_bytes=device_bytes)))
        made.__dict__["demands"] = self.demands
        return made


def _weights(setup: MemoryModel) -> BufferBytes:
    """Compute weights, what is kept of other nodes' rows and of codes, and masters on the device."""
    rank, world, options, total = setup.rank, setup.world, setup.options, BufferBytes()
    each = options.ranks_per_node if options.node_cache else None
    # Ranks of other nodes whose rows this rank keeps for its own node.
    namesakes = [r for r in range(rank % each, world, each) if r != rank] if each is not None else []
    for gather_group in setup.gather_groups:
        pack, codec = gather_group.pack, gather_group.codec
        moves = bool(namesakes) and any(slot.split != "copy" for slot in gather_group.slots)
        others = namesakes if moves else []
        numel = pack.full if gather_group.keeps else pack.body(rank)
        codes = 0
        if codec is not None:  # its own code, those for its node, and what all ranks believe
            codes = sum(gather_group.codes[r] for r in (rank, *others))
            codes += 4 * sum(map(pack.body, range(world))) if isinstance(codec, Delta) else 0
        elif not gather_group.keeps:
            numel += sum(map(pack.body, others))
        size = WIDTHS[gather_group.compute] * numel
        total += BufferBytes(
            parameters=codes + (size if gather_group.rows == "device" else 0),
            host=size if gather_group.rows == "host" else 0,
            state=gather_group.master_width * pack.body(rank),
        )
    return total


def _frozen_bytes(setup: MemoryModel, gather_group: GatherGroupSpec) -> int:
    """Of the fp32 values of what no update keeps, this rank's rows in host memory."""
    names = [weight.name for weight in setup.frozen_masters(gather_group)]
    return WIDTHS["float32"] * sum(setup.tensors.slots[name].held(setup.rank) for name in names)


def _host(setup: MemoryModel) -> BufferBytes:
    offload = setup.options.offload
    moments = _torch_state(setup, host=True).total()
    if offload is None:
        return BufferBytes(host=moments)
    int8, host, disk, staged = offload.moments == "int8", 0, [], []
    for part in setup.parts:
        landed = setup.tensors.grad_dtypes[part.weights[0].name][1]
        if part.kernel:
            staged.append(part.stage_bytes(landed))
        if part.rest == "disk":
            disk.append(part.disk_bytes(int8))
        else:
            host += part.state_bytes(int8)
        host += _beside(setup, part)
    host += sum(_frozen_bytes(setup, gather_group) for gather_group in setup.gather_groups)
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
        return part.numel * WIDTHS[setup.tensors.grad_dtypes[part.weights[0].name][1]]
    return part.numel * WIDTHS[part.compute] if setup.behind and not part.paged else 0


def _weights_by_unit(setup: MemoryModel) -> Counter[str]:
    total = Counter[str]()
    for b in setup.gather_groups:
        total[b.unit] += WIDTHS[b.compute] * (b.pack.full if b.keeps else b.pack.body(setup.rank))
    return total


def _state_by_unit(setup: MemoryModel, away: bool) -> Counter[str]:
    """Master and moments of every unit, in the tier that this setup puts all of them in."""
    offload = setup.options.offload
    assert offload is not None
    int8, total = offload.moments == "int8", _torch_state(setup, host=away)
    for part in setup.parts:
        if part.rest == "disk":  # gradients that the loop sees are not there
            total[part.unit] += part.disk_bytes(int8)
        else:
            total[part.unit] += part.state_bytes(int8) + _beside(setup, part)
    for b in setup.gather_groups:
        total[b.unit] += b.master_width * b.pack.body(setup.rank)
        if b.state == "host":
            total[b.unit] += _frozen_bytes(setup, b)
    return total


def _torch_state(setup: MemoryModel, host: bool) -> Counter[str]:
    """By unit, state that torch's own optimizer makes at its first step, beside the rows that it updates.
    Scalars are not counted."""
    total = Counter[str]()
    native = {w.name for part in setup.parts if part.kernel for w in part.weights}
    for gather_group in setup.gather_groups:
        if (gather_group.state != "device") == host:
            width = WIDTHS[gather_group.master]
            for weight, slot in zip(gather_group.weights, gather_group.slots, strict=True):
                if weight.updated and weight.shape and weight.name not in native:
                    held = slot.held(setup.rank)
                    codec = setup.codecs[weight.name]
                    kept = setup.rules[weight.rule].kept(weight.shape, held)
                    kept += held if codec is not None and codec.freezes else 0
                    total[gather_group.unit] += width * kept
    return total


def gathered(setup: MemoryModel) -> int:
    """Bytes of the pool's buffers after a training step; see `prefetch`."""
    coded = [group for group in setup.gather_groups if group.codec is not None]
    changes = [sum(group.codes) for group in coded if isinstance(group.codec, Delta)]
    scratches = {max(map(group.pack.body, range(setup.world))) for group in coded}
    most = setup.unit_gathers.lent.most
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
    factors = {name: TRAINED if w.used else UNUSED for name, w in setup.tensors.trainable.items()}
    loads = _loads(setup, factors)
    return replace(setup, rank=max(loads, key=lambda rank: (loads[rank], -rank))) if loads else setup


def imbalance(setup: MemoryModel) -> float:
    """How much more than the mean the fullest rank owns: 0.01 is 1 %. Nothing where nothing is divided."""
    total = sum(slot.numel for slot in setup.tensors.slots.values() if slot.split != "copy")
    return max(_loads(setup, {}).values()) * setup.world / total - 1.0 if total else 0.0


def _loads(setup: MemoryModel, factors: Mapping[str, int]) -> dict[int, int]:
    """Elements of divided tensors that a rank owns, each times its tensor's factor: for the ranks that own
    more or less than the one before."""
    changes = Counter[int]()
    for name, slot in setup.tensors.slots.items():
        factor, before = factors.get(name, 1), 0
        for rank in sorted({0, *slot.edges()}) if slot.split != "copy" else ():
            if rank < setup.world:
                held = slot.held(rank) * factor
                changes[rank] += held - before
                before = held
    ranks = sorted(changes)
    return dict(zip(ranks, accumulate(changes[rank] for rank in ranks), strict=True))


# ---------------------------------------------------------------------- the moments of a step

# On the device, in the order in which a table shows them.
KINDS = (
    "parameters",
    "gradients",
    "state",
    "gathered",
    "buckets",
    "arriving",
    "activations",
    "update",
    "inputs",
    "workspace",
    "margin",
)
# Where a plan is for the whole of a device: CUDA's context and NCCL's buffers, which no allocator gives out.
OUTSIDE = ("context", "nccl")
IN_FLIGHT = 7  # parts of the host update that may be on the device at a time where gradients are not kept


@dataclass(frozen=True)
class StepSegment:
    """A part of forward in one unit (the root: several).

    - `saved`: bytes that autograd keeps from here until backward comes back.
    - `forward`, `backward`: the most that lives meanwhile beyond what was saved before, and beyond what is
      still saved.
    - `flops`, `back`: operations of its forward, and of its backward with what is recomputed there.
      `moved`, `moved_back`: bytes that all else reads and writes. `kernels`, `kernels_back`: operations of
      both kinds.
    - `order`, `levels`: weights in the order in which their gradients arrive, and the most that lives as for
      `backward` before the first, after the first, and so on. Empty where no step was traced.
    - `spoils`: its forward writes what it was given, so that it cannot be recomputed.
    - `entered`: in how many units forward is, this one included, where it begins with entering its unit; 0
      where forward goes on in it. `needs`: units whose weights backward wants again, in the order of forward.
    """

    unit: str
    saved: int = 0
    forward: int = 0
    backward: int = 0
    flops: int = 0
    back: int = 0
    moved: int = 0
    moved_back: int = 0
    kernels: int = 0
    kernels_back: int = 0
    order: tuple[str, ...] = ()
    levels: tuple[int, ...] = ()
    spoils: bool = False
    entered: int = 0
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepMoment:
    """What lives on the device at one point of a step, by kind."""

    where: str
    kinds: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.kinds.values())


def step_moments(
    setup: MemoryModel, segments: Sequence[StepSegment], inputs: int = 0, unsynced: bool = False
) -> list[StepMoment]:
    """One step in time, of several micro-batches the last. `inputs`: bytes of the batch and of the model's
    buffers. Without segments: no activations. `unsynced`: unsharded parameters hold what backward passes
    without synchronisation have accumulated."""
    held = setup.held
    chain = list(segments) or [StepSegment(unit.name) for unit in setup.units]
    lasting = {
        "parameters": held.parameters,
        "state": held.state,
        "gathered": held.gathered,
        "buckets": held.buckets + setup.stage,
        "inputs": inputs,
    }
    # Gradients that do not travel are there as they land; those of the step before all the time.
    settled = held.gradients if setup.reduces else held.gradients - _once(setup)
    moments, saved = [], 0
    before = {"gradients": settled, "arriving": _unsynced(setup) if unsynced else 0}
    for segment in chain:
        kinds = lasting | before | {"activations": saved + max(segment.forward, segment.saved)}
        moments.append(_moment(f"forward of {_label(segment)}", kinds))
        saved += segment.saved
    fullest, landed_last = _arrivals(setup, chain, unsynced)
    repeated = repeated_units(setup, unsynced)
    kept = 0  # the gradient of what the last of the repeated units returned
    for again in (False, True):
        for index in reversed(range(len(chain))):
            segment, (arriving, landed, level) = chain[index], fullest[index]
            if again and segment.unit not in repeated:
                continue
            waiting = landed_last + _in_flight(setup, segment.unit) if again else landed
            kinds = lasting | {
                "gradients": settled + waiting,
                "arriving": arriving,
                "activations": saved + kept + level,
            }
            moments.append(_moment(f"{'second ' * again}backward of {_label(segment)}", kinds))
            if segment.unit in repeated and not again:  # what it was given stays
                kept = kept or segment.saved
            else:
                saved -= segment.saved
    kinds = lasting | {"gradients": settled + landed_last, "update": setup.update}
    return [*moments, _moment("the update", kinds)]


def repeated_units(setup: MemoryModel, unsynced: bool) -> frozenset[str]:
    """Units whose backward runs twice. The sum of several micro-batches cannot be brought again."""
    return frozenset(() if unsynced else setup.repeated)


def _in_flight(setup: MemoryModel, unit: str) -> int:
    """Bytes of a unit's gradients that are on their way to the host at a time."""
    sizes = [
        b.pack.full * WIDTHS[b.landed] for b in setup.buckets if b.part is not None and b.part.unit == unit
    ]
    return min(sum(sizes), IN_FLIGHT * max(sizes, default=0))


def peak_of(moments: Sequence[StepMoment]) -> StepMoment:
    """The first moment with the most bytes."""
    return max(moments, key=lambda moment: moment.total)


def _moment(where: str, kinds: dict[str, int]) -> StepMoment:
    return StepMoment(where, {kind: kinds.get(kind, 0) for kind in KINDS})


def _label(segment: StepSegment) -> str:
    return f"`{segment.unit}`" if segment.unit else "the root"


def _once(setup: MemoryModel) -> int:
    """Bytes of a whole gradient, but for what ends on the host."""
    alone = [b for b in setup.buckets if b.part is None]
    return sum(w.numel * WIDTHS[b.landed] for b in alone for w in b.weights if w.used)


def _unsynced(setup: MemoryModel) -> int:
    """Bytes of a whole gradient on unsharded parameters."""
    return sum(w.numel * WIDTHS[setup.sum_dtypes[w.name]] for w in setup.tensors.trainable.values() if w.used)


class _Arrivals:
    """Gradients on their way: `now` bytes wait on unsharded parameters for their bucket to fill and to
    have its turn, or are held behind it; on one rank `landed` bytes have become gradients of sharded
    parameters, or are flat ones for the host. `unsynced`: all unsharded parameters hold a sum from the
    beginning, to which the new ones are added."""

    def __init__(self, setup: MemoryModel, unsynced: bool) -> None:
        self.setup, self.now, self._due = setup, _unsynced(setup) if unsynced else 0, 0
        self._added = not unsynced
        self._shown = self._flat = self._held = 0
        self._arriving = setup.arriving
        self._holding = setup.holding(unsynced)
        self._missing = [len(bucket.weights) for bucket in setup.buckets]
        self._waiting = [0] * len(self._missing)
        self._repeated = repeated_units(setup, unsynced)  # their gradients do not wait for the norm

    @property
    def landed(self) -> int:
        return self._shown + self._flat

    def add(self, weight: ParamSpec) -> tuple[int, int]:
        """One more; returns what waits and what has landed at the moment when its bucket leaves: on one rank
        a flat copy of it is there beside the gradients that it is made of."""
        setup, (number, size) = self.setup, self._arriving[weight.name]
        if not self._added:
            size = weight.numel * WIDTHS[setup.sum_dtypes[weight.name]]
        bucket = setup.buckets[number]
        if not setup.reduces and bucket.part is None:
            self._shown += weight.numel * WIDTHS[bucket.landed]
            self.now -= 0 if self._added else size
            return self.now, self.landed
        self.now += size if self._added else 0
        most = self.now, self.landed
        self._waiting[number] += size
        self._missing[number] -= 1
        while setup.reduces and self._due < len(self._missing) and self._missing[self._due] == 0:
            unsharded_params = self._waiting[self._due]
            self.now -= unsharded_params + self._held
            self._held = unsharded_params if self._holding[self._due] else 0
            self.now, self._due = self.now + self._held, self._due + 1
        if not setup.reduces and self._missing[number] == 0:
            most = self._flatten(number)
        return most

    def end(self) -> list[tuple[int, int]]:
        """Backward has ended: the same of each bucket that did not fill, since parts of it were not used."""
        if self.setup.reduces:
            return []  # they are laid out in wires that are there
        left = [number for number, missing in enumerate(self._missing) if missing and self._waiting[number]]
        return [self._flatten(number) for number in left]

    def _flatten(self, number: int) -> tuple[int, int]:
        bucket = self.setup.buckets[number]
        flat = bucket.pack.full * WIDTHS[bucket.landed]
        most = self.now, self.landed + flat
        self.now -= self._waiting[number]
        if bucket.part is None or bucket.part.unit not in self._repeated:
            self._flat = _kept(self.setup, self._flat, flat)
        return most


def _arrivals(
    setup: MemoryModel, chain: Sequence[StepSegment], unsynced: bool
) -> tuple[list[tuple[int, int, int]], int]:
    """For each segment's backward, at its fullest: the bytes of gradients that wait on unsharded parameters
    and that have landed, and of activations beyond the saved ones. Then what has landed in the end."""
    # Of a traced step, backward may not come to a segment at all: the root's before the first unit, say.
    traced = any(segment.levels for segment in chain)
    guessed = [[] for _ in chain] if traced else _weights_by_segment(setup, chain)
    by_name = setup.tensors.trainable
    state, result = _Arrivals(setup, unsynced), [(0, 0, 0)] * len(chain)
    for index in reversed(range(len(chain))):
        segment = chain[index]
        if segment.levels:  # a new gradient is among the activations until it arrives
            points = [(state.now, state.landed, segment.levels[0])]
            for name, level in zip(segment.order, segment.levels[1:], strict=True):
                if name in by_name:
                    leaving = state.add(by_name[name])
                    if not setup.reduces:
                        points.append((*leaving, level))
                points.append((state.now, state.landed, level))
        else:
            points = [(state.now, state.landed, segment.backward)]
            for weight in sorted(guessed[index], key=lambda w: -w.number):
                points.append((*state.add(weight), segment.backward))
        if index == 0:
            points += [(*leaving, points[-1][-1]) for leaving in state.end()]
        result[index] = max(points, key=sum)
    return result, state.landed


def _kept(setup: MemoryModel, flat: int, size: int) -> int:
    """One rank, offload: a gradient stays on the device until the norm is known where updates may have to
    be taken back, and where the loop clips it; else a few are on their way to the host."""
    offload, clip = setup.options.offload, setup.options.clip_norm
    if setup.options.defers:
        return flat + size
    if clip is None or offload is None:
        return max(flat, size)
    if offload.undo and math.isfinite(clip):
        return flat + size
    return max(flat, min(flat + size, IN_FLIGHT * size))


def _weights_by_segment(setup: MemoryModel, chain: Sequence[StepSegment]) -> list[list[ParamSpec]]:
    """Where each trainable weight's gradient arrives. The root's: with its last segment what is registered
    behind the units (a head), with its first what stands before them (an embedding)."""
    result: list[list[ParamSpec]] = [[] for _ in chain]
    first: dict[str, int] = {}
    for index, segment in enumerate(chain):
        first.setdefault(segment.unit, index)
    roots = [index for index, segment in enumerate(chain) if not segment.unit] or [0]
    in_units = [w.number for unit in setup.units if unit.name for w in unit.weights]
    middle = max(in_units, default=-1)
    for unit in setup.units:
        for weight in unit.weights:
            if weight.trainable:
                root = roots[-1] if weight.number > middle else roots[0]
                result[first.get(unit.name, 0) if unit.name else root].append(weight)
    return result


# ---------------------------------------------------------------------- for orientation


def closed_form(numel: int, world: int, stage: int, width: int = 2, state: int = 12) -> float:
    """The ZeRO paper's table: bytes of a rank for `numel` parameters that take `width` bytes, as do their
    gradients, and `state` bytes of optimizer state each (fp32 master and Adam: 12). Without padding,
    gathered units, buckets and activations.

    >>> [round(closed_form(7_500_000_000, 64, stage) / 1e9, 2) for stage in range(4)]
    [120.0, 31.41, 16.64, 1.88]
    """
    shared = [state * (stage >= 1), width * (stage >= 2), width * (stage >= 3)]
    return numel * (2 * width + state - sum(shared) + sum(shared) / world)
