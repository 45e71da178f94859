"""Codecs: bytes, errors within their bounds, awkward values, and what every codec has to keep to."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from sent_values import normal, send, shards
from torch import Tensor

import zeroshard.compress
from zeroshard.compress import (
    Cast,
    Codec,
    Compression,
    Delta,
    Int4,
    Int8,
    LowRank,
    MeanCodec,
    OneBit,
    Rows,
    Ternary,
    TopK,
    TwoBit,
    sparse,
)
from zeroshard.compress.base import from_settings
from zeroshard.errors import OptionError
from zeroshard.layout.codes import sizes_of
from zeroshard.options import routes_of

ALL: list[Codec] = [
    Cast("bfloat16"),
    Cast("float16"),
    Int8(),
    Int8(block=16, feedback=True),
    Int8(block=32, stochastic=True),
    Int8(block=64, feedback=True, stochastic=True),
    Int4(),
    Int4(block=16, feedback=False, stochastic=True),
    TwoBit(),
    TwoBit(block=48, feedback=False),
    Ternary(),
    Ternary(block=48, large=0, feedback=False),
    OneBit(),
    OneBit(block=48, warmup_steps=0),
    OneBit(feedback=False),
    Int4(residual="bfloat16"),
    OneBit(residual="bfloat16"),
    TopK(),
    TopK(ratio=0.1, momentum=0.9),
    TopK(ratio=0.1, momentum=0.9, residual="bfloat16"),
    TopK(ratio=0.5),
]
OTHER = [LowRank(), LowRank(2), Rows(), Delta(), OneBit(warmup=Int8()), TopK(ramp_steps=9)]
ROUNDING = [codec for codec in ALL if codec.numerics == "rounding"]
every = pytest.mark.parametrize("codec", ALL, ids=repr)
quick = settings(max_examples=40, deadline=None, derandomize=True, database=None)


# -- bytes
@pytest.mark.parametrize(
    ("codec", "factor"),
    [
        (Cast("bfloat16"), 2.0),
        (Cast("float16"), 2.0),
        (Int8(), 3.9),
        (Int4(), 7.5),
        (TwoBit(), 15.4),
        (Ternary(), 16.5),
        (OneBit(), 28.0),
        (TopK(ratio=0.01), 45.0),
    ],
    ids=repr,
)
def test_bytes_against_fp32(codec: Codec, factor: float) -> None:
    for numel in (20_000, 1_000_003):
        assert 4 * numel / codec.wire_bytes(numel) >= factor - 1e-4


@every
def test_sizes_are_closed_forms(codec: Codec) -> None:
    assert codec.wire_bytes(0) == 0
    for numel in (0, 1, 5, 63, 64, 1000):
        assert codec.wire_bytes(numel) % 16 == 0
        assert codec.state_bytes(numel) == sum(tensor.nbytes for tensor in codec.state(numel).values())


# -- errors
def bound(codec: Codec, values: Tensor) -> Tensor:
    """The largest error that a codec's docstring allows for each value, of values in its range."""
    if isinstance(codec, Cast):
        return values.abs() * (2.0**-8 if codec.dtype == "bfloat16" else 2.0**-11) + 3e-8
    assert isinstance(codec, (Int8, Int4))
    parts = values.abs().split(codec.block)
    largest = torch.cat([part.max().expand(part.numel()) for part in parts]) if values.numel() else values
    step = largest / codec.levels * (1 + 2.0**-7)
    return (step if codec.stochastic else step / 2) + 2.0**-100


@pytest.mark.parametrize("codec", ROUNDING, ids=repr)
@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_error_stays_within_its_bound(codec: Codec, spread: float) -> None:
    values = normal(5000, 1, spread).clamp(-6e4, 6e4)
    assert ((send(codec, values, codec.state(5000)) - values).abs() <= bound(codec, values)).all()


def test_two_bits_lose_a_third_and_signs_three_fifths() -> None:
    values = normal(100_000)
    for codec, share in ((TwoBit(), 0.345), (Ternary(), 0.463), (OneBit(), 0.603)):
        assert float((codec.round_trip(values) - values).norm() / values.norm()) == pytest.approx(
            share, abs=0.005
        )
    found = TwoBit(block=16).round_trip(torch.tensor([4.0, -1.0, 0.5, -0.5] * 4))  # the mean is 1.5
    assert found[:4].tolist() == [2.8125, -0.9375, 0.9375, -0.9375]


def test_what_is_large_need_not_wait() -> None:
    """Few values of a block are far above its mean, as in gradients."""
    values = normal(100_000, 5, 1.0)
    lost = {c: float((c.round_trip(values) - values).norm() / values.norm()) for c in (Ternary(), TwoBit())}
    assert lost[Ternary()] < 0.42
    assert lost[TwoBit()] > 0.7
    values = torch.tensor([1.0] * 13 + [-7.0, 40.0, 40.0])
    found = Ternary(block=16, large=2).round_trip(values)  # the mean is 6.25 in bf16
    assert found.tolist() == [0.0] * 13 + [-12.5, 37.5, 37.5]
    assert Ternary(block=16, large=1).round_trip(values).tolist() == [0.0] * 13 + [-12.5, 37.5, 12.5]


HALVES = [
    Int8(feedback=True, residual="bfloat16"),
    Int4(residual="bfloat16"),
    TwoBit(residual="bfloat16"),
    Ternary(residual="bfloat16"),
    OneBit(residual="bfloat16"),
    TopK(0.05, residual="bfloat16"),
]


@pytest.mark.parametrize("codec", HALVES, ids=repr)
def test_a_residual_in_16_bits_loses_a_512th_of_itself_a_step(codec: Codec) -> None:
    numel, steps, state = 1000, 50, codec.state(1000)
    assert state["residual"].dtype == torch.bfloat16
    assert codec.state_bytes(numel) == 2 * numel
    total, largest = torch.zeros(numel, dtype=torch.float64), 0.0
    for step in range(steps):
        values = normal(numel, step)
        total += values - send(codec, values, state, step).double()
        largest = max(largest, float(state["residual"].abs().max()))
    gap = float((total - state["residual"].double()).abs().max())
    assert 0.0 < gap <= steps * largest / 512


def test_a_warm_up_works_on_the_state_of_what_follows() -> None:
    codec = OneBit(warmup_steps=1, warmup=Int4(), residual="bfloat16")
    state = codec.state(64)
    early = codec.at(0)
    assert early is not None
    send(early, normal(64), state)
    assert state["residual"].dtype == torch.bfloat16
    assert 0.0 < float(state["residual"].abs().max()) < 0.5


@pytest.mark.parametrize("codec", ROUNDING, ids=repr)
@quick
@given(values=shards())
def test_awkward_values_stay_within_the_bound(codec: Codec, values: Tensor) -> None:
    if codec == Cast("float16"):
        values = values.clamp(-6e4, 6e4)
    values = values.clamp(-1.7e38, 1.7e38)  # larger ones count as overflowed
    found = send(codec, values, codec.state(values.numel()))
    assert ((found - values).abs() <= bound(codec, values)).all()


@every
@quick
@given(values=shards(broken=True))
def test_what_is_not_finite_arrives_as_such_and_leaves_the_state_alone(codec: Codec, values: Tensor) -> None:
    state = codec.state(values.numel())
    for tensor in state.values():
        tensor.fill_(0.25)
    broken = ~values.isfinite()
    found = send(codec, values, state)
    if isinstance(codec, TopK):  # of many it may send some, and one is enough
        assert broken.any() == (~found.isfinite()).any()
    else:
        assert not found[broken].isfinite().any()
    for tensor in state.values():
        assert tensor.isfinite().all()
        assert (tensor[broken] == 0.25).all()
    kept = codec.state(values.numel())
    send(codec, torch.ones_like(values), kept)
    assert all(tensor.isfinite().all() for tensor in kept.values())


def test_the_first_go_of_what_is_not_finite_whatever_the_bits_of_a_nan() -> None:
    """Else which values are sent would depend on how a NaN came about, and training with it."""
    bits = torch.tensor([0x3F800000, 0x7FC00000, 0x7F800000, 0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32)
    values, codec = bits.view(torch.float32), TopK(ratio=0.5)
    found = send(codec, values, codec.state(6))
    assert found.isfinite().tolist() == [True, False, False, False, True, True]
    marked = sparse._largest(values, 3)  # as on a GPU
    assert marked.tolist() == [False, True, True, True, False, False]


@pytest.mark.parametrize(
    "codec", [Int8(16, feedback=True), Int4(), TwoBit(), Ternary(), OneBit(), TopK(), TopK(0.1)], ids=repr
)
def test_sent_and_residual_are_the_sum_of_gradients(codec: Codec) -> None:
    numel, state = 1000, codec.state(1000)
    sent, wanted = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    for step in range(50):
        values = normal(numel, step, 1.0)
        wanted += values
        sent += send(codec, values, state, step)
    assert (sent - wanted).abs().max() > 1e-3, "nothing was lost: this proves nothing"
    assert (sent + state["residual"] - wanted).abs().max() <= 1e-6 * wanted.abs().max()


@pytest.mark.parametrize(
    "codec", [Int8(block=64, stochastic=True), Int4(block=64, feedback=False, stochastic=True)], ids=repr
)
def test_stochastic_rounding_is_unbiased(codec: Int8 | Int4) -> None:
    values = normal(64, 3)
    step = values.abs().max() / codec.levels
    count = 2000
    mean = torch.stack([codec.round_trip(values, turn) for turn in range(count)]).double().mean(0)
    # A round of dice has a standard deviation of half a step at most.
    assert ((mean - values).abs() <= 5 * 0.5 * step / count**0.5).all()
    nearest = (replace(codec, stochastic=False).round_trip(values) - values).abs()
    assert nearest.max() > 0.3 * step, "rounding to nearest would pass too: this proves nothing"


def test_stochastic_rounding_differs_by_place_value_and_step() -> None:
    codec, values = Int8(stochastic=True), torch.full((256,), 0.3)
    values[0] = 1.0
    first, again, later = (codec.round_trip(values, step) for step in (0, 0, 1))
    assert torch.equal(first, again)
    assert first[1:].unique().numel() == 2, "equal values at different places roll different dice"
    assert not torch.equal(first, later)
    share = float((first[1:] > 0.3).float().mean())
    assert 0.0 < share < 1.0


# -- what surrounds them
@pytest.mark.parametrize("codec", [*ALL, *OTHER], ids=repr)
def test_settings_are_plain_data_and_give_the_codec_back(codec: Compression) -> None:
    described = codec.settings()
    assert json.loads(json.dumps(described)) == described
    assert from_settings(described) == codec
    assert hash(from_settings(described)) == hash(codec)


@dataclass(frozen=True)
class Signs(Codec):
    """A user's own: nothing but the sign, one byte each, and what was not sent is kept."""

    size: float = 0.1
    numerics = "approximate"
    feedback = True

    def wire_bytes(self, numel: int) -> int:
        return numel

    def encode(self, values: Tensor, code: Tensor, state: dict[str, Tensor], step: int) -> None:
        wanted = values + state["residual"]
        signs = wanted.sign()
        code.view(torch.int8).copy_(signs)
        state["residual"].copy_(wanted - self.size * signs)

    def decode(self, code: Tensor, out: Tensor, add: bool) -> None:
        values = code.view(torch.int8).float() * self.size
        out.add_(values) if add else out.copy_(values)


def test_a_codec_of_ones_own_is_one_small_class() -> None:
    codec, state = Signs(), Signs().state(3)
    values = torch.tensor([0.08, -0.05, 0.0])
    sent = torch.stack([send(codec, values, state, step) for step in range(40)]).mean(0)
    assert torch.allclose(sent, values, atol=0.01)
    assert codec.state_bytes(3) == 12
    assert codec.active(0)
    assert from_settings({"kind": "Signs", "size": 0.1}) == codec


def test_the_codec_in_the_documentation_works() -> None:
    text = (Path(__file__).parents[2] / "docs" / "communication.md").read_text(encoding="utf-8")
    (block,) = (part for part in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "(zs.Codec)" in part)
    names: dict[str, Any] = {"__name__": "documentation"}
    exec(block, names)
    codec, state = names["Float8"](), names["Float8"]().state(1000)
    sent = wanted = torch.zeros(1000, dtype=torch.float64)
    for step in range(20):
        sent, wanted = sent + send(codec, normal(1000, step), state), wanted + normal(1000, step)
    assert (sent - wanted).abs().max() > 0.01
    assert (sent + state["residual"] - wanted).abs().max() <= 1e-6 * wanted.abs().max()
    found = send(codec, torch.tensor([1.0, float("nan")]), state := codec.state(2))
    assert found.isnan().tolist() == [False, True]
    assert state["residual"].isfinite().all()


def test_every_public_codec_says_its_numerics_and_its_cost() -> None:
    for name in zeroshard.compress.__all__:
        thing = getattr(zeroshard.compress, name)
        if isinstance(thing, type) and thing not in (Codec, Compression, MeanCodec):
            assert f"Numerics: {thing.numerics}" in (thing.__doc__ or "")


def test_warm_up() -> None:
    for codec in (OneBit(warmup_steps=3), TopK(warmup_steps=3)):
        assert [codec.active(step) for step in range(5)] == [False, False, False, True, True]
    assert TopK().active(0)
    assert OneBit(warmup_steps=3).at(2) is None
    coded = OneBit(warmup_steps=3, warmup=Int4())
    assert [coded.at(step) for step in (0, 2, 3)] == [Int4(), Int4(), coded]
    assert coded.early == (Int4(),)


def test_a_ramp_falls_by_quarters() -> None:
    codec = TopK(ratio=0.01, warmup_steps=2, ramp_steps=6, momentum=0.9, freeze=True)
    shares = [0.25, 0.25, 0.0625, 0.0625, 0.015625, 0.015625]
    expected = [None, None, *(TopK(share, 0.9) for share in shares), codec, codec]
    assert [codec.at(step) for step in range(10)] == expected
    assert [codec.active(step) for step in range(4)] == [False, False, True, True]
    assert codec.early == (TopK(0.25, 0.9), TopK(0.0625, 0.9), TopK(0.015625, 0.9))
    assert sizes_of(codec, 4)[1](1000) == 2000
    short = TopK(ratio=0.01, ramp_steps=2)
    assert [short.at(step) for step in range(3)] == [TopK(0.25), TopK(0.0625), short]


# -- mistakes
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Cast("int8"), r"Cast\(dtype='int8'\): pass 'bfloat16' or 'float16'"),  # type: ignore[arg-type]
        (lambda: Int8(block=100), r"Int8\(block=100\): a multiple of 16 from 16 to 65536"),
        (lambda: Int8(block=0), r"Int8\(block=0\): a multiple of 16"),
        (lambda: Int8(feedback=1), r"Int8\(feedback=1\): pass True or False"),  # type: ignore[arg-type]
        (lambda: Int4(stochastic="no"), r"Int4\(stochastic='no'\): pass True or False"),  # type: ignore[arg-type]
        (lambda: Ternary(block=272), r"Ternary\(block=272\): at most 256"),
        (lambda: Ternary(large=-1), r"Ternary\(large=-1\): a number from 0 to 240"),
        (lambda: Ternary(feedback=None), r"Ternary\(feedback=None\): pass True or False"),  # type: ignore[arg-type]
        (lambda: TwoBit(feedback=None), r"TwoBit\(feedback=None\): pass True or False"),  # type: ignore[arg-type]
        (lambda: OneBit(feedback=0), r"OneBit\(feedback=0\): pass True or False"),  # type: ignore[arg-type]
        (lambda: OneBit(warmup_steps=-1), r"OneBit\(warmup_steps=-1\): 0 or more is needed"),
        (lambda: TopK(warmup_steps=0.5), r"TopK\(warmup_steps=0.5\): pass a whole number"),  # type: ignore[arg-type]
        (
            lambda: TopK(ratio=0.0),
            r"TopK\(ratio=0.0\): a share above 0 and up to 0.5 is needed: of more, values",
        ),
        (lambda: TopK(0.6), r"TopK\(ratio=0.6\): .* longer than all values alone\.$"),
        (lambda: TopK(1), r"alone\. One per cent is TopK\(0\.01\), not TopK\(1\)\."),
        (lambda: TopK(momentum=1.0), r"TopK\(momentum=1.0\) must be at least 0 and below 1"),
        (lambda: Int4(residual="half"), r"Int4\(residual='half'\): pass 'float32' or 'bfloat16'"),  # type: ignore[arg-type]
        (
            lambda: Int8(residual="bfloat16"),
            r"Int8\(residual='bfloat16'\) keeps nothing without feedback=True",
        ),
        (lambda: TopK(ramp_steps=-1), r"TopK\(ramp_steps=-1\): 0 or more is needed"),
        (lambda: TopK(ratio=0.3, ramp_steps=9), r"begins at a quarter of the values.*drop ramp_steps="),
        (lambda: OneBit(warmup="int4"), r"OneBit\(warmup='int4'\) must be a codec that needs no warm-up"),  # type: ignore[arg-type]
        (lambda: OneBit(warmup=OneBit()), r"must be a codec that needs no warm-up, e.g. zs.Int4"),
        (lambda: OneBit(warmup=TopK(momentum=0.9)), r"keeps residual, momentum .* OneBit keeps residual:"),
        (
            lambda: OneBit(warmup=Int4(residual="bfloat16")),
            r"the residual is that of OneBit: pass residual= there",
        ),
        (lambda: TopK(warmup=Int8()), r"is for a warm-up, and there is none: pass warmup_steps="),
        (lambda: LowRank(rank=0), r"LowRank\(rank=0\): 1 or more is needed"),
        (lambda: from_settings({"kind": "Int9"}), r"kind 'Int9' is unknown; known are .*Cast.*Int8"),
    ],
)
def test_wrong_options(make, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        make()


def test_a_codec_without_fields_known_is_refused() -> None:
    class Bare(Signs.__base__):  # type: ignore[misc, name-defined]
        numerics = "exact"
        wire_bytes = encode = decode = None

    with pytest.raises(OptionError, match="codec Bare is no dataclass"):
        Bare().settings()


@pytest.mark.parametrize("numerics", [None, "lossless"])
def test_a_codec_must_say_what_it_does_to_the_numbers(numerics: str | None) -> None:
    """What is unknown would count as exact."""
    mute = dataclass(frozen=True)(type("Mute", (Signs,), {"numerics": numerics}))
    with pytest.raises(OptionError, match=r"Mute has numerics=.* one of 'exact', 'rounding', 'approximate'"):
        mute().settings()


def test_a_codec_must_take_whole_bytes() -> None:
    parts = dataclass(frozen=True)(type("Fractions", (Signs,), {"wire_bytes": lambda _, numel: numel / 2}))
    with pytest.raises(OptionError, match=r"compress: wire_bytes\(999\) .* is 499.5: return a whole number"):
        routes_of(parts())


def test_wrong_tensors() -> None:
    codec, values = Int8(), torch.zeros(8)
    code = torch.zeros(codec.wire_bytes(8) + 1, dtype=torch.uint8)
    with pytest.raises(OptionError, match=r"`values` is torch\.float64 of shape"):
        codec.encode(values.double(), code[:-1], {}, 0)
    with pytest.raises(OptionError, match=r"`values` is torch.float32 of shape \(2, 4\)"):
        codec.encode(values.view(2, 4), code[:-1], {}, 0)
    with pytest.raises(OptionError, match="`code` holds 33 bytes; 8 values take 32"):
        codec.encode(values, code, {}, 0)
    with pytest.raises(OptionError, match="`code` begins at byte 1 of its storage"):
        codec.encode(values, code[1:], {}, 0)
    with pytest.raises(OptionError, match="`code` is on cpu and `out` on meta"):
        codec.decode(code[:-1], values.to("meta"), add=False)


def test_top_k_of_more_values_than_it_has_places_for() -> None:
    values = torch.empty(2**31, device="meta")
    code = torch.empty(TopK().wire_bytes(2**31), dtype=torch.uint8, device="meta")
    with pytest.raises(OptionError, match=r"in 32 bits, and a rank's piece here has 2,147,483,648 values"):
        TopK().encode(values, code, {"residual": values}, 0)


def test_a_codec_for_changes_keeps_nothing_of_its_own() -> None:
    Delta(OneBit(feedback=False, warmup_steps=0))
    for inner in (OneBit(warmup_steps=0), TopK(), Int4(), Delta(), "int4"):
        with pytest.raises(OptionError, match="keeps nothing and does not warm up"):
            Delta(inner)  # type: ignore[arg-type]
    delta = Delta(Int8(block=64))
    assert from_settings(delta.settings()) == delta
