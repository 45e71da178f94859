"""Updates that are due, and those on their way to the host."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .part import Part, Stretch
from .tier import Mark, Stage


@dataclass(frozen=True)
class Job:
    """An update that is due. `landed`: when its gradient is complete on the device. `held`: its weights are
    not to show before the step."""

    part: Part
    flat: Tensor
    stretches: list[Stretch]
    landed: Mark
    held: bool = False


@dataclass(frozen=True)
class Staged:
    """An update whose gradient is on its way to the host."""

    job: Job
    stage: Stage
    arrived: Mark


class Countdown:
    """Calls `then` when `count` things are done."""

    def __init__(self, count: int, then: Callable[[], None]) -> None:
        self._count, self._then, self._lock = count, then, threading.Lock()

    def one_done(self) -> None:
        with self._lock:
            self._count -= 1
            last = self._count == 0
        if last:
            self._then()
