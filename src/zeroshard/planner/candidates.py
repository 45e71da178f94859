"""Lists the ways to run a model that are worth a line, each priced in bytes and seconds. No torch.

Ways that share stage, placing and precision are a *family*: within it, memory is saved by recomputing units
(as few as it takes) and by being *lean*: buckets no larger than the largest tensor, nothing gathered ahead.
A placing that fills one tier after another takes as much of the device as fits.

For a picture, one step of a way is laid out moment by moment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from zeroshard.errors import PlanError
from zeroshard.layout.memory import (
    MemoryModel,
    StepMoment,
    StepSegment,
    peak_of,
    repeated_units,
    step_moments,
)
from zeroshard.layout.specs import BufferBytes
from zeroshard.layout.traffic import sent_by_rank
from zeroshard.options import Options, Stage

from .plan import Candidate, Placing, settings_of
from .planning_problem import PlanningProblem, placing_of
from .pricing import seconds_of

FILLING: tuple[Placing, ...] = ("some on host", "some on disk")
FINE = 256  # into how many parts a device is divided where it is found how much of it may be filled


def all_candidates(problem: PlanningProblem) -> Iterator[Candidate]:
    """Every way that is worth a line of the table."""
    for asked in problem.by_precision():
        for stage, placing in asked.families():
            yield from family(asked, stage, placing)


def family(problem: PlanningProblem, stage: Stage, placing: Placing) -> Iterator[Candidate]:
    """One stage and placing: as usual; and where that has to save memory, the other ways that are as exact,
    as far as they fit."""
    usual = list(_Family(problem, stage, placing).candidates())
    yield from usual
    if usual and usual[0].fits and placing not in FILLING:
        return
    for changes in problem.as_exact(placing):
        for one in _Family(problem, stage, placing, changes).candidates():
            if one.fits:
                yield one


@dataclass(frozen=True)
class _Family:
    """Ways of one stage and placing that differ in recomputation and buckets. `changes`: fields of `Offload`
    that differ from the usual."""

    problem: PlanningProblem
    stage: Stage
    placing: Placing
    changes: Mapping[str, Any] = field(default_factory=dict)

    def way(self, recompute: bool | tuple[str, ...], lean: bool) -> Options:
        return self.problem.way(self.stage, self.placing, recompute, lean, self.changes)

    def candidates(self) -> Iterator[Candidate]:
        """As it is; if that does not fit, the least that it can take; and if that fits, what lies between:
        lean or not, with as few units recomputed as it takes."""
        problem = self.problem
        recomputes = (
            problem.choices.recomputes if problem.step.trace is not None else problem.choices.recomputes[:1]
        )
        if not problem.names:
            recomputes = tuple(r for r in recomputes if not r) or (False,)
        if self.changes.get("repeat_backward"):
            yield from self._repeating(recomputes)
            return
        if self.placing in FILLING and self.placing != placing_of(problem.options.offload):
            yield from self._filling(recomputes)
            return
        plain = price(problem, self.way(recomputes[0], lean=False))
        yield plain
        if plain.fits:
            return
        made = [plain]
        for again, lean in ((recomputes[-1], True), (recomputes[0], True), (recomputes[-1], False)):
            if not lean and not any(one.fits for one in made):
                return
            one = price(problem, self.way(again, lean))
            if all(one.settings != other.settings for other in made):
                made.append(one)
                yield one
        if recomputes == (False, True) and any(one.fits for one in made):
            yield from self._few()

    def _filling(self, recomputes: tuple[bool, ...]) -> Iterator[Candidate]:
        """With as much of the device filled as fits: with everything recomputed or nothing, and lean where
        that is what it takes."""
        if not self._in_between(recomputes):
            return
        for again in dict.fromkeys((recomputes[0], recomputes[-1])):
            for lean in (False, True):
                options = filled(self.problem, self.way(again, lean))
                if options is not None:
                    made = price(self.problem, options)
                    if made.disk if self.placing == "some on disk" else made.host:  # else another placing
                        yield made
                    break

    def _repeating(self, recomputes: tuple[bool, ...]) -> Iterator[Candidate]:
        """With as few units whose backward runs twice as fit. All are recomputed: of others more than their
        inputs would be kept."""
        problem = self.problem
        if not self._in_between(recomputes):
            return

        def at(count: int, lean: bool) -> Candidate | None:
            changes = {**self.changes, "repeat_backward": count}
            way = problem.way(self.stage, self.placing, recomputes[-1], lean, changes)
            options = filled(problem, way) if self.placing in FILLING else way
            if options is None or options.offload is None:
                return None
            can = len(problem.setup(options).repeatable)
            options = replace(options, offload=replace(options.offload, repeat_backward=min(count, can)))
            made = price(problem, options)
            return made if made.fits and can else None

        for lean in (False, True):
            low, high, found = 0, len(problem.names), at(len(problem.names), lean)
            while found is not None and high - low > 1:
                middle = (low + high) // 2
                fewer = at(middle, lean)
                low, high, found = (low, middle, fewer) if fewer is not None else (middle, high, found)
            if found is not None:
                yield found
                return

    def _in_between(self, recomputes: tuple[bool, ...]) -> bool:
        """Whether filling the device first is of use: not all of it fits, and with nothing on the device that
        can be elsewhere, the device has room."""
        problem, stage = self.problem, self.stage
        if price(problem, problem.way(stage, "device", recomputes[0])).fits:
            return False
        streams = stage == 3 or problem.world == 1
        whole: Placing = "all on host" if streams else "state on host"
        whole = "state on disk" if "disk" in self.placing else whole
        least = price(problem, problem.way(stage, whole, recomputes[-1], True, self.changes))
        return _near_fits(problem, least.device, least.host)

    def _few(self) -> Iterator[Candidate]:
        """As few units recomputed as fit, those first that free most for an operation, lean or not, whichever
        is faster; nothing where all of them are needed or not enough. And some more where that is near the
        limit.

        Found on segments put together from the two traces, then made sure of by a trace of its own: what a
        unit saves depends on what its neighbours do.
        """
        problem = self.problem
        order = worth_recomputing(problem)

        def way(count: int, lean: bool) -> tuple[Options, set[str]]:
            chosen = set(order[:count])
            return self.way(tuple(n for n in problem.names if n in chosen), lean), chosen

        def fits(count: int, lean: bool) -> bool:
            options, chosen = way(count, lean)
            setup = problem.setup(options)
            peak = fullest(problem, setup, composed(problem, chosen)).total
            return _fits(problem, peak, setup.held)

        def at(count: int, lean: bool, exact: bool = False) -> Candidate:
            options, chosen = way(count, lean)
            return price(problem, options, None if exact else composed(problem, chosen))

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
                    yield one
                    if one.device <= problem.limits.device - problem.spare:
                        return


def worth_recomputing(problem: PlanningProblem) -> list[str]:
    """Units in the order in which they are worth recomputing: bytes freed for each operation that is done
    again; of equals the earlier, whose recomputation comes when others have gone."""
    saved: dict[bool, dict[str, int]] = {}
    flops: dict[str, int] = {}
    for again in (False, True):
        saved[again] = dict.fromkeys(problem.names, 0)
        for segment in problem.segments(problem.way(problem.choices.stages[0], "device", again)):
            if segment.unit:
                saved[again][segment.unit] += segment.saved
                flops[segment.unit] = flops.get(segment.unit, 0) + segment.flops
    freed = {name: saved[False][name] - saved[True][name] for name in problem.names}
    worth = [name for name in problem.names if freed[name] > 0]
    return sorted(worth, key=lambda name: -freed[name] / max(flops.get(name, 1), 1))


def composed(problem: PlanningProblem, chosen: set[str]) -> tuple[StepSegment, ...]:
    """Segments of a step in which some units are recomputed, from the traces of none and of all."""
    plain, again = (
        problem.segments(problem.way(problem.choices.stages[0], "device", r)) for r in (False, True)
    )
    if [s.unit for s in plain] != [s.unit for s in again]:
        return again
    return tuple(b if a.unit in chosen else a for a, b in zip(plain, again, strict=True))


def filled(problem: PlanningProblem, options: Options) -> Options | None:
    """The same with as much of the device taken as fits, where the options leave that open; None where no
    share of it will do. What is near the limit is left free where that will do, too."""
    offload = options.offload
    if offload is None or offload == problem.options.offload or not offload.automatic:
        return options
    near = problem.setup(replace(options, offload=None)).held
    most = near.parameters + near.state

    def at(part: int) -> Options:
        return replace(options, offload=replace(offload, device_bytes=most * part // FINE))

    segments = problem.segments(options)

    def fullest_of(limit: int) -> Options | None:
        low, high, found = 0, FINE, None
        while low <= high:
            middle = (low + high) // 2
            try:
                setup = problem.setup(at(middle))
                device = fullest(problem, setup, segments).total
            except PlanError:  # what cannot be moved has no room in so little
                low = middle + 1
                continue
            if _fits(problem, device, setup.held, limit):
                low, found = middle + 1, at(middle)
            elif not _near_fits(problem, device, setup.held.host_bytes, limit):
                high = middle - 1
            else:  # the other tiers have too little room for what is left to them
                low = middle + 1
        return found

    found = fullest_of(problem.limits.device - problem.spare)
    return fullest_of(problem.limits.device) if found is None and problem.spare else found


def price(
    problem: PlanningProblem, options: Options, segments: tuple[StepSegment, ...] | None = None
) -> Candidate:
    """One way to run, in bytes and seconds. `segments`: others than those of its own trace."""
    if segments is not None:
        return _priced(problem, options, segments)
    known = problem.prices.get(options)
    if known is None:
        known = problem.prices[options] = _priced(problem, options, problem.segments(options))
    return known


def _priced(problem: PlanningProblem, options: Options, segments: tuple[StepSegment, ...]) -> Candidate:
    setup = problem.setup(options)
    peak = fullest(problem, setup, segments)
    passes = problem.step.micro_batches
    sent = sent_by_rank(setup, problem.ranks_per_node, passes)
    seconds = seconds_of(setup, segments * passes, problem.machine, sent)
    precision, offload = options.precision, options.offload
    lean = options.prefetch < problem.options.prefetch or options.bucket_bytes < problem.options.bucket_bytes
    decided = setup.places if offload is not None and offload.automatic else ()
    return Candidate(
        stage=options.stage,
        placing=placing_of(offload),
        precision=(precision.compute if precision else "as it is") if problem.choices.precisions else "",
        recompute=len(setup.recomputed.intersection(problem.names)),
        units=len(problem.names),
        lean=lean,
        device=peak.total,
        where=peak.where,
        kinds=peak.kinds,
        host=setup.held.host_bytes,
        sent=sent.total,
        seconds=seconds.parts,
        step=seconds.step,
        fits=_fits(problem, peak.total, setup.held),
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
# What comes and goes in a step leaves more gaps where its tensors are small: under limits of 2 to 7 GiB three
# models needed up to 360 MiB beside what they asked for, 16 % of it, with expandable segments 300 MiB.
GAPS, MOST_GAPS = 0.18, 640 * 2**20
_LASTING = ("parameters", "state", "inputs")


def with_margin(problem: PlanningProblem, moment: StepMoment) -> StepMoment:
    """With what the machine's allocator and kernels take beside what is asked of it, as measured."""
    machine = problem.machine
    beside = {"context": machine.context, "nccl": machine.channels * (problem.world > 1)}
    if machine.margin or machine.workspace:
        margin = int((moment.total + machine.workspace) * machine.margin)
        if machine.source == "measured":
            moving = moment.total - sum(moment.kinds.get(kind, 0) for kind in _LASTING)
            margin = max(margin, min(int(GAPS * moving), MOST_GAPS))
        margin += PARTLY_FILLED
        beside |= {"workspace": machine.workspace, "margin": margin}
    return StepMoment(moment.where, moment.kinds | {kind: size for kind, size in beside.items() if size})


def fullest(problem: PlanningProblem, setup: MemoryModel, segments: tuple[StepSegment, ...]) -> StepMoment:
    """The moment of a step with the most bytes."""
    moments = step_moments(setup, segments, problem.step.inputs, problem.step.micro_batches > 1)
    return peak_of([with_margin(problem, moment) for moment in moments])


def _fits(problem: PlanningProblem, device: int, held: BufferBytes, limit: int | None = None) -> bool:
    host = held.host_bytes
    elsewhere = host <= problem.host_share and held.disk <= problem.disk_share
    return elsewhere and _near_fits(problem, device, host, limit)


def _near_fits(problem: PlanningProblem, device: int, host: int, limit: int | None = None) -> bool:
    """Whether the device has room, whatever the other tiers have."""
    return device + (host if problem.limits.shared else 0) <= (
        problem.limits.device if limit is None else limit
    )


def moments_of(problem: PlanningProblem, options: Options) -> list[StepMoment]:
    """A way's step in time, for a picture."""
    unsynced = problem.step.micro_batches > 1
    moments = step_moments(problem.setup(options), problem.segments(options), problem.step.inputs, unsynced)
    return [with_margin(problem, moment) for moment in moments]


@dataclass(frozen=True)
class PictureFrame:
    """A moment of a step and the share of its time that it takes."""

    moment: StepMoment
    share: float


def frames_of(problem: PlanningProblem, options: Options) -> list[PictureFrame]:
    """The moments of a step with their lengths: by operations, backward twice forward and what is computed
    again once more; the update by its seconds. None is too short to be seen."""
    setup, segments = problem.setup(options), problem.segments(options)
    moments = moments_of(problem, options)
    if segments:
        forward = [float(s.flops) for s in segments]
        back = [s.flops * (3.0 if s.unit in setup.recomputed else 2.0) for s in reversed(segments)]
        repeated = repeated_units(setup, problem.step.micro_batches > 1)
        back += [3.0 * s.flops for s in reversed(segments) if s.unit in repeated]
    else:
        forward = [float(unit.numel) for unit in setup.units]
        back = [2 * length for length in reversed(forward)]
        repeated = repeated_units(setup, problem.step.micro_batches > 1)
        back += [3.0 * unit.numel for unit in reversed(setup.units) if unit.name in repeated]
    total = sum(forward) + sum(back) or 1.0
    cost = price(problem, options, segments)
    last = cost.seconds.get("update", 0.0) / max(cost.step, 1e-12)
    lengths = [max(length / total, 0.002) for length in (*forward, *back)]
    lengths.append(max(min(last, 0.9) / (1 - min(last, 0.9)), 0.02))
    return [PictureFrame(m, length / sum(lengths)) for m, length in zip(moments, lengths, strict=True)]
