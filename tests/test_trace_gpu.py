"""What a trace says of a GPU: the kernels that are one there, what they save and take; and what operations
cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from zeroshard.machine import machine
from zeroshard.planner import price
from zeroshard.planning import inquire
from zeroshard.timeline import Segment
from zeroshard.trace import Inputs, Tracer
from zeroshard.traffic import Traffic

ROWS, LENGTH, WIDTH, HEADS = 2, 16, 32, 4
ONE = ROWS * LENGTH * WIDTH * 2  # bytes of an activation in bf16


class Normed(nn.Module):
    """A norm, attention and dropout between two products, recomputed by itself where told so."""

    def __init__(self, again: bool = False, heads: int = HEADS) -> None:
        super().__init__()
        self.again, self.heads = again, heads
        self.norm = nn.RMSNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def _attended(self, x: Tensor) -> Tensor:
        mixed = self.mix(self.norm(x)).view(ROWS, LENGTH, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = mixed
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        return F.dropout(self.out(attended.transpose(1, 2).reshape(ROWS, LENGTH, WIDTH)), 0.1)

    def forward(self, x: Tensor) -> Tensor:
        if self.again:
            return checkpoint(self._attended, x, use_reentrant=False).float().mean()
        return self._attended(x).float().mean()


def traced(gpu: bool, again: bool = False, heads: int = HEADS) -> list[Segment]:
    with torch.device("meta"):
        model = Normed(again, heads)
    compute = {name: torch.bfloat16 for name, _ in model.named_parameters()}
    x = torch.zeros(ROWS, LENGTH, WIDTH, dtype=torch.bfloat16)
    return Tracer(model, [], lambda _: False, compute, gpu).run(Inputs.of(x), None)


def test_a_gpu_saves_what_its_kernels_need() -> None:
    """The input's scales, the norm's output, queries with keys and values, what was attended and its sums,
    and a byte for each element that may be dropped."""
    scales, sums = ROWS * LENGTH * 4, ROWS * HEADS * LENGTH * 4
    saved = sum(segment.saved for segment in traced(gpu=True))
    assert saved == scales + ONE + 3 * ONE + ONE + sums + ONE // 2
    assert sum(segment.saved for segment in traced(gpu=False)) > 2 * saved  # masks, and norms in fp32


def test_a_gpu_pads_heads_to_eight_numbers() -> None:
    """Then queries, keys, values and what was attended are copies twice as large, and the product after them
    has an input of its own."""
    scales, sums = ROWS * LENGTH * 4, ROWS * 8 * LENGTH * 4
    saved = sum(segment.saved for segment in traced(gpu=True, heads=8))
    assert saved == scales + ONE + 2 * 3 * ONE + 2 * ONE + ONE + sums + ONE // 2


def test_what_is_recomputed_on_a_gpu_is_as_in_forward() -> None:
    plain, again = traced(gpu=True), traced(gpu=True, again=True)
    assert sum(s.saved for s in again) < sum(s.saved for s in plain) / 4
    assert sum(s.back for s in again) > sum(s.back for s in plain)
    assert F.rms_norm.__module__ == "torch.nn.functional"  # and all is as it was
    assert torch.rms_norm is not F.rms_norm


def test_what_operations_cost() -> None:
    x, w = torch.ones(8, 16), torch.ones(16, 4)
    with Traffic() as cost:
        x @ w
    assert (cost.flops, cost.moved) == (2 * 8 * 16 * 4, 0)
    with Traffic() as cost:
        x.t().view(2, 8, 8).expand(2, 8, 8)
        torch.empty(100)
    assert (cost.flops, cost.moved) == (0, 0)
    table, some = torch.ones(1000, 4), torch.zeros(3, dtype=torch.int64)
    with Traffic() as cost:
        x + 1
        F.embedding(some, table)  # reads three rows, not the table
    assert cost.moved == 2 * x.nbytes + 2 * 3 * 4 * 4
    q = torch.ones(1, 2, 8, 4, requires_grad=True)
    with Traffic() as cost:
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert cost.flops == 2 * 2 * q.numel() * 8 // 2


def asked(**figures: Any) -> Any:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    h200 = machine("H200", **figures)
    return inquire(model, ranks=1, limit="1GiB", batch=torch.zeros(8, 64), machine=h200).question


def test_the_workspace_of_a_machine_is_a_kind_of_its_own() -> None:
    plain, more = (price(q := asked(**f), q.way(0)) for f in ({}, {"workspace": 2**20, "margin": 0.5}))
    assert more.kinds["workspace"] == 2**20
    assert more.kinds["margin"] == (plain.device + 2**20) // 2
    assert more.device == plain.device + 2**20 + more.kinds["margin"]


def test_time_is_products_and_bytes_through_memory() -> None:
    question = asked(efficiency=0.5)
    segments = question.segments(question.way(0))
    rate, memory = question.machine.full * 0.5, question.machine.memory_rate
    work = sum(s.flops + s.back for s in segments)
    moved = sum(s.moved for s in segments)
    assert work > 0
    assert moved > 0
    made = price(question, question.way(0))
    assert made.seconds["compute"] == pytest.approx(work / rate + moved / memory)


def test_copies_to_the_host_take_its_memory() -> None:
    question = asked(host_rate=1e9)
    options = zs.config.Options(precision="bf16", offload=zs.Offload(), clip_norm=1.0)  # type: ignore[arg-type]
    numel = 3 * (64 * 64 + 64)
    # Master and two moments read and written, gradient and weight by the kernel and by the copies.
    assert price(question, options).seconds["host update"] == pytest.approx(numel * (24 + 4 + 4) / 1e9)
