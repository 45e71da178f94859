"""`auto` fills the device, then the host, then the disk, and offloads nothing that would have fitted."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from offload_loop import make_model, thirds

import zeroshard as zs
from zeroshard.layout.placement import (
    RESTS,
    OffloadBuffers,
    Placement,
    Rest,
    TierBudget,
    TierBytes,
    TierRequest,
    UnitDemand,
    arrange,
)


def units(count: int, state: int = 12, weight: int = 2) -> list[UnitDemand]:
    return [
        UnitDemand(f"blocks.{i}", TierBytes(state, state, state), TierBytes(weight, weight, weight))
        for i in range(count)
    ]


def bytes_at(placement: Placement, rest: Rest) -> int:
    state = sum(place.state_bytes for place in placement if place.optimizer == rest)
    return state + sum(place.parameter_bytes for place in placement if place.parameters == rest)


def test_all_of_it_stays_on_the_device_where_it_fits() -> None:
    found = arrange(units(4), TierBudget(device=4 * 14, host=0, disk=0))
    assert not found.has("host")
    assert not found.has("disk")
    assert bytes_at(found, "device") == 56


def test_the_first_units_get_the_device_and_parameters_come_before_state() -> None:
    found = arrange(units(5), TierBudget(device=10 + 24, host=12, disk=None))
    assert [p.optimizer for p in found] == ["device", "device", "host", "disk", "disk"]
    assert {p.parameters for p in found} == {"device"}
    assert [bytes_at(found, rest) for rest in RESTS] == [34, 12, 24]


def test_a_unit_too_large_keeps_no_smaller_one_out() -> None:
    sizes = [8, 30, 6]
    demands = [UnitDemand(str(i), TierBytes(s, s, s), TierBytes(1, 1, 1)) for i, s in enumerate(sizes)]
    assert [p.optimizer for p in arrange(demands, TierBudget(device=20))] == ["device", "host", "device"]


def test_state_is_never_nearer_than_its_weights() -> None:
    found = arrange(units(3, state=1, weight=10), TierBudget(device=15, host=12, disk=None))
    assert [(p.parameters, p.optimizer) for p in found] == [
        ("device", "device"),
        ("host", "host"),
        ("disk", "disk"),
    ]


def test_what_offloading_itself_takes_is_left_free() -> None:
    need = OffloadBuffers(streaming=5, staging=7, frames=3)
    found = arrange(units(4), TierBudget(device=8 + 12, host=12 + 7), buffering=need)
    assert [p.optimizer for p in found] == ["device", "disk", "disk", "disk"], "staging and berths take 10"
    roomier = arrange(units(4), TierBudget(device=8 + 12, host=12 + 10), buffering=need)
    assert [p.optimizer for p in roomier] == ["device", "host", "disk", "disk"]
    for rest in ("device", "host"):
        limit = TierBudget(device=20, host=19).at(rest)  # type: ignore[arg-type]
        assert limit is not None
        assert bytes_at(found, rest) + need.needed(found.places)[rest] <= limit  # type: ignore[arg-type,index]


def test_tiers_that_were_named_are_kept_to() -> None:
    request = TierRequest("auto", "device")
    assert {p.parameters for p in arrange(units(3), TierBudget(device=6, host=None), request)} == {"device"}
    said = r"`blocks\.2` has 2 B of parameters, and what is left is device 1 B: .*device_bytes"
    with pytest.raises(zs.PlanError, match=said):
        arrange(units(3), TierBudget(device=5, host=None), request)


def test_no_room_anywhere_is_an_error_that_says_what_to_pass() -> None:
    with pytest.raises(zs.PlanError, match=r"`blocks\.1` has 12 B of optimizer state.*path="):
        arrange(units(3), TierBudget(device=10, host=12, disk=0))


@pytest.mark.parametrize("seed", range(30))
def test_nothing_is_offloaded_that_would_have_fitted(seed: int) -> None:
    draw = random.Random(seed)
    demands = []
    for i in range(12):
        state, weight = draw.randint(1, 40), draw.randint(1, 9)
        demands.append(UnitDemand(str(i), TierBytes(state, state, state), TierBytes(weight, weight, weight)))
    budget = TierBudget(device=draw.randint(0, 250), host=draw.randint(0, 200))
    need = OffloadBuffers(draw.randint(0, 9), draw.randint(0, 9), draw.randint(0, 9))
    found = arrange(demands, budget, buffering=need)
    # Where the buffers alone are too much, nothing rests in that tier.
    for rest in ("device", "host"):
        assert bytes_at(found, rest) == 0 or bytes_at(found, rest) + need.needed(found.places)[rest] <= (
            budget.at(rest) or 0
        )
    everything = sum(d.state.device + d.parameters.device for d in demands)
    assert (everything <= (budget.device or 0)) == (not found.has("host") and not found.has("disk"))
    for place, demand in zip(found, demands, strict=True):
        left = {
            rest: (budget.at(rest) or 0) - need.needed(found.places)[rest] - bytes_at(found, rest)
            for rest in RESTS
        }
        nearer = RESTS[RESTS.index(place.parameters) : RESTS.index(place.optimizer)]
        assert all(demand.state.at(rest) > left[rest] for rest in nearer)


def test_the_table_tells_neighbours_together() -> None:
    text = arrange(units(5), TierBudget(device=10 + 24, host=12)).table()
    assert text.splitlines()[1:] == [
        "blocks.0 … blocks.1  2  device      4 B  device  24 B",
        "blocks.2             1  device      2 B  host    12 B",
        "blocks.3 … blocks.4  2  device      4 B  disk    24 B",
    ]


@pytest.mark.parametrize(("offload", "state"), [(None, "device"), (zs.Offload(threads=1), "host")])
def test_the_table_has_no_sizes_where_none_were_reckoned(offload: zs.Offload | None, state: str) -> None:
    model = make_model()
    run = zs.shard(model, torch.optim.AdamW(model.parameters()), offload=offload)
    head, line = run.placement.table().splitlines()
    assert head.split() == ["units", "parameters", "state"]
    assert line.endswith(f"  {len(run.units)}  device      {state}")
    run.close()


# ---------------------------------------------------------------------- shown, and part of the plan


def test_auto_shows_where_everything_rests(capsys: pytest.CaptureFixture[str], disk_folder: Path) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    offload = thirds({}, 1, path=str(disk_folder), stage_bytes=4096, threads=1)
    run = zs.shard(model, optimizer, offload=offload, clip_norm=4.0)
    shown = capsys.readouterr().err
    assert run.placement.table() in shown
    assert "(root)" in shown
    assert all(rest in shown for rest in RESTS)
    run.close()


def test_a_plan_carries_the_placement(disk_folder: Path) -> None:
    """Planned, written, read and carried out: units rest where the plan says, not where they would now."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    offload = thirds({"stage": 3}, 1, path=str(disk_folder), stage_bytes=4096, threads=1)
    made = zs.plan(model, optimizer, ranks=1, limit="1GiB", stage=3, offload=offload, clip_norm=4.0)
    resting = made.chosen.placement
    assert resting is not None
    assert {place.optimizer for place in resting} == set(RESTS)
    assert made.chosen.disk > 0
    assert resting.line() in " ".join(str(made).split())
    made.write(disk_folder / "plan.json")
    read = zs.Plan.read(disk_folder / "plan.json")
    assert read == made
    tighter = replace(read.chosen, places=[[*p[:1], "disk", *p[2:]] for p in read.chosen.places])
    for plan in (read, replace(read, chosen=tighter)):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run = zs.shard(model, optimizer, plan=plan)
        assert run.placement == plan.chosen.placement
        run.close()


def test_a_disk_limit_that_is_too_small(disk_folder: Path) -> None:
    model = make_model()
    offload = zs.Offload("disk", path=str(disk_folder), stage_bytes=4096)
    with pytest.raises(zs.PlanError, match=r"no plan fits 9\.8 KiB of disk per node: .* needs 2\d\d\.\d KiB"):
        zs.plan(model, ranks=1, limit="1GiB", disk_limit=10_000, stage=3, offload=offload, clip_norm=4.0)
