"""What `shard()` refuses before anything is touched: misuse that can be seen on one rank alone, and that all
ranks are told of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zeroshard.comm import refuse
from zeroshard.config import Options
from zeroshard.errors import ModelError, OptionError, did_you_mean
from zeroshard.launch.environment import join
from zeroshard.life.step import unstepped
from zeroshard.life.units import find_units
from zeroshard.planning.promise import ShardKeys, Wish
from zeroshard.planning.unfit import (
    refuse_model,
    refuse_optimizers,
    refuse_patterns,
    refuse_precision,
    refuse_rows,
    refuse_second_names,
)
from zeroshard.policy import EveryStep

from .hooks import is_sharded

#: All that `shard()` can be told beside the model.
KEYWORDS = (*ShardKeys.__annotations__, "optimizer", "group", "init")


@dataclass(frozen=True)
class Asked:
    """What one rank asks `shard()` for, found to be possible as far as one rank can see. `given`: the options
    that the user named."""

    optimizers: list[Optimizer]
    options: Options
    wish: Wish
    given: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module, optimizer: Any, init: object, keywords: dict[str, Any]) -> Asked:
        _refuse_unknown(keywords)
        wish = Wish.taken_from(keywords)
        options = Options(**(keywords or wish.options))
        given = [] if optimizer is None else optimizer
        optimizers = list(given) if isinstance(given, (list, tuple)) else [given]
        refuse_misuse(model, optimizers, options, init)
        if keywords:  # a plan's own fields may stand in runs where they change nothing
            refuse_idle(optimizers, options, settled="stage" in keywords or not wish.asked)
        return cls(optimizers, options, wish, frozenset(keywords))


def admit(model: nn.Module, optimizer: Any, init: object, keywords: dict[str, Any], group: Any) -> Asked:
    """A first look at what this rank asks for. The ranks have joined afterwards, whatever came of it: those
    that are on their way learn from one that is refused why."""
    try:
        asked = Asked.of(model, optimizer, init, keywords)
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
            raise ModelError(
                f"{type(optimizer).__name__} has stepped already: it holds state for "
                f"{len(optimizer.state)} parameters. Call shard() before the first step, then load a "
                "checkpoint."
            )
    _refuse_two_owners(model, optimizers, options)
    _refuse_two_devices(model)
    find_units(model, options.units)  # refuses patterns that name no module, and gradient hooks
    refuse_rows(optimizers, options)
    refuse_second_names(model, options)
    refuse_patterns(model, optimizers, options)
    refuse_precision(model, options.precision)
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
    devices = _devices(model)
    if len(devices) > 1:
        raise ModelError(
            f"the model is on several devices ({', '.join(map(str, sorted(map(str, devices))))}): move it "
            "to one first."
        )


def device_of(model: nn.Module) -> torch.device:
    """The device that the ranks compute on: the model's, or the current one where it is on the meta
    device."""
    for device in _devices(model):
        return device
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def _devices(model: nn.Module) -> set[torch.device]:
    return {p.device for p in model.parameters() if not p.is_meta}
