"""Ranks grouped by node: shared memory inside, gloo between. Two nodes of two ranks are simulated on this
host by `ranks_per_node=2`; only what crosses between the two goes through gloo.

Ψ parameters, L ranks on each of K nodes; what a rank sends to other nodes in a step, in units of (K-1)/K · Ψ:

| | gradients | parameters |
|---|---|---|
| flat stage 3     | 1   | 2 - kept (forward, and again for backward) |
| with a node cache | 1/L | 1/L |

kept: the root and the last two units stay between forward and backward.
"""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zeroshard as zs
from zeroshard.comm.topology import by_count, by_host
from zeroshard.layout.memory import MemoryModel
from zeroshard.planner.signatures import blocks_of, rules_of
from zeroshard.testing import assert_bytes, assert_same_bits, ranks

pytestmark = pytest.mark.ranks
WORLD, EACH, STEPS = 4, 2, 3
CACHED = {"stage": 3, "node_cache": True, "ranks_per_node": EACH}
FLAT = {"stage": 3, "transport": "gloo", "ranks_per_node": EACH}


def trained(options: dict[str, Any]) -> dict[str, Tensor]:
    """The weights after a few steps on batches of each rank's own."""
    model = models.build("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    run = zs.shard(model, optimizer, bucket_bytes=1024, **options)
    for step in range(STEPS):
        model(batch(step, run.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = models.whole_weights(run)
    run.close()
    return weights


def batch(step: int, rank: int) -> Tensor:
    return models.MLP.batch(3, seed=100 * rank + step)


def by_hand() -> dict[str, Tensor]:
    """The gradients of the ranks of a node first, then those of the nodes."""
    model = models.build("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(STEPS):
        grads = []
        for rank in range(WORLD):
            model.zero_grad()
            model(batch(step, rank)).backward()
            grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        nodes = [[a + b for a, b in zip(*grads[at : at + EACH], strict=True)] for at in (0, EACH)]
        for parameter, first, second in zip(model.parameters(), *nodes, strict=True):
            parameter.grad = (first + second) * (1.0 / WORLD)
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


NODES = {"transport": "nodes", "ranks_per_node": EACH}


@pytest.mark.parametrize("options", [CACHED, *({"stage": stage, **NODES} for stage in (0, 1, 2))], ids=str)
def test_sums_are_those_of_nodes(options: dict[str, Any]) -> None:
    """To the bit, so two runs are equal and all stages are: (g0 + g1) + (g2 + g3). Flat sums are
    ((g0 + g1) + g2) + g3, and differ in rounding alone."""
    for weights in ranks(WORLD).run(trained, options):
        assert_same_bits(weights, by_hand())


@pytest.mark.parametrize(
    ("more", "tolerance"),
    [
        ({"precision": "bf16", "prefetch": 2}, 0.02),
        ({"sync": zs.Delayed(), "recompute": True}, 1e-5),
        ({"offload": zs.Offload(), "clip_norm": 1.0, "split": "whole"}, 1e-5),
    ],
    ids=str,
)
def test_it_goes_with_other_options(more: dict[str, Any], tolerance: float) -> None:
    """16-bit sums are rounded once more, where they leave the node."""
    flat = ranks(WORLD).run(trained, {**FLAT, **more})[0]
    first, *others = ranks(WORLD).run(trained, {**CACHED, **more})
    for name, value in flat.items():
        torch.testing.assert_close(first[name], value, rtol=tolerance, atol=tolerance)
    for weights in others:
        assert_same_bits(weights, first)


# ---------------------------------------------------------------------- bytes


def crossing(
    options: dict[str, Any], accumulate: int, quiet: bool, width: int, blocks: int
) -> dict[str, Any]:
    """What two steps sent, after a first one."""
    model = models.Tower(width, blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    run = zs.shard(model, optimizer, bucket_bytes="256KiB", **options)

    def step() -> None:
        for micro in range(accumulate):
            apart = quiet and micro < accumulate - 1
            with run.no_sync() if apart else torch.enable_grad():
                model(torch.ones(2, width)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    dist.barrier()
    before = run.stats()
    step()
    step()
    spent, units = run.stats() - before, run.units
    run._runtime.transport.close()
    kept = units["(root)"] + sum([*units.values()][-2:])
    return {"spent": spent, "size": sum(units.values()), "kept": kept}


def across(told: dict[str, Any]) -> float:
    """Bytes to other nodes that a step sends."""
    return sum(told["spent"].between.values()) / 2


@pytest.fixture(scope="module")
def flat() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ranks(WORLD).run(crossing, FLAT, 1, False, 96, 12)
    return found


def test_a_node_cache_sends_what_the_table_says(flat: list[dict[str, Any]]) -> None:
    near = ranks(WORLD).run(crossing, CACHED, 1, False, 96, 12)
    for told, cached in zip(flat, near, strict=True):
        half = 4 * told["size"] / 2  # (K-1)/K of the fp32 bytes
        assert_bytes(across(told), half * (3 - told["kept"] / told["size"]), 0.01, "flat")
        assert_bytes(across(cached), half * 2 / EACH, 0.01, "with a node cache")
        spent = cached["spent"]
        assert_bytes(spent.between["reduce"] / 2, half / EACH, 0.01, "gradients")
        assert spent.inside["reduce"] == spent.sent["reduce"] - spent.between["reduce"] > 0


@pytest.mark.parametrize(
    ("codecs", "times"), [({"gather": zs.Int8()}, 4.5), ({"gather": zs.Int8(), "compress": zs.Int8()}, 7.4)]
)
def test_codecs_make_what_crosses_smaller(
    flat: list[dict[str, Any]], codecs: dict[str, Any], times: float
) -> None:
    near = ranks(WORLD).run(crossing, {**CACHED, **codecs}, 1, False, 96, 12)
    assert sum(map(across, flat)) > times * sum(map(across, near))


def test_further_micro_batches_cross_nothing() -> None:
    """They gather inside the node: 1 + 2 · 2 against 2/L at two ranks a node."""
    flat = ranks(WORLD).run(crossing, FLAT, 2, True, 96, 12)
    near = ranks(WORLD).run(crossing, CACHED, 2, True, 96, 12)
    assert sum(map(across, flat)) > 4.5 * sum(map(across, near))


def held(options: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """What a run holds of parameters, and what the memory model says."""
    model = models.build("gpt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    units, rules = blocks_of(model, [optimizer], "auto"), rules_of([optimizer])
    run = zs.shard(model, optimizer, **options)
    model(models.GPT.batch(3, seed=run.rank)).backward()
    optimizer.step()
    live = dict(run.stats().live)
    made = MemoryModel(units, run.options, run.size, rules, run.rank).held
    run.close()
    return live, {kind: getattr(made, kind) for kind in live}


@pytest.mark.parametrize("more", [{}, {"precision": "bf16", "split": "whole"}], ids=str)
def test_what_it_keeps_is_counted(more: dict[str, Any]) -> None:
    cached, without = (ranks(WORLD).run(held, {**options, **more}) for options in (CACHED, FLAT))
    for (live, made), (flat, _) in zip(cached, without, strict=True):
        assert live == made
        assert live["parameters"] > 1.5 * flat["parameters"], "K times as much: K nodes share them"


# ---------------------------------------------------------------------- who is where


def test_topologies() -> None:
    assert by_host(["b", "b", "a", "a"]).ranks_per_node == 2
    assert by_host(["a", "b", "a", "b"]).ranks_per_node is None, "not one after another"
    assert by_host(["a", "a", "b"]).ranks_per_node is None, "not as many"
    assert "one node" in str(by_count(4, 4).why_not_two_levels())
    assert "of its own" in str(by_count(4, 1).why_not_two_levels())
    with pytest.raises(zs.OptionError, match="does not divide the 4 ranks"):
        by_count(4, 3)
    with pytest.raises(zs.OptionError, match="ranks_per_node=8 and only 4 ranks: drop it, or start as many"):
        by_count(4, 8)


@pytest.mark.parametrize("options", [{}, {"limit": "1GiB"}])
def test_one_rank_is_no_node_of_several(options: dict[str, Any]) -> None:
    assert "ranks_per_node=2 and only 1 rank: drop it, or start" in refused({"ranks_per_node": 2, **options})
    model = models.build("mlp")
    zs.shard(model, torch.optim.SGD(model.parameters()), ranks_per_node=1, **options).close()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stage": 2, "node_cache": True}, "this is stage 2"),
        ({"stage": 3, "node_cache": True, "transport": "gloo"}, 'needs transport="nodes"'),
        ({"stage": 3, "transport": "nodes"}, "pass node_cache=True"),
        ({"ranks_per_node": 0}, "must be a number of ranks"),
    ],
)
def test_options_without_effect_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(zs.OptionError, match=text):
        zs.Options(**options)


def refused(options: dict[str, Any]) -> str:
    model = models.build("mlp")
    with pytest.raises(zs.OptionError) as caught:
        zs.shard(model, torch.optim.SGD(model.parameters()), **options)
    return str(caught.value)


def test_one_node_has_nothing_to_keep() -> None:
    for told in ranks(2).run(refused, {"stage": 3, "node_cache": True}):
        assert "joins nodes of several ranks, and all 2 ranks are on one node: drop it, or to try it" in told
        assert "ranks_per_node=" in told


def failing() -> None:
    """One rank raises between two steps; the others wait for it."""
    model = models.build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zs.shard(model, optimizer, **CACHED)
    for step in range(3):
        if step == 2 and dist.get_rank() == 3:
            raise ValueError("out of data")
        model(models.MLP.batch(3, seed=step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_failure_is_known_on_every_node() -> None:
    outcomes = ranks(WORLD).attempt(failing)
    assert [outcome.kind for outcome in outcomes] == ["RankError"] * 3 + ["ValueError"]
    for outcome in outcomes[:3]:
        assert "rank 3 failed: ValueError: out of data" in outcome.message
