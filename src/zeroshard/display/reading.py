"""What the display is told, and what it remembers of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

RATE_SECONDS = 10.0
SMOOTHED = 10
PLACES = 2000  # dots of the widest terminal: losses in the same place are one point, so that points stay few

Point = tuple[float, float]  # how much was done, and the loss then


@dataclass(frozen=True, slots=True)
class Plain:
    """What plain data parallel training needs: bytes of memory per rank, bytes sent per step by a rank."""

    memory: int
    sent: int


@dataclass(frozen=True, slots=True)
class Reading:
    """What the loop knows at one step."""

    step: int
    done: float  # 0 to 1: how much of the training is behind us
    loss: float
    validation: float | None = None  # where it was measured at this step
    tokens: int = 0  # by all ranks, since the start
    memory: Sequence[Mapping[str, int]] = ()  # by rank: bytes by kind
    sent: Mapping[str, int] = field(default_factory=dict)  # bytes by kind, per step, by this rank
    waited: float = 0.0  # part of the time spent waiting for communication, 0 to 1
    facts: Mapping[str, str] = field(default_factory=dict)  # whatever else is worth a word
    moment: float = field(default_factory=time.monotonic)  # when the step was done: before any validation


class LoopRecord:
    """The readings so far: every loss, the last reading, and a clock."""

    def __init__(self, title: str, plain: Plain | None) -> None:
        self.title, self.plain = title, plain
        self.train: list[Point] = []
        self.validation: list[Point] = []
        self.last: Reading | None = None
        self.began = self.now = time.monotonic()
        self._losses: deque[float] = deque(maxlen=SMOOTHED)
        self._recent: deque[tuple[float, int]] = deque()
        self._together = 0  # readings in the last point

    def begin(self) -> None:
        """Sets the clock to zero."""
        self.began = time.monotonic()

    def add(self, reading: Reading) -> None:
        self.now = time.monotonic()
        self.last = reading
        self._losses.append(reading.loss)
        self._plot(reading.done, reading.loss)
        if reading.validation is not None:
            self.validation.append((reading.done, reading.validation))
        self._recent.append((reading.moment, reading.tokens))
        while self.now - self._recent[0][0] > RATE_SECONDS:
            self._recent.popleft()

    def _plot(self, done: float, loss: float) -> None:
        if self.train and int(self.train[-1][0] * PLACES) == int(done * PLACES):
            self._together += 1
            mean = self.train[-1][1]
            self.train[-1] = done, mean + (loss - mean) / self._together
        else:
            self._together = 1
            self.train.append((done, loss))

    @property
    def elapsed(self) -> float:
        return self.now - self.began

    @property
    def left(self) -> float:
        done = self.last.done if self.last else 0.0
        return max(self.elapsed / done - self.elapsed, 0.0) if done > 0 else 0.0

    @property
    def loss(self) -> float:
        """Over the last steps: one batch alone jumps too much to be read."""
        return sum(self._losses) / len(self._losses)

    @property
    def tokens_per_second(self) -> float:
        """Over the last seconds, not since the start: a machine that became busy shows at once."""
        if len(self._recent) < 2:
            return 0.0
        (before, had), (now, have) = self._recent[0], self._recent[-1]
        return (have - had) / max(now - before, 1e-9)
