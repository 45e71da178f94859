"""What docs/planning.md says and no other test shows."""

from __future__ import annotations

import copy
import json
import math
import pickle
import re
import shlex
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from zeroshard import cli
from zeroshard.machine import GPUS, machine
from zeroshard.planner.answer import problem_of
from zeroshard.planner.candidates import all_candidates
from zeroshard.planner.signatures import rules_of
from zeroshard.runtime import measure

DOCUMENT = Path(__file__).parents[2] / "docs" / "planning.md"
SCRIPT = """
import torch
def build(layers: int = 2):
    block = torch.nn.TransformerEncoderLayer
    blocks = [block(32, 2, 64, dropout=0.0, batch_first=True) for _ in range(layers)]
    return torch.nn.Sequential(torch.nn.Embedding(100, 32), *blocks, torch.nn.Linear(32, 100))
"""
CONFIG = {
    "model_type": "llama", "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip


def lines() -> list[list[str]]:
    """The commands of the document, without the prompt and without redirections."""
    text = DOCUMENT.read_text(encoding="utf-8").replace("\\\n", " ")  # commands of several lines
    found = re.findall(r"^\$ zeroshard (plan .*)$", text, re.MULTILINE)
    return [shlex.split(line.split(">")[0]) for line in found]


@pytest.mark.parametrize("words", lines(), ids=lambda words: " ".join(words[1:4]))
@pytest.mark.slow
def test_the_commands_of_the_documentation_run(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "planned_package").mkdir()
    (tmp_path / "planned_package" / "model.py").write_text(SCRIPT)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    # The document's own words, on shapes that a test has time for.
    small = [re.sub(r"^(\d)x(2048|4096)$", r"\1x32", word) for word in words]
    small = [
        re.sub("=1:500$", "=1:6", word).replace("package.model", "planned_package.model") for word in small
    ]
    small = [{"layers=24": "layers=3"}.get(word, word) for word in small]
    if "--search" in words:
        small = ["1MiB" if word == "A100" else word for word in small]
    assert cli.main(small) == 0
    said = capsys.readouterr().out
    if "--json" in words:
        assert zs.Plan.from_json(said).ranks == 64
    elif "--search" in words:
        assert re.search(r"\d", said)
    elif "--html" in words:
        assert '"activations"' in (tmp_path / "plan.html").read_text()
    else:
        assert "chosen" in said


def test_what_is_known_of_a_gpu_says_where_it_is_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["machine", "--known"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"H200 +│.*│ +33│", said), said  # µs for Python to launch a kernel
    for name, found in GPUS.items():
        assert f"{name}: {found.source}" in said
        assert len(found.source) > 10
        assert (found.margin, found.workspace) == (0.0, 0)  # measured, or nothing


def test_a_machine_is_measured_once_and_again_when_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = ["machine", "--device", "cpu", "--json"]

    def told(*more: str) -> dict[str, Any]:
        assert cli.main([*words, *more]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    first = told()
    assert first["source"] == "measured"
    assert all(first[name] > 0 for name in ("half", "full", "memory_rate", "host_rate", "efficiency", "gap"))
    kept = next((tmp_path / "zeroshard").glob("machine-*.json"))
    figures = json.loads(kept.read_text())
    kept.write_text(json.dumps(figures | {"memory_rate": 12345.0}))
    assert told()["memory_rate"] == 12345.0  # from the cache
    assert told("--again")["memory_rate"] != 12345.0
    kept.write_text(json.dumps(figures | {"format": measure.FORMAT - 1, "memory_rate": 12345.0}))
    assert told()["memory_rate"] != 12345.0  # another version's
    monkeypatch.setattr(measure, "disk_rate", lambda folder: 77.0)
    assert told("--disk-path", str(tmp_path))["disk_rate"] == 77.0


def test_what_python_takes_is_measured() -> None:
    """For a kernel, and how much more while other threads update; no thread is left."""
    threads = set(threading.enumerate())
    small = measure._SmallProbe(torch.device("cpu"))
    assert 8 * 20 < small.kernels < 8 * 60  # eight blocks, forward and backward
    assert 1e-7 < small.seconds() / small.kernels < 1e-2
    assert 0 <= measure._drag(small, 1, numel=2**16) < 20
    assert set(threading.enumerate()) <= threads  # those of tests before may end meanwhile


def wide() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))


def test_a_precision_is_chosen_among_those_that_are_allowed() -> None:
    batch = torch.zeros(64, 256)
    asked: dict[str, Any] = {"ranks": 1, "limit": "1GiB", "batch": batch, "offload": None}
    found = zs.plan(wide(), precisions=(None, "bf16"), **asked)
    assert {one.precision for one in found.candidates} == {"as it is", "bfloat16"}
    assert {one.numerics for one in found.candidates} == {"exact", "rounding"}
    alone = zs.plan(wide(), **asked)
    assert {one.numerics for one in alone.candidates} == {"exact"}  # unasked nothing else
    with pytest.raises(zs.OptionError, match="precision= to say, or precisions= to have one chosen"):
        zs.plan(wide(), precision="bf16", precisions=("bf16",), **asked)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_state_rests_on_a_disk_where_kernels_know_the_update(tmp_path: Path, optimizer: Any) -> None:
    model = wide()
    options: dict[str, Any] = {"host_limit": "8MiB", "disk_path": str(tmp_path), "clip_norm": math.inf}
    given = optimizer(model.parameters(), lr=0.1)
    problem = problem_of(model, given, ranks=1, limit="4MiB", **options).problem
    disks = [one for one in all_candidates(problem) if "disk" in one.placing]
    assert bool(disks) == (optimizer is not torch.optim.Adagrad)
    nowhere = problem_of(model, given, ranks=1, limit="4MiB", host_limit="8MiB").problem
    assert not any("disk" in one.placing for one in all_candidates(nowhere))


def test_state_that_is_no_tensor_of_the_parameters_size_is_taken_from_a_small_matrix() -> None:
    """Adafactor keeps a row and a column of a matrix, and of a vector all."""
    parameters = [nn.Parameter(torch.zeros(4, 4))]
    kept = {
        name: rules_of([getattr(torch.optim, name)(parameters, lr=0.1)])[0].kept((4, 8), 32)
        for name in ("Adafactor", "AdamW", "SGD", "Adagrad")
    }
    assert kept == {"Adafactor": 4 + 8, "AdamW": 64, "SGD": 0, "Adagrad": 32}


def test_without_a_batch_the_plan_says_that_activations_are_not_counted() -> None:
    asked: dict[str, Any] = {"ranks": 2, "limit": "1GiB", "stage": 2, "offload": None}
    for batch, counted in ((None, False), (torch.zeros(8, 256), True)):
        made = zs.plan(wide(), batch=batch, **asked)
        assert bool(sum(one.kinds["activations"] for one in made.candidates)) == counted
        assert any("Activations are not counted" in reason for reason in made.reasons) != counted


def test_a_node_cache_is_planned_where_it_can_run() -> None:
    cpu = machine("H100", 1e9, gpu=False, link=10e9)
    ask: dict[str, Any] = {"limit": "1GiB", "offload": None, "stage": 3, "batch": torch.zeros(8, 256)}
    spread: dict[str, Any] = {"nodes": 4, "ranks_per_node": 4, "machine": cpu}
    flat, near = (zs.plan(wide(), node_cache=cache, **spread, **ask).chosen for cache in (False, True))
    assert near.settings["ranks_per_node"] == 4
    # Flat: gradients, and parameters twice but for the last two units. With the cache: a quarter of each.
    size = 4 * 6 * (256 * 256 + 256) * 12 / 16
    assert sum(flat.between.values()) == pytest.approx(size * (3 - 2 / 6), rel=0.01)
    assert sum(near.between.values()) == pytest.approx(size * 2 / 4, rel=0.01)
    assert near.seconds["exchange"] < flat.seconds["exchange"] / 2
    assert near.kinds["parameters"] > flat.kinds["parameters"]
    with pytest.raises(zs.OptionError, match=r"a H100 has NCCL, which is of one level: drop them"):
        zs.plan(wide(), node_cache=True, nodes=4, ranks_per_node=4, **ask)
    with pytest.raises(zs.OptionError, match=r"8 ranks are not several nodes of 8"):
        zs.plan(wide(), node_cache=True, ranks=8, machine=cpu, **ask)


def test_limits_are_of_a_node() -> None:
    """`host_limit` is shared by the ranks of a node, `memory_limit_per_node` by their devices."""
    own = machine("H100", node=4)
    ask: dict[str, Any] = {"ranks": 8, "machine": own, "stage": 0}
    one = zs.plan(wide(), limit="1GiB", offload=zs.Offload(), **ask).chosen
    need = 4 * one.host
    assert zs.plan(wide(), limit="1GiB", offload=zs.Offload(), host_limit=need, **ask).chosen.fits
    with pytest.raises(zs.PlanError, match="of host memory per node"):
        zs.plan(wide(), limit="1GiB", offload=zs.Offload(), host_limit=need - 1, **ask)
    plain = zs.plan(wide(), limit="1GiB", offload=None, **ask).chosen
    whole = zs.plan(wide(), memory_limit_per_node=4 * plain.device, offload=None, **ask)
    assert (whole.limit, whole.chosen.device) == (plain.device, plain.device)


def test_a_plan_does_not_change() -> None:
    """Nor what it holds; and it comes back the same from JSON, from a copy and from a pickle."""
    plan = zs.plan(nn.Linear(8, 8), ranks=2, limit="1GiB", machine="H100")
    for change in (
        lambda: plan.chosen.settings.update(stage=0),
        lambda: plan.chosen.settings.__setitem__("stage", 0),
        lambda: plan.chosen.kinds.clear(),
        lambda: plan.weights.pop("weight"),
    ):
        with pytest.raises(TypeError, match=r"a plan does not change; make another with zs\.plan\(\)"):
            change()
    for same in (zs.Plan.from_json(plan.to_json()), copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert same == plan
        assert same.diff(plan) == []
        assert same.options() == plan.options()
