"""Compiled codes are torch's, bit for bit, at every vector width and with any number of threads."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from native_case import both_paths, built, rough
from torch import Tensor

from zeroshard.codec import Cast, Codec, Int4, Int8, OneBit, Ternary, TopK, TwoBit
from zeroshard.errors import OptionError
from zeroshard.native import codes

FIXTURES = (both_paths,)
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
    TopK(1.0),
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
def test_same_bits(codec: Codec, edges: bool, both: Callable[[Callable[[], list[Tensor]]], None]) -> None:
    for numel in (0, 1, 2, 15, 33, 257, 1000, 4096 + 77):
        both(lambda numel=numel: steps(codec, numel, edges))


@pytest.mark.parametrize("values", [torch.zeros(700), torch.ones(700), torch.full((700,), float("nan"))])
def test_same_choice_among_equals(values: Tensor, both: Callable[[Callable[[], list[Tensor]]], None]) -> None:
    def make() -> list[Tensor]:
        codec = TopK(0.1)
        code, state = torch.empty(codec.wire_bytes(700), dtype=torch.uint8), codec.state(700)
        codec.encode(values, code, state, 0)
        return [code[: 4 * 70], state["residual"]]

    both(make)


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
def test_same_rows(
    width: int, dtype: torch.dtype, both: Callable[[Callable[[], list[Tensor]]], None]
) -> None:
    matrix = torch.zeros(40, width, dtype=dtype)
    matrix[3, width - 1] = 1e-7
    matrix[5, 0] = float("nan")
    matrix[6] = -0.0
    matrix[9, width // 2] = -2.0
    assert codes.touched(matrix).nonzero().flatten().tolist() == [3, 5, 9]
    both(lambda: [codes.touched(matrix), codes.touched(matrix.T)])


def test_wrong_memory_is_refused_before_it_is_touched() -> None:
    codec = Int8(feedback=True)
    code = torch.empty(codec.wire_bytes(8), dtype=torch.uint8)
    with pytest.raises(OptionError, match="encode: `residual` holds 7 elements; 8 are needed"):
        codec.encode(torch.ones(8), code, {"residual": torch.zeros(7)}, 0)
    top = TopK(0.5)
    code = torch.empty(top.wire_bytes(8), dtype=torch.uint8)
    with pytest.raises(OptionError, match="largest: `residual` is float64; float32 is needed"):
        top.encode(torch.ones(8), code, {"residual": torch.zeros(8).double()}, 0)
