"""The plugin for axolotl, with axolotl's own manager of plugins. It runs where axolotl is installed:
`pip install --no-deps axolotl==0.19.0 addict && pytest tests/integrations/test_axolotl.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hf_case import Texts, arguments, begin, gpt2
from transformers import Trainer

import zeroshard as zs
from zeroshard.integrations import hf as zhf
from zeroshard.testing import Ranks

NAME = "zeroshard.integrations.axolotl.Plugin"


def trained(folder: str, config: dict[str, Any]) -> list[Any]:
    from axolotl.integrations.base import PluginManager
    from pydantic import ValidationError

    begin()
    manager = PluginManager.get_instance()
    manager.register(NAME)
    plugin = manager.plugins[NAME]
    try:
        plugin.register(config)
        (arguments_at,) = manager.get_input_args()
        module, _, name = arguments_at.rpartition(".")
        model = getattr(sys.modules[module], name)
        assert model(**config).zeroshard == config["zeroshard"]
        with pytest.raises(ValidationError):
            model(zeroshard=3)
        trainer = Trainer(gpt2(), arguments(folder, max_steps=2), train_dataset=Texts(16))
        trainer.train()
        run = zhf.run_of(trainer.model)
        told = [run.options.stage, run.options.offload, run.stats().steps]
        run.close()
        for engine in ("deepspeed", "fsdp_config"):
            with pytest.raises(zs.OptionError, match="beside the plugin of ZeroShard, which shards in"):
                plugin.register(config | {engine: {"a": 1}})
        return told
    finally:
        plugin.on_config_validation_error(config)
        assert type(Trainer(gpt2(), arguments(folder), train_dataset=Texts(4))) is Trainer


@pytest.mark.ranks
def test_its_trainers_shard(tmp_path: Path) -> None:
    pytest.importorskip("axolotl")
    ranks = Ranks(2, warn="ignore")
    try:
        told = ranks.run(trained, str(tmp_path), {"zeroshard": {"stage": 3, "offload": "host"}})
    finally:
        ranks.stop()
    assert told == [[3, zs.Offload("host"), 2]] * 2


def test_without_the_package_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "axolotl", None)
    monkeypatch.delitem(sys.modules, "zeroshard.integrations.axolotl", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"integrations\.axolotl needs the package 'axolotl"):
        __import__("zeroshard.integrations.axolotl")
