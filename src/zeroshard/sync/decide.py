"""Which choice of an `Adaptive` comes next: a pure function of numbers that all ranks agree upon.

[Note: windows grow] An agreement costs a round trip, and a norm a pass over the gradient. While a choice is
being looked for, windows are as short as the user said; each window after which nothing changes is followed
by one twice as long, up to `LONGEST` times, so that a settled run pays next to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..config import show_bytes

CHANGED = 1.5  # a step that takes this many times as long, or as short, as when it was chosen: another link
CLOSE = 1.25  # a choice whose step was within this of the shortest is measured a second time
LONGEST = 8
KEPT = 2  # readings of a choice; the shortest counts, since other work can only make a window longer


@dataclass(frozen=True)
class Reading:
    """One window: seconds of a step and of it waited for peers (the slowest rank's), bytes that a rank sent a
    step (the busiest's), and by which factor the gradient's norm changed."""

    seconds: float
    waited: float
    sent: float
    unrest: float = 1.0

    @property
    def share(self) -> float:
        return self.waited / self.seconds if self.seconds > 0 else 0.0

    @property
    def bandwidth(self) -> float:
        """Bytes a second while waiting: at most what the link gives, since some of it was hidden."""
        return self.sent / self.waited if self.waited > 0 else float("inf")

    def __str__(self) -> str:
        speed = "" if self.bandwidth == float("inf") else f", {show_bytes(self.bandwidth)}/s while waiting"
        return (
            f"{1e3 * self.seconds:.1f} ms a step, {self.share:.0%} of it waiting; "
            f"{show_bytes(self.sent)} sent a step{speed}"
        )


Known = Mapping[int, Sequence[Reading]]


@dataclass(frozen=True)
class Decision:
    """The choice from here on, why, and whether all that deserves it has been tried."""

    number: int
    why: str
    settled: bool


def figure(readings: Sequence[Reading]) -> float:
    """Seconds of a step. One disturbed window does not count: the shortest of the last ones does."""
    return min(reading.seconds for reading in readings[-KEPT:])


def decide(gain: float, unrest: float, count: int, current: int, known: Known, settled: bool) -> Decision:
    """What comes after a window of `current`, whose reading is the last in `known`: there are those of all
    choices tried on this link. Choices are numbered in the user's order, the most faithful first. Once
    `settled`, another choice must be shorter by `gain`, faithful or not: no going back and forth."""
    now = known[current][-1]
    if now.unrest > unrest:
        why = f"the gradient's norm changed by a factor of {now.unrest:.1f} within a window"
        return Decision(0, why, settled and current == 0)
    untried = [number for number in range(count) if number not in known]
    if untried:
        if now.share < gain:
            return Decision(current, f"waiting is {now.share:.0%} of a step: little to gain", settled=True)
        return Decision(untried[0], f"to be tried: {now}", settled=False)
    seconds = {number: figure(readings) for number, readings in known.items()}
    if not settled:
        again = _contenders(seconds, known)
        if again:
            number = current if current in again else again[0]
            return Decision(number, f"to be tried again, since it came close: {now}", settled=False)
    best = 0
    for number in range(1, count):
        if seconds[number] < (1.0 - gain) * seconds[best]:
            best = number
    if settled and seconds[best] > (1.0 - gain) * seconds[current]:
        best = current
    return Decision(best, f"{1e3 * seconds[best]:.1f} ms a step against {1e3 * now.seconds:.1f} ms", True)


def _contenders(seconds: Mapping[int, float], known: Known) -> list[int]:
    """Those that could still be the shortest and have been measured once."""
    close = [number for number in sorted(seconds) if seconds[number] < CLOSE * min(seconds.values())]
    return [number for number in close if len(known[number]) < KEPT] if len(close) > 1 else []


def same_link(chosen: float, readings: Sequence[Reading]) -> bool:
    """Whether a choice still takes what it took when it was chosen: a slower window may be chance, two in a
    row are not."""
    return chosen / CHANGED < figure(readings) < chosen * CHANGED


@dataclass
class Judge:
    """Remembers what windows have shown of `count` choices, and decides after each."""

    gain: float
    unrest: float
    count: int
    known: dict[int, list[Reading]] = field(default_factory=dict)
    chosen: float | None = None  # seconds of a step when the choice in force was settled upon
    calm: int = 0  # windows in a row after which nothing changed

    @property
    def stretch(self) -> int:
        """How many times as long as the user said the next window is: see [Note: windows grow]."""
        return int(min(2**self.calm, LONGEST))

    def hear(self, current: int, reading: Reading) -> Decision:
        """A window of `current` has ended."""
        readings = self.known.setdefault(current, [])
        readings[:] = [*readings, reading][-KEPT:]
        if self.chosen is not None and not same_link(self.chosen, readings):
            self.known, self.chosen = {current: [reading]}, None
        settled = self.chosen is not None
        decision = decide(self.gain, self.unrest, self.count, current, self.known, settled)
        changes = decision.number != current
        if not decision.settled:
            self.chosen = None
        elif changes or not settled:
            self.chosen = figure(self.known[decision.number])
        self.calm = self.calm + 1 if decision.settled and not changes else 0
        return decision
