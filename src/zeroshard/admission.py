"""What `shard()` refuses before anything is touched: misuse that can be seen on one rank alone."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from .config import Options
from .errors import ModelError, OptionError
from .hooks import is_sharded
from .step import refuse_unfit, unstepped


def refuse_misuse(model: nn.Module, optimizers: list[Optimizer], options: Options) -> None:
    """Misuse that can be seen on one rank alone, before anything is touched."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"shard() takes a torch.nn.Module, not {type(model).__name__}.")
    names = {id(p): n for n, p in model.named_parameters()}
    if not names:
        raise ModelError(f"{type(model).__name__} has no parameters to shard.")
    lazy = [n for n, p in model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        raise ModelError(
            f"`{lazy[0]}` is uninitialised (a lazy module). Run one forward pass before shard()."
        )
    if is_sharded(model):
        raise ModelError(
            f"{type(model).__name__}, or a part of it, is sharded already. Close the earlier run first: "
            "run.close()."
        )
    if any(type(p.data).__name__ == "DTensor" for p in model.parameters()):
        raise ModelError("this model holds DTensors: another library has sharded it. Pass a plain model.")
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if not isinstance(optimizer, Optimizer):
            raise ModelError(f"shard() takes torch optimizers, not {kind}.")
        refuse_unfit(optimizer)
        if optimizer.state and not unstepped(optimizer):
            raise ModelError(
                f"{kind} has stepped already: it holds state for {len(optimizer.state)} parameters. "
                "Call shard() before the first step, then load a checkpoint."
            )
        held = [p for group in optimizer.param_groups for p in group["params"]]
        strangers = sum(id(p) not in names for p in held)
        if strangers:
            raise ModelError(
                f"{strangers} of the {len(held)} parameters of {kind} are not in the model. Build the "
                "optimizer from "
                "model.parameters(), after the model is complete, and pass that very model."
            )
    if options.recompute and isinstance(options.recompute, bool) and options.units == "none":
        raise OptionError(
            'recompute=True recomputes units, and units="none" leaves none: name units, or drop recompute.'
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
