"""What a run tells of itself: steps, bytes held by kind, and how they print."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch

import zeroshard as zs
from zeroshard.testing import ranks

TOLD = zs.Stats(
    steps=3,
    sent={"reduce": 3 * 2**20, "gather": 0, "publish": 2**20},
    received={"reduce": 3 * 2**20, "gather": 0, "publish": 2**20},
    waited={"reduce": 0.0125, "fence": 2.0},
    live={"parameters": 4096, "gradients": 2048, "state": 8192, "gathered": 0, "host": 0},
    peak={"parameters": 4096, "gradients": 2048, "state": 8192, "gathered": 1024, "host": 0},
    data_parallel=32768,
    sync="EveryStep()",
    switches=("step 2: …",),
)


def test_as_tables() -> None:
    assert (
        str(TOLD)
        == """\
3 steps, EveryStep()
            sent  received   waited
reduce   3.0 MiB   3.0 MiB  0.013 s
publish  1.0 MiB   1.0 MiB
fence                       2.000 s
waits without bytes: fence: until peers have read rows that change next
               live     peak
parameters  4.0 KiB  4.0 KiB
gradients   2.0 KiB  2.0 KiB
state       8.0 KiB  8.0 KiB
gathered             1.0 KiB
parameters, gradients, state: 14.0 KiB; unsharded 32.0 KiB
step 2: …"""
    )


def test_with_what_was_planned_and_without_peers() -> None:
    told = str(
        zs.Stats(0, live={"state": 1024}, peak={"state": 2048}, planned={"state": 4096, "device": 8192})
    )
    assert told.splitlines()[:4] == [
        "0 steps",
        "nothing has travelled",
        "           live     peak  planned",
        "state   1.0 KiB  2.0 KiB  4.0 KiB",
    ]


def by_two_optimizers(stage: int) -> tuple[list[int], list[int]]:
    """Steps told after each update of two optimizers, once both for one backward and then by turns."""
    model = models.Tower(8, 2)
    halves = list(model.parameters())[::2], list(model.parameters())[1::2]
    first, second = (torch.optim.AdamW(half) for half in halves)
    run, told = zs.shard(model, [first, second], stage=stage), ([0], [0])
    for _ in range(2):
        model(torch.ones(2, 8)).backward()
        for optimizer in (first, second):
            optimizer.step()
            told[0].append(run.stats().steps)
    told[1][0] = run.stats().steps
    for optimizer in (first, second, first, first):  # the last without a backward of its own
        if len(told[1]) < 4:
            model(torch.ones(2, 8)).backward()
        optimizer.step()
        told[1].append(run.stats().steps)
    run.close()
    return told


@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_is_what_all_optimizers_make_of_one_backward(stage: int) -> None:
    together, by_turns = by_two_optimizers(stage)
    assert together == [0, 1, 1, 2, 2]
    assert by_turns == [2, 3, 4, 5, 6]


def held(precision: str | None) -> dict[str, Any]:
    model = models.Tower(16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    run = zs.shard(model, optimizer, stage=3, precision=precision)
    begun = run.stats()
    model(torch.ones(2, 16)).backward()
    optimizer.step()
    trained = run.stats()
    run._runtime.pool.drop()
    run.reset_peak()
    fresh = run.stats()
    with torch.no_grad():
        model(torch.ones(2, 16))
    evaluated = run.stats()
    result = {
        "begun": begun,
        "trained": trained,
        "fresh": fresh,
        "evaluated": evaluated,
        "count": sum(run.units.values()),
    }
    run._runtime.transport.close()
    return result


@pytest.mark.ranks
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_peak_can_begin_anew(precision: str | None) -> None:
    for told in ranks(2).run(held, precision):
        trained, fresh, evaluated = told["trained"].peak, told["fresh"].peak, told["evaluated"].peak
        assert trained["gathered"] > fresh["gathered"] == 0
        assert 0 < evaluated["gathered"] <= trained["gathered"]
        assert fresh["parameters"] == trained["parameters"] > 0
        # Both precisions take 16 bytes a parameter without sharding, also before there is any state.
        assert told["begun"].data_parallel == told["trained"].data_parallel
        assert told["trained"].data_parallel == pytest.approx(16 * told["count"], rel=0.01)
