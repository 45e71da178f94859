"""How many bytes a rank holds, for what, and when. Integers only: no torch, no memory, any number of ranks.

`buffers_of` repeats, size by size, what `build` allocates: for a run on the CPU its figures are those of
`run.stats()`, to the byte.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property

from .codec import Compression, Rows
from .coding import in_words
from .config import DTYPE_BYTES, Options
from .layout import ALIGN, Slot, Split, aligned, buckets, slots_for
from .lending import Sizes, block_bytes, most_lent, staging_bytes
from .placement import Budget, Buffering, Bytes, Demand, Place, Placement, Rest, Wish, arrange
from .routes import bucket_limit, codec_for
from .shapes import BLOCK, GRAIN, ROOT, WIDTHS, Block, Bucket, Buffers, Bundle, Part, Rule, Weight
from .wires import Sort, gradients_of

NATIVE = ("Adam", "AdamW", "SGD")  # optimizers whose update the host can overlap


@dataclass(frozen=True)
class Setup:
    """All that the bytes of a run depend on. `overlaps`: gathers run ahead (any transport but shared
    memory); `rank`: whose bytes."""

    units: tuple[Block, ...]
    options: Options
    world: int
    rules: tuple[Rule, ...] = (Rule(),)
    rank: int = 0
    overlaps: bool = True
    placement: Placement | None = None  # decided already; else `places` decides

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

    def place(self, bundle: Bundle) -> Place:
        return self.places[bundle.unit or ROOT]

    @cached_property
    def slots(self) -> dict[str, Slot]:
        split = self.options.split
        weights = [w for unit in self.units for w in unit.weights]
        whole = {
            w.name
            for w in weights
            if w.rule >= 0 and (split == "whole" or (split == "auto" and not self.rules[w.rule].by_rows))
        }
        result: dict[str, Slot] = {}
        kinds: tuple[tuple[Split, bool], ...] = (("rows", False), ("whole", True))
        for kind, chosen in kinds:
            group = [(w.name, w.shape) for w in weights if (w.name in whole) == chosen]
            made = slots_for(group, self.world, kind if self.options.shards_state else "copy")
            result |= {slot.name: slot for slot in made}
        return result

    def rows_rest(self, bundle: Bundle) -> Rest:
        """Where its compute weights rest: on the disk only beside their state, all of them."""
        rest = self.place(bundle).parameters
        if rest != "disk":
            return rest
        beside = all(w.trainable and self._kernel(w, bundle.master) for w in bundle.weights)
        return "disk" if beside else "host"

    def streams(self, bundle: Bundle) -> bool:
        """Whether its compute weights rest off the device."""
        return self.place(bundle).parameters != "device"

    def keeps(self, bundle: Bundle) -> bool:
        """Whether its leaves are always whole on the device."""
        return not self.streams(bundle) and (not self.options.shards_params or self.world == 1)

    def cached(self, bundle: Bundle) -> int:
        """Elements of other nodes that this rank keeps for its own."""
        return 0 if self.codes(bundle) else sum(bundle.body(rank) for rank in self._namesakes(bundle))

    def _namesakes(self, bundle: Bundle) -> list[int]:
        """Ranks of other nodes whose rows this rank keeps for its own node."""
        each = self.options.ranks_per_node
        if not self.options.node_cache or each is None or all(s.split == "copy" for s in bundle.slots):
            return []
        return [rank for rank in range(self.rank % each, self.world, each) if rank != self.rank]

    def codes_held(self, bundle: Bundle) -> int:
        """Bytes of this rank's code, and of those that it keeps for its node."""
        if not self.codes(bundle):
            return 0
        return sum(self.code_bytes(bundle, rank) for rank in [self.rank, *self._namesakes(bundle)])

    def codes(self, bundle: Bundle) -> bool:
        """Whether its rows travel through a codec."""
        moves = self.world > 1 and any(slot.split != "copy" for slot in bundle.slots)
        return moves and self.options.gather is not None and bundle.compute in DTYPE_BYTES

    def code_bytes(self, bundle: Bundle, rank: int) -> int:
        """Of one rank's rows."""
        assert self.options.gather is not None
        return in_words(self.options.gather.wire_bytes(bundle.body(rank)))

    @property
    def streamed(self) -> bool:
        """Whether any weights rest off the device."""
        return any(self.streams(bundle) for bundle in self.bundles)

    @property
    def resident(self) -> bool:
        """Whether all leaves are always whole on the device."""
        return all(self.keeps(bundle) for bundle in self.bundles)

    @property
    def on_host(self) -> bool:
        """Whether any state rests off the device."""
        return any(place.optimizer != "device" for place in self.places)

    def recomputes(self, unit: str) -> bool:
        return unit in self._recomputed

    @cached_property
    def _recomputed(self) -> frozenset[str]:
        wanted, names = self.options.recompute, [unit.name for unit in self.units if unit.name]
        if isinstance(wanted, bool):
            return frozenset(names if wanted else ())
        exact = set(wanted)
        patterns = [pattern for pattern in wanted if any(mark in pattern for mark in "*?[")]
        return frozenset(n for n in names if n in exact or any(fnmatchcase(n, p) for p in patterns))

    def state_rest(self, bundle: Bundle) -> Rest:
        return self.place(bundle).optimizer

    def own_master(self, bundle: Bundle) -> bool:
        """Whether there is a master on the device beside the compute weights."""
        decoded = self.codes(bundle) and self.keeps(bundle)
        differs = bundle.master != bundle.compute or self.streams(bundle) or decoded
        return differs and self.state_rest(bundle) == "device"

    @property
    def align(self) -> int:
        return BLOCK if self.options.offload is not None and self.options.offload.moments == "int8" else ALIGN

    def dtypes(self, weight: Weight) -> tuple[str, str]:
        """Compute and master dtype."""
        precision = self.options.precision
        if precision is None or not weight.dtype.startswith(("float", "bfloat")):
            return weight.dtype, weight.dtype
        keeps = any(fnmatchcase(weight.name, pattern) for pattern in precision.keep)
        return (precision.master if keeps else precision.compute), precision.master

    def grad_dtypes(self, weight: Weight) -> tuple[str, str]:
        """What travels, and what `p.grad` is."""
        precision, compute = self.options.precision, self.dtypes(weight)[0]
        if precision is None or compute == precision.master:
            return compute, compute
        return precision.wire, precision.landed

    @cached_property
    def bundles(self) -> list[Bundle]:
        result = []
        for unit in self.units:
            groups: dict[tuple[str, str], list[Weight]] = {}
            for weight in unit.weights:
                groups.setdefault(self.dtypes(weight), []).append(weight)
            result += [
                Bundle(unit.name, compute, master, tuple(ws), tuple(self.slots[w.name] for w in ws))
                for (compute, master), ws in groups.items()
            ]
        return result

    @cached_property
    def parts(self) -> list[Part]:
        """What rests off the device, in the order in which it is made."""
        offload, result = self.options.offload, []
        if offload is None:
            return []
        for bundle in self.bundles:
            if self.state_rest(bundle) == "device":
                continue
            groups: dict[tuple[int, Compression | None], list[Weight]] = {}
            for weight in bundle.weights:
                if weight.trainable and weight.rule >= 0:
                    groups.setdefault((weight.rule, self.codec(weight)), []).append(weight)
            for (number, codec), members in groups.items():
                by_name = {w.name: w for w in members}
                sizes = [(w.name, w.numel * WIDTHS[bundle.compute]) for w in members]
                for names in buckets(sizes, bucket_limit(codec, offload.stage_bytes)):
                    numel = sum(aligned(self.slots[name].held(self.rank), self.align) for name in names)
                    kernel = self._kernel(members[0], bundle.master)
                    native = kernel and self.overlapped
                    splits = native and offload.master == "split" and bundle.compute == "bfloat16"
                    result.append(
                        Part(
                            tuple(by_name[n] for n in names),
                            numel,
                            native,
                            splits,
                            bundle.compute,
                            bundle.master,
                            self.rules[number],
                            bundle.unit,
                            self.state_rest(bundle),
                            native or (kernel and self.state_rest(bundle) == "disk"),
                            self.rows_rest(bundle) == "disk",
                        )
                    )
        return result

    def _kernel(self, weight: Weight, master: str) -> bool:
        """Whether the native kernels know its update."""
        return weight.rule >= 0 and self.rules[weight.rule].name in NATIVE and master == "float32"

    @property
    def overlapped(self) -> bool:
        """Whether the host's updates begin in backward."""
        precision = self.options.precision
        scaled = precision is not None and precision.compute == "float16"
        return self.options.clip_norm is not None and not scaled

    @cached_property
    def buckets(self) -> list[Bucket]:
        """Gradients that are reduced together, in the order in which they go out."""
        parts = [(part.weights, part) for part in self.parts]
        taken = {w.name for weights, _ in parts for w in weights}
        trainable = sorted((w for u in self.units for w in u.weights if w.trainable), key=lambda w: -w.number)
        groups: dict[Sort, list[tuple[tuple[Weight, ...], Part | None]]] = {}
        for weights, part in parts:
            groups.setdefault(self.sort(weights[0]), []).append((weights, part))
        by_name = {w.name: w for w in trainable}
        sorts = {w.name: self.sort(w) for w in trainable}
        for sort in dict.fromkeys(sorts.values()):
            sizes = [
                (w.name, w.numel * WIDTHS[sort[0]])
                for w in trainable
                if sorts[w.name] == sort and w.name not in taken
            ]
            groups.setdefault(sort, []).extend(
                (tuple(by_name[n] for n in names), None)
                for names in buckets(sizes, bucket_limit(sort[2], self.options.bucket_bytes))
            )
        result: list[Bucket] = []
        flat = self.options.stage == 0
        for (wire, landed, codec), members in groups.items():
            members.sort(key=lambda member: -max(w.number for w in member[0]))
            result += [
                Bucket(
                    ws,
                    tuple(self._grad_slot(w) for w in ws),
                    wire,
                    landed,
                    self.align,
                    part,
                    flat and not isinstance(codec, Rows),
                    codec,
                )
                for ws, part in members
            ]
        return result

    def codec(self, weight: Weight) -> Compression | None:
        """What its gradient travels through."""
        return codec_for(self.options.compress, weight.name, weight.shape) if self.world > 1 else None

    def sort(self, weight: Weight) -> Sort:
        """Weights of one sort may share a bucket."""
        return (*self.grad_dtypes(weight), self.codec(weight))

    @cached_property
    def held(self) -> Buffers:
        """`buffers_of` this, reckoned once."""
        return buffers_of(self)

    def recomputing(self, recompute: tuple[str, ...] | bool) -> Setup:
        """The same with other units recomputed: of all bytes only those of gathered units depend on it."""
        made = replace(self, options=replace(self.options, recompute=recompute))
        shared = {name: getattr(self, name) for name in ("places", "slots", "bundles", "parts", "buckets")}
        made.__dict__.update(shared, held=replace(self.held, gathered=gathered(made)))
        return made

    def _grad_slot(self, weight: Weight) -> Slot:
        slot = self.slots[weight.name]
        return replace(slot, split="rows") if self.world > 1 and slot.split == "copy" and slot.shape else slot


def buffers_of(setup: Setup) -> Buffers:
    """Every lasting buffer of a rank once its run has taken a step or two."""
    return (
        _weights(setup)
        + gradients_of(setup.buckets, setup.options.stage, setup.world, setup.rank)
        + _host(setup)
        + Buffers(state=_moments(setup, host=False), gathered=gathered(setup))
    )


def _weights(setup: Setup) -> Buffers:
    rank, total = setup.rank, Buffers()
    for bundle in setup.bundles:
        numel = bundle.full if setup.keeps(bundle) else bundle.body(rank) + setup.cached(bundle)
        size = WIDTHS[bundle.compute] * numel
        if setup.rows_rest(bundle) != "disk":
            total += Buffers(host=size) if setup.streams(bundle) else Buffers(parameters=size)
        total += Buffers(parameters=setup.codes_held(bundle))
        if setup.own_master(bundle):
            total += Buffers(state=WIDTHS[bundle.master] * bundle.body(rank))
    return total


def _host(setup: Setup) -> Buffers:
    offload = setup.options.offload
    moments = _moments(setup, host=True)
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
        host += _landed_bytes(setup, part)
    staging = staging_bytes(staged, offload.stages)
    staging += block_bytes(part.weight_bytes() for part in setup.parts if part.paged)
    berths = min(offload.stages, len(disk) + 1) * max(*disk, GRAIN) if disk else 0
    return Buffers(host=host + berths + moments, staging=staging, disk=sum(disk))


def placed(setup: Setup) -> Placement:
    """What ``auto`` comes to: every unit's bytes in each tier, within the budgets of the options."""
    offload = setup.options.offload
    assert offload is not None
    whole = setup.world > 1 and not setup.options.shards_params
    wish = Wish(offload.optimizer, offload.parameters).of(setup.world, whole, offload.path is not None)
    budget = Budget(offload.device_bytes, offload.host_bytes, None if offload.path is not None else 0)
    demands, buffering = demands_of(setup)
    return arrange(demands, budget, wish, buffering)


def demands_of(setup: Setup) -> tuple[list[Demand], Buffering]:
    """What every unit takes in each tier, and what offloading itself takes."""
    labels = [unit.label for unit in setup.units]

    def there(rest: Rest) -> Setup:
        return replace(
            setup, placement=Placement.uniform(labels, rest, "device" if rest == "device" else "host")
        )

    near, host, disk = there("device"), there("host"), there("disk")
    demands = []
    for unit in setup.units:
        weights = [_weight_bytes(way, unit.name) for way in (near, host)]
        weights.append(sum(part.weight_bytes() for part in disk.parts if part.unit == unit.name))
        state = [_state_bytes(way, unit.name) for way in (near, host, disk)]
        demands.append(Demand(unit.label, Bytes(*state), Bytes(*weights)))
    passing = _host(disk).host - _moments(disk, host=True)  # and gradients that the loop sees
    lent = gathered(host) if setup.world == 1 else 0
    blocks = block_bytes(part.weight_bytes() for part in disk.parts)
    return demands, Buffering(lent, _host(host).staging, passing, blocks)


def _landed_bytes(setup: Setup, part: Part) -> int:
    """Host memory for gradients that the loop sees."""
    return 0 if part.native else part.numel * WIDTHS[setup.grad_dtypes(part.weights[0])[1]]


def _weight_bytes(setup: Setup, unit: str) -> int:
    return sum(
        WIDTHS[b.compute] * (b.full if setup.keeps(b) else b.body(setup.rank))
        for b in setup.bundles
        if b.unit == unit
    )


def _state_bytes(setup: Setup, unit: str) -> int:
    """Master and moments of one unit, in the tier that this setup puts them in."""
    offload = setup.options.offload
    assert offload is not None
    int8, total = offload.moments == "int8", 0
    for part in setup.parts:
        if part.unit == unit:
            if part.rest == "disk":  # gradients that the loop sees are not there
                total += part.disk_bytes(int8)
            else:
                total += part.state_bytes(int8) + _landed_bytes(setup, part)
    masters = sum(
        WIDTHS[b.master] * b.body(setup.rank) for b in setup.bundles if b.unit == unit and setup.own_master(b)
    )
    rest = setup.places[unit or ROOT].optimizer
    return total + masters + _moments(setup, host=rest != "device", unit=unit)


def _moments(setup: Setup, host: bool, unit: str | None = None) -> int:
    """State that torch's own optimizer makes at its first step, beside the rows that it updates. Scalars
    are not counted."""
    total = 0
    native = {w.name for part in setup.parts if part.kernel for w in part.weights}
    for bundle in setup.bundles:
        if (setup.state_rest(bundle) != "device") == host and unit in (None, bundle.unit):
            for weight, slot in zip(bundle.weights, bundle.slots, strict=True):
                if weight.trainable and weight.rule >= 0 and weight.shape and weight.name not in native:
                    total += slot.held(setup.rank) * WIDTHS[bundle.master] * setup.rules[weight.rule].moments
    return total


def gathered(setup: Setup) -> int:
    """Bytes of the pool's buffers after a training step; see `lending`."""
    sizes = {unit.name: Sizes() for unit in setup.units}
    stages, scratches = {unit.name: Sizes() for unit in setup.units}, set[int]()
    for bundle in setup.bundles:
        if not setup.keeps(bundle):
            sizes[bundle.unit][bundle.full, bundle.compute] += 1
        if setup.codes(bundle):
            stages[bundle.unit][sum(setup.code_bytes(bundle, r) for r in range(setup.world)), "uint8"] += 1
            scratches.add(max(bundle.body(rank) for rank in range(setup.world)))
    ahead = setup.options.prefetch if setup.overlaps or setup.streamed else 0
    at_once = setup.overlaps and setup.resident  # all are published at once
    most = most_lent(sizes, stages, ahead, setup.recomputes, at_once)
    lasting = sum(number * numel * WIDTHS[dtype] for (numel, dtype), number in most.items())
    return lasting + sum(numel * WIDTHS["float32"] for numel in scratches)
