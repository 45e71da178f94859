"""A codec of two exchanges that the library does not know: rows, chosen by what all ranks have of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.testing import ranks

STEPS, RATE = 4, 0.1


@dataclass(frozen=True)
class HeavyRows(zs.MeanCodec):
    """The `count` rows with the largest norms: first the squares of all norms travel, then these rows. What
    was not sent is kept."""

    count: int = 2
    numerics = "approximate"
    feedback = True
    draws = False

    def lengths(self, shape: Sequence[int]) -> tuple[int, ...]:
        return shape[0], self.count * torch.Size(shape[1:]).numel()

    def state(self, shape: Sequence[int], device: torch.device | str = "cpu") -> dict[str, Tensor]:
        return {"residual": torch.zeros(torch.Size(shape).numel(), device=device)}

    def state_bytes(self, shape: Sequence[int]) -> int:
        return 4 * torch.Size(shape).numel()

    def chosen(self, sent: Sequence[Tensor]) -> Tensor:
        return sent[0].topk(self.count).indices

    def send(self, number: int, matrix: Tensor, sent: Sequence[Tensor], state: dict[str, Tensor]) -> None:
        if number == 0:
            matrix.add_(state["residual"].view_as(matrix))
            sent[0].copy_(matrix.square().sum(1))
        else:
            sent[1].copy_(matrix[self.chosen(sent)].flatten())
            matrix[self.chosen(sent)] = 0.0
            state["residual"].copy_(matrix.flatten())

    def expand(self, sent: Sequence[Tensor], start: int, stop: int, out: Tensor) -> None:
        whole = torch.zeros(len(sent[0]), out.shape[1], device=out.device)
        whole[self.chosen(sent)] = sent[1].view(self.count, -1)
        out.copy_(whole[start:stop])


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(7, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def by_hand(world: int) -> list[Tensor]:
    """The same in one process: each rank's gradients, chosen and averaged."""
    net = model()
    residuals = [{n: torch.zeros_like(p) for n, p in net.named_parameters()} for _ in range(world)]
    for step in range(STEPS):
        grads = []
        for rank in range(world):
            net.zero_grad()
            net(batch(step, rank)).square().mean().backward()
            grads.append({n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None})
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                mean = sum(grad[name] for grad in grads) / world
                if parameter.dim() > 1:
                    waiting = [grad[name] + kept[name] for grad, kept in zip(grads, residuals, strict=True)]
                    heavy = torch.stack([w.square().sum(1) for w in waiting]).mean(0).topk(2).indices
                    mean = torch.zeros_like(parameter)
                    mean[heavy] = torch.stack([w[heavy] for w in waiting]).mean(0)
                    for w, kept in zip(waiting, residuals, strict=True):
                        w[heavy] = 0.0
                        kept[name] = w
                parameter.sub_(mean, alpha=RATE)
    return [p.detach().clone() for p in net.parameters()]


def trained(stage: int) -> tuple[list[Tensor], int, int]:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    run = zs.shard(net, optimizer, stage=stage, compress=HeavyRows())
    for step in range(STEPS):
        net(batch(step, run.rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sent = run.stats().sent["reduce"]
    held = run.stats().live["state"]
    run.close()
    return [p.detach().clone() for p in net.parameters()], sent, held


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_codec_of_two_exchanges_trains_as_by_hand(stage: int) -> None:
    want = by_hand(2)
    for weights, _, held in ranks(2).run(trained, stage):
        torch.testing.assert_close(weights, want, rtol=1e-5, atol=1e-6)
        assert held == 4 * (9 * 6 + 5 * 9)  # what was not sent, of both matrices


def test_it_is_planned_as_any_codec() -> None:
    net = model()
    sgd = torch.optim.SGD(net.parameters(), lr=RATE)
    dense, coded = (
        zs.plan(net, sgd, ranks=2, limit="1GiB", stage=2, compress=c) for c in (None, HeavyRows())
    )
    assert coded.chosen.lasting["state"] - dense.chosen.lasting["state"] == 4 * (9 * 6 + 5 * 9)
