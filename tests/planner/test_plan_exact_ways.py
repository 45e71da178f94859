"""Every way that is as exact is tried before a model is refused; a refusal says which changes would fit."""

from __future__ import annotations

import dataclasses
import importlib
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_models import case
from test_planner import problem

import zeroshard as zs
from zeroshard.planner.candidates import price
from zeroshard.planner.choice import choose
from zeroshard.planner.plan import PLACINGS, Candidate, Placing, Plan
from zeroshard.planner.planning_problem import PlanningProblem


def asked(placing: Placing, limit: int | None = None, **changes: Any) -> PlanningProblem:
    """A question of one stage and placing on one rank: on the device nothing is recomputed, else all."""
    again = placing != "device"
    made = problem(1000, world=1, placings=(placing,), stages=(2,), recomputes=(again,))
    made = dataclasses.replace(made, options=dataclasses.replace(made.options, **changes))
    return made if limit is None else made.limited(device=limit)


def least(of: PlanningProblem, **changes: Any) -> Candidate:
    return price(of, of.way(2, of.choices.placings[0], of.choices.recomputes[0], True, changes))


def test_a_split_master_is_chosen_where_a_plain_one_does_not_fit() -> None:
    plain, split = least(asked("device")), least(asked("device"), master="split")
    limit = (plain.device + split.device) // 2
    plan = choose(asked("device", limit))
    assert plan.chosen.label == "stage 2, split master"
    assert plan.options()["offload"] == zs.Offload(optimizer="device", master="split")
    assert any("half way between two bf16 values" in reason for reason in plan.reasons)
    assert not choose(asked("device", plain.device)).chosen.splits, "not where it is not needed"
    with pytest.raises(zs.PlanError, match="no plan fits"):
        choose(asked("device", limit, precision=zs.Precision("float16")))
    host = asked("state on host", clip_norm=1.0)
    share = (least(host, master="split").host + least(host).host) // 2
    assert choose(host.limited(host=share)).chosen.splits
    with pytest.raises(zs.PlanError, match="pass clip_norm= in place of the loop's clipping"):
        choose(asked("state on host").limited(host=share))


def test_units_run_backward_twice_where_gradients_have_no_room_to_wait() -> None:
    waiting = least(asked("state on host", clip_norm=1.0))
    twice = least(asked("state on host", clip_norm=1.0), repeat_backward=3)
    assert twice.device < waiting.device
    assert twice.step > waiting.step
    assert twice.label.endswith("backward of 3 twice")
    short = asked("state on host", waiting.device - 1, clip_norm=1.0)
    plan = choose(short)
    fits = [
        price(short, short.way(2, "state on host", True, False, {"repeat_backward": n})).fits for n in (1, 2)
    ]
    assert fits == [False, True]
    assert plan.chosen.repeats == 2, "as few as fit"
    assert plan.options()["offload"] == zs.Offload(repeat_backward=2)
    assert any("The backward of the 2 units nearest the loss runs twice" in why for why in plan.reasons)
    assert choose(asked("state on host", waiting.device, clip_norm=1.0)).chosen.repeats == 0
    guarded = asked("state on host", waiting.device - 1, clip_norm=math.inf)
    assert choose(guarded).chosen.repeats == 0, "nothing waits"


def test_gradients_wait_on_the_host_where_the_device_has_no_room_for_them() -> None:
    on_device, on_host = least(asked("state on host")), least(asked("state on host"), undo=False)
    assert on_host.device < on_device.device
    limit = (on_device.device + on_host.device) // 2
    plan = choose(asked("state on host", limit))
    assert plan.chosen.label == "stage 2, state on host, recompute, gradients on host"
    assert "Gradients land on the host and wait there for the loop's clipping and step." in plan.reasons
    with pytest.raises(
        zs.PlanError, match=r"drop clip_norm= and clip in the loop \(estimated [0-9.]+ s a step\)"
    ):
        choose(asked("state on host", limit, clip_norm=1.0))


def test_a_refusal_has_each_exact_change_with_its_step_and_the_rounding_ones_apart() -> None:
    """24.1 B on one GPU with 137 GiB and 112 GiB of host memory, here in small: no exact way has room without
    a disk. What is advised plans, and takes what was said."""
    whole = least(one := asked("state on host", clip_norm=1.0))
    small = one.allowing(placings=PLACINGS).limited(device=whole.device, host=whole.host // 2)
    with pytest.raises(zs.PlanError) as refused:
        choose(small)
    text = str(refused.value)
    disk = re.search(
        r"name a disk with ([0-9.]+[MG]iB) of room, disk_path=FOLDER \(estimated ([0-9.]+) s a step\)", text
    )
    coded = re.search(r"Rounding: pass offload=(zs\.Offload\(.*\)) \(estimated [0-9.]+ s a step\)\.$", text)
    assert disk is not None, text
    assert coded is not None, text
    there = choose(small.limited(path="/tmp")).chosen
    assert there.disk
    assert there.step == pytest.approx(float(disk.group(2)), rel=0.01)
    offload = eval(coded.group(1))  # what it says can be typed
    assert offload.moments == "int8"


def test_a_run_within_a_limit_trains_with_the_split_master_that_was_chosen() -> None:
    """In less than a plain one, with its losses: no weight of a few steps is half way between two values."""

    def trained(limit: int) -> tuple[Plan, dict[str, int], list[float]]:
        torch.manual_seed(0)
        model, optimizer, batch = case("gpt")
        batch = torch.cat([batch] * 8)
        run = zs.shard(
            model, optimizer, limit=limit, batch=batch, precision="bf16", offload=None, recompute=False
        )
        losses = []
        for _ in range(3):
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        live, plan = run.stats().live, run.plan
        run.close()
        assert plan is not None
        return plan, live, losses

    plain, there, expected = trained(2**30)
    split, here, losses = trained(plain.chosen.device - 1)
    assert split.chosen.label == "stage 0, split master"
    assert split.chosen.device < plain.chosen.device
    assert here["state"] == split.chosen.lasting["state"] < there["state"]
    assert losses == expected


@pytest.mark.slow
def test_a_model_of_24_billion_asks_for_a_disk_and_plans_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one GPU with 137 GiB and 112 GiB of host memory nothing exact fits but on a disk."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "gpu"))
    llama = importlib.import_module("llama")
    with torch.device("meta"):
        model = llama.LM("24b", ckpt=False)
    ids = torch.empty(8, 2048, dtype=torch.int64, device="meta")
    asked: dict[str, Any] = {"ranks": 1, "limit": "137GiB", "host_limit": "112GiB", "batch": (ids, ids)}
    asked |= {"machine": "H200", "precision": "bf16", "clip_norm": 1.0}
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with pytest.raises(zs.PlanError) as refused:
        zs.plan(model, optimizer, **asked)
    said = re.search(
        r"What would fit: name a disk with ([0-9.]+)GiB of room, disk_path=FOLDER "
        r"\(estimated [0-9.]+ s a step\), or use 2 ranks \(estimated [0-9.]+ s a step\), or "
        r"pass host_limit=\"[0-9.]+GiB\"\. "
        r"Rounding: pass offload=zs\.Offload\(master='split', moments='int8'\)",
        str(refused.value),
    )
    assert said is not None, refused.value
    chosen = zs.plan(model, optimizer, disk_path="/tmp", **asked).chosen
    assert chosen.label == "stage 0, some on disk, recompute, split master"
    assert chosen.disk <= float(said.group(1)) * 2**30
