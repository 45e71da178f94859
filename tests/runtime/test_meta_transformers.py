"""Models of transformers on the meta device are filled by their own `_init_weights`, whole or in rows:
constants and buffers as in a model that is built from its config, and what is drawn of the same spread."""

from __future__ import annotations

import os
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.testing import ranks

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
SPEECH = {
    **{f"{half}_{name}": 2 for half in ("encoder", "decoder") for name in ("layers", "attention_heads")},
    **{"max_source_positions": 32, "max_target_positions": 32, "vocab_size": 64, "decoder_ffn_dim": 64},
    **{"encoder_ffn_dim": 64, "d_model": 32},
    **{f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "decoder_start")},
}
TEXT = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
# Rotary tables; a scale by the depth; positions; sines of an encoder; spreads by the width; state spaces.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", {**SMALL, "num_key_value_heads": 2}),
    "GPT2LMHeadModel": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}),
    "BertForMaskedLM": ("BertConfig", SMALL),
    "WhisperForConditionalGeneration": ("WhisperConfig", SPEECH),
    "T5ForConditionalGeneration": ("T5Config", TEXT),
    "MambaForCausalLM": ("MambaConfig", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64}),
}


def build(kind: str) -> nn.Module:
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    library = pytest.importorskip("transformers")
    config, keywords = KINDS[kind]
    model: nn.Module = getattr(library, kind)(getattr(library, config)(**keywords))
    return model


def compare(values: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert values.keys() == expected.keys()
    for name, whole in expected.items():
        found = values[name].float()
        if whole.numel() == 1 or float(whole.float().std()) == 0.0:
            assert torch.equal(found, whole.float()), name
        else:
            assert float(found.std()) == pytest.approx(float(whole.float().std()), rel=0.35), name
            assert float((found.mean() - whole.float().mean()).abs()) < 0.5 * float(whole.float().std()), name


@pytest.mark.parametrize("kind", KINDS)
def test_filled_as_built_from_the_config(kind: str) -> None:
    torch.manual_seed(0)
    built = build(kind)
    with torch.device("meta"):
        model = build(kind)
    run = zs.shard(model)
    run.close()
    compare(
        {n: p.detach() for n, p in model.named_parameters()},
        {n: p.detach() for n, p in built.named_parameters()},
    )
    made = dict(model.named_buffers())
    for name, buffer in built.named_buffers():
        assert torch.equal(made[name], buffer), name


class Scaled(nn.Module):
    """As CLIP: a number that its construction alone knows."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace()
        self.part = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(2.5))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.fill_(0.5)
        elif isinstance(module, Scaled):
            module.part.bias.data.fill_(0.25)


def test_what_construction_alone_knows_is_asked_for() -> None:
    with torch.device("meta"):
        model = Scaled()
    said = r"`scale` is on the meta device, and neither _init_weights\(\) of the model nor reset_parameters"
    with pytest.raises(zs.ModelError, match=said):
        zs.shard(model)
    with torch.device("meta"):
        model = Scaled()
    model.scale = nn.Parameter(torch.tensor(2.5))
    zs.shard(model).close()
    assert model.part.weight.unique().tolist() == [0.5]
    assert model.part.bias.unique().tolist() == [0.25]
    assert model.scale.item() == 2.5


def rows_of(stage: int) -> tuple[dict[str, Tensor], int]:
    with torch.device("meta"):
        model = Scaled()
    model.scale = nn.Parameter(torch.tensor(2.5))
    run = zs.shard(model, stage=stage)
    rows = len(next(model.part.parameters()).to_local())  # type: ignore[operator]
    run.close()
    return {name: p.detach() for name, p in model.named_parameters()}, rows


@pytest.mark.ranks
def test_filled_in_rows() -> None:
    found = ranks(2).run(rows_of, 3)
    assert sorted(rows for _, rows in found) == [1, 2]
    for values, _ in found:
        assert values["part.weight"].unique().tolist() == [0.5]
        assert values["part.bias"].unique().tolist() == [0.25]
        assert values["scale"].item() == 2.5
