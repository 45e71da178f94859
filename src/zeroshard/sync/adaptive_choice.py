"""Decides which choice of an `Adaptive` comes next: a pure function of numbers that all ranks agree upon.

[Note: windows grow] An agreement costs a round trip, and a norm a pass over the gradient. While a choice is
being looked for, windows are as short as the user said; each window after which nothing changes is followed
by one twice as long, up to `LONGEST` times, so that a settled run pays next to nothing.

[Note: rounds of trying] Other work on the machine can make any window longer, and a few steps say little. So
choices are measured in rounds, each once a round: all of them, then those that may still be the shortest.
Windows of one choice lie apart, with the others in between: what disturbed one is over before the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zeroshard.sizes import show_bytes

CHANGED = 1.5  # a step that takes this many times as long, or as short, as when it was chosen: another link
CLOSE = (2.0, 1.3, 1.3, 1.3)  # after each round: what is within this of the shortest goes into the next
KEPT = len(CLOSE) + 1  # readings of a choice; the shortest counts, since other work can only make it longer
LONGEST = 8
VISIT = 4  # windows after which the runner-up is measured again; then twice as many, and so on


@dataclass(frozen=True)
class WindowReading:
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


Known = Mapping[int, Sequence[WindowReading]]


@dataclass(frozen=True)
class Decision:
    """The choice from here on, why, and whether all that deserves it has been tried."""

    number: int
    why: str
    settled: bool


def figure(readings: Sequence[WindowReading]) -> float:
    """Seconds of a step. One disturbed window does not count: the shortest of the last ones does."""
    return min(reading.seconds for reading in readings[-KEPT:])


def decide(gain: float, unrest: float, count: int, current: int, known: Known, settled: bool) -> Decision:
    """What comes after a window of `current`, whose reading is the last in `known`: there are those of all
    choices tried on this link. Choices are numbered in the user's order, the most faithful first, and a
    later one must be shorter by `gain`."""
    now = known[current][-1]
    if now.unrest > unrest:
        why = f"the gradient's norm changed by a factor of {now.unrest:.1f} within a window"
        return Decision(0, why, settled and current == 0)
    untried = [number for number in range(count) if number not in known]
    if untried:
        # Of the first choice alone: a codec that leaves nothing to wait for may take longer than it spares.
        if current == 0 and len(known) == 1 and now.share < gain:
            return Decision(0, f"waiting is {now.share:.0%} of a step: little to gain", settled=True)
        return Decision(untried[0], f"to be tried: {now}", settled=False)
    if settled:  # the others' readings are old, and of shorter windows
        return Decision(current, f"{1e3 * now.seconds:.1f} ms a step", settled=True)
    again = contenders(known)
    if again:
        return Decision(again[0], f"to be tried again, since it came close: {now}", settled=False)
    seconds = {number: figure(readings) for number, readings in known.items()}
    best = 0
    for number in range(1, count):
        if seconds[number] < (1.0 - gain) * seconds[best]:
            best = number
    return Decision(best, f"{1e3 * seconds[best]:.1f} ms a step against {1e3 * now.seconds:.1f} ms", True)


def contenders(known: Known) -> list[int]:
    """Who has yet to be measured in the round under way: see [Note: rounds of trying]."""
    seconds = {number: figure(readings) for number, readings in known.items()}
    least = min(seconds.values())
    for round_, close in enumerate(CLOSE, start=1):
        going = [number for number in sorted(seconds) if seconds[number] < close * least]
        if len(going) == 1:
            return []
        due = [number for number in going if len(known[number]) <= round_]
        if due:
            return due
    return []


def runner_up(chosen: int, known: Known) -> int | None:
    """Who came closest to the choice in force, if anyone came close."""
    seconds = {number: figure(readings) for number, readings in known.items() if number != chosen}
    number = min(seconds, key=lambda each: seconds[each], default=None)
    return number if number is not None and seconds[number] < CLOSE[-1] * figure(known[chosen]) else None


def same_link(chosen: float, readings: Sequence[WindowReading]) -> bool:
    """Whether a choice still takes what it took when it was chosen: a slower window may be chance, two in a
    row are not."""
    return chosen / CHANGED < figure(readings[-2:]) < chosen * CHANGED


@dataclass
class ChoiceJudge:
    """Remembers what windows have shown of `count` choices, and decides after each."""

    gain: float
    unrest: float
    count: int
    known: dict[int, list[WindowReading]] = field(default_factory=dict)
    chosen: float | None = None  # seconds of a step when the choice in force was settled upon
    calm: int = 0  # windows in a row after which nothing changed
    visit: int = VISIT  # of them after which the runner-up is measured
    host: int | None = None  # the choice in force, while the runner-up is measured in its place

    @property
    def window_factor(self) -> int:
        """How many times as long as the user said the next window is: see [Note: windows grow]."""
        return int(min(2**self.calm, LONGEST))

    def hear(self, current: int, reading: WindowReading) -> Decision:
        """A window of `current` has ended."""
        host, self.host = self.host, None
        if host is not None and reading.unrest <= self.unrest:
            return self._end_visit(host, current, reading)
        readings = self.known.setdefault(current, [])
        readings[:] = [*readings, reading][-KEPT:]
        if self.chosen is not None and not same_link(self.chosen, readings):
            self.known, self.chosen = {current: [reading]}, None
        settled = self.chosen is not None
        decision = decide(self.gain, self.unrest, self.count, current, self.known, settled)
        changes = decision.number != current
        if not decision.settled:
            self.chosen, self.visit = None, VISIT
        elif changes or not settled:
            self.chosen = figure(self.known[decision.number])
        self.calm = self.calm + 1 if decision.settled and not changes else 0
        return self._begin_visit(current, decision) if self.calm == self.visit else decision

    def _begin_visit(self, current: int, decision: Decision) -> Decision:
        """Links change, and those who are not in force are not measured: look at the runner-up."""
        self.visit *= 2
        second = runner_up(current, self.known)
        if second is None:
            return decision
        self.host = current
        return Decision(second, "to be looked at once more, since it came close", settled=True)

    def _end_visit(self, host: int, visitor: int, reading: WindowReading) -> Decision:
        """It stays if it was shorter by the gain; its one reading counts, the ones before are old."""
        before = figure(self.known[host])
        why = f"{1e3 * reading.seconds:.1f} ms a step against {1e3 * before:.1f} ms"
        if reading.seconds < (1.0 - self.gain) * before:
            self.known[visitor], self.chosen, self.calm = [reading], reading.seconds, 0
            return Decision(visitor, why, settled=True)
        self.calm += 1
        return Decision(host, why, settled=True)
