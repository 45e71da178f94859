"""Codecs that know more than a flat shard: largest values, signs, low rank, rows. Values against a plain
computation."""

from __future__ import annotations

import pytest
import torch
from sent_values import normal, send
from torch import Tensor

from zeroshard.compress import Int8, LowRank, OneBit, Rows, TopK
from zeroshard.errors import OptionError
from zeroshard.layout.codes import WireParts, bodies_of, sizes_of, wire_bytes
from zeroshard.layout.sharding import FlatPackLayout, PackLayout, Split, slots_for


# -- the wire
@pytest.mark.parametrize("split", ["rows", "level", "whole", "flat"])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_a_wire_has_room_for_the_codes_of_all_ranks(split: Split, world: int) -> None:
    """Of any length: it is counted by ranks that have as much, and used rank by rank."""
    tensors = [("a", (11, 11)), ("b", (5,)), ("c", (16, 11)), ("d", ()), ("e", (29, 11)), ("f", (0, 3))]
    for codec in (Int8(block=64), OneBit(warmup_steps=3)):
        for last in range(1, len(tensors) + 1):
            slots = tuple(slots_for(tensors[:last], world, split if split != "flat" else "rows"))
            pack = (FlatPackLayout if split == "flat" else PackLayout)(slots, world, flags=True)
            ways = [WireParts.of(size, bodies_of(pack), len(slots)).nbytes for size in sizes_of(codec, 4)]
            assert wire_bytes(codec, pack, 4) == max(ways)


# -- largest values
@pytest.mark.parametrize("numel", [1, 5, 100, 1003])
@pytest.mark.parametrize("ratio", [0.01, 0.3, 0.5])
def test_the_largest_arrive_exactly_and_the_rest_stays(numel: int, ratio: float) -> None:
    codec, values = TopK(ratio), normal(numel, numel)
    state = codec.state(numel)
    found = send(codec, values, state)
    order = sorted(range(numel), key=lambda place: -abs(float(values[place])))[: codec.count(numel)]
    expected = torch.zeros(numel)
    expected[order] = values[order]
    assert torch.equal(found, expected)
    assert torch.equal(state["residual"], values - expected)


def test_of_equal_values_the_first_arrive() -> None:
    values = torch.tensor([1.0, -2.0, 2.0, 1.0, -1.0, 1.0, 0.0, 1.0])
    assert TopK(0.5).round_trip(values).tolist() == [1.0, -2.0, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert TopK(0.25).round_trip(torch.zeros(8)).tolist() == [0.0] * 8


def test_a_value_that_waits_is_sent_in_the_end() -> None:
    codec, state = TopK(0.1), TopK(0.1).state(10)
    values = torch.linspace(0.1, 1.0, 10)
    arrived = sum((send(codec, values, state) != 0).int() for _ in range(60))
    assert (arrived > 0).all()  # type: ignore[union-attr]


def test_momentum_correction_sends_velocities() -> None:
    """With everything sent at once it is plain gradients (velocities are cleared as they are sent); with
    little sent, sent plus residual is the sum of velocities, those sent being cleared."""
    codec = TopK(0.5, momentum=0.9)
    state = codec.state(50)
    for step in range(3):
        values = normal(50, step).masked_fill(torch.arange(50) % 2 == 1, 0.0)  # as many as are sent
        assert torch.equal(send(codec, values, state), values)
    codec = TopK(0.1, momentum=0.5)
    state = codec.state(50)
    velocity, waiting = torch.zeros(50), torch.zeros(50)
    for step in range(20):
        values = normal(50, step)
        velocity = values + velocity * 0.5
        waiting = waiting + velocity
        sent = send(codec, values, state)
        went = sent != 0
        assert torch.equal(sent[went], waiting[went])
        velocity[went], waiting[went] = 0.0, 0.0
        assert torch.equal(state["momentum"], velocity)
        assert torch.equal(state["residual"], waiting)


# -- signs
def test_signs_times_the_mean_magnitude_of_the_block() -> None:
    values = normal(96 + 5, 2)
    found = send(OneBit(block=48), values, OneBit(block=48).state(101))
    for part, sent in zip(values.split(48), found.split(48), strict=True):
        mean = part.double().abs().mean()
        assert (sent.abs().double() / mean - 1).abs().max() <= 2**-8
        assert torch.equal(sent.sign(), part.sign())
    assert OneBit(block=48).round_trip(torch.zeros(7)).tolist() == [0.0] * 7


# -- low rank
def means(
    codec: LowRank, grads: list[Tensor], states: list[dict[str, Tensor]], shape: tuple[int, ...]
) -> Tensor:
    """What a step of several ranks gives each of them."""
    sent = [[torch.empty(length) for length in codec.lengths(shape)] for _ in grads]
    matrices = [grad.reshape(shape[0], -1).clone() for grad in grads]
    for number in range(len(sent[0])):
        for matrix, vectors, state in zip(matrices, sent, states, strict=True):
            codec.send(number, matrix, vectors, state)
        mean = torch.stack([vectors[number] for vectors in sent]).mean(0)
        for vectors in sent:
            vectors[number].copy_(mean)
    for vectors, state in zip(sent, states, strict=True):
        codec.finish(vectors, state)
    out = torch.empty_like(matrices[0])
    codec.expand(sent[0], 0, shape[0], out)
    return out.flatten()


def test_a_matrix_of_low_rank_arrives_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(20, 3, generator=generator), torch.randn(12, 3, generator=generator)
    grad, codec = left @ right.T, LowRank(rank=3)
    found = means(codec, [grad], [codec.state((20, 12))], (20, 12))
    assert (found.view(20, 12) - grad).abs().max() <= 1e-5 * grad.abs().max()


def test_low_rank_finds_the_leading_directions() -> None:
    """With the same gradient again and again, power iteration comes to the best approximation there is."""
    codec, grad = LowRank(rank=2), normal(600).view(30, 20)
    u, s, v = torch.linalg.svd(grad, full_matrices=False)
    best = (grad - u[:, :2] * s[:2] @ v[:2]).norm()
    state = codec.state((30, 20))
    for _ in range(200):
        state["residual"].zero_()
        found = means(codec, [grad], [state], (30, 20)).view(30, 20)
    assert (grad - found).norm() <= 1.01 * best
    assert (grad - found).norm() >= 0.999 * best


def test_low_rank_residuals_and_sent_are_the_mean_gradient() -> None:
    codec, shape = LowRank(rank=2), (16, 3, 4)
    states = [codec.state(shape) for _ in range(3)]
    assert torch.equal(states[0]["basis"], states[1]["basis"])
    sent = wanted = torch.zeros(16 * 12, dtype=torch.float64)
    for step in range(30):
        grads = [normal(192, 3 * step + rank).view(shape) for rank in range(3)]
        wanted = wanted + sum(grads).flatten() / 3  # type: ignore[union-attr]
        sent = sent + means(codec, grads, states, shape)
    left = sum(state["residual"] for state in states) / 3
    assert (sent - wanted).abs().max() > 0.1
    assert (sent + left - wanted).abs().max() <= 1e-6 * wanted.abs().max() * 10
    assert all(torch.equal(states[0]["basis"], state["basis"]) for state in states)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_low_rank_shows_what_is_not_finite_and_keeps_its_state(broken: float) -> None:
    codec, shape = LowRank(rank=2), (8, 6)
    states = [codec.state(shape) for _ in range(2)]
    means(codec, [normal(48, rank) for rank in range(2)], states, shape)
    before = [{name: tensor.clone() for name, tensor in state.items()} for state in states]
    bad = normal(48, 5)
    bad[17] = broken
    assert not means(codec, [normal(48, 4), bad], states, shape).isfinite().any()
    for state, old in zip(states, before, strict=True):
        assert all(torch.equal(state[name], old[name]) for name in state)
    assert means(codec, [normal(48, 6), normal(48, 7)], states, shape).isfinite().all()


def test_low_rank_of_nothing_is_nothing() -> None:
    codec, shape = LowRank(rank=2), (8, 6)
    found = means(codec, [torch.zeros(48)], [state := codec.state(shape)], shape)
    assert torch.equal(found, torch.zeros(48))
    assert all(tensor.isfinite().all() for tensor in state.values())


@pytest.mark.parametrize(
    ("shape", "suits"),
    [
        ((100, 100), True),
        ((100,), False),
        ((9, 9), True),
        ((8, 8), False),
        ((4, 1000), False),
        ((64, 3, 3, 3), True),
    ],
)
def test_which_shapes_become_smaller(shape: tuple[int, ...], suits: bool) -> None:
    codec = LowRank(rank=4)
    assert codec.suits(shape) == suits
    if suits:
        assert sum(codec.lengths(shape)) < torch.Size(shape).numel()
        assert codec.state_bytes(shape) == sum(tensor.nbytes for tensor in codec.state(shape).values())


# -- rows
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("touched", [[], [0], [3, 4, 99], list(range(100))], ids=len)
def test_rows_arrive_bit_for_bit(dtype: torch.dtype, touched: list[int]) -> None:
    codec, grad = Rows(), torch.zeros(100, 6, dtype=dtype)
    grad[touched] = normal(6 * len(touched)).view(-1, 6).to(dtype)
    code = torch.full((codec.room(100, 6, dtype),), 255, dtype=torch.uint8)
    used = codec.encode(grad, code)
    count = len(touched)
    assert used == 24 + (4 * count + 7) // 8 * 8 + count * 6 * dtype.itemsize
    assert int(code[:8].view(torch.int64)) == used
    out = torch.full_like(grad, 7.0)
    codec.decode(code[:used], out, add=False)
    assert torch.equal(out, grad)
    codec.decode(code[:used], out, add=True)
    assert torch.equal(out, grad + grad)


def test_rows_sum_as_the_dense_gradients_do() -> None:
    """bf16 rows of four ranks into fp32, in rank order."""
    codec, grads = Rows(), []
    for rank in range(4):
        grad = torch.zeros(50, 8, dtype=torch.bfloat16)
        places = torch.randperm(50, generator=torch.Generator().manual_seed(rank))[:20]
        grad[places] = normal(160, rank).view(20, 8).bfloat16()
        grads.append(grad)
    out = torch.empty(50, 8)
    for rank, grad in enumerate(grads):
        code = torch.empty(codec.room(50, 8, grad.dtype), dtype=torch.uint8)
        codec.encode(grad, code)
        codec.decode(code, out, add=rank > 0)
    dense = grads[0].float()
    for grad in grads[1:]:
        dense = dense + grad.float()
    assert torch.equal(out, dense)


def test_rows_carry_what_is_not_finite() -> None:
    grad = torch.zeros(10, 2)
    grad[3, 1] = float("nan")
    code = torch.empty(Rows().room(10, 2, grad.dtype), dtype=torch.uint8)
    assert Rows().encode(grad, code) == 24 + 8 + 8
    Rows().decode(code, out := torch.ones(10, 2), add=False)
    assert out.isnan().sum() == 1
    assert out[3, 1].isnan()


def test_rows_wrong_tensors() -> None:
    code = torch.empty(40, dtype=torch.uint8)
    with pytest.raises(OptionError, match=r"`values` is torch\.float32 of shape \(4,\)"):
        Rows().encode(torch.ones(4), code)
    with pytest.raises(OptionError, match="3 rows take 52 bytes, and `code` holds 40"):
        Rows().encode(torch.ones(3, 1), code)
