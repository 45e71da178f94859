"""What `zeroshard plan` can be pointed at: functions with arguments, scripts, and Hugging Face configs."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import plan_models
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeroshard as zs
from zeroshard import cli
from zeroshard.cli._architecture import build
from zeroshard.cli._spec import values_of
from zeroshard.errors import OptionError
from zeroshard.planner.answer import problem_of
from zeroshard.planner.signatures import tokens
from zeroshard.testing import assert_bytes

DECODER = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
ENCODER = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
# The numbers of parameters are those that their publishers give.
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-2-7b": (
        DECODER | {"model_type": "llama", "intermediate_size": 11008, "vocab_size": 32000},
        6_738_415_616,
    ),
    "Llama-3-8B": (
        DECODER
        | {
            "model_type": "llama",
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
        8_030_261_248,
    ),
    "Mistral-7B": (
        DECODER
        | {
            "model_type": "mistral",
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
        },
        7_241_732_096,
    ),
    "Qwen2-0.5B": (
        {
            "model_type": "qwen2",
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
        494_032_768,
    ),
    "Qwen3-0.6B": (
        {
            "model_type": "qwen3",
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
        596_049_920,
    ),
    "gemma-2b": (
        {
            "model_type": "gemma",
            "hidden_size": 2048,
            "intermediate_size": 16384,
            "num_hidden_layers": 18,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "vocab_size": 256000,
        },
        2_506_172_416,
    ),
    "gpt2": (
        {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257},
        124_439_808,
    ),
    "gpt2-xl": (
        {"model_type": "gpt2", "n_embd": 1600, "n_head": 25, "n_layer": 48, "vocab_size": 50257},
        1_557_611_200,
    ),
    "bert-base": (ENCODER | {"model_type": "bert", "vocab_size": 30522}, 109_514_298),
    "roberta-base": (ENCODER | {"model_type": "roberta", "vocab_size": 50265}, 124_697_433),
}  # fmt: skip
SMALL = {"num_hidden_layers": 2, "n_layer": 2, "vocab_size": 1000}
NO_TRANSFORMERS = importlib.util.find_spec("transformers") is None


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_has_the_parameters_that_its_publisher_counts(name: str) -> None:
    config, count = PUBLISHED[name]
    with torch.device("meta"):
        model = build(config, "config.json")
    assert sum(p.numel() for p in model.parameters()) == count


@pytest.mark.parametrize("name", ["Llama-3-8B", "Qwen3-0.6B", "gpt2", "bert-base"])
def test_a_config_is_traced_and_its_blocks_are_units(name: str) -> None:
    with torch.device("meta"):
        model = build(PUBLISHED[name][0] | SMALL, "config.json")
    asked = problem_of(model, ranks=2, limit="100GiB", batch=tokens("2x64"), precision="bf16")
    plan = asked.plan()
    assert plan.chosen.units == 2
    frames = asked.frames(plan)[0]
    assert max(f.moment.kinds["activations"] for f in frames) > 2 * 64 * 1000 * 4  # the logits in fp32


class Losing(nn.Module):
    """A model that returns logits, and the loss of them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.model(ids).flatten(0, -2).float(), ids.flatten())


@pytest.mark.parametrize("name", ["Llama-3-8B", "gpt2"])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_model_of_a_config_takes_what_is_planned(name: str, precision: str | None) -> None:
    """Its shapes made real and trained, on one rank: the bytes of a step are those foreseen."""
    tiny = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 8, "num_key_value_heads": 2}
    tiny |= {"n_embd": 64, "n_head": 4, "num_hidden_layers": 3, "n_layer": 3, "vocab_size": 500}
    model = Losing(build(PUBLISHED[name][0] | tiny, "config.json"))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.zeros(2, 32, dtype=torch.int64)
    run = zs.shard(model, optimizer, limit="1GiB", batch=ids, precision=precision, recompute=False)
    assert run.plan is not None
    device, _ = plan_models.measured_step(run, model, optimizer, ids)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    run.close()
    assert run.plan.chosen.units == 3
    resting = ids.nbytes + sum(b.nbytes for b in model.buffers())
    assert_bytes(run.plan.chosen.device, device + resting, 0.001, f"{name}, {precision}")


def test_a_config_is_given_to_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for it, by the names that it is called by: its class where the config names one, else the
    one for causal models; entries of `--set` among the config's; and its cache off, which no training has."""

    def for_model(kind: str, **entries: Any) -> SimpleNamespace:
        if kind != "llama":
            raise ValueError(f"unknown type {kind}")
        return SimpleNamespace(**entries)

    def named(config: SimpleNamespace) -> nn.Module:
        assert config.use_cache is False
        return nn.Linear(config.width, config.width, bias=False)

    module: Any = ModuleType("transformers")
    module.__spec__ = ModuleSpec("transformers", None)
    module.AutoConfig = SimpleNamespace(for_model=for_model)
    module.AutoModelForCausalLM = SimpleNamespace(
        from_config=lambda config: nn.Linear(1, config.width, bias=False)
    )
    module.Named = named
    monkeypatch.setitem(sys.modules, "transformers", module)
    words = ["plan", str(tmp_path), "--ranks", "1", "--device", "1GiB", "--json", "--set", "width=8"]
    told = {"model_type": "llama", "width": 4, "architectures": ["Named"]}
    for entries, count in ((told, 64), (told | {"architectures": ["Absent"]}, 8)):
        (tmp_path / "config.json").write_text(json.dumps(entries))
        assert cli.main(words) == 0
        assert zs.Plan.from_json(capsys.readouterr().out).parameters == count
    (tmp_path / "config.json").write_text(json.dumps(told | {"model_type": "lama"}))
    assert cli.main(words) == 1
    assert "transformers cannot build the model of" in (said := capsys.readouterr().err)
    assert "ValueError: unknown type lama" in said


@pytest.mark.skipif(not NO_TRANSFORMERS, reason="transformers builds it then")
def test_a_config_file_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the file or its folder; `--set` changes an entry."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["gpt2"][0] | {"n_ctx": None}))
    words = ["--ranks", "2", "--device", "8GiB", "--batch", "1x64", "--json"]
    assert cli.main(["plan", str(tmp_path / "config.json"), *words]) == 0
    assert zs.Plan.from_json(capsys.readouterr().out).parameters == 124_439_808
    assert cli.main(["plan", str(tmp_path), *words, "--set", "n_layer=1"]) == 0
    assert zs.Plan.from_json(capsys.readouterr().out).parameters == 124_439_808 - 11 * 7_087_872


@pytest.mark.skipif(not NO_TRANSFORMERS, reason="transformers builds it then")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"model_type": "mamba"}', r"type 'mamba', whose shapes are not known here .*pip install"),
        ('{"model_type": "llama", "hidden_size": 64}', r"has no entry '\w+', which a llama needs"),
        ('{"model_type": "llama"', "is not JSON"),
        ("[1]", "holds a list"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused(
    tmp_path: Path, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(text)
    assert cli.main(["plan", str(tmp_path / "config.json"), "--ranks", "1", "--device", "1GiB"]) == 1
    error = capsys.readouterr().err
    assert re.search(said, error), error


def test_a_broken_transformers_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installed, and one of its own dependencies is not: the user learns which, not by a traceback."""
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("import a_module_of_its_own\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["gpt2"][0]))
    assert cli.main(["plan", str(tmp_path), "--ranks", "1", "--device", "1GiB"]) == 1
    said = capsys.readouterr().err
    assert re.search(r"transformers.*cannot be imported: ModuleNotFoundError: .*a_module_of_its_own", said), (
        said
    )
    assert "pip install --upgrade transformers" in said


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(OptionError, match="activation 'swish2' is not known here"):
        build(PUBLISHED["gpt2"][0] | {"activation_function": "swish2", "n_layer": 1}, "config.json")


def test_arguments_of_a_function_are_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "sized_model.py"
    script.write_text(
        "import torch\n"
        "def build(layers, width=64):\n"
        "    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))\n"
    )
    words = ["--ranks", "1", "--device", "1GiB", "--json"]
    assert cli.main(["plan", f"{script}:build", *words, "--set", "layers=3", "--set", "width=8"]) == 0
    assert zs.Plan.from_json(capsys.readouterr().out).parameters == 3 * (8 * 8 + 8)
    assert cli.main(["plan", f"{script}:build", *words]) == 1
    assert "missing a required argument: 'layers'. Give its arguments with --set" in capsys.readouterr().err
    assert cli.main(["plan", f"{script}:biuld", *words]) == 1
    assert "has no function 'biuld'. Did you mean \"build\"? It has: build." in capsys.readouterr().err
    with pytest.raises(OptionError, match="must be NAME=VALUE"):
        values_of(["layers"])
    assert values_of(["a=1", "b=x", "c=true", "d=[1, 2]"]) == {"a": 1, "b": "x", "c": True, "d": [1, 2]}
