"""A plan as one page: memory over the time of a step, stacked by kind, for every candidate. No torch.

The page is a single file that fetches nothing: style, script and figures are in it (`template.html`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from zeroshard.count.timeline import KINDS
from zeroshard.planning.frames import Frame
from zeroshard.planning.plan import Candidate, Plan, settings_text

__all__ = ["page"]

MARK = "{{plan}}"


def page(plan: Plan, frames: Sequence[Sequence[Frame]], notes: Sequence[str] = ()) -> str:
    """The page of a plan. `frames`: a step of each of its candidates, in their order; `notes`: sentences to
    show above the plan's own reasons."""
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
        "kinds": list(KINDS),
        "chosen": plan.candidates.index(plan.chosen),
        "candidates": [_told(one, steps) for one, steps in zip(plan.candidates, frames, strict=True)],
    }
    # As text of a script element: only "<" could end it.
    data = json.dumps(told, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    template = files(__package__).joinpath("template.html").read_text(encoding="utf-8")
    return template.replace(MARK, data)


def _told(one: Candidate, frames: Sequence[Frame]) -> dict[str, Any]:
    return {
        "label": one.label,
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
            [frame.moment.where, round(frame.share, 6), *(frame.moment.kinds[kind] for kind in KINDS)]
            for frame in frames
        ],
    }
