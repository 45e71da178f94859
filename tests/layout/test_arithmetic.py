"""The page on the arithmetic of the stages has the numbers that training and the layout give."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.layout.memory import closed_form
from zeroshard.layout.sharding import ShardSpec
from zeroshard.testing import ranks

PAGE = (Path(__file__).parents[2] / "docs" / "arithmetic.md").read_text(encoding="utf-8")
SAMPLES = (((1.0, 0.0, 1.0), 2.0), ((0.0, 1.0, 1.0), 1.0))


def table(beginning: str) -> dict[str, list[str]]:
    """The table whose head begins so: its rows by their first cell."""
    lines = PAGE[PAGE.index(f"| {beginning}") :].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in rows}


def numbers(step: int, row: str) -> list[float]:
    return [float(cell) for cell in table(f"step {step}")[row][:3]]


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.w @ x


def train(stage: int) -> list[dict[str, list[float]]]:
    """Two steps: this rank's own gradient, and the whole average, momentum and parameters, of each."""
    model, found = Three(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = zs.shard(model, optimizer, stage=stage)
    x, wanted = torch.tensor(SAMPLES[run.rank][0]), SAMPLES[run.rank][1]
    for _ in range(2):
        off = model(x) - wanted
        (0.5 * off**2).backward()
        [p] = model.parameters()
        assert p.grad is not None
        average = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        moments = run.full_optimizer_state_dict(rank=None)["state"][0]["momentum_buffer"]
        weights = run.full_state_dict(rank=None)["w"]
        own = off.detach() * x
        record = {"own": own, "average": average, "momentum": moments, "parameters": weights}
        found.append({name: value.tolist() for name, value in record.items()})
    run.close()
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("stage", range(4))
def test_three_parameters_train_as_the_page_says(stage: int) -> None:
    for rank, found in enumerate(ranks(2).run(train, stage)):
        for step, got in enumerate(found, start=1):
            shown = {name: numbers(step, name) for name in ("average", "momentum", "parameters")}
            shown["own"] = numbers(step, f"gradient of rank {rank}")
            assert got == {name: pytest.approx(values, rel=1e-6) for name, values in shown.items()}


def test_a_rank_holds_as_many_numbers_as_the_page_says() -> None:
    spec = ShardSpec("w", (3,), 2)
    for stage, row in table("stage | rank 0").items():
        for rank, cell in enumerate(row):
            divided = [int(stage) >= 3, int(stage) >= 2, int(stage) >= 1]
            held = [spec.held(rank) if shared else 3 for shared in divided]
            assert cell == " + ".join(map(str, held))


def test_the_bytes_of_a_large_model_are_those_of_the_closed_form() -> None:
    rows = table("stage | divided")
    assert rows.keys() == {"0", "1", "2", "3"}
    for stage, row in rows.items():
        [shown] = re.findall(r"[\d.]+", row[-1])
        assert float(shown) == round(closed_form(7_500_000_000, 64, int(stage)) / 1e9, 1)
