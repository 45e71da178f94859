"""A limit becomes a plan: of the ways that fit the fastest is taken. Why it was chosen, why nothing fits, and
the nearest changes that would. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from zeroshard.config import Precision
from zeroshard.count.balance import imbalance
from zeroshard.errors import PlanError
from zeroshard.sizes import show_apart, show_bytes, show_seconds

from .plan import PLACINGS, Candidate, Plan, made_of
from .planner import FILLING, all_candidates, family, price
from .question import Question, placing_of

EQUAL = 1.01  # two plans whose estimates are this close are equally fast
BOUNDED = (
    "Where values decide how many rows there are (masks, routed tokens), all count each time: activations "
    "and times are upper bounds."
)


def choose(question: Question) -> Plan:
    """The plan, or a `PlanError` that says what is missing and what would help."""
    candidates = tuple(all_candidates(question))
    fitting = [one for one in candidates if one.fits]
    if not fitting:
        raise PlanError(refusal(question, candidates))
    fastest = min(one.step for one in fitting)
    equals = [one for one in fitting if one.step <= fastest * EQUAL]
    chosen = min(equals, key=lambda one: (one.moving_parts, one.recompute, one.device))
    uneven = imbalance(question.setup(question.way(chosen.stage))) if chosen.stage else 0.0
    return Plan(
        model=question.model,
        parameters=question.parameters,
        ranks=question.world,
        ranks_per_node=question.ranks_per_node,
        limit=question.limit,
        host_limit=question.host_limit,
        disk_limit=question.disk_limit,
        machine=question.machine.name,
        chosen=chosen,
        candidates=candidates,
        reasons=tuple(reasons(question, chosen, candidates, uneven)),
        imbalance=uneven,
        shared=question.shared,
        unused=question.unused,
        visits=question.visits,
    )


def reasons(
    question: Question, chosen: Candidate, candidates: Sequence[Candidate], uneven: float
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
        yield f"{first.label} does not fit: {_needs(question, first)}."
    if chosen.recompute and chosen.recompute < chosen.units:
        yield f"{chosen.recompute} of {chosen.units} units are recomputed: as few as it takes."
    if chosen.lean:
        small = show_bytes(chosen.settings["bucket_bytes"])
        yield f"Lean: buckets of {small}, units gathered {chosen.settings['prefetch']} ahead."
    if question.trace is None:
        yield "Activations are not counted: pass batch= (a batch of example inputs) to have a step traced."
    if question.bounded:
        yield BOUNDED
    if question.unused:
        names, more = question.unused, len(question.unused) - 1
        which = f"`{names[0]}`" + (f" and {more:,} more parameters get" if more else " gets")
        yield f"{which} no gradient in the traced step: no state is planned for what it does not use."
    if chosen.placing != "device" and question.options.clip_norm is None:
        yield "Pass clip_norm= (math.inf to clip nothing): the host's update then overlaps with backward."
    if chosen.settings["split"] == "level" and question.options.split != "level":
        yield "Rows are dealt level: as even chunks of rows, the ranks would differ by over 1 %."
    if uneven > 0.01:
        yield f"Rows do not divide evenly: the fullest rank owns {uneven:.1%} more than the mean."


def _needs(question: Question, one: Candidate) -> str:
    if one.device > question.limit:
        return f"it needs {show_apart(one.device, question.limit)[0]} per device at {one.where}"
    if question.shared and one.device + one.host > question.limit:
        needs, _ = show_apart(one.device + one.host, question.limit)
        return f"it needs {needs} per rank, host tier included, at {one.where}"
    what, most, node = _lacking(question, one)
    return f"it needs {show_apart(node, most)[0]} of {what} per node"


def refusal(question: Question, candidates: Sequence[Candidate]) -> str:
    """Why nothing fits: the smallest plan, where it is fullest, of what, and the nearest changes that would
    fit."""
    on_device = [one for one in candidates if one.device <= question.limit]
    if on_device and not question.shared:
        least = min(on_device, key=lambda one: (max(one.host - question.host_share, 0), one.disk))
        what, most, node = _lacking(question, least)
        has, needs = show_apart(most, node)
        ranks = "its rank" if question.ranks_per_node == 1 else f"its {question.ranks_per_node} ranks"
        return (
            f"no plan fits {has} of {what} per node: the smallest whose device part fits ({least.label}) "
            f"needs {needs} for {ranks}. {_advice(question, least, candidates)}"
        )
    least = min(candidates, key=lambda one: _size(question, one))
    kinds = least.kinds | ({"host tier": least.host} if question.shared else {})
    parts = made_of(kinds, least=least.device // 200)
    whose = "rank" if question.shared else "device"
    has, needs = show_apart(question.limit, _size(question, least))
    return (
        f"no plan fits {has} per {whose}: the smallest ({least.label}) needs "
        f"{needs} at {least.where} ({parts}). {_advice(question, least, candidates)}"
        + (f" {BOUNDED}" if question.bounded else "")
    )


def _lacking(question: Question, one: Candidate) -> tuple[str, int, int]:
    """What a node has too little of, how much it has, and how much it needs."""
    node = question.ranks_per_node
    if one.host > question.host_share or question.disk_limit is None:
        return "host memory", question.host_limit or 0, one.host * node
    return "disk", question.disk_limit, one.disk * node


def smallest(question: Question, candidates: Sequence[Candidate]) -> int:
    """The bytes that the smallest of them takes of what is limited."""
    return min(_size(question, one) for one in candidates)


def _size(question: Question, one: Candidate) -> int:
    return one.device + one.host if question.shared else one.device


def _advice(question: Question, least: Candidate, candidates: Sequence[Candidate]) -> str:
    """Changes that would fit, tried one by one; the last always does."""
    ways = []
    recomputing = replace(question, recomputes=(False, True))
    may = question.trace is not None and question.recomputable and bool(question.names)
    if may and True not in question.recomputes and fitting(recomputing):
        ways.append("allow recompute=True")
    if question.placings != PLACINGS and fitting(replace(question, placings=PLACINGS)):
        ways.append("allow offload to the host")
    if len(question.stages) < 4 and 3 not in question.stages and fitting(replace(question, stages=(3,))):
        ways.append("allow stage=3")
    heavy = least.kinds["activations"] > question.limit // 10
    if heavy and halving_fits(question):
        ways.append("halve the micro-batch")
    if _narrows(question):
        ways.append('allow precision="bf16"')
    for factor in (2, 4, 16, 256):
        if fitting(question.on(question.world * factor)):
            ways.append(f"use {question.world * factor:,} ranks")
            break
    size = _size(question, least)
    if size > question.limit:
        ways.append(f"pass {_larger(question, least, candidates)}")
    else:
        what, _, node = _lacking(question, least)
        ways.append(f'pass {"host_limit" if what == "host memory" else "disk_limit"}="{_rounded_up(node)}"')
    mostly = least.kinds["activations"] > 0.5 * least.device and size > question.limit
    lead = "Sharding cannot shrink activations" if mostly else "What would fit"
    return f"{lead}: {', or '.join(ways)}."


def _larger(question: Question, least: Candidate, candidates: Sequence[Candidate]) -> str:
    """The limit under which the smallest would fit that the other tiers have room for; where they have none
    for any, the other limits too."""
    node = question.ranks_per_node
    held = [c for c in candidates if c.host <= question.host_share and c.disk <= question.disk_share]
    lightest = min(held, key=lambda one: _size(question, one), default=least)
    name, most = "limit", _size(question, lightest)
    if question.by_node:
        name, most = "memory_limit_per_node", most * node
    text = f'{name}="{_rounded_up(most)}"'
    if lightest.host > question.host_share:
        text += f' and host_limit="{_rounded_up(lightest.host * node)}"'
    if lightest.disk > question.disk_share:
        text += f' and disk_limit="{_rounded_up(lightest.disk * node)}"'
    return text


def _narrows(question: Question) -> bool:
    """Whether computing in bf16 would make it fit. It rounds, so it is never chosen unasked."""
    options = question.options
    if (
        options.precision is not None
        or question.precisions
        or not question.narrows
        or not any(w.dtype == "float32" for unit in question.units for w in unit.weights)
    ):
        return False
    return fitting(replace(question, options=replace(options, precision=Precision())))


def _rounded_up(size: int) -> str:
    """A size that a user may type, no smaller than `size`: ``2.4GiB``."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{math.ceil(size / scale * 10) / 10:.1f}{unit}".replace(".0", "")
    return str(size)


def fitting(question: Question) -> bool:
    """Whether anything fits: the leanest ways do, or what fills one tier after another, or none does."""
    given = placing_of(question.options.offload)
    ways = [
        (asked, stage, placing) for asked in question.by_precision() for stage, placing in asked.families()
    ]
    leanest = any(
        price(asked, asked.way(stage, placing, again, lean=True)).fits
        for asked, stage, placing in ways
        if placing not in FILLING or placing == given
        for again in asked.recomputes
        if asked.names or not again
    )
    filling = (way for way in ways if way[2] in FILLING and way[2] != given)
    return leanest or any(one.fits for way in filling for one in family(*way))


def halving_fits(question: Question) -> bool:
    """Whether half of the batch would fit. Not every model takes it."""
    if question.half is None:
        return False
    try:
        return fitting(replace(question, trace=question.half.trace, inputs=question.half.inputs))
    except PlanError:
        return False
