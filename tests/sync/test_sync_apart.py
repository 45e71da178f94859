"""Ranks that train apart, where something comes between: one leaves a step out, as a `GradScaler` does, or
never uses a layer, or weights are written."""

from __future__ import annotations

import logging
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from test_sync import ROWS, WORLD, adamw
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.sync import AdaptiveSync
from zeroshard.testing import assert_same_bits, ranks

pytestmark = pytest.mark.ranks
EVERY, STEPS, LEFT_OUT = 2, 6, 2  # steps between meetings, steps, and the one that rank 1 leaves out
MEAN = zs.Local(steps=EVERY, outer=zs.Nesterov(1.0, 0.0))


def batch(step: int, rank: int) -> Tensor:
    return models.MLP.batch(ROWS, seed=100 * rank + step)


def scaled(every: int, by_model: bool) -> dict[str, Any]:
    """fp16 with a loss scale; the gradient of rank 1 overflows once. Weights, when meetings came, scales."""
    model = models.build("mlp")
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
    sync = replace(MEAN, steps=every)
    run = zs.shard(model, optimizer, stage=0, sync=sync, precision="fp16", bucket_bytes=1024)
    met = []
    for step in range(STEPS):
        if step == LEFT_OUT:
            run.publish()  # as after writing weights by hand: all ranks begin a round from them
        before = run.stats().sent.get("outer", 0)
        loss = model(batch(step, run.rank), run.rank == 1 and step == LEFT_OUT)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad() if by_model else optimizer.zero_grad()
        met.append(run.stats().sent.get("outer", 0) > before)
    run.close()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    steps = {int(state["step"]) for state in optimizer.state.values()}
    return {"weights": weights, "met": met, "scale": scaler.get_scale(), "steps": steps}


def by_hand(every: int) -> dict[str, Tensor]:
    """fp32 masters, gradients of fp16 copies."""
    masters = [models.build("mlp") for _ in range(WORLD)]
    inner = [adamw(model) for model in masters]
    for step in range(STEPS):
        for rank, (master, optimizer) in enumerate(zip(masters, inner, strict=True)):
            narrow = models.build("mlp").half()
            narrow.load_state_dict(master.state_dict())
            (narrow(batch(step, rank).half()) * (64.0 if rank == 0 or step <= LEFT_OUT else 32.0)).backward()
            for sharded_param, unsharded_param in zip(master.parameters(), narrow.parameters(), strict=True):
                assert unsharded_param.grad is not None
                sharded_param.grad = unsharded_param.grad.float() / (
                    64.0 if rank == 0 or step <= LEFT_OUT else 32.0
                )
            if (rank, step) != (1, LEFT_OUT):
                optimizer.step()
        if step % every == every - 1:
            with torch.no_grad():
                for one, other in zip(*(m.parameters() for m in masters), strict=True):
                    one.copy_((one + other) / 2)
                    other.copy_(one)
    return {name: p.detach() for name, p in masters[0].named_parameters()}


@pytest.mark.parametrize(("every", "by_model"), [(EVERY, False), (1, True)])
def test_a_step_that_a_scaler_leaves_out_on_one_rank_counts(every: int, by_model: bool) -> None:
    first, second = ranks(WORLD).run(scaled, every, by_model)
    assert first["met"] == second["met"] == [step % every == every - 1 for step in range(STEPS)]
    assert (first["scale"], second["scale"]) == (64.0, 32.0)
    assert (first["steps"], second["steps"]) == ({STEPS}, {STEPS - 1})
    assert_same_bits(first["weights"], second["weights"])
    for name, value in by_hand(every).items():
        torch.testing.assert_close(first["weights"][name], value, rtol=1e-4, atol=1e-5)


def apart(path: Path, cut: bool) -> dict[str, Tensor]:
    """Each rank has a layer that it alone uses. With `cut` a fresh run takes over half way."""
    torch.manual_seed(4)
    model = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
    optimizer = adamw(model)
    run = zs.shard(model, optimizer, stage=0, sync=MEAN)
    first = run.load(path)["step"] if cut else 0
    for step in range(first, STEPS):
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + run.rank))
        model[0 if step >= 2 * EVERY else run.rank](x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == EVERY - 1:
            run.save(path, extra={"step": step + 1})
    run.close()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_ranks_that_use_different_layers_go_on_with_the_same_bits(tmp_path: Path) -> None:
    for whole, resumed in zip(
        *(ranks(WORLD).run(apart, tmp_path / "x", cut) for cut in (False, True)), strict=True
    ):
        assert_same_bits(resumed, whole)


def together_again() -> dict[str, Tensor]:
    """Rank 1 alone uses a layer while the ranks train apart, and leaves a step out; then they step
    together."""
    torch.manual_seed(4)
    model = nn.ModuleDict({"always": nn.Linear(5, 5), "seldom": nn.Linear(5, 5)})
    optimizer = adamw(model)
    sync = zs.Adaptive(choices=(MEAN, zs.EveryStep()), window=99)
    run = zs.shard(model, optimizer, stage=0, sync=sync)
    sync_strategy = run._runtime.sync_strategy
    assert isinstance(sync_strategy, AdaptiveSync)
    for step in range(STEPS):
        if step == 2 * EVERY:
            sync_strategy._switch(1, "the test says so")
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + run.rank))
        hidden = model["always"](x)
        if run.rank == 1 or step >= 2 * EVERY:
            hidden = hidden + model["seldom"](x)
        hidden.square().mean().backward()
        if (run.rank, step) != (1, LEFT_OUT):
            optimizer.step()
        optimizer.zero_grad()
    run.close()
    assert {int(state["step"]) for state in optimizer.state.values()} == {STEPS, STEPS - 2 * EVERY}
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_ranks_that_step_together_again_stay_equal() -> None:
    first, second = ranks(WORLD).run(together_again)
    assert_same_bits(first, second)


def rewritten(how: str) -> dict[str, Tensor]:
    """A round from twice the weights: given before `shard`, loaded after it, or set by hand."""
    model = models.build("mlp")
    twice = {name: 2 * value for name, value in model.state_dict().items()}
    if how == "before":
        model.load_state_dict(twice)
    optimizer = adamw(model)
    run = zs.shard(model, optimizer, stage=0, sync=zs.Local(steps=EVERY))
    if how == "loaded":
        model.load_state_dict(twice)
    elif how == "by hand":
        with run.gathered(write=True) as whole:
            for name, value in whole.items():
                value.data.copy_(twice[name])
    for step in range(EVERY):
        model(batch(step, run.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("how", ["loaded", "by hand"])
def test_weights_that_are_written_between_rounds_are_where_the_next_begins(how: str) -> None:
    """The outer optimizer would take them for a step of its own, and enlarge it."""
    for got, wanted in zip(*(ranks(WORLD).run(rewritten, which) for which in (how, "before")), strict=True):
        assert_same_bits(got, wanted)


def closed(steps: int) -> str:
    """What is said when a run is closed after so many steps."""
    said = StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("zeroshard").addHandler(handler)
    torch.manual_seed(4)
    model = nn.Linear(3, 3)
    optimizer = adamw(model)
    run = zs.shard(model, optimizer, stage=0, sync=MEAN)
    for _ in range(steps):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    logging.getLogger("zeroshard").removeHandler(handler)
    return said.getvalue()


def test_a_run_that_is_closed_between_meetings_says_so() -> None:
    assert "Call run.synchronise() before it for one model" in ranks(WORLD).run(closed, EVERY + 1)[0]
    assert ranks(WORLD).run(closed, EVERY) == ["", ""]


def scales(folder: Path) -> list[float]:
    """Of a rank, after loading: what every rank had made of its own."""
    found = []
    for again in (False, True):
        model = models.build("mlp")
        optimizer = adamw(model)
        run = zs.shard(model, optimizer, stage=0, sync=MEAN)
        scale = 2.0 ** (1 if again else 3 + run.rank)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=100)
        for step in range(EVERY):
            scaler.scale(model(batch(step, run.rank))).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if again:
            run.load(folder / "saved", scalers=[scaler])
        else:
            run.save(folder / "saved", scalers=[scaler])
        run.close()
        found.append(scaler.get_scale())
    return found


def test_each_rank_has_its_own_loss_scale_back(tmp_path: Path) -> None:
    assert ranks(WORLD).run(scales, tmp_path) == [[8.0, 8.0], [16.0, 16.0]]
