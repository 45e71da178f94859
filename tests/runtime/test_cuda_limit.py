"""A limit on a GPU: set in torch's allocator, held by a run that keeps to its plan, and told of by one that
does not."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
MIB = 2**20


class Deep(nn.Module):
    """64 MiB of weights in fp32, and activations of 96 MiB a block at 8,192 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024)) for _ in range(8)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def started(limit: int, rows: int) -> tuple[zs.Run, Any]:
    """A planned run, and what takes a step of so many rows."""
    gc.collect()  # a run and its model refer to each other
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Deep()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    run = zs.shard(model, optimizer, limit=limit, batch=torch.empty(rows, 1024, device="meta"))

    def step(rows: int) -> None:
        model(torch.randn(rows, 1024, device="cuda")).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run, step


def needed(rows: int) -> int:
    with torch.device("meta"):
        model = Deep()
    return zs.plan(model, ranks=1, limit="64GiB", batch=torch.empty(rows, 1024, device="meta")).chosen.device


@pytest.mark.parametrize("share", [1.4, 1.0, 0.7])
def test_a_run_holds_its_limit(share: float) -> None:
    """At 70 % of what the plainest plan needs it is another plan, and it fits."""
    limit = int(needed(8192) * share) + 192 * MIB
    run, step = started(limit, 8192)
    try:
        for _ in range(4):
            step(8192)
        assert torch.cuda.max_memory_allocated() <= limit
        assert torch.cuda.max_memory_reserved() <= limit
        stats = run.stats()
        assert stats.peak["device"] <= 1.01 * stats.planned["device"]
        assert stats.peak["device"] >= 0.9 * (stats.planned["device"] - 192 * MIB)
    finally:
        run.close()
    del run, step
    assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(1.0)


def test_a_segment_that_was_divided_before_stays_so(caplog: pytest.LogCaptureFixture) -> None:
    """Such a shard cannot be given back to the driver alone: the run says so, trains, and keeps its limit."""
    limit = needed(8192) + 256 * MIB
    gc.collect()
    torch.cuda.empty_cache()  # or the shard is taken out of something smaller that tests before have left
    large = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    del large
    shard = torch.empty(12 * MIB, dtype=torch.uint8, device="cuda")  # out of the 64 MiB that are free
    with caplog.at_level(logging.INFO, "zeroshard"):
        run, step = started(limit, 8192)
    for _ in range(3):
        step(8192)
    assert [record for record in caplog.records if "goes on to divide" in record.getMessage()]
    assert torch.cuda.max_memory_reserved() <= limit
    run.close()
    del shard


def test_more_than_the_limit_is_told_with_what_was_planned(caplog: pytest.LogCaptureFixture) -> None:
    limit = needed(8192) + 192 * MIB
    run, step = started(limit, 8192)
    step(8192)
    with (
        caplog.at_level(logging.ERROR, "zeroshard"),
        pytest.raises(torch.OutOfMemoryError, match="out of memory"),
    ):
        step(16384)
    told = [record.getMessage() for record in caplog.records if "is out of memory" in record.getMessage()]
    assert len(told) == 1
    assert "activations" in told[0]
    assert "planned" in told[0]
    assert torch.cuda.max_memory_reserved() <= limit
    run.close()
