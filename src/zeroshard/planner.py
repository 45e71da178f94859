"""The ways to run a model, each priced in bytes and seconds. No torch.

A *way* is a complete `Options`. Ways that share stage, placing and precision are a *family*: within it,
memory is saved by recomputing units (as few as it takes) and by being *lean*: buckets no larger than the
largest tensor, nothing gathered ahead. Which units rest where, of a placing that fills one tier after
another, follows from how much of the device it may take: as much as fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property

from .balance import heaviest, imbalance
from .config import Options, Precision, Stage
from .crossing import sent_by_rank
from .division import NATIVE
from .errors import OptionError, PlanError
from .machine import Machine
from .memory import Setup
from .offload import Offload, Tier
from .plan import PLACINGS, Candidate, Placing, settings_of
from .pricing import seconds_of
from .shapes import WIDTHS, Block, Buffers, Rule
from .timeline import Moment, Segment, peak_of, step_moments

FILLING: tuple[Placing, ...] = ("some on host", "some on disk")
LEVEL = 0.01  # a larger imbalance than this is dealt with
FINE = 32  # into how many parts a device is divided where it is found how much of it may be filled

Trace = Callable[[Options], tuple[Segment, ...]]


@dataclass(frozen=True)
class Question:
    """What a plan is asked for.

    - `options`: those that the user gave, and defaults. `stages`, `placings`, `precisions`, `recomputes`:
      what may be chosen; `free`: names of other options that may be chosen.
    - `trace`: the segments of a step under given options; without it activations are unknown.
    - `micro_batches`: backward passes of a step, of which the last alone is synchronised.
    - `disk_path`: a folder on a disk that state may rest on; without it none does.
    - `shared`: device and host tier are one memory, of which a rank may use `limit`.
    """

    model: str
    units: tuple[Block, ...]
    rules: tuple[Rule, ...]
    options: Options
    world: int
    limit: int
    machine: Machine
    host_limit: int | None = None  # of a node
    disk_limit: int | None = None  # of a node
    disk_path: str | None = None
    inputs: int = 0
    micro_batches: int = 1
    trace: Trace | None = None
    stages: tuple[Stage, ...] = (0, 1, 2, 3)
    placings: tuple[Placing, ...] = PLACINGS
    precisions: tuple[Precision | None, ...] | None = None
    recomputes: tuple[bool, ...] = (False, True)
    free: frozenset[str] = frozenset(("prefetch", "bucket_bytes", "split"))
    overlaps: bool = True
    staged: bool = False
    shared: bool = False
    by_node: bool = False  # whether the limit was given as that of a node
    setups: dict[tuple[Options, int], Setup] = field(default_factory=dict, compare=False, repr=False)

    @property
    def parameters(self) -> int:
        return sum(unit.numel for unit in self.units)

    @property
    def ranks_per_node(self) -> int:
        return min(self.world, self.machine.node)

    @property
    def host_share(self) -> float:
        """Host memory of one rank."""
        return math.inf if self.host_limit is None else self.host_limit / self.ranks_per_node

    @property
    def disk_share(self) -> float:
        """Disk of one rank."""
        return math.inf if self.disk_limit is None else self.disk_limit / self.ranks_per_node

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The units that can be recomputed."""
        return tuple(unit.name for unit in self.units if unit.name)

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest tensor, below which no bucket can go."""
        return max((w.numel * WIDTHS[w.dtype] for unit in self.units for w in unit.weights), default=1)

    def setup(self, options: Options) -> Setup:
        """What a way is made of. Ways that differ in recomputation only share nearly all of it."""
        base = replace(options, recompute=False)
        known = self.setups.get((base, self.world))
        offload = base.offload
        if known is None and offload is not None and offload.automatic and offload.device_bytes:
            none = replace(base, offload=replace(offload, device_bytes=0))
            known = self.setups[base, self.world] = self.setup(none).within(offload.device_bytes)
        if known is None:
            # Tensors are divided and bundled alike whatever is on the host, and in buckets of any size.
            alike = Options(stage=3 if base.stage else 0, split=base.split, precision=base.precision)
            kin = self.setups.get((alike, self.world))
            if kin is None:
                made = Setup(
                    self.units, alike, self.world, self.rules, overlaps=self.overlaps, staged=self.staged
                )
                kin = self.setups[alike, self.world] = heaviest(made)
            known = self.setups[base, self.world] = kin.bundled_as(base)
        return known.recomputing(options.recompute) if options.recompute else known

    def segments(self, options: Options) -> tuple[Segment, ...]:
        return self.trace(options) if self.trace is not None else ()

    def way(
        self,
        stage: Stage,
        placing: Placing = "device",
        recompute: bool | tuple[str, ...] = False,
        lean: bool = False,
    ) -> Options:
        """The options of one way to run. An offload or patterns of units that the user named are used as
        they are."""
        own = self.options.offload is not None and placing == placing_of(self.options.offload)
        offload = self.options.offload if own else self.offload(placing, stage)
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
        if "split" not in self.free or self.options.split != "auto" or self.world == 1:
            return False
        plain = Options(stage=3, units=self.options.units)
        return imbalance(Setup(self.units, plain, self.world, self.rules)) > LEVEL

    def offload(self, placing: Placing, stage: Stage) -> Offload | None:
        """What a placing is. Those that fill the device first begin with none of it (`filled`)."""
        if placing == "device":
            return None
        if placing == "state on disk":
            return Offload(optimizer="disk", path=self.disk_path)
        if placing == "state on host":
            return Offload()
        if placing == "all on host":
            return Offload(parameters="host")
        streams: Tier = "auto" if stage == 3 or self.world == 1 else "device"
        if placing == "some on disk":
            share = int(self.host_share) if self.host_limit is not None else None
            return Offload(
                optimizer="auto", parameters=streams, path=self.disk_path, device_bytes=0, host_bytes=share
            )
        return Offload(optimizer="auto", parameters=streams, device_bytes=0)

    def leaner(self, options: Options, own_offload: bool = False) -> Options:
        """The same with buckets no larger than the largest tensor, and nothing gathered ahead."""
        small = max(min(options.bucket_bytes, self.largest), 1024)
        made = options
        if "bucket_bytes" in self.free:
            made = replace(made, bucket_bytes=small)
        if "prefetch" in self.free:
            made = replace(made, prefetch=0)
        offload = made.offload
        if offload is not None and not own_offload:
            made = replace(
                made, offload=replace(offload, stages=2, stage_bytes=min(offload.stage_bytes, small))
            )
        return made

    def families(self) -> Iterator[tuple[Stage, Placing]]:
        """Every stage and placing that mean something together. On one rank all stages are the same."""
        stages: tuple[Stage, ...] = self.stages if self.world > 1 else self.stages[:1]
        for stage in stages:
            for placing in self.placings:
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
        if self.disk_path is None or (placing == "some on disk" and self.host_limit is None):
            return False
        return all(rule.name in NATIVE for rule in self.rules)

    def by_precision(self) -> Iterator[Question]:
        """One question for each precision that is allowed."""
        for precision in self.precisions or (self.options.precision,):
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


def all_candidates(question: Question) -> Iterator[Candidate]:
    """Every way that is worth a line of the table."""
    for asked in question.by_precision():
        for stage, placing in asked.families():
            yield from _family(asked, stage, placing)


def _family(question: Question, stage: Stage, placing: Placing) -> Iterator[Candidate]:
    """One stage and placing. As it is; if that does not fit, the least that it can take; and if that fits,
    what lies between: lean or not, with as few units recomputed as it takes."""
    recomputes = question.recomputes if question.trace is not None else question.recomputes[:1]
    if not question.names:
        recomputes = tuple(r for r in recomputes if not r) or (False,)

    def at(again: bool, lean: bool) -> Candidate:
        return price(question, question.way(stage, placing, again, lean))

    if placing in FILLING and placing != placing_of(question.options.offload):
        yield from _filling(question, stage, placing, recomputes)
        return
    plain = at(recomputes[0], lean=False)
    yield plain
    if plain.fits:
        return
    made = [plain]
    for again, lean in ((recomputes[-1], True), (recomputes[0], True), (recomputes[-1], False)):
        if not lean and not any(one.fits for one in made):
            return
        one = at(again, lean)
        if all(one.settings != other.settings for other in made):
            made.append(one)
            yield one
    if recomputes == (False, True) and any(one.fits for one in made):
        few = _few(question, stage, placing)
        if few is not None:
            yield few


def _filling(
    question: Question, stage: Stage, placing: Placing, recomputes: tuple[bool, ...]
) -> Iterator[Candidate]:
    """One stage with as much of the device filled as fits: with everything recomputed or nothing, and lean
    where that is what it takes."""
    if not _in_between(question, stage, placing, recomputes):
        return
    for again in dict.fromkeys((recomputes[0], recomputes[-1])):
        for lean in (False, True):
            options = filled(question, question.way(stage, placing, again, lean))
            if options is not None:
                made = price(question, options)
                if made.disk if placing == "some on disk" else made.host:  # else it is another placing
                    yield made
                break


def _few(question: Question, stage: Stage, placing: Placing) -> Candidate | None:
    """As few units recomputed as fit, those first that free most for an operation, lean or not, whichever is
    faster; None where all of them are needed or not enough.

    Found on segments put together from the two traces, then made sure of by a trace of its own: what a unit
    saves depends on what its neighbours do.
    """
    order = worth_recomputing(question)

    def way(count: int, lean: bool) -> tuple[Options, set[str]]:
        chosen = set(order[:count])
        return question.way(stage, placing, tuple(n for n in question.names if n in chosen), lean), chosen

    def fits(count: int, lean: bool) -> bool:
        options, chosen = way(count, lean)
        setup = question.setup(options)
        peak = fullest(question, setup, composed(question, chosen)).total
        return _fits(question, peak, setup.held)

    def at(count: int, lean: bool, exact: bool = False) -> Candidate:
        options, chosen = way(count, lean)
        return price(question, options, None if exact else composed(question, chosen))

    found: list[tuple[float, int, bool]] = []
    high = len(order)
    for lean in (False, True):
        low = 0
        if lean and high > 4 and not fits(high - 4, lean):
            low = high - 4  # lean takes no more units than not lean, and mostly few less
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle, lean) else (middle, high)
        if 0 < high < len(order):
            found.append((at(high, lean).step, high, lean))
    for _, count, lean in sorted(found):
        for more in range(count, min(count + 4, len(order))):
            one = at(more, lean, exact=True)
            if one.fits:
                return one
    return None


def worth_recomputing(question: Question) -> list[str]:
    """Units in the order in which they are worth recomputing: bytes freed for each operation that is done
    again; of equals the earlier, whose recomputation comes when others have gone."""
    saved: dict[bool, dict[str, int]] = {}
    flops: dict[str, int] = {}
    for again in (False, True):
        saved[again] = dict.fromkeys(question.names, 0)
        for segment in question.segments(question.way(question.stages[0], "device", again)):
            if segment.unit:
                saved[again][segment.unit] += segment.saved
                flops[segment.unit] = flops.get(segment.unit, 0) + segment.flops
    freed = {name: saved[False][name] - saved[True][name] for name in question.names}
    worth = [name for name in question.names if freed[name] > 0]
    return sorted(worth, key=lambda name: -freed[name] / max(flops.get(name, 1), 1))


def composed(question: Question, chosen: set[str]) -> tuple[Segment, ...]:
    """Segments of a step in which some units are recomputed, from the traces of none and of all."""
    plain, again = (question.segments(question.way(question.stages[0], "device", r)) for r in (False, True))
    if [s.unit for s in plain] != [s.unit for s in again]:
        return again
    return tuple(b if a.unit in chosen else a for a, b in zip(plain, again, strict=True))


def filled(question: Question, options: Options) -> Options | None:
    """The same with as much of the device taken as fits, where the options leave that open; None where no
    share of it will do."""
    offload = options.offload
    if offload is None or offload == question.options.offload or not offload.automatic:
        return options
    near = question.setup(replace(options, offload=None)).held
    most = near.parameters + near.state

    def at(part: int) -> Options:
        return replace(options, offload=replace(offload, device_bytes=most * part // FINE))

    segments = question.segments(options)
    low, high, found = 0, FINE, None
    while low <= high:
        middle = (low + high) // 2
        try:
            setup = question.setup(at(middle))
            fits = _fits(question, fullest(question, setup, segments).total, setup.held)
        except PlanError:  # what cannot be moved has no room in so little
            low = middle + 1
            continue
        if fits:
            low, found = middle + 1, at(middle)
        else:
            high = middle - 1
    return found


def _in_between(question: Question, stage: Stage, placing: Placing, recomputes: tuple[bool, ...]) -> bool:
    """Whether filling the device first is of use: not all of it fits, and with nothing in it, it does."""
    if price(question, question.way(stage, "device", recomputes[0])).fits:
        return False
    streams = stage == 3 or question.world == 1
    whole: Placing = "state on disk" if "disk" in placing else "all on host" if streams else "state on host"
    return price(question, question.way(stage, whole, recomputes[-1], lean=True)).fits


def price(question: Question, options: Options, segments: tuple[Segment, ...] | None = None) -> Candidate:
    """One way to run, in bytes and seconds."""
    setup = question.setup(options)
    segments = question.segments(options) if segments is None else segments
    peak = fullest(question, setup, segments)
    passes = question.micro_batches
    sent = sent_by_rank(setup, question.ranks_per_node, passes)
    seconds = seconds_of(setup, segments * passes, question.machine, sent)
    precision, offload = options.precision, options.offload
    lean = (
        options.prefetch < question.options.prefetch or options.bucket_bytes < question.options.bucket_bytes
    )
    decided = setup.places if offload is not None and offload.automatic else ()
    return Candidate(
        stage=options.stage,
        placing=placing_of(offload),
        precision=(precision.compute if precision else "as it is") if question.precisions else "",
        recompute=sum(setup.recomputes(name) for name in question.names),
        units=len(question.names),
        lean=lean,
        device=peak.total,
        where=peak.where,
        kinds=peak.kinds,
        host=setup.held.host_bytes,
        sent=sent.total,
        seconds=seconds.parts,
        step=seconds.step,
        fits=_fits(question, peak.total, setup.held),
        settings=settings_of(options),
        lasting=asdict(setup.held),
        disk=setup.held.disk,
        numerics=options.numerics,
        places=[list(asdict(place).values()) for place in decided],
        between=sent.between,
    )


# Torch's allocator takes memory for tensors of 1 to 10 MiB in segments of 20 MiB. Weights end in the middle
# of one, and moments, which come while gradients are there, in the middle of another.
PARTLY_FILLED = 2 * 20 * 2**20


def with_margin(question: Question, moment: Moment) -> Moment:
    """With what the machine's allocator and kernels take beside what is asked of it, as measured."""
    workspace, share = question.machine.workspace, question.machine.margin
    if not share and not workspace:
        return moment  # nothing was measured
    margin = int((moment.total + workspace) * share) + PARTLY_FILLED
    return Moment(moment.where, moment.kinds | {"workspace": workspace, "margin": margin})


def fullest(question: Question, setup: Setup, segments: tuple[Segment, ...]) -> Moment:
    """The moment of a step with the most bytes."""
    moments = step_moments(setup, segments, question.inputs, question.micro_batches > 1)
    return with_margin(question, peak_of(moments))


def _fits(question: Question, device: int, held: Buffers) -> bool:
    host = held.host_bytes
    if question.shared:
        device += host
    return device <= question.limit and host <= question.host_share and held.disk <= question.disk_share
