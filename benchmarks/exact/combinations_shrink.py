"""Shrinks a combination that fails to the smallest one that still does, and writes it as one line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from typing import Any

from combinations_case import Case, allowed

# By field, simplest first. What stands before a field's own value is simpler than it.
SIMPLER: dict[str, tuple[Any, ...]] = {
    "moves": (None,),
    "world": (1, 2, 3),
    "limit": (None,),
    "offload": ("none", "host"),
    "stage": (0, 1, 2),
    "precision": ("none", "bf16"),
    "optimizer": ("sgd", "adamw"),
    "clip": ("none", "norm"),
    "block": ("plain",),
    "hidden": (5, 16),
    "vocab": (7,),
    "blocks": (2, 3),
    "shared_module": (False,),
    "tied": (False,),
    "frozen": (False,),
    "uneven": (False,),
    "dtype": ("float32",),
    "groups": (1, 2),
    "late_group": (False,),
    "accumulate": (1, 2),
    "no_sync": (False,),
    "recompute": (False,),
    "prefetch": (1, 0),
    "bucket": (None, 4096),
    "units": ("auto",),
    "split": ("auto",),
    "transport": ("auto",),
    "stage_bytes": (1 << 20, 2048),
    "stages": (2,),
    "zero": ("to none",),
    "zero_at": ("end",),
    "closure": (False,),
    "schedule": ("none",),
    "start": ("values",),
    "two": (False,),
    "method": (False,),
    "adapters": (False,),
    "varied": (False,),
    "file": (False,),
}


def simpler(case: Case) -> Iterator[Case]:
    """All allowed ones that are one step simpler: one event less, or one field at a simpler value."""
    if any(case.events.values()):
        yield replace(case, events={})
    for step, names in case.events.items():
        for index in range(len(names)):
            yield replace(case, events={**case.events, step: names[:index] + names[index + 1 :]})
    for name, values in SIMPLER.items():
        own = getattr(case, name)
        for value in values[: values.index(own)] if own in values else values:
            made = allowed(replace(case, **{name: value}))
            if getattr(made, name) == value and weight(made) < weight(case):
                yield made


def weight(case: Case) -> int:
    """How far it is from the simplest one."""
    total = sum(len(names) for names in case.events.values())
    for name, values in SIMPLER.items():
        own = getattr(case, name)
        total += values.index(own) if own in values else len(values)
    return total


def shrunk(case: Case, fails: Callable[[Case], bool], goes_on: Callable[[], bool] = lambda: True) -> Case:
    """The smallest found that still fails: of those one step simpler the first that does, as long as any does
    and `goes_on` says so. The same case is not tried twice."""
    tried = {to_text(case)}
    found = True
    while found and goes_on():
        found = False
        for other in simpler(case):
            text = to_text(other)
            if text in tried or not goes_on():
                continue
            tried.add(text)
            if fails(other):
                case, found = other, True
                break
    return case


def to_text(case: Case) -> str:
    """One line that `from_text` reads."""
    events = {str(step): list(names) for step, names in case.events.items() if names}
    return json.dumps({**asdict(replace(case, events={})), "events": events})


def from_text(text: str) -> Case:
    values = json.loads(text)
    known = {one.name for one in fields(Case)}
    if values.keys() != known:
        raise ValueError(f"a case has the fields {sorted(known)}, and this has {sorted(values)}")
    events = {int(step): tuple(names) for step, names in values["events"].items()}
    return Case(**{**values, "events": events})
