"""What an allocator takes beside what is asked of it: measured for its settings, left free where that costs
nothing, and planned with anew where it was not enough."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_models import case
from test_planner import problem

import zeroshard as zs
from zeroshard.machine import machine
from zeroshard.planner.candidates import GAPS, MOST_GAPS, PARTLY_FILLED
from zeroshard.planner.choice import choose
from zeroshard.planner.plan import Plan
from zeroshard.runtime import measure, plan_guard


def planned(limit: float, margin: float = 0.015) -> Plan:
    return choose(problem(limit, machine=machine("H100", margin=margin)))


def test_a_plan_near_the_limit_is_not_chosen_where_the_next_costs_nothing() -> None:
    """Within 1 % of the limit only what has no other of the same speed; that of the CPU is exact."""
    moved = 0
    for limit in (1.2, 2.0, 2.3, 2.5):
        plan = choose(problem(limit, 4, machine=machine("H100", margin=0.015)))
        near = plan.limit * 99 // 100
        equals = [one for one in plan.candidates if one.fits and one.step <= plan.chosen.step * 1.01]
        assert plan.chosen.device <= near or all(one.device > near for one in equals)
        moved += plan.chosen.device <= near and any(one.device > near for one in equals)
    assert moved, "of some limits there was one that is nearer"
    exact = problem(2.0)
    assert exact.spare == 0


def test_a_plan_is_refitted_with_another_margin() -> None:
    plan = planned(2.5)
    asked, limit = plan.chosen.asked, plan.limit
    assert asked + plan.chosen.kinds["margin"] == plan.chosen.device
    again = plan.refitted(0.0)
    assert (again.chosen.device, again.chosen.kinds["margin"]) == (again.chosen.asked, 0)
    more = limit / asked - 1.0 + 0.001  # a thousandth more than there is room for
    found = plan.refitted(more)
    assert found.chosen.asked < asked
    assert found.chosen.device <= limit
    assert found.chosen.device == found.chosen.asked + found.chosen.kinds["margin"]
    assert found.reasons == (f"{found.chosen.label} is the fastest that fits with a margin of {more:.1%}.",)
    assert Plan.from_json(found.to_json()) == found
    with pytest.raises(zs.PlanError, match=r"no candidate of this plan fits .* with a margin of 900\.0%"):
        plan.refitted(9.0)
    for wrong in (-0.1, True, "4 %", float("inf")):
        with pytest.raises(zs.OptionError, match="takes a share, such as"):
            plan.refitted(wrong)  # type: ignore[arg-type]


def test_a_margin_is_kept_for_the_settings_of_the_allocator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    gpu, names = torch.device("cuda", 0), list[str]()
    for settings in ("", "expandable_segments:True", "garbage_collection_threshold:0.8"):
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
        names.append(measure._identity(gpu))
        assert measure.allocator_settings() == settings
    assert len(set(names)) == 3
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert measure._identity(gpu) == names[1], "the newer name counts first"
    cpu = torch.device("cpu")
    measure.raise_margin(cpu, 0.03)  # nothing is kept yet
    assert measure.here(cpu).margin == 0.0
    for margin, then in ((0.03, 0.03), (0.02, 0.03), (7.0, measure.MOST_MARGIN)):
        measure.raise_margin(cpu, margin)
        assert measure.here(cpu).margin == then


def test_what_comes_and_goes_leaves_gaps_where_a_run_is_held_to_its_limit() -> None:
    """A plan for the machine at hand leaves room for them, up to 640 MiB; one made elsewhere does not."""
    own = machine("H100", margin=0.015, workspace=2**20, source="measured")
    for limit in (2.0, 2.5, 1000):
        chosen = choose(problem(limit, machine=own)).chosen
        moving = chosen.asked - sum(chosen.kinds.get(kind, 0) for kind in ("parameters", "state", "inputs"))
        moving -= chosen.kinds["workspace"]
        gaps = min(int(GAPS * moving), MOST_GAPS)
        assert chosen.kinds["margin"] == max(int(chosen.asked * 0.015), gaps) + PARTLY_FILLED
        plan = choose(problem(limit, machine=dataclasses.replace(own, source="a sheet")))
        assert plan.chosen.kinds["margin"] == int(plan.chosen.asked * 0.015) + PARTLY_FILLED
    small = choose(problem(2.5, machine=own))
    assert any("gaps between what comes and goes in a step" in reason for reason in small.reasons)


@pytest.mark.parametrize(
    ("settings", "then"),
    [
        ("", "max_split_size_mb:1073741824"),
        ("garbage_collection_threshold:0.8", "garbage_collection_threshold:0.8,max_split_size_mb:1073741824"),
        ("expandable_segments:True", None),
        ("max_split_size_mb:64", None),
    ],
)
def test_settings_of_the_user_stay(settings: str, then: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a limit the allocator divides no large blocks, beside what it was told; and does again after."""
    changed = list[str]()
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", changed.append, raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    plan_guard._divide_large_blocks(True)
    assert changed == ([] if then is None else [then])


def test_the_plan_says_whose_margin_it_is() -> None:
    own = machine(
        "H100", margin=0.021, workspace=2**20, source="measured", allocator="expandable_segments:True"
    )
    plan = choose(problem(1000, machine=own))
    assert any(
        "2.1% of what is asked of it (measured here with expandable_segments:True)" in r for r in plan.reasons
    )
    default = dataclasses.replace(own, allocator="")
    plan = choose(problem(1000, machine=default))
    assert any("(measured here with the default settings)" in reason for reason in plan.reasons)


class Fragile(torch.nn.Module):
    """Runs out of memory in its first backward, as on a GPU: the guard is told, then torch raises."""

    def __init__(self, model: torch.nn.Module, first: list[Any]) -> None:
        super().__init__()
        self.model, self.first = model, first

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(batch)
        if self.first and loss.requires_grad:
            loss.register_hook(self.fail)
        return loss

    def fail(self, grad: torch.Tensor) -> None:
        guard = self.first.pop()
        own, guard._device = guard._device, torch.device("cuda", 0)
        guard.exceeded(2**16)
        guard._device = own
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_first_step_out_of_memory_goes_on_with_the_plan_that_fits(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says can be typed, and no step is lost: the losses are those of a run that had room."""
    raised: list[float] = []
    monkeypatch.setattr(plan_guard, "raise_margin", lambda device, margin: raised.append(margin))

    def made() -> tuple[Fragile, torch.optim.Optimizer, torch.Tensor]:
        torch.manual_seed(0)
        model, _, batch = case("gpt")
        fragile = Fragile(model, [])
        return fragile, torch.optim.AdamW(fragile.parameters(), lr=0.01, fused=True), batch

    def steps(model: Fragile, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> list[float]:
        losses = []
        for _ in range(3):
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model, optimizer, batch = made()
    run = zs.shard(model, optimizer, limit="1GiB", batch=batch)
    expected = steps(model, optimizer, batch)
    assert run.plan is not None
    needed = run.plan.chosen.device
    run.close()
    model, optimizer, batch = made()
    run = zs.shard(model, optimizer, limit=needed + 2**10, batch=batch)
    first = run.plan
    assert first is not None
    model.first.append(run._guard)
    with caplog.at_level("ERROR", "zeroshard"), pytest.raises(torch.OutOfMemoryError):
        steps(model, optimizer, batch)
    said = re.search(
        r"(stage 0.*) fits with a margin of [0-9.]+%: pass plan=run\.plan\.refitted\(([0-9.]+)\)", caplog.text
    )
    assert said is not None, caplog.text
    plan = first.refitted(float(said.group(2)))
    assert plan.chosen.label == said.group(1) != first.chosen.label
    assert raised == [float(said.group(2))], "no kind took more than planned: it is the allocator's"
    assert ", or limit= again, whose plans know that margin from now on" in caplog.text
    run.close()
    optimizer.zero_grad()
    again = zs.shard(model, optimizer, plan=plan)
    assert steps(model, optimizer, batch) == pytest.approx(expected, rel=1e-6)
    assert again.stats().planned["device"] <= plan.limit
    again.close()
