"""16-bit compute with an fp32 master: the bits of plain PyTorch done by hand, stage by stage; close to one
process.

Tolerances, relative, on every loss of 20 steps: 2e-3 against fp32 (measured 2.3e-4 in bf16, 1e-4 in fp16),
1e-3 against one process in the same precision on the whole batch (measured 1.4e-4 and 3e-5). 16-bit weights
round to 2^-9 (bf16) or 2^-12 (fp16); one process rounds its gradient once, ranks round each their share.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import models
import pytest
import torch
from recipes import (
    Loop,
    Recipe,
    Trained,
    few,
    loss_of,
    mean_losses,
    micro_batches,
    on_ranks,
    optimizers,
    rank_by_rank,
    whole_batch_once,
)
from torch import Tensor

import zeroshard as zs
from zeroshard.errors import StateError
from zeroshard.testing import assert_losses, assert_same_bits, ranks

pytestmark = pytest.mark.ranks
STAGES = (0, 1, 2, 3)
BF16, FP16 = zs.Precision("bfloat16"), zs.Precision("float16")
ALL_FP16 = zs.Precision("float16", grad="float16")  # gradients too, with the scale of the loss until the step


def one_process(recipe: Recipe, dtype: torch.dtype, world: int) -> Trained:
    """Mixed precision as one writes it in plain PyTorch: 16-bit weights compute, fp32 ones are updated."""
    master, model = models.build(recipe.model), models.build(recipe.model).to(dtype)
    loop = Loop(recipe, master, optimizers(recipe.optimizer, master))

    def backward(step: int, scale: object) -> float:
        with torch.no_grad():
            for fine, coarse in zip(master.parameters(), model.parameters(), strict=True):
                coarse.copy_(fine)
        model.zero_grad()
        total = 0.0
        for batches in micro_batches(recipe, step, world):
            batch = torch.cat(batches)
            batch = batch.to(dtype) if batch.is_floating_point() else batch
            loss = loss_of(recipe, model, batch, step in recipe.infinite)
            scale(loss).backward()  # type: ignore[operator]
            total += loss.item()
        for fine, coarse in zip(master.parameters(), model.parameters(), strict=True):
            fine.grad = coarse.grad.float()
        return total

    loop.train(backward)
    return loop.told


CASES = [
    (Recipe(), BF16, 2),
    (Recipe(), BF16, 4),
    (Recipe("mlp", "sgd"), BF16, 4),
    (Recipe("even gpt", "adamw fused"), BF16, 2),
    (Recipe("mlp", "adafactor"), BF16, 2),
    (Recipe(optimizer="muon", steps=few(8)), BF16, 2),
    (Recipe(accumulate=3, steps=few(8)), BF16, 2),
    (Recipe(accumulate=3, no_sync=True, steps=few(8)), BF16, 2),
    (Recipe(scaled=True, steps=20), FP16, 2),
    (Recipe("mlp", scaled=True, infinite=(9, 10, 15), steps=20), FP16, 4),
    (Recipe(steps=few(8)), zs.Precision("bfloat16", keep=("*norm*",)), 2),
    (Recipe(steps=few(8)), zs.Precision("bfloat16", reduce="float32"), 2),
    (Recipe(steps=few(8), accumulate=2), zs.Precision("bfloat16", grad="float32"), 2),
    (Recipe("mlp", steps=few(8)), zs.Precision("float16", reduce="float32"), 2),
    (
        Recipe("even gpt", accumulate=3, no_sync=True, steps=few(8)),
        zs.Precision("bfloat16", reduce="float32"),
        2,
    ),
    (
        Recipe(accumulate=3, no_sync=True, steps=few(8)),
        zs.Precision("bfloat16", reduce="float32", keep=("*norm*",)),
        3,
    ),
    (Recipe(scaled=True, steps=12), ALL_FP16, 2),
    (Recipe("even gpt", "adamw fused", accumulate=2, scaled=True, steps=8), ALL_FP16, 2),
    (Recipe("mlp", "sgd", scaled=True, infinite=(4, 9), steps=12), ALL_FP16, 4),
    (Recipe(scaled=True, steps=8), zs.Precision("float16", grad="float16", keep=("*norm*",)), 2),
]


@pytest.mark.wide(2)
@pytest.mark.parametrize(("recipe", "precision", "world"), CASES)
def test_every_stage_has_the_bits_of_plain_pytorch(
    recipe: Recipe, precision: zs.Precision, world: int
) -> None:
    by_hand = rank_by_rank(recipe, world, precision)
    for stage in STAGES:
        trained = on_ranks(world, recipe, stage=stage, precision=precision)
        assert_same_bits(trained[0].weights, by_hand.weights)
        assert_losses(mean_losses(trained), by_hand.losses, 1e-6)
        assert trained[0].scales == by_hand.scales
    assert by_hand.losses[-1] < by_hand.losses[0], "the run learnt nothing, so it proves little"


@pytest.mark.parametrize(("recipe", "precision", "world"), CASES[:2] + CASES[8:10])
def test_close_to_one_process(recipe: Recipe, precision: zs.Precision, world: int) -> None:
    losses = mean_losses(on_ranks(world, recipe, stage=3, precision=precision))
    plain = one_process(recipe, getattr(torch, precision.compute), world)
    assert_losses(losses, plain.losses, 1e-3)
    assert_losses(losses, whole_batch_once(recipe, world).losses, 2e-3)
    assert on_ranks(world, recipe, stage=3, precision=precision)[0].scales == plain.scales


@pytest.mark.parametrize("stage", STAGES)
def test_clipping_in_bf16(stage: int) -> None:
    """Gradients are bf16, so `clip_grad_norm_` rounds their norm to bf16: stages differ by one step of it."""
    recipe = Recipe(clip=0.2, steps=few(8))
    trained = on_ranks(2, recipe, stage=stage, precision=BF16)
    by_hand = rank_by_rank(recipe, 2, BF16)
    assert_losses(trained[0].norms, by_hand.norms, 2**-7)
    assert_losses(mean_losses(trained), by_hand.losses, 1e-3)
    whole = on_ranks(2, recipe, stage=0, precision=BF16)
    assert_losses(trained[0].norms, whole[0].norms, 2**-7)
    assert_losses(mean_losses(trained), mean_losses(whole), 1e-3)
    if stage > 1:
        assert_same_bits(trained[0].weights, on_ranks(2, recipe, stage=1, precision=BF16)[0].weights)


@pytest.mark.parametrize("stage", STAGES)
def test_clip_norm_in_16_bits_measures_in_fp32(stage: int) -> None:
    """Unlike what `clip_grad_norm_` makes of bf16 gradients. One step: what follows upon a last bit that
    differs is rounded to 16."""
    for recipe, precision in ((Recipe(steps=1), BF16), (Recipe(scaled=True, steps=1), FP16)):
        norms = []
        for one in (0, stage):
            stats = on_ranks(2, recipe, stage=one, precision=precision, clip_norm=0.2)[0].stats
            assert stats is not None
            norms.append(stats.norm)
        assert norms[0] > 0.2
        assert norms[1] == pytest.approx(norms[0], rel=1e-6)


@pytest.mark.wide(2)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw fused"])
@pytest.mark.parametrize("precision", [ALL_FP16, zs.Precision("float16", grad="float16", keep=("*norm*",))])
def test_clipping_of_gradients_in_fp16(precision: zs.Precision, optimizer: str) -> None:
    """By `clip_norm=`, which knows their scale."""
    recipe = Recipe("gpt", optimizer, scaled=True, steps=10)
    by_hand = rank_by_rank(replace(recipe, clip=0.2), 2, precision)
    assert min(by_hand.norms) > 0.2, "nothing was clipped"
    first = on_ranks(2, recipe, stage=1, precision=precision, clip_norm=0.2)[0]
    for stage in STAGES:
        trained = on_ranks(2, recipe, stage=stage, precision=precision, clip_norm=0.2)
        assert trained[0].stats is not None
        assert trained[0].stats.norm == pytest.approx(by_hand.norms[-1], rel=1e-4)
        assert_losses(mean_losses(trained), by_hand.losses, 1e-4)
        if stage > 0:
            assert_same_bits(trained[0].weights, first.weights)


def moved(grad: str, fused: bool, clip_norm: float | None) -> torch.Tensor:
    """What one step makes of a weight whose gradient, without its scale, is below the smallest fp16."""
    model = torch.nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e6, fused=fused)
    precision = zs.Precision("float16", grad=grad)
    run = zs.shard(model, optimizer, precision=precision, clip_norm=clip_norm)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    before = model.weight.detach().clone()
    scaler.scale(model(torch.ones(1, 4)).float().sum() * 2.0**-28).backward()
    scaler.step(optimizer)
    run.close()
    return model.weight.detach() - before


@pytest.mark.parametrize("clip_norm", [None, 2.0**-27, 1.0])
@pytest.mark.parametrize("fused", [False, True])
def test_small_gradients_in_fp16_are_not_lost_with_their_scale(fused: bool, clip_norm: float | None) -> None:
    torch.manual_seed(0)
    narrow = moved("float16", fused, clip_norm)
    torch.manual_seed(0)
    assert torch.equal(narrow, moved("float32", fused, clip_norm))
    assert (narrow < 0).all()


@pytest.mark.parametrize(("name", "precision"), [("bf16", BF16), ("fp16", FP16), ("float32", None)])
def test_short_names(name: str, precision: zs.Precision | None) -> None:
    recipe = Recipe("mlp", steps=4)
    short, spelled = (on_ranks(2, recipe, stage=2, precision=p) for p in (name, precision))
    assert_same_bits(short[0].weights, spelled[0].weights)


def dtypes(precision: zs.Precision) -> dict[str, tuple[str, str, str]]:
    """Per parameter the dtype of the sharded parameter, of what its module computes with, and of the
    gradient."""
    model = models.build("gpt")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = zs.shard(model, optimizer, stage=3, precision=precision)
    seen: dict[str, torch.dtype] = {}
    for path, module in model.named_modules():
        module.register_forward_pre_hook(
            lambda m, _, path=path: seen.update(
                {f"{path}.{n}": p.dtype for n, p in m._parameters.items() if p is not None}
            )
        )
    model(models.GPT.batch(2, 0)).backward()
    result = {
        n: (str(p.dtype), str(seen[n]), str(p.grad.dtype)) for n, p in model.named_parameters() if n in seen
    }
    run._runtime.transport.close()
    return {name: tuple(t.removeprefix("torch.") for t in triple) for name, triple in result.items()}  # type: ignore[misc]


@pytest.mark.parametrize(
    ("precision", "norm", "rest"),
    [
        (BF16, ("float32", "bfloat16", "bfloat16"), ("float32", "bfloat16", "bfloat16")),
        # torch's GradScaler refuses fp16 gradients, so those land in fp32.
        (FP16, ("float32", "float16", "float32"), ("float32", "float16", "float32")),
        (
            zs.Precision("bfloat16", keep=("*norm*",), reduce="float32", grad="bfloat16"),
            ("float32", "float32", "float32"),
            ("float32", "bfloat16", "bfloat16"),
        ),
    ],
)
def test_dtypes(precision: zs.Precision, norm: tuple[str, ...], rest: tuple[str, ...]) -> None:
    found = ranks(2).run(dtypes, precision)[1]
    assert found["norm.weight"] == norm
    assert {triple for name, triple in found.items() if "norm" not in name} == {rest}


@pytest.mark.parametrize("precision", [None, BF16, FP16])
def test_one_rank_is_plain_pytorch(precision: zs.Precision | None) -> None:
    recipe = Recipe(clip=0.2 if precision is None else None, accumulate=2, scaled=precision is FP16, steps=10)
    by_hand = rank_by_rank(recipe, 1, precision)
    for stage in STAGES:
        assert_same_bits(on_ranks(1, recipe, stage=stage, precision=precision)[0].weights, by_hand.weights)


def test_gradients_that_are_left_when_a_run_is_closed_suit_a_plain_step() -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    run = zs.shard(model, optimizer, stage=0, precision="bf16")
    for step in range(2):
        model(torch.ones(1, 3)).sum().backward()
        if step == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            run.close()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    optimizer.step()


MICRO = 16


def micro_sums(options: dict[str, Any], dtype: str) -> dict[str, Tensor]:
    """After many micro-batches, all but the last without synchronisation: gradients, on rank 0."""
    model = models.build("mlp")
    run = zs.shard(model, **options, precision=zs.Precision("bfloat16", reduce=dtype))
    for micro in range(MICRO):
        with run.no_sync() if micro < MICRO - 1 else nullcontext():
            model(models.MLP.batch(3, seed=micro + 100 * run.rank)).backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert {grad.dtype for grad in grads.values()} == {getattr(torch, dtype)}
    whole = {n: g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for n, g in grads.items()}
    run.close()
    return whole


def micro_sums_by_hand(world: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Plain PyTorch: each micro-batch's bf16 gradient is added to a sum in another dtype."""
    model, total = models.build("mlp").bfloat16(), dict[str, Tensor]()
    for rank in range(world):
        own = dict[str, Tensor]()
        for micro in range(MICRO):
            model.zero_grad()
            model(models.MLP.batch(3, seed=micro + 100 * rank).bfloat16()).backward()
            for name, p in model.named_parameters():
                own[name] = own.get(name, torch.zeros(())).to(dtype) + p.grad.to(dtype)
        for name, grad in own.items():
            total[name] = total.get(name, torch.zeros(())) + grad.float()
    return {name: (grad / world).to(dtype) for name, grad in total.items()}


def test_micro_batches_without_synchronisation_are_added_in_the_dtype_that_travels() -> None:
    """As fully_shard adds them. In bf16 the sum would be 1 % off."""
    wide, narrow = (micro_sums_by_hand(2, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert any(not torch.equal(wide[n].bfloat16(), narrow[n]) for n in wide)
    for stage in STAGES:
        assert_same_bits(ranks(2).run(micro_sums, {"stage": stage}, "float32")[0], wide)
        assert_same_bits(ranks(2).run(micro_sums, {"stage": stage}, "bfloat16")[0], narrow)
    assert_same_bits(ranks(1).run(micro_sums, {}, "float32")[0], micro_sums_by_hand(1, torch.float32))


@pytest.mark.parametrize("unscaled", [0, 1, 2])
def test_a_scaler_with_two_optimizers_and_one_norm(unscaled: int) -> None:
    """The first step measures the gradients of both, so none may have the scale of the loss any more."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    both = [torch.optim.AdamW(layer.parameters(), lr=0.01) for layer in model]
    run = zs.shard(model, both, precision="fp16", clip_norm=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    scaler.scale(model(torch.ones(3, 4)).float().square().mean()).backward()
    for optimizer in both[:unscaled]:
        scaler.unscale_(optimizer)
    for number, optimizer in enumerate(both):
        if unscaled == number:
            with pytest.raises(StateError, match=r"Call scaler\.unscale_\(optimizer\) for each optimizer"):
                scaler.step(optimizer)
            break
        scaler.step(optimizer)
    else:
        assert 0.0 < run.stats().norm < 100.0
    run.close()
