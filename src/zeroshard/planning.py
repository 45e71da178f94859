"""`plan()`: what a model would need on so many ranks, and which way of sharding fits. The model may be on
the meta device; nothing is allocated, no process group is needed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .config import OptionKeys, Options, Stage, did_you_mean, parse_bytes
from .errors import OptionError, PlanError
from .machine import Machine
from .machine import machine as find_machine
from .memory import Setup
from .plan import Placing, Plan
from .planner import Question, choose, placing_of
from .shapes import Block, Rule, Weight
from .step import rows_suffice
from .timeline import Segment
from .units import find_units, matching

if TYPE_CHECKING:
    from .trace import Inputs, Loss


def plan(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    ranks: int,
    limit: int | str,
    host_limit: int | str | None = None,
    batch: Any = None,
    loss: Loss | None = None,
    machine: str | Machine = "H100",
    **options: Unpack[OptionKeys],
) -> Plan:
    """How to train `model` on so many ranks within a limit of device memory, before anything is allocated.

    - `limit`: bytes of one device (``"80GiB"``); `host_limit`: bytes of host memory of one node, for all of
      its ranks.
    - `batch`: one rank's micro-batch: a tensor, a tuple of arguments, a dict of keyword arguments, or
      ``"8x2048"`` for token ids of that shape. Only shapes and dtypes matter. Where inputs vary, give the
      largest. Without it activations are not counted.
    - `loss`: makes the loss of the model's output (default: its scalar or `.loss`, a cross-entropy for
      logits over tokens).
    - `optimizer`: default AdamW, fused. `machine`: a name of `zeroshard.machine.GPUS`, or a `Machine` with
      figures of your own.
    - the options of `shard`: those that you give are kept to; stage, offload and recompute are chosen where
      you do not.

    >>> import torch, zeroshard as zs
    >>> with torch.device("meta"):
    ...     model = torch.nn.Linear(4096, 4096)
    >>> zs.plan(model, ranks=8, limit="1GiB").chosen.stage
    0
    """
    from .trace import Inputs  # fake tensors take a second to import, which `import zeroshard` should not

    if not isinstance(ranks, int) or ranks < 1:
        raise OptionError(f"ranks={ranks!r} must be a number of processes, 1 or more.")
    chosen = _options(dict(options))
    optimizers = (
        None if optimizer is None else [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    )
    units, rules = blocks_of(model, optimizers, chosen.units), rules_of(optimizers)
    inputs = None if batch is None else Inputs.of(tokens(batch) if isinstance(batch, str) else batch)
    given: dict[str, Any] = {}
    if "stage" in options:
        stages: tuple[Stage, ...] = (chosen.stage,)
        given["stages"] = stages
    if "offload" in options:
        placings: tuple[Placing, ...] = (placing_of(chosen.offload),)
        given["placings"] = placings
    if "recompute" in options:
        given["recomputes"] = (bool(chosen.recompute),)
    resting = sum(b.numel() * b.element_size() for b in model.buffers())
    question = Question(
        type(model).__name__,
        units,
        rules,
        chosen,
        ranks,
        parse_bytes(limit, "limit"),
        find_machine(machine) if isinstance(machine, str) else machine,
        None if host_limit is None else parse_bytes(host_limit, "host_limit"),
        resting + (inputs.nbytes if inputs else 0),
        **given,
    )
    if inputs is not None:
        question = _traced(question, model, inputs, loss)
    return choose(question)


def _options(given: dict[str, Any]) -> Options:
    known = [f.name for f in fields(Options)]
    for name in given:
        if name not in known:
            own = ["ranks", "limit", "host_limit", "batch", "loss", "machine"]
            raise OptionError(f"plan() has no option {name!r}.{did_you_mean(name, [*known, *own])}")
    return Options(**given)


def tokens(text: str) -> Tensor:
    """``"8x2048"``: eight sequences of 2048 token ids."""
    if not re.fullmatch(r"\d+(x\d+)*", text):
        raise OptionError(
            f'batch={text!r} is not a shape of token ids. Write it as "8x2048", or pass example inputs.'
        )
    return torch.zeros([int(part) for part in text.split("x")], dtype=torch.int64, device="meta")


def _traced(question: Question, model: nn.Module, inputs: Inputs, loss: Loss | None) -> Question:
    """The question with a step traced, without and with recomputation, as far as both may be chosen."""
    names = [unit.name for unit in question.units if unit.name]
    patterns = question.options.recompute
    again = names if isinstance(patterns, bool) else matching(patterns, names, "recompute", "units")
    traces: dict[bool, tuple[Segment, ...]] = {}
    for recompute in question.recomputes:
        traces[recompute] = trace(question, model, inputs, loss, again if recompute else [])
    return replace(question, traces=traces)


def trace(
    question: Question, model: nn.Module, inputs: Inputs, loss: Loss | None, recomputed: Sequence[str]
) -> tuple[Segment, ...]:
    """The segments of one step of the model in the run's compute dtypes."""
    from .trace import Tracer

    setup = Setup(question.units, question.options, question.world, question.rules)
    compute = {w.name: getattr(torch, setup.dtypes(w)[0]) for unit in question.units for w in unit.weights}
    chosen = set(recomputed)
    try:
        return tuple(
            Tracer(model, [u.name for u in question.units if u.name], chosen.__contains__, compute).run(
                inputs, loss
            )
        )
    except PlanError:
        raise
    except Exception as error:  # the user's code on fake tensors: say that it was that
        shapes = ", ".join(str(tuple(t.shape)) for t in inputs.tensors)
        raise PlanError(
            f"a step of {type(model).__name__} with inputs of shape {shapes} cannot be "
            f"traced: {type(error).__name__}: {error}. Check the batch; code that looks at values cannot run "
            "on shapes alone: leave batch= out, and activations are not counted."
        ) from error


def blocks_of(
    model: nn.Module, optimizers: Sequence[Optimizer] | None, units: tuple[str, ...] | Literal["auto", "none"]
) -> tuple[Block, ...]:
    """The model's units as shapes. Without optimizers every trainable parameter gets the first rule."""
    numbers = {id(p): number for number, p in enumerate(model.parameters())}
    groups = [group for optimizer in optimizers or () for group in optimizer.param_groups]
    rule_of = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
    missing = 0 if optimizers is None else -1
    return tuple(
        Block(
            unit.name,
            tuple(
                Weight(
                    t.name,
                    tuple(t.parameter.shape),
                    str(t.parameter.dtype).removeprefix("torch."),
                    t.parameter.requires_grad,
                    numbers[id(t.parameter)],
                    rule_of.get(id(t.parameter), missing),
                )
                for t in unit.tenants
            ),
        )
        for unit in find_units(model, units)
    )


def rules_of(optimizers: Sequence[Optimizer] | None) -> tuple[Rule, ...]:
    """A rule for every parameter group. How many moments it keeps is found by a step of the same optimizer
    on one small matrix."""
    if optimizers is None:
        return (Rule(),)
    return tuple(
        Rule(type(o).__name__, _moments(o, group), rows_suffice(o), 0 if group.get("fused") else 1)
        for o in optimizers
        for group in o.param_groups
    )


def _moments(optimizer: Optimizer, group: dict[str, Any]) -> int:
    probe = nn.Parameter(torch.zeros(16, 16))
    probe.grad = torch.ones(16, 16)
    options = {key: value for key, value in group.items() if key not in ("params", "initial_lr")}
    twin = type(optimizer)(
        [{"params": [probe], **options}], **{k: v for k, v in optimizer.defaults.items() if k == "lr"}
    )
    twin.step()
    kept = [value for value in twin.state[probe].values() if isinstance(value, Tensor) and value.dim() > 0]
    return -(-sum(t.numel() for t in kept) // probe.numel())
