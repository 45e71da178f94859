"""Systems that take turns every few steps, so that what the machine does in a minute falls on all of them.

All pairs of a group stay alive and wait on a pipe. In each round every one of them gets a turn, in a new
order: a step to warm up, then a few timed ones. Steps are compared within a round (`results.Paired`). Where
memory does not hold all systems there are several groups, so that every bar has its systems in one of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from bars import Bar
from pairs import WORLD, Pair
from results import Run
from rich.console import Console

RANK_BYTES = 384 * 2**20  # of a rank before it has a model
PARAMETER_BYTES = 20  # of a rank: parameter, gradient, two moments, and what travels
SPARE_BYTES = 2 * 2**30


def room() -> int:
    """Bytes of memory that pairs may take."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    found = next(line for line in lines if line.startswith("MemAvailable:"))
    return int(found.split()[1]) * 1024 - SPARE_BYTES


def at_once(parameters: int, memory: int) -> int:
    """How many pairs fit."""
    return max(memory // (WORLD * (RANK_BYTES + PARAMETER_BYTES * parameters)), 1)


def groups(systems: Sequence[str], bars: Sequence[Bar], most: int) -> list[list[str]]:
    """Groups of at most `most` systems that hold each bar's together, where a bar has no more than that; what
    a bar has too many of is judged against those references that came first."""
    if len(systems) <= most:
        return [list(systems)]
    wanted = [[bar.subject, *bar.references] for bar in bars if bar.metric == "step_ms"]
    named = {name for names in wanted for name in names}
    found: list[list[str]] = []
    for names in [*wanted, *([name] for name in systems if name not in named)]:
        present = [name for name in names if name in systems][:most]
        for group in found:
            new = [name for name in present if name not in group]
            if len(group) + len(new) <= most:
                group += new
                break
        else:
            found.append(present)
    return [[name for name in systems if name in group] for group in found]


class Turns:
    """`rounds` rounds of turns of `steps` timed steps each; `limit_s` for a start or a turn."""

    def __init__(self, model: str, rounds: int, steps: int, limit_s: float, other: Path | None) -> None:
        self.model, self.rounds, self.steps, self.limit_s, self.other = model, rounds, steps, limit_s, other

    def session(self, systems: Sequence[str], number: int, console: Console) -> list[Run]:
        """Start a group's pairs one after another, let them take turns, and end them."""
        pairs: list[Pair] = []
        try:
            for system in systems:
                pairs.append(Pair(self.model, system, other=self.other))
                pairs[-1].ready(self.limit_s)
            for turn in range(self.rounds):
                for pair in random.Random(turn).sample(pairs, len(pairs)):
                    if not pair.failed:
                        pair.turn(self.steps, self.limit_s)
            runs = [pair.end(number, self.limit_s) for pair in pairs]
            pairs.clear()
        finally:
            for pair in pairs:  # something else failed: leave no process
                pair.failed = pair.failed or "was not ended"
                pair.end(number, 0.0)
        for run in runs:
            said = run.error or f"{run.worst('step_ms'):.1f} ms, start-up {run.worst('startup_s'):.1f} s"
            console.print(f"session {number + 1} {run.system}: {said}", markup=False)
        return runs
