"""Decoders and encoders as a Hugging Face `config.json` describes them, for their shapes.

For machines without transformers: the same parameters (names, shapes, ties) and the same operations that its
models do with torch's attention, so that a plan has the same bytes. They are never trained. Families that are
not here are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeroshard.extend import OptionError, did_you_mean

Config = Mapping[str, Any]


class _Entries(dict[str, Any]):
    """Entries of a config that know which of them a model is built from."""

    def __init__(self, entries: Config) -> None:
        super().__init__(entries)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


def build(config: Config, where: str, changes: Config = MappingProxyType({})) -> nn.Module:
    """The model of a config with some entries changed. `where` names the file for errors."""
    known, config = config, {**config, **changes}
    kind = config.get("model_type")
    if kind is None:
        raise OptionError(f"{where} has no entry 'model_type': it is not a config of a model.")
    family = _FAMILIES.get(str(kind))
    if family is None:
        raise OptionError(
            f"{where} describes a model of type {kind!r}, whose shapes are not known here (known: "
            f"{', '.join(sorted(_FAMILIES))}). `pip install transformers`, which knows them all; or name a "
            "function that builds the model: module:function."
        )
    make, defaults, builds = family
    _check_class(config, builds, where)
    given = {key: value for key, value in config.items() if value is not None}
    entries = _Entries({**defaults, **given})
    try:
        made = make(entries)
    except OptionError:
        raise
    except KeyError as error:
        raise OptionError(f"{where} has no entry {error.args[0]!r}, which a {kind} needs.") from error
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}".rstrip(".")
        raise OptionError(f"no {kind} can be built from the entries of {where}: {why}.") from error
    for name in changes:
        if name not in known and name not in entries.read:
            raise OptionError(
                f"{where} has no entry {name!r}, and a {kind} is built from none of that name."
                f"{did_you_mean(name, entries.read)}"
            )
    return made


def _check_class(config: Config, builds: str, where: str) -> None:
    """A classifier or a bare trunk has other parameters than the model with its head of words."""
    named = config.get("architectures") or [builds]
    if named[0] != builds:
        raise OptionError(
            f"{where} describes a {named[0]}, and of that type only a {builds} is known here. `pip install "
            "transformers`, which knows them all; or pass --set architectures=null to plan for that one."
        )


# ---------------------------------------------------------------------- parts


def _new_gelu(x: Tensor) -> Tensor:
    """Written out, as transformers does: every operation keeps its own input."""
    inner: Tensor = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def _tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": _new_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    if name not in _ACTIVATIONS:
        raise OptionError(
            f"the config's activation {name!r} is not known here (known: {', '.join(_ACTIVATIONS)}): "
            "`pip install transformers`."
        )
    return _ACTIVATIONS[name]


class RMSNorm(nn.Module):
    """A root-mean-square norm that computes in fp32, whatever dtype its input has."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


# ---------------------------------------------------------------------- Llama and its kin


class Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        width, self.heads = c["hidden_size"], c["num_attention_heads"]
        self.groups = c.get("num_key_value_heads", self.heads)
        self.size = c.get("head_dim") or width // self.heads
        self.dropout = c.get("attention_dropout", 0.0)
        biased, eps = bool(c["attention_bias"]), c["rms_norm_eps"]
        self.q_proj = nn.Linear(width, self.heads * self.size, bias=biased)
        self.k_proj = nn.Linear(width, self.groups * self.size, bias=biased)
        self.v_proj = nn.Linear(width, self.groups * self.size, bias=biased)
        self.o_proj = nn.Linear(self.heads * self.size, width, bias=biased and not c["output_plain"])
        self.norms = bool(c["head_norms"])
        if self.norms:
            self.q_norm, self.k_norm = RMSNorm(self.size, eps), RMSNorm(self.size, eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (p(x).view(rows, length, -1, self.size) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.norms:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        q, k = _turned(q, cos, sin), _turned(k, cos, sin)
        mixed = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout, is_causal=True, enable_gqa=self.groups < self.heads
        )
        result: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1).contiguous())
        return result


class GatedMLP(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        width, inner, biased = c["hidden_size"], c["intermediate_size"], bool(c["mlp_bias"])
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=biased) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=biased)
        self.act = _activation(c["hidden_act"])

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return result


class DecoderLayer(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        width, eps = c["hidden_size"], c["rms_norm_eps"]
        self.self_attn, self.mlp = Attention(c), GatedMLP(c)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(width, eps), RMSNorm(width, eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class Decoder(nn.Module):
    """Token embeddings, layers, a last norm."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(DecoderLayer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.size = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        angles = torch.arange(ids.shape[1])[:, None] / 10000.0 ** (torch.arange(self.size) / self.size)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        result: Tensor = self.norm(x)
        return result


class CausalLM(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.model = Decoder(c)
        self.lm_head = nn.Linear(c["hidden_size"], c["vocab_size"], bias=False)
        if c["tie_word_embeddings"]:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.model(ids))
        return logits


# ---------------------------------------------------------------------- GPT-2


class Conv1D(nn.Module):
    """A linear layer whose weight is (in, out), as GPT-2 has it."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(into, out)), nn.Parameter(torch.empty(out))

    def forward(self, x: Tensor) -> Tensor:
        made = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return made.view(*x.shape[:-1], -1)


class GPT2Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads, self.dropped = c["n_head"], c["attn_pdrop"]
        self.c_attn, self.c_proj = Conv1D(c["n_embd"], 3 * c["n_embd"]), Conv1D(c["n_embd"], c["n_embd"])
        self.resid_dropout = nn.Dropout(c["resid_pdrop"])

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, -1).transpose(1, 2)
            for part in self.c_attn(x).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropped, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(rows, length, width).contiguous()
        result: Tensor = self.resid_dropout(self.c_proj(mixed))
        return result


class GPT2MLP(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        inner = c.get("n_inner") or 4 * c["n_embd"]
        self.c_fc, self.c_proj = Conv1D(c["n_embd"], inner), Conv1D(inner, c["n_embd"])
        self.act, self.dropout = _activation(c["activation_function"]), nn.Dropout(c["resid_pdrop"])

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.dropout(self.c_proj(self.act(self.c_fc(x))))
        return result


class GPT2Block(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = (nn.LayerNorm(c["n_embd"], eps=c["layer_norm_epsilon"]) for _ in range(2))
        self.attn, self.mlp = GPT2Attention(c), GPT2MLP(c)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        result: Tensor = x + self.mlp(self.ln_2(x))
        return result


class GPT2Decoder(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.wte = nn.Embedding(c["vocab_size"], c["n_embd"])
        self.wpe = nn.Embedding(c["n_positions"], c["n_embd"])
        self.drop = nn.Dropout(c["embd_pdrop"])
        self.h = nn.ModuleList(GPT2Block(c) for _ in range(c["n_layer"]))
        self.ln_f = nn.LayerNorm(c["n_embd"], eps=c["layer_norm_epsilon"])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.wte(ids) + self.wpe(torch.arange(ids.shape[1])[None]))
        for block in self.h:
            x = block(x)
        result: Tensor = self.ln_f(x)
        return result


class GPT2(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.transformer = GPT2Decoder(c)
        self.lm_head = nn.Linear(c["n_embd"], c["vocab_size"], bias=False)
        if c["tie_word_embeddings"]:
            self.lm_head.weight = self.transformer.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.transformer(ids))
        return logits


# ---------------------------------------------------------------------- BERT and RoBERTa


class BertEmbeddings(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        width = c["hidden_size"]
        self.word_embeddings = nn.Embedding(c["vocab_size"], width)
        self.position_embeddings = nn.Embedding(c["max_position_embeddings"], width)
        self.token_type_embeddings = nn.Embedding(c["type_vocab_size"], width)
        self.LayerNorm = nn.LayerNorm(width, eps=c["layer_norm_eps"])
        self.dropout = nn.Dropout(c["hidden_dropout_prob"])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.word_embeddings(ids) + self.token_type_embeddings(torch.zeros_like(ids))
        x = x + self.position_embeddings(torch.arange(ids.shape[1])[None])
        result: Tensor = self.dropout(self.LayerNorm(x))
        return result


class BertLayer(nn.Module):
    """Attention and MLP, a norm behind each."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        width, inner, eps = c["hidden_size"], c["intermediate_size"], c["layer_norm_eps"]
        self.heads, self.dropped = c["num_attention_heads"], c["attention_probs_dropout_prob"]
        self.query, self.key, self.value, self.dense = (nn.Linear(width, width) for _ in range(4))
        self.attention_norm, self.output_norm = (nn.LayerNorm(width, eps=eps) for _ in range(2))
        self.intermediate, self.output = nn.Linear(width, inner), nn.Linear(inner, width)
        self.dropout, self.act = nn.Dropout(c["hidden_dropout_prob"]), _activation(c["hidden_act"])

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            p(x).view(rows, length, self.heads, -1).transpose(1, 2)
            for p in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropped)
        mixed = mixed.transpose(1, 2).reshape(rows, length, width)
        x = self.attention_norm(self.dropout(self.dense(mixed)) + x)
        result: Tensor = self.output_norm(self.dropout(self.output(self.act(self.intermediate(x)))) + x)
        return result


class Bert(nn.Module):
    """BERT, with the head that fills masked words in."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        width = c["hidden_size"]
        self.embeddings = BertEmbeddings(c)
        self.layer = nn.ModuleList(BertLayer(c) for _ in range(c["num_hidden_layers"]))
        self.transform, self.norm = nn.Linear(width, width), nn.LayerNorm(width, eps=c["layer_norm_eps"])
        self.decoder = nn.Linear(width, c["vocab_size"])
        if c["tie_word_embeddings"]:
            self.decoder.weight = self.embeddings.word_embeddings.weight
        self.act = _activation(c["hidden_act"])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embeddings(ids)
        for layer in self.layer:
            x = layer(x)
        logits: Tensor = self.decoder(self.norm(self.act(self.transform(x))))
        return logits


# ---------------------------------------------------------------------- what configs leave out

_LLAMA: Config = {
    "attention_bias": False,
    "output_plain": False,
    "mlp_bias": False,
    "head_norms": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_GPT2: Config = {
    "activation_function": "gelu_new",
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "resid_pdrop": 0.1,
    "layer_norm_epsilon": 1e-5,
    "n_positions": 1024,
    "tie_word_embeddings": True,
}
_BERT: Config = {
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "tie_word_embeddings": True,
}
_GEMMA: Config = {"hidden_act": "gelu_pytorch_tanh", "head_dim": 256, "tie_word_embeddings": True}
# What builds it, what its configs leave out, and the class of transformers that it is.
_FAMILIES: dict[str, tuple[Callable[[Config], nn.Module], Config, str]] = {
    "bert": (Bert, _BERT, "BertForMaskedLM"),
    "gemma": (CausalLM, {**_LLAMA, **_GEMMA}, "GemmaForCausalLM"),
    "gpt2": (GPT2, _GPT2, "GPT2LMHeadModel"),
    "llama": (CausalLM, _LLAMA, "LlamaForCausalLM"),
    "mistral": (CausalLM, _LLAMA, "MistralForCausalLM"),
    "qwen2": (CausalLM, {**_LLAMA, "attention_bias": True, "output_plain": True}, "Qwen2ForCausalLM"),
    "qwen3": (CausalLM, {**_LLAMA, "head_norms": True, "head_dim": 128}, "Qwen3ForCausalLM"),
    "roberta": (
        Bert,
        {**_BERT, "max_position_embeddings": 514, "type_vocab_size": 1},
        "RobertaForMaskedLM",
    ),
}
