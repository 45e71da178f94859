"""Which choice of an `Adaptive` comes next: a pure function of numbers that all ranks agree upon."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..config import show_bytes

CHANGED = 1.5  # a step that takes this many times as long, or as short, as when it was tried: another link


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


def decide(
    gain: float, unrest: float, count: int, current: int, known: Mapping[int, Reading], now: Reading
) -> tuple[int, str]:
    """The next choice and why. `known` has the readings of choices tried before on this link, `now` the
    current one's. Choices are numbered in the user's order, the most faithful first."""
    if now.unrest > unrest:
        return 0, f"the gradient's norm changed by a factor of {now.unrest:.1f} within a window"
    tried = {**known, current: now}
    if len(tried) < count:
        if now.share < gain:
            return current, f"waiting is {now.share:.0%} of a step, so there is little to gain"
        untried = next(number for number in range(count) if number not in tried)
        return untried, f"to be tried: {now}"
    best = 0
    for number in range(1, count):
        if tried[number].seconds < (1.0 - gain) * tried[best].seconds:
            best = number
    return best, f"{1e3 * tried[best].seconds:.1f} ms a step against {1e3 * now.seconds:.1f} ms"


def same_link(before: Reading, now: Reading) -> bool:
    """Whether an earlier reading of the same choice still describes the link."""
    return before.seconds / CHANGED < now.seconds < before.seconds * CHANGED
