"""What plans foresee beside what others have published and what is known of kernels, rings and state."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from test_pricing import problem

import zeroshard as zs
from zeroshard.machine import GPUS, machine
from zeroshard.planner.answer import problem_of
from zeroshard.planner.candidates import PARTLY_FILLED
from zeroshard.planner.operations import OperationCost, grouped
from zeroshard.planner.pricing import _latency
from zeroshard.planner.signatures import rules_of

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks" / "plans")


def test_published_runs_are_foreseen_within_five_per_cent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    published = importlib.import_module("plan_published")
    rows = [published.row(ranks, told) for ranks, told in published.PUBLISHED.items()]
    assert [row["gpus"] for row in rows] == [8, 128]
    assert [row["error"] for row in rows] == pytest.approx([0, 0], abs=0.05)


def test_adafactor_keeps_means_of_rows_and_columns() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 32))
    optimizer = torch.optim.Adafactor(model.parameters())
    (rule,) = rules_of([optimizer])
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    for p, state in optimizer.state.items():
        kept = sum(v.numel() for v in state.values() if isinstance(v, torch.Tensor) and v.dim() > 0)
        assert rule.kept(tuple(p.shape), p.numel()) == kept
    plan = zs.plan(model, optimizer, ranks=1, limit="1GiB", stage=0, offload=None)
    assert plan.chosen.lasting["state"] == 4 * (64 + 128 + 128 + 128 + 32 + 32)


def test_adafactor_s_state_of_a_run_is_what_was_planned() -> None:
    """Of means of rows and columns: 16 KiB, where the parameter has 16 MiB."""
    model = torch.nn.Linear(2048, 2048, bias=False)
    optimizer = torch.optim.Adafactor(model.parameters())
    run = zs.shard(model, optimizer, limit="256MiB", batch=torch.zeros(2, 2048), offload=None)
    for _ in range(2):
        model(torch.ones(2, 2048)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = run.stats()
    assert stats.live["state"] == stats.planned["state"] == 4 * 2 * 2048
    run.close()


def test_products_of_experts_are_counted() -> None:
    tokens, weights = torch.zeros(24, 16, dtype=torch.bfloat16), torch.zeros(4, 16, 32, dtype=torch.bfloat16)
    assert grouped(tokens, weights) == 2 * 24 * 16 * 32
    assert grouped(tokens.t(), torch.zeros(24, 32)) == 2 * 16 * 24 * 32, "a gradient of weights"
    assert grouped(weights, torch.zeros(4, 32, 8)) == 4 * 2 * 16 * 32 * 8
    with torch.device("meta"), OperationCost() as traffic:
        ends = torch.zeros(4, dtype=torch.int32)
        torch._grouped_mm(
            torch.empty(24, 16, dtype=torch.bfloat16), torch.empty(4, 16, 32, dtype=torch.bfloat16), offs=ends
        )
    assert traffic.flops == 2 * 24 * 16 * 32


def test_a_mixture_of_experts_of_transformers_is_priced_by_its_products() -> None:
    """Mixtral's, two of its layers: each token's in two of eight experts (transformers' default is a grouped
    product); attention is causal, as positions that nobody gives are of one sequence."""
    transformers = pytest.importorskip("transformers")
    layers, tokens, width, inner, words = 2, 2048, 4096, 14336, 32000
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(
            transformers.MixtralConfig(num_hidden_layers=layers, use_cache=False)
        )
    asked = problem_of(
        model, ranks=8, limit="80GiB", batch=f"1x{tokens}", precision="bf16", stage=3, offload=None
    )
    own = 2 * width * tokens  # half of both products, twice: see `BESIDE`
    attention = 2 * width * width + 2 * width * 1024 + own
    experts = 8 * width + 2 * 3 * width * inner
    formula = 2 * tokens * (layers * (attention + experts) + width * words)
    segments = asked.problem.segments(asked.problem.way(3))
    assert sum(segment.flops for segment in segments) == formula
    again = 2 * tokens * layers * width * tokens  # a fifth product: attention's weights, computed again
    assert sum(segment.back for segment in segments) == 2 * formula + again
    reached = asked.problem.machine.half * asked.problem.machine.efficiency
    compute = asked.plan().chosen.seconds["compute"]
    assert 0 < compute - (3 * formula + again) / reached < 0.25 * compute, "the rest is what all else moves"


def test_rings_grow_with_ranks_and_trees_by_their_depth() -> None:
    """Of one exchange: 20 µs, and with 8 devices a node 1.9 µs for each hop inside and 4 µs for each outside
    (what NCCL's tuning model has), as the plan says."""

    def latency(world: int, gpu: bool) -> float:
        asked = problem(1000, machine=machine("H100", gpu=gpu), world=world)
        setup = asked.setup(asked.way(3))
        gathers = sum(1 if group.keeps else 2 for group in setup.gather_groups)
        return 1e6 * _latency(setup, asked.machine) / (len(setup.buckets) + gathers)

    assert [latency(world, False) for world in (8, 1024)] == pytest.approx([60, 200])
    assert latency(8, True) == pytest.approx(20 + 7 * 1.9)
    assert latency(1024, True) == pytest.approx(20 + 896 * 1.9 + 127 * 4.0)
    assert latency(16384, True) == pytest.approx(20 + 14336 * 1.9 + 2047 * 4.0)
    with torch.device("meta"):
        model = torch.nn.Linear(64, 64)
    for ranks, ring in ((1024, "0.00221 s"), (16384, "0.0354 s")):
        asked = problem_of(model, ranks=ranks, limit="1GiB")
        said = " ".join(asked.rate(asked.plan()).assumed)
        assert (
            f"an exchange takes 20 µs more, and {ring} along the ring (assumed: 1.9 µs to a device, 4.0 µs"
            in said
        )


def test_of_a_whole_gpu_context_nccl_workspace_and_margin_are_part_of_the_plan() -> None:
    """By its name; what is given in bytes is of tensors alone. A run is then held to what is left for its
    allocator."""
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(8)))

    def kinds(limit: str, ranks: int, **asked: Any) -> dict[str, int]:
        plan = zs.plan(model, ranks=ranks, limit=limit, precision="bf16", offload=None, stage=0, **asked)
        assert plan.chosen.device == sum(plan.chosen.kinds.values())
        return dict(plan.chosen.kinds) | {"limit": plan.limit}

    bare, two, one = kinds("70GiB", 2), kinds("h100", 2), kinds("A100", 1)
    assert bare["margin"] == bare["workspace"] == 0
    assert "context" not in bare
    outside = {"context": 768 * 2**20, "nccl": 560 * 2**20, "workspace": 64 * 2**20}
    assert {kind: two[kind] for kind in outside} == outside
    tensors = sum(bare.values()) - bare["limit"]
    assert two["margin"] == int(0.015 * (tensors + 64 * 2**20)) + PARTLY_FILLED
    assert two["limit"] == GPUS["H100"].memory
    assert (one["workspace"], "nccl" in one) == (2 * 8320 * 1024, False)
    own = machine("H100", margin=0.03, context=2**30)
    assert kinds("H100", 2, machine=own)["margin"] == int(0.03 * (tensors + 64 * 2**20)) + PARTLY_FILLED
    plan = zs.plan(model, ranks=2, limit="H100", precision="bf16")
    said = (
        r"The allocator's margin is [0-9.]+ MiB: 1.5% of what is asked of it \(as on an H200\) and 40.0 MiB"
    )
    assert any(re.match(said, reason) and "560.0 MiB for NCCL" in reason for reason in plan.reasons)
    with pytest.raises(zs.OptionError, match='limit="H100" is one GPU and machine= another, A100'):
        zs.plan(model, ranks=2, limit="H100", machine="A100")
