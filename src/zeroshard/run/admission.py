"""What `shard()` refuses before anything is touched: misuse that can be seen on one rank alone."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn
from torch.optim import Optimizer

from zeroshard.config import Options
from zeroshard.errors import ModelError, OptionError
from zeroshard.life.step import unstepped
from zeroshard.planning.unfit import (
    refuse_model,
    refuse_optimizers,
    refuse_patterns,
    refuse_precision,
    refuse_rows,
    refuse_second_names,
)

from .hooks import is_sharded


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


def device_of(model: nn.Module) -> torch.device:
    devices = {p.device for p in model.parameters() if not p.is_meta}
    if len(devices) > 1:
        raise ModelError(
            f"the model is on several devices ({', '.join(map(str, sorted(map(str, devices))))}): move it "
            "to one first."
        )
    if devices:
        return devices.pop()
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
