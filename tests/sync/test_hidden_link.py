"""How much of a slow link training waits for, in simulated time: blocks and the link take as long as they are
told to, on a clock of each rank, so that the load of the machine changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.comm import Transport, Work
from zeroshard.testing import ranks

pytestmark = pytest.mark.ranks
WORLD, BLOCKS, WIDTH, STEPS = 2, 8, 64, 6
FORWARD = 15.0  # of a block; its backward takes twice as long
COMPUTED = 3 * BLOCKS * FORWARD
BUCKET = 4 * WIDTH * (WIDTH + 1)


class Clock:
    """Simulated time of one rank."""

    now = waited = 0.0

    def wait_until(self, moment: float) -> None:
        self.waited += max(moment - self.now, 0.0)
        self.now = max(moment, self.now)


class Carried:
    """An operation that is over when the link has carried it."""

    def __init__(self, work: Work, clock: Clock, over: float) -> None:
        self.work, self.clock, self.over = work, clock, over

    def poll(self) -> bool:
        if self.clock.now < self.over:
            return False
        self.work.wait()  # peers are at the same moment of their clocks
        return True

    def wait(self) -> None:
        self.clock.wait_until(self.over)
        self.work.wait()


def slow_down(transport: Transport, clock: Clock, rate: float) -> None:
    """One message after another, `rate` bytes in a unit of time."""
    free = 0.0

    def slow(verb: str) -> Any:
        plain = getattr(transport, verb)

        def call(*args: Any) -> Work:
            nonlocal free
            before = sum(transport.counters.sent.values())
            work = plain(*args)
            free = max(free, clock.now) + (sum(transport.counters.sent.values()) - before) / rate
            return Carried(work, clock, free)

        return call

    for verb in ("reduce", "gather", "all_to_all"):
        setattr(transport, verb, slow(verb))


def blocks_on(clock: Clock) -> nn.Module:
    class Busy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            clock.now += FORWARD
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            clock.now += 2 * FORWARD
            return grads[0]

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            busy: Tensor = Busy.apply(self.matrix(x))  # type: ignore[no-untyped-call]
            return x + busy.tanh()

    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def waited(options: dict[str, Any], share: float) -> float:
    """Of a step's computation, where what a rank sends takes `share` of it on the link."""
    clock = Clock()
    model = blocks_on(clock)
    optimizer = torch.optim.AdamW(model.parameters())
    run = zs.shard(model, optimizer, bucket_bytes=BUCKET, transport="gloo", **options)
    sent = 4 * sum(p.numel() for p in model.parameters()) * 2 * (WORLD - 1) / WORLD
    slow_down(run._runtime.transport, clock, sent / (share * COMPUTED))
    batch = torch.randn(1, WIDTH)
    for step in range(2 * STEPS):
        if step == STEPS:
            clock.waited = 0.0
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = clock.waited / (STEPS * COMPUTED)
    run.close()
    return found


@pytest.mark.parametrize(
    ("options", "share", "least", "most"),
    [
        ({"stage": 0}, 1.0, 0.41, 0.46),
        ({"stage": 0, "sync": zs.Delayed()}, 1.0, 0.0, 0.02),
        ({"stage": 0, "sync": zs.Delayed()}, 1.2, 0.15, 0.22),
        ({"stage": 2, "sync": zs.Delayed()}, 1.0, 0.15, 0.25),
    ],
    ids=str,
)
def test_what_is_waited_for(options: dict[str, Any], share: float, least: float, most: float) -> None:
    """Without delay a link is idle until the first bucket is full, for 5/12 of the computation, and busy from
    then on. A delayed gradient hides a link that is busy for the whole step, where only gradients travel. New
    parameters (stage 2) have a third of the step, and would take half of it."""
    for found in ranks(WORLD).run(waited, options, share):
        assert least <= found <= most
