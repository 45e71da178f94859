"""States a planning problem: what a plan is asked for, and the ways to run that it leaves open. No torch.

A *way* is a complete `Options`. Which units rest where, of a placing that fills one tier after another,
follows from how much of the device it may take: nothing here, and as much as fits in `candidates`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from zeroshard.errors import OptionError
from zeroshard.layout.memory import MemoryModel, StepSegment, heaviest, imbalance
from zeroshard.layout.prefetch import UnitVisit
from zeroshard.layout.specs import ASSUMED_TRAITS, WIDTHS, OptimizerRule, TransportTraits, UnitSpec
from zeroshard.machine import Machine
from zeroshard.options import Offload, Options, Precision, Stage, Tier

from .plan import PLACINGS, Candidate, Placing

NOTHING: Mapping[str, Any] = MappingProxyType({})
LEVEL = 0.01  # a larger imbalance than this is dealt with

Trace = Callable[[Options], tuple[StepSegment, ...]]


@dataclass(frozen=True)
class TierLimits:
    """The bytes that a plan may use: of a device, and of a node's host memory and disk, for all its ranks.

    - `path`: a folder on a disk that state may rest on; without it none does.
    - `shared`: device and host tier are one memory, of which a rank may use `device`.
    - `by_node`: whether the limit of a device was given as that of a node.
    """

    device: int
    host: int | None = None
    disk: int | None = None
    path: str | None = None
    shared: bool = False
    by_node: bool = False


@dataclass(frozen=True)
class OpenChoices:
    """What a plan may choose. `free`: names of other options than those that have a field here."""

    stages: tuple[Stage, ...] = (0, 1, 2, 3)
    placings: tuple[Placing, ...] = PLACINGS
    precisions: tuple[Precision | None, ...] | None = None
    recomputes: tuple[bool, ...] = (False, True)
    free: frozenset[str] = frozenset(("prefetch", "bucket_bytes", "split"))


@dataclass(frozen=True)
class HalfBatch:
    """A step with half of the batch: its trace, and the bytes of inputs and of the model's buffers."""

    trace: Trace
    inputs: int


@dataclass(frozen=True)
class PlannedStep:
    """A training step as far as it is known.

    - `trace`: its segments under given options; without it activations are unknown.
    - `inputs`: bytes of a batch and of the model's buffers. `half`: of half a batch, where it has two rows.
    - `micro_batches`: backward passes of a step, of which the last alone is synchronised.
    - `visits`: of units, where it does not go from one to the next.
    - `bounded`: whether values decide sizes in it, which it has at their largest.
    """

    trace: Trace | None = None
    inputs: int = 0
    micro_batches: int = 1
    half: HalfBatch | None = None
    visits: tuple[UnitVisit, ...] = ()
    bounded: bool = False


@dataclass(frozen=True)
class PlanningProblem:
    """What a plan is asked for. `options`: those that the user gave, and defaults."""

    model: str
    units: tuple[UnitSpec, ...]
    rules: tuple[OptimizerRule, ...]
    options: Options
    world: int
    limits: TierLimits
    machine: Machine
    step: PlannedStep = PlannedStep()
    choices: OpenChoices = OpenChoices()
    traits: TransportTraits = ASSUMED_TRAITS
    narrows: bool = True  # whether all of the model could compute in bf16
    recomputable: bool = True  # whether no unit writes what it is given
    codes_moments: bool = False  # whether 8-bit moments count as exact
    setups: dict[tuple[Options, int], MemoryModel] = field(default_factory=dict, compare=False, repr=False)
    # Of this very question: another limit, say, has its own.
    prices: dict[Options, Candidate] = field(default_factory=dict, init=False, compare=False, repr=False)

    def allowing(self, **choices: Any) -> PlanningProblem:
        """The same with other choices open."""
        return replace(self, choices=replace(self.choices, **choices))

    def limited(self, **limits: Any) -> PlanningProblem:
        """The same with other limits."""
        return replace(self, limits=replace(self.limits, **limits))

    def stepping(self, **step: Any) -> PlanningProblem:
        """The same with something else known of its step."""
        return replace(self, step=replace(self.step, **step))

    @cached_property
    def ranks_per_node(self) -> int:
        return min(self.world, self.machine.node)

    def on(self, ranks: int) -> PlanningProblem:
        """The same on so many ranks. Those of a node share what it has."""
        made = replace(self, world=ranks)
        if not self.limits.by_node:
            return made
        return made.limited(device=self.limits.device * self.ranks_per_node // made.ranks_per_node)

    @cached_property
    def spare(self) -> int:
        """Bytes of the limit that a plan leaves free where that costs nothing: an allocator's margin is as
        exact as a measurement."""
        return self.limits.device // 100 if self.machine.margin else 0

    @cached_property
    def host_share(self) -> float:
        """Host memory of one rank."""
        return math.inf if self.limits.host is None else self.limits.host / self.ranks_per_node

    @cached_property
    def disk_share(self) -> float:
        """Disk of one rank."""
        return math.inf if self.limits.disk is None else self.limits.disk / self.ranks_per_node

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The units that can be recomputed."""
        return tuple(unit.name for unit in self.units if unit.name)

    @cached_property
    def unused(self) -> tuple[str, ...]:
        """Trainable weights that get no gradient."""
        weights = (w for unit in self.units for w in unit.weights)
        return tuple(w.name for w in weights if w.trainable and not w.used)

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest tensor, below which no bucket can go."""
        return max((w.numel * WIDTHS[w.dtype] for unit in self.units for w in unit.weights), default=1)

    def setup(self, options: Options) -> MemoryModel:
        """What a way is made of. Ways that differ in recomputation only share nearly all of it."""
        base = replace(options, recompute=False)
        known = self.setups.get((base, self.world))
        offload = base.offload
        if known is None and offload is not None and offload.automatic and offload.device_bytes:
            none = replace(base, offload=replace(offload, device_bytes=0))
            known = self.setups[base, self.world] = self.setup(none).within(offload.device_bytes)
        if known is None:
            # Tensors are divided and gathered alike whatever is on the host, and in buckets of any size.
            stage: Stage = 3 if base.stage else 0
            alike = Options(stage=stage, split=base.split, precision=base.precision, gather=base.gather)
            kin = self.setups.get((alike, self.world))
            if kin is None:
                made = MemoryModel(
                    self.units,
                    alike,
                    self.world,
                    self.rules,
                    traits=self.traits,
                    visits=self.step.visits,
                )
                kin = self.setups[alike, self.world] = heaviest(made)
            known = self.setups[base, self.world] = kin.grouped_as(base)
        return known.recomputing(options.recompute) if options.recompute else known

    def segments(self, options: Options) -> tuple[StepSegment, ...]:
        trace = self.step.trace
        return trace(options) if trace is not None else ()

    def way(
        self,
        stage: Stage,
        placing: Placing = "device",
        recompute: bool | tuple[str, ...] = False,
        lean: bool = False,
        changes: Mapping[str, Any] = NOTHING,
    ) -> Options:
        """The options of one way to run. An offload or patterns of units that the user named are used as
        they are. `changes`: of the fields of another `Offload` (`as_exact`)."""
        own = self.options.offload is not None and placing == placing_of(self.options.offload)
        offload = self.options.offload if own else self.offload(placing, stage)
        if changes:
            offload = (
                Offload(optimizer="device", **changes) if offload is None else replace(offload, **changes)
            )
        patterns = self.options.recompute
        made = replace(
            self.options,
            stage=stage,
            split="level" if self._uneven and stage else self.options.split,
            offload=offload,
            recompute=patterns if recompute is True and isinstance(patterns, tuple) else recompute,
        )
        return self.leaner(made, own) if lean else made

    @cached_property
    def _uneven(self) -> bool:
        """Whether chunks of rows would leave the fullest rank with over 1 % more than the mean, and may be
        dealt otherwise."""
        if "split" not in self.choices.free or self.options.split != "auto" or self.world == 1:
            return False
        plain = Options(stage=3, units=self.options.units)
        return imbalance(MemoryModel(self.units, plain, self.world, self.rules)) > LEVEL

    def offload(self, placing: Placing, stage: Stage) -> Offload | None:
        """What a placing is. Those that fill the device first begin with none of it (`filled`)."""
        if placing == "device":
            return None
        if placing == "state on disk":
            return Offload(optimizer="disk", path=self.limits.path)
        if placing == "state on host":
            return Offload()
        if placing == "all on host":
            return Offload(parameters="host")
        streams: Tier = "auto" if stage == 3 or self.world == 1 else "device"
        if placing == "some on disk":
            share = int(self.host_share) if self.limits.host is not None else None
            return Offload(
                optimizer="auto", parameters=streams, path=self.limits.path, device_bytes=0, host_bytes=share
            )
        return Offload(optimizer="auto", parameters=streams, device_bytes=0)

    def as_exact(self, placing: Placing) -> Iterator[dict[str, Any]]:
        """Fields of `Offload` that take less memory and change no number: a split master, in the kernels of a
        host that is told to clip or not to, and on the device in any element-wise optimizer; and gradients
        that wait for the loop's clipping and step on the host."""
        options, precision = self.options, self.options.precision
        if options.offload is not None and placing == placing_of(options.offload):
            return
        narrow = precision is not None and (precision.compute, precision.master) == ("bfloat16", "float32")
        on_device = placing == "device"
        knows = any(rule.by_rows if on_device else rule.kernel for rule in self.rules)
        if narrow and knows and (on_device or options.clip_norm is not None):
            yield {"master": "split"}
        if self.codes_moments and not on_device:
            yield {"moments": "int8"} | ({"master": "split"} if narrow else {})
        if not on_device and replace(options, offload=Offload()).defers:
            yield {"undo": False}
        if not on_device and self._repeats:
            yield {"repeat_backward": len(self.names)}
            if narrow and options.clip_norm is not None:
                yield {"repeat_backward": len(self.names), "master": "split"}

    @property
    def _repeats(self) -> bool:
        """Whether units may run backward twice instead of keeping gradients until the norm is known."""
        if self.world > 1 or self.step.micro_batches > 1 or not any(rule.kernel for rule in self.rules):
            return False
        try:
            replace(self.options, offload=Offload(repeat_backward=1))
        except OptionError:
            return False
        return True

    def leaner(self, options: Options, own_offload: bool = False) -> Options:
        """The same with buckets no larger than the largest tensor, and nothing gathered ahead."""
        small = max(min(options.bucket_bytes, self.largest), 1024)
        made = options
        if "bucket_bytes" in self.choices.free:
            made = replace(made, bucket_bytes=small)
        if "prefetch" in self.choices.free:
            made = replace(made, prefetch=0)
        offload = made.offload
        if offload is not None and not own_offload:
            made = replace(
                made, offload=replace(offload, stages=2, stage_bytes=min(offload.stage_bytes, small))
            )
        return made

    def families(self) -> Iterator[tuple[Stage, Placing]]:
        """Every stage and placing that mean something together. On one rank all stages are the same."""
        stages: tuple[Stage, ...] = self.choices.stages if self.world > 1 else self.choices.stages[:1]
        for stage in stages:
            for placing in self.choices.placings:
                if placing == "all on host" and stage < 3 and self.world > 1:
                    continue  # resident parameters cannot be streamed
                if self._has_disk_for(placing) and self._goes_with_sync(stage, placing):
                    yield stage, placing

    def _goes_with_sync(self, stage: Stage, placing: Placing) -> bool:
        """Not every policy works at every stage, or with offload."""
        try:
            self.way(stage, placing)
        except OptionError:
            return False
        return True

    def _has_disk_for(self, placing: Placing) -> bool:
        """What rests on a disk is updated by the native kernels alone."""
        given = self.options.offload is not None and placing == placing_of(self.options.offload)
        if given or "disk" not in placing:
            return True
        if self.limits.path is None or (placing == "some on disk" and self.limits.host is None):
            return False
        return all(rule.kernel for rule in self.rules)

    def by_precision(self) -> Iterator[PlanningProblem]:
        """One question for each precision that is allowed."""
        for precision in self.choices.precisions or (self.options.precision,):
            yield replace(self, options=replace(self.options, precision=precision))


def placing_of(offload: Offload | None) -> Placing:
    """Which of the planner's placings an offload is."""
    if offload is None or offload.optimizer == offload.parameters == "device":
        return "device"
    if offload.automatic:
        return "some on disk" if offload.path is not None else "some on host"
    if offload.optimizer == "disk":
        return "state on disk"
    return "all on host" if offload.parameters == "host" else "state on host"
