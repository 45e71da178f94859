"""Small models of transformers' architectures, and rows for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from hf_case import Outcome, arguments, begin, outcome
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer

import zeroshard.integrations.hf as zhf

_TEXT = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4}
_GROUPED = {**_TEXT, **_HEADS, "num_key_value_heads": 2, "max_position_embeddings": 32}
_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BLOOM = {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}
_MAMBA = {"vocab_size": 64, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2} | _ENDS
_EXPERTS = _ENDS | {"num_experts_per_tok": 2, "output_router_logits": False}
_STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_BERT = {**_TEXT, **_HEADS, "max_position_embeddings": 34, "pad_token_id": 0}
_CLASS = _BERT | _STILL | {"num_labels": 3}
_VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_IMAGE = {"image_size": 16, "patch_size": 8, "num_channels": 3}
_STAGES = {"hidden_sizes": [8, 16], "depths": [1, 2], "num_labels": 3}
_SPEECH = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    **{"conv_dim": (16, 16), "conv_stride": (4, 4), "conv_kernel": (8, 4), "num_feat_extract_layers": 2},
    **{"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "vocab_size": 32},
    **{"mask_time_prob": 0.0, "mask_time_length": 2, "classifier_proj_size": 16, "num_labels": 3},
}


class Architecture(NamedTuple):
    model: str
    rows: str  # of `ROWS`
    config: Mapping[str, Any]


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "text", _GROUPED | _ENDS),
    "mistral": Architecture("MistralForCausalLM", "text", _GROUPED | _ENDS | {"sliding_window": 8}),
    "qwen2": Architecture("Qwen2ForCausalLM", "text", _GROUPED | _ENDS | {"tie_word_embeddings": True}),
    "qwen3": Architecture("Qwen3ForCausalLM", "text", _GROUPED | _ENDS | {"head_dim": 8}),
    "gemma2": Architecture("Gemma2ForCausalLM", "text", _GROUPED | _ENDS | {"head_dim": 8}),
    "phi3": Architecture("Phi3ForCausalLM", "text", _GROUPED | _ENDS),
    "olmo2": Architecture("Olmo2ForCausalLM", "text", _GROUPED | _ENDS),
    "falcon": Architecture("FalconForCausalLM", "text", _TEXT | _HEADS | _ENDS),
    "bloom": Architecture(
        "BloomForCausalLM", "text", _ENDS | {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    ),
    "gpt_neox": Architecture("GPTNeoXForCausalLM", "text", _TEXT | _HEADS | _ENDS | {"hidden_dropout": 0.0}),
    "opt": Architecture(
        "OPTForCausalLM",
        "text",
        _ENDS
        | _HEADS
        | {"vocab_size": 64, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48}
        | {"num_hidden_layers": 2, "max_position_embeddings": 32, "dropout": 0.0},
    ),
    "mixtral": Architecture(
        "MixtralForCausalLM", "text", _GROUPED | _ENDS | _EXPERTS | {"num_local_experts": 4}
    ),
    "qwen2_moe": Architecture(
        "Qwen2MoeForCausalLM",
        "text",
        _GROUPED
        | _ENDS
        | _EXPERTS
        | {"num_experts": 4, "moe_intermediate_size": 24}
        | {"shared_expert_intermediate_size": 24},
    ),
    "mamba": Architecture(
        "MambaForCausalLM",
        "text",
        {"vocab_size": 64, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2} | _ENDS,
    ),
    "mamba2": Architecture(
        "Mamba2ForCausalLM",
        "text",
        _MAMBA | {"chunk_size": 4} | {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 1} | _ENDS,
    ),
    "bert": Architecture("BertForMaskedLM", "text", _BERT | _STILL),
    "roberta": Architecture("RobertaForSequenceClassification", "class", _CLASS),
    "albert": Architecture("AlbertForMaskedLM", "text", _BERT | _STILL | {"embedding_size": 16}),
    "electra": Architecture("ElectraForMaskedLM", "text", _BERT | _STILL | {"embedding_size": 16}),
    "distilbert": Architecture(
        "DistilBertForMaskedLM",
        "text",
        {"vocab_size": 64, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "pad_token_id": 0}
        | {"max_position_embeddings": 32, "dropout": 0.0, "attention_dropout": 0.0},
    ),
    "deberta_v2": Architecture(
        "DebertaV2ForSequenceClassification", "class", _BERT | _STILL | {"num_labels": 3}
    ),
    "t5": Architecture(
        "T5ForConditionalGeneration",
        "text",
        {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        | {"dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0},
    ),
    "bart": Architecture(
        "BartForConditionalGeneration",
        "text",
        _ENDS
        | {"vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0}
        | {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48}
        | {"decoder_ffn_dim": 48, "max_position_embeddings": 32, "decoder_start_token_id": 2},
    ),
    "vit": Architecture("ViTForImageClassification", "image", _VISION | _IMAGE | _STILL | {"num_labels": 3}),
    "dinov2": Architecture(
        "Dinov2ForImageClassification",
        "image",
        {k: v for k, v in _VISION.items() if k != "intermediate_size"} | _IMAGE | {"num_labels": 3},
    ),
    "convnext": Architecture(
        "ConvNextForImageClassification",
        "image",
        {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2, "num_labels": 3},
    ),
    "resnet": Architecture(
        "ResNetForImageClassification",
        "image",
        {
            "embedding_size": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 2],
            "num_labels": 3,
            "layer_type": "basic",
        },
    ),
    "swin": Architecture(
        "SwinForImageClassification",
        "image",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 4,
        }
        | {"num_labels": 3, "drop_path_rate": 0.0},
    ),
    "wav2vec2": Architecture(
        "Wav2Vec2ForSequenceClassification", "sound", _SPEECH | {"layerdrop": 0.0, "feat_proj_dropout": 0.0}
    ),
    "hubert": Architecture(
        "HubertForSequenceClassification", "sound", _SPEECH | {"layerdrop": 0.5, "feat_proj_dropout": 0.0}
    ),
    "whisper": Architecture(
        "WhisperForConditionalGeneration",
        "spectrum",
        _ENDS
        | {"vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0}
        | {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48}
        | {"decoder_ffn_dim": 48, "max_source_positions": 16, "max_target_positions": 16, "num_mel_bins": 8}
        | {"decoder_start_token_id": 3, "suppress_tokens": None, "begin_suppress_tokens": None},
    ),
    "clip": Architecture(
        "CLIPModel",
        "pair",
        {
            "text_config": _TEXT | _HEADS | _ENDS | {"max_position_embeddings": 16},
            "vision_config": _VISION | _IMAGE,
            "projection_dim": 16,
        },
    ),
}


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of one kind, no two alike."""

    def __init__(self, kind: str, rows: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.labels = torch.randint(0, 3, (rows,), generator=generator)
        self.tokens = torch.randint(4, 64, (rows, 12), generator=generator)
        shape = {"image": (3, 16, 16), "pair": (3, 16, 16), "sound": (400,), "spectrum": (8, 32)}
        self.floats = torch.randn(rows, *shape.get(kind, ()), generator=generator)
        self.kind = kind

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        tokens, floats, label = self.tokens[at], self.floats[at], self.labels[at]
        return {
            "text": {"input_ids": tokens, "labels": tokens.clone()},
            "class": {"input_ids": tokens, "labels": label},
            "image": {"pixel_values": floats, "labels": label},
            "sound": {"input_values": floats, "labels": label},
            "spectrum": {"input_features": floats, "labels": tokens},
            "pair": {"input_ids": tokens, "pixel_values": floats, "return_loss": torch.tensor(True)},
        }[self.kind]


def collated(rows: list[dict[str, Tensor]]) -> dict[str, Any]:
    batch: dict[str, Any] = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    if "return_loss" in batch:
        batch["return_loss"] = True
    return batch


def built(name: str) -> nn.Module:
    architecture = ARCHITECTURES[name]
    kind = getattr(transformers, architecture.model)
    torch.manual_seed(0)
    return kind(kind.config_class(**architecture.config))  # type: ignore[no-any-return]


def trained(name: str, folder: str, stage: int | None) -> Outcome:
    begin()
    zhf.disable()
    if stage is not None:
        zhf.enable(stage=stage)
    try:
        trainer = Trainer(
            model=built(name),
            args=arguments(folder, max_steps=4),
            train_dataset=Rows(ARCHITECTURES[name].rows, 24),
            data_collator=collated,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        trainer.save_model(f"{folder}/last")
        torch.distributed.barrier()
        read = type(trainer.model).from_pretrained(Path(folder, "last"))
        result = outcome(trainer)
        if result.weights and trainer.args.process_index == 0:
            for key, value in read.state_dict().items():
                assert torch.equal(value, result.weights[key]), key
        return result
    finally:
        zhf.disable()
