"""Configurations of other libraries, and the options of `shard` that mean the same: DeepSpeed's JSON, and the
YAML of Accelerate that asks for DeepSpeed or FSDP. Neither library is needed."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from zeroshard.compress import Int4, Int8
from zeroshard.errors import OptionError, did_you_mean
from zeroshard.options import Offload, Options, Precision

Config = Mapping[str, Any]

log = logging.getLogger("zeroshard")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ZERO = "zero_optimization"
#: What only says how DeepSpeed does it, or what is so here in any case. A key ends in ".*" with all below it.
_NOT_NEEDED = _words(
    """
    steps_per_print wall_clock_breakdown memory_breakdown dump_state prescale_gradients
    gradient_predivide_factor zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    disable_allgather fp32_allreduce aio.* tensorboard.* wandb.* comet.* csv_monitor.* comms_logger.*
    flops_profiler.* timers.* nebula.* checkpoint.* autotuning.* dataloader_drop_last compile.*
    seq_parallel_communication_data_type use_data_before_expert_parallel_ communication_data_type
    data_types.grad_accum_dtype zero_optimization.stage gradient_clipping bf16.enabled bfloat16.enabled
    fp16.enabled bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states
    bf16.immediate_grad_update bf16.check_grad_overflow fp16.auto_cast fp16.loss_scale
    fp16.initial_scale_power fp16.loss_scale_window fp16.hysteresis fp16.min_loss_scale
    fp16.consecutive_hysteresis fp16.fp16_master_weights_and_grads
    """
) | {
    f"{_ZERO}.{name}"
    for name in _words(
        """
    allgather_partitions allgather_bucket_size overlap_comm reduce_scatter contiguous_gradients
    round_robin_gradients sub_group_size stage3_max_live_parameters stage3_max_reuse_distance
    stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold
    stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
    stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params
    stage3_allgather_sequential use_all_reduce_for_fetch_params use_multi_rank_bucket_allreduce
    load_from_fp32_weights elastic_checkpoint ignore_unused_parameters legacy_stage1
    fast_sharding_for_leaf_module module_granularity_threshold memory_efficient_linear
    override_module_apply log_trace_cache_warnings param_persistence_threshold
    model_persistence_threshold max_live_parameters max_reuse_distance prefetch_bucket_size
    gather_16bit_weights_on_model_save pipeline_loading_checkpoint enable_sanity_checks
    zero_quantized_nontrainable_weights mics_hierarchical_params_gather reduce_bucket_size
    zero_quantized_weights zero_quantized_gradients zero_hpz_partition_size leaf_module.*
    offload_param.device offload_param.nvme_path offload_param.buffer_count offload_param.buffer_size
    offload_param.max_in_cpu offload_param.pin_memory offload_optimizer.device
    offload_optimizer.nvme_path offload_optimizer.buffer_count offload_optimizer.pin_memory
    offload_optimizer.pipeline_read offload_optimizer.pipeline_write offload_optimizer.pipeline
    offload_optimizer.fast_init offload_optimizer.super_offload offload_optimizer.cpuadam_cores_perc
    cpu_offload cpu_offload_params cpu_offload_use_pin_memory
    """
    )
}
#: What belongs to the loop, and what to write there.
_LOOP = {
    "train_batch_size": "ranks × the loader's batch_size × micro-batches of a step",
    "train_micro_batch_size_per_gpu": "the loader's batch_size",
    "gradient_accumulation_steps": "`with run.no_sync():` around all micro-batches of a step but the last",
    "optimizer.*": "an optimizer of torch.optim, passed to zs.shard()",
    "scheduler.*": "a scheduler of torch.optim.lr_scheduler, stepped after optimizer.step()",
    "activation_checkpointing.*": "recompute=True, or torch.utils.checkpoint as it is",
    "torch_autocast.*": 'torch.autocast around forward, or precision="bf16"',
    "seed": "torch.manual_seed()",
}
#: What has no equivalent, and values of it that ask for nothing.
_NONE: tuple[Any, ...] = (None, False, 0, 1, "none", [], {})
_WITHOUT = {
    "sparse_gradients": "compress={'*embed*': zs.Rows()} sends the rows of an embedding that were used",
    "amp.*": 'precision="bf16" or "fp16" takes its place',
    "data_efficiency.*": "the loader's affair",
    "curriculum_learning.*": "the loader's affair",
    "elasticity.*": "zeroshard run --ranks 1:4 --max-restarts 3 --resume ckpt",
    "compression_training.*": "",
    "progressive_layer_drop.*": "",
    "eigenvalue.*": "",
    "sparse_attention.*": "",
    "hybrid_engine.*": "",
    "tensor_parallel.*": "one way of dividing is known here, over data-parallel ranks",
    "autotp_size": "one way of dividing is known here, over data-parallel ranks",
    "pipeline.*": "one way of dividing is known here, over data-parallel ranks",
    "sequence_parallel_size": "one way of dividing is known here, over data-parallel ranks",
    "weight_quantization.*": "",
    "graph_harvesting": "",
    f"{_ZERO}.mics_shard_size": "ranks shard over all of them, or over group=",
    f"{_ZERO}.zenflow.*": 'offload=zs.Offload("host") updates on the host while backward goes on, exactly',
    f"{_ZERO}.offload_optimizer.ratio": 'zs.Offload("auto", device_bytes=...) fills the device first',
}
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "bfp16": "bfloat16"}
_WIDTH = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass
class Converted:
    """Options for `shard`, what the loop does itself, and what of a configuration has no equivalent."""

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    loop: list[str] = field(default_factory=list)
    not_needed: list[str] = field(default_factory=list)
    without: list[str] = field(default_factory=list)

    def text(self) -> str:
        """As `zeroshard convert` prints it."""
        parts = [call(self.options)]
        for title, lines in (
            ("In the loop", self.loop),
            ("Not needed", [", ".join(self.not_needed)] if self.not_needed else []),
            ("Without an equivalent", self.without),
        ):
            if lines:
                parts.append("\n".join([f"{title}:", *(f"  {line}" for line in lines)]))
        return "\n\n".join(parts)


def from_deepspeed(config: str | Path | Config, **auto: Any) -> dict[str, Any]:
    """The options of `shard` for a configuration of DeepSpeed's, a file or what is in it. What stands there
    as ``"auto"`` is asked for by name, such as ``gradient_clipping=1.0`` or ``bf16=True``.

    A key that DeepSpeed does not have, or that asks for what has no equivalent, is an error. `zeroshard
    convert FILE` shows all of it, and what belongs to the loop.

    >>> import zeroshard as zs
    >>> config = {"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0, "bf16": {"enabled": "auto"}}
    >>> zs.from_deepspeed(config, bf16=True)
    {'stage': 2, 'precision': 'bf16', 'clip_norm': 1.0}
    """
    converted = deepspeed(read(config), auto)
    if converted.without:
        raise OptionError(f"from_deepspeed(): there is no equivalent of {converted.without[0]}.")
    if converted.loop:
        log.warning("from_deepspeed(): left to the loop: %s", "; ".join(converted.loop))
    return converted.options


def read(config: str | Path | Config) -> Config:
    """A configuration, from a file if it is one."""
    if isinstance(config, Mapping):
        return config
    path = Path(config)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} cannot be read as a configuration: {error}") from None
    try:
        told = json.loads(text) if path.suffix == ".json" else _yaml(text)
    except ValueError as error:
        raise OptionError(f"{path} is no configuration: {error}") from None
    if not isinstance(told, dict):
        raise OptionError(f"{path} holds no names with values, as a configuration does.")
    return told


def _yaml(text: str) -> Any:
    try:
        import yaml  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise OptionError(
            "reading YAML needs the package yaml: pip install pyyaml (it comes with accelerate)."
        ) from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def converted(config: Config) -> Converted:
    """Of whatever library it is."""
    if "fsdp_config" in config or "deepspeed_config" in config or "distributed_type" in config:
        return accelerate(config)
    return deepspeed(config, {}, ask=False)


# ---- DeepSpeed ----


def deepspeed(config: Config, auto: Mapping[str, Any], ask: bool = True) -> Converted:
    """A configuration of DeepSpeed's. With `ask`, an ``"auto"`` that nothing is said about is an error."""
    flat = dict(_flattened(config))
    result = Converted("DeepSpeed")
    used = _file_away(flat, result)
    asked = _Asked(flat, dict(auto), ask, result)
    result.options.update((name, value) for name, value in _options(asked) if value is not None)
    Options(**result.options)  # what contradicts itself is told here
    unknown = asked.auto.keys() - asked.taken
    if unknown:
        known = sorted({_word(key) for key in asked.read if flat[key] == "auto"})
        raise OptionError(
            f'from_deepspeed(): {sorted(unknown)[0]}= stands for no "auto" of the configuration, which are '
            f"{', '.join(known) or 'none'}."
        )
    result.not_needed.extend(key for key in used if key not in asked.read)
    return result


def _flattened(config: Config, above: str = "") -> Iterator[tuple[str, Any]]:
    """Names with dots; what is below a name that is known with all below it stays together."""
    for name, value in config.items():
        key = f"{above}{name}"
        together = f"{key}.*" in _NOT_NEEDED or f"{key}.*" in _LOOP or f"{key}.*" in _WITHOUT
        if isinstance(value, Mapping) and value and not together:
            yield from _flattened(value, f"{key}.")
        else:
            yield key, value


def _file_away(flat: Config, result: Converted) -> list[str]:
    """What the loop does, what has no equivalent, and the rest, which is known; all else is an error."""
    used, every = [], {*_NOT_NEEDED, *_LOOP, *_WITHOUT}
    for key, value in flat.items():
        name = key if key in every else f"{key}.*"
        if value == {} and any(known.startswith(f"{key}.") for known in every):
            continue
        if name not in every:
            near = did_you_mean(key, [known.removesuffix(".*") for known in every])
            raise OptionError(f"DeepSpeed has no {key!r}, which the configuration sets to {value!r}.{near}")
        if name in _LOOP:
            if value not in ("auto", 1) and not _off(value):
                result.loop.append(f"{key}={_brief(value)}: {_LOOP[name]}")
        elif name in _WITHOUT:
            if value not in _NONE and not _off(value):
                why = _WITHOUT[name]
                result.without.append(f"{key}={value!r}{': ' + why if why else ''}")
        else:
            used.append(key)
    return used


def _brief(value: Any) -> str:
    """A value; of a section its type, which an optimizer or a scheduler has."""
    return str(value.get("type", "...")) if isinstance(value, Mapping) else repr(value)


def _off(value: Any) -> bool:
    """A section that says that it is not enabled."""
    return isinstance(value, Mapping) and value.get("enabled") is False


def _word(key: str) -> str:
    """By which keyword an ``"auto"`` is asked for."""
    return key.removesuffix(".enabled").rpartition(".")[2]


class _Asked:
    """The values of a configuration, each looked at once."""

    def __init__(self, flat: Config, auto: dict[str, Any], ask: bool, result: Converted) -> None:
        self.flat, self.auto, self.ask, self.result = flat, auto, ask, result
        self.read, self.taken = set[str](), set[str]()

    def __call__(self, key: str, default: Any = None, needed: bool = True) -> Any:
        """The value of a key; of an ``"auto"`` what was said about it."""
        value = self.flat.get(key, default)
        if key in self.flat:
            self.read.add(key)
        if value != "auto":
            return value
        name = _word(key)
        if name in self.auto:
            self.taken.add(name)
            return self.auto[name]
        if needed and self.ask:
            raise OptionError(
                f'the configuration says {key}="auto", which is for the loop to say: pass {name}= to '
                "from_deepspeed()."
            )
        if needed:
            self.result.loop.append(f'{key}="auto": what the loop says, or from_deepspeed(..., {name}=...)')
        return default


def _options(asked: _Asked) -> Iterator[tuple[str, Any]]:
    stage = asked(f"{_ZERO}.stage", 0)
    yield "stage", stage
    precision, bytes_each = _precision(asked)
    yield "precision", precision
    bucket = asked(f"{_ZERO}.reduce_bucket_size", needed=False)
    yield "bucket_bytes", int(bucket) * bytes_each if bucket is not None else None
    yield "offload", _offload(asked)
    yield "clip_norm", asked("gradient_clipping") or None
    if asked(f"{_ZERO}.zero_quantized_gradients"):
        yield "compress", Int4()
    if asked(f"{_ZERO}.zero_quantized_weights"):
        yield "gather", Int8()
    inside = asked(f"{_ZERO}.zero_hpz_partition_size", 1, needed=False)
    if stage == 3 and inside > 1:
        yield "node_cache", True
        yield "ranks_per_node", inside


def _precision(asked: _Asked) -> tuple[str | Precision | None, int]:
    """The precision, and the bytes of a gradient's element."""
    names = ("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16")
    chosen = list(dict.fromkeys(name for key, name in names if asked(f"{key}.enabled")))
    if len(chosen) > 1:
        raise OptionError("the configuration enables bf16 and fp16 at once: drop one of them.")
    sent, landed = asked("communication_data_type"), asked("data_types.grad_accum_dtype")
    for key, value in (("communication_data_type", sent), ("data_types.grad_accum_dtype", landed)):
        if value is not None and value not in _DTYPES:
            raise OptionError(f"{key}={value!r} is not one of {', '.join(_DTYPES)}.")
    if not chosen:
        return None, 4
    if chosen[0] == "fp16":
        asked.result.loop.append("fp16: scaler = torch.amp.GradScaler(), around backward and the step")
    width = _WIDTH[chosen[0]]
    if sent in (None, chosen[0]) and landed in (None, chosen[0]):
        return chosen[0], width
    reduce, grad = (_DTYPES[name] if name else None for name in (sent, landed))
    return Precision(_DTYPES[chosen[0]], reduce=reduce, grad=grad), width


def _offload(asked: _Asked) -> Offload | None:
    tiers = {"none": "device", "cpu": "host", "nvme": "disk"}
    places, path = {}, None
    for which, old in (("optimizer", "cpu_offload"), ("param", "cpu_offload_params")):
        device = asked(f"{_ZERO}.offload_{which}.device", "cpu" if asked(f"{_ZERO}.{old}") else "none")
        device = "none" if device is None else device
        if device not in tiers:
            raise OptionError(f"{_ZERO}.offload_{which}.device={device!r} is not one of {', '.join(tiers)}.")
        places[which] = tiers[device]
        path = asked(f"{_ZERO}.offload_{which}.nvme_path", needed=False) or path
    if set(places.values()) == {"device"}:
        return None
    return Offload(
        places["optimizer"],  # type: ignore[arg-type]
        places["param"],  # type: ignore[arg-type]
        path=path if "disk" in places.values() else None,
    )


# ---- Accelerate ----

_LAUNCHER = _words(
    """
    compute_environment debug distributed_type downcast_bf16 enable_cpu_affinity machine_rank
    main_process_ip main_process_port main_training_function num_machines num_processes rdzv_backend
    same_network tpu_env tpu_use_cluster tpu_use_sudo tpu_name tpu_zone commands command_file gpu_ids
    use_cpu mixed_precision dynamo_config mpirun_config ipex_config deepspeed_config fsdp_config
    tpu_config
    """
)
_ENGINE = _words(
    """
    deepspeed_config_file zero_stage gradient_accumulation_steps gradient_clipping
    offload_optimizer_device offload_param_device offload_optimizer_nvme_path offload_param_nvme_path
    zero3_init_flag zero3_save_16bit_model deepspeed_multinode_launcher deepspeed_hostfile
    deepspeed_exclusion_filter deepspeed_inclusion_filter deepspeed_moe_layer_cls_names
    """
)
_FSDP = _words(
    """
    version sharding_strategy reshard_after_forward offload_params cpu_offload auto_wrap_policy
    transformer_layer_cls_to_wrap min_num_params backward_prefetch forward_prefetch state_dict_type
    use_orig_params cpu_ram_efficient_loading sync_module_states limit_all_gathers
    activation_checkpointing
    """
)
_STAGES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "1": 3, "2": 2, "3": 0, "TRUE": 3, "FALSE": 2}


def accelerate(config: Config) -> Converted:
    """A file of `accelerate config`."""
    kind = str(config.get("distributed_type", "NO"))
    if kind == "DEEPSPEED":
        result = _deepspeed_of(config)
    else:
        result = fsdp(config.get("fsdp_config", {})) if kind == "FSDP" else Converted(kind, {"stage": 0})
    for key, value in config.items():
        if key not in _LAUNCHER and value not in _NONE:
            result.without.append(f"{key}={value!r}")
    mixed = str(config.get("mixed_precision", "no"))
    if mixed in ("bf16", "fp16"):
        result.options.setdefault("precision", mixed)
    elif mixed != "no":
        result.without.append(f"mixed_precision={mixed!r}: bf16 and fp16 are known here")
    ranks = config.get("num_processes")
    result.loop.append(f"started by: zeroshard run --ranks {ranks or 'N'} train.py")
    return result


def _deepspeed_of(config: Config) -> Converted:
    engine = config.get("deepspeed_config", {})
    _refuse_unknown(engine, _ENGINE, "deepspeed_config")
    if file := engine.get("deepspeed_config_file"):
        return deepspeed(read(file), {}, ask=False)
    zero: dict[str, Any] = {"stage": engine.get("zero_stage", 2)}
    for which in ("optimizer", "param"):
        device = engine.get(f"offload_{which}_device")
        zero[f"offload_{which}"] = {
            "device": device or "none",
            "nvme_path": engine.get(f"offload_{which}_nvme_path"),
        }
    same = {
        k: engine[k]
        for k in ("gradient_accumulation_steps", "gradient_clipping")
        if engine.get(k) not in (None, "auto")
    }
    return deepspeed({_ZERO: zero, **same}, {}, ask=False)


def fsdp(section: Config, where: str = "fsdp_config") -> Converted:
    """A section `fsdp_config` of Accelerate's, or of Trainer's arguments, where names have no prefix."""
    told = {name.removeprefix("fsdp_"): value for name, value in section.items()}
    _refuse_unknown(told, _FSDP, where)
    result = Converted("FSDP")
    strategy = told.get("sharding_strategy", told.get("reshard_after_forward", "FULL_SHARD"))
    stage = _STAGES.get(str(strategy).upper())
    if stage is None:
        result.without.append(f"{strategy}: ranks shard over all of them, or over group=")
    options: dict[str, Any] = {"stage": 3 if stage is None else stage}
    if _true(told.get("offload_params")) or _true(told.get("cpu_offload")):
        options["offload"] = Offload("host", "host")
    if _true(told.get("activation_checkpointing")):
        options["recompute"] = True
    if str(told.get("auto_wrap_policy")).upper() == "NO_WRAP":
        options["units"] = "none"
    result.options.update(options)
    read = ("sharding_strategy", "offload_params", "cpu_offload", "activation_checkpointing", "version")
    result.not_needed.extend(name for name in told if name not in (*read, "reshard_after_forward"))
    return result


def _true(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "yes")


def _refuse_unknown(section: Iterable[str], known: Iterable[str], where: str) -> None:
    for name in section:
        if name not in known:
            raise OptionError(f"Accelerate has no {name!r} in {where}.{did_you_mean(name, known)}")


# ---- shown ----


def call(options: Mapping[str, Any]) -> str:
    """The call of `zs.shard` with these options."""
    lines = [f"    {name}={shown(value)}," for name, value in options.items()]
    return "\n".join(["run = zs.shard(", "    model,", "    optimizer,", *lines, ")"])


def shown(value: Any) -> str:
    """A value as it is typed."""
    if not is_dataclass(value) or isinstance(value, type):
        return json.dumps(value) if isinstance(value, str) else repr(value)
    told = []
    for number, each in enumerate(fields(value)):
        own = getattr(value, each.name)
        if own != each.default or (number == 0 and isinstance(own, str)):  # of an Offload, a Precision
            told.append(shown(own) if number == 0 else f"{each.name}={shown(own)}")
    return f"zs.{type(value).__name__}({', '.join(told)})"
