"""Units that are recomputed: norms add to their statistics once a step, as in plain PyTorch, and a forward
that writes its inputs is told."""

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


class Writes(nn.Module):
    """Twice as much of what it was given, in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x.mul_(2)))


def test_a_forward_that_writes_its_inputs_is_told() -> None:
    """When it has written, not in backward."""
    model = nn.Sequential(nn.Linear(8, 8), *(Writes() for _ in range(3)))
    zs.shard(model, torch.optim.SGD(model.parameters()), units=["1", "2", "3"], recompute=True)
    with torch.no_grad():
        model(torch.ones(2, 8))  # which is not recomputed
    with pytest.raises(zs.StateError, match=r"the forward of 1 writes a tensor that it was given, in place"):
        model(torch.ones(2, 8))


def test_the_planner_recomputes_no_such_unit() -> None:
    model = nn.Sequential(nn.Linear(8, 8), *(Writes() for _ in range(6)))
    batch = torch.ones(64, 8)
    plan = zs.plan(model, ranks=1, limit="1GiB", batch=batch)
    assert not any(one.recompute for one in plan.candidates)
    with pytest.raises(zs.PlanError) as refused:
        zs.plan(model, ranks=1, limit="16KiB", batch=batch)
    assert "recompute" not in str(refused.value)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_graph_that_is_gone_through_twice(stage: int) -> None:
    """It is recomputed twice, and statistics are counted once all the same."""
    found = []
    for recompute in (None, False, True):
        torch.manual_seed(2)
        model = nn.Sequential(*(Block(0.1) for _ in range(3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        run = None if recompute is None else zs.shard(model, optimizer, stage=stage, recompute=recompute)
        loss = model(torch.randn(3, 4, 7, generator=torch.Generator().manual_seed(0))).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        if run is not None:
            run.close()
        found.append([tensor.detach().clone() for tensor in model.state_dict().values()])
    for one, two, three in zip(*found, strict=True):
        torch.testing.assert_close(two, one)
        torch.testing.assert_close(three, two)
