"""What torch's arguments become: options of `zs.shard`, nothing, or an error that says what to pass."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import zeroshard as zs
from zeroshard.integrations.options import check_options

log = logging.getLogger("zeroshard")

#: Torch's arguments behind `dim`, in torch's order.
_FURTHER = (
    "broadcast_buffers",
    "init_sync",
    "process_group",
    "bucket_cap_mb",
    "find_unused_parameters",
    "check_reduction",
    "gradient_as_bucket_view",
    "static_graph",
    "delay_all_reduce_named_params",
    "param_to_hook_all_reduce",
    "mixed_precision",
    "device_mesh",
    "skip_all_reduce_unused_params",
    "bucket_cap_mb_list",
    "batched_grad_copy",
    "forward_sync_buffers",
)
#: Those that change nothing here, whatever they are.
_IDLE = {
    "dim": "inputs are not split, as with one device in torch's",
    "init_sync": "ranks always begin with rank 0's values",
    "find_unused_parameters": "parameters that a forward does not use never keep a rank waiting",
    "check_reduction": "it has no meaning in torch's either",
    "gradient_as_bucket_view": "gradients are views of what arrives already",
    "static_graph": "nothing has to be known of the graph",
    "skip_all_reduce_unused_params": "a parameter that no rank uses keeps its gradient None",
    "bucket_cap_mb_list": "buckets have one size, bucket_cap_mb=",
    "batched_grad_copy": "gradients are copied in batches already",
}
_REFUSED = {
    "delay_all_reduce_named_params": "a gradient travels with its bucket; bucket_bytes= says how large it is",
    "param_to_hook_all_reduce": "a gradient travels with its bucket; bucket_bytes= says how large it is",
    "mixed_precision": 'pass precision="bf16", or precision=zs.Precision("bfloat16", reduce="float32")',
}
#: What does the work of torch's hooks, by how their names begin.
_INSTEAD = {
    "allreduce": "no hook, since gradients are averaged already",
    "noop": "sync=zs.Local(...), with which ranks train apart",
    "post_localSGD": "sync=zs.Local(...)",
    "fp16_compress": 'compress=zs.Cast("float16")',
    "bf16_compress": 'compress=zs.Cast("bfloat16")',
    "powerSGD": "compress=zs.LowRank(...)",
    "batched_powerSGD": "compress=zs.LowRank(...)",
}


@dataclass(frozen=True)
class Asked:
    """What a wrapper was asked for. `options`: those of `zs.shard`; `flags`: those of torch's that loops may
    read."""

    options: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, bool] = field(default_factory=dict)

    @classmethod
    def of(cls, further: Sequence[Any], keywords: Mapping[str, Any], dim: int) -> Asked:
        asked = _named(further, keywords, dim)
        options = {name: value for name, value in asked.items() if name not in _FURTHER}
        sync = asked.get("forward_sync_buffers")
        sync = asked.get("broadcast_buffers") if sync is None else sync
        translated = {
            "buffers": None if sync is None else "broadcast" if sync else "local",
            "bucket_bytes": _bucket_bytes(asked.get("bucket_cap_mb")),
            "group": group_of(asked),
        }
        for name, value in translated.items():
            if value is not None and options.get(name) not in (None, value):
                raise zs.OptionError(
                    f"{name}={options[name]!r} contradicts what torch's arguments say, {name}={value!r}: "
                    "pass one of them."
                )
            if value is not None:
                options[name] = value
        check_options(options)
        names = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph")
        flags = {name: bool(asked.get(name, False)) for name in names}
        flags["broadcast_buffers"] = flags["forward_sync_buffers"] = options.get("buffers") != "local"
        return cls(options, flags)


def _named(further: Sequence[Any], keywords: Mapping[str, Any], dim: int) -> dict[str, Any]:
    """All arguments by name, but for those that are refused; those without effect are said in the log."""
    if len(further) > len(_FURTHER):
        raise zs.OptionError(
            f"DistributedDataParallel() got {4 + len(further)} arguments without names: pass options by "
            "name, stage=3."
        )
    placed = dict(zip(_FURTHER, further, strict=False))
    twice = next((name for name in placed if name in keywords), None)
    if twice is not None:
        raise zs.OptionError(f"DistributedDataParallel() got {twice}= twice: by its place and by its name.")
    asked = {**placed, **keywords}
    for name, why in _REFUSED.items():
        if asked.get(name) is not None:
            raise zs.OptionError(f"DistributedDataParallel({name}=…) is not done here: {why}.")
    for name in (name for name in _IDLE if (dim if name == "dim" else asked.get(name))):
        log.info("DistributedDataParallel(%s=…) is without effect: %s", name, _IDLE[name])
    return asked


def _bucket_bytes(cap: Any) -> int | None:
    if cap is None:
        return None
    if not isinstance(cap, (int, float)) or isinstance(cap, bool) or cap <= 0:
        raise zs.OptionError(f"bucket_cap_mb={cap!r} is no number of MiB above zero.")
    return int(cap * 2**20)


def group_of(asked: Mapping[str, Any]) -> Any:
    """The process group that is asked for; None: that of all ranks."""
    mesh, group = asked.get("device_mesh"), asked.get("process_group")
    if mesh is None:
        return asked.get("group") if group is None else group
    if group is not None:
        raise zs.OptionError("process_group= and device_mesh= say the same: pass one of them.")
    if mesh.ndim != 1:
        raise zs.OptionError(
            f"device_mesh={mesh} has {mesh.ndim} dimensions, and batches are divided over one: pass that, "
            'mesh["dp"].'
        )
    return mesh.get_group()


def devices_of(
    module: nn.Module, device_ids: Sequence[int | torch.device] | None, output: int | torch.device | None
) -> tuple[list[torch.device] | None, torch.device | None]:
    """Where inputs go, and what torch's wrapper says of outputs."""
    if not device_ids and output is None:
        return None, None
    if device_ids and len(device_ids) > 1:
        raise zs.OptionError(
            f"device_ids={list(device_ids)}: a rank computes on one device. Start a rank for each."
        )
    where = {p.device.type for p in module.parameters()}
    if "cuda" not in where and not torch.cuda.is_available():
        log.info("device_ids= and output_device= are without effect: there is no GPU here")
        return None, None
    if where != {"cuda"}:
        raise zs.OptionError(
            f"device_ids={device_ids}, output_device={output}, and the model is on "
            f"{', '.join(sorted(where))}: move it first, model.to(device), or drop both."
        )
    chosen = [_cuda(device) for device in device_ids or ()]
    return chosen or None, _cuda(output) if output is not None else chosen[0]


def _cuda(device: int | torch.device) -> torch.device:
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def refuse_module(module: object) -> None:
    """What cannot be wrapped."""
    if not isinstance(module, nn.Module):
        raise zs.ModelError(f"DistributedDataParallel() takes a module first, and not {module!r}.")
    lazy = [n for n, p in module.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        raise zs.ModelError(
            f"`{lazy[0]}` is uninitialised (a lazy module). Run one forward pass before the wrapping."
        )
    if not any(p.requires_grad for p in module.parameters()):
        raise zs.ModelError(
            "DistributedDataParallel is not needed for a module without a parameter that requires a "
            "gradient: use it as it is, or divide it by zs.shard(model, stage=3)."
        )
    ignored = ignored_by(module)
    named = [name for name, _ in module.named_parameters() if name in ignored]
    if named:
        raise zs.ModelError(
            f"`{named[0]}` is among the parameters that torch's wrapper shall ignore, and every rank would "
            "train its own. Freeze it (requires_grad_(False)), or keep it outside of the model."
        )


def ignored_by(module: nn.Module) -> frozenset[str]:
    """Parameters and buffers that torch's wrapper was told to leave alone."""
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def refuse_hook(hook: object) -> zs.OptionError:
    """Of what travels here there are no hooks, but codecs."""
    name = getattr(hook, "__name__", str(hook))
    instead = next((word for known, word in _INSTEAD.items() if name.startswith(known)), "compress=zs.Int8()")
    return zs.OptionError(
        f"register_comm_hook({name}) is not done here: gradients go to the ranks that own their rows, "
        f"through codecs. Pass DistributedDataParallel(model, {instead}); a codec of your own is a subclass "
        "of zs.Codec."
    )
