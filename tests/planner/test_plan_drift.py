"""A run whose inputs are larger than those that it was planned with says so, on every device."""

from __future__ import annotations

import pytest
import torch
from plan_models import case
from torch import Tensor, nn

import zeroshard as zs


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "drifts" in record.getMessage()]


def test_a_larger_batch_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, batch = case("gpt")
    run = zs.shard(model, optimizer, limit="1GiB", batch=batch)
    larger = torch.cat([batch, batch])
    with torch.no_grad():  # keeps nothing for a backward
        model(larger)
    for given in (batch, batch[:1]):
        model(given).backward()
    assert not said(caplog)
    for _ in range(3):
        model(larger).backward()
        optimizer.step()
        optimizer.zero_grad()
    shapes = f"inputs are int64 {tuple(larger.shape)}, planned were int64 {tuple(batch.shape)}"
    assert said(caplog) == [f"rank 0 drifts over its plan: {shapes}, so that activations take more too"]
    run.close()


class Pair(nn.Linear):
    def forward(self, x: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        return super().forward(x) * scale + offset


def test_inputs_by_name_and_scalars_count(caplog: pytest.LogCaptureFixture) -> None:
    model = Pair(8, 8)
    batch = {"x": torch.ones(4, 8), "scale": torch.ones(()), "offset": torch.zeros(4, 8)}
    plan = zs.plan(model, ranks=1, limit="1GiB", batch=batch, precision="bf16")
    run = zs.shard(model, torch.optim.AdamW(model.parameters(), fused=True), plan=plan)
    model(**batch).float().sum().backward()
    model(batch["x"][:1], scale=batch["scale"], offset=batch["offset"]).float().sum().backward()
    assert not said(caplog)
    model(torch.ones(6, 8), batch["scale"], torch.zeros(6, 8)).float().sum().backward()
    assert "inputs are float32 (6, 8), float32 (), float32 (6, 8), planned were" in said(caplog)[0]
    run.close()


def test_without_a_batch_there_is_nothing_to_compare_with(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(8, 8)
    run = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), limit="1GiB")
    model(torch.ones(1000, 8)).sum().backward()
    assert not said(caplog)
    run.close()
