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
from zeroshard.layout.memory import StepSegment
from zeroshard.machine import machine
from zeroshard.planner.answer import problem_of
from zeroshard.planner.candidates import PARTLY_FILLED, price
from zeroshard.planner.operations import BESIDE, OperationCost, RecurrentShape
from zeroshard.planner.pricing import HOOKED, RECOMPUTED, SENT, STEPPED
from zeroshard.planner.signatures import ExampleInputs
from zeroshard.planner.trace import Tracer

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


def traced(gpu: bool, again: bool = False, heads: int = HEADS) -> list[StepSegment]:
    with torch.device("meta"):
        model = Normed(again, heads)
    compute = {name: torch.bfloat16 for name, _ in model.named_parameters()}
    x = torch.zeros(ROWS, LENGTH, WIDTH, dtype=torch.bfloat16)
    return Tracer(model, [], lambda _: False, compute, gpu).run(ExampleInputs.of(x), None)


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
    with OperationCost() as cost:
        x @ w
    assert (cost.flops, cost.moved) == (2 * 8 * 16 * 4, 0)
    with OperationCost() as cost:
        x.t().view(2, 8, 8).expand(2, 8, 8)
        torch.empty(100)
    assert (cost.flops, cost.moved) == (0, 0)
    table, some = torch.ones(1000, 4), torch.zeros(3, dtype=torch.int64)
    with OperationCost() as cost:
        x + 1
        F.embedding(some, table)  # reads three rows, not the table
    assert cost.moved == 2 * x.nbytes + 2 * 3 * 4 * 4
    q = torch.ones(1, 2, 8, 32, requires_grad=True)
    with OperationCost() as cost:
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert cost.flops == 2 * 2 * 2 * q.numel() * 8 // 2  # twice its products
    odd = torch.ones(1, 1, 8, 100)  # runs by the kernel of 128
    with OperationCost() as cost:
        F.scaled_dot_product_attention(odd, odd, odd)
    assert cost.flops == 2 * 2 * 2 * 128 * 8 * 8
    few, many = torch.ones(1, 1, 8, 32), torch.ones(1, 1, 3 * BESIDE, 32)
    with OperationCost() as cost:
        F.scaled_dot_product_attention(few, many, many)
    assert cost.flops == 2 * 2 * few.numel() * 4 * BESIDE  # a third more than them


def test_an_lstm_keeps_its_gates() -> None:
    """On the CPU what the library says of a layer that is really run, and never more than the bound that a
    large one gets; on a GPU eight values of each hidden one."""
    small, large = RecurrentShape(7, 3, 24, 32), RecurrentShape(100, 64, 512, 512)
    real = torch.ops.aten.mkldnn_rnn_layer(
        torch.zeros(7, 3, 24, requires_grad=True), torch.zeros(128, 24), torch.zeros(128, 32),
        *(torch.zeros(128),) * 2, *(torch.zeros(3, 32),) * 2, False, [], 2, 32, 1, True, False, False, True,
    )  # fmt: skip
    assert small.on_cpu() == real[3].nbytes
    assert small.on_cpu() <= small.bound
    assert large.on_cpu() == large.bound
    for one in (
        RecurrentShape(33, 5, 40, 100),
        RecurrentShape(20, 16, 256, 64),
        RecurrentShape(20, 4, 64, 256),
    ):
        assert one.bound / 2 < one.on_cpu() <= one.bound

    with torch.device("meta"):
        model = nn.LSTM(24, 32)
    saved = {
        gpu: sum(s.saved for s in Tracer(model, [], lambda _: False, {}, gpu).run(inputs, _squared))
        for gpu in (False, True)
        for inputs in [ExampleInputs.of(torch.zeros(7, 3, 24))]
    }
    assert saved[True] - saved[False] == 8 * 7 * 3 * 32 * 4 - small.on_cpu()
    traced = Tracer(model, [], lambda _: False, {}).run(ExampleInputs.of(torch.zeros(7, 3, 24)), _squared)
    one = 2 * 7 * 3 * 4 * 32 * (24 + 32)
    assert (sum(s.flops for s in traced), sum(s.back for s in traced)) == (one, 2 * one)


def _squared(output: Any) -> Tensor:
    loss: Tensor = output[0].square().mean()
    return loss


def asked(layers: int = 3, **figures: Any) -> Any:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)))
    h200 = machine("H200", **figures)
    return problem_of(model, ranks=1, limit="1GiB", batch=torch.zeros(8, 64), machine=h200).problem


def test_the_workspace_of_a_machine_is_a_kind_of_its_own() -> None:
    plain, more = (price(q := asked(**f), q.way(0)) for f in ({}, {"workspace": 2**20, "margin": 0.5}))
    assert more.kinds["workspace"] == 2**20
    assert more.kinds["margin"] == (plain.device + 2**20) // 2 + PARTLY_FILLED
    assert more.device == plain.device + 2**20 + more.kinds["margin"]


def test_time_is_products_and_bytes_through_memory() -> None:
    problem = asked(efficiency=0.5, gap=1e-6)
    segments = problem.segments(problem.way(0))
    rate, memory = problem.machine.full * 0.5, problem.machine.memory_rate
    work = sum(s.flops + s.back for s in segments)
    moved = sum(s.moved + s.moved_back for s in segments)
    assert work > 0
    assert sum(s.moved for s in segments) > 0
    assert sum(s.moved_back for s in segments) > 0
    made = price(problem, problem.way(0))
    kernels = sum(s.kernels + s.kernels_back for s in segments)
    # Three products with a bias, and backward two each (the first layer one), a sum for each bias, the loss.
    assert 14 <= kernels <= 40
    assert made.seconds["compute"] == pytest.approx(work / rate + moved / memory + 1e-6 * kernels)


def test_small_models_take_as_long_as_python_takes() -> None:
    """To launch kernels, to recompute, and to send parts to the host: one after another."""
    problem = asked(launch=1e-3, drag=0.0)
    kernels = sum(s.kernels + s.kernels_back for s in problem.segments(problem.way(0)))
    plain = price(problem, problem.way(0))
    assert plain.seconds["interpreter"] == pytest.approx(1e-3 * (kernels + 3 * sum(HOOKED)))
    assert plain.step == pytest.approx(plain.seconds["interpreter"] + plain.seconds["update"])
    again = price(problem, problem.way(0, recompute=True))
    kernels = sum(s.kernels + s.kernels_back for s in problem.segments(problem.way(0, recompute=True)))
    hooks = 3 * (sum(HOOKED) + sum(RECOMPUTED))
    assert again.seconds["interpreter"] == pytest.approx(1e-3 * (kernels + hooks))
    options = zs.options.Options(offload=zs.Offload(), clip_norm=1.0)
    sent = price(problem, options).seconds["interpreter"] - plain.seconds["interpreter"]
    assert sent == pytest.approx(1e-3 * 3 * (SENT + STEPPED))  # a part for each unit
    assert "interpreter" not in price(asked(gpu=False), problem.way(0)).seconds  # the CPU runs what is called


def test_forward_waits_for_the_gradient_that_lands_last() -> None:
    """Its way to the host, the updates before it, its own and its way back are seen, where it is updated
    there."""
    options = zs.options.Options(offload=zs.Offload(), clip_norm=1.0)
    first = 64 * 64 + 64
    # A host that keeps up with backward has nothing left when it lands; one that does not, both other parts.
    for rate, before in ((1e8, 0), (1e10, 2)):
        problem = asked(host_rate=1e9, pcie=1e9, launch=0.0, drag=0.0, gap=0.0, full=rate)
        made = price(problem, options)
        waited = first * (32 + 2 * 4) + before * first * 32
        assert made.step == pytest.approx(made.seconds["compute"] + waited / 1e9)
        assert made.step > made.seconds["host update"]
    # Now all wait for the host, and the host for the root.
    slow = asked(12, host_rate=1e6, launch=0.0, drag=0.0, gap=0.0)
    made = price(slow, zs.options.Options(offload=zs.Offload(), clip_norm=1.0))
    moved = sum(s.moved + s.moved_back for s in slow.segments(slow.way(0)) if not s.unit)
    assert moved > 0
    root = moved / slow.machine.memory_rate
    assert made.step == pytest.approx(made.seconds["host update"] + root, rel=1e-12)


def test_an_update_on_the_host_takes_its_memory() -> None:
    problem = asked(host_rate=1e9)
    options = zs.options.Options(precision="bf16", offload=zs.Offload(), clip_norm=1.0)  # type: ignore[arg-type]
    numel = 3 * (64 * 64 + 64)
    # Master and two moments read and written, the gradient read, the weight written.
    assert price(problem, options).seconds["host update"] == pytest.approx(numel * (24 + 4) / 1e9)


def test_links_are_used_at_once_and_rings_enter_a_node_once() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    numel = 3 * (64 * 64 + 64)
    own = machine("H200", 1e6, link=1e9, latency=0.0, hop=0.0, node_hop=0.0, node=8)

    def made(**options: Any) -> Any:
        asked = problem_of(
            model, ranks=64, limit="1GiB", machine=own, stage=1, offload=None, **options
        ).problem
        return price(asked, asked.way(1))

    plain = made()
    assert sum(plain.between.values()) == pytest.approx(2 * 4 * numel * 56 / 64, rel=1e-3)
    assert plain.seconds["exchange"] == pytest.approx(2 * 4 * numel * 56 / 64 / 8 / 1e6, rel=1e-3)
    coded = made(compress=zs.Int8())  # codes go from every rank to every rank
    codes = zs.Int8().wire_bytes(numel)
    crossing = codes * 56 / 64 + 4 * numel * 56 / 64 / 8
    assert coded.seconds["exchange"] == pytest.approx(crossing / 1e6, rel=1e-2)
    assert coded.numerics == "rounding"
    assert coded.seconds["codecs"] == pytest.approx((4 + 8 + 2 * 1.01) * numel / own.memory_rate, rel=0.05)
    slow = made(compress=zs.TopK(0.01))
    assert slow.seconds["codecs"] > 10 * coded.seconds["codecs"]
    assert slow.numerics == "approximate"
