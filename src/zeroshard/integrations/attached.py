"""A run beside the model that it shards, and options for models that nothing trains: what front ends whose
loops stay plain PyTorch have in common."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

import zeroshard as zs

_ATTACHED = "_zeroshard"
#: Options that also mean something to a model that nothing trains.
OF_FROZEN = (
    "stage",
    "precision",
    "units",
    "prefetch",
    "transport",
    "ranks_per_node",
    "node_cache",
    "gather",
    "group",
    "init",
    "device",
    "timeout",
)


class AttachedRun:
    """A run and its optimizers beside their model, to live as long. A copy of the model has none."""

    def __init__(self, run: zs.Run | None = None, optimizers: Sequence[Optimizer] = ()) -> None:
        self.run, self.optimizers = run, tuple(optimizers)
        self.params = {id(p) for p in run.model.parameters()} if run is not None else set()

    def __deepcopy__(self, memo: object) -> AttachedRun:
        return AttachedRun()

    def __reduce__(self) -> tuple[type[AttachedRun], tuple[()]]:
        return AttachedRun, ()


def attach(model: nn.Module, run: zs.Run, optimizers: Sequence[Optimizer]) -> None:
    vars(model)[_ATTACHED] = AttachedRun(run, optimizers)


def attached(model: nn.Module) -> AttachedRun | None:
    """What stands beside a model, or beside what it wraps."""
    inner = getattr(model, "_original_module", getattr(model, "_orig_mod", model))
    found = vars(inner).get(_ATTACHED)
    return found if isinstance(found, AttachedRun) and found.run is not None else None


def detach(model: nn.Module) -> None:
    vars(model).pop(_ATTACHED)


def run_of(model: nn.Module) -> zs.Run | None:
    """The run of a model that a front end has sharded, for `run.stats()`, `run.gathered()` and the like."""
    found = attached(model)
    return found.run if found is not None else None
