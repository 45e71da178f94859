"""`compress=`: a codec that loses nothing changes no bit, whatever it is combined with; one that does is seen
by all ranks alike."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from codecs_for_tests import Halves, Same
from kernel_values import built
from recipes import Recipe, on_ranks
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.kernels import library
from zeroshard.params.coded_gather import DeltaGather
from zeroshard.testing import assert_same_bits, ranks

pytestmark = pytest.mark.ranks
GPT, MLP = Recipe("gpt", steps=4), Recipe("mlp", steps=4)
SMALL = "8KiB"

CASES: list[tuple[int, Recipe, dict[str, Any]]] = [
    *[(2, GPT, {"stage": stage}) for stage in (0, 3)],
    (3, MLP, {"stage": 0, "transport": "gloo"}),
    (2, MLP, {"stage": 1, "transport": "gloo"}),
    *[(2, MLP, {"stage": stage, "precision": "bf16"}) for stage in (0, 2)],
    (2, Recipe("mlp", steps=3, accumulate=3, clip=0.05), {"stage": 0}),
    (2, Recipe("mlp", steps=3, accumulate=3, no_sync=True, clip=0.05), {"stage": 2}),
    (2, MLP, {"stage": 2, "sync": zs.Delayed()}),
    (2, Recipe("mlp", "muon", steps=3), {"stage": 3}),
    (2, GPT, {"stage": 2, "offload": zs.Offload(), "clip_norm": 0.5}),
]


@pytest.mark.parametrize(("world", "recipe", "options"), CASES, ids=str)
def test_a_codec_that_loses_nothing_changes_no_bit(
    world: int, recipe: Recipe, options: dict[str, Any]
) -> None:
    options = {**options, "bucket_bytes": SMALL}
    plain = on_ranks(world, recipe, **options)[0]
    coded = on_ranks(world, recipe, compress=Same(warmup=2), **options)[0]
    assert_same_bits(coded.weights, plain.weights)
    assert coded.scales == plain.scales
    assert coded.norms == plain.norms


GATHERED: list[tuple[int, Recipe, dict[str, Any]]] = [
    (2, GPT, {"stage": 3}),
    (3, MLP, {"stage": 3, "transport": "gloo"}),
    (2, MLP, {"stage": 1, "transport": "gloo"}),
    (4, MLP, {"stage": 3, "node_cache": True, "ranks_per_node": 2}),
    (2, MLP, {"stage": 2, "precision": "bf16"}),
    (2, GPT, {"stage": 3, "precision": "bf16", "offload": zs.Offload(master="split"), "clip_norm": 0.5}),
    (2, MLP, {"stage": 3, "precision": "bf16", "offload": zs.Offload(parameters="host"), "clip_norm": 0.5}),
]


@pytest.mark.parametrize(("world", "recipe", "options"), GATHERED, ids=str)
def test_parameters_gathered_through_a_codec_that_loses_nothing(
    world: int, recipe: Recipe, options: dict[str, Any]
) -> None:
    plain = on_ranks(world, recipe, **options)[0]
    coded = on_ranks(world, recipe, gather=Same(), **options)[0]
    assert_same_bits(coded.weights, plain.weights)
    assert coded.losses == plain.losses


@pytest.mark.parametrize(
    ("world", "recipe", "options"),
    [
        (2, GPT, {"stage": 3}),
        (3, MLP, {"stage": 3, "transport": "gloo"}),
        (2, MLP, {"stage": 2, "precision": "bf16"}),
    ],
    ids=str,
)
def test_changes_that_lose_nothing_add_up_to_the_parameters(
    world: int, recipe: Recipe, options: dict[str, Any]
) -> None:
    """Up to the rounding of a difference and a sum."""
    plain = on_ranks(world, recipe, **options)[0]
    coded = on_ranks(world, recipe, gather=zs.Delta(Same()), **options)
    for one in coded:
        assert_same_bits(one.weights, coded[0].weights)
    for name, weight in plain.weights.items():
        torch.testing.assert_close(coded[0].weights[name], weight, rtol=2e-3, atol=2e-5)


def seen(gather: Any, stage: int) -> dict[str, Any]:
    """How far the weights that compute are from the exact ones, relative, after each of some steps; and the
    biases."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 48))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = zs.shard(model, optimizer, stage=stage, gather=gather, units=["0", "2"])
    errors, biases, before, sent = [], list[float](), run.stats(), []
    for step in range(6):
        x = torch.randn(8, 96, generator=torch.Generator().manual_seed(10 * step + run.rank))
        model(x).square().mean().backward()
        sent.append(sum((run.stats() - before).sent.get(kind, 0) for kind in ("gather", "publish")))
        before = run.stats()
        with run.gathered() as whole:
            exact, bias = (whole[name].detach().clone() for name in ("0.weight", "0.bias"))
        with run.kept_full(), torch.no_grad():
            nothing = model[0](torch.zeros(1, 96))
            shown = (model[0](torch.eye(96)) - nothing).t()
        errors.append(float((shown - exact).norm() / exact.norm()))
        biases.append(float((nothing - bias).norm()))
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return {"errors": errors, "biases": biases, "sent": sent}


@pytest.mark.parametrize("stage", [2, 3])
def test_four_bits_of_the_change_say_more_than_four_bits_of_the_weight(stage: int) -> None:
    four = zs.Int4(block=32, feedback=False)
    changes, afresh = (ranks(2).run(seen, gather, stage)[0] for gather in (zs.Delta(four), four))
    assert changes["errors"][0] < 1e-6  # the first time they are sent in full
    assert max(changes["errors"]) < 0.1 * min(afresh["errors"])
    assert 7 * changes["sent"][1] <= changes["sent"][0] <= 8 * changes["sent"][1]
    assert changes["sent"][2] <= afresh["sent"][2]


def test_two_bits_of_the_change_say_more_than_four_bits_of_the_weight() -> None:
    """And the biases, which a pattern leaves as they are, are exact."""
    two, four = zs.Delta(zs.TwoBit(feedback=False)), zs.Int4(block=32, feedback=False)
    changes, afresh = (ranks(2).run(seen, gather, 3)[0] for gather in ({"*.bias": None, "*": two}, four))
    assert max(changes["biases"]) == 0.0
    assert min(afresh["biases"]) > 0.0
    assert changes["errors"][0] < 1e-6
    assert min(changes["errors"][2:]) > 1e-6
    assert max(changes["errors"]) < 0.2 * min(afresh["errors"])
    assert changes["sent"][2] < 0.5 * afresh["sent"][2]


def in_two_bits(compiled: bool) -> tuple[int, dict[str, Tensor]]:
    """How often torch did the work of the kernels, and the weights."""
    plain, counted = zs.TwoBit._encode_run, 0

    def counting(*args: Any) -> Tensor:
        nonlocal counted
        counted += 1
        return plain(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zs.TwoBit, "_encode_run", counting)
        if not compiled:
            patch.setattr(library, "kernels", lambda: None)
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(40, 33), nn.Tanh(), nn.Linear(33, 40))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        gather = zs.Delta(zs.TwoBit(block=32, feedback=False))
        run = zs.shard(model, optimizer, stage=3, compress=zs.TwoBit(block=48), gather=gather)
        for step in range(4):
            x = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + run.rank))
            (model(x) - x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        rows = [gather_group.memory.coded for gather_group in run._runtime.gather_groups]
        gaps = [hole for coded in rows if isinstance(coded, DeltaGather) for hole in coded._holes]
        assert gaps, "padding is not saved, so what is believed of it must stay nothing"
        assert not any(hole.any() for hole in gaps)
        weights = models.whole_weights(run)
        run.close()
    return counted, weights


@built
def test_two_bits_are_the_same_without_compiled_kernels() -> None:
    compiled, plain = (ranks(2).run(in_two_bits, how) for how in (True, False))
    for (never, one), (often, other) in zip(compiled, plain, strict=True):
        assert never == 0
        assert often > 8
        assert_same_bits(one, other)


def changes_on_their_way(stage: int, transport: str, folder: str) -> list[Tensor]:
    """Losses, and what is believed in a checkpoint made while changes travel; rank 1 leaves a unit out."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options: dict[str, Any] = {"stage": stage, "transport": transport, "units": ["0", "1", "2"]}
    run = zs.shard(model, optimizer, gather=zs.Delta(zs.Int8(block=32)), **options)
    losses = []
    for step in range(5):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * step + run.rank))
        hidden = model[0](x) if run.rank and step % 2 else model[1](model[0](x))
        loss = model[2](hidden).square().mean()
        if step == 3:
            run.save(f"{folder}/half")
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    run.load(f"{folder}/half")
    losses.append(model(torch.ones(1, 32)).detach())
    run.close()
    return losses


@pytest.mark.parametrize("stage", [2, 3])
def test_changes_that_travel_beside_forward_change_no_bit(stage: int, tmp_path: Path) -> None:
    """Over shared memory they are added at once."""
    beside = ranks(2).run(changes_on_their_way, stage, "gloo", str(tmp_path / "beside"))
    at_once = ranks(2).run(changes_on_their_way, stage, "shm", str(tmp_path / "at once"))
    for mine, theirs in zip(beside, at_once, strict=True):
        assert all(map(torch.equal, mine, theirs))
    assert torch.equal(beside[0][-1], beside[1][-1])


class Rarely(nn.Module):
    """An embedding of which a batch touches few rows, and one that only odd ranks use. Tokens in."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.tokens = nn.Embedding(211, 6, sparse=sparse)
        self.seldom = nn.Embedding(40, 6)
        self.never = nn.Embedding(9, 6)
        self.head = nn.Linear(6, 1)

    def forward(self, tokens: torch.Tensor, seldom: bool) -> torch.Tensor:
        x = self.tokens(tokens)
        return self.head(x + self.seldom(tokens % 40) if seldom else x).square().mean()


def embed(options: dict[str, Any], dtype: torch.dtype, sparse: bool = False) -> dict[str, Any]:
    model = Rarely(sparse).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    run = zs.shard(model, optimizer, **options)
    for step in range(3):
        draw = torch.Generator().manual_seed(10 * step + run.rank)
        model(torch.randint(211, (4,), generator=draw), run.rank % 2 == 1).backward()
        unused = model.never.weight.grad is None
        optimizer.step()
        optimizer.zero_grad()
    stats = run.stats()
    weights = models.whole_weights(run)
    run.close()
    return {"weights": weights, "unused": unused, "stats": stats}


@pytest.mark.parametrize(
    ("stage", "world", "options", "dtype", "sparse"),
    [
        (0, 2, {}, torch.float32, False),
        (0, 2, {"transport": "gloo", "precision": "bf16"}, torch.float32, False),
        (1, 2, {}, torch.float64, False),
        (2, 3, {"precision": "bf16", "transport": "gloo"}, torch.float32, False),
        (3, 2, {"offload": zs.Offload(), "clip_norm": math.inf}, torch.float32, False),
        (3, 2, {"sync": zs.Delayed()}, torch.float32, True),
        (0, 4, {"transport": "nodes", "ranks_per_node": 2, "precision": "bf16"}, torch.float32, False),
    ],
)
def test_rows_have_the_bits_of_the_dense_gradient(
    stage: int, world: int, options: dict[str, Any], dtype: torch.dtype, sparse: bool
) -> None:
    options = {"stage": stage, **options}
    plain = ranks(world).run(embed, options, dtype, sparse)
    coded = ranks(world).run(embed, {**options, "compress": {"*.weight": zs.Rows()}}, dtype, sparse)
    for mine, theirs in zip(coded, plain, strict=True):
        assert_same_bits(mine["weights"], theirs["weights"])
        assert mine["unused"]
        assert theirs["unused"]
    # Two embeddings of 251 rows and one of 9, of which 4 rows and 8 are touched; a row takes 28 bytes.
    now, then = (told[0]["stats"] for told in (coded, plain))
    assert now.sent["reduce"] < 0.5 * then.sent["reduce"]
    # Delayed, the last gradients as they are leave in the forward that follows; nodes add dense ones first.
    if "sync" not in options and "ranks_per_node" not in options:
        assert now.uncompressed["reduce"] == pytest.approx(then.sent["reduce"], rel=0.15)  # but for padding


def first_gradient(options: dict[str, Any], steps: int) -> dict[str, Tensor]:
    """The sum of the gradients of one batch, again and again, as every rank sees it."""
    model = models.build("gpt")
    run = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.0), bucket_bytes=SMALL, **options)
    total: dict[str, Tensor] = {}
    for _ in range(steps):
        model.zero_grad()
        model(models.GPT.batch(3, seed=run.rank)).backward()
        for name, p in model.named_parameters():
            assert p.grad is not None
            total[name] = total[name] + p.grad if name in total else p.grad.clone()
    run.close()
    return total


def test_what_a_code_of_low_rank_loses_comes_later() -> None:
    """The sum over steps comes near that of the gradients. (Other codecs: bit by bit in `test_by_hand`.)"""
    steps, options = 48, {"stage": 0}
    exact = ranks(2).run(first_gradient, options, 1)[0]
    first, second = ranks(2).run(first_gradient, {**options, "compress": zs.LowRank(rank=2)}, steps)
    assert_same_bits(first, second)
    lost = sum(float((first[n] / steps - grad).square().sum()) for n, grad in exact.items())
    whole = sum(float(grad.square().sum()) for grad in exact.values())
    assert (lost / whole) ** 0.5 < 0.2


BITS = [zs.Cast("float16"), zs.Int8(), zs.Int4(), zs.OneBit(warmup_steps=0)]


@pytest.mark.parametrize(
    ("codec", "stage"),
    [
        *[(codec, stage) for stage, codec in enumerate(BITS)],
        (zs.TopK(ratio=0.1), 0),
        (zs.LowRank(2), 3),
        (zs.Rows(), 2),
    ],
    ids=str,
)
def test_an_overflow_on_one_rank_is_seen_by_all_in_the_same_step(codec: Any, stage: int) -> None:
    recipe = Recipe("mlp", steps=7, scaled=True, infinite=(2, 5))
    options = {"stage": stage, "precision": "fp16"}
    plain = on_ranks(2, recipe, **options)
    coded = on_ranks(2, recipe, **options, compress=codec)
    assert [told.scales for told in coded] == [told.scales for told in plain]
    assert all(weight.isfinite().all() for weight in coded[0].weights.values())


def squares(stage: int) -> tuple[float, float]:
    """Of all numbers in the flat gradients, padding included, and of the gradients themselves."""
    model = models.build("mlp")
    run = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.0), stage=stage, compress=Halves())
    for _ in range(2):
        model.zero_grad()
        model(models.MLP.batch(3, seed=run.rank)).backward()
    flat = 0.0
    for bucket in run._runtime.gradients.buckets:
        assert bucket.landed is not None
        held = bucket.landed[: bucket.pack.body(run.rank)] if bucket.whole is None else bucket.whole
        flat += float(held[: bucket.pack.full].double().square().sum())
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    local = [getattr(grad, "_local_tensor", grad) for grad in grads]
    run.close()
    return flat, sum(float(grad.double().square().sum()) for grad in local)


@pytest.mark.parametrize("stage", [0, 2])
def test_padding_stays_zero_whatever_a_codec_makes_of_it(stage: int) -> None:
    """It counts towards the norm of gradients that go to the host."""
    for flat, shown in ranks(2).run(squares, stage):
        assert flat == pytest.approx(shown, rel=1e-12)


class Scaled(nn.Module):
    """A number for all, among vectors that ranks have different rows of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.layer, self.scale = nn.Linear(9, 7), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * self.layer(x)).square().mean()


def numbers(codec: Any, stage: int) -> Tensor:
    """The one number, after steps that send little of everything."""
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = zs.shard(model, optimizer, stage=stage, compress=codec)
    for step in range(4):
        model(torch.randn(4, 9, generator=torch.Generator().manual_seed(10 * step + run.rank))).backward()
        optimizer.step()
        optimizer.zero_grad()
    with run.gathered("scale") as whole:
        value = whole["scale"].detach().clone()
    run.close()
    return value


@pytest.mark.parametrize("codec", [zs.OneBit(warmup_steps=0), zs.Ternary()], ids=str)
def test_ranks_agree_about_a_single_number(codec: Any) -> None:
    """Every rank has a copy of it; it travels as it is."""
    assert torch.equal(*ranks(2).run(numbers, codec, 2))
