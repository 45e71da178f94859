"""A combination of features as data: drawn from a seed, then brought to what the documentation allows.

What a seed means stays as it is: new features are drawn last."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

STEPS = 7
MOVED = 10_000_000  # added to a seed for the job that goes on
WORLDS = (1, 1, 2, 2, 2, 3, 4)
# What happens before a step. "skip step" is a step never taken, "skip block" a block that sits one out.
EVENTS = (
    *("evaluate", "evaluate in a step", "infer", "kept full", "deep copy", "raise in forward"),
    *("gather", "write gathered", "state dict", "optimizer state dict", "reload state dicts", "save", "load"),
    *("freeze", "thaw", "skip step", "skip block", "close", "stats", "publish"),
)
# What happens between the last backward of a step and its update. The loop writes into gradients and weights.
BETWEEN = (
    *("halve gradients", "halve some gradients", "add to gradients", "replace gradients", "drop a gradient"),
    *("zero a gradient", "read norms", "clip some", "evaluate between", "read weights", "shrink weights"),
    *("halve rate between", "step twice"),
)
MORE = (
    *("full state", "full state of one", "full optimizer state", "halve rate", "penalty", "overflow"),
    *("two losses", "save in background"),
)
WRITES = ("shrink weights", "add to gradients", "penalty")  # or computes with weights by hand
ADAMS = ("adamw", "adam", "fused", "decoupled", "tensor rate", "maximize")
TORCHS = (*ADAMS, "amsgrad", "sgd", "momentum", "nesterov")
NATIVE = (*TORCHS, "lion")
BY_TENSOR = ("adafactor", "muon")
ELEMENTWISE = ("rmsprop", "nadam", "adagrad", "adamax", "radam", "rprop", "asgd", "adadelta")
CODED = ("int8 moments", "split, int8 moments")
PLANNED = "planned"  # with stage, buckets and recomputation, from a limit of memory
SPLIT = ("split", "split, int8 moments", "split, disk")
# Limits of `clip_norm=`, which let updates run during backward; "plain" and "value" are torch's own calls.
CLIPS = {"norm": 1.0, "tight": 0.1, "never": float("inf"), "huge": 1e6}


@dataclass(frozen=True)
class Case:
    """One combination. Every field is a feature by which results are counted, except for seed and events."""

    seed: int
    world: int
    stage: int
    block: str
    hidden: int
    vocab: int
    blocks: int
    shared_module: bool
    tied: bool
    frozen: bool
    uneven: bool
    dtype: str
    precision: str
    optimizer: str
    groups: int
    late_group: bool
    clip: str
    offload: str
    accumulate: int
    no_sync: bool
    recompute: bool
    prefetch: int
    bucket: int | None
    units: str
    split: str
    transport: str
    stage_bytes: int
    stages: int
    zero: str
    zero_at: str
    closure: bool
    schedule: str
    events: Mapping[int, tuple[str, ...]]
    start: str  # on the "meta" device, filled by `init=`, or with "values"
    limit: (
        float | None
    )  # of memory, from which a plan is made: bytes a parameter, or as much more as it takes
    moves: int | None  # before this step a new job goes on, with another number of ranks
    two: bool  # optimizers, of the even and the odd parameters
    method: bool  # the loop calls a method of the model in place of the model
    adapters: bool  # train alone, as adapters do
    varied: bool  # another number of micro-batches in each step
    file: bool  # what is on the meta device gets its values from one

    def has(self, event: str, step: int) -> bool:
        return event in self.events.get(step, ())

    def micro_batches(self, step: int) -> int:
        return 1 + (self.accumulate + step) % 3 if self.varied else self.accumulate

    @property
    def overlapped(self) -> bool:
        """Updates run during backward where the limit of the norm is known before it."""
        return self.clip in CLIPS and self.precision != "fp16"

    @property
    def wide(self) -> bool:
        """Compares with plain PyTorch as fp32 does."""
        return self.precision == "none"


def draw(seed: int) -> Case:
    """The combination of a seed, possible or not."""
    dice = random.Random(seed)
    pick = dice.choice

    def often(share: float) -> bool:
        return dice.random() < share

    drawn = Case(
        seed=seed,
        world=pick(WORLDS),
        stage=pick([0, 1, 2, 3, 3]),
        block=pick(["plain", "lora", "empty and scalar", "list"]),
        hidden=pick([5, 16, 17]),
        vocab=pick([7, 31]),
        blocks=pick([2, 3, 4]),
        shared_module=often(0.15),
        tied=often(0.4),
        frozen=often(0.25),
        uneven=often(0.2),
        dtype=pick(["float32", "float32", "float32", "float64"]),
        precision=pick(["none", "none", "bf16", "bf16", "bf16, norms kept", "bf16, fp32 sums", "fp16"]),
        optimizer=pick(["adamw", *TORCHS, *BY_TENSOR, *ELEMENTWISE]),
        groups=pick([1, 2, 3]),
        late_group=often(0.1),
        clip=pick(["none", "none", "norm", "norm", "norm", "tight", "plain", "plain", "value", "never"]),
        offload=pick(
            [
                *("none", "none", "host", "host", "parameters on host", "disk", "all on disk"),
                *("auto", "auto with parameters", *SPLIT, "split, device", "int8 moments", "no undo"),
            ]
        ),
        accumulate=pick([1, 1, 2, 3]),
        no_sync=often(0.6),
        recompute=often(0.3),
        prefetch=pick([0, 1, 2]),
        bucket=pick([None, None, 256, 4096]),
        units=pick(["auto", "auto", "auto", "none", "blocks", "nested"]),
        split=pick(["auto", "auto", "auto", "level", "whole"]),
        transport=pick(["auto", "auto", "gloo"]),
        stage_bytes=pick([256, 2048, 1 << 20]),
        stages=pick([2, 4]),
        zero=pick(["to none", "to zeros", "of the model"]),
        zero_at=pick(["end", "end", "start", "middle"]),
        closure=often(0.15),
        schedule=pick(["none", "none", "before", "after", "one cycle"]),
        events={s: tuple(pick(EVENTS) for _ in range(pick([0, 1, 1, 2]))) for s in range(1, STEPS)},
        start=pick(["values", "values", "meta"]),
        limit=pick([None, None, None, None, 4.0, 8.0, 16.0]),
        moves=pick([None, None, 2, 4]),
        two=often(0.15),
        method=often(0.2),
        adapters=often(0.15),
        varied=often(0.15),
        file=often(0.5),
    )
    if often(0.08):
        drawn = replace(drawn, optimizer="lion")
    if drawn.adapters:
        drawn = replace(drawn, block="lora", frozen=False, late_group=False)
    if drawn.optimizer == "muon" or drawn.late_group:
        drawn = replace(drawn, two=False)
    events = {step: [*names] for step, names in drawn.events.items()}
    for names in events.values():
        names += [pick(choices) for choices in (MORE, BETWEEN) if often(0.3)]
    if often(0.4):  # the loop does the same for some steps, and then something else
        events = {step: names for step, names in events.items() if step >= STEPS - 3}
    return replace(drawn, events={step: tuple(names) for step, names in events.items()})


def allowed(case: Case) -> Case:
    """The nearest combination that the documentation allows."""
    if case.recompute and case.units == "none":
        case = replace(case, recompute=False)
    if case.optimizer == "adafactor" and case.block == "empty and scalar":
        case = replace(case, block="plain")  # torch's own Adafactor fails on an empty parameter
    if case.precision == "fp16":  # the scaler's factor is in the gradients until they are unscaled
        case = replace(
            case, clip={"norm": "plain", "tight": "plain", "never": "none"}.get(case.clip, case.clip)
        )
    case = replace(case, offload=offload_for(case) if case.limit is None else PLANNED)
    if case.offload == PLANNED:
        case = replace(case, split="auto", recompute=False, late_group=False)
    if case.offload in ("parameters on host", "auto with parameters") and case.world > 1:
        case = replace(case, stage=3)
    if case.offload == "no undo" and case.clip != "never":
        case = replace(case, clip="huge")
    if not case.wide or case.offload not in ("none", "host", "parameters on host"):
        case = replace(case, dtype="float32")
    if case.offload == PLANNED:
        case = replace(case, varied=False)
    case = replace(case, file=case.file and case.start == "meta")
    return loop_for(case)


def offload_for(case: Case) -> str:
    """The tier that this optimizer, precision and limit can use, nearest to the one drawn."""
    tier, narrow = case.offload, case.precision.startswith("bf16")
    native = case.optimizer in NATIVE
    if tier in SPLIT and not (narrow and case.overlapped and native):
        tier = "host"
    if tier == "split, device" and not (narrow and case.optimizer not in BY_TENSOR):
        tier = "host"
    if tier in CODED and not (case.overlapped and case.optimizer in ADAMS):
        tier = "host"
    if tier in ("disk", "all on disk") and not native:
        tier = "host"
    if tier == "all on disk" and case.world > 1:
        tier = "disk"
    if tier == "auto" and not native:
        tier = "host"
    if tier == "auto with parameters" and not native:
        tier = "parameters on host"
    if tier == "no undo" and not (case.overlapped and native):
        tier = "host"
    return tier


def loop_for(case: Case) -> Case:
    """A training loop that may go with the options: most of all where updates run during backward."""
    away = case.offload != "none"
    late = case.late_group and case.optimizer not in (*BY_TENSOR, "adagrad") and (case.wide or not away)
    barred: set[str] = set()
    changes: dict[str, Any] = {"late_group": late}
    if away and (case.clip == "never" or case.offload == "no undo"):
        barred.add("skip step")  # what was updated during backward is not taken back
    if away and case.overlapped:
        changes["no_sync"] = True
        changes["zero"] = "to none" if case.zero == "to zeros" else case.zero
    if late:
        changes["zero"] = "to none" if case.zero == "to zeros" else case.zero
        changes["schedule"] = "none"  # torch's schedules take no groups that come later
        barred.add("load")
    if late or (case.dtype == "float64" and case.overlapped and away):
        changes["zero_at"] = "end"
    if late:
        changes["moves"] = None  # the new job's optimizer would have other groups
    if case.moves is not None:
        barred.add("close")
    barred |= barred_between(case)
    if case.adapters:
        barred |= {"freeze", "thaw"}
    if case.offload in CODED:
        barred.add("full optimizer state")
    if case.precision != "fp16":
        barred.add("overflow")
    changes["events"] = {s: tuple(e for e in names if e not in barred) for s, names in case.events.items()}
    return replace(case, **changes)


def barred_between(case: Case) -> set[str]:
    """What may not happen between backward and step, or is not what plain PyTorch does there."""
    barred = set[str]()
    if case.offload != "none" and case.overlapped:  # the update may have begun
        barred |= {*BETWEEN, "penalty", "two losses"}
    if case.closure or case.late_group:  # it runs inside of the step; its parameters are in no optimizer yet
        barred |= {*BETWEEN, "penalty", "overflow", "two losses"}
    if case.precision == "fp16":  # a scaler steps once
        barred.add("step twice")
    if case.offload not in ("none", "host", "int8 moments"):  # weights rest elsewhere, or in halves
        barred |= {*WRITES, "read weights"}
    if case.optimizer == "maximize":
        barred.add("penalty")
    return barred


# What may differ in the job that goes on; all else is the model and its training.
MOVABLE = (
    *("world", "stage", "offload", "recompute", "prefetch", "bucket", "units", "split", "transport"),
    *("stage_bytes", "stages", "zero", "zero_at", "no_sync", "closure", "start", "limit", "file", "method"),
)


def moved(case: Case) -> Case:
    """The same training with another number of ranks and another configuration."""
    kept = [one.name for one in fields(case) if one.name not in (*MOVABLE, "events")]
    for number in range(10_000):
        drawn = draw(case.seed + MOVED + number)
        other = allowed(replace(case, **{name: getattr(drawn, name) for name in MOVABLE}))
        same = all(getattr(other, name) == getattr(case, name) for name in kept)
        if same and other.world != case.world and (other.offload in CODED) == (case.offload in CODED):
            return other
    raise AssertionError(f"nowhere to move {case}")


@dataclass(frozen=True)
class Leg:
    """The part of a training that one job does, from step `first` to before `end`."""

    case: Case
    first: int = 0
    end: int = STEPS


def legs_of(case: Case) -> list[Leg]:
    if case.moves is None:
        return [Leg(case)]
    return [Leg(case, 0, case.moves), Leg(moved(case), case.moves)]
