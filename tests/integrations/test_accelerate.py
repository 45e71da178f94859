"""Accelerate's loops, sharded, against Accelerate's own (DDP) with the same seeds and data."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate_case import Loop, Outcome, network, refused, trained, two_models
from outcomes import assert_near

import zeroshard as zs
from zeroshard.integrations import accelerate as zsa
from zeroshard.testing import Ranks, assert_losses, assert_same_bits

pytestmark = pytest.mark.ranks
CLIPPED = {"clip": 0.25, "accelerator": {"gradient_accumulation_steps": 2}}
HOST = zs.Offload("host")


def assert_same(got: list[Outcome], want: list[Outcome]) -> None:
    """Bit for bit, and whole on rank 0 alone."""
    assert [outcome.losses for outcome in got] == [outcome.losses for outcome in want]
    assert_same_bits(got[0].weights, want[0].weights)
    assert not any(outcome.weights for outcome in got[1:])


@pytest.mark.parametrize("size", [1, 2])
def test_losses_and_weights_equal_those_of_ddp(pool: Ranks, alone: Ranks, size: int) -> None:
    """The last batch is a smaller one."""
    ranks = pool if size == 2 else alone
    plain = ranks.run(trained, Loop(None, rest=3))
    for options in ({"stage": 0}, {"stage": 2}, {"stage": 3}):
        assert_same(ranks.run(trained, Loop(options, rest=3)), plain)
    # The host's kernels round the last bit otherwise than torch's.
    assert_near(ranks.run(trained, Loop({"stage": 3, "offload": HOST}, rest=3))[0], plain[0])


def test_accumulated_and_clipped(pool: Ranks) -> None:
    plain = pool.run(trained, Loop(None, **CLIPPED))[0]
    assert max(plain.norms) > 0.25
    for options in ({"stage": 0}, {"stage": 3}, {"stage": 2, "clip_norm": 0.25, "offload": HOST}):
        assert_near(pool.run(trained, Loop(options, **CLIPPED))[0], plain)


def test_half_precision(pool: Ranks) -> None:
    """bf16 is as near to fp32 as autocast is; fp16 goes through Accelerate's scaler, on CPUs too."""
    exact = pool.run(trained, Loop(None))[0]
    cast = pool.run(trained, Loop(None, accelerator={"mixed_precision": "bf16"}))[0]
    ours = pool.run(trained, Loop({"stage": 3}, accelerator={"mixed_precision": "bf16"}))[0]
    assert_losses(ours.losses, cast.losses, 4e-3)
    assert ours.losses != exact.losses
    assert all(weight.dtype == torch.float32 for weight in ours.weights.values())
    half = pool.run(trained, Loop({"stage": 2}, clip=1.0, accelerator={"mixed_precision": "fp16"}))[0]
    clipped = pool.run(trained, Loop(None, clip=1.0))[0]
    assert_losses(half.losses, clipped.losses, 4e-3)


def test_goes_on_at_another_stage_and_number_of_ranks(pool: Ranks, alone: Ranks, tmp_path: Path) -> None:
    folder, whole = str(tmp_path / "half"), pool.run(trained, Loop({"stage": 2}))
    first = pool.run(trained, Loop({"stage": 3}, until=5, save=folder))[0]
    assert first.losses == whole[0].losses[:5]
    rest = pool.run(trained, Loop({"stage": 0}, load=folder, begin=5))
    assert [outcome.losses for outcome in rest] == [outcome.losses[5:] for outcome in whole]
    assert_same_bits(rest[0].weights, whole[0].weights)
    loaded = alone.run(trained, Loop({"stage": 2}, load=folder, batches=0))[0]
    assert_same_bits(loaded.weights, first.weights)
    assert {outcome.begun_at for outcome in (*rest, loaded)} == {5}


def test_goes_on_from_what_plain_accelerate_saved(pool: Ranks, tmp_path: Path) -> None:
    folder, whole = str(tmp_path / "plain"), pool.run(trained, Loop(None))
    pool.run(trained, Loop(None, until=5, save=folder))
    rest = pool.run(trained, Loop({"stage": 3}, load=folder, begin=5))[0]
    assert rest.losses == whole[0].losses[5:]
    assert_same_bits(rest.weights, whole[0].weights)


def test_several_models(pool: Ranks) -> None:
    plain = pool.run(two_models, None)[0]
    for options in ({"stage": 2}, {"stage": 3}):
        for got, want in zip(pool.run(two_models, options)[0], plain, strict=True):
            assert_same_bits(got, want)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("unpaired", "StateError: Sequential was prepared without its optimizer, so nothing is sharded"),
        ("later", "nothing"),
        ("shared", "ModelError: one SGD has parameters of Sequential and Sequential, and a run has one"),
        ("second", "ModelError: Sequential is sharded already, with other optimizers than this SGD"),
        ("clipped", "OptionError: clip_grad_norm_(…, 2.0, norm_type=2) does not agree with clip_norm=1.0"),
        ("clipped by value", "OptionError: clip_grad_value_() has no gradients to clip"),
        ("joined", "OptionError: join_uneven_inputs(even_batches=False) needs DDP's own join"),
        ("launched", "OptionError: this Accelerator is told to use FSDP (fsdp_plugin=, or the file of"),
        ("unknown", "OptionError: neither zs.shard() nor what it is called by here has an option 'stages'"),
        ("value", "OptionError: stage=4 is not one of 0, 1, 2, 3"),
        ("contradiction", "precision='fp16' contradict each other: drop one of them."),
        ("no scaler", "OptionError: precision='fp16' needs a GradScaler, which Accelerate makes"),
    ],
)
def test_what_is_refused(alone: Ranks, case: str, words: str) -> None:
    assert words in alone.run(refused, case)[0]


def enabled() -> list[str]:
    """The classes of accelerators that a script makes after `enable`, and after `disable`."""

    class Own(Accelerator):
        pass

    zsa.enable(stage=2)
    try:
        made = [Accelerator(cpu=True), Own(cpu=True)]
        model = network()
        made[0].prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert zsa.run_of(model).options.stage == 2
        with pytest.raises(zs.OptionError, match="has an option 'stages'"):
            zsa.enable(stages=1)
    finally:
        zsa.disable()
    plain = Accelerator(cpu=True)
    assert isinstance(made[1], zsa.ZeroShardAccelerator)
    assert isinstance(made[1], Own)
    plain.state._mixed_precision = "fp8"
    with pytest.raises(zs.OptionError, match='mixed_precision="fp8" does not go with ZeroShard'):
        zsa.adopt(plain, {})
    return [type(one).__name__ for one in (*made, plain)]


def test_a_plain_accelerator_after_enable(alone: Ranks) -> None:
    assert alone.run(enabled)[0][:2] == ["ZeroShardAccelerator", "Own"]


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, "zeroshard.integrations.accelerate")
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'zeroshard\[accelerate\]'"):
        __import__("zeroshard.integrations.accelerate")


ALONE = """
import sys
import torch
from zeroshard.integrations.accelerate import ZeroShardAccelerator

accelerator = ZeroShardAccelerator(stage=int(sys.argv[2]), cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
for step in range(6):
    if accelerator.process_index == 1 and step == 2:
        if sys.argv[1] == "stops":
            break
        raise ValueError("a mistake of the user's")
    accelerator.backward(model(torch.randn(3, 4)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.wide(4)
@pytest.mark.parametrize("stage", ["3", "2"])
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("stops", r"had ended or closed its run|ranks wait for different things and none can go on"),
        ("fails", r"rank 1 (exited with code 1:|raised) ValueError: a mistake of the user's"),
    ],
)
def test_what_one_rank_does_ends_all(tmp_path: Path, case: str, words: str, stage: str) -> None:
    (tmp_path / "script.py").write_text(ALONE, encoding="utf-8")
    launch = [sys.executable, "-m", "zeroshard", "run", "--ranks", "2", "script.py", case, stage]
    ran = subprocess.run(launch, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ran.returncode != 0
    assert re.search(words, ran.stderr), ran.stderr


CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
mixed_precision: bf16
num_machines: 1
num_processes: 2
use_cpu: true
"""


@pytest.mark.slow
def test_the_guide_under_accelerate_launch(tmp_path: Path) -> None:
    """With Accelerate's file for several CPUs. There it starts one rank; others are started beside it."""
    guide = (Path(__file__).parents[2] / "docs" / "accelerate.md").read_text(encoding="utf-8")
    shown = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)[0]
    (tmp_path / "script.py").write_text(shown, encoding="utf-8")
    (tmp_path / "config.yaml").write_text(CONFIG, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": "2"}
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    started = [
        subprocess.Popen(
            [*launch, "config.yaml", "script.py"],
            cwd=tmp_path,
            env=os.environ | place | {"RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]
    told = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], told
    assert "bf16 2 steps" in told[0]
    assert len(list((tmp_path / "state" / "zeroshard").glob("rank-*"))) == 2
