"""Moves between sync strategies by what it measures.

[Note: one decision] Ranks measure different times. At the end of a window, which all ranks reach at the same
step, they agree on the largest of each number and decide by `decide`, which is a function of these alone. So
all ranks change in the same step, or none does."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.comm import Transport
from zeroshard.optim.sharded_optimizer import ShardedOptimizer
from zeroshard.params.rank_state import RankState
from zeroshard.params.sharded_param import ShardedTensors
from zeroshard.sync_policies import Adaptive, Choice, Delayed, EveryStep, Local

from .adaptive_choice import ChoiceJudge, Decision, WindowReading, figure
from .delayed import DelayedSync
from .local import LocalSync
from .strategy import SavedRows, SyncState, SyncStrategy

log = logging.getLogger("zeroshard")

TOLD = 200  # changes that are remembered, the last ones: on a restless link there is one in every window


@dataclass
class _MeasuredWindow:
    """What has been measured since this window was opened."""

    opened: float
    waited: float
    sent: int
    steps: int = 0

    def count(self) -> int:
        """One step more; returns how many there are."""
        self.steps += 1
        return self.steps


class AdaptiveSync(SyncStrategy):
    """`Adaptive` at work. Delegates to the sync strategy of the choice in force."""

    advances = True

    def __init__(
        self,
        policy: Adaptive,
        sync_strategies: Mapping[Choice, SyncStrategy],
        transport: Transport,
        updates: Sequence[ShardedOptimizer],
    ) -> None:
        self.policy, self.transport, self.updates = policy, transport, updates
        self.sync_strategies = [sync_strategies[choice] for choice in policy.choices]
        self.number = 0
        self.count = 0  # steps of the last optimizer
        self.switches = deque[str](maxlen=TOLD)
        self._judge = self._new_judge()
        self._tried_since = 0  # the step at which looking for a choice began
        self._window: _MeasuredWindow | None = None
        self._norms: list[float] = []
        self._take(0)
        super().__init__(self.sync_strategies[0].gradients)

    def _new_judge(self) -> ChoiceJudge:
        return ChoiceJudge(self.policy.gain, self.policy.unrest, len(self.sync_strategies))

    def _take(self, number: int) -> None:
        self.number = number
        sync_strategy = self.sync_strategies[number]
        if isinstance(sync_strategy, DelayedSync):
            sync_strategy.gradients.delay(isinstance(self.policy.choices[number], Delayed))
        self.gradients, self.apart = sync_strategy.gradients, sync_strategy.apart
        self.label = f"Adaptive: {self.policy.choices[number]!r}"

    @property
    def sync_strategy(self) -> SyncStrategy:
        return self.sync_strategies[self.number]

    # ------------------------------------------------------------------ what is delegated

    def advance(self) -> None:
        self.sync_strategy.advance()

    @property
    def begun(self) -> bool:  # type: ignore[override]
        return self.sync_strategy.begun

    def ended(self) -> None:
        self.sync_strategy.ended()

    def forget(self, optimizer: Optimizer | None) -> bool:
        return self.sync_strategy.forget(optimizer)

    def rewritten(self) -> None:
        self.sync_strategy.rewritten()

    def meet(self) -> None:
        self.sync_strategy.meet()

    def wind_up(self) -> None:
        for sync_strategy in self.sync_strategies:
            sync_strategy.wind_up()

    def take_buffers(self, buffers: list[Tensor]) -> None:
        for sync_strategy in self.sync_strategies:
            sync_strategy.take_buffers(buffers)

    def untimely(self) -> str | None:
        return self.sync_strategy.untimely()

    def report(self) -> tuple[str, ...]:
        return tuple(self.switches)

    # ------------------------------------------------------------------ windows

    def step(self, update: ShardedOptimizer, step: Callable[[], Any]) -> None:
        if update is not self.updates[-1]:
            self.sync_strategy.step(update, step)
            return
        self._note_norm()
        self.sync_strategy.step(update, step)
        self.count += 1
        self._look()

    def turn(self) -> None:
        self._note_norm()
        self.sync_strategy.turn()
        self.count += 1
        self._look()

    def _note_norm(self) -> None:
        if self._window is not None:
            left = self._length - self._window.steps
            if left in (1, self.policy.window):  # unrest is what happens within so many steps
                self._norms.append(self._norm())

    @property
    def _length(self) -> int:
        """Steps of a window: whole rounds of local steps, so that each counts its share of a meeting."""
        choice = self.policy.choices[self.number]
        round_ = choice.steps if isinstance(choice, Local) else 1
        wanted = self.policy.window * self._judge.window_factor
        return -(-wanted // round_) * round_

    def _look(self) -> None:
        """After a step: the first one opens a window, unless local steps begin, and the last closes it."""
        window = self._window
        if window is None:
            self._window = self._open()
            return
        if window.count() == self._length:
            self._close(window)

    def _open(self) -> _MeasuredWindow:
        counters = self.transport.counters
        return _MeasuredWindow(perf_counter(), sum(counters.waited.values()), sum(counters.sent.values()))

    def _close(self, window: _MeasuredWindow) -> None:
        ended = self._open()
        steps = float(window.steps)
        mine = [
            (ended.opened - window.opened) / steps,
            (ended.waited - window.waited) / steps,
            (ended.sent - window.sent) / steps,
            self._norms[0],
            self._norms[-1],
        ]
        seconds, waited, sent, first, last = self.transport.max(mine)
        unrest = max(first, last) / min(first, last) if min(first, last) > 0 else 1.0
        self._norms.clear()
        looking = self._judge.chosen is None
        self._follow(self._judge.hear(self.number, WindowReading(seconds, waited, sent, unrest)), looking)

    def _follow(self, decision: Decision, looking: bool) -> None:
        """Do what was decided, and open the next window."""
        changes = decision.number != self.number
        if changes:
            self._switch(decision.number, decision.why)
        if not looking and not decision.settled:
            self._tried_since = self.count
        if looking and decision.settled:
            self._say_cost()
        # The first step of another choice is left out, but for local steps, which count by rounds.
        starts = changes and not isinstance(self.sync_strategy, LocalSync)
        self._window = None if starts else self._open()

    def _say_cost(self) -> None:
        choices, known = self.policy.choices, self._judge.known
        if len(known) > 1:
            took = ", ".join(f"{choices[n]!r} {1e3 * figure(known[n]):.1f}" for n in sorted(known))
            steps = self.count - self._tried_since
            self._tell(
                f"step {self.count}: settled on {choices[self.number]!r} after {steps} steps of trying; "
                f"ms a step: {took}"
            )

    @torch.no_grad()
    def _norm(self) -> float:
        """Of this rank's gradients: how much it changes is all that is asked. An overflow, which is skipped
        and comes on one rank, is no news: 0."""
        grads = [
            ShardedTensors.local(p.sharded_param.grad)
            for update in self.updates
            for p in update.params.values()
            if p.sharded_param.grad is not None
        ]
        norm = float(torch.stack(torch._foreach_norm(grads)).norm()) if grads else 0.0
        return norm if math.isfinite(norm) else 0.0

    # ------------------------------------------------------------------ changing over

    def _switch(self, number: int, why: str) -> None:
        old, new = self.sync_strategy, self.sync_strategies[number]
        choices = self.policy.choices
        if new is not old:
            old.meet()
            if isinstance(old, DelayedSync):
                old.gradients.drop()  # it would be applied whenever this choice is taken again
            if isinstance(old, LocalSync) and not isinstance(new, LocalSync):
                self._equalise()
            if isinstance(new, LocalSync):
                new.start()
        line = f"step {self.count}: {choices[self.number]!r} -> {choices[number]!r}: {why}"
        self._take(number)
        self._tell(line)

    def _tell(self, line: str) -> None:
        self.switches.append(line)
        if self.transport.rank == 0:
            log.info("sync %s", line)

    def _equalise(self) -> None:
        """Optimizers of ranks that trained apart have state of their own, and would drive equal parameters
        apart again in steps taken together: rank 0's is taken. A parameter that some rank alone has never
        used begins afresh."""
        states = [
            (param.name, update.optimizer.state.get(param.sharded_param, {}))
            for update in self.updates
            for param in update.params.values()
        ]
        lacking = self.transport.max([float(not state) for _, state in states])
        counts: list[Tensor] = []  # of steps: single numbers, on the CPU whatever the device
        for (name, state), lacks in zip(states, lacking, strict=True):
            if lacks:
                state.clear()  # the dict stays: proxies know it
            values = [value for value in state.values() if isinstance(value, Tensor)]
            counts += [value for value in values if not value.dim()]
            if tensors := [value for value in values if value.dim()]:
                self.transport.broadcast(f"state of {name}", tensors)
        first: Any = self.transport.exchange([float(count) for count in counts], "the steps of states")[0]
        for count, value in zip(counts, first, strict=True):
            count.fill_(value)

    # ------------------------------------------------------------------ checkpoints

    def state(self, wanted: bool = False) -> SyncState:
        state, rows = self.sync_strategy.state(wanted), list[SavedRows]()
        for strategy in dict.fromkeys(self.sync_strategies) if wanted else [self.sync_strategy]:
            rows += (state if strategy is self.sync_strategy else strategy.state(wanted)).rows
        names = [repr(choice) for choice in self.policy.choices]
        values = {**state.values, "choices": names, "number": self.number, "steps": self.count}
        return SyncState(rows, self._private(), values, state.own)

    def _private(self) -> list[RankState]:
        """What each rank has of its own, of all choices."""
        found, seen = [], set[int]()
        for choice, sync_strategy in zip(self.policy.choices, self.sync_strategies, strict=True):
            if id(sync_strategy.gradients) not in seen:
                seen.add(id(sync_strategy.gradients))
                own = choice.compress if isinstance(choice, EveryStep) else None
                # Several codecs keep something about the same parameter.
                of = "" if own is None else f" of {own!r}"
                found += [replace(held, key=held.key + of) for held in sync_strategy.gradients.private()]
        return [*found, *self.beliefs]

    def adopt(self, values: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        same = values.get("choices") == [repr(choice) for choice in self.policy.choices]
        self._take(int(values["number"]) if same else 0)
        self.count = int(values.get("steps", 0)) if same else 0
        self._window = None
        self._judge, self._tried_since = self._new_judge(), self.count
        self._norms.clear()
        for sync_strategy in dict.fromkeys(self.sync_strategies):
            sync_strategy.adopt(
                values if sync_strategy is self.sync_strategy else {},
                own if sync_strategy is self.sync_strategy else {},
            )
