"""Sums in rank order by one launch, on a GPU or in Triton's interpreter; and without Triton."""

from __future__ import annotations

import logging
import sys

import pytest
import torch
from triton_interpreter import interpret, needs_interpreter

from zeroshard.kernels import ordered_sum, sum_in_order


def check(device: str) -> None:
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        for world, numel in ((1, 5), (2, 256), (16, 700), (17, 256), (33, 1)):
            shards = (torch.randn(world, numel) * 10.0 ** torch.randint(-4, 4, (world, 1))).to(dtype)
            shards[:, 0] = -0.0
            total = shards[0].float()
            for shard in shards[1:]:
                total += shard
            total *= 1.0 / 3.0
            out = torch.zeros(numel, device=device)
            assert sum_in_order(shards.to(device).view(-1), out, 1.0 / 3.0)
            assert torch.equal(out.cpu().view(torch.int32), total.view(torch.int32))
    assert not sum_in_order(shards.to(device).view(-1), out.bfloat16(), 1.0)


@needs_interpreter
def test_the_kernel_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)
    check("cpu")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_bits_of_one_addition_after_another() -> None:
    check("cuda")


def test_without_triton_torch_adds_and_a_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "zeroshard.kernels.ordered_sum_triton", None)
    monkeypatch.delattr("zeroshard.kernels.ordered_sum_triton", raising=False)
    with caplog.at_level(logging.WARNING, "zeroshard"):
        assert ordered_sum._kernels.__wrapped__(torch.device("cpu")) is None
    said = (
        "sums of 16-bit gradients run in torch on cpu, in more passes over memory than with Triton, because"
    )
    assert said in caplog.text
