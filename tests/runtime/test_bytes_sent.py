"""Bytes sent: what a rank sends in a step is the closed form within 1 %, and the kernel sent as
many for its connections.

Ψ parameters of b bytes on the wire, N ranks; every byte has N - 1 of N ranks to go to or to come from:

| stage | a step sends (N-1)/N · b · …                                                    |
|-------|---------------------------------------------------------------------------------|
| 0     | Ψ (gradients to their owners) + Ψ (sums back)                                   |
| 1, 2  | Ψ (gradients to their owners) + Ψ (new parameters to all)                       |
| 3     | Ψ (gradients) + 2Ψ - kept (parameters for forward, and again for backward)      |

kept: the root, the last unit and as many before it as are gathered ahead (none over shared memory) stay
between forward and backward, so they travel once.
"""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from counting import sent_on_sockets

import zeroshard as zs
from zeroshard.testing import assert_bytes, ranks

pytestmark = pytest.mark.ranks
WIDTH, BLOCKS = 96, 12


def send(
    options: dict[str, Any], accumulate: int, no_sync: bool, steps: int, width: int = WIDTH
) -> dict[str, Any]:
    """Bytes sent in `steps` steps after a first one, by kind, and what the kernel sent for this
    process meanwhile.
    """
    model = models.Tower(width, BLOCKS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    run = zs.shard(model, optimizer, bucket_bytes="256KiB", **options)

    def step() -> None:
        for micro in range(accumulate):
            quiet = no_sync and micro < accumulate - 1
            with run.no_sync() if quiet else torch.enable_grad():
                model(torch.ones(2, width)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    dist.barrier()
    before, start = run.stats(), sent_on_sockets()
    for _ in range(steps):
        step()
    dist.barrier()
    spent, stop = run.stats() - before, sent_on_sockets()
    units = run.units
    ahead = options.get("prefetch", 1) if run.transport == "gloo" else 0
    last = list(units)[-1 - ahead :]
    run._runtime.transport.close()
    return {
        "units": units,
        "kept": units["(root)"] + sum(units[name] for name in last),
        "sent": spent.sent,
        "received": spent.received,
        "steps": spent.steps,
        "sockets": stop - start,
    }


def closed_form(
    told: dict[str, Any], stage: int, world: int, passes: int = 1, reductions: int = 1
) -> dict[str, float]:
    """Elements that a rank sends in a step, by kind. `passes` forward and backward passes, `reductions` of
    them reduced.
    """
    size, kept, share = sum(told["units"].values()), told["kept"], (world - 1) / world
    if stage == 0:
        return {"reduce": 2 * reductions * size * share}
    if stage < 3:
        return {"reduce": reductions * size * share, "publish": size * share}
    return {"reduce": reductions * size * share, "gather": passes * (2 * size - kept) * share}


CASES = [
    *[({"stage": stage}, world, 4, 1, False) for stage in (0, 1, 2, 3) for world in (2, 4)],
    *[({"stage": stage, "precision": "bf16"}, 2, 2, 1, False) for stage in (0, 1, 2, 3)],
    *[({"stage": stage}, 2, 4, 3, no_sync) for stage in (0, 1, 2, 3) for no_sync in (False, True)],
    ({"stage": 3, "recompute": True}, 2, 4, 1, False),
    ({"stage": 3, "transport": "gloo"}, 2, 4, 1, False),
    ({"stage": 3, "transport": "gloo", "prefetch": 3}, 4, 4, 1, False),
    ({"stage": 2, "transport": "gloo"}, 4, 4, 1, False),
]


@pytest.mark.parametrize(("options", "world", "itemsize", "accumulate", "no_sync"), CASES)
def test_closed_form(
    options: dict[str, Any], world: int, itemsize: int, accumulate: int, no_sync: bool
) -> None:
    steps = 2
    everyone = ranks(world).run(send, options, accumulate, no_sync, steps)
    form = closed_form(everyone[0], options["stage"], world, accumulate, 1 if no_sync else accumulate)
    for rank, told in enumerate(everyone):
        assert told["steps"] == steps
        assert set(told["sent"]) - {"collect", "broadcast"} == set(form)
        for kind, elements in form.items():
            assert_bytes(told["sent"][kind], steps * elements * itemsize, 0.01, f"{kind} sent by rank {rank}")
    for kind in form:
        sent, received = (sum(told[side][kind] for told in everyone) for side in ("sent", "received"))
        assert sent == received


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_kernel_sent_as_many_for_its_connections(stage: int) -> None:
    """The lengths that gloo announces, and small agreements, may cost 1 %."""
    everyone = ranks(2).run(send, {"stage": stage, "transport": "gloo"}, 1, False, 3, 512)
    for told in everyone:
        assert 1.0 <= told["sockets"] / sum(told["sent"].values()) <= 1.01
