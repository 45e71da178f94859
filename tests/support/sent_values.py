"""What the tests of codecs share: sending values, and the awkward ones among them."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st
from torch import Tensor

from zeroshard.compress import Codec

# Zeros, denormals, the smallest and largest, and what is no number.
EDGES = (0.0, -0.0, 1e-45, -1e-40, 1.2e-38, 1e-31, 1.0, -1.0, 1e20, 3.4e38, -3.4e38)
BROKEN = (math.inf, -math.inf, math.nan)


def normal(numel: int, seed: int = 0, spread: float = 0.0) -> Tensor:
    """Gradients as they come; `spread` makes their sizes differ."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator)
    return values * torch.exp(spread * torch.randn(numel, generator=generator))


@st.composite
def shards(draw: st.DrawFn, broken: bool = False) -> Tensor:
    """Pieces of awkward lengths, with awkward values strewn in."""
    numel = draw(st.sampled_from([0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 500]))
    kind = draw(st.sampled_from(["normal", "spread", "zeros", "tiny"]))
    values = normal(numel, draw(st.integers(0, 99)), 5.0 if kind == "spread" else 0.0)
    values *= {"zeros": 0.0, "tiny": 1e-42}.get(kind, 1.0)
    strewn = draw(st.lists(st.tuples(st.integers(0, 499), st.sampled_from(EDGES)), max_size=5))
    if broken:
        strewn += draw(st.lists(st.tuples(st.integers(0, 499), st.sampled_from(BROKEN)), max_size=3))
    for place, value in strewn:
        if place < numel:
            values[place] = value
    return values


def send(codec: Codec, values: Tensor, state: dict[str, Tensor], step: int = 0) -> Tensor:
    """What arrives. The code is written over rubbish, and everywhere."""
    codes = [torch.full((codec.wire_bytes(values.numel()),), fill, dtype=torch.uint8) for fill in (0, 255)]
    before = {name: tensor.clone() for name, tensor in state.items()}
    given = values.clone()
    codec.encode(values, codes[0], before, step)
    codec.encode(values, codes[1], state, step)
    assert torch.equal(*codes), "the same arguments, another code"
    assert torch.equal(values.view(torch.int32), given.view(torch.int32)), "encode changed its input"
    out = torch.full_like(values, 7.0)
    codec.decode(codes[0], out, add=False)
    added = torch.ones_like(values)
    codec.decode(codes[0], added, add=True)
    assert torch.equal((1.0 + out).nan_to_num(5e5), added.nan_to_num(5e5)), "add=True adds something else"
    return out
