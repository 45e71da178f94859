"""Delayed updates on the host begin in the forward of the step that applies them, and show at its end."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.offload.python_executor import PythonExecutor
from zeroshard.testing import assert_same_bits, ranks

pytestmark = pytest.mark.ranks
WORLD, STEPS, ROWS, CLIP = 2, 8, 3, 3.0
MICRO = 3
CLIPPED = 4  # the step whose loss is large


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    loss: Tensor = model(models.MLP.batch(ROWS, seed=100 * rank + step))
    return loss * (30.0 if step == CLIPPED else 1.0)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, fused=True)


def delayed_by_hand(world: int, clip: float | None) -> dict[str, Tensor]:
    model = models.build("mlp")
    optimizer, last = adamw(model), None
    for step in range(STEPS):
        total: list[Tensor] = []
        for rank in range(world):
            model.zero_grad()
            loss_of(model, step, rank).backward()
            grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            total = [a + b for a, b in zip(total, grads, strict=True)] if total else grads
        now = [g * (1.0 / world) for g in total]
        if last is not None:
            for parameter, grad in zip(model.parameters(), last, strict=True):
                parameter.grad = grad
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
        last = now
    return {name: p.detach() for name, p in model.named_parameters()}


def slow_down(executor: PythonExecutor, seconds: Callable[[], float]) -> list[str]:
    """Sleep before every update; what has been updated, in order."""
    plain, seen = executor._update, list[str]()

    def slowly(staged: Any) -> None:
        time.sleep(seconds())
        plain(staged)
        seen.append(staged.job.part.label)

    executor._update = slowly  # type: ignore[method-assign]
    return seen


def trained(options: dict[str, Any], slowness: float = 0.0) -> tuple[dict[str, Tensor], dict[str, int]]:
    """In a loop that drops gradients between forward and backward, as many do."""
    model = models.build("mlp")
    optimizer = adamw(model)
    run = zs.shard(model, optimizer, bucket_bytes=1024, **options)
    dice = random.Random(run.rank)
    assert run._runtime.host is not None
    assert run._runtime.host.updates is not None
    slow_down(run._runtime.host.updates.executor, lambda: slowness * dice.random())
    for step in range(STEPS):
        loss = loss_of(model, step, run.rank)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    result = models.whole_weights(run)
    counts = run.stats().updates
    run.close()
    return result, counts


HOST = {"offload": zs.Offload(), "sync": zs.Delayed(), "clip_norm": float("inf")}


@pytest.mark.wide(2)
@pytest.mark.parametrize(
    ("stage", "transport"), [(0, "gloo"), (1, "gloo"), (2, "shm"), (2, "gloo"), (3, "gloo"), (3, "shm")]
)
def test_updates_a_step_ahead_are_what_one_delays_by_hand(stage: int, transport: str) -> None:
    expected = delayed_by_hand(WORLD, None)
    options = {**HOST, "stage": stage, "transport": transport}
    for slowness in (0.0, 0.02):
        for weights, counts in ranks(WORLD).run(trained, options, slowness):
            assert counts == {"early": STEPS, "late": 0, "undone": 0}
            for name, value in expected.items():
                torch.testing.assert_close(weights[name], value, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("world", [1, WORLD])
def test_clipping_is_exact_a_step_ahead(world: int) -> None:
    """The large gradient comes while updates run ahead: they are taken back and done again."""
    expected, options = delayed_by_hand(world, CLIP), {**HOST, "stage": 3, "clip_norm": CLIP}
    found = [trained(options, 0.005)] if world == 1 else ranks(world).run(trained, options, 0.005)
    for weights, counts in found:
        assert counts["undone"] > 0
        assert counts["early"] > 0
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "offload", [{"master": "split"}, {"parameters": "host"}, {"moments": "int8"}], ids=str
)
def test_timing_changes_no_bit(offload: dict[str, Any]) -> None:
    """Whether an update is done before its step or long after."""
    options = {**HOST, "stage": 3, "offload": zs.Offload(**offload), "precision": "bf16"}
    (swift, _), (slow, _) = (trained(options, slowness) for slowness in (0.0, 0.03))
    assert_same_bits(swift, slow)
    both = ranks(WORLD).run(trained, options, 0.02)
    assert_same_bits(both[0][0], ranks(WORLD).run(trained, options)[0][0])


@pytest.mark.parametrize("world", [1, WORLD])
def test_a_split_master_is_taken_back_a_step_ahead(world: int) -> None:
    """Its other half is among the weights that are held back."""
    found = []
    for master in ("plain", "split"):
        offload = zs.Offload(master=master)  # type: ignore[arg-type]
        options = {**HOST, "stage": 3, "clip_norm": CLIP, "offload": offload, "precision": "bf16"}
        weights, counts = trained(options) if world == 1 else ranks(world).run(trained, options, 0.005)[0]
        assert counts["undone"] > 0
        assert counts["early"] > 0
        found.append(weights)
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-6)


def begun_in_forward(transport: str) -> tuple[int, list[bool]]:
    """Rounds of updates that were done before their step, and whether each forward used the weights
    before."""
    model = models.build("mlp")
    optimizer = adamw(model)
    run = zs.shard(model, optimizer, stage=2, transport=transport, bucket_bytes=1024, **HOST)  # type: ignore[arg-type]
    assert run._runtime.host is not None
    assert run._runtime.host.updates is not None
    seen = slow_down(run._runtime.host.updates.executor, lambda: 0.0)
    losses: list[list[float]] = []
    rounds, probe, parts = 0, models.MLP.batch(ROWS, seed=7), len(run._runtime.host.parts)
    for step in range(4):
        begun, deadline = len(seen), time.monotonic() + 100
        losses.append([])
        while len(losses[-1]) < MICRO or (step and len(seen) < begun + parts):  # a message may take a while
            with run.no_sync():
                loss = model(probe)
                losses[-1].append(loss.item())
                loss.backward()
            if time.monotonic() > deadline:
                break
            time.sleep(0.001)
        rounds += len(seen) == begun + parts
        loss_of(model, step, run.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    same = [len(set(seen_in_step)) == 1 for seen_in_step in losses]
    changed = [a[0] != b[0] for a, b in itertools.pairwise(losses)]
    run.close()
    return rounds, [*same, changed == [False, True, True]]


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_an_update_begins_in_forward_and_shows_after_the_step(transport: str) -> None:
    for rounds, facts in ranks(WORLD).run(begun_in_forward, transport):
        assert rounds == 3, "all but the first step had a gradient to apply"
        assert facts == [True] * 5


def misuse(folder: str) -> list[str]:
    model = models.build("mlp")
    optimizer = adamw(model)
    run = zs.shard(model, optimizer, stage=2, bucket_bytes=1024, **HOST)  # type: ignore[arg-type]
    told = []

    def attempt(action: Callable[[], object]) -> None:
        try:
            action()
        except zs.StateError as error:
            told.append(str(error))

    loss_of(model, 0, run.rank).backward()
    optimizer.step()
    run.save(f"{folder}/whole")
    loss = loss_of(model, 1, run.rank)
    attempt(model.state_dict)
    attempt(lambda: run.save(f"{folder}/half"))
    loss.backward()
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    attempt(optimizer.step)
    run._runtime.transport.close()
    return told


def test_what_cannot_be_done_between_forward_and_step_is_refused(tmp_path: Any) -> None:
    for told in ranks(WORLD).run(misuse, str(tmp_path)):
        assert len(told) == 3
        assert "their update has begun (with sync=Delayed() in forward)" in told[0]
        assert "between backward (with sync=Delayed() forward) and optimizer.step()" in told[1]
        assert "optimizer.step() (with sync=Delayed() between forward and it), and the update" in told[2]


def test_closing_after_a_forward_leaves_a_model_and_its_state_of_one_step() -> None:
    """What was begun and cannot be taken back stands."""
    model = models.build("mlp")
    optimizer = adamw(model)
    run = zs.shard(model, optimizer, stage=2, **HOST)  # type: ignore[arg-type]
    for step in range(2):
        loss_of(model, step, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    loss_of(model, 2, 0)
    run.close()
    by_hand = models.build("mlp")
    plain = adamw(by_hand)
    grads: list[Tensor | None] = []
    for step in range(2):
        by_hand.zero_grad()
        loss_of(by_hand, step, 0).backward()
        newer = [p.grad for p in by_hand.parameters()]
        if grads:
            for parameter, grad in zip(by_hand.parameters(), grads, strict=True):
                parameter.grad = grad
            plain.step()
        grads = newer
    for parameter, grad in zip(by_hand.parameters(), grads, strict=True):
        parameter.grad = grad
    plain.step()
    for (name, value), (_, found) in zip(by_hand.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(found, value, rtol=2e-6, atol=2e-7, msg=name)
        assert int(optimizer.state[found]["step"]) == 2
