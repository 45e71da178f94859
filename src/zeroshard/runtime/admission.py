"""Refuses what `shard()` cannot do before anything is touched, on all ranks where one rank sees it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zeroshard.checkpoint import Weights
from zeroshard.comm import refuse
from zeroshard.errors import ModelError, OptionError, did_you_mean
from zeroshard.launch.join import join, patience
from zeroshard.optim.optimizer_kinds import unstepped
from zeroshard.options import Options
from zeroshard.params.units import find_units
from zeroshard.refusals import (
    optimizers_of,
    refuse_model,
    refuse_optimizers,
    refuse_options,
)
from zeroshard.sync_policies import EveryStep

from .devices import device_asked, devices_of
from .hooks import is_sharded
from .plan_guard import PlanRequest, ShardArguments

#: All that `shard()` can be told beside the model.
KEYWORDS = (*ShardArguments.__annotations__, "optimizer", "group", "init", "timeout", "weights", "device")


@dataclass(frozen=True)
class ShardRequest:
    """What one rank asks `shard()` for, found to be possible as far as one rank can see. `given`: the options
    that the user named."""

    optimizers: list[Optimizer]
    options: Options
    request: PlanRequest
    given: frozenset[str]
    weights: Weights | None = None
    device: torch.device | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        optimizer: Any,
        init: object,
        keywords: dict[str, Any],
        weights: object = None,
        device: object = None,
    ) -> ShardRequest:
        _refuse_unknown(keywords)
        request = PlanRequest.taken_from(keywords)
        _refuse_nowhere(request.asked.get("disk_path"))
        options = Options(**(keywords or request.options))
        optimizers = [] if optimizer is None else optimizers_of(optimizer)
        refuse_misuse(model, optimizers, options, init)
        if keywords:  # a plan's own fields may stand in runs where they change nothing
            refuse_idle(optimizers, options, settled="stage" in keywords or not request.asked)
        return cls(
            optimizers, options, request, frozenset(keywords), Weights.of(weights), device_asked(device)
        )


def _refuse_nowhere(path: str | None) -> None:
    """A folder that a plan may use is there, whether it comes to that or not."""
    if path is not None and not os.path.isdir(path):
        raise OptionError(
            f'disk_path="{path}" is no folder on this host: create it (mkdir -p {path}), or drop disk_path= '
            "to keep state off the disk."
        )


def admit(
    model: nn.Module,
    optimizer: Any,
    init: object,
    keywords: dict[str, Any],
    group: Any,
    misplaced: tuple[object, ...] = (),
    timeout: object = None,
    weights: object = None,
    device: object = None,
) -> ShardRequest:
    """A first look at what this rank asks for. The ranks have joined afterwards, whatever came of it: those
    that are on their way learn from one that is refused why."""
    try:
        _refuse_order(model, optimizer, misplaced)
        patience(timeout)
        asked = ShardRequest.of(model, optimizer, init, keywords, weights, device)
    except Exception as error:
        with suppress(Exception):  # what keeps the ranks from meeting is not what is wrong here
            _join(group)
        refuse(error, group)
        raise
    _join(group)
    return asked


def _join(group: object) -> None:
    if group is None:
        join()


def _refuse_order(model: object, optimizer: object, misplaced: tuple[object, ...]) -> None:
    """The model first, then its optimizers, and all else by name."""
    if isinstance(model, Optimizer) and isinstance(optimizer, nn.Module):
        raise ModelError("shard() takes the model first: write zs.shard(model, optimizer, ...).")
    if misplaced or isinstance(optimizer, dict):
        first = optimizer if isinstance(optimizer, dict) else misplaced[0]
        kind = type(first).__name__
        several = isinstance(first, Optimizer)
        advice = "several optimizers in a list, zs.shard(model, [first, second], ...)"
        if not several:
            shown = (
                ", ".join(f"{key}={value!r}" for key, value in first.items())
                if isinstance(first, dict)
                else ""
            )
            advice = f"options by name, zs.shard(model, optimizer, {shown or 'stage=3'})"
        raise OptionError(
            f"shard() takes a model and its optimizer, and a {kind} beside them: pass {advice}."
        )


def _refuse_unknown(keywords: dict[str, Any]) -> None:
    """A name that `shard()` does not know, with the nearest of those that it does."""
    if "ranks" in keywords:
        ranks = keywords["ranks"]
        raise OptionError(
            "shard() has no option 'ranks': it takes the processes that there are (group=). Start them "
            f"with `zeroshard run --ranks {ranks} script.py`; zs.plan(..., ranks={ranks}) says what they "
            "would need."
        )
    for name in keywords:
        given = keywords[name]
        if name not in KEYWORDS and "config" in name and isinstance(given, (dict, str, os.PathLike)):
            raise OptionError(
                f"shard() takes no {name}=, as DeepSpeed does: pass options by name. Stage 2 in bf16 "
                "with clipping is zs.shard(model, optimizer, stage=2, precision='bf16', clip_norm=1.0)."
            )
        if name not in KEYWORDS and isinstance(keywords[name], dict):
            raise OptionError(
                f"shard() takes no {name}=: pass what is in it by name, zs.shard(model, optimizer, **{name})."
            )
        if name not in KEYWORDS:
            raise OptionError(
                f"shard() has no option {name!r}.{did_you_mean(name, KEYWORDS)} Known: {', '.join(KEYWORDS)}."
            )


def refuse_misuse(
    model: nn.Module, optimizers: list[Optimizer], options: Options, init: object = None
) -> None:
    """Misuse that can be seen on one rank alone, before anything is touched."""
    refuse_model(model, "shard()")
    lazy = [n for n, p in model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        raise ModelError(
            f"`{lazy[0]}` is uninitialised (a lazy module). Run one forward pass before shard()."
        )
    if is_sharded(model):
        raise ModelError(
            f"{type(model).__name__}, or a part of it, is sharded already. Close the earlier run first: "
            "run.close(). Models that share a part are sharded together: as parts of one module."
        )
    if any(type(p.data).__name__ == "DTensor" for p in model.parameters()):
        raise ModelError("this model holds DTensors: another library has sharded it. Pass a plain model.")
    refuse_optimizers(model, optimizers, "shard()")
    for optimizer in optimizers:
        if optimizer.state and not unstepped(optimizer):
            kind = type(optimizer)
            torchs = kind.__module__.startswith("torch.optim.")
            built = "" if torchs else " Or it makes whole state when it is built: that cannot be divided."
            raise ModelError(
                f"{kind.__name__} has stepped already: it holds state for "
                f"{len(optimizer.state)} parameters. Call shard() before the first step, then load a "
                f"checkpoint.{built}"
            )
    _refuse_two_owners(model, optimizers, options)
    _refuse_two_devices(model)
    find_units(model, options.units)  # refuses patterns that name no module, and gradient hooks
    refuse_options(model, optimizers, options)
    if init is not None and not callable(init):
        raise OptionError(f"init={init!r} must be a function that fills a module on the meta device.")
    if options.recompute and isinstance(options.recompute, bool) and options.units == "none":
        raise OptionError(
            'recompute=True recomputes units, and units="none" leaves none: name units, or drop recompute.'
        )


def refuse_idle(optimizers: list[Optimizer], options: Options, settled: bool) -> None:
    """Options that would change nothing. `settled`: the stage is, and no plan is to find one."""
    for name, why in _of_the_step(options) if not optimizers else ():
        raise OptionError(
            f"{name}= changes nothing without an optimizer: {why}, and in that of one which is built after "
            f"zs.shard() the run has no part. Pass it, zs.shard(model, optimizer, ...), or drop {name}=."
        )
    if settled and options.prefetch != Options.prefetch and not options.shards_params:
        raise OptionError(
            f"prefetch={options.prefetch} gathers parameters ahead of their use, and stage {options.stage} "
            "keeps all of them whole: drop prefetch=, or pass stage=3."
        )
    if settled and options.split != Options.split and not options.shards_state:
        raise OptionError(
            f'split="{options.split}" says how tensors are divided, and stage 0 divides none: drop split=, '
            "or pass stage=1, 2 or 3."
        )


def _of_the_step(options: Options) -> Iterator[tuple[str, str]]:
    """What acts in `optimizer.step()` alone, and how."""
    if options.clip_norm is not None:
        yield "clip_norm", "gradients are clipped in its step"
    if options.offload is not None and options.offload.parameters == "device":
        yield "offload", "what is offloaded here is its state, updated in its step"
    if not isinstance(options.sync, EveryStep):
        yield "sync", "the ranks meet, or stay apart, in its step"


def _refuse_two_owners(model: nn.Module, optimizers: list[Optimizer], options: Options) -> None:
    """Offloaded state is that of one optimizer; and one that is listed twice is a slip."""
    if len({id(o) for o in optimizers}) < len(optimizers):
        raise ModelError("shard() got the same optimizer twice: list each once.")
    if options.offload is None:
        return
    held = Counter(id(p) for o in optimizers for group in o.param_groups for p in group["params"])
    for name, parameter in model.named_parameters():
        if held[id(parameter)] > 1:
            raise ModelError(
                f"`{name}` is in two optimizers, and with offload= its state rests with one of them. Take it "
                "out of the other, or drop offload=."
            )


def _refuse_two_devices(model: nn.Module) -> None:
    devices = devices_of(model)
    if len(devices) > 1:
        raise ModelError(
            f"the model is on several devices ({', '.join(map(str, sorted(map(str, devices))))}): move it "
            "to one first."
        )
