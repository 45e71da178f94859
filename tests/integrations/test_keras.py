"""Keras scripts over ranks, against the same script in one process with the same seeds and data.

On the PyTorch backend. `KERAS_BACKEND=tensorflow pytest --wide tests/integrations/test_keras.py` runs what
both have on TensorFlow; `--wide` adds eight ranks, and what takes long.
"""

from __future__ import annotations

import csv
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from keras_case import BACKEND, LOSS, OPTIMIZERS, Outcome, Script, ended_early, failing, ran, refused
from keras_sharing import SHARING, found

import zeroshard as zs
import zeroshard.integrations.keras as tz
from zeroshard.testing import Ranks

TENSORFLOW = BACKEND == "tensorflow"
on_torch = pytest.mark.skipif(TENSORFLOW, reason="of the PyTorch backend")
on_tensorflow = pytest.mark.skipif(not TENSORFLOW, reason="of the TensorFlow backend")
pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def long(request: pytest.FixtureRequest) -> None:
    """Runs with --wide alone."""
    if not request.config.getoption("wide"):
        pytest.skip("takes long: runs with --wide")


def assert_near(got: Outcome, want: Outcome, within: float = 1e-6) -> None:
    assert got.history.keys() == want.history.keys()
    for name, values in want.history.items():
        assert got.history[name] == pytest.approx(values, rel=within, abs=within), name
    assert got.evaluated == pytest.approx(want.evaluated, rel=within, abs=within)
    for ours, theirs in ((got.weights, want.weights), (got.slots, want.slots)):
        assert [one.shape for one in ours] == [one.shape for one in theirs]
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one.astype(float), other.astype(float), rtol=within, atol=within)
    np.testing.assert_allclose(got.predicted, want.predicted, rtol=0, atol=within)
    assert got.told == pytest.approx(want.told, rel=within, abs=within)


def assert_same(got: Outcome, want: Outcome) -> None:
    """Bit for bit."""
    assert (got.history, got.evaluated, got.told) == (want.history, want.evaluated, want.told)
    for ours, theirs in ((got.weights, want.weights), (got.slots, want.slots)):
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("stage", [0, 1, 2] if TENSORFLOW else [0, 1, 2, 3])
def test_fit_gives_the_numbers_of_one_process(pool: Ranks, stage: int) -> None:
    plain = ran(Script())
    assert_same(ran(Script(), {"stage": stage}), plain)  # one rank
    both = pool.run(ran, Script(), {"stage": stage, "num_gpus_per_node": 2})
    assert_near(both[0], plain)
    assert_same(both[1], both[0])
    assert TENSORFLOW or both[0].stats.steps == 8


THREE, TWO, NONE = {"stage": 2 if TENSORFLOW else 3}, {"stage": 2}, {"stage": 0}
GENTLE = "gentle"  # gradients that are nothing but rounding make full steps of Adam
WEIGHTS = np.linspace(0, 2, 50)
CLASSES = {0: 1.0, 1: 3.0, 2: 0.5, 3: 1.0, 4: 2.0}
SCRIPTS: dict[str, tuple[Script, dict[str, Any], str]] = {
    "a last batch of one sample": (Script(samples=49), TWO, "script"),
    "noise and batch statistics": (Script("noisy", GENTLE), THREE, "script"),
    "regularizers and constraints": (Script("penalised"), THREE, "script"),
    "regularizers, not divided": (Script("penalised"), NONE, "script"),
    "text with masks, in blocks": (Script("text", GENTLE), THREE, "script"),
    "a step of its own": (Script("own"), THREE, "script"),
    "batches of many sizes": (Script(data="sequence"), TWO, "script"),
    "a DataLoader": (Script(data="loader"), TWO, "script"),
    "a generator": (Script(data="generator", fit={"steps_per_epoch": 3}), TWO, "script"),
    "class weights": (Script(fit={"class_weight": CLASSES}), TWO, "script"),
    "sample weights": (Script(fit={"sample_weight": WEIGHTS}), TWO, "script"),
    "a mean by weights": (
        Script(fit={"sample_weight": WEIGHTS}, compile={"loss": LOSS(reduction="mean_with_sample_weight")}),
        TWO,
        "script",
    ),
    "a sum": (Script(compile={"loss": LOSS(reduction="sum")}), TWO, "script"),
    "a validation split": (Script(fit={"validation_data": None, "validation_split": 0.3}), TWO, "script"),
    "what batches are told": (Script(callbacks="told"), TWO, "script"),
    "early stopping": (Script(callbacks="early", epochs=4), TWO, "script"),
    "a lower rate on a plateau": (Script(callbacks="plateau", epochs=4), TWO, "script"),
    "one rank asks to stop": (Script(callbacks="stops"), TWO, "script"),
    "swapped averages": (Script(callbacks="swap", optimizer="overwriting"), THREE, "script"),
    "files": (Script(callbacks="kept"), THREE, "script"),
    "saved and loaded": (Script(optimizer="sgd"), THREE, "again"),
    "saved and loaded, whole state": (Script(optimizer="adafactor"), THREE, "again"),
    "saved and loaded, own layers": (Script("text", GENTLE), THREE, "again"),
    "a loop of one's own": (Script(batch=15), THREE, "loop"),
    "variables of no model": (Script(), THREE, "bare"),
    "two optimizers": (Script(), THREE, "gan"),
    "inputs and outputs by name": (Script("branched", GENTLE), THREE, "branched"),
    "by the batch": (Script(), THREE, "onbatch"),
    "by the batch, not built yet": (Script("own"), THREE, "onbatch"),
    "frozen and thawed": (Script(), THREE, "frozen"),
    "weights written": (Script(), THREE, "changed"),
    "offload": (Script(), THREE | {"offload": "host"}, "script"),
    "a memory limit": (Script(), {"memory_limit_per_node": "10GiB"}, "script"),
    "mixed_float16": (Script(), THREE, "mixed"),
    "mixed_bfloat16": (Script(), THREE, "bf16"),
} | {
    name: (Script(optimizer=name), THREE if number % 2 else TWO, "script")
    for number, name in enumerate(OPTIMIZERS)
    if name not in ("adam", GENTLE)
}
if TENSORFLOW:
    for told in (
        "offload",
        "a DataLoader",
        "variables of no model",
    ):  # refused; not seeded; written for torch
        del SCRIPTS[told]
    SCRIPTS["a pipeline of tf.data"] = Script(data="pipeline"), TWO, "script"
    SCRIPTS["several steps in one call"] = Script(compile={"steps_per_execution": 3}), TWO, "script"
NEAR = {"mixed_float16": 2e-3, "mixed_bfloat16": 5e-2}


@pytest.mark.wide(5)
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_give_the_numbers_of_one_process(pool: Ranks, tmp_path: Path, name: str) -> None:
    script, config, do = SCRIPTS[name]
    folders = [str(tmp_path / which) for which in ("plain", "one", "two")]
    for folder in folders:
        Path(folder).mkdir()
    plain = ran(replace(script, folder=folders[0]), None, do)
    assert_near(ran(replace(script, folder=folders[1]), config, do), plain, NEAR.get(name, 1e-6))
    both = pool.run(ran, replace(script, folder=folders[2]), config | {"num_gpus_per_node": 2}, do)
    assert_near(both[0], plain, NEAR.get(name, 1e-6))
    assert_same(both[1], both[0])
    assert listed(folders[2]) == listed(folders[0])  # each file once


def listed(folder: str) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))


@pytest.mark.wide(2)
@pytest.mark.parametrize("name", SHARING)
def test_models_that_share_weights_and_optimizers_that_come_back(pool: Ranks, name: str) -> None:
    told, weights = found(name)
    one, both = [found(name, THREE)], pool.run(found, name, THREE | {"num_gpus_per_node": 2})
    for ours, values in (*one, *both):
        assert ours == pytest.approx(told, rel=1e-6, abs=1e-6)
        for got, want in zip(values, weights, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


@on_torch
def test_models_that_train_by_turns_are_told_what_it_costs(caplog: pytest.LogCaptureFixture) -> None:
    found("trained by turns", THREE)
    words = "share weights and train by turns: each is divided anew when its turn comes, which costs time."
    assert caplog.text.count(words) == 1


@on_torch
@pytest.mark.parametrize("optimizer", ["nadam", "adafactor"])
def test_a_run_goes_back_to_its_checkpoint(pool: Ranks, tmp_path: Path, optimizer: str) -> None:
    script = Script(optimizer=optimizer, folder=str(tmp_path))
    plain = ran(script, None, "rewound")
    assert_near(pool.run(ran, script, THREE | {"num_gpus_per_node": 2}, "rewound")[0], plain)


@on_torch
def test_gradients_in_fewer_bytes(pool: Ranks) -> None:
    plain = ran(Script())
    config = {"stage": 2, "compress": zs.Int8(), "num_gpus_per_node": 2}
    outcome = pool.run(ran, Script(), config)[0]
    assert_near(replace(outcome, slots=plain.slots), plain, 5e-2)
    assert sum(outcome.stats.sent.values()) < 0.7 * sum(outcome.stats.uncompressed.values())


@on_torch
def test_stats_stand_in_the_logs(pool: Ranks, tmp_path: Path) -> None:
    """Rank 0's on all ranks, and in files of callbacks that stand before it in the list."""
    script = Script(callbacks="stats", folder=str(tmp_path), epochs=3)
    both = pool.run(ran, script, THREE | {"num_gpus_per_node": 2})
    history = both[0].history
    assert history == both[1].history
    assert history["zeroshard/steps"] == [4, 4, 4]
    assert len({*history["zeroshard/sent/reduce"], *history["zeroshard/live/state"], 0}) == 3
    lines = list(csv.DictReader((tmp_path / "log.csv").read_text(encoding="utf-8").splitlines()))
    assert [float(line["zeroshard/live/state"]) for line in lines] == history["zeroshard/live/state"]


@on_torch
def test_what_ranks_hold(pool: Ranks) -> None:
    """State, gradients and parameters are divided as the stage says; a limit is planned and kept."""
    held = {}
    for stage in range(4):
        outcome = pool.run(ran, Script(), {"stage": stage, "num_gpus_per_node": 2}, "whole")[0]
        held[stage] = outcome.stats.live
    whole = 84_224 * 4
    assert [held[stage]["state"] // (whole // 2) for stage in range(4)] == [4, 2, 2, 2]
    assert [round(held[stage]["gradients"] / whole, 2) for stage in range(4)] == [1, 1, 0.5, 0.5]
    assert [round(held[stage]["parameters"] / whole, 2) for stage in range(4)] == [1, 1, 1, 0.5]
    outcome = pool.run(ran, Script(), THREE | {"offload": "host", "num_gpus_per_node": 2}, "whole")[0]
    assert outcome.stats.live["state"] == 0
    assert outcome.stats.live["host"] >= whole
    limited = {"memory_limit_per_node": "2900KiB", "num_gpus_per_node": 2}
    stats = pool.run(ran, Script(), limited, "whole")[0].stats
    assert sum(stats.peak.values()) <= 2900 * 1024 // 2
    assert has_words("PlanError: no plan fits 8.0 KiB per rank", refused("too small"))


def test_a_job_that_ended_goes_on(pool: Ranks, tmp_path: Path) -> None:
    plain = ran(Script(), None, "resumed")
    both = pool.run(ran, Script(folder=str(tmp_path)), THREE | {"num_gpus_per_node": 2}, "resumed")
    for outcome in both:
        for one, other in zip(outcome.weights, plain.weights, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
        assert len(outcome.history["loss"]) == 2  # epochs after the first
    assert not (tmp_path / "backup").exists()


def test_nobody_waits_for_a_rank_that_has_failed(pool: Ranks) -> None:
    first, second = pool.attempt(failing, 2)
    assert second.message == "the disk of the second rank is full"
    words = "rank 0 waited for the others, and one of them has failed or left the loop: its own message says"
    assert first.kind == "RankError"
    assert words in first.message


@on_torch
@pytest.mark.usefixtures("long")
def test_nobody_waits_for_a_rank_whose_data_has_ended(pool: Ranks) -> None:
    first, second = pool.attempt(ended_early, 2)
    assert {first.kind, second.kind} == {"RankError"}
    assert "ranks wait for different things" in first.message


WORDS = {
    "misspelt": "Config has no field 'num_node'; it has num_nodes, num_gpus_per_node",
    "nodes": "Config.num_nodes=0 must be a whole number, 1 or more.",
    "limit": "Config.memory_limit_per_node='much' is not a size: pass bytes, or a text such as "
    '"10GiB" or "512MiB".',
    "stage": "Config.stage=4 is not one of 0, 1, 2, 3.",
    "offload": 'Config.offload=\'tape\' must be "host", "disk" or a zs.Offload(...).',
    "sync": "Config.sync='often' must be a zs.EveryStep(), zs.Delayed(), zs.Local(...) or zs.Adaptive(...).",
    "transport": "Config.transport='mpi' is not one of auto, shm",
    "no config": "initialize() takes a tz.Config, not {'stage': 2}: tz.initialize(tz.Config(stage=2)).",
    "twice": "initialize() was called before in this process: call tz.finish() first.",
    "compiled": ".compile(jit_compile=True) compiles a whole step into one graph, which ranks cannot meet "
    "in: drop jit_compile.",
    "replaced": "the value of …/kernel was replaced, and it is sharded: use variable.assign(value).",
    "foreign": "….apply() got …, and it was built for other variables: make an optimizer for each set of "
    "them.",
    "too few": "….apply() got 1 gradients for 6 variables.",
    "several": "multi_optimizer is a MultiOptimizer, and a sharded model has one optimizer: compile it with "
    "one of those inside.",
    "other state": ": a value of shape (3, 3) for …, which has (): it is that of another optimizer or model.",
}


def has_words(words: str, said: str) -> bool:
    """Whether a message has these words; `…` stands for what may vary."""
    return re.search(".*".join(map(re.escape, words.split("…"))), said) is not None


@on_torch
@pytest.mark.parametrize("case", WORDS)
def test_misuse_is_refused_when_it_is_made(case: str) -> None:
    said = refused(case)
    assert has_words(WORDS[case], said), said


@on_torch
def test_what_one_rank_finds_is_an_error_on_all(pool: Ranks) -> None:
    for said in pool.run(refused, "world"):
        words = "asks for 4 ranks, and 2 were started: type `torchrun --nnodes 2 --nproc-per-node 2 …"
        assert has_words(words, said), said
        assert "`, or set num_nodes and num_gpus_per_node to what there is." in said
    for said in pool.run(refused, "apart"):
        assert has_words(
            "sequential: rank … draws other data than rank …. Every rank draws the whole batches, and takes "
            "its rows of each: shuffle and augment with keras.utils.set_random_seed() or a seed of your own, "
            "and leave out what shards by rank.",
            said,
        )
    first, second = pool.run(refused, "unnamed file")
    assert first.startswith("ValueError: ")
    assert "save() failed on rank 0, which writes for all: ValueError" in second


@on_torch
@pytest.mark.slow
def test_the_page_and_its_ranks(tmp_path: Path) -> None:
    """What docs/keras.md shows, started by plain Python: it starts its own ranks."""
    page = (Path(__file__).parents[2] / "docs" / "keras.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    (tmp_path / "script.py").write_text(
        "\n".join([*blocks, "print('steps', tz.run_of(model).stats().steps)"])
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "script.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Epoch 3/3") == 1, done.stdout  # the first rank alone shows its progress
    assert "\nsteps 30\n" in done.stdout  # of the loop's own optimizer
    assert "[rank 1] steps 30" in done.stdout


def test_what_cannot_be_started_here_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tz.Config(num_nodes=4, num_gpus_per_node=2)
    with pytest.raises(zs.OptionError, match="asks for 8 ranks, and this is one process of one node: type "):
        tz.initialize(config)
    monkeypatch.setattr("zeroshard.integrations.keras.world._script", lambda: None)
    with pytest.raises(zs.OptionError) as refusal:
        tz.initialize(config)
    assert (
        "asks for 8 ranks, and this is one process of a notebook or a prompt: type `torchrun --nnodes 4 "
        "--nproc-per-node 2 " in str(refusal.value)
    )
    assert "To try all of them on this machine: `zeroshard run --ranks 8 script.py`." in str(refusal.value)


@on_torch
@pytest.mark.usefixtures("long")
def test_four_nodes_of_two_ranks() -> None:
    """The script of the examples, with its plan, comes to what one process comes to."""
    script = str(Path(__file__).parents[2] / "examples" / "keras_digits.py")
    ends = []
    for command in (
        ["-m", "zeroshard", "run", "--ranks", "8", "--threads", "1", script, "--epochs", "3"],
        [script, "--nodes", "1", "--each", "1", "--epochs", "3"],
    ):
        command = [sys.executable, "-W", "ignore", *command]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, done.stderr
        ends.append([line for line in done.stdout.splitlines() if line.startswith("loss")])
    assert len(ends[0]) == 1
    assert ends[0] == ends[1]


def test_without_keras_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "keras", None)
    words = "zeroshard.integrations.keras needs the package 'keras': pip install 'zeroshard[keras]'"
    with pytest.raises(ModuleNotFoundError, match=re.escape(words)):
        runpy.run_path(str(tz.__file__))


def test_another_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keras.backend.backend", lambda: "jax")
    words = (
        "Keras runs on jax, and models are sharded on PyTorch and TensorFlow: set the environment variable "
        'KERAS_BACKEND to "torch". With JAX, keras.distribution shards models.'
    )
    with pytest.raises(zs.OptionError, match=re.escape(words)):
        tz.initialize()


@pytest.mark.parametrize("field", ["stage", "offload", "compress"])
def test_what_tensorflow_has_not_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    monkeypatch.setattr("keras.backend.backend", lambda: "tensorflow")
    if not TENSORFLOW:
        monkeypatch.setitem(sys.modules, "zeroshard.integrations.keras.graphs", ModuleType("graphs"))
    value = {"stage": 3, "offload": "host", "compress": zs.Int8()}[field]
    words = "is for Keras's PyTorch backend, and this is TensorFlow, whose models have stages 0, 1 and 2: "
    words += "set the environment variable KERAS_BACKEND=torch, or drop it."
    with pytest.raises(zs.OptionError, match=f"Config.{field}=.*{re.escape(words)}"):
        tz.initialize(tz.Config(**{field: value}))


@on_tensorflow
def test_limits_of_tensorflow() -> None:
    said = refused("tensorflow limit")
    words = "memory_limit_per_node=8192 leaves 8.0 KiB for a rank, and it needs … KiB (parameters …"
    assert has_words(words, said)
    assert "): raise it, take smaller batches or more ranks, or set KERAS_BACKEND=torch, where" in said
    assert "parameters are divided and offloaded, too." in said
    words = "StateError: …is made while a step is traced, so that ranks cannot compare it: build the model "
    assert has_words(words + "first, by a keras.Input or model.build(shape).", refused("traced"))
