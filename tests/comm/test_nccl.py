"""NCCL between several ranks. Where there are fewer GPUs than ranks they share them: see `Ranks`."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from offload_loop import Case as Offloaded
from offload_loop import furthest, offloaded, parts
from offload_loop import plain as plainly
from test_param_kinds import Branches
from trained_twice import STAGES, Trained, Training, assert_trained_alike, plain, rows, sharded, train

import zeroshard as zs
from zeroshard.testing import assert_same_bits, ranks

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.ranks,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

MODULES = ("test_param_kinds", "test_module_kinds", "test_loops")
# At stage 3 a unit that only some ranks use, or as often, cannot be gathered: NCCL needs all of them.
APART = ("branch", "experts", "generated")
HARD = [(module, name) for module in MODULES for name in importlib.import_module(module).CASES]


def works(name: str, stage: int) -> bool:
    if name == "bypassed units":  # as on the CPU
        return stage in (0, 3)
    return stage < 3 or name == "experts within units" or not any(word in name for word in APART)


def quietly(*arguments: Any) -> Trained:
    """cuDNN says that it copies the weights of an LSTM together."""
    warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
    return sharded(*arguments)


@cache
def expected(module: str, name: str, world: int) -> Trained:
    return plain(importlib.import_module(module).CASES[name], world, "cuda")


@pytest.mark.parametrize(
    ("module", "name", "stage"),
    [(*case, stage) for case in HARD for stage in STAGES if works(case[1], stage)],
)
def test_hard_models_train_as_in_one_process(module: str, name: str, stage: int) -> None:
    trained = ranks(2, "nccl").run(quietly, module, name, stage, "nccl", "cuda")
    assert_trained_alike(
        trained, expected(module, name, 2), importlib.import_module(module).CASES[name].tolerance
    )


@pytest.mark.parametrize("stage", STAGES)
def test_four_ranks(stage: int) -> None:
    for name in ("stack clipped", "tied", "tiny"):
        trained = ranks(4, "nccl").run(sharded, MODULES[0], name, stage, "nccl", "cuda")
        assert_trained_alike(trained, expected(MODULES[0], name, 4), 1e-9)


SHORT = Offloaded(steps=12, device="cuda")
BY_STAGE: list[dict[str, Any]] = [
    {},
    {"precision": "bf16"},
    {"precision": zs.Precision("bfloat16", reduce="float32")},
    {"offload": parts()},
    {"offload": parts(), "precision": "bf16"},
]


@cache
def over(transport: str, stage: int, index: int, accumulate: int = 1) -> Any:
    case = replace(SHORT, accumulate=accumulate)
    options = {"stage": stage, "transport": transport} | BY_STAGE[index]
    first, second = ranks(2, "nccl").run(offloaded, case, options)
    assert_same_bits(second.weights, first.weights)
    return first


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("index", range(len(BY_STAGE)), ids=lambda i: str(BY_STAGE[i]))
def test_the_bits_are_those_of_gloo(index: int, stage: int) -> None:
    """Two numbers have one sum. So what is known of gloo holds for NCCL."""
    assert_same_bits(over("nccl", stage, index).weights, over("gloo", stage, index).weights)
    assert over("nccl", stage, index).losses == over("gloo", stage, index).losses


def straight(case: Offloaded, options: dict[str, Any]) -> Any:
    """With tensors of any size gathered straight to their place, where all ranks own equally much of them."""
    with patch("zeroshard.layout.sharding.STRAIGHT", 16):
        return offloaded(case, options)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("index", range(len(BY_STAGE)), ids=lambda i: str(BY_STAGE[i]))
def test_tensors_that_come_straight_to_their_place(index: int, stage: int) -> None:
    options = {"stage": stage, "transport": "nccl"} | BY_STAGE[index]
    first, second = ranks(2, "nccl").run(straight, SHORT, options)
    assert_same_bits(second.weights, first.weights)
    assert_same_bits(first.weights, over("nccl", stage, index).weights)
    assert first.losses == over("nccl", stage, index).losses


@pytest.mark.parametrize("stage", STAGES)
def test_accumulation_and_clipping_as_in_one_process(stage: int) -> None:
    for index in (0, 3):
        distance, name = furthest(
            over("nccl", stage, index, 3).weights, plainly(replace(SHORT, accumulate=3), 2).weights
        )
        assert distance <= 1e-5, name


@pytest.mark.parametrize("index", range(len(BY_STAGE)), ids=lambda i: str(BY_STAGE[i]))
def test_stages_agree(index: int) -> None:
    """To the bit where the norm is a sum in one order: at stage 0 the host's is not that of rows."""
    for stage in (1, 2, 3):
        if "offload" in BY_STAGE[index]:
            distance, name = furthest(over("nccl", stage, index).weights, over("nccl", 0, index).weights)
            assert distance <= 1e-6, name
        else:
            assert_same_bits(over("nccl", stage, index).weights, over("nccl", 0, index).weights)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_units_that_only_one_rank_uses_are_handed_on_by_all(stage: int) -> None:
    """Forward hands on what the host has updated unit by unit, in one order whatever a rank uses."""
    first, second = ranks(2, "nccl").run(branches_on_host, stage, "nccl")
    assert_same_bits(second, first)
    assert_same_bits(first, ranks(2, "nccl").run(branches_on_host, stage, "gloo")[0])


def branches_on_host(stage: Any, transport: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model, rank = Branches().cuda(), dist.get_rank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    offload = zs.Offload(stage_bytes=2048)
    run = zs.shard(model, optimizer, stage=stage, transport=transport, offload=offload, clip_norm=1e9)
    for step in range(8):
        batch = rows(step, rank, 4).float().cuda(), (step + rank) % 3
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert run.stats().updates["early"] > 2
    run.close()
    return {name: value.cpu() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("offload", [None, zs.Offload()], ids=["device", "host"])
@pytest.mark.parametrize("split", ["rows", "whole"])
@pytest.mark.parametrize("stage", [1, 3])
def test_all_ranks_leave_out_the_step_in_which_one_overflows(stage: int, split: str, offload: Any) -> None:
    """Where gradients rest on the host, torch's scaler copies its numbers there."""
    first, second = ranks(2, "nccl").run(overflowing, stage, split, offload)
    assert first[0] == second[0] == [64.0, 32.0, 32.0, 32.0, 32.0, 32.0]
    assert_same_bits(second[1], first[1])
    elsewhere = ranks(2, "nccl").run(overflowing, stage, split, None)[0]
    assert furthest(first[1], elsewhere[1])[0] <= 1e-6


def overflowing(stage: Any, split: Any, offload: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loss scale after each step, and the weights."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 5), torch.nn.Linear(5, 1)]
    model, scales = torch.nn.Sequential(*layers).cuda(), list[float]()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=0.1)
    run = zs.shard(model, optimizer, stage=stage, split=split, offload=offload, precision="fp16")
    scaler = torch.amp.GradScaler("cuda", init_scale=64.0, growth_interval=1000)
    for step in range(6):
        loss = model(rows(step, run.rank, 6).float().cuda()).float().sum()
        scaler.scale(loss * torch.inf if (step, run.rank) == (1, 0) else loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    run.close()
    return scales, {name: value.cpu() for name, value in model.state_dict().items()}


def test_ranks_that_use_different_units_of_one_size_are_found_out() -> None:
    """NCCL would give each of them rows of both, without a word."""
    outcomes = ranks(2, "nccl").attempt(train_apart)
    one = r"rank \d started gather \[parameters of unit branches\.\d\]"
    said = f"{one} where {one}"
    assert any(re.search(said, outcome.message) for outcome in outcomes), outcomes


def train_apart() -> None:
    case = replace(importlib.import_module(MODULES[0]).CASES["branch by rank"], steps=100_000)
    train(Training(case, [dist.get_rank()], {"stage": 3}, "cuda"))


# What goes astray on rank 1, and what the run says of it.
ASTRAY = {
    "raise in forward": "rank 1 exited with code 1: ValueError: the data were bad",
    "raise in backward": "rank 1 exited with code 1: ValueError: the gradient was bad",
    "raise between steps": "rank 1 exited with code 1: ValueError: the disk was full",
    "killed in backward": "rank 1 was killed by SIGKILL",
    "exit between steps": "rank 1 exited with code 3",
    "ends early": r"RankError: rank 1 .*(while|when) rank 0 ",
    "skips a backward": "RankError: .*rank 0 .*rank 1",
    "gathered alone": "RankError: .*rank 0 .*rank 1",
    "another stage": "ranks disagree about the options: stage is 3 on rank 0 and 1 on rank 1",
    "raise before shard": "rank 1 exited with code 1: ValueError: no such file",
}


@pytest.mark.parametrize("scenario", ASTRAY)
def test_a_rank_that_goes_astray_ends_the_run(scenario: str) -> None:
    script = Path(__file__).parents[1] / "support" / "failing.py"
    words = ["run", "--ranks", "2", "--timeout", "240", str(script), scenario, "nccl", "3"]
    made = subprocess.run(
        [sys.executable, "-m", "zeroshard", *words], capture_output=True, text=True, timeout=300, check=False
    )
    text = made.stdout + made.stderr
    assert made.returncode != 0, text
    assert re.search(ASTRAY[scenario], text), text


def test_a_slow_rank_is_waited_for() -> None:
    script = Path(__file__).parents[1] / "support" / "failing.py"
    words = ["run", "--ranks", "2", "--timeout", "240", str(script), "slow", "nccl", "3"]
    made = subprocess.run(
        [sys.executable, "-m", "zeroshard", *words], capture_output=True, text=True, timeout=300, check=False
    )
    assert made.returncode == 0, made.stdout + made.stderr


@pytest.mark.parametrize("scenario", ["stopped", "asleep"])
def test_a_rank_that_is_stuck_is_named_and_shows_where_it_is(scenario: str) -> None:
    script = Path(__file__).parents[1] / "support" / "failing.py"
    words = ["run", "--ranks", "2", "--timeout", "240", "--stuck-after", "12"]
    words += [str(script), scenario, "nccl", "3"]
    made = subprocess.run(
        [sys.executable, "-m", "zeroshard", *words], capture_output=True, text=True, timeout=300, check=False
    )
    text = made.stdout + made.stderr
    assert made.returncode == 70, text
    assert re.search(
        r"^zeroshard: rank 0 has waited \d+ s for .*: rank 1 \(pid .*\) has not come$", text, re.M
    )
    assert re.search(r"and rank 1 \(pid .*\) did not come in that time", text), text
    assert re.search(r'^\[rank 1\]   File ".*failing.py", line \d+, in misbehave$', text, re.M), text
