"""Delayed updates: gradients reach the sharded parameters one backward later; see [Note: one behind] in
`grads/reducer.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from zeroshard.errors import StateError
from zeroshard.grads import Reducer
from zeroshard.optim.sharded_optimizer import ShardedOptimizer
from zeroshard.sync_policies import Delayed

from .strategy import SavedRows, SyncState, SyncStrategy


class DelayedSync(SyncStrategy):
    """`Delayed`, and where it is one of several choices also `EveryStep` on the same buckets."""

    advances = True

    def __init__(self, policy: Delayed, gradients: Reducer, rank: int) -> None:
        super().__init__(gradients)
        self.policy, self.rank = policy, rank
        self.label = repr(policy)
        self.count = 0  # updates, of the warm-up only
        self._unused = False  # a backward has ended and no step has followed
        self.begun = False
        gradients.delay(self._is_warm)

    @property
    def _is_warm(self) -> bool:
        return self.count >= self.policy.warmup_steps

    def advance(self) -> None:
        if not self._unused and torch.is_grad_enabled():
            self.gradients.start_late()
            self.begun = self.gradients.advance() or self.begun

    def ended(self) -> None:
        if self._unused and self.gradients.behind:
            raise StateError(
                "a second backward before optimizer.step(): with sync=Delayed() a step applies the gradient "
                "of one backward. Accumulate inside run.no_sync(), all but the last backward of a step."
            )
        self._unused = True
        super().ended()

    def step(self, update: ShardedOptimizer, step: Callable[[], Any]) -> None:
        first, self._unused, self.begun = self._unused, False, False  # of those that step after a backward
        super().step(update, step)
        if first and not self._is_warm:
            self.count += 1
            self.gradients.delay(self._is_warm)

    def forget(self, optimizer: Optimizer | None) -> bool:
        if self._unused:  # dropped instead of applied: the one that is under way, too
            self._unused = self.begun = False
            self.gradients.drop()
        return False

    def wind_up(self) -> None:
        if not self.gradients.interrupted:
            self.gradients.drop()

    # ------------------------------------------------------------------ checkpoints

    def state(self, wanted: bool = False) -> SyncState:
        rows = [
            SavedRows(p.name, "delayed", rows, p.slot.rows(self.rank)[0], p.slot.height, bucket)
            for bucket, p, rows in self.gradients.rows_coming(wanted)
        ]
        coming = [p.name for _, p, _ in self.gradients.rows_coming(False)]
        return replace(super().state(wanted), rows=rows, values={"delayed": coming, "count": self.count})

    def adopt(self, values: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        self._unused = self.begun = False
        if self.policy.warmup_steps:
            self.count = int(values.get("count", 0))
            self.gradients.delay(self._is_warm)
        self.gradients.expect(set(values.get("delayed", ())))
