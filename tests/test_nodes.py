"""Ranks grouped by node: shared memory inside, gloo between. Two nodes of two ranks are simulated on this
host by `ranks_per_node=2`; only what crosses between the two goes through gloo."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from torch import Tensor

import zeroshard as zs
from zeroshard.comm.topology import Topology, by_count, by_host
from zeroshard.testing import assert_bytes, assert_same_bits, ranks

pytestmark = pytest.mark.ranks
WORLD, EACH, STEPS = 4, 2, 3
CACHED = {"stage": 3, "node_cache": True, "ranks_per_node": EACH}


def trained(options: dict[str, Any], accumulate: int = 1) -> dict[str, Any]:
    """Weights, losses and statistics after a few steps on batches of each rank's own."""
    model = models.build("gpt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    run = zs.shard(model, optimizer, bucket_bytes=4096, **options)
    losses = []
    for step in range(STEPS):
        for micro in range(accumulate):
            loss = model(models.GPT.batch(3, seed=1000 * run.rank + 10 * step + micro))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    stats = run.stats()
    with run.gathered() as whole:
        weights = {name: p.detach().clone() for name, p in whole.items()}
    run.close()
    return {"weights": weights, "losses": losses, "stats": stats.as_dict(), "transport": run.transport}


def weights(options: dict[str, Any]) -> dict[str, Tensor]:
    found = ranks(WORLD).run(trained, options)
    for told in found[1:]:
        assert_same_bits(told["weights"], found[0]["weights"])
    result: dict[str, Tensor] = found[0]["weights"]
    return result


@pytest.fixture(scope="module")
def cached() -> dict[str, Tensor]:
    return weights(CACHED)


def test_the_same_bits_twice_and_at_every_stage(cached: dict[str, Tensor]) -> None:
    assert_same_bits(weights(CACHED), cached)
    for stage in (0, 1, 2):
        assert_same_bits(weights({"stage": stage, "transport": "nodes", "ranks_per_node": EACH}), cached)


def test_flat_sums_differ_in_their_order_alone(cached: dict[str, Tensor]) -> None:
    """Node by node, ((g0 + g1) + (g2 + g3)), against ((g0 + g1) + g2) + g3."""
    flat = weights({"stage": 3, "transport": "gloo"})
    assert any(not torch.equal(cached[name], flat[name]) for name in flat)
    for name, value in flat.items():
        torch.testing.assert_close(cached[name], value, rtol=1e-3, atol=1e-5)
