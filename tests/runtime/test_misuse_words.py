"""What is said to somebody who has typed something wrong, or whose machine lacks something, before any rank
has started: options, plans, the command line, the launcher. Texts are compared as they are shown."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from misused import Net
from torch import nn
from torch.optim import AdamW

import zeroshard as zs
from zeroshard import cli
from zeroshard.comm import connect
from zeroshard.comm.connect import _choose
from zeroshard.comm.simulated import SimulatedTransport
from zeroshard.comm.topology import by_host
from zeroshard.kernels import AdamRows, AdamStep, SgdRows, SgdStep, ThreadTeam, Workers, update_rows
from zeroshard.launch import join as environment
from zeroshard.launch import launcher
from zeroshard.launch.job import LaunchJob
from zeroshard.machine import machine
from zeroshard.runtime import measure
from zeroshard.runtime.plan_guard import PlanGuard
from zeroshard.tiers import pinned
from zeroshard.tiers.ledger import MemoryLedger
from zeroshard.tiers.staging import StagingArena

CPU = torch.device("cpu")


def plan(**asked: Any) -> zs.Plan:
    return zs.plan(nn.Linear(8, 8), **{"ranks": 2, "limit": "1GiB"} | asked)


def spread_by_nothing() -> None:
    with closing(Workers(1)) as workers:
        workers.spread(8, 0, lambda start, stop: None)


OPTIONS: dict[str, tuple[Callable[[], object], str]] = {
    "policy": (lambda: zs.Options(sync="often"), "sync='often' is no policy; pass zs.EveryStep(), "),
    "outer": (lambda: zs.Local(outer=0.9), "Local.outer=0.9 must be a zs.Nesterov(...)."),
    "rates": (lambda: zs.Local(rates=2.0), "Local.rates=2.0 must be a factor a rank, as (1.0, 0.5)."),
    "a rate": (lambda: zs.Local(rates=("1",)), "Local.rates='1' must be a number."),
    "no rate": (lambda: zs.Local(rates=(0.0,)), "Local.rates=0.0 must be above 0."),
    "fragments": (
        lambda: zs.Local(steps=2, fragments=3),
        "Local(steps=2, fragments=3): at most one fragment a step, so fragments=2 or fewer.",
    ),
    "window": (
        lambda: zs.Adaptive([zs.EveryStep(), zs.Delayed()], window=2),
        "Adaptive.window=2 must be 3 steps or more.",
    ),
    "momentum": (
        lambda: zs.Nesterov(momentum=1.0),
        "Nesterov.momentum=1.0 must be at least 0 and below 1.",
    ),
    "delayed and coded": (
        lambda: zs.Options(stage=0, sync=zs.Delayed(), compress=zs.Int8()),
        "compress= with sync=Delayed() needs stage 1, 2 or 3: at stage 0 sums would be encoded again",
    ),
    "cache": (
        lambda: zs.Options(stage=2, node_cache=True),
        "node_cache=True keeps parameters that stage 3 would gather again, and this is stage 2, which",
    ),
    "split": (lambda: zs.Options(split="columns"), "split='columns' is not one of auto, rows, "),
    "budget": (
        lambda: zs.Offload("host", host_bytes="1GiB"),
        'Offload.host_bytes is a limit for "auto", and nothing here is "auto".',
    ),
    "no budget": (
        lambda: zs.Offload("auto"),
        'Offload: "auto" needs device_bytes=, what parameters and optimizer state may take of the device',
    ),
    "no folder": (
        lambda: zs.Offload("disk"),
        'Offload(optimizer="disk") needs path=, a folder on a disk with room for the state.',
    ),
    "weights apart from their state": (
        lambda: zs.Offload("host", parameters="disk"),
        'Offload(parameters="disk", optimizer="host"): weights rest on the disk beside their state, so',
    ),
    "network": (
        lambda: machine("A100", network="ethernet-101"),
        "network='ethernet-101' is not in the table. Did you mean \"ethernet-10\"? Known: ",
    ),
    "figure": (
        lambda: machine("A100", coers=8),
        "a machine has no figure 'coers'. Did you mean \"cores\"? Known: ",
    ),
    "transport": (lambda: connect(CPU, "pigeon"), "unknown transport 'pigeon': one of auto, "),  # type: ignore[arg-type]
    "step of Adam": (
        lambda: AdamStep(1e-3, 1, beta2=1.0),
        "AdamStep: beta1=0.9 and beta2=1.0 must be below 1",
    ),
    "rate of Adam": (
        lambda: AdamStep(float("nan"), 1),
        "AdamStep: lr=nan must be a finite number of at least 0",
    ),
    "momentum of SGD": (
        lambda: update_rows(SgdRows(torch.zeros(4)), torch.zeros(4), None, SgdStep(0.1, momentum=0.9)),
        "update_rows: momentum=0.9, but the rows hold no buffer for it",
    ),
    "a short code": (
        lambda: zs.Int8().encode(torch.zeros(8), torch.zeros(33, dtype=torch.uint8), {}, 0),
        "Int8: `code` holds 33 bytes; 8 values take 32.",
    ),
    "rows of Adam": (
        lambda: AdamRows.zeros(512).rows(0, 513),
        "AdamRows: rows 0:513 do not lie within the 512 there are",
    ),
    "blocks of Adam": (
        lambda: AdamRows.zeros(512, moments="int8").rows(0, 100),
        "AdamRows: rows 0:100 cut a block of 256 of the 8-bit moments",
    ),
    "no threads": (lambda: Workers(0), "Workers: threads=0; at least one is needed"),
    "no team": (lambda: ThreadTeam.open(0), "Team: threads=0; at least one is needed"),
    "grain": (
        spread_by_nothing,
        "Workers: grain=0; at least one element is needed",
    ),
}


@pytest.mark.parametrize("what", OPTIONS)
def test_options(what: str) -> None:
    make, said = OPTIONS[what]
    with pytest.raises(zs.OptionError) as caught:
        make()
    assert str(caught.value).startswith(said)


def test_a_warm_up_that_keeps_more() -> None:
    with pytest.raises(
        zs.OptionError, match=r"keeps residual, momentum from step to step, and OneBit keeps residual: take a"
    ):
        zs.OneBit(warmup=zs.TopK(0.01, momentum=0.9), warmup_steps=3)


def test_a_network_without_a_name() -> None:
    with pytest.raises(zs.OptionError, match=r"infiniband-ndr; or give bytes a second\."):
        machine("A100", network="string")


def test_a_pool_of_workers_that_is_closed() -> None:
    pool = Workers(1)
    pool.close()
    with pytest.raises(zs.StateError, match="Workers: submit after close; make a new pool"):
        pool.submit(lambda: None)


def test_staging_memory_that_never_comes_free() -> None:
    arena = StagingArena(4096, CPU)
    arena.take(4096)
    arena.fail(MemoryError("elsewhere"))
    with pytest.raises(zs.TierError, match="the host update failed, so its staging memory never came free"):
        arena.take(64)


# ---------------------------------------------------------------------- plans


def test_a_plan_for_nobody_knows_how_many() -> None:
    with pytest.raises(zs.OptionError, match="say how many processes: ranks=, or nodes= and ranks_per_node="):
        plan(ranks=None)


def test_a_batch_that_is_no_shape() -> None:
    with pytest.raises(zs.OptionError, match=r"batch='8 by 9' is not a shape of token ids\. Write it as"):
        plan(batch="8 by 9")


def test_an_option_that_plans_do_not_have() -> None:
    with pytest.raises(zs.OptionError, match=r"plan\(\) has no option 'stgae'\. Did you mean \"stage\"\?"):
        plan(stgae=3)


def changed(path: Path, **settings: Any) -> zs.Plan:
    """A plan as a file, whose chosen settings somebody, or another version, has written."""
    data = json.loads(plan().to_json())
    data["chosen"]["settings"] |= settings
    path.write_text(json.dumps(data))
    return zs.Plan.read(path)


def test_plans_in_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(
        zs.PlanError, match=r"the plan .*plan\.json cannot be read: No such file or directory"
    ):
        zs.Plan.read(path)
    path.write_text('{"format": 1')
    said = r"this is not a plan: JSONDecodeError: .*\. `zeroshard plan … --json` writes one"
    with pytest.raises(zs.PlanError, match=said):
        zs.Plan.read(path)
    path.write_text(plan().to_json().replace('"format": ', '"format": 9'))
    with pytest.raises(
        zs.PlanError, match=r"this plan has format 9\d+, and this ZeroShard reads \d+: plan again"
    ):
        zs.Plan.read(path)


def test_plans_of_another_version(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(
        zs.PlanError, match="this plan has an option 'warp', which this ZeroShard does not know: plan again"
    ):
        changed(path, warp=9).options()
    with pytest.raises(
        zs.PlanError, match="this plan has an option of type 'Int3', which this ZeroShard does not know: "
    ):
        changed(path, compress={"type": "Int3"}).options()


def test_a_plan_of_another_model() -> None:
    with pytest.raises(
        zs.PlanError, match=r"this plan is of another run: `weight` is .*Plan again: zs\.plan\(\.\.\.\), or"
    ):
        zs.shard(nn.Linear(4, 4), plan=plan(ranks=1))


# ---------------------------------------------------------------------- what a machine lacks


def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_measuring_a_gpu_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no_gpu(monkeypatch)
    assert cli.main(["machine", "--device", "cuda:0", "--again"]) == 1
    assert "OptionError: cuda:0 cannot be measured: torch sees no GPU." in capsys.readouterr().err


def test_a_limit_that_the_gpu_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    guard = PlanGuard(plan(ranks=1, limit="4TiB"), SimulatedTransport(0, 1, torch.device("cuda", 0)), {})
    with pytest.raises(zs.PlanError, match=r"limit=4\.0 TiB, and cuda:0 has 80\.0 GiB: plan for less"):
        guard.hold(nn.Linear(8, 8), MemoryLedger())


def test_a_model_that_is_larger_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(total_memory=80 * 2**30, nbytes=2 * 2**30, device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    guard = PlanGuard(plan(ranks=1), SimulatedTransport(0, 1, gpu.device), {})
    said = r"the model itself takes 2\.0 GiB of cuda:0, and the limit is 1\.0 GiB\. Build it on the meta"
    with pytest.raises(zs.PlanError, match=said):
        guard.hold(SimpleNamespace(parameters=lambda: [gpu]), MemoryLedger())  # type: ignore[arg-type]


def test_memory_that_cannot_be_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2))
    with pytest.raises(zs.TierError, match=r"CUDA could not lock 4096 bytes of host memory \(error 2\):"):
        pinned(64, torch.device("cuda", 0))


def test_measuring_what_is_no_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["machine", "--device", "abacus"]) == 1
    assert "OptionError: --device 'abacus' is no device: cpu or cuda:0." in capsys.readouterr().err


@pytest.mark.parametrize("device", ["xpu", "mps", "meta"])
def test_measuring_a_device_of_another_kind(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not taken for the CPU, and nothing is kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cli.main(["machine", "--device", device]) == 1
    said = f"OptionError: {device} cannot be measured: ZeroShard runs on cpu and cuda. Name one of these."
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_measuring_the_disk_of_no_folder(tmp_path: Path) -> None:
    said = r"the disk of .*/nowhere cannot be measured: No such file or directory\."
    with pytest.raises(zs.OptionError, match=said):
        measure.disk_rate(str(tmp_path / "nowhere"))


def test_a_platform_that_has_no_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher.sys, "platform", "darwin")
    with pytest.raises(
        zs.OptionError,
        match=r"`zeroshard run` needs Linux, and this is darwin\. Use torchrun, or one process",
    ):
        launcher.check(LaunchJob(2, "train.py"))


# ---------------------------------------------------------------------- joining a group


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> Any:
    """This process is announced as rank 1 of 2. Nobody listens where rank 0 should be: the port is held."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        announced = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        for name, value in (announced | {"MASTER_PORT": str(held.getsockname()[1])}).items():
            monkeypatch.setenv(name, value)
        yield held.getsockname()[1]


def test_nobody_serves_the_store(second_of_two: int) -> None:
    with pytest.raises(zs.RankError) as caught:
        environment.join(patience=timedelta(seconds=0.5))
    said = str(caught.value)
    assert f"rank 1 of 2 (RANK and WORLD_SIZE) found no store at 127.0.0.1:{second_of_two}: " in said
    assert said.endswith("Did rank 0 start, and can this host reach it?")


def test_the_port_of_the_store_is_taken(second_of_two: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(zs.RankError) as caught:
        environment.join(patience=timedelta(seconds=0.5))
    said = str(caught.value)
    assert f"rank 0 of 2 (RANK and WORLD_SIZE) cannot serve the store at 127.0.0.1:{second_of_two}: " in said
    assert said.endswith("Is the port taken?")


def test_a_torch_without_distributed(second_of_two: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_available", lambda: False)
    with pytest.raises(zs.OptionError, match=r"announces 2 ranks, but this torch has no torch\.distributed"):
        zs.shard(nn.Linear(2, 2))


def test_a_rank_that_asks_for_a_gpu_and_has_none(second_of_two: int, monkeypatch: pytest.MonkeyPatch) -> None:
    no_gpu(monkeypatch)
    with pytest.raises(zs.OptionError, match="device='cuda' was asked for, but torch sees no GPU on "):
        environment.join("cuda")


def test_shared_memory_between_hosts() -> None:
    places = [{"asked": "shm", "nccl": False, "gpu": "cpu", "host": [host]} for host in ("a", "b")]
    with pytest.raises(zs.OptionError, match=r"transport 'shm' needs all ranks on one host and in .* a, b"):
        _choose(places, "shm", by_host(["a", "b"]))


# ---------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "two"], "--ranks takes a number, or MIN:MAX as in 1:4, not 'two'"),
        (["--ranks", "1:x"], "--ranks takes a number, or MIN:MAX as in 1:4, not '1:x'"),
        (["--ranks", "4:2"], "--ranks MIN:MAX must be 1 or more, smaller first: 4:2"),
        (["--ranks", "2", "--threads", "0"], "--threads must be at least 1, not 0"),
        (["--ranks", "2", "--timeout", "0"], "--timeout must be a positive number of seconds, not 0"),
        (["--ranks", "2", "--grace", "-1"], "--grace must be a positive number of seconds, not -1"),
        (["--ranks", "2", "--max-restarts", "-1"], "--max-restarts must be 0 or more, not -1"),
    ],
)
def test_starting_ranks(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", *words, "train.py"]) == 1
    assert f"OptionError: {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "spec", "said"),
    [
        ("config.json", "[1]", "config.json", "is not a config of a model: it holds a list."),
        ("config.json", "{", "config.json", "config.json is not JSON: Expecting"),
        (
            "m.py",
            "def build(): raise ValueError('no')",
            "m.py:build",
            "m.py:build() raised ValueError on the meta device: no",
        ),
        ("m.py", "", "nowhere_at_all:build", "SPEC 'nowhere_at_all:build' cannot be loaded: No module named"),
        ("m.py", "1 / 0", "m.py:build", "SPEC 'm.py:build' cannot be loaded: m.py raised ZeroDivisionError"),
    ],
)
def test_models_to_plan_for(
    name: str,
    text: str,
    spec: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    assert cli.main(["plan", spec, "--ranks", "1", "--device", "1GiB"]) == 1
    assert said in capsys.readouterr().err


def test_a_model_to_compare_with() -> None:
    from zeroshard.cli._spec import Spec

    said = "SPEC 'nowhere_at_all:build' cannot be loaded: No module named 'nowhere_at_all'."
    with pytest.raises(zs.OptionError, match=re.escape(said)):
        Spec("nowhere_at_all:build")


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_inputs_on_another_device(device: str) -> None:
    """`cuda`: the model is there, and its inputs are where a loader leaves them."""
    model = Net().to("cpu" if device == "meta" else device)
    run = zs.shard(model, AdamW(model.parameters()))
    here = str(next(model.parameters()).device)
    there = "meta" if device == "meta" else "cpu"
    with pytest.raises(RuntimeError, match="device") as told:
        model(torch.ones(2, 3, device=there))
    said = (
        f'an input of the forward is on {there}, and Net computes on {here}: type x = x.to("{here}") before'
    )
    assert [note[: len(said)] for note in told.value.__notes__] == [said]
    model(torch.ones(2, 3, device=here)).sum().backward()
    with pytest.raises(RuntimeError, match="mat1 and mat2") as other:
        model(torch.ones(2, 4, device=here))
    assert not hasattr(other.value, "__notes__")
    run.close()


@pytest.mark.parametrize("config", [{"zero_optimization": {"stage": 2}}, "ds_config.json"])
def test_a_config_as_deepspeed_takes_it(config: object) -> None:
    with pytest.raises(
        zs.OptionError, match=r"no config=, as DeepSpeed does: pass options by name\. Stage 2 in"
    ):
        zs.shard(Net(), config=config)  # type: ignore[call-arg]


def test_a_disk_path_that_is_nowhere() -> None:
    model = Net()
    with pytest.raises(
        zs.OptionError, match=r'disk_path="/nowhere/x" is no folder on this host: create it \('
    ):
        zs.shard(model, AdamW(model.parameters()), limit="1GiB", disk_path="/nowhere/x")
