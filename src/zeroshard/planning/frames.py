"""One training step of a way to run, moment by moment, for a picture. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from zeroshard.config import Options
from zeroshard.count.timeline import Moment, step_moments

from .planner import price, with_margin
from .question import Question


def moments_of(question: Question, options: Options) -> list[Moment]:
    """A way's step in time, for a picture."""
    unsynced = question.micro_batches > 1
    moments = step_moments(question.setup(options), question.segments(options), question.inputs, unsynced)
    return [with_margin(question, moment) for moment in moments]


@dataclass(frozen=True)
class Frame:
    """A moment of a step and the share of its time that it takes."""

    moment: Moment
    share: float


def frames_of(question: Question, options: Options) -> list[Frame]:
    """The moments of a step with their lengths: by operations, backward twice forward and what is computed
    again once more; the update by its seconds. None is too short to be seen."""
    setup, segments = question.setup(options), question.segments(options)
    moments = moments_of(question, options)
    if segments:
        forward = [float(s.flops) for s in segments]
        back = [s.flops * (3.0 if setup.recomputes(s.unit) else 2.0) for s in reversed(segments)]
    else:
        forward = [float(unit.numel) for unit in setup.units]
        back = [2 * length for length in reversed(forward)]
    total = sum(forward) + sum(back) or 1.0
    cost = price(question, options, segments)
    last = cost.seconds.get("update", 0.0) / max(cost.step, 1e-12)
    lengths = [max(length / total, 0.002) for length in (*forward, *back)]
    lengths.append(max(min(last, 0.9) / (1 - min(last, 0.9)), 0.02))
    return [Frame(m, length / sum(lengths)) for m, length in zip(moments, lengths, strict=True)]
