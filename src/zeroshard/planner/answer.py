"""Answers `plan()`: what a model would need on so many ranks, and which way of sharding fits.

The model may be on the meta device; nothing is allocated, no process group is needed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from torch import nn
from torch.optim import Optimizer

from zeroshard.errors import ModelError, OptionError, PlanError, did_you_mean
from zeroshard.field_checks import path_text
from zeroshard.layout.prefetch import UnitVisit
from zeroshard.layout.specs import GPU_TRAITS, TransportTraits, UnitSpec
from zeroshard.machine import GPUS, Machine
from zeroshard.machine import machine as find_machine
from zeroshard.options import OptionArguments, Options, Precision
from zeroshard.refusals import (
    optimizers_of,
    refuse_model,
    refuse_optimizers,
    refuse_options,
    refuse_precision,
    refuse_tried,
    refuse_written,
    takes,
)
from zeroshard.sizes import parse_bytes, show_seconds

from .candidates import PictureFrame, frames_of
from .choice import choose
from .plan import Plan, Rate, options_of
from .planning_problem import HalfBatch, OpenChoices, PlannedStep, PlanningProblem, TierLimits, placing_of
from .pricing import ring_seconds
from .signatures import (
    ExampleInputs,
    blocks_of,
    numel_of,
    rows_of,
    rules_of,
    shape_text,
    texts_of,
    tokens,
    weights_of,
    with_rows,
    with_unused,
)
from .trace import StepTraces

if TYPE_CHECKING:
    from .trace import Loss


class PlanArguments(TypedDict, total=False):
    """What a plan is asked for, beside the options of `shard`."""

    limit: int | str | None
    host_limit: int | str | None
    disk_limit: int | str | None
    disk_path: str | None
    memory_limit_per_node: int | str | None
    nodes: int | None
    batch: Any
    micro_batches: int | None
    loss: Loss | None
    machine: str | Machine | None
    precisions: Sequence[Precision | str | None] | None


class AllPlanArguments(OptionArguments, PlanArguments, total=False):
    """All keyword arguments of `plan`."""


ASKED = (*PlanArguments.__annotations__, "ranks_per_node")


def plan(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    ranks: int | None = None,
    **asked: Unpack[AllPlanArguments],
) -> Plan:
    """How to train `model` on so many ranks within a limit of device memory, before anything is allocated.

    - `limit`: bytes of one device (``"80GiB"``), or a GPU's name (``"H100"``): all that it has.
      `host_limit`, `disk_limit`: bytes of host memory and disk of one node, for all of its ranks.
      `disk_path`: a folder on that disk; without it nothing is put there.
    - `memory_limit_per_node` in place of `limit`: what the devices of one node may use together.
      `nodes` and `ranks_per_node` in place of `ranks`.
    - `batch`: one rank's micro-batch: a tensor, a tuple of arguments, a dict of keyword arguments, or
      ``"8x2048"`` for token ids of that shape. Only shapes and dtypes matter. Where inputs vary, give the
      largest. Without it activations are not counted.
    - `micro_batches`: of a step, all but the last under `run.no_sync()`: their sum is a whole gradient.
    - `loss`: makes the loss of the model's output (default: its scalar or `.loss`, a cross-entropy for
      logits over tokens).
    - `optimizer`: default AdamW, fused. `machine`: a name of `zeroshard.machine.GPUS`, or a `Machine` with
      figures of your own.
    - `precisions`: what the planner may choose among, such as ``(None, "bf16")``. Else `precision` is kept
      to: it changes the numbers, so it is never chosen unasked.
    - the options of `shard`: those that you give are kept to; stage, offload, recompute, prefetch and
      bucket_bytes are chosen where you do not.

    >>> import torch, zeroshard as zs
    >>> with torch.device("meta"):
    ...     model = torch.nn.Linear(4096, 4096)
    >>> zs.plan(model, ranks=8, limit="1GiB").chosen.stage
    1
    """
    return problem_of(model, optimizer, ranks=ranks, **asked).plan()


def problem_of(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    ranks: int | None = None,
    **asked: Unpack[AllPlanArguments],
) -> ModelProblem:
    """What `plan` asks, not yet answered."""
    given: dict[str, Any] = dict(asked)
    wanted = take_asked(given)
    machine = machine_of(wanted.get("machine", "H100"))
    if (device := _named_device(wanted)) is not None:
        machine, wanted["limit"] = device, device.memory
    check_asked(wanted)
    optimizers = None if optimizer is None else optimizers_of(optimizer)
    refuse_model(model, "plan()")
    refuse_optimizers(model, optimizers or (), "plan()")
    site = Site(_ranks(ranks, wanted), machine)
    return model_problem_for(model, optimizers, wanted, _options(given), given, site)


def machine_of(given: str | Machine) -> Machine:
    """A machine by its name, or as it was given."""
    if isinstance(given, str):
        return find_machine(given)
    if not isinstance(given, Machine):
        raise OptionError(
            f"machine={given!r} must be a name of zeroshard.machine.GPUS, or a zeroshard.machine.Machine."
        )
    return given


def _named_device(wanted: Mapping[str, Any]) -> Machine | None:
    """The whole of the GPU that `limit` names, with the figures of `machine` if that is the same one."""
    name = wanted.get("limit")
    if not isinstance(name, str) or name.upper() not in GPUS:
        return None
    machine = machine_of(wanted.get("machine", name))
    if machine.name.upper() != name.upper():
        raise OptionError(
            f'limit="{name}" is one GPU and machine= another, {machine.name}: name one, or give limit= in '
            "bytes."
        )
    return machine.whole()


def take_asked(given: dict[str, Any]) -> dict[str, Any]:
    """Takes what a plan is asked for out of keyword arguments. None says nothing."""
    asked = {name: given.pop(name) for name in ASKED if name in given}
    return {name: value for name, value in asked.items() if value is not None}


def check_asked(wanted: dict[str, Any]) -> None:
    """What can be known of it without a model; paths become texts."""
    for name in ("nodes", "ranks_per_node", "micro_batches"):
        if name in wanted:
            _count(wanted[name], name)
    for name in ("limit", "host_limit", "disk_limit", "memory_limit_per_node"):
        if name in wanted:
            parse_bytes(wanted[name], name)
    if "disk_path" in wanted:
        wanted["disk_path"] = path_text(wanted["disk_path"], "disk_path")
    loss = wanted.get("loss")
    if loss is not None and not callable(loss):
        raise OptionError(f"loss={loss!r} must be a function that makes the loss of the model's output.")
    if loss is not None and wanted.get("batch") is None:
        raise OptionError(
            "loss= without batch=: it is called with the model's output for an example of the inputs. Pass "
            "one as batch=."
        )


@dataclass(frozen=True)
class Site:
    """Where a model is to run. `traits`: of the transport; `one_memory`: device and
    host tier are the same memory, as on the CPU."""

    ranks: int
    machine: Machine
    traits: TransportTraits = GPU_TRAITS
    one_memory: bool = False


@dataclass(frozen=True)
class ModelProblem:
    """A question about a real model, and what its run must have in common with the answer."""

    problem: PlanningProblem
    weights: dict[str, str]
    optimizer: tuple[str, ...]
    batch: tuple[str, ...]

    def plan(self) -> Plan:
        """The answer, or a `PlanError`."""
        return self.named(choose(self.problem))

    def named(self, made: Plan) -> Plan:
        return replace(made, weights=self.weights, optimizer=self.optimizer, batch=self.batch)

    def rate(self, plan: Plan) -> Rate:
        """What turns the seconds of a step into tokens a second and a share of the peak."""
        asked, counts = self.problem, [shape for shape in self.batch if shape.startswith("int64")]
        rows = 0
        if self.batch:
            rows = numel_of(counts[0]) if counts else int(self.batch[0].partition("(")[2].split(",")[0])
        options = Options(**options_of(plan.chosen))
        narrow = all(w.dtype != "float32" for unit in asked.units for w in unit.weights)
        narrow = narrow or (options.precision is not None and options.precision.compute != "float32")
        traced = sum(s.flops + s.back for s in asked.segments(replace(asked.options, recompute=False)))
        own = 6 * plan.parameters * rows
        return Rate(
            rows * asked.world,
            "tokens" if counts else "rows",
            min(own, traced) if counts and traced else traced,
            asked.machine.half if narrow else asked.machine.full,
            tuple(_assumptions(asked)),
        )

    def frames(self, plan: Plan) -> list[list[PictureFrame]]:
        """One step in time of each of the plan's candidates."""
        return [frames_of(self.problem, Options(**options_of(one))) for one in plan.candidates]


def _assumptions(problem: PlanningProblem) -> Iterator[str]:
    machine = problem.machine
    yield (
        f"Times are estimates for {machine.name} ({machine.source or 'figures as given'}): products reach "
        f"{machine.efficiency:.0%} of {machine.half / 1e12:,.0f} TFLOP/s in 16 bits or "
        f"{machine.full / 1e12:,.0f} in fp32, all else {machine.memory_rate / 1e12:.2f} TB/s of its memory."
    )
    if problem.world > 1:
        yield (
            f"A device sends {machine.link / 1e9:,.0f} GB/s inside a node of {problem.ranks_per_node} and "
            f"{machine.network / 1e9:,.1f} GB/s to others; an exchange takes "
            f"{machine.latency * 1e6:.0f} µs more"
            + (
                f", and {show_seconds(ring_seconds(problem.world, machine))} along the ring (assumed: "
                f"{machine.hop * 1e6:.1f} µs to a device, {machine.node_hop * 1e6:.1f} µs to a node)."
                if machine.gpu
                else ", times the depth of a tree of all ranks."
            )
        )
    yield (
        f"Between host and device {machine.pcie / 1e9:,.0f} GB/s; Python launches a kernel in "
        f"{machine.launch * 1e6:.0f} µs."
    )
    if problem.step.trace is None:
        yield "No batch was given: activations are not counted, nor is the time of computing."


def model_problem_for(
    model: nn.Module,
    optimizers: list[Optimizer] | None,
    wanted: dict[str, Any],
    options: Options,
    given: Collection[str],
    site: Site,
) -> ModelProblem:
    """The question for what is wanted (`PlanArguments`). `given`: names of the options that the user gave."""
    refuse_options(model, optimizers or (), options)
    refuse_written(model, options, site.ranks)
    stages = _stages(optimizers, options, given, site.ranks)
    units = blocks_of(model, optimizers, options.units)
    rules = rules_of(optimizers, site.machine.gpu)
    batch = wanted.get("batch")
    batch = tokens(batch) if isinstance(batch, str) else batch
    inputs = None if batch is None else ExampleInputs.of(batch)
    if inputs is not None:
        _check_step(units, inputs)
    per_node = min(site.ranks, wanted.get("ranks_per_node") or site.machine.node)
    if options.node_cache or options.transport == "nodes":
        _check_levels(site, per_node)
        options = replace(options, ranks_per_node=per_node)
    resting = sum(b.numel() * b.element_size() for b in model.buffers())

    def optional(name: str) -> int | None:
        return parse_bytes(wanted[name], name) if name in wanted else None

    problem = PlanningProblem(
        model=type(model).__name__,
        units=units,
        rules=rules,
        options=options,
        world=site.ranks,
        limits=TierLimits(
            _limit(wanted, per_node),
            optional("host_limit"),
            optional("disk_limit"),
            wanted.get("disk_path"),
            shared=site.one_memory and "memory_limit_per_node" in wanted,
            by_node="memory_limit_per_node" in wanted,
        ),
        machine=replace(site.machine, node=wanted.get("ranks_per_node") or site.machine.node),
        step=PlannedStep(
            inputs=resting + (inputs.nbytes if inputs else 0), micro_batches=wanted.get("micro_batches", 1)
        ),
        choices=OpenChoices(**_choices(options, given, wanted.get("precisions")) | stages),
        traits=site.traits,
        narrows=takes(model, Precision()),
    )
    for precision in problem.choices.precisions or ():
        refuse_precision(model, precision)
    if inputs is not None:
        traces = StepTraces(problem, model, inputs, wanted.get("loss"))
        problem = problem.stepping(trace=traces, half=_half(traces, batch, resting))
        problem = _learnt(problem, "recompute" not in given).stepping(bounded=traces.bounded)
    if "disk_limit" in wanted and "disk_path" not in wanted and options.offload is None:
        raise OptionError("disk_limit= needs disk_path=, a folder on that disk.")
    return ModelProblem(
        problem,
        weights_of(model),
        texts_of(model, optimizers, rules),
        tuple(shape_text(t) for t in inputs.tensors) if inputs is not None else (),
    )


def _half(traces: StepTraces, batch: Any, resting: int) -> HalfBatch | None:
    """The same step with half as many rows, as far as there are two."""
    rows = rows_of(batch)
    if rows < 2:
        return None
    inputs = ExampleInputs.of(with_rows(batch, rows // 2))
    return HalfBatch(traces.of(inputs), resting + inputs.nbytes)


def _learnt(problem: PlanningProblem, may_recompute: bool) -> PlanningProblem:
    """The question with what one trace tells: which weights get no gradient; in which order units compute,
    and which of them backward wants again, if it is not that of registration and all; and, where that `may`
    be chosen, whether units can be recomputed."""
    asked = next(problem.by_precision())
    segments = asked.segments(asked.way(asked.choices.stages[0], recompute=asked.choices.recomputes[0]))
    used = {name for segment in segments for name in segment.order}
    trainable = {w.name for unit in problem.units for w in unit.weights if w.trainable}
    visits = tuple(
        UnitVisit(s.unit, s.entered, s.needs, bool(s.levels)) for s in segments if s.entered or s.needs
    )
    entered = [visit for visit in visits if visit.entered]
    chain = [visit.unit for visit in entered] == list(problem.names)
    if chain and all(visit.reached and visit.needs for visit in entered):
        visits = ()
    made = replace(problem, units=with_unused(problem.units, trainable - used)).stepping(visits=visits)
    if may_recompute and True in made.choices.recomputes and any(segment.spoils for segment in segments):
        return replace(made, recomputable=False).allowing(recomputes=(False,))
    return made


def _check_step(units: Sequence[UnitSpec], inputs: ExampleInputs) -> None:
    """That there is a step to trace."""
    if inputs.tensors and not any(t.numel() for t in inputs.tensors):
        raise OptionError(
            f"batch= holds nothing: its first tensor is of shape {tuple(inputs.tensors[0].shape)}. Give a "
            "whole micro-batch of one rank."
        )
    if not any(weight.trainable for unit in units for weight in unit.weights):
        raise PlanError(
            "no parameter of the model is trainable (requires_grad), so there is no backward to trace: leave "
            "batch= out, and activations are not counted."
        )


def _choices(options: Options, given: Collection[str], precisions: Any) -> dict[str, Any]:
    """What may be chosen: all that the user left open."""
    made: dict[str, Any] = {"free": frozenset(("prefetch", "bucket_bytes", "split")) - set(given)}
    if "stage" in given or options.node_cache:
        made["stages"] = (options.stage,)
    if "offload" in given:
        made["placings"] = (placing_of(options.offload),)
    if "recompute" in given:
        made["recomputes"] = (bool(options.recompute),)
    if precisions is not None:
        if isinstance(precisions, str) or not isinstance(precisions, Sequence) or not precisions:
            raise OptionError(f'precisions={precisions!r} must be a few to choose among: (None, "bf16").')
        if "precision" in given:
            raise OptionError("pass precision= to say, or precisions= to have one chosen, not both.")
        made["precisions"] = tuple(Options(precision=p).precision for p in precisions)
    return made


def _stages(
    optimizers: list[Optimizer] | None, options: Options, given: Collection[str], ranks: int
) -> dict[str, Any]:
    """Stage 0 alone, where an optimizer turns out to look at parameters that other ranks would have. Raises
    what `shard()` would of the stage that was asked for."""
    asked = "stage" in given or options.node_cache
    try:
        refuse_tried(optimizers or (), options if asked else replace(options, stage=1), ranks)
    except ModelError:
        if asked:
            raise
        refuse_tried(optimizers or (), replace(options, stage=0), ranks)
        return {"stages": (0,)}
    return {}


def _check_levels(site: Site, per_node: int) -> None:
    """What a run would refuse is not planned either."""
    trouble = None
    if site.machine.gpu:
        trouble = f"a {site.machine.name} has NCCL, which is of one level"
    elif not 1 < per_node < site.ranks or site.ranks % per_node:
        trouble = f"{site.ranks} ranks are not several nodes of {per_node}"
    if trouble is not None:
        raise OptionError(
            'node_cache=True and transport="nodes" are for ranks without GPUs on several nodes of several '
            f"ranks each, and {trouble}: drop them, or pass machine= with gpu=False, nodes= and "
            "ranks_per_node=."
        )


def _limit(wanted: dict[str, Any], per_node: int) -> int:
    if ("limit" in wanted) == ("memory_limit_per_node" in wanted):
        raise OptionError(
            'a plan needs one limit: limit="80GiB" of a device, or memory_limit_per_node="640GiB".'
        )
    if "limit" in wanted:
        return parse_bytes(wanted["limit"], "limit")
    return parse_bytes(wanted["memory_limit_per_node"], "memory_limit_per_node") // per_node


def _ranks(ranks: int | None, wanted: dict[str, Any]) -> int:
    if ranks is None and "nodes" in wanted and "ranks_per_node" in wanted:
        return int(wanted["nodes"] * wanted["ranks_per_node"])
    if ranks is None:
        raise OptionError("say how many processes: ranks=, or nodes= and ranks_per_node=.")
    _count(ranks, "ranks")
    check_nodes(ranks, wanted)
    return ranks


def check_nodes(ranks: int, wanted: dict[str, Any]) -> None:
    """`nodes` and `ranks_per_node`, as far as given, must make the number of ranks."""
    nodes, per_node = wanted.get("nodes"), wanted.get("ranks_per_node")
    made = (nodes or 1) * (per_node or 1)
    if (nodes is not None and ranks % nodes) or (
        nodes is not None and per_node is not None and made != ranks
    ):
        given = f"nodes={nodes}" + (f" and ranks_per_node={per_node} do" if per_node is not None else " does")
        raise OptionError(f"{given} not make {ranks} ranks.")
    if nodes is not None and per_node is None:
        wanted["ranks_per_node"] = ranks // nodes


def _count(value: Any, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise OptionError(f"{what}={value!r} must be a number of {what.replace('_', '-')}, 1 or more.")
    return value


def _options(given: dict[str, Any]) -> Options:
    known = [f.name for f in fields(Options)]
    for name in given:
        if name not in known:
            raise OptionError(
                f"plan() has no option {name!r}.{did_you_mean(name, [*known, 'ranks', *ASKED])}"
            )
    return Options(**given)
