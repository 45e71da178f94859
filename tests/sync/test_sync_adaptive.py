"""`sync=Adaptive`: what was chosen is what trains, moves are the same on all ranks, and the numbers between
them are those of plain PyTorch that makes the same moves by hand."""

from __future__ import annotations

import copy
import itertools
import re
from typing import Any

import models
import pytest
import torch
from test_sync import CODECS, ROWS, WORLD, adamw, batch, mean_gradient, trained
from torch import Tensor

import zeroshard as zs
from zeroshard.sync.adaptive_choice import ChoiceJudge, Decision
from zeroshard.testing import assert_same_bits, ranks

pytestmark = pytest.mark.ranks


def first_weights(options: dict[str, Any]) -> dict[str, Tensor]:
    return trained({"stage": 2, "bucket_bytes": 1024, **options})


def test_a_codec_that_was_chosen_is_that_codec() -> None:
    chosen = ranks(WORLD).run(first_weights, {"sync": CODECS})[0]
    assert_same_bits(chosen, ranks(WORLD).run(first_weights, {"compress": zs.TopK(ratio=0.2)})[0])


def adapting(options: dict[str, Any], steps: int) -> tuple[tuple[str, ...], str, dict[str, Tensor]]:
    model = models.build("gpt")
    optimizer = adamw(model)
    run = zs.shard(model, optimizer, **options)
    for step in range(steps):
        model(models.GPT.batch(ROWS, seed=10 * step + run.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.synchronise()
    stats = run.stats()
    result = models.whole_weights(run)
    run.close()
    return stats.switches, stats.sync, result


@pytest.mark.parametrize(
    ("stage", "choices"),
    [
        (0, (zs.EveryStep(), zs.Local(steps=2), zs.EveryStep(compress=zs.TopK(ratio=0.1)))),
        (2, (zs.EveryStep(), zs.Delayed(), zs.EveryStep(compress={"*norm*": None, "*": zs.Int8()}))),
    ],
    ids=["local", "delayed"],
)
def test_adaptive_changes_on_all_ranks_at_once(stage: int, choices: tuple[Any, ...]) -> None:
    sync = zs.Adaptive(choices=choices, window=3, gain=1e-6, unrest=1e6)
    options = {"stage": stage, "sync": sync, "transport": "gloo"}
    (switches, label, first), (others, other, second) = ranks(WORLD).run(adapting, options, 60)
    assert switches == others
    assert label == other
    assert len(switches) >= len(choices) - 1, "every choice was to be tried"
    for choice in choices[1:]:
        assert any(f"-> {choice!r}" in line for line in switches)
    assert "ms a step" in switches[0]
    assert any("settled on" in line and "steps of trying" in line for line in switches)
    assert_same_bits(first, second)


def followed(sync: zs.Adaptive, steps: int) -> tuple[tuple[str, ...], dict[str, Tensor]]:
    model = models.build("mlp")
    optimizer = adamw(model)
    run = zs.shard(model, optimizer, stage=0, sync=sync, bucket_bytes=1024)
    for step in range(steps):
        model(batch(step, run.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.synchronise()
    switches = run.stats().switches
    run.close()
    return switches, {name: p.detach().clone() for name, p in model.named_parameters()}


def following_by_hand(begins: dict[int, int], steps: int) -> dict[str, Tensor]:
    """Steps taken together (1), or apart and averaged every so many. `begins`: after which step each begins.
    Ranks that step together again all go on with rank 0's optimizer."""
    copies = [models.build("mlp") for _ in range(WORLD)]
    inner = [adamw(model) for model in copies]
    every, since = 1, 0
    for step in range(steps):
        if begins.get(step, every) != every:
            if begins[step] == 1:
                inner[1].load_state_dict(copy.deepcopy(inner[0].state_dict()))
            every, since = begins[step], step
        shared = mean_gradient(copies[0], step, WORLD) if every == 1 else None
        for rank, (model, optimizer) in enumerate(zip(copies, inner, strict=True)):
            model.zero_grad()
            if shared is None:
                model(batch(step, rank)).backward()
            else:
                for parameter, grad in zip(model.parameters(), shared, strict=True):
                    parameter.grad = grad.clone()
            optimizer.step()
        if (step + 1 - since) % every == 0 or step == steps - 1:
            with torch.no_grad():
                for one, other in zip(*(m.parameters() for m in copies), strict=True):
                    one.copy_((one + other) / 2)
                    other.copy_(one)
    return {name: p.detach() for name, p in copies[0].named_parameters()}


def late_again() -> list[int]:
    """How many parameters have a gradient after each backward: two steps delayed, two not, two delayed."""
    model = models.build("mlp")
    optimizer = adamw(model)
    choices = (zs.Delayed(), zs.EveryStep(compress=zs.Int8()))
    run = zs.shard(model, optimizer, stage=2, sync=zs.Adaptive(choices=choices, window=99))
    shown = []
    for step in range(6):
        if step in (2, 4):
            run._runtime.sync_strategy._switch(step // 2 % 2, "the test says so")  # type: ignore[attr-defined]
        model(batch(step, run.rank)).backward()
        shown.append(sum(p.grad is not None for p in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return shown


def test_a_gradient_under_way_does_not_wait_for_its_choice_to_return() -> None:
    for shown in ranks(WORLD).run(late_again):
        assert [count > 0 for count in shown] == [False, True, True, True, False, True]


def test_what_adaptive_does_between_its_moves_is_what_the_choices_do() -> None:
    """Moves depend on times; given the moves, the numbers are those of the choices one after another, also
    from one number of local steps to another."""
    mean = zs.Nesterov(1.0, 0.0)
    lengths = {"EveryStep()": 1} | {repr(zs.Local(steps=n, outer=mean)): n for n in (2, 4)}
    choices = [zs.EveryStep(), zs.Local(steps=2, outer=mean), zs.Local(steps=4, outer=mean)]
    sync = zs.Adaptive(choices=choices, window=3, gain=1e-6, unrest=1e6)
    assert sync.numerics == "approximate"
    (switches, first), (others, second) = ranks(WORLD).run(followed, sync, 30)
    assert switches == others
    assert_same_bits(first, second)
    moves = [re.match(r"step (\d+): .* -> (\w+\(.*\)): ", line) for line in switches]
    begins = {int(move[1]): lengths[move[2]] for move in moves if move is not None}
    assert {2, 4} <= set(begins.values()), "every choice was to be tried"
    for name, value in following_by_hand(begins, 30).items():
        torch.testing.assert_close(first[name], value, rtol=1e-5, atol=1e-6)


def test_what_is_told_of_changes_does_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    restless = itertools.count(1)
    monkeypatch.setattr(
        ChoiceJudge,
        "hear",
        lambda judge, current, reading: Decision(next(restless) % 2, "noise", settled=False),
    )
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = zs.Adaptive(choices=[zs.EveryStep(), zs.Local(steps=2)], window=3)
    run = zs.shard(model, optimizer, stage=0, sync=sync)
    told = [run.stats()]
    for step in range(1200):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (599, 1199):
            told.append(run.stats())
    run.close()
    assert len(told[1].switches) > 100
    assert len(told[2].switches) == 200
    later = (told[2] - told[1]).switches
    assert later[-1] == told[2].switches[-1]
    assert 100 < len(later) < 200, "what was told before is left out"
    assert not set(later) & set(told[1].switches)
