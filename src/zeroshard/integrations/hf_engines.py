"""Arguments of Trainer's that ask for DeepSpeed or FSDP: what they mean here. Neither is imported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import TrainingArguments

import zeroshard as zs
from zeroshard.extend import convert_deepspeed, convert_fsdp, read_config

from .accelerate import refuse_other_engines

_PLAIN = TrainingArguments.__post_init__
#: On arguments: which engine was asked for, and its configuration as it was given.
_TAKEN = "_zeroshard_engine"
_SCHEDULERS = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_LEGACY = {"full_shard": "FULL_SHARD", "shard_grad_op": "SHARD_GRAD_OP", "no_shard": "NO_SHARD"}


def take_engines() -> None:
    """Let arguments that are made from now on keep what they ask of other engines for us."""
    TrainingArguments.__post_init__ = _take


def leave_engines() -> None:
    """Arguments ask DeepSpeed and FSDP again."""
    TrainingArguments.__post_init__ = _PLAIN


def _take(self: Any) -> None:
    refuse_other_engines({})
    told: tuple[str, Any] | None = None
    if self.deepspeed:
        told = "deepspeed", self.deepspeed
    if self.fsdp:
        if told is not None:
            raise zs.OptionError("TrainingArguments have deepspeed= and fsdp=: drop one of them.")
        told = "fsdp", (self.fsdp, self.fsdp_config)
    known = type(self).__dataclass_fields__
    for name in ("deepspeed", "fsdp", "fsdp_config"):
        setattr(self, name, known[name].default if told else getattr(self, name))
    _PLAIN(self)
    setattr(self, _TAKEN, told)


def options_of(arguments: Any) -> dict[str, Any]:
    """The options that arguments ask for in another engine's words."""
    if arguments.deepspeed or arguments.fsdp:
        name = "deepspeed" if arguments.deepspeed else "fsdp"
        raise zs.OptionError(
            f"these TrainingArguments have {name}= and were made before zeroshard.integrations.hf.enable(): "
            f"call it before them, and {name}= is translated; or drop {name}=."
        )
    told = getattr(arguments, _TAKEN, None)
    if told is None:
        return {}
    kind, config = told
    if kind == "deepspeed":
        return _of_deepspeed(read_config(config), arguments)
    return _of_fsdp(*config)


def merged(options: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """Options of both; what they say differently is an error."""
    for name in options.keys() & told.keys():
        if options[name] != told[name]:
            raise zs.OptionError(
                f"{name}={options[name]!r}, and the deepspeed= or fsdp= of TrainingArguments means "
                f"{name}={told[name]!r}: drop one of them."
            )
    return {**told, **options}


def _of_deepspeed(config: Mapping[str, Any], arguments: Any) -> dict[str, Any]:
    known = {"bf16": arguments.bf16, "fp16": arguments.fp16, "gradient_clipping": arguments.max_grad_norm}
    auto = {name: value for name, value in known.items() if _is_auto(config.get(name))}
    result = convert_deepspeed(config, auto)
    if result.without:
        raise zs.OptionError(f"deepspeed={{...}}: there is no equivalent of {result.without[0]}.")
    for name, theirs, argument, ours in _compared(config, arguments):
        if theirs not in (None, "auto") and theirs != ours:
            raise zs.OptionError(
                f"deepspeed= says {name}={theirs!r}, and TrainingArguments {argument}={ours!r}: make them "
                'equal, or say "auto" there.'
            )
    return result.options


def _is_auto(value: Any) -> bool:
    return (value.get("enabled") if isinstance(value, Mapping) else value) == "auto"


def _compared(config: Mapping[str, Any], arguments: Any) -> Iterator[tuple[str, Any, str, Any]]:
    """What both say: its name there, its value there, its name and value in the arguments."""
    batch, accumulated = arguments.train_batch_size, arguments.gradient_accumulation_steps
    rows = batch * accumulated * arguments.world_size
    each = "per_device_train_batch_size"
    yield "train_micro_batch_size_per_gpu", config.get("train_micro_batch_size_per_gpu"), each, batch
    yield "train_batch_size", config.get("train_batch_size"), "rows of a step", rows
    name = "gradient_accumulation_steps"
    yield name, config.get(name), name, accumulated
    yield (
        "gradient_clipping",
        config.get("gradient_clipping") or None,
        "max_grad_norm",
        arguments.max_grad_norm,
    )
    optimizer = config.get("optimizer", {})
    if optimizer.get("type") not in (None, "Adam", "AdamW"):
        yield "optimizer.type", optimizer["type"], "optim", arguments.optim
    told = optimizer.get("params", {})
    yield "lr", told.get("lr"), "learning_rate", arguments.learning_rate
    yield "eps", told.get("eps"), "adam_epsilon", arguments.adam_epsilon
    yield "weight_decay", told.get("weight_decay"), "weight_decay", arguments.weight_decay
    betas = told.get("betas")
    own = [arguments.adam_beta1, arguments.adam_beta2]
    yield "betas", list(betas) if isinstance(betas, (list, tuple)) else betas, "adam_beta1, adam_beta2", own
    scheduler = config.get("scheduler", {})
    theirs, kind = scheduler.get("type"), str(getattr(arguments.lr_scheduler_type, "value", ""))
    yield "scheduler.type", _SCHEDULERS.get(theirs, theirs), "lr_scheduler_type", kind
    steps = scheduler.get("params", {}).get("warmup_num_steps")
    yield "warmup_num_steps", steps, "warmup_steps", arguments.warmup_steps


def _of_fsdp(wanted: Any, config: Any) -> dict[str, Any]:
    """Of `fsdp=True` and `fsdp_config=`, or of the words of old, `"full_shard auto_wrap offload"`."""
    section = dict(read_config(config)) if config else {}
    words = wanted.split() if isinstance(wanted, str) else [] if wanted is True else [str(w) for w in wanted]
    for word in words:
        name = getattr(word, "value", word)
        if name == "offload":
            section["offload_params"] = True
        elif name in _LEGACY:
            section["sharding_strategy"] = _LEGACY[name]
        elif name != "auto_wrap":
            raise zs.OptionError(f"fsdp={wanted!r}: there is no equivalent of {name!r} here; pass stage=.")
    for name in ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings"):
        if section.pop(name, None):
            raise zs.OptionError(f"fsdp_config has {name}, which is for TPUs: drop it.")
    result = convert_fsdp(section)
    if result.without:
        raise zs.OptionError(f"fsdp_config: there is no equivalent of {result.without[0]}.")
    return result.options
