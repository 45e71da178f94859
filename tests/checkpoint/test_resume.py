"""Ten steps, a save, a fresh model and optimizer, a load, ten more: the bits of twenty in one go."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import cut_run as case
import pytest
import torch
from cut_run import Half
from recipes import Recipe

import zeroshard as zs
from zeroshard.checkpoint import read_manifest
from zeroshard.checkpoint.loading import CheckpointReader
from zeroshard.checkpoint.records import optional
from zeroshard.testing import assert_same_bits, ranks

pytestmark = pytest.mark.ranks

Kind = tuple[int, dict[str, Any]]  # a number of ranks, and options of `shard`
GPT = case.GPT
HOST = {"offload": zs.Offload(threads=1), "clip_norm": math.inf}
SPLIT = {"offload": zs.Offload(master="split", threads=1), "clip_norm": 0.5, "precision": "bf16"}
CODED = {"offload": zs.Offload(moments="int8", threads=1), "clip_norm": 0.5, "precision": "bf16"}


@cache
def uninterrupted(world: int, recipe: Recipe, **options: Any) -> Half:
    return ranks(world).run(case.whole, recipe, options)[0]


def check(folder: Path, world: int, recipe: Recipe, **options: Any) -> Half:
    """The second half has the bits of a run that was never cut. Returns it."""
    saved = ranks(world).run(case.first, folder / "ten", recipe, options)
    halves = ranks(world).run(case.second, folder / "ten", recipe, options)
    wanted = uninterrupted(world, recipe, **options)
    for half in halves:
        assert_same_bits(half.weights, wanted.weights)
    assert halves[0].losses == wanted.losses[case.HALF :]
    for half, former in zip(halves, saved, strict=True):
        assert_same_bits(half.held, former.held)
        assert half.draws == former.draws
    assert halves[0].draws != halves[-1].draws
    assert halves[0].extra["at"] == case.HALF
    assert torch.equal(halves[0].extra["order"], torch.arange(3))
    result: Half = halves[0]
    return result


@pytest.mark.wide(2)
@pytest.mark.parametrize("name", case.SHORT)
def test_every_kind_of_run_goes_on_with_the_same_bits(tmp_path: Path, name: str) -> None:
    recipe, options = case.MATRIX[name]
    half = check(tmp_path, 2, recipe, **options)
    assert half.rests == set(name.partition(": ")[2].replace(" and ", ", ").split(", ")) or ":" not in name


# Kinds of state that change at different moments.
CLIPPED = Recipe(clip=0.01)  # in place: with one rank, what was under way
BESIDE: dict[str, tuple[int, Recipe, dict[str, Any]]] = {
    "device": (2, GPT, {"stage": 3}),
    **{f"host, stage {stage}": (2, GPT, {**HOST, "stage": stage}) for stage in range(4)},
    "delayed, one rank": (1, CLIPPED, {"sync": zs.Delayed()}),
    **{name: (2, *case.MATRIX[name])
       for name in ("host, split master, clipped", "disk, 8-bit moments", "auto: device, host and disk",
                    "delayed, stage 2", "delayed, stage 3, host", "int8 with feedback", "low rank and rows",
                    "changes")},
}  # fmt: skip


@pytest.mark.wide(3)
@pytest.mark.parametrize("name", BESIDE)
def test_every_kind_of_run_goes_on_while_it_is_saved(tmp_path: Path, name: str) -> None:
    """What is saved beside training is the state at the call, bit for bit, and training has the bits that it
    has with a blocking save."""
    world, recipe, options = BESIDE[name]
    for half, blocked in ranks(world).run(case.beside, tmp_path, recipe, options):
        assert half.losses == blocked.losses
        assert_same_bits(half.weights, blocked.weights)
    blocking, background = (read_manifest(tmp_path / name) for name in ("False", "True"))
    assert background.entries == blocking.entries  # with the checksums of all bytes
    for manifest in (background, blocking):
        manifest.values.pop("options")  # they name a folder on the disk
    assert (background.values, background.own) == (blocking.values, blocking.own)


def changed(folder: Path, recipe: Recipe, before: Kind, after: Kind) -> Half:
    """Saved by one kind of run, loaded by another: weights and moments arrive bit for bit."""
    saved = ranks(before[0]).run(case.first, folder / "ten", recipe, before[1])[0]
    halves = ranks(after[0]).run(case.second, folder / "ten", recipe, after[1])
    for half in halves:
        assert_same_bits(half.held, saved.held)
        assert half.extra["at"] == case.HALF
    result: Half = halves[0]
    return result


@pytest.mark.parametrize(("before", "after", "optimizer"), [(2, 4, "adamw"), (4, 3, "sgd"), (2, 1, "adamw")])
def test_another_world_size_goes_on_with_the_same_training(
    tmp_path: Path, before: int, after: int, optimizer: str
) -> None:
    recipe = Recipe(model="mlp", optimizer=optimizer)
    half = changed(tmp_path, recipe, (before, {"stage": 3}), (after, {"stage": 2}))
    for name, weight in uninterrupted(2, recipe, stage=3).weights.items():
        torch.testing.assert_close(half.weights[name], weight, rtol=0, atol=1e-6)


def test_a_difference_at_another_world_size_is_that_of_plain_pytorch(tmp_path: Path) -> None:
    """Batches cut for three ranks are rounded otherwise than for two, in plain PyTorch as here: to the bit.
    What that makes of the weights is below 1e-6, but for numbers that mean nothing to the model."""
    half = changed(tmp_path, GPT, (2, {"stage": 3}), (3, {"stage": 2}))
    assert_same_bits(half.weights, case.by_hand(GPT, (2, 3)))
    for name, weight in uninterrupted(2, GPT, stage=3).weights.items():
        assert float(case.without_key_bias(name, half.weights[name] - weight).abs().max()) < 1e-6, name


def stored(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint that belong to no single rank."""
    manifest = read_manifest(path)
    with CheckpointReader(path, manifest) as reader:
        shared = [entry for entry in manifest.entries if not optional(entry.kind)]
        return {f"{entry.kind} {entry.name}": reader.whole(entry) for entry in shared}


@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
def test_whole_tensors_find_their_new_owners(tmp_path: Path, optimizer: str) -> None:
    """Muon's matrices and Adafactor's factors are on one rank each; among three, on another one. Saved again
    there, the checkpoint is the same."""
    recipe = Recipe(optimizer=optimizer)
    ranks(2).run(case.first, tmp_path / "two", recipe, {"stage": 2})
    half = ranks(3).run(case.second, tmp_path / "two", recipe, {"stage": 3}, True, tmp_path / "three")[0]
    assert_same_bits(stored(tmp_path / "three"), stored(tmp_path / "two"))
    wanted = uninterrupted(2, recipe, stage=2)
    assert sum(half.losses) / case.HALF == pytest.approx(
        sum(wanted.losses[case.HALF :]) / case.HALF, rel=0.05
    )


PLAIN = {**SPLIT, "offload": zs.Offload(threads=1)}


@pytest.mark.wide(2)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param({"stage": 3}, {"stage": 1, "clip_norm": math.inf}, id="stage"),
        pytest.param({"stage": 3}, {**HOST, "stage": 2}, id="to the host"),
        pytest.param({**HOST, "stage": 2}, {"stage": 0}, id="from the host"),
        pytest.param({**SPLIT, "stage": 2}, {**PLAIN, "stage": 3}, id="split to plain"),
        pytest.param({**PLAIN, "stage": 3}, {**SPLIT, "stage": 3}, id="plain to split"),
        pytest.param({**SPLIT, "stage": 2}, {"stage": 3}, id="bf16 on the host to fp32 on the device"),
        pytest.param({"stage": 2}, {"stage": 3, "precision": "bf16"}, id="fp32 to bf16"),
        pytest.param({**CODED, "stage": 3}, {"stage": 2}, id="8-bit moments to fp32"),
    ],
)
def test_another_stage_tier_or_precision_gets_the_same_numbers(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    half = changed(tmp_path, GPT, (2, before), (2, after))
    wanted = uninterrupted(2, GPT, **before).losses[case.HALF :]
    assert half.losses == pytest.approx(wanted, rel=1e-2 if "precision" in before | after else 1e-5)


def test_moments_that_a_codec_froze_stay_behind_where_none_does(tmp_path: Path) -> None:
    """The host's update, which no codec freezes, goes on from all the rest."""
    coded = {"stage": 2, "compress": zs.TopK(0.1, warmup_steps=2, freeze=True)}
    saved = ranks(2).run(case.first, tmp_path / "four", case.MLP, coded, False, 4)[0]
    half = ranks(2).run(case.second, tmp_path / "four", case.MLP, {**HOST, "stage": 3}, True, None, 4)[0]
    frozen = {key for key in saved.held if key.endswith("_kept")}
    assert frozen
    assert_same_bits(half.held, {key: value for key, value in saved.held.items() if key not in frozen})


@pytest.mark.parametrize("options", [{"stage": 0}, {"stage": 2}], ids=str)
def test_a_run_goes_back_to_before_a_codec_froze_its_moments(tmp_path: Path, options: dict[str, Any]) -> None:
    for once, again in ranks(2).run(there_and_back, tmp_path / "two", options):
        assert_same_bits(again, once)


def there_and_back(folder: Path, options: dict[str, Any]) -> tuple[dict[str, torch.Tensor], ...]:
    """A few steps that end with frozen moments, and the same ones again from a checkpoint of the second."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    codec = zs.TopK(0.1, warmup_steps=3, freeze=True)
    run = zs.shard(model, optimizer, compress=codec, **options)
    ended = list[dict[str, torch.Tensor]]()
    for steps in (range(6), range(2, 6)):
        for step in steps:
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + run.rank))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                run.save(folder)
        with run.gathered():
            ended.append({name: p.detach().clone() for name, p in model.named_parameters()})
        state = optimizer.state_dict()["state"]
        assert all("exp_avg_sq_kept" in kept for kept in state.values())
        if len(ended) == 1:
            run.load(folder)
            assert not any("exp_avg_sq_kept" in kept for kept in optimizer.state_dict()["state"].values())
    run.close()
    return tuple(ended)
