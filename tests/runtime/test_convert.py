"""Configurations of DeepSpeed and Accelerate, and what is made of them."""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import zeroshard as zs
from zeroshard.cli import main
from zeroshard.convert import accelerate, call, deepspeed, shown

ZERO = "zero_optimization"


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({}, {"stage": 0}),
        ({ZERO: {"stage": 1}, "bf16": {"enabled": True}}, {"stage": 1, "precision": "bf16"}),
        ({ZERO: {"stage": 2, "reduce_bucket_size": 1e6}}, {"stage": 2, "bucket_bytes": 4_000_000}),
        (
            {ZERO: {"stage": 2, "reduce_bucket_size": 1e6}, "fp16": {"enabled": True, "loss_scale": 0}},
            {"stage": 2, "precision": "fp16", "bucket_bytes": 2_000_000},
        ),
        (
            {ZERO: {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}},
            {"stage": 2, "offload": zs.Offload("host")},
        ),
        ({ZERO: {"stage": 2, "cpu_offload": True}}, {"stage": 2, "offload": zs.Offload("host")}),
        (
            {ZERO: {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": None}}},
            {"stage": 3, "offload": zs.Offload("device", "host")},
        ),
        (
            {ZERO: {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/local"}}},
            {"stage": 3, "offload": zs.Offload("disk", path="/local")},
        ),
        ({"gradient_clipping": 0.0}, {"stage": 0}),
        ({"gradient_clipping": 0.5}, {"stage": 0, "clip_norm": 0.5}),
        (
            {"bf16": {"enabled": True}, "communication_data_type": "fp32"},
            {"stage": 0, "precision": zs.Precision("bf16", reduce="fp32")},
        ),
        (
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
            {"stage": 0, "precision": zs.Precision("bf16", grad="fp32")},
        ),
        (
            {ZERO: {"stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 8}},
            {"stage": 3, "gather": zs.Int8(), "node_cache": True, "ranks_per_node": 8},
        ),
        ({ZERO: {"stage": 2, "zero_quantized_gradients": True}}, {"stage": 2, "compress": zs.Int4()}),
        ({ZERO: {"stage": 3, "mics_shard_size": -1 + 1}, "amp": {"enabled": False}}, {"stage": 3}),
    ],
)
def test_a_configuration_of_deepspeed(config: dict[str, Any], options: dict[str, Any]) -> None:
    assert zs.from_deepspeed(config) == options


def test_what_is_left_to_the_loop_is_asked_for_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "ds_config.json"
    config = {ZERO: {"stage": 3, "reduce_bucket_size": "auto"}, "gradient_clipping": "auto"}
    config |= {"bf16": {"enabled": "auto"}, "gradient_accumulation_steps": 4, "train_batch_size": "auto"}
    config |= {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    file.write_text(json.dumps(config))
    with pytest.raises(zs.OptionError, match=r'says bf16.enabled="auto", which is for the loop to say: pass'):
        zs.from_deepspeed(file)
    with caplog.at_level(logging.WARNING, "zeroshard"):
        assert zs.from_deepspeed(str(file), bf16=True, gradient_clipping=1.0) == {
            "stage": 3,
            "precision": "bf16",
            "clip_norm": 1.0,
        }
    assert "gradient_accumulation_steps=4: `with run.no_sync():`" in caplog.text
    assert "optimizer=AdamW: an optimizer of torch.optim" in caplog.text


@pytest.mark.parametrize(
    ("config", "auto", "words"),
    [
        ({"zero_optimisation": {}}, {}, r'has no .zero_optimisation.* Did you mean "zero_optimization'),
        ({ZERO: {"stages": 3}}, {}, "DeepSpeed has no 'zero_optimization.stages'"),
        ({ZERO: {"stage": 4}}, {}, "stage=4 is not one of"),
        ({}, {"bf16": True}, r'bf16= stands for no "auto" of the configuration, which are none'),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, {}, "enables bf16 and fp16 at once"),
        ({"communication_data_type": "fp8"}, {}, "communication_data_type='fp8' is not one of fp32"),
        (
            {ZERO: {"offload_param": {"device": "gpu"}}},
            {},
            "offload_param.device='gpu' is not one of none, cpu",
        ),
        (
            {"pipeline": {"stages": 2}},
            {},
            r"from_deepspeed\(\): there is no equivalent of pipeline={",
        ),
        ({ZERO: {"mics_shard_size": 8}}, {}, "no equivalent of zero_optimization.mics_shard_size=8: r"),
    ],
)
def test_what_cannot_be_is_said(config: dict[str, Any], auto: dict[str, Any], words: str) -> None:
    with pytest.raises(zs.OptionError, match=words):
        zs.from_deepspeed(config, **auto)


def test_files_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "half.json").write_text('{"a": ')
    (tmp_path / "half.yaml").write_text("{a: ")
    for name, words in (
        ("none.json", "cannot be read as a configuration"),
        ("list.json", "holds no names with values"),
        ("half.json", "is no configuration: "),
        ("half.yaml", "is no configuration: "),
    ):
        with pytest.raises(zs.OptionError, match=words):
            zs.from_deepspeed(tmp_path / name)
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(zs.OptionError, match="reading YAML needs the package yaml: pip install pyyaml"):
        zs.from_deepspeed(tmp_path / "half.yaml")


FSDP = """
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_offload_params: true
  fsdp_reshard_after_forward: true
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_version: 2
mixed_precision: bf16
num_processes: 8
"""
FSDP_SHOWN = """\
run = zs.shard(
    model,
    optimizer,
    stage=3,
    offload=zs.Offload("host", parameters="host"),
    recompute=True,
    precision="bf16",
)

In the loop:
  started by: zeroshard run --ranks 8 train.py

Not needed:
  auto_wrap_policy, transformer_layer_cls_to_wrap
"""


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fsdp.yaml").write_text(FSDP)
    assert main(["convert", str(tmp_path / "fsdp.yaml")]) == 0
    assert capsys.readouterr().out == FSDP_SHOWN
    config = {ZERO: {"stage": 2}, "bf16": {"enabled": "auto"}, "tensor_parallel": {"autotp_size": 4}}
    config |= {"fp16": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    assert main(["convert", str(tmp_path / "ds.json")]) == 1
    told = capsys.readouterr().out
    assert 'bf16.enabled="auto": what the loop says, or from_deepspeed(..., bf16=...)' in told
    assert "Without an equivalent:\n  tensor_parallel={'autotp_size': 4}: one way" in told
    assert "fp16: scaler = torch.amp.GradScaler()" in told


@pytest.mark.parametrize(
    ("section", "options"),
    [
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, {"stage": 2}),
        ({"fsdp_sharding_strategy": "3"}, {"stage": 0}),
        ({"fsdp_reshard_after_forward": False}, {"stage": 2}),
        ({"fsdp_auto_wrap_policy": "NO_WRAP"}, {"stage": 3, "units": "none"}),
    ],
)
def test_sections_of_accelerate(section: dict[str, Any], options: dict[str, Any]) -> None:
    assert accelerate({"distributed_type": "FSDP", "fsdp_config": section}).options == options


def test_deepspeed_and_others_in_a_file_of_accelerate(tmp_path: Path) -> None:
    engine = {"zero_stage": 2, "offload_optimizer_device": "cpu", "gradient_clipping": 1.0}
    engine |= {"gradient_accumulation_steps": 4, "zero3_init_flag": False}
    told = accelerate(
        {"distributed_type": "DEEPSPEED", "deepspeed_config": engine, "mixed_precision": "fp16"}
    )
    offload = zs.Offload("host")
    assert told.options == {"stage": 2, "offload": offload, "clip_norm": 1.0, "precision": "fp16"}
    (tmp_path / "ds.json").write_text(json.dumps({ZERO: {"stage": 1}}))
    section = {"deepspeed_config_file": str(tmp_path / "ds.json")}
    assert accelerate({"distributed_type": "DEEPSPEED", "deepspeed_config": section}).options == {"stage": 1}
    assert accelerate({"distributed_type": "MULTI_GPU"}).options == {"stage": 0}
    hybrid = accelerate(
        {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}}
    )
    assert hybrid.without == ["HYBRID_SHARD: ranks shard over all of them, or over group="]
    with pytest.raises(zs.OptionError, match="Accelerate has no 'sharding' in fsdp_config"):
        accelerate({"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding": 1}})


def test_calls_are_python() -> None:
    options = {"stage": 3, "gather": zs.Int8(), "precision": zs.Precision("bf16", grad="fp32")}
    text = call(options)
    names: dict[str, Any] = {"zs": zs}
    assert eval(shown(options["precision"]), names) == options["precision"]
    assert "gather=zs.Int8()" in text
    assert deepspeed({}, {}).not_needed == []


def test_what_the_page_shows() -> None:
    page = (Path(__file__).parents[2] / "docs" / "accelerate.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[-1]
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["run"].options.clip_norm == 1.0
    names["run"].close()
