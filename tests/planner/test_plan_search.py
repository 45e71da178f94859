"""Searches: the largest micro-batch, the largest model of a family, the fewest ranks; each is the edge."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from zeroshard import cli, search
from zeroshard.errors import OptionError
from zeroshard.planner.signatures import with_rows


def tower(layers: int, width: int = 256) -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(layers))
    )


def on_meta(layers: int) -> nn.Module:
    with torch.device("meta"):
        return tower(layers)


def test_the_largest_micro_batch_is_the_largest() -> None:
    model, ask = on_meta(4), {"ranks": 2, "limit": "64MiB", "stage": 2, "offload": None, "recompute": False}
    found = search.largest_batch(model, batch=torch.zeros(3, 256), **ask)  # type: ignore[arg-type]
    assert found.plan.chosen.device <= 64 * 2**20
    assert found.plan.batch == (f"float32 ({found.value}, 256)",)
    assert not found.bounded
    with pytest.raises(zs.PlanError):
        zs.plan(model, batch=torch.zeros(found.value + 1, 256), **ask)  # type: ignore[arg-type]


def test_the_largest_model_of_a_family_is_the_largest() -> None:
    ask = {"ranks": 2, "limit": "32MiB", "offload": None}
    found = search.largest_model(tower, high=1000, **ask)  # type: ignore[arg-type]
    assert found.plan.parameters == found.value * 2 * (256 * 256 + 256)
    with pytest.raises(zs.PlanError):
        zs.plan(on_meta(found.value + 1), **ask)  # type: ignore[arg-type]
    assert search.largest_model(partial(tower), high=3, **ask).bounded  # type: ignore[arg-type]


def test_the_fewest_ranks_are_the_fewest() -> None:
    model = on_meta(40)
    found = search.fewest_ranks(model, limit="13MiB", offload=None)
    assert found.plan.ranks == found.value > 2
    assert found.plan.chosen.device <= 13 * 2**20
    with pytest.raises(zs.PlanError):
        zs.plan(model, ranks=found.value - 1, limit="13MiB", offload=None)
    with pytest.raises(zs.PlanError, match="the smallest"):
        search.fewest_ranks(model, limit="1MiB", offload=None, most=64)
    with pytest.raises(OptionError, match="finds how many nodes it takes"):
        search.fewest_ranks(model, limit="13MiB", nodes=2)


def test_batches_of_every_form_get_other_rows() -> None:
    assert with_rows("8x32", 3).shape == (3, 32)
    made = with_rows({"x": torch.zeros(4, 2), "mask": torch.zeros(5, 5), "scale": 2.0}, 7)
    assert (made["x"].shape, made["mask"].shape, made["scale"]) == ((7, 2), (5, 5), 2.0)
    with pytest.raises(OptionError, match="a batch with rows"):
        with_rows({"scale": 2.0}, 7)
    with pytest.raises(OptionError, match="needs batch="):
        search.largest_batch(on_meta(1), ranks=1, limit="1GiB")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "2", "--batch", "1x64", "--search", "batch"], "largest micro-batch: "),
        (["--batch", "1x64", "--search", "ranks"], "fewest ranks: "),
        (["--ranks", "2", "--search", "model", "--vary", "layers=1:50"], "Largest layers: "),
    ],
)
def test_searches_of_the_command(
    tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "searched_model.py"
    script.write_text(
        "import torch\n"
        "class Words(torch.nn.Module):\n"
        "    def __init__(self, layers):\n"
        "        super().__init__()\n"
        "        self.words = torch.nn.Embedding(100, 64)\n"
        "        self.blocks = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(layers))\n"
        "    def forward(self, ids):\n"
        "        x = self.words(ids)\n"
        "        for block in self.blocks:\n"
        "            x = block(x).relu()\n"
        "        return x\n"
        "def build(layers=4):\n"
        "    return Words(layers)\n"
    )
    given = ["plan", f"{script}:build", "--device", "600KiB", "--no-offload", *words]
    assert cli.main(given) == 0
    shown = capsys.readouterr().out
    assert said in shown
    assert "chosen" in shown
    assert cli.main([*given, "--json"]) == 0
    assert said in capsys.readouterr().err
    assert cli.main([*given[:5], "--ranks", "2", "--search", "model"]) == 1
    assert "needs --vary NAME=LOW:HIGH" in capsys.readouterr().err


def test_a_search_without_end_says_where_it_began(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask: dict[str, Any] = {"ranks": 1, "limit": "1MiB", "offload": None}
    said = (
        r"not even size 2, the smallest to try, fits: no plan fits 1\.0 MiB per device: the smallest \(stage"
    )
    with pytest.raises(zs.PlanError, match=said):
        search.largest_model(tower, low=2, **ask)
    with pytest.raises(zs.PlanError, match="not even a micro-batch of 1 row fits: no plan fits"):
        search.largest_batch(on_meta(2), batch=torch.zeros(4, 256), **ask)
    script = tmp_path / "towers.py"
    script.write_text(
        "import torch\n"
        "def build(layers):\n"
        "    return torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(layers)))\n"
    )
    given = ["plan", f"{script}:build", "--device", "1MiB", "--ranks", "1", "--no-offload"]
    assert cli.main([*given, "--search", "model", "--vary", "layers=3:9"]) == 1
    assert "not even layers=3, the smallest to try, fits: no plan fits 1.0 MiB" in capsys.readouterr().err
