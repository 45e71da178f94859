"""A seed's combination: model, optimizer, options of `zs.shard`, and what the training script does.

`draw` is the same for ever: a change of what it asks of the generator changes what every seed means.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

import zeroshard as zs
from zeroshard import sync_policies

STEPS, CUT = 8, 4  # a run's steps, and those before its checkpoint


@dataclass(frozen=True)
class Float8(zs.Codec):
    """A user's codec that rounds and remembers what it left out."""

    numerics: ClassVar = "rounding"
    feedback: ClassVar = True

    def wire_bytes(self, numel: int) -> int:
        return numel

    def encode(self, values: Any, code: Any, state: Any, step: int) -> None:
        wanted = values + state["residual"]
        sent = wanted.to(torch.float8_e5m2)
        code.view(torch.float8_e5m2).copy_(sent)
        left = wanted - sent.float()
        state["residual"].copy_(torch.where(left.isfinite(), left, state["residual"]))

    def decode(self, code: Any, out: Any, add: bool) -> None:
        values = code.view(torch.float8_e5m2).float()
        out.add_(values) if add else out.copy_(values)


@dataclass(frozen=True)
class Same(zs.Codec):
    """A user's codec that sends what it is given, so that nothing may change."""

    warmup: int = 0
    numerics: ClassVar = "exact"

    def active(self, step: int) -> bool:
        return step >= self.warmup

    def wire_bytes(self, numel: int) -> int:
        return 4 * numel

    def encode(self, values: Any, code: Any, state: Any, step: int) -> None:
        code.view(torch.float32).copy_(values)

    def decode(self, code: Any, out: Any, add: bool) -> None:
        values = code.view(torch.float32)
        out.add_(values) if add else out.copy_(values)


@dataclass(frozen=True)
class Case:
    """What a seed stands for. Options are pairs, so that a case can be printed, sent and compared."""

    seed: int
    world: int
    flags: tuple[str, ...]  # of the model
    opt: str
    options: tuple[tuple[str, Any], ...]
    offload: tuple[tuple[str, Any], ...] | None
    acc: int
    no_sync: bool  # or every micro-batch sends its gradients
    clip: float | None  # by torch's clip_grad_norm_
    scaled: bool
    sched: bool
    boom: tuple[tuple[int, int, float], ...]  # step, rank, and the factor its loss gets
    looks: tuple[str, ...]  # what happens between steps, and may change nothing
    zero: str
    background: bool

    def made(self, folder: str) -> dict[str, Any]:
        """The options of `zs.shard`; `folder` is for what rests on a disk."""
        options = dict(self.options)
        if self.offload is not None:
            asked = dict(self.offload)
            if asked["optimizer"] in ("disk", "auto"):
                asked["path"] = folder
            options["offload"] = zs.Offload(**asked)
        return options

    def exact(self) -> Case | None:
        """The same without codecs that may change nothing; `None` where it has none. Between nodes codes are
        added in another order than numbers, but for rows."""
        nodes = ("transport", "nodes") in self.options
        kinds: tuple[type, ...] = (zs.Rows,) if nodes else (zs.Rows, Same)

        def left(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple((pattern, None if isinstance(c, kinds) else c) for pattern, c in value)
            return None if isinstance(value, kinds) else value

        kept = tuple((name, left(v) if name in ("compress", "gather") else v) for name, v in self.options)
        return replace(self, options=kept) if kept != self.options else None

    @property
    def accumulates_apart(self) -> bool:
        """Micro-batches but the last are under `no_sync`: asked for, or else refused."""
        return self.no_sync or self.updates_early

    @property
    def updates_early(self) -> bool:
        return self.offload is not None and "clip_norm" in dict(self.options)

    @property
    def keeps_old_state(self) -> bool:
        """Updates that have begun can be taken back."""
        return dict(self.offload or ()).get("undo") is not False

    @property
    def precision(self) -> zs.Precision:
        given = dict(self.options).get("precision") or "fp32"
        return zs.Precision(given) if isinstance(given, str) else given

    @property
    def sends_anew(self) -> bool:
        """What is written between steps travels once more: as another change, which leaves out less than was
        left out without it, or rounded by other dice."""
        gather = str(dict(self.options).get("gather"))
        return bool({"write", "state"} & set(self.looks)) and (
            "Delta" in gather or "stochastic=True" in gather
        )

    def other(self) -> Case:
        """Another configuration for the same model and optimizer, to load the checkpoint into."""
        drawn = draw(self.seed + 500_000)
        options = dict(drawn.options)
        if "precision" in options and (drawn.precision.keep or "bn" in self.flags):
            options["precision"] = zs.Precision(drawn.precision.compute, keep=kept_wide(self.flags))
        delayed = "Delayed" in str(options.get("sync"))
        early = drawn.updates_early and drawn.precision.compute != "float16"
        reunited = "sync" in options and sync_policies.reunites(options["sync"])
        return replace(
            drawn,
            flags=self.flags,
            opt=self.opt,
            sched=self.sched,
            # A scaler must see gradients, and those of the step, scaled alike on all ranks.
            scaled=self.scaled and not (delayed or early or reunited),
            boom=(),
            no_sync=delayed or drawn.no_sync,
            options=tuple(options.items()),
        )

    def features(self) -> list[str]:
        """What the result counts it under."""
        options = dict(self.options)
        found = [f"ranks {self.world}", f"stage {options['stage']}", f"optimizer {self.opt}"]
        found += [f"model {flag}" for flag in self.flags] + [f"between steps {look}" for look in self.looks]
        found += [f"compress {name}" for name in names(options.get("compress"))]
        found += [f"gather {name}" for name in names(options.get("gather"))]
        found += [f"sync {name}" for name in names(options.get("sync"))]
        found.append(f"precision {self.precision.compute}")
        found += [f"offload {value}" for name, value in self.offload or () if name == "optimizer"]
        found += [f"offload parameters {value}" for name, value in self.offload or () if name == "parameters"]
        for name in ("split", "units", "transport", "recompute", "prefetch", "clip_norm"):
            if name in options:
                found.append(name if name != "transport" else f"transport {options[name]}")
        for name, on in (
            ("accumulation", self.acc > 1),
            ("scaler", self.scaled),
            ("scheduler", self.sched),
            ("overflow", bool(self.boom)),
            ("background save", self.background),
            ("clip_grad_norm_", self.clip is not None),
            ("zero_grad(set_to_none=False)", self.zero == "zeros"),
        ):
            found += [name] if on else []
        return found


def kept_wide(flags: tuple[str, ...]) -> tuple[str, ...]:
    """Patterns of the parameters that do not compute in half precision."""
    return ("*norm*", "bn*") if "bn" in flags else ("*norm*",)


def names(value: Any) -> set[str]:
    """The classes of a codec, a policy, or a table of codecs."""
    inner = [codec for _, codec in value] if isinstance(value, tuple) else [value]
    return {type(one).__name__ for one in inner if one is not None}


Make = Callable[[random.Random], Any]
CODECS: list[Make] = [
    lambda r: zs.Cast("bfloat16"),
    lambda r: zs.Cast("float16"),
    lambda r: zs.Int8(),
    lambda r: zs.Int8(feedback=True, block=64),
    lambda r: zs.Int8(stochastic=True),
    lambda r: zs.Int8(feedback=True, residual="bfloat16"),
    lambda r: zs.Int4(),
    lambda r: zs.Int4(feedback=False, block=32),
    lambda r: zs.Int4(stochastic=True),
    lambda r: zs.OneBit(warmup_steps=r.choice([0, 2, 5])),
    lambda r: zs.OneBit(warmup_steps=3, warmup=zs.Int4()),
    lambda r: zs.OneBit(warmup_steps=3, freeze=True),
    lambda r: zs.TwoBit(),
    lambda r: zs.Ternary(),
    lambda r: zs.TopK(ratio=0.1),
    lambda r: zs.TopK(ratio=0.1, momentum=0.9),
    lambda r: zs.TopK(0.05, warmup_steps=2, ramp_steps=3),
    lambda r: zs.TopK(0.1, warmup_steps=3, freeze=True),
    lambda r: zs.LowRank(rank=2),
    lambda r: zs.Rows(),
    lambda r: Float8(),
    lambda r: Same(),
    lambda r: Same(warmup=3),
]
GATHERS: list[Make] = [
    lambda r: zs.Int8(),
    lambda r: zs.Int4(feedback=False),
    lambda r: zs.Cast("bfloat16"),
    lambda r: Same(),
    lambda r: zs.Delta(zs.Int4(feedback=False)),
    lambda r: zs.Delta(zs.TwoBit(feedback=False)),
    lambda r: zs.Delta(Same()),
    lambda r: zs.Delta(),
    lambda r: zs.Int8(stochastic=True),
    lambda r: zs.Delta(zs.Int4(feedback=False, stochastic=True)),
    lambda r: {"*norm*": None, "*": zs.Int8()},
]
FLAGS = ("tied", "frozen", "unused", "seldom", "scalar", "empty", "bn", "dropout", "lora", "bias")
OPTIMIZERS = (
    *("adamw", "adamw", "fused", "sgd", "sgd0", "adam", "amsgrad", "groups", "two"),
    *("rmsprop", "adafactor", "muon", "trainable"),
)
LOOKS = ("eval", "gathered", "kept_full", "state", "stats", "sync", "write", "preempt")


def draw(seed: int) -> Case:
    r = random.Random(seed)
    world = r.choice((2, 2, 2, 3, 4, 1))
    flags = tuple(flag for flag in FLAGS if r.random() < 0.25)
    options: dict[str, Any] = {"stage": r.choice([0, 1, 2, 3, 3])}
    opt = r.choice(OPTIMIZERS)
    compute = r.choice([None, None, "bf16", "fp16"])
    if compute:
        keeps = r.random() < 0.3 or "bn" in flags
        options["precision"] = zs.Precision(compute, keep=kept_wide(flags)) if keeps else compute
    scaled = compute == "fp16" and r.random() < 0.8
    draw_layout(r, options)
    offload = draw_offload(r) if r.random() < 0.4 else None
    clip = None
    if r.random() < 0.5:
        if offload is not None and r.random() < 0.8:
            options["clip_norm"] = r.choice([math.inf, 0.5, 5.0])
        else:
            clip = r.choice([0.5, 100.0])
    draw_codecs(r, options)
    offload = draw_sync(r, options, world, offload, half=compute == "fp16")
    if world == 4 and r.random() < 0.6:
        options |= {"ranks_per_node": 2, "transport": "nodes"}
        if options["stage"] == 3:
            options["node_cache"] = True
    acc, no_sync = r.choice([1, 1, 2, 3]), r.random() < 0.7
    boom: tuple[tuple[int, int, float], ...] = ()
    if r.random() < 0.3:
        boom = ((r.choice([2, 5]), r.randrange(world), r.choice([math.inf, math.nan])),)
    looks = tuple(sorted(r.sample(LOOKS, r.choice([0, 1, 2]))))
    if "sync" in options and sync_policies.delays(options["sync"]):
        no_sync = True
    for name, least in (("prefetch", 3), ("split", 1)):
        if options["stage"] < least:
            options.pop(name, None)
    if opt == "adafactor":  # torch's own fails on an empty parameter
        flags = tuple(flag for flag in flags if flag != "empty")
    return Case(
        seed,
        world,
        flags,
        opt,
        tuple(options.items()),
        None if offload is None else tuple(offload.items()),
        acc,
        no_sync,
        clip,
        scaled,
        sched=r.random() < 0.4,
        boom=boom,
        looks=looks,
        zero=r.choice(["opt", "model", "zeros"]),
        background=r.random() < 0.5,
    )


def draw_layout(r: random.Random, options: dict[str, Any]) -> None:
    """How parameters are cut, gathered and carried."""
    if r.random() < 0.5:
        options["bucket_bytes"] = r.choice(["1KiB", "4KiB", "64KiB"])
    if r.random() < 0.4:
        options["units"] = r.choice(["none", "auto", ("blocks.*",), ("blocks.0", "tokens")])
    if r.random() < 0.2:
        options["prefetch"] = r.choice([0, 2])
    if r.random() < 0.15:
        options["recompute"] = True
    if r.random() < 0.2:
        options["split"] = r.choice(["level", "whole", "rows"])
    if r.random() < 0.2:
        options["buffers"] = "local"
    if r.random() < 0.5:
        options["transport"] = r.choice(["gloo", "shm"])


def draw_offload(r: random.Random) -> dict[str, Any]:
    asked: dict[str, Any] = {
        "optimizer": r.choice(["host", "host", "disk", "auto"]),
        "threads": 1,
        "stage_bytes": 4096,
    }
    if asked["optimizer"] == "auto":
        asked["device_bytes"] = r.choice([0, 8000, 50000])
        asked["host_bytes"] = r.choice([20000, 10**6])
    if r.random() < 0.3:
        asked["parameters"] = r.choice(["host", "auto", "disk"])
    if r.random() < 0.3:
        asked["master"] = "split"
    if r.random() < 0.2:
        asked["moments"] = "int8"
    if r.random() < 0.1:
        asked["undo"] = False
    return asked


def draw_codecs(r: random.Random, options: dict[str, Any]) -> None:
    if r.random() < 0.65:
        coded = r.choice(CODECS)(r)
        if r.random() < 0.35:
            coded = {"*.weight": coded, "*": r.choice([None, zs.Int8(), zs.Cast("bfloat16")])}
        if r.random() < 0.15:
            coded = {"tokens*": zs.Rows(), "*": r.choice(CODECS)(r)}
        options["compress"] = tuple(coded.items()) if isinstance(coded, dict) else coded
    if r.random() < 0.35:
        coded = r.choice(GATHERS)(r)
        options["gather"] = tuple(coded.items()) if isinstance(coded, dict) else coded
        if options["stage"] == 0:
            options["stage"] = r.choice([1, 2, 3])


def draw_sync(
    r: random.Random, options: dict[str, Any], world: int, offload: dict[str, Any] | None, half: bool
) -> dict[str, Any] | None:
    """The sync policy; most of what local steps refuse is taken away. The offload that is left comes back."""
    luck = r.random()
    if half and luck < 0.2:  # scaled gradients cannot wait for a step
        luck = 0.25
    if luck < 0.2:
        options["sync"] = zs.Delayed(warmup_steps=r.choice([0, 0, 2, 5]))
    elif luck < 0.35:
        steps = r.choice([1, 2, 3, 4])
        outer = zs.Nesterov(r.choice([0.7, 1.0]), r.choice([0.0, 0.9]))
        fragments = r.randint(1, steps)
        rates = tuple(1 + 0.5 * i for i in range(world)) if r.random() < 0.4 else None
        options["sync"] = zs.Local(steps=steps, outer=outer, fragments=fragments, rates=rates)
        options["stage"] = 0
        options.pop("gather", None)
        if r.random() < 0.9:
            options.pop("compress", None)
            options.pop("clip_norm", None)
            return None
    elif luck < 0.45:
        choices: Any = [
            zs.EveryStep(),
            zs.EveryStep(compress=zs.Int8(feedback=True)),
            zs.EveryStep(compress=zs.TopK(ratio=0.1)),
            zs.Local(steps=2),
            zs.Local(steps=3, fragments=2),
            *([] if half else [zs.Delayed()]),
        ]
        r.shuffle(choices)
        choices = choices[: r.randint(2, 4)]
        if any(isinstance(choice, zs.Local) for choice in choices):
            options["stage"] = 0
            options.pop("gather", None)
            options.pop("clip_norm", None)
            offload = None
        options["sync"] = zs.Adaptive(choices=choices, window=500)
    return offload
