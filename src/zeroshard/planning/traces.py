"""The steps of a model that a plan looks at: with these or those units recomputed, in each precision."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zeroshard.config import Options
from zeroshard.count.memory import Setup
from zeroshard.count.timeline import Segment
from zeroshard.errors import PlanError
from zeroshard.life.units import matching

from .question import Question

if TYPE_CHECKING:
    from .fakes import Fakes
    from .trace import Inputs, Loss


class Traces:
    """The segments of a step under given options, each combination of precision and recomputed units traced
    once."""

    def __init__(self, question: Question, model: nn.Module, inputs: Inputs, loss: Loss | None) -> None:
        self._question, self._model, self._inputs, self._loss = question, model, inputs, loss
        self._known: dict[Any, tuple[Segment, ...]] = {}
        self._fakes: list[Fakes] = []  # made with the first trace

    def of(self, inputs: Inputs) -> Traces:
        """The same of other inputs."""
        made = Traces(self._question, self._model, inputs, self._loss)
        made._fakes = self._fakes
        return made

    @property
    def bounded(self) -> bool:
        """Whether values decide sizes in what was traced so far: they were taken at their largest."""
        return any(fakes.mode.bounded for fakes in self._fakes)

    def __call__(self, options: Options) -> tuple[Segment, ...]:
        names = self._question.names
        wanted = options.recompute
        again = names if isinstance(wanted, bool) else matching(wanted, list(names), "recompute", "units")
        chosen = frozenset(again) if wanted else frozenset()
        key = options.precision, chosen
        if key not in self._known:
            asked = replace(self._question, options=options)
            self._known[key] = traced(asked, self._model, self._inputs, self._loss, chosen, self._fakes)
        return self._known[key]


def traced(
    question: Question,
    model: nn.Module,
    inputs: Inputs,
    loss: Loss | None,
    recomputed: Collection[str],
    fakes: list[Fakes],
) -> tuple[Segment, ...]:
    """The segments of one step of the model in the run's compute dtypes."""
    from .fakes import Fakes
    from .trace import Tracer

    setup = Setup(question.units, question.options, question.world, question.rules)
    compute = {w.name: getattr(torch, setup.dtypes(w)[0]) for unit in question.units for w in unit.weights}
    chosen, names = set(recomputed), [u.name for u in question.units if u.name]
    if not fakes:
        fakes.append(Fakes())
    try:
        return tuple(
            Tracer(
                model,
                names,
                chosen.__contains__,
                compute,
                question.machine.gpu,
                question.options.precision,
                fakes[0],
            ).run(inputs, loss)
        )
    except PlanError:
        raise
    except Exception as error:  # the user's code on fake tensors: say that it was that
        shapes = ", ".join(str(tuple(t.shape)) for t in inputs.tensors)
        given = f"with inputs of shape {shapes}" if shapes else "without tensors among its inputs"
        why = f"{type(error).__name__}: {error}".rstrip(".")
        raise PlanError(
            f"a step of {type(model).__name__} {given} cannot be traced: {why}. Check the batch; code that "
            "looks at values cannot run on shapes alone: leave batch= out, and activations are not counted."
        ) from error
