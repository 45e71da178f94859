"""How a model is divided: slots, bundles, parts and buckets, from options and shapes alone. Integers only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from zeroshard.codec import Codec, Compression, Delta, Rows
from zeroshard.codec.base import padded
from zeroshard.config import DTYPE_BYTES, Options
from zeroshard.policy import Local, choices_of, delays
from zeroshard.routes import bucket_limit, codec_for, gather_codec

from .layout import ALIGN, Slot, aligned, buckets, slots_by_name, stretches
from .lending import Course, Sizes, Visit, small_units
from .placement import Place, Placement, Rest
from .shapes import BLOCK, ROOT, WIDTHS, Block, Bucket, Bundle, Part, Rule, Weight
from .wires import HELD_BYTES, Sort

NATIVE = ("Adam", "AdamW", "SGD")  # optimizers whose update the host can overlap


@dataclass(frozen=True)
class Division(ABC):
    """All that the bytes of a run depend on. `overlaps`, `staged`, `direct`: as its
    transport; `rank`: whose bytes."""

    units: tuple[Block, ...]
    options: Options
    world: int
    rules: tuple[Rule, ...] = (Rule(),)
    rank: int = 0
    overlaps: bool = True
    staged: bool = False
    direct: bool = False
    placement: Placement | None = None  # decided already; else `places` decides
    visits: tuple[Visit, ...] = ()  # of a `Course`

    @property
    @abstractmethod
    def places(self) -> Placement:
        """The tier of every unit."""

    def place(self, bundle: Bundle) -> Place:
        return self.places[bundle.unit or ROOT]

    @cached_property
    def slots(self) -> dict[str, Slot]:
        split = self.options.split
        weights = [w for unit in self.units for w in unit.weights]
        whole = {
            w.name
            for w in weights
            if split == "whole" or (w.rule >= 0 and split != "rows" and not self.rules[w.rule].by_rows)
        }
        return slots_by_name([(w.name, w.shape) for w in weights], whole, self.world, self.options.rows)

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
        whole = not self.options.shards_params or self.world == 1 or bundle.unit in self.small
        return whole and not self.streams(bundle)

    @cached_property
    def small(self) -> frozenset[str]:
        """Units that stay whole at stage 3, where rows travel as they are; see [Note: small units]."""
        if not self.options.shards_params or self.options.gather:
            return frozenset()
        return small_units(
            {u.name: [w.numel * WIDTHS[self.dtypes(w)[0]] for w in u.weights] for u in self.units}
        )

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
        """Bytes of this rank's code, of those that it keeps for its node, and of what all ranks believe."""
        if not self.codes(bundle):
            return 0
        codes = sum(self.code_bytes(bundle, rank) for rank in [self.rank, *self._namesakes(bundle)])
        return codes + (4 * sum(map(bundle.body, range(self.world))) if self.changes(bundle) else 0)

    def changes(self, bundle: Bundle) -> bool:
        """Whether changes of its rows travel, and are added to what all ranks believe."""
        return self.codes(bundle) and isinstance(bundle.codec, Delta)

    def codes(self, bundle: Bundle) -> bool:
        """Whether its rows travel through a codec."""
        moves = self.world > 1 and any(slot.split != "copy" for slot in bundle.slots)
        return moves and bundle.codec is not None and bundle.compute in DTYPE_BYTES

    def code_bytes(self, bundle: Bundle, rank: int) -> int:
        """Of one rank's rows."""
        assert bundle.codec is not None
        return padded(bundle.codec.wire_bytes(bundle.body(rank)))

    @property
    def streamed(self) -> bool:
        """Whether any weights rest off the device."""
        return any(self.streams(bundle) for bundle in self.bundles)

    @property
    def ahead(self) -> int:
        """How many units are gathered ahead of use, and stay from forward to backward beside the last."""
        return self.options.prefetch if self.overlaps or self.streamed else 0

    @property
    def resident(self) -> bool:
        """Whether all leaves are always whole on the device."""
        return all(self.keeps(bundle) for bundle in self.bundles)

    @cached_property
    def reduces(self) -> bool:
        """Whether gradients travel in every step: not on one rank, nor where ranks train apart."""
        return self.world > 1 and any(
            not isinstance(choice, Local) for choice in choices_of(self.options.sync)
        )

    @property
    def behind(self) -> bool:
        """Whether gradients may land a step late."""
        return delays(self.options.sync)

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

    @property
    def waiting(self) -> frozenset[str]:
        """Units with weights that a step does not use: their gradients are never complete."""
        return frozenset(u.name for u in self.units if any(w.trainable and not w.used for w in u.weights))

    @property
    def course(self) -> Course:
        frozen = frozenset(u.name for u in self.units if not any(w.trainable for w in u.weights))
        return Course(self.visits, self.waiting, frozen, self._recomputed)

    @property
    def lends(self) -> dict[str, Sizes]:
        """By unit, the buffers that it is gathered into; none where it is always whole."""
        sizes = {unit.name: Sizes() for unit in self.units}
        for bundle in self.bundles:
            if not self.keeps(bundle):
                sizes[bundle.unit][bundle.full, bundle.compute] += 1
        return sizes

    def state_rest(self, bundle: Bundle) -> Rest:
        return self.place(bundle).optimizer

    def own_master(self, bundle: Bundle) -> bool:
        """Whether there is a master on the device beside the compute weights."""
        decoded = self.codes(bundle) and self.keeps(bundle)
        differs = bundle.master != bundle.compute or self.streams(bundle) or decoded
        return differs and self.state_rest(bundle) == "device"

    def splits(self, bundle: Bundle) -> bool:
        """Whether that master is the weights and a remainder, joined for a chunk at a time: so the optimizers
        must be element-wise."""
        offload = self.options.offload
        return (
            self.own_master(bundle)
            and not self.streams(bundle)
            and offload is not None
            and offload.master == "split"
            and (bundle.compute, bundle.master) == ("bfloat16", "float32")
            and all(w.rule < 0 or self.rules[w.rule].by_rows for w in bundle.weights)
        )

    def master_bytes(self, bundle: Bundle) -> int:
        """Of the master on the device beside the compute weights, if there is one."""
        if not self.own_master(bundle):
            return 0
        return (2 if self.splits(bundle) else WIDTHS[bundle.master]) * bundle.body(self.rank)

    @property
    def align(self) -> int:
        return BLOCK if self.options.offload is not None and self.options.offload.moments == "int8" else ALIGN

    def dtypes(self, weight: Weight) -> tuple[str, str]:
        """Compute and master dtype."""
        known = self._dtypes.get(weight.name)
        if known is None:
            known = self._dtypes[weight.name] = self._found_dtypes(weight)
        return known

    @cached_property
    def _dtypes(self) -> dict[str, tuple[str, str]]:
        return {}

    def _found_dtypes(self, weight: Weight) -> tuple[str, str]:
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
            groups: dict[tuple[tuple[str, str], Codec | None], list[Weight]] = {}
            for weight in unit.weights:
                codec = gather_codec(self.options.gather, weight.name)
                groups.setdefault((self.dtypes(weight), codec), []).append(weight)
            result += [
                Bundle(unit.name, *dtypes, tuple(ws), tuple(self.slots[w.name] for w in ws), codec)
                for (dtypes, codec), ws in groups.items()
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
                for names in buckets(sizes, bucket_limit(codec, offload.stage_bytes), self._stretches):
                    numel = sum(aligned(self.slots[name].held(self.rank), self.align) for name in names)
                    kernel = self._kernel(members[0], bundle.master)
                    native = kernel and self.overlapped
                    splits = native and offload.master == "split" and bundle.compute == "bfloat16"
                    result.append(
                        Part(
                            weights=tuple(by_name[n] for n in names),
                            numel=numel,
                            native=native,
                            splits=splits,
                            compute=bundle.compute,
                            master=bundle.master,
                            rule=self.rules[number],
                            unit=bundle.unit,
                            rest=self.state_rest(bundle),
                            kernel=native or (kernel and self.state_rest(bundle) == "disk"),
                            paged=self.rows_rest(bundle) == "disk",
                        )
                    )
        return result

    @cached_property
    def _stretches(self) -> dict[str, int]:
        """See `layout.stretches`: of the weights of one unit."""
        owners = [(w, unit.name) for unit in self.units for w in unit.weights if w.trainable]
        return stretches((w.name, name) for w, name in sorted(owners, key=lambda one: one[0].number))

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
        stretch = stretches((w.name, w.name in taken) for w in trainable)
        for sort in dict.fromkeys(sorts.values()):
            sizes = [
                (w.name, w.numel * WIDTHS[sort[0]])
                for w in trainable
                if sorts[w.name] == sort and w.name not in taken
            ]
            groups.setdefault(sort, []).extend(
                (tuple(by_name[n] for n in names), None)
                for names in buckets(sizes, bucket_limit(sort[2], self.options.bucket_bytes), stretch)
            )
        result: list[Bucket] = []
        flat = self.options.stage == 0
        for (wire, landed, codec), members in groups.items():
            members.sort(key=lambda member: -max(w.number for w in member[0]))
            result += [
                Bucket(
                    weights=ws,
                    slots=tuple(self.slots[w.name].reduced for w in ws),
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
    def arriving(self) -> dict[str, tuple[int, int]]:
        """By the name of a weight, the number of the bucket that its gradient travels in, and its bytes on
        the leaf."""
        numbered = [(number, w) for number, bucket in enumerate(self.buckets) for w in bucket.weights]
        return {w.name: (number, w.numel * WIDTHS[self.dtypes(w)[0]]) for number, w in numbered}

    @cached_property
    def holding(self) -> list[bool]:
        """Of each bucket, whether its gradients may stay on some rank until the next one has left; see
        `bucket.held`."""
        return [not self.staged and not self.behind and self._holds(bucket) for bucket in self.buckets]

    def _holds(self, bucket: Bucket) -> bool:
        width, members = WIDTHS[bucket.wire], zip(bucket.weights, bucket.pack.most, strict=True)
        plain = bucket.codec is None
        return plain and any(n * width >= HELD_BYTES and self.dtypes(w)[0] == bucket.wire for w, n in members)

    @cached_property
    def trainable(self) -> dict[str, Weight]:
        return {w.name: w for unit in self.units for w in unit.weights if w.trainable}

    def codec(self, weight: Weight) -> Compression | None:
        """What its gradient travels through."""
        return codec_for(self.options.compress, weight.name, weight.shape) if self.world > 1 else None

    def freezes(self, weight: Weight) -> bool:
        """Whether its second moments are kept beside the optimizer's."""
        codec = self.codec(weight)
        return codec is not None and codec.freezes

    def sort(self, weight: Weight) -> Sort:
        """Weights of one sort may share a bucket."""
        return (*self.grad_dtypes(weight), self.codec(weight))
