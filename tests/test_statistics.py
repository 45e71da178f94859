"""Norms that keep running statistics: recomputed units add to them once a step, as in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.testing import ranks


class Block(nn.Module):
    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.batch = nn.BatchNorm1d(4, momentum=momentum)
        self.each = nn.InstanceNorm1d(4, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.each(self.batch(self.conv(x))))


def trained(momentum: float | None, stage: int | None, recompute: bool) -> tuple[list[Tensor], list[float]]:
    torch.manual_seed(2)
    model = nn.Sequential(*(Block(momentum) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = None
    if stage is not None:
        run = zs.shard(model, optimizer, stage=stage, recompute=recompute)
    losses = []
    for step in range(4):
        x = torch.randn(3, 4, 7, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 2:
            model.eval()
            losses.append(model(x).square().mean().item())
            model.train()
    buffers = [buffer.clone() for buffer in model.buffers()]
    if run is not None:
        run.close()
    return buffers, losses


@pytest.mark.parametrize("momentum", [0.1, None])
def test_statistics_are_counted_once(momentum: float | None) -> None:
    expected, losses = trained(momentum, None, recompute=False)
    found, same = trained(momentum, 0, recompute=True)
    assert same == losses
    assert all(map(torch.equal, found, expected))


@pytest.mark.ranks
def test_statistics_are_counted_once_on_ranks() -> None:
    """Ranks with the same data: what one has is what all have."""
    expected, losses = trained(0.1, None, recompute=False)
    for found, same in ranks(2).run(trained, 0.1, 3, True):
        assert same == pytest.approx(losses, rel=1e-6)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
