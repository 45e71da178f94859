"""Checkpoints and plans that an earlier version wrote still load: the same bits, the same choices."""

from __future__ import annotations

import json
import tarfile
from dataclasses import replace
from pathlib import Path

import compatibility_case as case
import pytest

import zeroshard as zs
from zeroshard.machine import GPUS
from zeroshard.planner.pricing import SENT, STEPPED
from zeroshard.testing import ranks

DIGESTS = json.loads((case.FIXTURES / "digests.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    with tarfile.open(case.FIXTURES / "checkpoints.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.mark.ranks
@pytest.mark.parametrize("name", case.RUNS)
def test_a_checkpoint_of_an_earlier_version_gives_the_same_bits(checkpoints: Path, name: str) -> None:
    world, options = case.RUNS[name]
    held = ranks(world).run(case.loaded, str(checkpoints / name), options)
    assert held == [(digest, {"at": case.STEPS}) for digest in DIGESTS[name]]


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "world"), [("stage-3", 1), ("one-rank", 2), ("host-split", 1)])
def test_another_number_of_ranks_reads_it_too(checkpoints: Path, name: str, world: int) -> None:
    options = case.RUNS[name][1]
    held = ranks(world).run(case.loaded, str(checkpoints / name), options)
    assert held == [(DIGESTS[name][0], {"at": case.STEPS})] * world


# What a run has come to take since, in bytes, by plan. On the host, each of four groups has three numbers for
# its norm instead of one, so that a step that is not taken leaves no trace: 4 * 2 * 4 bytes.
# Without `clip_norm=`, updates are the native kernels' too: with a sum of 4 bytes for each of ten tensors, 13
# of the whole, the ring that gradients leave through, and state in lines of 16 numbers.
GROWN = {
    "host": {"chosen.device": 32, "chosen.kinds.buckets": 32, "chosen.lasting.buckets": 32},
    "eight-ranks-two-nodes": {
        "chosen.device": 92,
        "chosen.kinds.buckets": 92,
        "chosen.lasting.buckets": 92,
        "chosen.host": 960,
        "chosen.lasting.host": 448,
        "chosen.lasting.staging": 512,
    },
}


@pytest.mark.parametrize("name", case.PLANS)
def test_a_plan_of_an_earlier_version_is_read_and_made_again(name: str) -> None:
    """All of it but the estimates of time, and what a run takes more of by now. What was chosen is looked for
    among today's candidates: by today's estimates another one may be faster."""
    text = (case.FIXTURES / "plans" / f"{name}.json").read_text(encoding="utf-8")
    plan = zs.Plan.from_json(text)
    assert json.loads(plan.to_json()) == json.loads(text)
    made = case.planned(name)
    same = next(one for one in made.candidates if one.settings == plan.chosen.settings)
    differing = plan.diff(replace(made, chosen=same))
    estimates = ("chosen.seconds", "chosen.step", "reasons")
    changed = [line.split(": ") for line in differing if not line.startswith(estimates)]
    bytes_then_now = {what: [int(n) for n in numbers.split(" → ")] for what, numbers in changed}
    assert {what: now - then for what, (then, now) in bytes_then_now.items()} == GROWN.get(name, {})
    assert (made.chosen == same) != (name in HANDED_OVER)


# Parts that Python hands to the host, and a share of `optimizer.step()` for each. An earlier version knew
# that of runs with `clip_norm=` only, and took this plan's host for free.
HANDED_OVER = {"eight-ranks-two-nodes": 4}


@pytest.mark.parametrize("name", HANDED_OVER)
def test_another_choice_is_made_because_parts_are_handed_over(name: str) -> None:
    text = (case.FIXTURES / "plans" / f"{name}.json").read_text(encoding="utf-8")
    then, made = zs.Plan.from_json(text).chosen, case.planned(name)
    now = next(one for one in made.candidates if one.settings == then.settings)
    handed = HANDED_OVER[name] * (SENT + STEPPED) * GPUS["A100"].launch
    assert now.seconds["interpreter"] - then.seconds["interpreter"] == pytest.approx(handed, rel=1e-5)
    assert now.step == pytest.approx(then.step + handed, rel=1e-4)
    assert then.step < made.chosen.step < now.step, "on the device it takes what it took"


@pytest.mark.ranks
def test_a_run_keeps_to_a_plan_of_an_earlier_version() -> None:
    assert ranks(2).run(kept_to, "host") == ["stage 2, state on host"] * 2


def kept_to(name: str) -> str:
    """A run that carries the plan out for a few steps; the plan's label."""
    plan = zs.Plan.read(case.FIXTURES / "plans" / f"{name}.json")
    model, optimizer = case.made()
    run = zs.shard(model, optimizer, plan=plan)
    case.steps(run, model, optimizer, 0, 2)
    run.close()
    return plan.chosen.label
