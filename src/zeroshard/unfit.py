"""Models and optimizers that no run can take, and no plan can be made for."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from .errors import ModelError
from .step import refuse_unfit


def refuse_model(model: nn.Module, who: str) -> None:
    """`who`: whom it was given to, for the message."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"{who} takes a torch.nn.Module, not {type(model).__name__}.")
    if next(model.parameters(), None) is None:
        raise ModelError(f"{type(model).__name__} has no parameters to shard.")


def refuse_optimizers(model: nn.Module, optimizers: Sequence[Optimizer], who: str) -> None:
    """Those that are none, that have no meaning on shards, or that are another model's."""
    known = {id(p) for p in model.parameters()}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if not isinstance(optimizer, Optimizer):
            raise ModelError(f"{who} takes torch optimizers, not {kind}.")
        refuse_unfit(optimizer)
        held = [p for group in optimizer.param_groups for p in group["params"]]
        strangers = sum(id(p) not in known for p in held)
        if strangers:
            raise ModelError(
                f"{strangers} of the {len(held)} parameters of {kind} are not in the model. Build the "
                "optimizer from model.parameters(), after the model is complete, and pass that very model."
            )
