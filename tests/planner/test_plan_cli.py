"""`zeroshard plan`: specs of every kind, the table, JSON, and errors that say what to type."""

from __future__ import annotations

import importlib.util
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

import zeroshard as zs
from zeroshard import cli
from zeroshard.machine import GPUS

SCRIPT = """
import torch

def build():
    blocks = (torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4))
    return torch.nn.Sequential(*blocks)

def build_with_batch():
    return build(), torch.zeros(8, 64)

def number():
    return 3

def leaving():
    raise SystemExit(3)

def grown(layers=2):
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(layers)))
"""
LIMITS = ["--ranks", "4", "--device", "1GiB"]


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "planned_model.py").write_text(SCRIPT)
    return str(tmp_path / "planned_model.py")


def test_a_script_is_planned(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", f"{script}:build_with_batch", *LIMITS, "--host", "1GiB"]) == 0
    text = capsys.readouterr().out
    assert "chosen" in text
    assert "16,640 parameters on 4 ranks" in " ".join(text.split())
    assert "Activations are not counted" not in text


def test_a_module_is_planned_as_json(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(script).parent)
    assert (
        cli.main(["plan", "planned_model:build", *LIMITS, "--stage", "2", "--precision", "bf16", "--json"])
        == 0
    )
    plan = zs.Plan.from_json(capsys.readouterr().out)
    assert (plan.ranks, plan.chosen.stage, plan.limit) == (4, 2, 2**30)
    assert any("Activations are not counted" in reason for reason in plan.reasons)


@pytest.mark.parametrize(("width", "last"), [(80, "step, est."), (100, "step, est."), (160, "numerics")])
def test_a_table_leaves_room_for_the_names_of_plans(width: int, last: str) -> None:
    """Between nodes, with a disk, it has ten columns. A narrow terminal does not get what tells least."""
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(9999, 9999) for _ in range(4)))
    plan = zs.plan(
        model, nodes=2, ranks_per_node=8, limit="4GiB", host_limit="9GiB", disk_path="/scratch", clip_norm=1.0
    )
    file = StringIO()
    plan.show(Console(file=file, width=width, highlight=False))
    lines = file.getvalue().splitlines()
    head = next(line for line in lines if "plan" in line and "┃" in line)
    assert head.rstrip(" ┃").endswith(last)
    assert "disk" in head
    assert max(map(len, lines)) <= width
    assert any("│stage 3," in line for line in lines)
    assert "…" not in file.getvalue()


def test_a_node_has_eight_devices(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", f"{script}:build", "--nodes", "2", "--device", "1GiB", "--json"]) == 0
    plan = zs.Plan.from_json(capsys.readouterr().out)
    assert (plan.ranks, plan.ranks_per_node) == (16, 8)


def test_what_is_advised_can_be_typed(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", f"{script}:build", "--ranks", "1", "--device", "160KiB"]
    assert cli.main(words) == 0
    assert "Pass --clip-norm (inf to clip nothing)" in " ".join(capsys.readouterr().out.split())
    assert cli.main([*words, "--clip-norm", "inf"]) == 0
    assert "--clip-norm" not in capsys.readouterr().out


def test_a_gpu_is_a_limit(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        f"{script}:build",
        "--ranks",
        "2",
        "--device",
        "a100",
        "--network",
        "ethernet-25",
        "--json",
    ]
    assert cli.main(words) == 0
    plan = zs.Plan.from_json(capsys.readouterr().out)
    assert (plan.machine, plan.limit) == ("A100", GPUS["A100"].memory)
    assert dict(plan.chosen.kinds)["context"] == 768 * 2**20


@pytest.mark.parametrize(
    ("spec", "words", "said"),
    [
        (
            "{script}:build",
            ["--ranks", "4", "--device", "10KiB"],
            "PlanError: no plan fits 10.0 KiB per device",
        ),
        ("{script}:build", ["--ranks", "4", "--device", "10KiB"], "What would fit: pass --device "),
        (
            "{script}:absent",
            LIMITS,
            "has no function 'absent'. It has: build, build_with_batch, number, leaving, grown.",
        ),
        ("{script}:number", LIMITS, "returned a int, not a module"),
        ("nowhere.py:build", LIMITS, "there is no file nowhere.py"),
        ("build", LIMITS, "must be module:function"),
        ("{script}:build", ["--ranks", "4", "--device", "1GiB", "--gpu", "H1000"], 'Did you mean "H100"'),
        (
            "{script}:build",
            ["--ranks", "4", "--device", "A100", "--gpu", "H100"],
            "--device A100 is a GPU, and --gpu H100 another",
        ),
        (
            "{script}:build",
            ["--nodes", "2", "--device", "1GiB", "--search", "ranks"],
            "leave --nodes out, and pass --ranks-per-node for nodes of another size",
        ),
        ("{script}:build", [*LIMITS, "--batch", "8x63"], "cannot be traced"),
        ("absent/config.json", LIMITS, "there is no file"),
        ("{script}:build", ["--ranks", "4"], "one limit: --device 80GiB of a device, or --memory-limit-per-"),
        ("{script}:build", ["--device", "1GiB"], "--ranks, or --nodes and --ranks-per-node."),
        ("{script}:build", ["--ranks", "0", "--device", "1GiB"], "--ranks 0 must be a number of ranks"),
        (
            "{script}:build",
            ["--ranks", "4", "--device", "H1000"],
            'nor a GPU of the table. Did you mean "H100"',
        ),
        ("{script}:build", [*LIMITS, "--network", "0"], "--network 0.0 of a machine must be above zero"),
        (
            "{script}:build",
            [*LIMITS, "--batch", "0x64"],
            "--batch holds nothing: its first tensor is of shape",
        ),
        ("{script}:build", [*LIMITS, "--disk", "1GiB"], "--disk needs --disk-path, a folder on that disk"),
        (
            "{script}:build",
            [*LIMITS, "--search", "batch"],
            "micro-batch needs --batch, of any number of rows",
        ),
        (
            "{script}:build",
            ["--nodes", "1", "--ranks-per-node", "4", "--memory-limit-per-node", "3KiB", "--stage", "0"],
            "What would fit: pass --memory-limit-per-node ",
        ),
        ("{script}:leaving", LIMITS, "leaving() ends the process instead of returning a model"),
        ("{script}:build", [*LIMITS, "--vary", "layers=1:3"], "pass --search model too"),
        ("{script}:build", [*LIMITS, "--nodes", "3"], "--nodes 3 does not make 4 ranks"),
        ("{script}:build", [*LIMITS, "--clip-norm", "0"], "must be above zero (inf: measure the norm"),
        (
            "{script}:build",
            ["--nodes", "2", "--ranks-per-node", "0", "--device", "1GiB"],
            "--ranks-per-node 0 must be a number",
        ),
        (
            "{script}:grown",
            [*LIMITS, "--search", "model", "--vary", "layer=1:3"],
            "grown(layers=2) cannot be called with layer=1",
        ),
        (
            "{script}:build",
            ["--device", "1KiB", "--ranks", "8", "--no-offload", "--search", "ranks"],
            "nothing up to 8 ranks is enough. On 8 ranks, no plan fits 1.0 KiB per device",
        ),
    ],
)
def test_what_goes_wrong_is_told(
    script: str, spec: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", spec.format(script=script), *words]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def build(:", "raised SyntaxError: invalid syntax"),
        ("raise ValueError('here')", "broken.py raised ValueError: here."),
        (
            "raise SystemExit(3)",
            'ends the process. Let what is not to run here stand under if __name__ == "__',
        ),
    ],
)
def test_a_script_that_cannot_be_loaded(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.py").write_text(text)
    assert cli.main(["plan", f"{tmp_path / 'broken.py'}:build", *LIMITS]) == 1
    assert said in capsys.readouterr().err


TINY = (
    '"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, '
    '"num_attention_heads": 4, "vocab_size": 100'
)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is not None, reason="transformers is installed")
@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("{}", [], "has no entry 'model_type'"),
        ('{"model_type": "mamba"}', [], "pip install transformers"),
        (f'{{{TINY}, "hidden_size": "x"}}', [], "no llama can be built from the entries of"),
        (
            f"{{{TINY}}}",
            ["--search", "model", "--vary", "num_layers=1:9"],
            "has no entry 'num_layers', and a llama is built from none of that name. Did you mean",
        ),
        (
            f"{{{TINY}}}",
            ["--search", "model", "--vary", "rms_norm_eps=1:9"],
            "parameters at 1 as at 9, so there",
        ),
        (f"{{{TINY}}}", ["--set", "num_layer=3"], 'Did you mean "num_hidden_layers"?'),
        (
            f'{{{TINY}, "architectures": ["LlamaForSequenceClassification"]}}',
            [],
            "describes a LlamaForSequenceClassification, and of that type only a LlamaForCausalLM is known",
        ),
        (f'{{{TINY}, "hidden_act": "selu"}}', [], "OptionError: the config's activation 'selu' is not known"),
    ],
)
def test_configs_that_describe_nothing(
    text: str, words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(text)
    assert cli.main(["plan", str(tmp_path / "config.json"), *LIMITS, *words]) == 1
    assert said in capsys.readouterr().err
