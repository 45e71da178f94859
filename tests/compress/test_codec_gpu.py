"""Codes made on a GPU are the CPU's, bit for bit; without a GPU, Triton's interpreter stands in for one."""

from __future__ import annotations

import logging
import sys
import warnings

import pytest
import torch
from kernel_values import assert_same_bits, rough
from torch import Tensor
from triton_interpreter import interpret, needs_interpreter

from zeroshard.compress import Cast, Codec, Int4, Int8, LowRank, OneBit, Rows, Ternary, TopK, TwoBit, gpu
from zeroshard.kernels.codes import BlockFormat

INTEGERS = [
    kind(block=block, feedback=feedback, stochastic=stochastic)
    for kind, block, feedback, stochastic in (
        (Int8, 256, False, False),
        (Int8, 48, True, True),
        (Int8, 16, True, False),
        (Int4, 128, True, False),
        (Int4, 48, False, True),
        (Int4, 16, True, True),
    )
]
CODECS: list[Codec] = [
    *INTEGERS,
    Cast("bfloat16"),
    Cast("float16"),
    Int8(block=8192),
    TwoBit(),
    Ternary(),
    Ternary(block=48, large=2),
    OneBit(),
    OneBit(block=48),
    TopK(),
    TopK(0.2, momentum=0.9),
]


def steps(codec: Codec, numel: int, device: str) -> list[Tensor]:
    """Three steps, the second with awkward values: codes, states and what arrives."""
    state, found = codec.state(numel, device), []
    for step in range(3):
        values = rough(numel, step, edges=step == 1 and numel > 21).to(device)
        code = torch.full((codec.wire_bytes(numel),), 255, dtype=torch.uint8, device=device)
        codec.encode(values, code, state, step)
        out, added = torch.empty_like(values), values.nan_to_num()
        codec.decode(code, out, add=False)
        codec.decode(code, added, add=True)
        found += [out, added, *(tensor.clone() for tensor in state.values())]
        if isinstance(codec, (Int8, Int4, TwoBit, Ternary, OneBit)):  # elsewhere a NaN's kind may differ
            found.append(code)
    return [tensor.cpu() for tensor in found]


@pytest.mark.cuda
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_a_gpu_gives_the_bits_of_the_cpu(codec: Codec) -> None:
    for numel in (0, 1, 2, 33, 257, 4096, 100_003):
        for found, wanted in zip(steps(codec, numel, "cuda"), steps(codec, numel, "cpu"), strict=True):
            assert_same_bits(found, wanted, f"{numel} values")


@pytest.mark.cuda
def test_triton_does_the_work_there() -> None:
    assert gpu._kernels(torch.device("cuda", torch.cuda.current_device())) is not None


@pytest.mark.cuda
def test_a_gpu_encodes_on_the_stream_in_force_and_waits_for_nothing() -> None:
    values, out = torch.randn(1 << 20, device="cuda"), torch.empty(1 << 20, device="cuda")
    for codec in (Int8(), Int4(), OneBit(), TopK(), Cast()):
        code, state = (
            torch.empty(codec.wire_bytes(1 << 20), dtype=torch.uint8, device="cuda"),
            codec.state(1 << 20, "cuda"),
        )
        codec.encode(values, code, state, 0)
        codec.decode(code, out, add=True)
        torch.cuda.synchronize()
        try:
            with warnings.catch_warnings():  # torch warns that this is a prototype
                warnings.simplefilter("ignore")
                torch.cuda.set_sync_debug_mode("error")
            codec.encode(values, code, state, 1)
            codec.decode(code, out, add=False)
            codec.decode(code, out, add=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
def test_rows_and_low_rank_on_a_gpu() -> None:
    grad = torch.zeros(1000, 8, device="cuda")
    grad[::7] = torch.randn(143, 8, device="cuda")
    code = torch.empty(Rows().room(1000, 8, grad.dtype), dtype=torch.uint8, device="cuda")
    Rows().encode(grad, code)
    Rows().decode(code, out := torch.ones_like(grad), add=False)
    assert torch.equal(out, grad)
    codec, shape = LowRank(rank=2), (64, 32)
    state = codec.state(shape, "cuda")
    vectors = [torch.empty(length, device="cuda") for length in codec.lengths(shape)]
    wanted = torch.randn(shape, device="cuda")
    matrix = wanted.clone()
    for number in range(2):
        codec.send(number, matrix, vectors, state)
    codec.finish(vectors, state)
    codec.expand(vectors, 0, 64, sent := torch.empty(shape, device="cuda"))
    assert torch.allclose(sent + state["residual"].view(shape), wanted, atol=1e-5)


@needs_interpreter
@pytest.mark.parametrize("codec", INTEGERS, ids=repr)
def test_the_kernels_in_the_interpreter(codec: Int8 | Int4, monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)
    for numel in (1, 33, 4096 + 257):
        values = rough(numel, 1, edges=numel > 21)
        kept = [rough(numel, 2, edges=False) * 0.1 for _ in range(2)]
        code = torch.empty(codec.wire_bytes(numel), dtype=torch.uint8)
        codec.encode(values, code, {"residual": kept[0]}, 7)
        scales, packed = codec._parts(again := torch.zeros_like(code), numel)
        form = BlockFormat(codec.block, codec.bits, codec._salt(7))
        assert gpu.encode(form, values, kept[1] if codec.feedback else None, scales, packed)
        assert torch.equal(again, code)
        assert_same_bits(kept[1], kept[0])
        for add in (False, True):
            outs = [values.nan_to_num() for _ in range(2)]
            codec.decode(code, outs[0], add)
            assert gpu.decode(form, scales, packed, outs[1], add)
            assert_same_bits(outs[1], outs[0])


def test_without_triton_torch_does_the_work_and_a_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "zeroshard.compress.gpu_triton", None)
    monkeypatch.delattr("zeroshard.compress.gpu_triton", raising=False)
    with caplog.at_level(logging.WARNING, "zeroshard"):
        assert gpu._kernels.__wrapped__(torch.device("cpu")) is None
    assert "codecs run in torch on cpu, in more passes over memory than with Triton, because" in caplog.text
    form = BlockFormat(1 << 15, 8)
    assert gpu._kernels_for(torch.ones(3), form) is None, "blocks longer than a tile are for torch"
