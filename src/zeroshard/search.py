"""The most that fits: the largest micro-batch, the largest model of a family, the fewest ranks.

Each is found by halving, so it takes what is true of all but odd cases: that what does not fit does not fit
when it grows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import nn
from torch.optim import Optimizer

from zeroshard.errors import OptionError, PlanError
from zeroshard.planner.answer import AllPlanArguments, ModelProblem, problem_of
from zeroshard.planner.candidates import all_candidates
from zeroshard.planner.choice import choose, fitting, refusal, smallest
from zeroshard.planner.plan import Plan
from zeroshard.planner.planning_problem import PlanningProblem
from zeroshard.planner.signatures import with_rows

Optimizers = Optimizer | Sequence[Optimizer] | None
MOST_ROWS, MOST_RANKS, MOST_SIZE = 2**20, 2**16, 2**16


@dataclass(frozen=True)
class SearchResult:
    """The largest or smallest `value` of what was searched, and its plan. `bounded`: the search ended at a
    bound of its own, not because the next value does not fit."""

    what: str
    value: int
    plan: Plan
    bounded: bool = False

    def __str__(self) -> str:
        end = "; no larger one was tried" if self.bounded else ""
        return f"{self.what}: {self.value:,}{end}"


def largest_batch(
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    ranks: int | None = None,
    **asked: Unpack[AllPlanArguments],
) -> SearchResult:
    """The most rows of a micro-batch that fit. `batch` gives the shape of the others; the rest is asked as
    of `plan`.

    >>> import torch
    >>> with torch.device("meta"):
    ...     model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
    >>> largest_batch(model, ranks=1, limit="32MiB", batch=torch.zeros(1, 512)).value > 1000
    True
    """
    batch = asked.get("batch")
    if batch is None:
        raise OptionError("a search for the largest micro-batch needs batch=, of any number of rows.")

    def ask(rows: int) -> ModelProblem:
        return problem_of(model, optimizer, ranks=ranks, **(asked | {"batch": with_rows(batch, rows)}))

    return _largest("largest micro-batch", ask, 1, MOST_ROWS, "a micro-batch of 1 row")


def largest_model(
    build: Callable[[int], nn.Module],
    *,
    low: int = 1,
    high: int = MOST_SIZE,
    ranks: int | None = None,
    **asked: Unpack[AllPlanArguments],
) -> SearchResult:
    """The largest model of a family that fits: `build(size)` makes one, and is called on the meta device.

    >>> import torch
    >>> def build(layers: int) -> torch.nn.Module:
    ...     return torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(layers)))
    >>> largest_model(build, ranks=1, limit="64MiB", stage=0, offload=None).value
    15
    """
    if not callable(build):
        raise OptionError(f"largest_model({build!r}) takes a function of a size that makes a model of it.")

    def ask(size: int) -> ModelProblem:
        with torch.device("meta"):
            model = build(size)
        return problem_of(model, ranks=ranks, **asked)

    return _largest("largest size", ask, low, high, f"size {low:,}, the smallest to try,")


def fewest_ranks(
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    most: int = MOST_RANKS,
    **asked: Unpack[AllPlanArguments],
) -> SearchResult:
    """The smallest number of ranks on which the model fits.

    >>> import torch
    >>> with torch.device("meta"):
    ...     model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(64)))
    >>> fewest_ranks(model, limit="64MiB", offload=None).value
    5
    """
    if asked.get("nodes") is not None:
        raise OptionError(
            "a search for the fewest ranks finds how many nodes it takes: leave nodes= out, and pass "
            "ranks_per_node= for nodes of another size."
        )
    model_problem = problem_of(model, optimizer, ranks=most, **asked)

    def at(ranks: int) -> PlanningProblem:
        return model_problem.problem.on(ranks)

    low, high = 0, 1
    while not fitting(at(high)):
        if high >= most:
            raise PlanError(_nowhere(most, at))
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fitting(at(middle)) else (middle, high)
    return SearchResult("fewest ranks", high, model_problem.named(choose(at(high))))


def _nowhere(most: int, at: Callable[[int], PlanningProblem]) -> str:
    """Why no number of ranks is enough, by the one of those tried that came nearest: more ranks do not always
    take less, since a wire has at least a row of a parameter for each."""
    worlds = [*(2**n for n in range(most.bit_length()) if 2**n < most), most]
    made = {ranks: tuple(all_candidates(at(ranks))) for ranks in worlds}
    ranks = min(worlds, key=lambda ranks: smallest(at(ranks), made[ranks]))
    nearest = "1 rank" if ranks == 1 else f"{ranks:,} ranks"
    return f"nothing up to {most:,} ranks is enough. On {nearest}, {refusal(at(ranks), made[ranks])}"


def _largest(what: str, ask: Callable[[int], ModelProblem], low: int, high: int, least: str) -> SearchResult:
    """`least`: what `low` is, in words."""
    if not fitting(ask(low).problem):
        try:
            ask(low).plan()
        except PlanError as error:
            raise PlanError(f"not even {least} fits: {error}") from error
    good, bad = low, min(2 * low, high)
    while bad < high and fitting(ask(bad).problem):
        good, bad = bad, min(2 * bad, high)
    if bad == high and fitting(ask(high).problem):
        return SearchResult(what, high, ask(high).plan(), bounded=True)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fitting(ask(middle).problem) else (good, middle)
    return SearchResult(what, good, ask(good).plan())
