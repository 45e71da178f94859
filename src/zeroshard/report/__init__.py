"""A plan as one page: memory over the time of a step, stacked by kind, for every candidate. No torch.

The page is a single file that fetches nothing: style, script and figures are in it (`template.html`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from zeroshard.extend import (
    KINDS,
    OUTSIDE,
    Candidate,
    PictureFrame,
    Plan,
    Rate,
    options_of,
    settings_text,
)

__all__ = ["page"]

MARK = "{{plan}}"
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def page(
    plan: Plan, frames: Sequence[Sequence[PictureFrame]], notes: Sequence[str] = (), rate: Rate | None = None
) -> str:
    """The page of a plan. `frames`: a step of each of its candidates, in their order; `notes`: sentences to
    show above the plan's own reasons; `rate`: with which seconds become tokens a second."""
    told = {
        "model": plan.model,
        "parameters": plan.parameters,
        "ranks": plan.ranks,
        "per_node": plan.ranks_per_node,
        "machine": plan.machine,
        "limit": plan.limit,
        "host_limit": plan.host_limit,
        "disk_limit": plan.disk_limit,
        "batch": list(plan.batch),
        "reasons": [*notes, *plan.reasons],
        "optimizer": list(plan.optimizer),
        "rate": asdict(rate) if rate is not None else None,
        "kinds": [*KINDS, *OUTSIDE],
        "chosen": plan.candidates.index(plan.chosen),
        "candidates": [_told(one, steps) for one, steps in zip(plan.candidates, frames, strict=True)],
    }
    # As text of a script element: only "<" could end it.
    data = json.dumps(told, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    template = files(__package__).joinpath("template.html").read_text(encoding="utf-8")
    return template.replace(MARK, data)


def _compute(one: Candidate) -> Any:
    """The dtype in which a candidate computes."""
    precision = options_of(one).get("precision")
    return precision.compute if precision is not None else "as it is"


def _told(one: Candidate, frames: Sequence[PictureFrame]) -> dict[str, Any]:
    return {
        "label": one.label,
        "precision": one.precision or PRECISIONS.get(str(_compute(one)), str(_compute(one))),
        "fits": one.fits,
        "device": one.device,
        "where": one.where,
        "host": one.host,
        "disk": one.disk,
        "resting": {kind: one.lasting.get(kind, 0) for kind in ("host", "staging", "disk")},
        "sent": sum(one.sent.values()),
        "step": one.step,
        "seconds": one.seconds,
        "numerics": one.numerics,
        "options": settings_text(one),
        "frames": [
            [
                frame.moment.where,
                round(frame.share, 6),
                *(frame.moment.kinds.get(kind, 0) for kind in (*KINDS, *OUTSIDE)),
            ]
            for frame in frames
        ],
    }
