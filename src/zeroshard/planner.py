"""A limit becomes a plan: every way to run is priced in bytes and seconds, and the fastest that fits is
taken. No torch.

Bytes come from `memory` and `timeline`. Seconds are an estimate from `machine`'s figures: what overlaps
counts by its longest part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

from .config import Offload, Options, Stage, show_bytes
from .errors import PlanError
from .machine import Machine
from .memory import Setup, heaviest, imbalance
from .plan import Candidate, Placing, Plan
from .shapes import WIDTHS, Block, Rule
from .timeline import Moment, Segment, peak_of, step_moments

PLACINGS: tuple[Placing, ...] = ("device", "state on host", "all on host")
EQUAL = 1.01  # two plans whose estimates are this close are equally fast


@dataclass(frozen=True)
class Question:
    """What a plan is asked for. `traces`: segments of a step, by whether units are recomputed; empty:
    activations are unknown."""

    model: str
    units: tuple[Block, ...]
    rules: tuple[Rule, ...]
    options: Options
    world: int
    limit: int
    machine: Machine
    host_limit: int | None = None  # of a node
    inputs: int = 0
    traces: dict[bool, tuple[Segment, ...]] = field(default_factory=dict)
    stages: tuple[Stage, ...] = (0, 1, 2, 3)
    placings: tuple[Placing, ...] = PLACINGS
    recomputes: tuple[bool, ...] = (False, True)

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

    def setup(self, stage: Stage, placing: Placing, recompute: bool) -> Setup:
        return heaviest(
            Setup(self.units, self.run_options(stage, placing, recompute), self.world, self.rules)
        )

    def run_options(self, stage: Stage, placing: Placing, recompute: bool) -> Options:
        """The options of one way to run. An offload or patterns of units that the user named are used as
        they are."""
        offload = {"device": None, "state on host": Offload(), "all on host": Offload(parameters="host")}[
            placing
        ]
        if self.options.offload is not None and placing == placing_of(self.options.offload):
            offload = self.options.offload
        patterns = self.options.recompute
        return replace(
            self.options,
            stage=stage,
            offload=offload,
            recompute=patterns if recompute and isinstance(patterns, tuple) else recompute,
        )

    def setups(self) -> Iterator[tuple[Stage, Placing, bool, Setup]]:
        """Every combination that means something. On one rank all stages are the same."""
        stages: tuple[Stage, ...] = self.stages if self.world > 1 else self.stages[:1]
        recomputes = self.recomputes if self.traces else self.recomputes[:1]
        for stage in stages:
            for placing in self.placings:
                if placing == "all on host" and stage < 3 and self.world > 1:
                    continue  # resident parameters cannot be streamed
                for recompute in recomputes:
                    if recompute and len(self.units) < 2:
                        continue  # only units are recomputed
                    yield stage, placing, recompute, self.setup(stage, placing, recompute)


def placing_of(offload: Offload | None) -> Placing:
    """Which of the planner's three placings an offload is."""
    if offload is None:
        return "device"
    return "all on host" if offload.parameters == "host" else "state on host"


def choose(question: Question) -> Plan:
    """The plan, or a `PlanError` that says what is missing and what would help."""
    candidates = tuple(price(question, *way) for way in question.setups())
    fitting = [one for one in candidates if one.fits]
    if not fitting:
        raise PlanError(refusal(question, candidates))
    fastest = min(one.step for one in fitting)
    equals = [one for one in fitting if one.step <= fastest * EQUAL]
    chosen = min(equals, key=lambda one: (one.moving_parts, one.device))
    settings = asdict(question.run_options(chosen.stage, chosen.placing, chosen.recompute))
    del settings["stage"]
    uneven = imbalance(question.setup(3, "device", False)) if chosen.stage else 0.0
    return Plan(
        question.model,
        question.parameters,
        question.world,
        question.limit,
        question.host_limit,
        question.machine.name,
        settings,
        chosen,
        candidates,
        tuple(_reasons(question, chosen, candidates, uneven)),
        uneven,
    )


def price(question: Question, stage: Stage, placing: Placing, recompute: bool, setup: Setup) -> Candidate:
    """One way to run, in bytes and seconds."""
    peak = peak_of(step_moments(setup, question.traces.get(recompute, ()), question.inputs))
    host = setup.held.host_bytes
    sent = sent_by_rank(setup)
    seconds, step = times(question, setup, sent)
    fits = peak.total <= question.limit and host <= question.host_share
    precision = question.options.precision
    return Candidate(
        stage,
        placing,
        recompute,
        peak.total,
        peak.where,
        peak.kinds,
        host,
        sent,
        seconds,
        step,
        fits,
        precision.numerics if precision is not None else "exact",
    )


def sent_by_rank(setup: Setup) -> dict[str, int]:
    """Bytes that a rank sends in a step on average: pieces to the other N - 1. Padding, flags and
    agreements are left out."""
    if setup.world == 1:
        return {}
    others = setup.world - 1
    reduced = sum(w.numel * WIDTHS[b.wire] for b in setup.buckets for w in b.weights) * others // setup.world
    if setup.options.stage == 0:
        whole = (
            sum(w.numel * WIDTHS[b.landed] for b in setup.buckets for w in b.weights) * others // setup.world
        )
        return {"reduce": reduced + whole}
    size = {unit.name: 0 for unit in setup.units}
    for bundle in setup.bundles:
        size[bundle.unit] += (
            sum(slot.numel for slot in bundle.slots if slot.split != "copy") * WIDTHS[bundle.compute]
        )
    if setup.resident:
        return {"reduce": reduced, "publish": sum(size.values()) * others // setup.world}
    kept = size[setup.units[0].name] + (size[setup.units[-1].name] if len(setup.units) > 1 else 0)
    return {"reduce": reduced, "gather": (2 * sum(size.values()) - kept) * others // setup.world}


def times(question: Question, setup: Setup, sent: dict[str, int]) -> tuple[dict[str, float], float]:
    """Seconds of each part, and of a step: communication, copies and the overlapped host update run beside
    the computation."""
    machine, recompute = question.machine, bool(setup.options.recompute)
    segments = question.traces.get(recompute, ())
    forward = sum(s.flops for s in segments)
    again = sum(s.flops for s in segments if setup.recomputes(s.unit))
    narrow = any(WIDTHS[b.compute] <= 2 for b in setup.bundles)
    compute = (3 * forward + again) / ((machine.half if narrow else machine.full) * machine.efficiency)
    rate = machine.link if question.world <= machine.node else machine.network
    exchange = sum(sent.values()) / rate
    held = sum(s.held(setup.rank) for s in setup.slots.values())
    master = max((WIDTHS[b.master] for b in setup.bundles), default=4)
    moments = max((rule.moments for rule in setup.rules), default=0)
    width = min((WIDTHS[b.compute] for b in setup.bundles), default=4)
    touched = held * (
        2 * master * (1 + moments) + 2 * width
    )  # master and moments read and written, gradient read, weight written
    if not setup.on_host:
        update = touched / machine.memory_rate
        seconds = {"compute": compute, "exchange": exchange, "update": update}
        return seconds, max(compute, exchange) + update
    update = touched / (machine.host_rate / question.ranks_per_node)
    copies = held * width / machine.pcie  # gradients out while weights come in
    if setup.streamed:
        copies += 2 * held * width / machine.pcie
    seconds = {"compute": compute, "exchange": exchange, "copies": copies, "host update": update}
    if setup.parts and all(part.native for part in setup.parts):
        return seconds, max(seconds.values())
    return seconds, max(compute, exchange, copies) + update


# ---------------------------------------------------------------------- words


def _reasons(
    question: Question, chosen: Candidate, candidates: Sequence[Candidate], uneven: float
) -> Iterator[str]:
    slowest = max(chosen.seconds, key=lambda part: chosen.seconds[part])
    if chosen.step:
        yield f"{chosen.label} is the fastest that fits: estimated {chosen.step:.3g} s, most of it {slowest}."
    others = sorted((one for one in candidates if one.fits and one != chosen), key=lambda one: one.step)
    if others:
        runner = others[0]
        ahead = (
            "as fast, with more moving parts"
            if runner.step <= chosen.step * EQUAL
            else f"estimated {runner.step:.3g} s"
        )
        yield f"Runner-up: {runner.label}, {ahead}, {show_bytes(runner.device)}."
    simpler = [one for one in candidates if not one.fits and one.moving_parts < chosen.moving_parts]
    if simpler:
        first = min(simpler, key=lambda one: one.moving_parts)
        yield f"{first.label} does not fit: {_needs(question, first)}."
    if not question.traces:
        yield "Activations are not counted: pass batch= (a batch of example inputs) to have a step traced."
    if chosen.placing != "device" and question.options.clip_norm is None:
        yield "Pass clip_norm= (math.inf to clip nothing): the host's update then overlaps with backward."
    if uneven > 0.01:
        yield f"Rows do not divide evenly: the fullest rank owns {uneven:.1%} more than the mean."


def _needs(question: Question, one: Candidate) -> str:
    if one.device > question.limit:
        return f"it needs {show_bytes(one.device)} per device at {one.where}"
    return f"it needs {show_bytes(one.host * question.ranks_per_node)} of host memory per node"


def refusal(question: Question, candidates: Sequence[Candidate]) -> str:
    """Why nothing fits: the smallest plan, where it is fullest, of what, and the nearest changes that would
    fit."""
    on_device = [one for one in candidates if one.device <= question.limit]
    if on_device:
        least = min(on_device, key=lambda one: one.host)
        node = least.host * question.ranks_per_node
        assert question.host_limit is not None
        return (
            f"no plan fits {show_bytes(question.host_limit)} of host memory per node: the smallest whose "
            f"device part fits ({least.label}) "
            f"needs {show_bytes(node)} for {question.ranks_per_node} ranks. {_advice(question, least)}"
        )
    least = min(candidates, key=lambda one: one.device)
    gib = {
        kind: size / 2**30
        for kind, size in sorted(least.kinds.items(), key=lambda k: -k[1])
        if size >= 0.005 * least.device
    }
    made_of = ", ".join(
        f"{kind} {size:.2g}" if size < 1 else f"{kind} {size:.1f}" for kind, size in gib.items()
    )
    return (
        f"no plan fits {show_bytes(question.limit)} per device: the smallest ({least.label}) needs "
        f"{show_bytes(least.device)} at {least.where} ({made_of} GiB). {_advice(question, least)}"
    )


def _advice(question: Question, least: Candidate) -> str:
    """Changes that would fit, tried one by one; the last always does."""
    ways = []
    if (
        question.traces
        and True not in question.recomputes
        and fitting(replace(question, recomputes=(False, True)))
    ):
        ways.append("allow recompute=True")
    if question.placings != PLACINGS and fitting(replace(question, placings=PLACINGS)):
        ways.append("allow offload to the host")
    if least.kinds["activations"] > question.limit // 10 and fitting(halved(question)):
        ways.append("halve the micro-batch")
    for factor in (2, 4, 16, 256):
        if fitting(replace(question, world=question.world * factor)):
            ways.append(f"use {question.world * factor:,} ranks")
            break
    if least.device > question.limit:
        ways.append(f'pass limit="{math.ceil(least.device / 2**30 * 10) / 10:g}GiB"')
    else:
        ways.append(f'pass host_limit="{math.ceil(least.host * question.ranks_per_node / 2**30)}GiB"')
    share = least.kinds["activations"] / least.device
    lead = (
        "Sharding cannot shrink activations: "
        if share > 0.5 and least.device > question.limit
        else "What would fit: "
    )
    return f"{lead}{', or '.join(ways)}."


def fitting(question: Question) -> bool:
    """Whether anything fits."""
    return any(price(question, *way).fits for way in question.setups())


def halved(question: Question) -> Question:
    """The same with half the batch, as far as activations go with it."""
    traces = {
        key: tuple(
            Segment(s.unit, s.saved // 2, s.forward // 2, s.backward // 2, s.flops // 2) for s in segments
        )
        for key, segments in question.traces.items()
    }
    return replace(question, traces=traces)


def moments_of(question: Question, candidate: Candidate) -> list[Moment]:
    """A candidate's step in time, for a picture."""
    setup = question.setup(candidate.stage, candidate.placing, candidate.recompute)
    return step_moments(setup, question.traces.get(candidate.recompute, ()), question.inputs)
