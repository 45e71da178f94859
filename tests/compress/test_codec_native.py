"""Compiled codes are torch's, bit for bit, at every vector width and with any number of threads."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from kernel_values import both_paths, built, rough
from torch import Tensor

from zeroshard.compress import Cast, Codec, Int4, Int8, OneBit, Ternary, TopK, TwoBit
from zeroshard.compress.base import padded
from zeroshard.errors import OptionError
from zeroshard.kernels import codes

FIXTURES = (both_paths,)
Check = Callable[[Callable[[], list[Tensor]]], None]
pytestmark = built
CODECS: list[Codec] = [
    Cast("bfloat16"),
    Cast("float16"),
    *(kind(block=block) for kind in (Int8, Int4, TwoBit, OneBit) for block in (16, 48, 256)),
    *(kind(feedback=True, stochastic=True) for kind in (Int8, Int4)),
    Int8(feedback=True),
    TwoBit(feedback=False),
    *(
        Ternary(block, large, feedback)
        for block, large, feedback in ((240, 4, True), (48, 48, False), (256, 0, True))
    ),
    OneBit(feedback=False),
    Int8(stochastic=True),
    Int4(feedback=False, stochastic=True),
    TopK(),
    TopK(0.2, momentum=0.9),
    TopK(0.5),
]


def steps(codec: Codec, numel: int, edges: bool) -> list[Tensor]:
    """Three steps, the second with awkward values: codes, states and what arrives."""
    state, found = codec.state(numel), []
    for step in range(3):
        values = rough(numel, step, edges=edges and step == 1 and numel > 21)
        code = torch.full((codec.wire_bytes(numel),), 255, dtype=torch.uint8)
        codec.encode(values, code, state, step)
        out, added = torch.empty(numel), values.nan_to_num()
        codec.decode(code, out, add=False)
        codec.decode(code, added, add=True)
        found += [out, added, *(tensor.clone() for tensor in state.values())]
        if not isinstance(codec, (Cast, TopK)) or not edges:  # what kind of NaN it is may differ there
            found.append(code)
    return found


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("edges", [False, True])
def test_same_bits(codec: Codec, edges: bool, assert_both_same: Check) -> None:
    for numel in (0, 1, 2, 15, 33, 257, 1000, 4096 + 77):
        assert_both_same(lambda numel=numel: steps(codec, numel, edges))


@pytest.mark.parametrize("values", [torch.zeros(700), torch.ones(700), torch.full((700,), float("nan"))])
def test_same_choice_among_equals(values: Tensor, assert_both_same: Check) -> None:
    def make() -> list[Tensor]:
        codec = TopK(0.1)
        code, state = torch.empty(codec.wire_bytes(700), dtype=torch.uint8), codec.state(700)
        codec.encode(values, code, state, 0)
        return [code[: 4 * 70], state["residual"]]

    assert_both_same(make)


THREADED = [Int8(stochastic=True), Int4(block=80), TwoBit(), Ternary(), OneBit(), Cast()]


@pytest.mark.parametrize("codec", THREADED, ids=repr)
def test_threads_change_nothing(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codes, "SHARE", 1000)
    matrix = torch.eye(99, 77)
    alone = steps(codec, 7003, edges=True)
    count = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        together = steps(codec, 7003, edges=True)
        assert codes.touched(matrix).tolist() == [True] * 77 + [False] * 22
    finally:
        torch.set_num_threads(count)
        codes._workers(3, os.getpid()).close()
        codes._workers.cache_clear()
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one.nan_to_num(123.0), other.nan_to_num(123.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("width", [1, 2, 3, 300, 770])
def test_same_rows(width: int, dtype: torch.dtype, assert_both_same: Check) -> None:
    matrix = torch.zeros(40, width, dtype=dtype)
    matrix[3, width - 1] = 1e-7
    matrix[5, 0] = float("nan")
    matrix[6] = -0.0
    matrix[9, width // 2] = -2.0
    assert codes.touched(matrix).nonzero().flatten().tolist() == [3, 5, 9]
    assert_both_same(lambda: [codes.touched(matrix), codes.touched(matrix.T)])


def test_wrong_memory_is_refused_before_it_is_touched() -> None:
    codec = Int8(feedback=True)
    code = torch.empty(codec.wire_bytes(8), dtype=torch.uint8)
    with pytest.raises(OptionError, match="encode: `residual` holds 7 elements; 8 are needed"):
        codec.encode(torch.ones(8), code, {"residual": torch.zeros(7)}, 0)
    top = TopK(0.5)
    code = torch.empty(top.wire_bytes(8), dtype=torch.uint8)
    with pytest.raises(OptionError, match="largest: `residual` is float64; float32 is needed"):
        top.encode(torch.ones(8), code, {"residual": torch.zeros(8).double()}, 0)


SHARDED = [
    Int8(),
    Int8(feedback=True, stochastic=True),
    Int4(block=48),
    TwoBit(),
    Ternary(),
    OneBit(),
    Cast(),
]


@pytest.mark.parametrize("codec", SHARDED, ids=repr)
@pytest.mark.parametrize("numel", [1, 100, 256, 700])
@pytest.mark.parametrize("threads", [False, True])
def test_many_shards_in_one_call_are_what_they_are_one_by_one(
    codec: Codec, numel: int, threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codes, "SHARE", 300 if threads else 1 << 18)
    world, flags, step, size = 5, 3, 2**31 - 2, codec.wire_bytes(numel)
    wires = [torch.full((world, padded(size) + 16), 255, dtype=torch.uint8) for _ in range(2)]
    # As in a bucket, whose shards are longer than what they hold.
    states = [codec.state(world * (numel + 16)) for _ in range(2)]
    rows = [{name: kept.view(world, -1)[:, :numel] for name, kept in state.items()} for state in states]
    for turn in range(3):
        values = rough(world * (numel + 16), turn, edges=turn == 1 and numel > 21).view(world, -1)[:, :numel]
        codec.encode_shards(values, wires[0][:, :size], rows[0], step)
        for number in range(world):
            own = {name: kept[number] for name, kept in rows[1].items()}
            codec.encode(values[number].contiguous(), wires[1][number, :size], own, (step + number) % 2**31)
        for wire in wires:
            wire[:, padded(size) : padded(size) + flags] = torch.tensor([1, 0, turn])
        assert torch.equal(*wires)
        for name in states[0]:
            assert torch.equal(states[0][name].view(torch.uint8), states[1][name].view(torch.uint8))
        parts, total, added = codes.Parts(wires[0]), torch.empty(numel), torch.empty(numel)
        apart, alone = torch.zeros(world, numel + 16)[:, :numel], torch.empty(world, numel)
        codec.decode_parts(parts, total)
        codec.decode_parts(parts, apart)
        for number in range(world):
            codec.decode(wires[1][number, :size], added, add=number > 0)
            codec.decode(wires[1][number, :size], alone[number], add=False)
        assert torch.equal(total.view(torch.int32), added.view(torch.int32))
        assert torch.equal(apart.contiguous().view(torch.int32), alone.view(torch.int32))
        assert parts.tally(padded(size), flags).tolist() == [world, 0, world * turn]


def test_parts_that_are_too_short_are_refused() -> None:
    parts = codes.Parts(torch.zeros(2, 8, dtype=torch.uint8))
    with pytest.raises(OptionError, match="parts: one holds 8 bytes; 4032 are needed"):
        Int8().decode_parts(parts, torch.zeros(4000))
    with pytest.raises(OptionError, match="parts: one holds 8 bytes; 9 are needed"):
        parts.tally(8, 1)


def test_rows_that_do_not_fit_are_refused() -> None:
    form, values = codes.BlockFormat(256, 8), torch.zeros(3, 64)
    code = torch.zeros(3, 80, dtype=torch.uint8)
    message = (
        r"encode: `residual` has shape \(3, 64\) and stride \(128, 1\); "
        r"rows 64 apart, of shape \(3, 64\), are needed"
    )
    with pytest.raises(OptionError, match=message):
        form.encode_shards(values, torch.zeros(3, 128)[:, :64], code, 16, None)
