"""What scripts of Trainer ask for beside, sharded, against plain Trainer under DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hf_features import feature

import zeroshard as zs
from zeroshard.testing import Ranks, assert_losses, assert_same_bits

pytestmark = pytest.mark.ranks
KEYWORDS: dict[str, dict[str, Any]] = {
    "checkpointing": {"gradient_checkpointing": True},
    "reentrant checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager", "max_steps": 2},
    "whole matrices": {"optim": "adafactor"},
    "SGD": {"optim": "sgd", "lr_scheduler_type": "cosine", "weight_decay": 0.1},
}


def beside(pool: Ranks, tmp_path: Path, name: str, *many: dict[str, Any], **keywords: Any) -> list[Any]:
    """What plain Trainer told, and what sharded ones did."""
    told = []
    for number, options in enumerate((None, *many)):
        told.append(pool.run(feature, name, str(tmp_path / f"{number}"), options, keywords)[0])
        assert told[-1].pop("stage") == (options and options.get("stage", told[-1].get("stage")))
    return told


@pytest.mark.wide(3)
@pytest.mark.parametrize("name", sorted(KEYWORDS))
def test_arguments(pool: Ranks, tmp_path: Path, name: str) -> None:
    """With the same losses as plain Trainer, bit for bit."""
    want, *got = beside(pool, tmp_path, "plain", {"stage": 2}, {"stage": 3}, **KEYWORDS[name])
    for each in got:
        assert_losses(each["losses"], want["losses"], 1e-6)


@pytest.mark.parametrize("name", ["twice", "generates"])
def test_loops(pool: Ranks, tmp_path: Path, name: str) -> None:
    want, *got = beside(pool, tmp_path, name, {"stage": 2}, {"stage": 3})
    for each in got:
        assert each == want


def test_adapters(pool: Ranks, tmp_path: Path) -> None:
    want, *got = beside(pool, tmp_path, "adapters", {"stage": 2}, {"stage": 3})
    for each in got:
        assert_same_bits(each.pop("adapters"), want["adapters"])
        assert each == {name: value for name, value in want.items() if name != "adapters"}


def test_half_precision(pool: Ranks, tmp_path: Path) -> None:
    exact = beside(pool, tmp_path, "plain")[0]["losses"]
    cast, ours = beside(pool, tmp_path, "plain", {"stage": 3}, bf16=True)
    assert_losses(ours["losses"], cast["losses"], 4e-3)
    assert ours["losses"] != exact
    half = {"fp16": True, "max_grad_norm": 1.0}
    clipped = beside(pool, tmp_path, "plain", max_grad_norm=1.0)[0]["losses"]
    for options in ({"stage": 2}, {"stage": 3, "offload": zs.Offload("host")}):
        told = pool.run(feature, "plain", str(tmp_path), options, half)[0]
        assert_losses(told["losses"], clipped, 4e-3)
        assert told["losses"] != clipped


def test_evaluated_before_it_trains(pool: Ranks, tmp_path: Path) -> None:
    """Where plain Trainer then does without DDP, and its ranks train apart."""
    trained = beside(pool, tmp_path, "plain", {"stage": 3}, bf16=True)[1]
    told = pool.run(feature, "evaluated first", str(tmp_path), {"stage": 3})[0]
    assert told["losses"] == trained["losses"]
    assert told["evaluated"] == pool.run(feature, "evaluated first", str(tmp_path), None)[0]["evaluated"]


def test_a_limit(pool: Ranks, tmp_path: Path) -> None:
    want = pool.run(feature, "limited", str(tmp_path), None)[0]
    told = pool.run(feature, "limited", str(tmp_path), {"limit": "200MiB"})[0]
    assert_losses(told["losses"], want["losses"], 1e-6)
    assert told["stage"] == 0  # which fits, and is the fastest
    assert told["clipped_by"] == 0.5
    assert told["planned"] == ("int64 (4, 12)", "int64 (4, 12)")
    told = pool.run(feature, "untraceable", str(tmp_path), {"limit": "200MiB"})[0]
    assert told["planned"] == ()
    assert len(told["losses"]) == 4


def test_what_a_run_does_is_logged(pool: Ranks, tmp_path: Path) -> None:
    told = pool.run(feature, "logged", str(tmp_path), {"stage": 3})[0]
    for entry in told["entries"]:
        assert entry["zeroshard/steps"] == 1
        assert entry["zeroshard/live/state"] > 0
        assert entry["zeroshard/sent/gather"] > 0
    assert told["entries"][2]["zeroshard/sent/gather"] == told["entries"][3]["zeroshard/sent/gather"]
    assert "zeroshard/steps" not in pool.run(feature, "logged", str(tmp_path), None)[0]["entries"][0]
