"""Split masters on a GPU, as far as that can be seen without one; see also test_cuda."""

from __future__ import annotations

import logging
import sys

import pytest
import torch
from triton_interpreter import interpret, needs_interpreter

from zeroshard.kernels import split, split_master


@needs_interpreter
@pytest.mark.parametrize("numel", [3, 4096, 65_536 - 3])
def test_the_kernels_in_the_interpreter(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    for low in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        master = (upper | low).view(torch.float32)[:numel]
        want = split(master)
        weight, remainder, again = (torch.zeros_like(each) for each in (*want, master))
        assert split_master.gpu_split(master, weight, remainder)
        assert torch.equal(weight.view(torch.int16), want[0].view(torch.int16))
        assert torch.equal(remainder, want[1])
        assert split_master.gpu_join(weight, remainder, again)
        assert torch.equal(again.view(torch.int32), master.view(torch.int32))


def test_without_triton_torch_does_the_work_and_a_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "zeroshard.kernels.split_master_triton", None)
    monkeypatch.delattr("zeroshard.kernels.split_master_triton", raising=False)
    with caplog.at_level(logging.WARNING, "zeroshard"):
        assert split_master._kernels.__wrapped__(torch.device("cpu")) is None
    said = "split masters run in torch on cpu, in more passes over memory than with Triton, because"
    assert said in caplog.text


def test_tensors_without_memory_are_nobodys_work() -> None:
    master, weight, remainder = (
        torch.empty(8, dtype=dtype, device="meta") for dtype in (torch.float32, torch.bfloat16, torch.int16)
    )
    assert not split_master.gpu_split(master, weight, remainder)
    assert not split_master.gpu_join(weight, remainder, master)
