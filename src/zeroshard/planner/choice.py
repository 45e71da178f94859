"""A limit becomes a plan: of the ways that fit the fastest is taken. Why it was chosen, why nothing fits, and
the nearest changes that would. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from zeroshard.errors import PlanError
from zeroshard.layout.memory import imbalance
from zeroshard.options import Options, Precision
from zeroshard.sizes import show_apart, show_bytes, show_seconds

from .candidates import FILLING, PARTLY_FILLED, all_candidates, family, price
from .plan import PLACINGS, Candidate, Plan, made_of, options_of, typed
from .planning_problem import NOTHING, PlanningProblem, placing_of

EQUAL = 1.01  # two plans whose estimates are this close are equally fast
BOUNDED = (
    "Where values decide how many rows there are (masks, routed tokens), all count each time: activations "
    "and times are upper bounds."
)


def choose(problem: PlanningProblem) -> Plan:
    """The plan, or a `PlanError` that says what is missing and what would help."""
    candidates = tuple(all_candidates(problem))
    fitting = [one for one in candidates if one.fits]
    if not fitting:
        raise PlanError(refusal(problem, candidates))
    fastest = min(one.step for one in fitting)
    equals = [one for one in fitting if one.step <= fastest * EQUAL]
    near = problem.limits.device - problem.spare
    chosen = min(equals, key=lambda one: (one.device > near, one.moving_parts, one.recompute, one.device))
    uneven = imbalance(problem.setup(problem.way(chosen.stage))) if chosen.stage else 0.0
    return Plan(
        model=problem.model,
        parameters=sum(unit.numel for unit in problem.units),
        ranks=problem.world,
        ranks_per_node=problem.ranks_per_node,
        limit=problem.limits.device,
        host_limit=problem.limits.host,
        disk_limit=problem.limits.disk,
        machine=problem.machine.name,
        chosen=chosen,
        candidates=candidates,
        reasons=tuple(reasons(problem, chosen, candidates, uneven)),
        imbalance=uneven,
        shared=problem.limits.shared,
        unused=problem.unused,
        visits=problem.step.visits,
    )


def reasons(
    problem: PlanningProblem, chosen: Candidate, candidates: Sequence[Candidate], uneven: float
) -> Iterator[str]:
    """One sentence each: why this one, who comes next, why nothing simpler, and what is not known."""
    slowest = max(chosen.seconds, key=lambda part: chosen.seconds[part])
    took = show_seconds(chosen.step)
    if chosen.step:
        yield f"{chosen.label} is the fastest that fits: estimated {took}, most of it {slowest}."
    others = sorted((one for one in candidates if one.fits and one != chosen), key=lambda one: one.step)
    if others:
        runner = others[0]
        equal = runner.step <= chosen.step * EQUAL
        behind = "as fast, with more moving parts" if equal else f"estimated {show_seconds(runner.step)}"
        yield f"Runner-up: {runner.label}, {behind}, {show_bytes(runner.device)}."
    simpler = [one for one in candidates if not one.fits and one.moving_parts < chosen.moving_parts]
    if simpler:
        first = min(simpler, key=lambda one: one.moving_parts)
        yield f"{first.label} does not fit: {_needs(problem, first)}."
    if chosen.recompute and chosen.recompute < chosen.units:
        yield f"{chosen.recompute} of {chosen.units} units are recomputed: as few as it takes."
    if chosen.lean:
        small = show_bytes(chosen.settings["bucket_bytes"])
        yield f"Lean: buckets of {small}, units gathered {chosen.settings['prefetch']} ahead."
    if chosen.splits and problem.options.offload is None:
        yield (
            "Split master: each is the bf16 weight and 16 bits more, to the bit; half way between two bf16 "
            "values the weight is the larger one, where a plain master's is the even one."
        )
    if chosen.holds_on_host and problem.options.offload is None:
        yield "Gradients land on the host and wait there for the loop's clipping and step."
    if chosen.repeats:
        units = f"{chosen.repeats} units" if chosen.repeats > 1 else "unit"
        yield (
            f"The backward of the {units} nearest the loss runs twice: not all gradients have room until the "
            "norm is known."
        )
    yield from _unknown(problem, chosen)
    if chosen.placing != "device" and problem.options.clip_norm is None and not problem.options.defers:
        yield "Pass clip_norm= (math.inf to clip nothing): the host's update then overlaps with backward."
    if chosen.settings["split"] == "level" and problem.options.split != "level":
        yield "Rows are dealt level: as even chunks of rows, the ranks would differ by over 1 %."
    if uneven > 0.01:
        yield f"Rows do not divide evenly: the fullest rank owns {uneven:.1%} more than the mean."


def _unknown(problem: PlanningProblem, chosen: Candidate) -> Iterator[str]:
    """What a plan keeps free, and what it does not know."""
    if margin := chosen.kinds.get("margin", 0):
        yield _margin_text(problem, chosen, margin)
    if problem.step.trace is None:
        yield "Activations are not counted: pass batch= (a batch of example inputs) to have a step traced."
    if problem.step.bounded:
        yield BOUNDED
    if problem.unused:
        names, more = problem.unused, len(problem.unused) - 1
        which = f"`{names[0]}`" + (f" and {more:,} more parameters get" if more else " gets")
        yield f"{which} no gradient in the traced step: no state is planned for what it does not use."


def _margin_text(problem: PlanningProblem, chosen: Candidate, margin: int) -> str:
    """What a plan keeps free beside what is asked of the allocator, and whose figure that is."""
    machine = problem.machine
    outside = [
        f"{show_bytes(chosen.kinds[kind])} for {what}"
        for kind, what in (("context", "CUDA's context"), ("nccl", "NCCL"), ("workspace", "cuBLAS"))
        if chosen.kinds.get(kind, 0)
    ]
    whose = "as on an H200"
    if machine.source == "measured":
        whose = f"measured here with {machine.allocator or 'the default settings'}"
    share = int((chosen.asked + chosen.kinds.get("workspace", 0)) * machine.margin)
    what = f"{machine.margin:.1%} of what is asked of it ({whose})"
    if margin - PARTLY_FILLED > share + 2**20:
        what = f"gaps between what comes and goes in a step (more than the {what})"
    return (
        f"The allocator's margin is {show_bytes(margin)}: {what} "
        f"and {show_bytes(PARTLY_FILLED)} of blocks that are partly filled"
        + (f"; beside it {', '.join(outside)}." if outside else ".")
    )


def _needs(problem: PlanningProblem, one: Candidate) -> str:
    if one.device > problem.limits.device:
        return f"it needs {show_apart(one.device, problem.limits.device)[0]} per device at {one.where}"
    if problem.limits.shared and one.device + one.host > problem.limits.device:
        needs, _ = show_apart(one.device + one.host, problem.limits.device)
        return f"it needs {needs} per rank, host tier included, at {one.where}"
    what, most, node = _lacking(problem, one)
    return f"it needs {show_apart(node, most)[0]} of {what} per node"


def refusal(problem: PlanningProblem, candidates: Sequence[Candidate]) -> str:
    """Why nothing fits: the smallest plan, where it is fullest, of what, and the nearest changes that would
    fit."""
    on_device = [one for one in candidates if one.device <= problem.limits.device]
    if on_device and not problem.limits.shared:
        least = min(on_device, key=lambda one: (max(one.host - problem.host_share, 0), one.disk))
        what, most, node = _lacking(problem, least)
        has, needs = show_apart(most, node)
        ranks = "its rank" if problem.ranks_per_node == 1 else f"its {problem.ranks_per_node} ranks"
        return (
            f"no plan fits {has} of {what} per node: the smallest whose device part fits ({least.label}) "
            f"needs {needs} for {ranks}. {_advice(problem, least, candidates)}"
        )
    least = min(candidates, key=lambda one: _size(problem, one))
    kinds = least.kinds | ({"host tier": least.host} if problem.limits.shared else {})
    parts = made_of(kinds, least=least.device // 200)
    whose = "rank" if problem.limits.shared else "device"
    has, needs = show_apart(problem.limits.device, _size(problem, least))
    return (
        f"no plan fits {has} per {whose}: the smallest ({least.label}) needs "
        f"{needs} at {least.where} ({parts}). {_advice(problem, least, candidates)}"
        + (f" {BOUNDED}" if problem.step.bounded else "")
    )


def _lacking(problem: PlanningProblem, one: Candidate) -> tuple[str, int, int]:
    """What a node has too little of, how much it has, and how much it needs."""
    node = problem.ranks_per_node
    if one.host > problem.host_share or problem.limits.disk is None:
        return "host memory", problem.limits.host or 0, one.host * node
    return "disk", problem.limits.disk, one.disk * node


def smallest(problem: PlanningProblem, candidates: Sequence[Candidate]) -> int:
    """The bytes that the smallest of them takes of what is limited."""
    return min(_size(problem, one) for one in candidates)


def _size(problem: PlanningProblem, one: Candidate) -> int:
    return one.device + one.host if problem.limits.shared else one.device


def _advice(problem: PlanningProblem, least: Candidate, candidates: Sequence[Candidate]) -> str:
    """Changes that would fit, tried one by one, with their estimated steps; the last of the exact ones always
    does. Those that round stand apart."""
    ways = [_said(text, one) for text, one in _exact_changes(problem, least)]
    size = _size(problem, least)
    if size > problem.limits.device:
        ways.append(f"pass {_larger(problem, least, candidates)}")
    else:
        what, _, node = _lacking(problem, least)
        ways.append(f'pass {"host_limit" if what == "host memory" else "disk_limit"}="{_rounded_up(node)}"')
    mostly = least.kinds["activations"] > 0.5 * least.device and size > problem.limits.device
    lead = "Sharding cannot shrink activations" if mostly else "What would fit"
    rounding = [_said(text, one) for text, one in _rounding_changes(problem)]
    return f"{lead}: {', or '.join(ways)}." + (f" Rounding: {', or '.join(rounding)}." if rounding else "")


def _said(text: str, one: Candidate) -> str:
    return f"{text} (estimated {show_seconds(one.step)} a step)" if one.step else text


def _exact_changes(problem: PlanningProblem, least: Candidate) -> Iterator[tuple[str, Candidate]]:
    """What to change, and the fastest way that then fits."""
    for text, changed in _allowances(problem):
        if (one := tried(changed)) is not None:
            yield text, one
    if problem.limits.path is None and any("disk" in placing for placing in problem.choices.placings):
        if (one := tried(problem.limited(path="."))) is not None:
            room = _rounded_up(one.disk * problem.ranks_per_node)
            yield f"name a disk with {room} of room, disk_path=FOLDER", one
    if least.kinds["activations"] > problem.limits.device // 10 and (one := _halved(problem)) is not None:
        yield "halve the micro-batch", one
    for factor in (2, 4, 16, 256):
        if (one := tried(problem.on(problem.world * factor))) is not None:
            yield f"use {problem.world * factor:,} ranks", one
            break


def _allowances(problem: PlanningProblem) -> Iterator[tuple[str, PlanningProblem]]:
    """What was asked for and rules something out, and the question without it."""
    options = problem.options
    may = problem.step.trace is not None and problem.recomputable and bool(problem.names)
    if may and True not in problem.choices.recomputes:
        yield "allow recompute=True", problem.allowing(recomputes=(False, True))
    if problem.choices.placings != PLACINGS:
        yield "allow offload to the host", problem.allowing(placings=PLACINGS)
    if len(problem.choices.stages) < 4 and 3 not in problem.choices.stages:
        yield "allow stage=3", problem.allowing(stages=(3,))
    if options.offload is None and any(placing != "device" for placing in problem.choices.placings):
        for text, clip in _CLIPPING[options.clip_norm is None]:
            yield text, _with(problem, clip_norm=clip)


def _halved(problem: PlanningProblem) -> Candidate | None:
    """The fastest way with half of the batch. Not every model takes it."""
    if problem.step.half is None:
        return None
    try:
        return tried(problem.stepping(trace=problem.step.half.trace, inputs=problem.step.half.inputs))
    except PlanError:
        return None


# By whether the loop clips: another way to clip, and what to type for it.
_CLIPPING: dict[bool, tuple[tuple[str, float | None], ...]] = {
    True: (
        ("pass clip_norm= in place of the loop's clipping", 1.0),
        ("pass clip_norm=math.inf where nothing is clipped", math.inf),
    ),
    False: (("drop clip_norm= and clip in the loop", None),),
}


def _rounding_changes(problem: PlanningProblem) -> Iterator[tuple[str, Candidate]]:
    """The same of what changes numbers, which is never chosen unasked."""
    options = problem.options
    if _wide(problem) and (one := tried(_with(problem, precision=Precision()))) is not None:
        yield 'allow precision="bf16"', one
    adam = any(rule.kernel and rule.moments == 2 for rule in problem.rules)
    if options.offload is None and adam and any(placing != "device" for placing in problem.choices.placings):
        clips = options.clip_norm is not None
        coded = replace(_with(problem, clip_norm=options.clip_norm if clips else 1.0), codes_moments=True)
        if (one := tried(coded)) is not None:
            offload = Options(**options_of(one)).offload
            if offload is not None and offload.moments == "int8":
                yield f"pass offload={typed(offload)}" + ("" if clips else " and clip_norm="), one


def _with(problem: PlanningProblem, **options: Any) -> PlanningProblem:
    return replace(problem, options=replace(problem.options, **options))


def _larger(problem: PlanningProblem, least: Candidate, candidates: Sequence[Candidate]) -> str:
    """The limit under which the smallest would fit that the other tiers have room for; where they have none
    for any, the other limits too."""
    node = problem.ranks_per_node
    held = [c for c in candidates if c.host <= problem.host_share and c.disk <= problem.disk_share]
    lightest = min(held, key=lambda one: _size(problem, one), default=least)
    name, most = "limit", _size(problem, lightest)
    if problem.limits.by_node:
        name, most = "memory_limit_per_node", most * node
    text = f'{name}="{_rounded_up(most)}"'
    if lightest.host > problem.host_share:
        text += f' and host_limit="{_rounded_up(lightest.host * node)}"'
    if lightest.disk > problem.disk_share:
        text += f' and disk_limit="{_rounded_up(lightest.disk * node)}"'
    return text


def _wide(problem: PlanningProblem) -> bool:
    """Whether it computes in fp32 and may do so in bf16."""
    return (
        problem.options.precision is None
        and not problem.choices.precisions
        and problem.narrows
        and any(w.dtype == "float32" for unit in problem.units for w in unit.weights)
    )


def _rounded_up(size: int) -> str:
    """A size that a user may type, no smaller than `size`: ``2.4GiB``."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{math.ceil(size / scale * 10) / 10:.1f}{unit}".replace(".0", "")
    return str(size)


def fitting(problem: PlanningProblem) -> bool:
    """Whether anything fits: the leanest ways do, or what fills one tier after another, or none does."""
    given = placing_of(problem.options.offload)
    ways = [
        (asked, stage, placing) for asked in problem.by_precision() for stage, placing in asked.families()
    ]
    leanest = any(
        price(asked, asked.way(stage, placing, again, True, changes)).fits
        for asked, stage, placing in ways
        if placing not in FILLING or placing == given
        for changes in (NOTHING, *asked.as_exact(placing))
        for again in asked.choices.recomputes
        if asked.names or not again
    )
    filling = (way for way in ways if way[2] in FILLING and way[2] != given)
    return leanest or any(one.fits for way in filling for one in family(*way))


def tried(problem: PlanningProblem) -> Candidate | None:
    """The fastest way that fits, if any does."""
    if not fitting(problem):
        return None
    return min((one for one in all_candidates(problem) if one.fits), key=lambda one: one.step, default=None)
