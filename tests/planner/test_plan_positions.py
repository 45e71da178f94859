"""A micro-batch that is longer than the model's table of positions is refused, as the model itself would."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from zeroshard import cli

ROWS = 64


def plain(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1], device=ids.device)


def spread(ids: Tensor) -> Tensor:
    return torch.arange(0, ids.shape[1], 1, dtype=torch.int32).long().unsqueeze(0).expand(ids.shape[0], -1)


def offset(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1]) + 2


def masked(ids: Tensor) -> Tensor:
    """As RoBERTa counts the tokens that are no padding."""
    mask = ids.ne(1).int()
    return (torch.cumsum(mask, 1).type_as(mask) * mask).long() + 1


def clamped(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1]).clamp(max=ROWS - 1)


def clamped_in_place(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1]).clamp_(max=ROWS - 1)


def shortened(ids: Tensor) -> Tensor:
    return torch.arange(4 * ROWS)[: ids.shape[1]]


class Positioned(nn.Module):
    def __init__(self, way: object, looks_up: str) -> None:
        super().__init__()
        self.way, self.looks_up = way, looks_up
        self.words, self.places = nn.Embedding(100, 8), nn.Embedding(ROWS, 8)
        self.head = nn.Linear(8, 100)

    def forward(self, ids: Tensor) -> Tensor:
        at = self.way(ids)  # type: ignore[operator]
        weight = self.places.weight
        found = {
            "call": lambda: self.places(at),
            "index": lambda: weight[at],
            "select": lambda: weight.index_select(0, at.reshape(-1)),
        }
        return self.head(self.words(ids) + found[self.looks_up]())  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("way", "most"),
    [
        (plain, ROWS),
        (spread, ROWS),
        (offset, ROWS - 2),
        (masked, ROWS - 2),
        (clamped, None),
        (clamped_in_place, None),
        (shortened, None),
    ],
)
def test_a_batch_is_as_long_as_the_table(way: object, most: int | None) -> None:
    model, ids = Positioned(way, "call"), torch.full((1, most or ROWS), 5)
    model(ids)
    zs.plan(model, ranks=2, limit="1GiB", batch=ids)
    longer = torch.full((1, most + 1 if most else ROWS), 5)
    if most is None:
        zs.plan(model, ranks=2, limit="1GiB", batch=longer)
        return
    with pytest.raises(IndexError):
        model(longer)
    said = rf"the micro-batch is too long .* position {ROWS} in `places\.weight`, which has {ROWS} rows"
    with pytest.raises(zs.PlanError, match=said):
        zs.plan(model, ranks=2, limit="1GiB", batch=longer)


@pytest.mark.parametrize("looks_up", ["index", "select"])
def test_by_other_names(looks_up: str) -> None:
    model = Positioned(plain, looks_up)
    zs.plan(model, ranks=2, limit="1GiB", batch=f"1x{ROWS}")
    with pytest.raises(zs.PlanError, match=r"it looks up position 127 in `places\.weight`"):
        zs.plan(model, ranks=2, limit="1GiB", batch="1x128")


def test_a_config_of_gpt2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 50}), encoding="utf-8")
    words = ["plan", str(tmp_path), "--ranks", "2", "--device", "H100", "--json", "--batch"]
    assert cli.main([*words, "1x1024"]) == 0
    assert cli.main([*words, "1x2048"]) == 1
    assert "looks up position 2,047 in `transformer.wpe.weight`" in capsys.readouterr().err
