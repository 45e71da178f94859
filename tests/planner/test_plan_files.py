"""Plans in files that somebody, a disk or another program has changed: each field is looked at."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from compatibility_case import FIXTURES, PLANS

import zeroshard as zs

TEXTS = [(FIXTURES / "plans" / f"{name}.json").read_text(encoding="utf-8") for name in PLANS]
WRITES = re.escape("`zeroshard plan … --json` writes one.")


def changed(where: str, value: Any) -> str:
    data = json.loads(TEXTS[0])
    data["candidates"] = [data["chosen"]]
    *path, last = [int(part) if part.isdigit() else part for part in where.split(".")]
    place = data
    for part in path:
        place = place[part]
    place[last] = value
    return json.dumps(data)


SAID: list[tuple[str, Any, str]] = [
    ("ranks", "two", r"ranks is 'two', and must be a whole number"),
    ("ranks", 0, r"ranks is 0, and must be at least 1"),
    ("candidates", [], r"candidates are none, and there must be one at least"),
    ("limit", 2.5, r"limit is 2\.5, and must be a whole number"),
    ("shared", 1, r"shared is 1, and must be true or false"),
    ("model", None, r"model is None, and must be a text"),
    ("imbalance", "x", r"imbalance is 'x', and must be a number"),
    ("imbalance", -0.5, r"imbalance is -0\.5, and must be a number"),
    ("reasons", "why", r"reasons is 'why', and must be a list"),
    ("weights", ["a"], r"weights is \['a'\], and must be an object of JSON"),
    ("chosen", 3, r"chosen is 3, and must be an object of JSON"),
    ("rank", 3, r"rank is no field of a Plan"),
    ("chosen.stage", 4, r"chosen\.stage is 4, and must be 0 or 1 or 2 or 3"),
    ("chosen.placing", "moon", r"chosen\.placing is 'moon', and must be 'device' or 'some on host' or "),
    ("candidates.0.kinds", {"a": "b"}, r"\.kinds\.a is 'b', and must be a whole number"),
    ("candidates.0.seconds", {"compute": float("inf")}, r"seconds\.compute is inf, and must be a number"),
    (
        "chosen.places",
        [["root", "attic", "device"]],
        r"chosen\.places\[0\]\.optimizer is 'attic', and must be ",
    ),
    (
        "chosen.places",
        [["a", "host", "host", 0, 0, 1]],
        r"chosen\.places\[0\] has 6 parts, and a place has 5",
    ),
    ("chosen.places", [["a"]], r"chosen\.places\[0\]\.optimizer is missing"),
    ("chosen.settings.prefetch", "all", r"chosen\.settings cannot be options: .*prefetch"),
    ("chosen.settings.stage", 2, r"chosen\.settings has stage 2, and the candidate \d"),
    ("chosen.settings.sync", {"type": "Local", "hosts": 1}, r"chosen\.settings cannot be options: .*hosts"),
]


@pytest.mark.parametrize(("where", "value", "said"), SAID, ids=range(len(SAID)))
def test_what_a_field_cannot_hold_is_said(where: str, value: Any, said: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(changed(where, value), encoding="utf-8")
    with pytest.raises(
        zs.PlanError, match=rf"plan\.json: this is not a plan that can be used: .*{said}.*{WRITES}"
    ):
        zs.Plan.read(tmp_path / "plan.json")


def test_what_is_no_plan_at_all(tmp_path: Path) -> None:
    data = json.loads(TEXTS[0])
    del data["ranks"]
    with pytest.raises(
        zs.PlanError, match=rf"this is not a plan that can be used: ranks is missing\. {WRITES}"
    ):
        zs.Plan.from_json(json.dumps(data))
    for text in ("[]", "3", '{"format": "new"}', "{}"):
        with pytest.raises(zs.PlanError, match=rf"this is not a plan: it has no format\. {WRITES}"):
            zs.Plan.from_json(text)
    with pytest.raises(zs.PlanError, match="this is not a plan: RecursionError"):
        zs.Plan.from_json("[" * 100_000)
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(zs.PlanError, match=rf"plan\.json is not a plan: it holds no text\. {WRITES}"):
        zs.Plan.read(tmp_path / "plan.json")


JUNK = (
    None,
    True,
    0,
    -1,
    1e308,
    1e400,
    2.5,
    "",
    "two",
    [],
    [1],
    [[1, 2, 3]],
    {},
    {"type": "Offload"},
    10**30,
)


def places_of(data: Any) -> list[tuple[Any, Any]]:
    """Every place in nested data, as what it stands in and its key there."""
    pairs = (
        list(data.items())
        if isinstance(data, dict)
        else list(enumerate(data))
        if isinstance(data, list)
        else []
    )
    return [found for key, item in pairs for found in ((data, key), *places_of(item))]


def test_a_plan_that_is_read_can_be_used_whatever_was_changed() -> None:
    chance, said, read = random.Random(0), list[str](), 0
    for _ in range(300):
        data = json.loads(chance.choice(TEXTS))
        data["candidates"] = [data["chosen"]]
        place, key = chance.choice(places_of(data))
        if chance.random() < 0.8:
            place[key] = chance.choice(JUNK)
        else:
            del place[key]
        try:
            plan = zs.Plan.from_json(json.dumps(data))
        except zs.PlanError as error:
            said.append(str(error))
            continue
        read += 1
        assert zs.Options(**plan.options()).stage == plan.chosen.stage
        assert plan.model in str(plan)
        assert zs.Plan.from_json(plan.to_json()) == plan
    assert not [text for text in said if "Error:" in text]
    assert read > 20, "some changes are none, or of fields that have defaults"
