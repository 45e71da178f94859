"""Plain data goes to JSON and comes back as it was, or is refused with its place."""

from __future__ import annotations

import enum
import json
import math
from collections import OrderedDict
from typing import Any

import pytest
import torch

from zeroshard.checkpoint.values import pack, unpack
from zeroshard.errors import CheckpointError


def there_and_back(tree: dict[str, Any]) -> Any:
    data, tensors = pack(tree)
    text = json.dumps(data, allow_nan=False)
    return unpack(json.loads(text), tensors.__getitem__)


def test_what_json_cannot_say_comes_back() -> None:
    tree = {
        "betas": (0.9, 0.95),
        "nested": [{"a": None, "b": True}, (), [1, (2, 3)]],
        "huge": -(2**80),
        "integers": [0, 2**63 - 1, -(2**63) + 1],
        "too large": ([5, 2**63], (-(2**63), 5), [True, 1]),
        "raw": b"\x00\xff",
        "by number": {0: "a", 1: {"$x": 1}, (1, 2): "pair", None: 0},
        "$tuple": [1],
        "tiny": 5e-324,
        "third": 1 / 3,
        "infinite": [math.inf, -math.inf],
    }
    back = there_and_back(tree)
    assert back == tree
    assert type(back["betas"]) is tuple
    assert math.isnan(there_and_back({"x": math.nan})["x"])


def test_enums_numpy_scalars_and_ordered_dicts_become_plain() -> None:
    numpy = pytest.importorskip("numpy")

    class Color(str, enum.Enum):  # noqa: UP042 - the kind whose str() is not its value
        RED = "red"

    tree = {"c": Color.RED, "i": numpy.int64(3), "f": numpy.float32(0.5), "o": OrderedDict(a=1)}
    assert there_and_back(tree) == {"c": "red", "i": 3, "f": 0.5, "o": {"a": 1}}


def test_tensors_stand_anywhere_and_names_do_not_clash() -> None:
    first, second = torch.arange(3), torch.ones(2)
    tree = {"a": {"b.c": first}, "a.b": {"c": second}, "list": [first, (second,)]}
    data, tensors = pack(tree)
    assert len(tensors) == 4
    back = unpack(json.loads(json.dumps(data)), tensors.__getitem__)
    assert torch.equal(back["a"]["b.c"], first)
    assert torch.equal(back["a.b"]["c"], second)
    assert torch.equal(back["list"][1][0], second)


def test_copies_are_taken_when_asked() -> None:
    tensor = torch.zeros(2)
    _, tensors = pack({"t": tensor}, copy=True)
    tensor.fill_(1)
    assert tensors["t"].sum() == 0


def test_an_object_is_refused_with_its_place() -> None:
    with pytest.raises(CheckpointError, match=r"`run.lambda.1` is a builtins.function"):
        pack({"run": {"lambda": [0, lambda: 0]}})


def test_a_tree_that_contains_itself_is_refused() -> None:
    tree: dict[str, Any] = {}
    tree["self"] = tree
    with pytest.raises(CheckpointError, match="deeper than"):
        pack(tree)


@pytest.mark.parametrize(
    "data",
    [
        {"$float": "abc"},
        {"$int": 3},
        {"$bytes": "!"},
        {"$pairs": [1]},
        {"$pairs": [[[], 1]]},
        {"$tuple": "abc"},
        {"$eval": "1"},
        {"$tensor": ["x"]},
    ],
)
def test_malformed_marks_raise_our_error(data: Any) -> None:
    with pytest.raises(CheckpointError, match="values"):
        unpack(data, lambda name: torch.empty(0))
