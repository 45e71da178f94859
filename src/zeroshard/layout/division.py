"""Divides a model into gather groups, buckets in their order, offload groups and wires. Integers only.

Here stand also the bytes on the way of the gradients: wires, reduced-gradient buffers, and what codecs
keep."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property, partial

from zeroshard.compress import Codec, Compression, Delta, MeanCodec, Rows
from zeroshard.options import DTYPE_BYTES, Options, Precision, bucket_limit, codec_for, gather_codec
from zeroshard.sync_policies import Local, choices_of, delays

from .codes import back_bytes, bodies_of, cut_of, rows_bytes, wire_bytes
from .placement import Placement
from .prefetch import Sizes, UnitGathers, UnitVisit, small_units
from .sharding import ALIGN, PackLayout, ShardSpec, aligned, buckets, owner_runs, slots_by_name
from .specs import (
    ASSUMED_TRAITS,
    BLOCK,
    ROOT,
    WIDTHS,
    BucketSpec,
    BufferBytes,
    GatherGroupSpec,
    OffloadGroupSpec,
    OptimizerRule,
    ParamSpec,
    Sort,
    TransportTraits,
    UnitSpec,
)

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


@dataclass(frozen=True)
class RingSpec:
    """The wires of all buckets of one sort: `buckets` are their numbers, and `sizes` what each needs, in
    elements of `dtype`. They take turns, or each has its `own`. `shown`: where the wire is on the device,
    gradients are shown where they lie in it."""

    key: str
    dtype: str
    codec: Compression | None
    buckets: tuple[int, ...]
    sizes: tuple[int, ...]
    own: bool
    shown: bool = False

    @cached_property
    def rooms(self) -> tuple[int, ...]:
        """How large each wire is."""
        return self.sizes if self.own else tuple(rooms_of(self.sizes))

    @cached_property
    def turns(self) -> tuple[int, ...]:
        """Which wire each bucket takes."""
        return tuple(range(len(self.sizes)) if self.own else turns_of(self.sizes, self.rooms))

    @property
    def nbytes(self) -> int:
        return sum(self.rooms) * WIDTHS[self.dtype]


def gradients_of(setup: ModelLayout) -> BufferBytes:
    """Wires and reduced-gradient buffers. Where gradients do not travel there is neither: the unsharded
    parameter's gradient becomes the sharded parameter's, and lasts until `zero_grad`. One step behind, each
    bucket has its own wire and lands twice."""
    if not setup.reduces:
        alone = [b for b in setup.buckets if b.part is None]
        once = sum(w.numel * WIDTHS[b.landed] for b in alone for w in b.weights if w.used)
        return BufferBytes(gradients=2 * once if setup.behind else once)
    total = BufferBytes(buckets=4 * sum(setup.scratch))
    for ring in setup.rings:
        members = [setup.buckets[number] for number in ring.buckets]
        if ring.codec is None:
            total += _plain(ring, members, setup)
        elif isinstance(ring.codec, Codec):
            total += _coded(ring, members, ring.codec, setup)
        else:
            total += _rows(ring, members, setup)
    for bucket in setup.buckets:
        if isinstance(bucket.codec, MeanCodec):
            total += _means(bucket, bucket.codec, setup)
    return total


def _plain(ring: RingSpec, members: list[BucketSpec], setup: ModelLayout) -> BufferBytes:
    """Buckets of one pair of dtypes that travel as they are."""
    wire, dtype, stage, behind = members[0].wire, members[0].landed, setup.options.stage, setup.behind
    shards = sum(b.pack.shard(setup.rank) for b in members) * WIDTHS[dtype]
    whole = sum(ring.sizes) * WIDTHS[dtype]
    if stage == 0 and behind:
        return BufferBytes(gradients=2 * whole, buckets=ring.nbytes + shards)
    if stage == 0:  # where dtypes agree, the wire is the gradient
        apart = BufferBytes() if ring.shown else BufferBytes(buckets=ring.nbytes + shards)
        return BufferBytes(gradients=whole) + apart
    landed = 2 * shards if behind else shards if stage > 1 or dtype != wire else 0
    if ring.shown:
        return BufferBytes(gradients=ring.nbytes + landed)
    return BufferBytes(gradients=landed, buckets=ring.nbytes)


def _coded(ring: RingSpec, members: list[BucketSpec], codec: Codec, setup: ModelLayout) -> BufferBytes:
    """Buckets that travel through a codec: at any stage a ring of short wires (one step behind, one
    each), and what it has not sent."""
    landed = WIDTHS[members[0].landed]
    total = BufferBytes(
        buckets=ring.nbytes, state=sum(codec.state_bytes(bucket.wire_numel) for bucket in members)
    )
    for bucket in members:
        shards = bucket.pack.shard(setup.rank) * landed
        if setup.options.stage > 0:
            total += BufferBytes(gradients=2 * shards if setup.behind else shards)
            continue
        _, own = bodies_of(bucket.pack)[setup.rank]
        total += BufferBytes(
            gradients=bucket.wire_numel * landed,
            buckets=shards + back_bytes(codec, own, landed),
            state=codec.state_bytes(own),
        )
    return total


def _rows(ring: RingSpec, members: list[BucketSpec], setup: ModelLayout) -> BufferBytes:
    """Parameters of which only the rows that were touched travel: room for all of them."""
    landed, total = WIDTHS[members[0].landed], BufferBytes(buckets=ring.nbytes)
    for bucket in members:
        shards = bucket.pack.shard(setup.rank) * landed
        if setup.options.stage > 0:
            total += BufferBytes(gradients=2 * shards if setup.behind else shards)
        else:
            back = rows_bytes(bucket.slots[0], setup.rank, landed)
            total += BufferBytes(gradients=(bucket.pack.full + 1) * landed, buckets=shards + back)
    return total


def _means(bucket: BucketSpec, codec: MeanCodec, setup: ModelLayout) -> BufferBytes:
    """Matrices of which means travel: the matrices, the codec's state, what travels and its wires."""
    world, shapes = bucket.slots[0].world, [slot.shape for slot in bucket.slots]
    first, *later = map(sum, zip(*(codec.lengths(shape) for shape in shapes), strict=True))
    cuts = sum(cut_of(numel, world) for numel in (first + len(shapes), *later))
    shards, landed, stage = bucket.pack.shard(setup.rank), WIDTHS[bucket.landed], setup.options.stage
    return BufferBytes(
        gradients=landed * (shards if stage > 0 else bucket.wire_numel),
        state=sum(codec.state_bytes(slot.shape) for slot in bucket.slots),
        buckets=4 * bucket.pack.full + 4 * 2 * cuts * (world + 1) + (0 if stage > 0 else shards * landed),
    )


@dataclass(frozen=True)
class DividedTensors:
    """What ways to run have in common that divide and gather alike, whatever rests where, and in buckets of
    any size. By the names of parameters:

    - `slots`: how each is divided. `trainable`: those that get gradients.
    - `dtypes`: compute and master dtype. `grad_dtypes`: what travels of its gradient, and what `p.grad` is.
    - `owner_runs`: see `layout.owner_runs`, of the weights of one unit.

    And `groups`: what is gathered together, before it is decided where it rests."""

    slots: dict[str, ShardSpec]
    trainable: dict[str, ParamSpec]
    dtypes: dict[str, tuple[str, str]]
    grad_dtypes: dict[str, tuple[str, str]]
    owner_runs: dict[str, int]
    groups: list[GatherGroupSpec]


def divided(
    units: Sequence[UnitSpec], options: Options, world: int, rules: Sequence[OptimizerRule]
) -> DividedTensors:
    """Divides every parameter among the ranks, and groups those that are gathered together."""
    owned = [(w, unit.name) for unit in units for w in unit.weights]
    whole = {
        w.name
        for w, _ in owned
        if options.split == "whole" or (w.rule >= 0 and options.split != "rows" and not rules[w.rule].by_rows)
    }
    slots = slots_by_name([(w.name, w.shape) for w, _ in owned], whole, world, options.rows)
    dtypes, grad_dtypes = _dtypes([w for w, _ in owned], options.precision)
    trainable = sorted((one for one in owned if one[0].trainable), key=lambda one: one[0].number)
    return DividedTensors(
        slots=slots,
        trainable={w.name: w for w, _ in owned if w.trainable},
        dtypes=dtypes,
        grad_dtypes=grad_dtypes,
        owner_runs=owner_runs((w.name, unit) for w, unit in trainable),
        groups=[one for unit in units for one in _groups_of(unit, slots, dtypes, options, world)],
    )


Dtypes = dict[str, tuple[str, str]]


def _dtypes(weights: Sequence[ParamSpec], precision: Precision | None) -> tuple[Dtypes, Dtypes]:
    """By name, compute and master dtype of every parameter, and those of its gradient."""
    if precision is None:
        same = {w.name: (w.dtype, w.dtype) for w in weights}
        return same, same
    dtypes, grad_dtypes = {}, {}
    for weight in weights:
        compute = master = weight.dtype
        if compute.startswith(("float", "bfloat")):
            keeps = any(fnmatchcase(weight.name, pattern) for pattern in precision.keep)
            compute, master = precision.master if keeps else precision.compute, precision.master
        dtypes[weight.name] = compute, master
        alike = compute == precision.master
        grad_dtypes[weight.name] = (compute, compute) if alike else (precision.wire, precision.landed)
    return dtypes, grad_dtypes


def _groups_of(
    unit: UnitSpec, slots: Mapping[str, ShardSpec], dtypes: Dtypes, options: Options, world: int
) -> Iterator[GatherGroupSpec]:
    """What is gathered together of one unit: weights of the same dtypes and codec."""
    groups: dict[tuple[tuple[str, str], Codec | None], list[ParamSpec]] = {}
    for weight in unit.weights:
        codec = gather_codec(options.gather, weight.name)
        groups.setdefault((dtypes[weight.name], codec), []).append(weight)
    for number, (((compute, master), codec), weights) in enumerate(groups.items()):
        own = tuple(slots[w.name] for w in weights)
        pack = PackLayout(own, world, align=ALIGN)
        moves = world > 1 and any(slot.split != "copy" for slot in own)
        coded = codec if moves and compute in DTYPE_BYTES else None
        yield GatherGroupSpec(unit.name, number, compute, master, tuple(weights), own, pack, coded)


@dataclass(frozen=True)
class ModelLayout(ABC):
    """All that the bytes of a run depend on. `traits`: of its transport; `rank`: whose bytes."""

    units: tuple[UnitSpec, ...]
    options: Options
    world: int
    rules: tuple[OptimizerRule, ...] = (OptimizerRule(),)
    rank: int = 0
    traits: TransportTraits = ASSUMED_TRAITS
    placement: Placement | None = None  # decided already; else `places` decides
    visits: tuple[UnitVisit, ...] = ()  # of a `Course`

    @property
    @abstractmethod
    def places(self) -> Placement:
        """The tier of every unit."""

    @cached_property
    def tensors(self) -> DividedTensors:
        """How the parameters are divided, one by one and in what is gathered together."""
        return divided(self.units, self.options, self.world, self.rules)

    @cached_property
    def small(self) -> frozenset[str]:
        """Units that stay whole at stage 3, where rows travel as they are; see [Note: small units]."""
        if not self.options.shards_params or self.options.gather:
            return frozenset()
        widths = {name: WIDTHS[compute] for name, (compute, _) in self.tensors.dtypes.items()}
        return small_units({u.name: [w.numel * widths[w.name] for w in u.weights] for u in self.units})

    @cached_property
    def resident(self) -> bool:
        """Whether all unsharded parameters are always whole on the device."""
        return all(gather_group.keeps for gather_group in self.gather_groups)

    @cached_property
    def reduces(self) -> bool:
        """Whether gradients travel in every step: not on one rank, nor where ranks train apart."""
        return self.world > 1 and any(
            not isinstance(choice, Local) for choice in choices_of(self.options.sync)
        )

    @cached_property
    def behind(self) -> bool:
        """Whether gradients may land a step late."""
        return delays(self.options.sync)

    @cached_property
    def recomputed(self) -> frozenset[str]:
        """Units whose forward is computed again in backward."""
        wanted, names = self.options.recompute, [unit.name for unit in self.units if unit.name]
        if isinstance(wanted, bool):
            return frozenset(names if wanted else ())
        exact = set(wanted)
        patterns = [pattern for pattern in wanted if any(mark in pattern for mark in "*?[")]
        return frozenset(n for n in names if n in exact or any(fnmatchcase(n, p) for p in patterns))

    @cached_property
    def unit_gathers(self) -> UnitGathers:
        """How a step gathers the units: into which buffers, and in which order."""
        sizes, stages = ({unit.name: Sizes() for unit in self.units} for _ in range(2))
        for group in self.gather_groups:
            if not group.keeps:
                sizes[group.unit][group.pack.full, group.compute] += 1
            if group.codec is not None and not isinstance(group.codec, Delta):
                stages[group.unit][sum(group.codes), "uint8"] += 1
        streamed = any(group.rows != "device" for group in self.gather_groups)
        unused = {u.name for u in self.units if any(w.trainable and not w.used for w in u.weights)}
        return UnitGathers(
            sizes=sizes,
            stages=stages,
            at_once=self.traits.overlaps and self.resident,  # all are published at once
            ahead=self.options.prefetch if self.traits.overlaps or streamed else 0,
            visits=self.visits,
            waiting=unused,
            frozen={u.name for u in self.units if not any(w.trainable for w in u.weights)},
            recomputed=self.recomputed,
        )

    def frozen_masters(self, gather_group: GatherGroupSpec) -> list[ParamSpec]:
        """Weights of which host memory has the fp32 values, since they compute in fewer bits and no update
        keeps them: frozen or in no optimizer, where state rests off the device."""
        narrow = gather_group.master == "float32" and WIDTHS[gather_group.compute] < 4
        if not narrow or gather_group.state == "device":
            return []
        weights = gather_group.weights
        return [w for w in weights if not (w.trainable and w.rule >= 0) and w.dtype != gather_group.compute]

    @property
    def align(self) -> int:
        """What each place in a bucket and in the state of an offload group is a multiple of, in elements. A
        parameter that was not used is left out of an update, so it must not share a block of 8-bit
        moments."""
        return BLOCK if self.options.offload is not None and self.options.offload.moments == "int8" else ALIGN

    @cached_property
    def gather_groups(self) -> list[GatherGroupSpec]:
        """What is gathered together, in the order of the units, and where it rests."""
        places, offload, result = self.places, self.options.offload, []
        splits_masters = offload is not None and offload.master == "split"
        sharded = self.options.shards_params and self.world > 1
        for group in self.tensors.groups:
            place = places[group.unit or ROOT]
            rows, state = place.parameters, place.optimizer
            # On the disk only beside their state, all of them.
            if rows == "disk" and not all(
                w.trainable and self._kernel(w, group.master) for w in group.weights
            ):
                rows = "host"
            keeps = rows == "device" and (not sharded or group.unit in self.small)
            decoded = keeps and group.codec is not None
            differs = group.master != group.compute or rows != "device" or decoded
            # Joined for a chunk at a time: so the optimizers must be element-wise.
            splits = (
                splits_masters
                and state == rows == "device"
                and (group.compute, group.master) == ("bfloat16", "float32")
                and all(w.rule < 0 or self.rules[w.rule].by_rows for w in group.weights)
            )
            width = 2 if splits else WIDTHS[group.master]
            own = width if differs and state == "device" else 0
            result.append(
                replace(group, keeps=keeps, rows=rows, state=state, splits=splits, master_width=own)
            )
        return result

    @cached_property
    def parts(self) -> list[OffloadGroupSpec]:
        """What rests off the device, in the order in which it is made."""
        offload, runs, result = self.options.offload, self.tensors.owner_runs, []
        if offload is None:
            return []
        for gather_group in self.gather_groups:
            if gather_group.state == "device":
                continue
            groups: dict[tuple[int, Compression | None], list[ParamSpec]] = {}
            for weight in gather_group.weights:
                if weight.trainable and weight.rule >= 0:
                    groups.setdefault((weight.rule, self.codecs[weight.name]), []).append(weight)
            for (number, codec), members in groups.items():
                by_name = {w.name: w for w in members}
                sizes = [(w.name, w.numel * WIDTHS[gather_group.compute]) for w in members]
                for names in buckets(sizes, bucket_limit(codec, offload.stage_bytes), runs):
                    spans, numel = self._spans(names)
                    kernel = self._kernel(members[0], gather_group.master)
                    native = kernel and self.overlapped
                    splits = native and offload.master == "split" and gather_group.compute == "bfloat16"
                    result.append(
                        OffloadGroupSpec(
                            weights=tuple(by_name[n] for n in names),
                            numel=numel,
                            spans=spans,
                            gathered_by=gather_group.key,
                            native=native,
                            splits=splits,
                            compute=gather_group.compute,
                            master=gather_group.master,
                            rule=self.rules[number],
                            unit=gather_group.unit,
                            rest=gather_group.state,
                            kernel=native or (kernel and gather_group.state == "disk"),
                            paged=gather_group.rows == "disk",
                        )
                    )
        return result

    @cached_property
    def repeated(self) -> tuple[str, ...]:
        """Units whose backward runs twice: of those that can the ones nearest the loss."""
        wanted = self.options.offload.repeat_backward if self.options.offload is not None else 0
        return self.repeatable[-wanted:] if wanted else ()

    @cached_property
    def repeatable(self) -> tuple[str, ...]:
        """Units whose backward could run a second time, for their updates alone: nothing else of what they
        train lands anywhere, nor is another unit inside."""
        native = {w.name for part in self.parts if part.native for w in part.weights}
        inner = [unit.name for unit in self.units]
        return tuple(
            unit.name
            for unit in self.units
            if unit.name
            and (trained := {w.name for w in unit.weights if w.trainable})
            and trained <= native
            and not any(name.startswith(f"{unit.name}.") for name in inner)
        )

    def _spans(self, names: Sequence[str]) -> tuple[tuple[tuple[int, int], ...], int]:
        """Where this rank's rows of each begin in what holds all of them, and how many elements that has."""
        spans, at = [], 0
        for name in names:
            held = self.tensors.slots[name].held(self.rank)
            spans.append((at, held))
            at += aligned(held, self.align)
        return tuple(spans), at

    def _kernel(self, weight: ParamSpec, master: str) -> bool:
        """Whether the native kernels know its update."""
        return weight.rule >= 0 and self.rules[weight.rule].kernel and master == "float32"

    @cached_property
    def overlapped(self) -> bool:
        """Whether the native kernels update what rests on the host, beside the computation."""
        precision = self.options.precision
        scaled = precision is not None and precision.compute == "float16"
        return self.options.defers or (self.options.clip_norm is not None and not scaled)

    @staticmethod
    def arrival(weight: ParamSpec) -> int:
        """When its gradient comes in backward: what orders the buckets."""
        return -weight.number

    @cached_property
    def buckets(self) -> list[BucketSpec]:
        """Gradients that are reduced together, in the order in which they go out."""
        trainable = sorted(self.tensors.trainable.values(), key=self.arrival)
        by_name = {w.name: w for w in trainable}
        dtypes, codecs = self.tensors.grad_dtypes, self.codecs
        sorts: dict[str, Sort] = {w.name: (*dtypes[w.name], codecs[w.name]) for w in trainable}
        taken = {w.name for part in self.parts for w in part.weights}
        groups: dict[Sort, list[tuple[tuple[ParamSpec, ...], OffloadGroupSpec | None]]] = {}
        for part in self.parts:
            groups.setdefault(sorts[part.weights[0].name], []).append((part.weights, part))
        owner_run = owner_runs((w.name, w.name in taken) for w in trainable)
        for sort in dict.fromkeys(sorts.values()):
            sizes = [
                (w.name, w.numel * WIDTHS[sort[0]])
                for w in trainable
                if sorts[w.name] == sort and w.name not in taken
            ]
            groups.setdefault(sort, []).extend(
                (tuple(by_name[n] for n in names), None)
                for names in buckets(sizes, bucket_limit(sort[2], self.options.bucket_bytes), owner_run)
            )
        result: list[BucketSpec] = []
        flat = self.options.stage == 0
        for (wire, landed, codec), members in groups.items():
            members.sort(key=lambda member: min(map(self.arrival, member[0])))
            result += [
                BucketSpec(
                    weights=ws,
                    slots=tuple(self.tensors.slots[w.name].reduced for w in ws),
                    wire=wire,
                    landed=landed,
                    align=self.align,
                    part=part,
                    flat=flat and not isinstance(codec, Rows),
                    codec=codec,
                )
                for ws, part in members
            ]
        return result

    @cached_property
    def rings(self) -> list[RingSpec]:
        """The wires of all buckets but those of which means travel, which have wires of their own."""
        numbers: dict[Sort, list[int]] = {}
        for number, bucket in enumerate(self.buckets):
            if not isinstance(bucket.codec, MeanCodec):
                numbers.setdefault((bucket.wire, bucket.landed, bucket.codec), []).append(number)
        return [self._ring(sort, members) for sort, members in numbers.items()]

    def _ring(self, sort: Sort, numbers: list[int]) -> RingSpec:
        (wire, landed, codec), members = sort, [self.buckets[number] for number in numbers]
        width, key = WIDTHS[wire], f"gradients torch.{wire}"
        if codec is None:  # up to stage 1 the whole gradient stays on its wire
            sizes = [bucket.wire_numel for bucket in members]
            own, stage = self.behind or not self.options.shards_grads, self.options.stage
            shown = stage == 1 or (stage == 0 and wire == landed and not self.behind)
            return RingSpec(key, wire, codec, tuple(numbers), tuple(sizes), own, shown)
        if isinstance(codec, Codec):
            sizes = [wire_bytes(codec, bucket.pack, width) for bucket in members]
        else:
            slots = [bucket.slots[0] for bucket in members]
            sizes = [sum(rows_bytes(slot, rank, width) for rank in range(self.world)) for slot in slots]
        return RingSpec(f"{key} {codec!r}", "uint8", codec, tuple(numbers), tuple(sizes), self.behind)

    @cached_property
    def scratch(self) -> tuple[int, int]:
        """Elements in fp32 that buckets with codecs share: of the longest wire that is coded, and of the
        longest shard whose sum lands in fewer bits."""
        users = [bucket for bucket in self.buckets if isinstance(bucket.codec, (Codec, Rows))]
        narrow = [bucket.pack.shard(self.rank) for bucket in users if WIDTHS[bucket.landed] < 4]
        coded = [bucket.wire_numel for bucket in users if isinstance(bucket.codec, Codec)]
        return max(coded, default=0), max(narrow, default=0)

    @cached_property
    def arriving(self) -> dict[str, tuple[int, int]]:
        """By the name of a weight, the number of the bucket that its gradient travels in, and its bytes on
        the unsharded parameter."""
        numbered = [(number, w) for number, bucket in enumerate(self.buckets) for w in bucket.weights]
        return {w.name: (number, w.numel * WIDTHS[self.tensors.dtypes[w.name][0]]) for number, w in numbered}

    @cached_property
    def sum_dtypes(self) -> dict[str, str]:
        """What unsharded parameters add several gradients up in, by name; see [Note: sums of micro-batches]
        in `params/sharded_param.py`."""
        return {
            name: max(self.tensors.dtypes[name][0], wire, key=WIDTHS.__getitem__)
            for name, (wire, _) in self.tensors.grad_dtypes.items()
        }

    def holding(self, summed: bool) -> list[bool]:
        """Of each bucket, whether its gradients may stay on some rank until the next one has left; see
        `bucket.held`. `summed`: where unsharded parameters have several gradients added up."""
        if self.traits.staged or self.behind:
            return [False] * len(self.buckets)
        result = []
        for bucket in self.buckets:
            names = [w.name for w in bucket.weights]
            dtypes = {self.sum_dtypes[name] if summed else self.tensors.dtypes[name][0] for name in names}
            straight = bucket.codec is None and dtypes == {bucket.wire}
            result.append(straight and max(bucket.pack.most) * WIDTHS[bucket.wire] >= HELD_BYTES)
        return result

    @cached_property
    def codecs(self) -> dict[str, Compression | None]:
        """What the gradient of every parameter travels through, by its name."""
        routes = self.options.compress
        if self.world == 1 or not routes:
            return dict.fromkeys(self.tensors.trainable)
        return {name: codec_for(routes, name, w.shape) for name, w in self.tensors.trainable.items()}
