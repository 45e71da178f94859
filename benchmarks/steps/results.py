"""From the raw numbers of every process to one row per system. Pure: nothing here starts or times."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Literal

LOSS_TOLERANCE = 1e-3
REFERENCE = "ddp"
BOUND = "none"
OTHER = "@other"  # behind the name of a system that uses the package of another checkout

Status = Literal["ok", "INVALID", "FAILED", "MISSING"]


@dataclass(frozen=True)
class Run:
    """One pair of processes: each rank's numbers (as `rank.Measurement` has them), or why there are none."""

    system: str
    repeat: int
    ranks: tuple[dict[str, object], ...] = ()
    error: str = ""

    def worst(self, field: str) -> float:
        """The slowest, largest rank: a step is over when all ranks are through it."""
        return max(float(rank[field]) for rank in self.ranks)  # type: ignore[arg-type]

    def turns(self) -> list[float]:
        """The mean step of each turn, of the slower rank."""
        per_rank: list[list[float]] = [rank.get("turns_ms", []) for rank in self.ranks]  # type: ignore[misc]
        return [max(turn) for turn in zip(*per_rank, strict=True)]

    def losses(self) -> list[float]:
        """The mean over ranks of the loss of each of the first steps: the loss of the whole batch."""
        per_rank: list[list[float]] = [rank["losses"] for rank in self.ranks]  # type: ignore[misc]
        return [statistics.fmean(step) for step in zip(*per_rank, strict=True)]


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest over the repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Quartiles:
    """Half of the values lie between `low` and `high`."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Quartiles:
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(statistics.median(values), low, high)

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


class Paired:
    """Systems that took turns: step times that are compared within a round, where the machine was the same
    for all of them."""

    def __init__(self, runs: list[Run]) -> None:
        self._steps: dict[str, dict[tuple[int, int], float]] = {}
        for run in runs:
            of = self._steps.setdefault(run.system, {})
            of.update({(run.repeat, turn): step for turn, step in enumerate(run.turns())})

    def __bool__(self) -> bool:
        return any(self._steps.values())

    def ratio(self, system: str, reference: str) -> Quartiles | None:
        """Of the ratios of all rounds that both had a turn in."""
        mine, other = self._steps.get(system, {}), self._steps.get(reference, {})
        ratios = [step / other[turn] for turn, step in mine.items() if turn in other]
        return Quartiles.of(ratios) if ratios else None


@dataclass(frozen=True)
class Row:
    """One system. The spreads are None where nothing was measured, and `note` says why."""

    system: str
    status: Status
    note: str = ""
    step_ms: Spread | None = None
    startup_s: Spread | None = None
    peak_rss: float = 0.0
    pss: float = 0.0
    cpu_share: float = 0.0
    loss_gap: float | None = None


def loss_gap(losses: list[float], reference: list[float]) -> float:
    """The largest relative difference of any step; infinite where a loss is nan, which `max` passes over."""
    gaps = [abs(mine - other) / abs(other) for mine, other in zip(losses, reference, strict=True)]
    return math.inf if any(map(math.isnan, gaps)) else max(gaps)


def summarise(systems: list[str], runs: list[Run], missing: dict[str, str]) -> list[Row]:
    """One row per system asked for, in that order: none is dropped, whatever happened to it."""
    done = [run for run in runs if run.system == REFERENCE and not run.error]
    reference = done[0].losses() if done else None
    rows = []
    for system in systems:
        if system in missing:
            rows.append(Row(system, "MISSING", missing[system]))
        else:
            rows.append(_row(system, [run for run in runs if run.system == system], reference))
    return rows


def _row(system: str, runs: list[Run], reference: list[float] | None) -> Row:
    errors = [f"repeat {run.repeat + 1}: {run.error}" for run in runs if run.error]
    if errors or not runs:
        return Row(system, "FAILED", errors[0] if errors else "was never run")
    status, note, gap = _check_losses(system, runs, reference)
    return Row(
        system,
        status,
        note,
        step_ms=Spread.of([step for run in runs for step in run.turns() or [run.worst("step_ms")]]),
        startup_s=Spread.of([run.worst("startup_s") for run in runs]),
        peak_rss=statistics.median(run.worst("peak_rss") for run in runs),
        pss=statistics.median(run.worst("pss") for run in runs),
        cpu_share=min(float(rank["cpu_share"]) for run in runs for rank in run.ranks),  # type: ignore[arg-type]
        loss_gap=gap,
    )


def _check_losses(
    system: str, runs: list[Run], reference: list[float] | None
) -> tuple[Status, str, float | None]:
    """A fast system that trains another model is no faster: its row does not count."""
    if reference is None:
        return "ok", f"losses unchecked: {REFERENCE} was not measured", None
    # Alone, the ranks start from the same model on the same data, and part after their first update.
    steps = 1 if system == BOUND else len(reference)
    gap = max(loss_gap(run.losses()[:steps], reference[:steps]) for run in runs)
    if gap > LOSS_TOLERANCE:
        return (
            "INVALID",
            f"losses differ from {REFERENCE}'s by {gap:.1e}, more than {LOSS_TOLERANCE:.0e}",
            gap,
        )
    return "ok", "", gap


def control_gap(runs: list[Run]) -> float | None:
    """How far the losses of ranks that never communicate are from the reference's.

    Where this is below the tolerance, the check above could not tell a system that forgot to communicate.
    """
    losses = {run.system: run.losses() for run in runs if not run.error}
    if BOUND not in losses or REFERENCE not in losses:
        return None
    return loss_gap(losses[BOUND], losses[REFERENCE])
