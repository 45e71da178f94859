"""The ways to run a model that are worth a line of the table, each priced in bytes and seconds. No torch.

Ways that share stage, placing and precision are a *family*: within it, memory is saved by recomputing units
(as few as it takes) and by being *lean*: buckets no larger than the largest tensor, nothing gathered ahead.
A placing that fills one tier after another takes as much of the device as fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

from zeroshard.config import Options, Stage
from zeroshard.count.crossing import sent_by_rank
from zeroshard.count.memory import Setup
from zeroshard.count.shapes import Buffers
from zeroshard.count.timeline import Moment, Segment, peak_of, step_moments
from zeroshard.errors import PlanError

from .plan import Candidate, Placing, settings_of
from .pricing import seconds_of
from .question import Question, placing_of

FILLING: tuple[Placing, ...] = ("some on host", "some on disk")
FINE = 32  # into how many parts a device is divided where it is found how much of it may be filled


def all_candidates(question: Question) -> Iterator[Candidate]:
    """Every way that is worth a line of the table."""
    for asked in question.by_precision():
        for stage, placing in asked.families():
            yield from family(asked, stage, placing)


def family(question: Question, stage: Stage, placing: Placing) -> Iterator[Candidate]:
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
            device = fullest(question, setup, segments).total
        except PlanError:  # what cannot be moved has no room in so little
            low = middle + 1
            continue
        if _fits(question, device, setup.held):
            low, found = middle + 1, at(middle)
        elif not _near_fits(question, device, setup.held.host_bytes):
            high = middle - 1
        else:  # the other tiers have too little room for what is left to them
            low = middle + 1
    return found


def _in_between(question: Question, stage: Stage, placing: Placing, recomputes: tuple[bool, ...]) -> bool:
    """Whether filling the device first is of use: not all of it fits, and with nothing on the device that can
    be elsewhere, the device has room."""
    if price(question, question.way(stage, "device", recomputes[0])).fits:
        return False
    streams = stage == 3 or question.world == 1
    whole: Placing = "state on disk" if "disk" in placing else "all on host" if streams else "state on host"
    least = price(question, question.way(stage, whole, recomputes[-1], lean=True))
    return _near_fits(question, least.device, least.host)


def price(question: Question, options: Options, segments: tuple[Segment, ...] | None = None) -> Candidate:
    """One way to run, in bytes and seconds. `segments`: others than those of its own trace."""
    if segments is not None:
        return _priced(question, options, segments)
    known = question.prices.get(options)
    if known is None:
        known = question.prices[options] = _priced(question, options, question.segments(options))
    return known


def _priced(question: Question, options: Options, segments: tuple[Segment, ...]) -> Candidate:
    setup = question.setup(options)
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
    elsewhere = host <= question.host_share and held.disk <= question.disk_share
    return elsewhere and _near_fits(question, device, host)


def _near_fits(question: Question, device: int, host: int) -> bool:
    """Whether the device has room, whatever the other tiers have."""
    return device + (host if question.shared else 0) <= question.limit
