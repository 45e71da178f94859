"""Policies of `sync=` against plain PyTorch that does by hand what they say, on the same batches."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from test_param_kinds import Branches, by_step, squared
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.params.gather_group import GatherGroup
from zeroshard.testing import assert_same_bits, ranks

pytestmark = pytest.mark.ranks
WORLD, STEPS, ROWS = 2, 6, 3
# The window is longer than any test, so that nothing is tried but the first.
CODECS = zs.Adaptive(choices=[zs.EveryStep(compress=zs.TopK(ratio=0.2)), zs.EveryStep()], window=99)


def batch(step: int, rank: int) -> Tensor:
    return models.MLP.batch(ROWS, seed=100 * rank + step)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def mean_gradient(model: nn.Module, step: int, world: int, accumulate: int = 1) -> list[Tensor]:
    """The gradient of all ranks, added in rank order as the reduction does."""
    total: list[Tensor] = []
    for rank in range(world):
        model.zero_grad()
        for micro in range(accumulate):
            model(batch(step * accumulate + micro, rank)).backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        total = [a + b for a, b in zip(total, grads, strict=True)] if total else grads
    return [g * (1.0 / world) for g in total]


def delayed_by_hand(
    world: int, steps: int, clip: float | None = None, accumulate: int = 1, early: int = 0
) -> dict[str, Tensor]:
    """`early` steps at first use their own gradients."""
    model = models.build("mlp")
    optimizer = adamw(model)
    last: list[Tensor] | None = None
    for step in range(steps):
        now = mean_gradient(model, step, world, accumulate)
        used, last = (now, None) if step < early else (last, now)
        if used is not None:
            for parameter, grad in zip(model.parameters(), used, strict=True):
                parameter.grad = grad.clone()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def trained(
    options: dict[str, Any], steps: int = STEPS, clip: float | None = None, accumulate: int = 1
) -> dict[str, Tensor]:
    model = models.build("mlp")
    optimizer = adamw(model)
    run = zs.shard(model, optimizer, **options)
    for step in range(steps):
        for micro in range(accumulate - 1):
            with run.no_sync():
                model(batch(step * accumulate + micro, run.rank)).backward()
        model(batch(step * accumulate + accumulate - 1, run.rank)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    result = models.whole_weights(run)
    run.close()
    return result


@pytest.mark.parametrize(("clip", "accumulate"), [(0.2, 1), (None, 2), (0.2, 3)])
def test_delayed_clips_and_accumulates(clip: float | None, accumulate: int) -> None:
    expected = delayed_by_hand(WORLD, STEPS, clip, accumulate)
    found = ranks(WORLD).run(trained, {"stage": 2, "sync": zs.Delayed()}, STEPS, clip, accumulate)[0]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)


def test_delayed_on_one_rank() -> None:
    assert_same_bits(trained({"stage": 2, "sync": zs.Delayed()}), delayed_by_hand(1, STEPS))


@pytest.mark.parametrize("early", [1, 3, STEPS])
def test_delayed_warms_up_with_every_step(early: int) -> None:
    options = {"stage": 2, "sync": zs.Delayed(warmup_steps=early), "bucket_bytes": 1024}
    expected = delayed_by_hand(WORLD, STEPS, early=early)
    for weights in ranks(WORLD).run(trained, options):
        assert_same_bits(weights, expected)
    assert_same_bits(trained(options), delayed_by_hand(1, STEPS, early=early))


def test_a_warm_up_accumulates_and_then_delays() -> None:
    expected = delayed_by_hand(WORLD, STEPS, 0.2, 2, early=2)
    options = {"stage": 3, "sync": zs.Delayed(warmup_steps=2)}
    found = ranks(WORLD).run(trained, options, STEPS, 0.2, 2)[0]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)


def branching(options: dict[str, Any]) -> tuple[dict[str, Tensor], list[list[str]]]:
    """Weights, and which gradients each step had, of a model that does not use all of itself."""
    torch.manual_seed(0)
    model = Branches()
    optimizer = adamw(model)
    run = zs.shard(model, optimizer, bucket_bytes=256, sync=zs.Delayed(), **options)
    shown = []
    for step in range(STEPS):
        rows, which = by_step(step, run.rank)
        squared(model, (rows.float(), which)).backward()
        shown.append([name for name, p in model.named_parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
    result = models.whole_weights(run)
    run.close()
    return result, shown


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_delayed_gradient_that_comes_back_whole_is_the_one_of_rows(precision: str | None) -> None:
    rows, used = ranks(WORLD).run(branching, {"stage": 2, "precision": precision})[0]
    assert used[0] == []
    assert 0 < len(used[-1]) < len(used[1]) < len(rows)
    for transport in ("gloo", "shm"):
        options = {"stage": 0, "precision": precision, "transport": transport}
        for weights, shown in ranks(WORLD).run(branching, options):
            assert_same_bits(weights, rows)
            assert shown == used


def sent_in_order(steps: int) -> tuple[int, list[list[str]]]:
    """The number of buckets, and what each step starts to send: from its forward to its update."""
    model = models.build("gpt")
    optimizer = adamw(model)
    run = zs.shard(model, optimizer, stage=2, sync=zs.Delayed(), bucket_bytes=4096, transport="gloo")
    transport, sent = run._runtime.transport, list[str]()
    plain = {"reduce": transport.reduce, "gather": transport.gather}

    def noting(verb: str) -> Any:
        def note(*args: Any) -> Any:
            sent.append(verb)
            return plain[verb](*args)

        return note

    transport.reduce, transport.gather = noting("reduce"), noting("gather")  # type: ignore[method-assign]
    each = []
    for step in range(steps):
        model(models.GPT.batch(ROWS, seed=10 * step + run.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        each.append(list(sent))
        sent.clear()
    buckets = len(run._runtime.sync_strategy.gradients.buckets)
    run.close()
    return buckets, each


def test_new_parameters_go_before_the_last_gradients() -> None:
    for buckets, each in ranks(WORLD).run(sent_in_order, 3):
        late = buckets // 4
        assert late > 1
        for step, sent in enumerate(each):
            published = sent.count("gather")
            behind = late if step else 0
            assert sent == ["gather"] * published + ["reduce"] * (behind + buckets - late)
            assert published > 1


@pytest.mark.parametrize("world", [1, WORLD])
def test_a_warm_up_on_the_host_does_the_same(world: int) -> None:
    options = {"stage": 3, "sync": zs.Delayed(warmup_steps=2), "offload": zs.Offload(), "clip_norm": math.inf}
    found = trained(options) if world == 1 else ranks(world).run(trained, options)[0]
    for name, value in delayed_by_hand(world, STEPS, early=2).items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def delayed_misuse() -> list[str]:
    model = models.build("mlp")
    optimizer = adamw(model)
    run = zs.shard(model, optimizer, stage=2, sync=zs.Delayed())
    told = []
    model(batch(0, run.rank)).backward()
    try:
        model(batch(1, run.rank)).backward()
    except zs.StateError as error:
        told.append(str(error))
    run._runtime.transport.close()
    return told


def test_two_backwards_before_a_delayed_step_are_refused() -> None:
    for told in ranks(WORLD).run(delayed_misuse):
        assert "Accumulate inside run.no_sync()" in told[0]


# ---------------------------------------------------------------------- local steps


def local_bytes(sync: zs.EveryStep | zs.Local, steps: int) -> dict[str, int]:
    model = models.build("gpt")
    optimizer = adamw(model)
    run = zs.shard(model, optimizer, stage=0, sync=sync)
    for step in range(steps):
        model(models.GPT.batch(ROWS, seed=step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    sent = run.stats().sent
    run.close()
    return {kind: sent.get(kind, 0) for kind in ("reduce", "outer")}


@pytest.mark.parametrize("fragments", [1, 4])
def test_local_steps_send_a_share(fragments: int) -> None:
    """The bytes of stage 0 divided by the steps between meetings, padding and flags aside."""
    often = ranks(WORLD).run(local_bytes, zs.EveryStep(), 8)[0]
    seldom = ranks(WORLD).run(local_bytes, zs.Local(steps=8, fragments=fragments), 8)[0]
    assert seldom["reduce"] == 0
    assert often["outer"] == 0
    assert seldom["outer"] == pytest.approx(often["reduce"] / 8, rel=0.02)


def meeting(policy: zs.Local, steps: int) -> tuple[str, dict[str, Tensor]]:
    model = models.build("mlp")
    optimizer = adamw(model)
    run = zs.shard(model, optimizer, stage=0, sync=policy)
    for step in range(steps):
        model(batch(step, run.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    told = ""
    try:
        run.save("/nonexistent/checkpoint")
    except zs.StateError as error:
        told = str(error)
    run.synchronise()
    result = {name: p.detach().clone() for name, p in model.named_parameters()}
    run.close()
    return told, result


def test_ranks_apart_refuse_to_save_and_meet_when_asked() -> None:
    for policy, steps in ((zs.Local(steps=4), 3), (zs.Local(steps=4, fragments=2), 4)):
        (told, first), (_, second) = ranks(WORLD).run(meeting, policy, steps)
        assert "run.synchronise()" in told
        assert_same_bits(first, second)


def test_ranks_that_are_equal_have_nothing_to_synchronise(monkeypatch: pytest.MonkeyPatch) -> None:
    rewritten: list[bool] = []
    refresh = GatherGroup.refresh
    monkeypatch.setattr(
        GatherGroup, "refresh", lambda self, *by: (rewritten.append(by[0]), refresh(self, *by))[1]
    )
    model = models.build("mlp")
    optimizer = adamw(model)
    run = zs.shard(model, optimizer, precision="bf16", offload=zs.Offload(), clip_norm=1.0)
    for step in range(2):
        model(batch(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        run.synchronise()  # masters would be made weights once more, in host memory that no plan has
    assert rewritten
    assert not any(rewritten)
    run.close()


# ---------------------------------------------------------------------- checkpoints


def part(options: dict[str, Any], first: int, last: int, load: str = "", save: str = "") -> dict[str, Tensor]:
    """Steps `first` to `last` of a training, from one checkpoint to the next."""
    model = models.build("mlp")
    optimizer = adamw(model)
    run = zs.shard(model, optimizer, **options)
    if load:
        run.load(load)
    world = dist.get_world_size() if dist.is_initialized() else 1
    for step in range(first, last):
        whole = models.MLP.batch(4, seed=step)
        model(whole.chunk(world)[run.rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    if save:
        run.save(save)
    result = models.whole_weights(run)
    run.close()
    return result


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 2, "sync": zs.Delayed()},
        {"stage": 0, "sync": zs.Delayed(warmup_steps=3)},
        {"stage": 2, "sync": zs.Delayed(warmup_steps=6)},
        {"stage": 0, "sync": zs.Local(steps=2)},
        {"stage": 2, "sync": CODECS},
    ],
    ids=str,
)
def test_a_resumed_run_goes_on_bit_for_bit(options: dict[str, Any], tmp_path: Path) -> None:
    path = str(tmp_path / "half")
    through = ranks(WORLD).run(part, options, 0, 8)[0]
    ranks(WORLD).run(part, options, 0, 4, "", path)
    assert_same_bits(ranks(WORLD).run(part, options, 4, 8, path)[0], through)


def test_a_delayed_gradient_is_loaded_at_another_number_of_ranks_and_tier(tmp_path: Path) -> None:
    """Two ranks, then one, then one whose updates run on the host, and back to two."""
    device: dict[str, Any] = {"stage": 3, "sync": zs.Delayed()}
    host = {**device, "offload": zs.Offload(), "clip_norm": math.inf}
    first, second, third = (str(tmp_path / name) for name in ("first", "second", "third"))
    through = ranks(WORLD).run(part, device, 0, 8)[0]
    ranks(WORLD).run(part, device, 0, 2, "", first)
    part(device, 2, 4, first, second)
    part(host, 4, 6, second, third)
    back = ranks(WORLD).run(part, device, 6, 8, third)[0]
    for name, value in through.items():
        torch.testing.assert_close(back[name], value, rtol=1e-5, atol=1e-6)


def disagreeing() -> str:
    model = models.build("mlp")
    steps = 2 + dist.get_rank()
    with pytest.raises(zs.RankError) as caught:
        zs.shard(model, adamw(model), stage=0, sync=zs.Local(steps=steps))
    return str(caught.value)


def test_ranks_that_disagree_about_the_policy_are_told() -> None:
    first, second = ranks(WORLD).run(disagreeing)
    assert first == second
    assert "sync is Local(steps=2" in first
