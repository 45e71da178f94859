"""The plain sync strategy: every update uses the gradient of its own step. Other sync strategies change
what they must."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from zeroshard.grads import Reducer
from zeroshard.optim.sharded_optimizer import ShardedOptimizer
from zeroshard.params.rank_state import RankState
from zeroshard.params.sharded_param import GuardedState


@dataclass(frozen=True)
class SavedRows:
    """Rows of a parameter that belong to a sync strategy and go into checkpoints under `key`. `owner`: who
    changes them other than in a step."""

    name: str
    key: str
    rows: Tensor
    start: int
    height: int
    owner: GuardedState | None = None


@dataclass(frozen=True)
class SyncState:
    """What a checkpoint holds of a sync strategy.

    - `rows`: of parameters. `private`: what each rank has of its own about the same tensors.
    - `values`: plain data, the same on all ranks. `own`: what this rank alone has to save.
    """

    rows: Sequence[SavedRows] = ()
    private: Sequence[RankState] = ()
    values: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)


class SyncStrategy:
    """One policy at work. `runtime` calls it; what it does here is `EveryStep`."""

    label = "EveryStep()"
    begun = False  # the host has begun with the next update, before the backward of its step
    advances = False  # `advance` has something to do
    apart = False  # ranks train apart: nobody reads this rank's rows between meetings

    beliefs: Sequence[RankState] = ()  # of coded parameters: what all ranks take them to be, and seeds

    def __init__(self, gradients: Reducer) -> None:
        self.gradients = gradients

    def keep_beliefs(self, beliefs: Sequence[RankState]) -> None:
        """Save and load these, too."""
        self.beliefs = beliefs

    def advance(self) -> None:
        """A forward goes on that backward may follow: a moment to look at what has come."""

    def ended(self) -> None:
        """A synchronised backward is over: give the sharded parameters their gradients."""
        self.gradients.finish()

    def step(self, update: ShardedOptimizer, step: Callable[[], Any]) -> None:
        """Run one optimizer's step."""
        update.run(step)

    def take_buffers(self, buffers: list[Tensor]) -> None:
        """Buffers that forward changes, which ranks that train apart take from rank 0 when they meet."""

    def forget(self, optimizer: Optimizer | None) -> bool:
        """`zero_grad` was called, of one optimizer or (None) of the model. Whether a step that this rank has
        left out counts all the same: `turn` is next."""
        return False

    def turn(self) -> None:
        """Count a step that this rank has left out."""

    def rewritten(self) -> None:
        """Parameters were written by someone else than the optimizer."""

    def meet(self) -> None:
        """Make all ranks equal now, where they have trained apart. Every rank calls it."""

    def wind_up(self) -> None:
        """The run ends: what is on its way arrives, and is forgotten. Every rank calls it."""

    def report(self) -> tuple[str, ...]:
        """What happened, a line each; see `Stats.switches`."""
        return ()

    # ------------------------------------------------------------------ checkpoints

    def untimely(self) -> str | None:
        """Why a checkpoint made now would not be whole."""
        return None

    def state(self, wanted: bool = False) -> SyncState:
        """What a checkpoint holds of it; with `wanted`, also the rows into which a load may write."""
        return SyncState(private=[*self.gradients.private(), *self.beliefs])

    def adopt(self, values: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """After a load has written the kept rows: the rest. Empty where the checkpoint has no such sync
        strategy, or another number of ranks."""
