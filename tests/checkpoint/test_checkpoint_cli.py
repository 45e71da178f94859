"""`zeroshard inspect`, `verify`, `export` and `import`."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

import pytest
import torch
from checkpoint_ranks import model, save_as
from safetensors.torch import load_file

import zeroshard as zs
from zeroshard import cli
from zeroshard.checkpoint import HeldRows, NoPeers, RunSnapshot, locks, read_manifest, save
from zeroshard.errors import CheckpointError

FACTORY = """
import torch
from torch import nn

def build():
    layer = nn.Linear(4, 3)
    assert layer.weight.is_meta
    norm = nn.BatchNorm1d(3)
    norm.register_buffer("cache", torch.zeros(9), persistent=False)
    tied = nn.Linear(4, 3, bias=False)
    tied.weight = layer.weight
    return nn.Sequential(layer, norm, tied)

def broken():
    raise ValueError("no config")

def number():
    return 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "160")
    return tmp_path


def saved_network(path: Path) -> None:
    network = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    records = [HeldRows.of(name, "parameter", tensor) for name, tensor in network.named_parameters()]
    records += [HeldRows.of(name, "buffer", tensor) for name, tensor in network.named_buffers()]
    save(path, RunSnapshot(records, {"step": 12}), NoPeers())


def test_inspect_lists_tensors(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_as(folder / "1", model(), world=2)
    assert cli.main(["inspect", "1"]) == 0
    text = capsys.readouterr().out
    assert "1, step 3: saved 20" in text
    assert "by 2 ranks (zeroshard " in text
    assert re.search(r"embed\.weight +│ parameter +│ 50×8 +│ float32 +│ +2 │ 1\.6 KiB", text)
    assert re.search(r"scale +│ parameter +│ scalar", text)


def test_inspect_shows_the_largest_of_many(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(
        folder / "1",
        RunSnapshot([HeldRows.of(f"w{i}", "parameter", torch.ones(i)) for i in range(1, 61)]),
        NoPeers(),
    )
    assert cli.main(["inspect", "1"]) == 0
    text = capsys.readouterr().out
    assert "w60 " in text
    assert "w20 " not in text
    assert "… and 20 smaller ones (--all lists them)" in text
    assert cli.main(["inspect", "1", "--all"]) == 0
    assert "w20 " in capsys.readouterr().out


def test_inspect_compares_with_a_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "zoo_good.py").write_text(FACTORY)
    (folder / "zoo_other.py").write_text(FACTORY.replace("nn.Linear(4, 3)", "nn.Linear(4, 3, bias=False)"))
    (folder / "zoo_wide.py").write_text(FACTORY.replace("nn.BatchNorm1d(3)", "nn.BatchNorm1d(5)"))
    saved_network(folder / "1")
    assert cli.main(["inspect", "1", "--against", "zoo_good:build"]) == 0
    assert "every parameter and buffer of zoo_good:build is in it" in capsys.readouterr().out
    assert cli.main(["inspect", "1", "--against", "zoo_other:build"]) == 1
    assert "unexpected: 0.bias (3,)" in capsys.readouterr().out
    assert cli.main(["inspect", "1", "--against", "zoo_wide:build"]) == 1
    assert "differs: 1.weight is (3,) in the checkpoint and (5,) in the model" in capsys.readouterr().out
    for factory, reason in (
        ("zoo_good:missing", "zoo_good has no function 'missing'"),
        ("zoo_good", "must be module:function, script.py:function"),
        ("no_such_module:build", "No module named 'no_such_module'"),
        ("zoo_good:broken", "raised ValueError on the meta device: no config"),
        ("zoo_good:number", "zoo_good:number returned a int, not a module"),
    ):
        assert cli.main(["inspect", "1", "--against", factory]) == 1
        assert reason in capsys.readouterr().err


SCRIPT = """
import torch
from torch import nn

class Net(nn.Sequential):
    def __init__(self, width=3):
        super().__init__(nn.Linear(4, width), nn.BatchNorm1d(width))
"""


def test_inspect_compares_with_a_script(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `plan` names models: a class in a script, with arguments."""
    (folder / "net.py").write_text(SCRIPT)
    network = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5))
    held = [HeldRows.of(name, "parameter", value) for name, value in network.state_dict().items()]
    save(folder / "1", RunSnapshot(held), NoPeers())
    words = ["inspect", "1", "--against", "net.py:Net"]
    assert cli.main(words) == 1
    assert "differs: 0.weight is (5, 4) in the checkpoint and (3, 4)" in capsys.readouterr().out
    assert cli.main([*words, "--set", "width=5"]) == 0
    assert cli.main(["inspect", "1", "--set", "width=5"]) == 1
    assert "--set gives an argument of --against: pass --against SPEC too" in capsys.readouterr().err
    assert cli.main(["inspect", "1", "--against", "net.py:net"]) == 1
    assert "net.py has no function 'net'. Did you mean \"Net\"? It has: Net." in capsys.readouterr().err


def test_names_are_never_broken(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    name = "transformer.encoder.layers.31.self_attention.query_key_value_projection.weight"
    save(folder / "1", RunSnapshot([HeldRows.of(name, "parameter", torch.ones(6, 4))]), NoPeers())
    assert cli.main(["inspect", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [name, "  parameter · 6×4 · float32 · files 1 · 96 B"], lines


def test_inspect_shows_options_and_gives_the_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    network = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(network.parameters())
    offload = zs.Offload(threads=1, stage_bytes=4096)
    run = zs.shard(network, optimizer, stage=1, offload=offload, clip_norm=math.inf)
    run.save("1")
    run.close()
    assert cli.main(["inspect", "1"]) == 0
    text = capsys.readouterr().out.replace("\n", " ")
    assert "options: stage=1, offload=Offload(optimizer=host, parameters=device" in text
    assert "clip_norm=float(value=inf)" in text
    assert "bucket_bytes" not in text
    assert cli.main(["inspect", "1", "--plan"]) == 1
    assert "holds no plan: its run was given options" in capsys.readouterr().err
    run = zs.shard(network, optimizer, limit="64MiB", batch=torch.ones(2, 4))
    plan = run.plan
    run.save("2")
    run.close()
    assert cli.main(["inspect", "2", "--plan"]) == 0
    (folder / "plan.json").write_text(capsys.readouterr().out)
    assert plan is not None
    assert zs.Plan.read(folder / "plan.json") == plan


def test_inspect_of_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_as(folder / "ckpt" / "1", model())
    assert cli.main(["inspect", "ckpt"]) == 1
    assert "It holds checkpoints, for example ckpt/1: name one of them." in capsys.readouterr().err


def test_verify(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("1", "2"):
        save_as(folder / name, model())
    (folder / "2" / "notes").write_text("")
    assert cli.main(["verify", "2"]) == 0
    assert "2 is good: 11 tensors" in (text := capsys.readouterr().out)
    assert "not part of it: 'notes'" in text
    file = folder / "2" / "rank-00000-of-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    assert cli.main(["verify", "2"]) == 1
    text = capsys.readouterr().err
    assert "do not match their checksum" in text
    assert f"2 is damaged. The latest complete checkpoint besides it is {folder}/1." in text


@pytest.mark.parametrize("command", ["inspect", "verify", "export"])
def test_a_mistyped_path_is_no_damage(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_as(folder / "ckpt" / "1", model())
    out = ["out"] if command == "export" else []
    for typed, said in {
        "ckpt/2": "ckpt/2 is not a folder, so not a checkpoint.\n",
        "ckpt": "ckpt/1: name one of them.\n",
    }.items():
        assert cli.main([command, typed, *out]) == 1
        text = capsys.readouterr().err
        assert text.startswith("zeroshard: CheckpointError: ")
        assert text.endswith(said)
        assert text.count("\n") == 1
    assert os.listdir(folder) == ["ckpt"]


def test_export_and_import(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_as(folder / "1", model())
    assert cli.main(["export", "1", "out", "--dtype", "bf16", "--max-shard", "1KiB"]) == 0
    assert "model.safetensors.index.json" in capsys.readouterr().out
    assert cli.main(["import", "out", "0"]) == 0
    assert "0: 7 tensors" in capsys.readouterr().out
    assert cli.main(["export", "0", "again"]) == 0
    weights = load_file(folder / "again" / "model.safetensors")
    assert torch.equal(weights["embed.weight"], model()["parameter", "embed.weight"].bfloat16())
    assert cli.main(["import", "again", "5", "--prefix", "blocks"]) == 0
    capsys.readouterr()
    assert cli.main(["export", "1", "x", "--dtype", "int8"]) == 1
    assert "is not a floating dtype" in capsys.readouterr().err
    assert sorted(os.listdir(folder)) == ["0", "1", "5", "again", "out"]


def test_import_overwrites_nothing_unasked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"w": torch.ones(3, 2)}, folder / "w.pt")
    save_as(folder / "step-3", model())
    before = {path.name: path.read_bytes() for path in (folder / "step-3").iterdir()}
    assert cli.main(["import", "w.pt", "step-3"]) == 1
    text = capsys.readouterr().err
    assert "step-3 exists and is a checkpoint, which stays as it is." in text
    assert "--overwrite" in text
    assert {path.name: path.read_bytes() for path in (folder / "step-3").iterdir()} == before
    assert cli.main(["import", "w.pt", "step-3", "--overwrite"]) == 0
    assert [entry.name for entry in read_manifest(folder / "step-3").entries] == ["w"]
    assert sorted(os.listdir(folder)) == ["step-3", "w.pt"]


def test_import_leaves_a_checkpoint_that_appears_meanwhile(folder: Path) -> None:
    ticket = locks.take(folder / "1", overwrite=False)
    (ticket.staging / "manifest.json").write_text("{}")
    save_as(folder / "other", model())
    os.rename(folder / "other", folder / "1")
    with pytest.raises(CheckpointError, match="which stays as it is"):
        ticket.commit()
    ticket.release()
    assert len(read_manifest(folder / "1").entries) == 11
    assert os.listdir(folder) == ["1"]


def test_export_overwrites_nothing_unasked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_as(folder / "1", model())
    assert cli.main(["export", "1", "out"]) == 0
    before = (folder / "out" / "model.safetensors").read_bytes()
    assert cli.main(["export", "1", "out", "--dtype", "bf16"]) == 1
    assert "out exists and is an export, which stays as it is." in capsys.readouterr().err
    assert (folder / "out" / "model.safetensors").read_bytes() == before
    assert cli.main(["export", "1", "out", "--dtype", "bf16", "--overwrite"]) == 0
    assert (folder / "out" / "model.safetensors").read_bytes() != before
    (folder / "out" / "config.json").write_text("{}")
    assert cli.main(["export", "1", "out", "--overwrite"]) == 1
    assert "holds config.json, which an export does not consist of" in capsys.readouterr().err
    assert cli.main(["export", "1", "1", "--overwrite"]) == 1  # the checkpoint itself
    assert cli.main(["verify", "1"]) == 0
