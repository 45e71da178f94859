"""Placings that fill one tier after another, policies and layouts in the memory model: against real runs."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict
from functools import partial
from typing import Any

import models
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_models import CASES, case, measured_step

import zeroshard as zs
from zeroshard.errors import OptionError
from zeroshard.layout.memory import MemoryModel
from zeroshard.layout.sharding import ShardSpec, slots_for
from zeroshard.layout.specs import TransportTraits
from zeroshard.planner.plan import options_of
from zeroshard.planner.signatures import blocks_of, rules_of
from zeroshard.testing import assert_bytes, ranks

LASTING = ("parameters", "gradients", "state", "gathered", "buckets", "host", "staging", "disk")


def test_between_all_on_the_device_and_all_on_the_host_some_is_on_the_host() -> None:
    """A limit between the two is filled unit by unit, and the run takes what was planned."""
    model, optimizer, batch = case("gpt")
    ask: dict[str, Any] = {"batch": batch, "clip_norm": math.inf, "recompute": False, "bucket_bytes": "1MiB"}
    near = zs.plan(model, optimizer, ranks=1, limit="64MiB", offload=None, **ask).chosen.device
    far = zs.plan(model, optimizer, ranks=1, limit="64MiB", offload=zs.Offload(), **ask).chosen.device
    limit = (near + far) // 2
    plan = zs.plan(model, optimizer, ranks=1, limit=limit, **ask)
    some = next(one for one in plan.candidates if one.placing == "some on host")
    assert far < some.device <= limit
    assert some.lasting["state"] > 0
    assert some.host > 0
    run = zs.shard(model, optimizer, **options_of(some))
    device, host = measured_step(run, model, optimizer, batch)
    tiers = {place.optimizer for place in run.placement}
    run.close()
    assert tiers == {"device", "host"}
    assert host == some.host
    assert_bytes(some.device, device + batch.nbytes, 0.001, some.label)


@pytest.mark.parametrize("ways", [{}, {"disk": True}], ids=["host", "disk"])
def test_a_host_that_has_no_room_for_all_gets_what_the_device_leaves(ways: Any, tmp_path: Any) -> None:
    """Neither tier alone has room; both together do, without the disk that is there."""
    model, optimizer, batch = case("gpt")
    ask: dict[str, Any] = {"ranks": 1, "batch": batch, "clip_norm": math.inf, "recompute": False}
    near = zs.plan(model, optimizer, limit="64MiB", offload=None, **ask).chosen
    far = zs.plan(model, optimizer, limit="64MiB", offload=zs.Offload(parameters="host"), **ask).chosen
    limit, host = (near.device + far.device) // 2, far.host * 3 // 4
    disk = {"disk_path": str(tmp_path)} if ways else {}
    chosen = zs.plan(model, optimizer, limit=limit, host_limit=host, **ask, **disk).chosen
    assert chosen.placing == "some on host"
    assert chosen.device <= limit
    assert 0 < chosen.host <= host
    assert chosen.disk == 0


def test_what_has_no_room_on_the_host_goes_to_the_disk(tmp_path: Any) -> None:
    """A host limit below what the state takes, and a disk: planned there, and the run puts it there."""
    model, optimizer, batch = case("gpt")
    ask: dict[str, Any] = {"batch": batch, "clip_norm": math.inf, "recompute": False, "offload": zs.Offload()}
    state = zs.plan(model, optimizer, ranks=1, limit="64MiB", **ask)
    # Less host memory takes smaller groups, and each has a few numbers on the device: those of its norm.
    ask |= {"limit": state.chosen.device + 1024, "host_limit": state.chosen.host // 2}
    del ask["offload"]
    with pytest.raises(zs.PlanError, match=r"of host memory per node: .*host_limit="):
        zs.plan(model, optimizer, ranks=1, **ask)
    run = zs.shard(model, optimizer, disk_path=str(tmp_path), disk_limit="64MiB", machine="H100", **ask)
    assert run.plan is not None
    chosen = run.plan.chosen
    assert chosen.placing in ("state on disk", "some on disk")
    measured_step(run, model, optimizer, batch)
    model(batch).backward()
    optimizer.step()
    live = run.stats().live
    run.close()
    assert live["disk"] == chosen.disk > 0
    assert live["host"] + live["staging"] == chosen.host <= state.chosen.host // 2
    with pytest.raises(zs.PlanError, match=r"of disk per node: .*disk_limit="):
        zs.plan(model, optimizer, ranks=1, disk_path=str(tmp_path), disk_limit="4KiB", **ask)
    with pytest.raises(OptionError, match="disk_limit= needs disk_path="):
        zs.plan(model, optimizer, ranks=1, disk_limit="1GiB", **ask)


# Policies.

SYNCS: list[tuple[int, Any]] = [
    (0, zs.Delayed()),
    (1, zs.Delayed()),
    (3, zs.Delayed()),
    (0, zs.Local(steps=2)),
    (0, zs.Local(steps=4, fragments=2)),
    (0, zs.Adaptive(choices=[zs.EveryStep(), zs.Delayed(), zs.Local(steps=2)])),
    (2, zs.Adaptive(choices=[zs.EveryStep(), zs.Delayed()])),
]


def hold(
    stage: int, sync: Any, precision: str | None, **options: Any
) -> tuple[dict[str, int], dict[str, int]]:
    model, optimizer, batch = case("gpt")
    units, rules = blocks_of(model, [optimizer], "auto"), rules_of([optimizer])
    options |= {"stage": stage, "sync": sync, "precision": precision, "bucket_bytes": "40KiB"}
    run = zs.shard(model, optimizer, **options)
    setup = MemoryModel(units, run.options, 2, rules, run.rank, traits=TransportTraits())
    for _ in range(4):
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    live = run.stats().live
    run.close()
    return live, asdict(setup.held)


@pytest.mark.ranks
@pytest.mark.parametrize(("stage", "sync"), SYNCS, ids=str)
def test_a_policy_holds_what_was_predicted(stage: int, sync: Any) -> None:
    """Gradients that do not travel are the optimizer's to let go, and no run books them."""
    for live, predicted in ranks(2).run(hold, stage, sync, "bf16" if stage == 3 else None):
        apart = isinstance(sync, zs.Local)
        assert live | ({"gradients": predicted["gradients"]} if apart else {}) == predicted


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [1, 3])
def test_codes_that_travel_one_step_behind_were_predicted(stage: int) -> None:
    """Each bucket has a wire of its own then, and lands twice."""
    codecs = {"places.*": zs.Rows(), "*.weight": zs.Int8(), "*": None}
    for live, predicted in ranks(2).run(partial(hold, compress=codecs), stage, zs.Delayed(), None):
        assert live == predicted


@pytest.mark.ranks
@pytest.mark.parametrize("master", ["plain", "split"])
def test_weights_that_are_held_back_were_predicted(master: Any) -> None:
    ask = partial(hold, offload=zs.Offload(master=master), clip_norm=1.0)
    plain, _ = ranks(2).run(ask, 3, zs.EveryStep(), "bf16")[0]
    for live, predicted in ranks(2).run(ask, 3, zs.Delayed(), "bf16"):
        assert live == predicted
        assert live["host"] - plain["host"] >= live["parameters"], "one more copy of this rank's rows"


def test_a_policy_narrows_what_is_planned() -> None:
    model, _, batch = case("gpt")
    plan = zs.plan(model, ranks=4, limit="64MiB", batch=batch, stage=0, sync=zs.Local(steps=8))
    assert {(c.stage, c.placing) for c in plan.candidates} == {(0, "device")}
    plan = zs.plan(model, ranks=4, limit="64MiB", batch=batch, sync=zs.Delayed())
    assert {c.stage for c in plan.candidates} == {0, 1, 2, 3}
    again = zs.Plan.from_json(plan.to_json())
    assert again.options()["sync"] == zs.Delayed()
    former = plan.to_json().replace('"type": "Delayed",', '"type": "Delayed", "steps": 1,')
    assert former != plan.to_json()
    assert zs.Plan.from_json(former).options() == plan.options(), "what earlier versions wrote is read"


# Rows dealt level.


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 60), st.integers(1, 17), st.integers(0, 16))
def test_level_rows_are_all_rows_once_and_level(height: int, world: int, first: int) -> None:
    slot = ShardSpec("w", (height, 3), world, "level", first % world)
    spans = [slot.rows(rank) for rank in range(world)]
    assert spans[0][0] == 0
    assert spans[-1][1] == height
    assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
    counts = [stop - start for start, stop in spans]
    assert max(counts) - min(counts) <= 1
    larger = {(first + i) % world for i in range(height % world)}
    assert {rank for rank, count in enumerate(counts) if count > height // world} == larger


def test_over_many_tensors_all_ranks_hold_the_same() -> None:
    tensors = [(f"w{i}", (7, 5)) for i in range(40)]
    for split, most in (("rows", 0.7), ("level", 0.03)):
        slots = slots_for(tensors, 4, split)  # type: ignore[arg-type]
        held = [sum(slot.held(rank) for slot in slots) for rank in range(4)]
        assert sum(held) == 40 * 35
        assert (max(held) / (sum(held) / 4) - 1) <= most


def trained(split: str) -> tuple[list[float], int]:
    """Losses of three steps of a model whose rows do not divide by three, and the rows that are here."""
    torch.manual_seed(0)
    model = models.GPT(blocks=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = zs.shard(model, optimizer, stage=3, split=split)  # type: ignore[arg-type]
    losses = []
    for step in range(3):
        batch = torch.arange(2 * 11).view(2, 11).add(7 * step + run.rank).remainder(50)
        loss = model(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    held = sum(p.numel() for p in (getattr(q, "_local_tensor", q) for q in model.parameters()))
    run.close()
    return losses, held


@pytest.mark.ranks
def test_level_rows_train_as_chunks_do() -> None:
    """The same losses, bit for bit, from fewer rows on the fullest rank."""
    chunks, level = (ranks(3).run(trained, split) for split in ("rows", "level"))
    assert [losses for losses, _ in level] == [losses for losses, _ in chunks]
    assert sum(held for _, held in level) == sum(held for _, held in chunks)
    assert max(held for _, held in level) < max(held for _, held in chunks)


def test_a_plan_deals_level_where_chunks_would_not_be() -> None:
    with torch.device("meta"):
        model = models.Tower(96, 64)
    plan = zs.plan(model, ranks=64, limit="1GiB", stage=3)
    assert plan.options()["split"] == "level"
    assert any("dealt level" in reason for reason in plan.reasons)
    assert plan.imbalance < 0.01
    kept = zs.plan(model, ranks=64, limit="1GiB", stage=3, split="rows")
    assert kept.options()["split"] == "rows"
    assert kept.imbalance > 0.1
    assert any("Rows do not divide evenly" in reason for reason in kept.reasons)


# Buckets that leave as they fill.


def waiting(offload: zs.Offload | None, stage: int, bucket_bytes: int) -> tuple[int, int, int]:
    """A sharded step of a GPT: bytes planned and measured, and those of gradients that wait."""
    model, optimizer, batch = case("gpt")
    batch = batch[:2]
    options: Any = {"offload": offload, "stage": stage, "recompute": True, "bucket_bytes": bucket_bytes}
    run = zs.shard(model, optimizer, limit="64MiB", batch=batch, machine="A100", clip_norm=1.0, **options)
    device, _ = measured_step(run, model, optimizer, batch)
    assert run.plan is not None
    chosen = run.plan.chosen
    run.close()
    return chosen.device, device + batch.nbytes, chosen.kinds["arriving"]


@pytest.mark.ranks
@pytest.mark.parametrize("offload", [zs.Offload(), zs.Offload("auto", device_bytes=900_000)])
def test_what_rests_on_the_host_waits_for_no_embedding(offload: zs.Offload) -> None:
    """The root has the first weights of the model and the last, whose gradients arrive last and first. In one
    bucket they would keep all others on the device until the end of backward."""
    for planned, measured, arriving in ranks(2).run(waiting, offload, 2, 50_000):
        assert arriving < 573_000 / 5  # of a whole gradient
        assert_bytes(planned, measured, 0.001, str(offload))


@pytest.mark.ranks
def test_at_stage_0_a_rank_may_own_a_whole_tensor_of_a_bucket() -> None:
    """Its gradients stay until the sum is made, or the next bucket leaves: at most what is planned."""
    found = ranks(2).run(waiting, None, 0, 135_000)
    assert all(measured <= planned for planned, measured, _ in found)
    assert max(measured for _, measured, _ in found) > found[0][0] * 0.95


# Models and inputs of other kinds: exact.


def exact(name: str, options: dict[str, Any]) -> tuple[int, int, int, int]:
    """A sharded step: bytes planned and measured, of the device and of the host tier."""
    model, optimizer, batch = case(name)
    run = zs.shard(model, optimizer, limit="64MiB", batch=batch, machine="A100", **options)
    device, host = measured_step(run, model, optimizer, batch)
    assert run.plan is not None
    chosen = run.plan.chosen
    run.close()
    resting = batch.nbytes + sum(b.nbytes for b in model.buffers())
    return chosen.device, device + resting, chosen.host, host


@pytest.mark.ranks
@pytest.mark.parametrize("name", [name for name in CASES if name != "gpt"])
def test_other_models_take_what_was_planned(name: str) -> None:
    for options in ({"stage": 3, "offload": None}, {"stage": 2, "offload": None, "recompute": True}):
        for planned, measured, host, there in ranks(2).run(exact, name, options):
            assert host == there
            assert_bytes(planned, measured, 0.0005, f"{name} {options}")
