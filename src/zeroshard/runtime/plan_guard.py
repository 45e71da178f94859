"""Keeps a run to its plan: made on rank 0, the same on all ranks, limits set first, watched in training."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from zeroshard import errors
from zeroshard.comm import Transport
from zeroshard.errors import OptionError, PlanError, ZeroShardError
from zeroshard.layout.memory import OUTSIDE, MemoryModel, heaviest
from zeroshard.layout.specs import OptimizerRule
from zeroshard.machine import machine as find_machine
from zeroshard.options import Options
from zeroshard.planner.answer import (
    AllPlanArguments,
    Site,
    check_asked,
    check_nodes,
    machine_of,
    model_problem_for,
    take_asked,
)
from zeroshard.planner.plan import Plan
from zeroshard.planner.signatures import (
    blocks_of,
    numel_of,
    rules_of,
    shape_text,
    texts_of,
    weights_of,
    with_unused,
)
from zeroshard.sizes import show_apart, show_bytes
from zeroshard.tiers.ledger import MemoryLedger

from .measure import allocator_settings, here, link_between, raise_margin
from .stats import Stats

log = logging.getLogger("zeroshard")
ON_DEVICE = ("parameters", "gradients", "state", "gathered", "buckets")
ON_HOST = ("host", "staging")
UNDIVIDED_MIB = 21  # torch takes no less: its allocator cuts shards of under 10 MiB out of blocks of 20
OFTEN, SELDOM = 3, 50  # steps: all of the first are looked at, then every so many


class ShardArguments(AllPlanArguments, total=False):
    """The keyword arguments of `shard`: options, or a limit and what a plan is asked for, or a plan."""

    plan: Plan


@dataclass(frozen=True)
class PlanRequest:
    """What `shard()` was asked for beside its options: a limit to keep to, or a plan to repeat."""

    asked: dict[str, Any] = field(default_factory=dict)
    plan: Plan | None = None
    given: tuple[str, ...] = ()  # options that the user named

    @classmethod
    def taken_from(cls, keywords: dict[str, Any]) -> PlanRequest:
        """Takes its part of `shard`'s keyword arguments, and checks what can be checked without a model."""
        plan = keywords.pop("plan", None)
        asked = take_asked(keywords)
        if plan is not None and not isinstance(plan, Plan):
            raise OptionError(f"plan={plan!r} must be a zs.Plan; zs.Plan.read(path) reads one.")
        if plan is not None and (asked or keywords):
            raise OptionError(
                f"a plan says all: {', '.join(f'{n}=' for n in [*asked, *keywords])} cannot be beside it. "
                "Plan again with zs.plan(...) to change something."
            )
        planned = "limit" in asked or "memory_limit_per_node" in asked
        if "ranks_per_node" in asked and not planned:  # an option of unplanned runs, too
            keywords["ranks_per_node"] = asked.pop("ranks_per_node")
        if asked and not planned:
            raise OptionError(
                f"{next(iter(asked))}= is for a run that is planned: pass limit= as well, or drop it."
            )
        check_asked(asked)
        return cls(asked, plan, tuple(keywords))

    @property
    def options(self) -> dict[str, Any]:
        return self.plan.options() if self.plan is not None else {}

    @property
    def told(self) -> dict[str, str]:
        """What ranks compare. Of a plan its limits and places: what it foresees may be of measurements that
        each rank made."""
        told = {name: repr(value) for name, value in self.asked.items() if name not in ("batch", "loss")}
        if self.plan is not None:
            plan = self.plan
            kept = repr((plan.ranks, plan.limit, plan.host_limit, plan.disk_limit, plan.chosen.placement))
            told["plan"] = f"{plan.chosen.label} (checksum {blake2b(kept.encode()).hexdigest()[:6]})"
        return told

    def guard(
        self, model: nn.Module, optimizers: list[Optimizer], options: Options, transport: Transport
    ) -> PlanGuard | None:
        """The plan to keep to, shown by rank 0; None where nothing was asked. Every rank calls it."""
        if self.plan is not None:
            refuse_other(self.plan, model, optimizers, transport.size, transport.device.type == "cuda")
            return PlanGuard(self.plan, transport, _lasting(self.plan, model, optimizers, transport))
        if not self.asked:
            return None
        made = _agreed(self, model, optimizers, options, transport)
        if transport.rank == 0:
            made.show(Console(stderr=True, highlight=False), every=False)
        return PlanGuard(made, transport, _lasting(made, model, optimizers, transport))


def _agreed(
    request: PlanRequest,
    model: nn.Module,
    optimizers: list[Optimizer],
    options: Options,
    transport: Transport,
) -> Plan:
    """Rank 0 plans; its plan, or its refusal, is every rank's."""
    asked = dict(request.asked)
    check_nodes(transport.size, asked)
    given = asked.get("machine")
    found = None if given is None else machine_of(given)
    if found is None:
        found = link_between(transport, here(transport.device) if transport.rank == 0 else find_machine())
    told: Any = None
    if transport.rank == 0:
        on_cpu = transport.device.type == "cpu"
        site = Site(transport.size, found, transport.traits, on_cpu)
        try:
            asked_of = model_problem_for(model, optimizers, asked, options, request.given, site)
            told = {"plan": asked_of.plan().to_json()}
        except ZeroShardError as error:
            told = {"type": type(error).__name__, "error": str(error)}
        except Exception as error:  # peers must not wait for a rank that has failed
            told = {"type": "PlanError", "error": f"planning failed: {type(error).__name__}: {error}"}
    answer: Any = transport.exchange(told, "the plan of shard(limit=...)")[0]
    if "error" in answer:
        raise getattr(errors, answer["type"])(answer["error"])
    return Plan.from_json(answer["plan"])


def _lasting(
    plan: Plan, model: nn.Module, optimizers: list[Optimizer], transport: Transport
) -> dict[str, int]:
    """What lasts on this rank: the plan is of the one that owns most, though perhaps not of each kind."""
    if transport.size == 1:
        return plan.chosen.lasting
    options = Options(**plan.options())
    units = with_unused(blocks_of(model, optimizers, options.units), set(plan.unused))
    rules = rules_of(optimizers)
    world, rank = transport.size, transport.rank
    setup = MemoryModel(
        units,
        options,
        world,
        rules,
        rank,
        transport.traits,
        visits=plan.visits,
    )
    placement = plan.chosen.placement
    return asdict((setup if placement is None else setup.placed_as(placement)).held)


def refuse_other(
    plan: Plan, model: nn.Module, optimizers: list[Optimizer], world: int, gpu: bool = False
) -> None:
    """A plan is carried out as it is, or not at all; the error lists what differs."""
    faults = [] if plan.ranks == world else [f"it is for {plan.ranks} ranks, and these are {world}"]
    mine = weights_of(model)
    for name in dict.fromkeys([*plan.weights, *mine]):
        then, now = plan.weights.get(name), mine.get(name)
        if then != now:
            faults.append(f"`{name}` is {then or 'absent'} in the plan and {now or 'absent'} in the model")
    rules = rules_of(optimizers, gpu)
    texts = texts_of(model, optimizers, rules)
    if plan.optimizer and plan.optimizer != texts:
        faults.append(
            f"its optimizer is {', '.join(plan.optimizer)}, and this one {', '.join(texts) or 'none'}"
        )
    if not faults:
        faults += _heavier_step(plan, model, optimizers, rules)
    if faults:
        shown = "; ".join(faults[:5]) + (f"; and {len(faults) - 5} more" if len(faults) > 5 else "")
        raise PlanError(f"this plan is of another run: {shown}. Plan again: zs.plan(...), or limit=.")


def _heavier_step(
    plan: Plan, model: nn.Module, optimizers: list[Optimizer], rules: tuple[OptimizerRule, ...]
) -> list[str]:
    """What is wrong where the same optimizer steps in another way than the planned one, and takes more for it
    than the plan's fullest moment has."""
    options, chosen = Options(**plan.options()), plan.chosen
    units = with_unused(blocks_of(model, optimizers, options.units), set(plan.unused))
    setup, placement = heaviest(MemoryModel(units, options, plan.ranks, rules)), chosen.placement
    made = (setup if placement is None else setup.placed_as(placement)).update
    kinds = chosen.kinds
    always = sum(kinds[kind] for kind in ("parameters", "state", "gathered", "buckets", "inputs"))
    takes = always + chosen.lasting["gradients"] + made
    most = chosen.device - sum(kinds.get(kind, 0) for kind in ("workspace", "margin", *OUTSIDE))
    if takes <= most:
        return []
    names = " and ".join(dict.fromkeys(rule.name for rule in rules))
    fuses = all("fused" in group for optimizer in optimizers for group in optimizer.param_groups)
    said = "the step of {} makes {} of temporaries and would take {}, and the plan has {} at its fullest"
    told = said.format(names, show_bytes(made), *show_apart(takes, most))
    return [told + (" (fused=True makes none)" if fuses else "")]


class PlanGuard:
    """A plan that a run keeps to. `hold` before anything is allocated, `watch` from then on, `release` at
    the end."""

    def __init__(self, plan: Plan, transport: Transport, lasting: dict[str, int]) -> None:
        self.plan, self.options, self._lasting = plan, Options(**plan.options()), lasting
        self._rank, self._device = transport.rank, transport.device
        self._told: set[str] = set()
        self._before: float | None = None
        self._peak_before = self._others = 0  # bytes that the GPU's allocator had given out before this run
        self._steps = 0
        self._stats: Callable[[], Stats] | None = None

    # ------------------------------------------------------------------ limits

    def hold(self, model: nn.Module, ledger: MemoryLedger) -> None:
        """Set the limits: in the GPU's allocator, and in the ledger, which every lasting tensor passes."""
        self._cap(ledger)
        if self._device.type == "cuda":
            self._hold_allocator(model)

    def _cap(self, ledger: MemoryLedger, more: Mapping[str, int] | None = None) -> None:
        """The ledger's limits. `more`: bytes by kind that are still to come, or do not pass the ledger."""
        plan, more = self.plan, more or {}
        tiers: list[tuple[tuple[str, ...], int, str]]
        tiers = [((*ON_DEVICE, *ON_HOST) if plan.shared else ON_DEVICE, plan.limit, "the limit")]
        if plan.host_limit is not None:
            tiers.append((ON_HOST, plan.host_limit // plan.ranks_per_node, "a rank's share of host_limit"))
        if plan.disk_limit is not None:
            share = plan.disk_limit // plan.ranks_per_node
            tiers.append((("disk",), share, "a rank's share of disk_limit"))
        for kinds, most, what in tiers:
            ledger.cap(kinds, most, what, sum(more.get(kind, 0) for kind in kinds))

    def _hold_allocator(self, model: nn.Module) -> None:
        device = self._device
        limit = self.plan.limit - sum(self.plan.chosen.kinds.get(kind, 0) for kind in OUTSIDE)
        total = torch.cuda.get_device_properties(device).total_memory
        if limit > total:
            asked, has = show_apart(limit, total)
            raise PlanError(f"limit={asked}, and {device} has {has}: plan for less.")
        own = sum(p.nbytes for p in model.parameters() if p.device.type == "cuda")
        if own > limit:
            takes, has = show_apart(own, limit)
            raise PlanError(
                f"the model itself takes {takes} of {device}, and the limit is {has}. Build it on the meta "
                "device, with torch.device('meta'): shard() then fills it unit by unit."
            )
        read = getattr(torch.cuda, "get_per_process_memory_fraction", None)
        self._before = float(read(device)) if read is not None else 1.0
        fraction = min(math.nextafter(limit / total, 1.0), 1.0)  # never a byte less by rounding
        torch.cuda.set_per_process_memory_fraction(fraction, device)
        _divide_large_blocks(False)
        observe = torch._C._cuda_attach_out_of_memory_observer  # type: ignore[attr-defined]
        observe(partial(_tell, weakref.ref(self)))
        self._peak_before = torch.cuda.max_memory_allocated(device)
        self._others = torch.cuda.memory_allocated(device) - own

    def holds(self, device: int) -> bool:
        """Whether the limit of this GPU is its."""
        return self._before is not None and self._device.index in (None, device)

    def exceeded(self, size: int) -> None:
        """The limit refuses so many more bytes: say what was planned, and what there is."""
        now: dict[str, int] = {}
        if self._stats is not None:
            stats = self._stats()
            now = stats.peak | self._of_allocator(stats)
        now["activations"] = now.get("activations", 0) + size  # lasting tensors are refused by the ledger
        kinds = [
            "{} {}, and with these there would be {}".format(kind, *show_apart(planned, now[kind]))
            for kind, planned in self.planned.items()
            if now.get(kind, 0) > planned and kind != "device"
        ]
        grown = any(now.get(kind, 0) - size > planned for kind, planned in self.planned.items())
        log.error(
            "rank %d is out of memory: the limit of %s has no room for %s more%s. Planned were %s%s%s",
            self._rank,
            show_bytes(self.plan.limit),
            show_bytes(size),
            f" ({show_bytes(self._others)} of this GPU were in use by this process before shard())"
            if self._others
            else "",
            "; ".join(kinds) or f"{show_bytes(self.planned['device'])} in all",
            _CAUSES["activations"] if any(kind.startswith("activations") for kind in kinds) else "",
            self._what_fits((self.plan.limit + size) / self.plan.chosen.asked - 1.0, learns=not grown),
        )

    def _what_fits(self, margin: float, learns: bool) -> str:
        """What to plan with where the device takes so much beside what is asked of it. `learns`: nothing else
        took more than planned, so the figure is the allocator's, for all plans to come."""
        share = math.ceil(margin * 1000) / 1000
        learns = learns and self._device.type == "cuda"
        if learns:
            raise_margin(self._device, share)
        try:
            found = self.plan.refitted(share)
        except PlanError:
            return ". No other candidate of the plan has room for that: plan again with a larger limit"
        return (
            f". {found.chosen.label} fits with a margin of {share:.1%}: pass "
            f"plan=run.plan.refitted({share:.3f})"
            + (", or limit= again, whose plans know that margin from now on" if learns else "")
        )

    def _of_allocator(self, stats: Stats) -> dict[str, int]:
        """Activations that there are on a GPU: what is neither booked nor planned beside them."""
        if self._device.type != "cuda":
            return {}
        booked = sum(stats.live.get(kind, 0) for kind in ON_DEVICE)
        beside = sum(self.plan.chosen.kinds.get(kind, 0) for kind in ("inputs", "workspace"))
        used = torch.cuda.memory_allocated(self._device) - self._others
        return {"activations": max(used - booked - beside, 0)}

    def release(self) -> None:
        """Give the allocator its own limit back."""
        if self._before is not None:
            torch.cuda.set_per_process_memory_fraction(self._before, self._device)
            _divide_large_blocks(True)
            self._before = None

    # ------------------------------------------------------------------ planned and actual

    @property
    def planned(self) -> dict[str, int]:
        """Bytes by kind: lasting ones, and the activations and the whole device at the fullest moment."""
        chosen = self.plan.chosen
        moving = {"activations": chosen.kinds.get("activations", 0), "device": chosen.device}
        return self._lasting | moving

    def complete(self, stats: Stats) -> Stats:
        """The figures of a run with those of its plan; on a GPU also what its allocator measured."""
        measured: dict[str, int] = {}
        if self._device.type == "cuda":
            top = torch.cuda.max_memory_allocated(self._device)
            lasting = sum(stats.live.get(kind, 0) for kind in ON_DEVICE)
            measured = {"activations": max(top - lasting, 0), "device": top}
        return replace(stats, peak=stats.peak | measured, planned=self.planned)

    def watch(self, ledger: MemoryLedger, stats: Callable[[], Stats]) -> None:
        """The run is built; what torch's optimizer will keep does not pass the ledger, and is set aside."""
        self._stats = stats
        self._cap(
            ledger, {kind: max(self._lasting[kind] - ledger.live[kind], 0) for kind in ("state", "host")}
        )

    def stepped(self) -> None:
        """After a step: say once for each kind that takes more than was planned."""
        self._steps += 1
        if self._stats is None or (self._steps > OFTEN and self._steps % SELDOM):
            return
        now = self._stats()
        for kind, planned in self.planned.items():
            actual = now.peak.get(kind, 0)
            if actual > planned and kind not in self._told and self._is_ours(kind, actual):
                self._told.add(kind)
                log.warning(
                    "rank %d drifts over its plan: %s take %s, planned were %s%s",
                    self._rank,
                    kind,
                    *show_apart(actual, planned),
                    self._cause(kind),
                )

    def entered(self, inputs: Any) -> None:
        """Before a forward: say once that its inputs are larger than those that were planned with."""
        planned = self.plan.batch
        if "inputs" in self._told or not planned:
            return
        now = [shape_text(x) for x in tree_leaves(inputs) if isinstance(x, Tensor)]
        if sum(map(numel_of, now)) > sum(map(numel_of, planned)):
            self._told.add("inputs")
            log.warning(
                "rank %d drifts over its plan: inputs are %s, planned were %s, so that activations take more "
                "too",
                self._rank,
                *(", ".join(texts) for texts in (now, planned)),
            )

    def _cause(self, kind: str) -> str:
        if self.plan.unused and kind in ("gradients", "state", "host"):
            return (
                f" (`{self.plan.unused[0]}` or another had no gradient in the traced step, and has one now)"
            )
        return _CAUSES.get(kind, "")

    def _is_ours(self, kind: str, actual: int) -> bool:
        """Whether a peak is of this run: the GPU's allocator also counts what was there before."""
        return kind not in ("activations", "device") or actual > self._peak_before


def _divide_large_blocks(free: bool) -> None:
    """Whether torch's allocator may cut a small tensor out of a large block that is free. Under a limit it
    must not: a gradient or a moment of 4 MiB keeps a block of 32 MiB from the next activation, and 7 % of a
    GPU's memory was lost so. Settings of the user stay: with expandable segments nothing is divided, and a
    size of blocks that he gave is his."""
    settings = allocator_settings()
    if any(word in settings for word in ("expandable_segments:True", "max_split_size_mb")):
        return
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if change is None:
        return
    if not free:
        torch._C._cuda_clearCublasWorkspaces()  # cut out of whatever was free when they were first needed
        torch.cuda.empty_cache()
        if large := divided(torch.cuda.memory_snapshot()):
            log.info(
                "tensors that were there before shard() divide %s of this GPU's memory, so torch's allocator "
                "goes on to divide large blocks: some percent of the limit may be lost to gaps.",
                show_bytes(large),
            )
            return
    size = f"max_split_size_mb:{1 << 30 if free else UNDIVIDED_MIB}"
    change(f"{settings},{size}" if settings else size)


def divided(segments: list[dict[str, Any]]) -> int:
    """Bytes of large segments that the allocator has cut in shards. When memory is short it gives free blocks
    of the undivided size back to the driver, and takes for granted that each is a whole segment: a shard of
    an older one is an invalid argument there."""
    large = (s["total_size"] for s in segments if len(s["blocks"]) > 1)
    return sum(size for size in large if size >= UNDIVIDED_MIB << 20)


def _tell(guard: weakref.ref[PlanGuard], device: int, size: int, total: int, free: int) -> None:
    """Torch's allocator is out of memory. An observer cannot be taken away: a run that has ended says
    nothing."""
    mine = guard()
    if mine is not None and mine.holds(device):
        mine.exceeded(size)


_CAUSES = {
    "gathered": " (kept_full, or units used in another order than registered)",
    "activations": " (a larger batch than planned, or tensors kept over the step)",
}
