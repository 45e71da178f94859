"""The ways to run a model, each priced in bytes and seconds. No torch.

A *way* is a complete `Options`. Ways that share stage, placing and precision are a *family*: within it,
memory is saved by recomputing units (as few as it takes) and by being *lean*: buckets no larger than the
largest tensor, nothing gathered ahead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property

from .balance import heaviest
from .config import Offload, Options, Precision, Stage
from .machine import Machine
from .memory import Setup
from .plan import Candidate, Placing, settings_of
from .pricing import seconds_of, sent_by_rank
from .shapes import WIDTHS, Block, Rule
from .timeline import Moment, Segment, peak_of, step_moments

PLACINGS: tuple[Placing, ...] = ("device", "state on host", "all on host")

Trace = Callable[[Options], tuple[Segment, ...]]


@dataclass(frozen=True)
class Question:
    """What a plan is asked for.

    - `options`: those that the user gave, and defaults. `stages`, `placings`, `precisions`, `recomputes`:
      what may be chosen; `free`: names of other options that may be chosen.
    - `trace`: the segments of a step under given options; without it activations are unknown.
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
    inputs: int = 0
    trace: Trace | None = None
    stages: tuple[Stage, ...] = (0, 1, 2, 3)
    placings: tuple[Placing, ...] = PLACINGS
    precisions: tuple[Precision | None, ...] | None = None
    recomputes: tuple[bool, ...] = (False, True)
    free: frozenset[str] = frozenset(("prefetch", "bucket_bytes"))
    overlaps: bool = True
    shared: bool = False
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
        if known is None:
            known = heaviest(Setup(self.units, base, self.world, self.rules, overlaps=self.overlaps))
            self.setups[base, self.world] = known
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
        offload = self.options.offload if own else _OFFLOADS[placing]
        if offload is not None and offload.automatic and offload.host_bytes is None and self.host_limit:
            offload = replace(offload, host_bytes=int(self.host_share))
        patterns = self.options.recompute
        made = replace(
            self.options,
            stage=stage,
            offload=offload,
            recompute=patterns if recompute is True and isinstance(patterns, tuple) else recompute,
        )
        return self.leaner(made, own) if lean else made

    def leaner(self, options: Options, own_offload: bool = False) -> Options:
        """The same with buckets no larger than the largest tensor, and nothing gathered ahead."""
        small = max(min(options.bucket_bytes, self.largest), 1024)
        made = options
        if "bucket_bytes" in self.free:
            made = replace(made, bucket_bytes=small)
        if "prefetch" in self.free:
            made = replace(made, prefetch=0)
        offload = made.offload
        if offload is not None and not own_offload and offload.optimizer == "host":
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
                yield stage, placing

    def by_precision(self) -> Iterator[Question]:
        """One question for each precision that is allowed."""
        for precision in self.precisions or (self.options.precision,):
            yield replace(self, options=replace(self.options, precision=precision))


_OFFLOADS: dict[Placing, Offload | None] = {
    "device": None,
    "state on host": Offload(),
    "all on host": Offload(parameters="host"),
}


def placing_of(offload: Offload | None) -> Placing:
    """Which of the planner's three placings an offload is."""
    if offload is None:
        return "device"
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


def _few(question: Question, stage: Stage, placing: Placing) -> Candidate | None:
    """As few units recomputed as fit, those first that free most for an operation, lean or not, whichever is
    faster; None where all of them are needed or not enough.

    Found on segments put together from the two traces, then made sure of by a trace of its own: what a unit
    saves depends on what its neighbours do.
    """
    order = question_order(question)

    def at(count: int, lean: bool, exact: bool = False) -> Candidate:
        chosen = set(order[:count])
        options = question.way(stage, placing, tuple(n for n in question.names if n in chosen), lean)
        return price(question, options, None if exact else composed(question, chosen))

    found: list[tuple[float, int, bool]] = []
    for lean in (False, True):
        low, high = 0, len(order)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if at(middle, lean).fits else (middle, high)
        if 0 < high < len(order):
            found.append((at(high, lean).step, high, lean))
    for _, count, lean in sorted(found):
        for more in range(count, min(count + 4, len(order))):
            one = at(more, lean, exact=True)
            if one.fits:
                return one
    return None


def question_order(question: Question) -> list[str]:
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


def price(question: Question, options: Options, segments: tuple[Segment, ...] | None = None) -> Candidate:
    """One way to run, in bytes and seconds."""
    setup = question.setup(options)
    segments = question.segments(options) if segments is None else segments
    peak = with_margin(question, peak_of(step_moments(setup, segments, question.inputs)))
    host = setup.held.host_bytes
    sent = sent_by_rank(setup)
    seconds = seconds_of(setup, segments, question.machine, question.ranks_per_node, sent)
    precision = options.precision
    offload = options.offload
    rounds = precision is not None and precision.numerics != "exact"
    rounds = rounds or (offload is not None and offload.numerics != "exact")
    lean = (
        options.prefetch < question.options.prefetch or options.bucket_bytes < question.options.bucket_bytes
    )
    return Candidate(
        options.stage,
        placing_of(offload),
        (precision.compute if precision is not None else "as it is") if question.precisions else "",
        sum(setup.recomputes(name) for name in question.names),
        len(question.names),
        lean,
        peak.total,
        peak.where,
        peak.kinds,
        host,
        sent,
        seconds.parts,
        seconds.step,
        _fits(question, peak.total, host, setup.held.disk),
        settings_of(options),
        asdict(setup.held),
        setup.held.disk,
        "rounding" if rounds else "exact",
        [list(asdict(place).values()) for place in setup.places] if offload and offload.automatic else [],
    )


def with_margin(question: Question, moment: Moment) -> Moment:
    """With what the machine's allocator and kernels take beside what is asked of it, as measured."""
    margin = int(moment.total * question.machine.margin) + question.machine.workspace
    return Moment(moment.where, moment.kinds | {"margin": margin}) if margin else moment


def _fits(question: Question, device: int, host: int, disk: int) -> bool:
    if question.shared:
        device += host
    room = math.inf if question.disk_limit is None else question.disk_limit / question.ranks_per_node
    return device <= question.limit and host <= question.host_share and disk <= room


def moments_of(question: Question, options: Options) -> list[Moment]:
    """A way's step in time, for a picture."""
    moments = step_moments(question.setup(options), question.segments(options), question.inputs)
    return [with_margin(question, moment) for moment in moments]
