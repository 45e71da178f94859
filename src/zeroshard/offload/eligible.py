"""Whose update the native kernels run, when it may begin in backward, and options that need them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from zeroshard.errors import OptionError
from zeroshard.kernels import host_update_of, is_registered
from zeroshard.optim.optimizer_kinds import rows_suffice
from zeroshard.optim.probe import follows
from zeroshard.options import Offload, Options

from .group import StateForm


def form_of(
    offload: Offload, optimizer: Optimizer, group: dict[str, Any], dtypes: tuple[torch.dtype, torch.dtype]
) -> StateForm | None:
    """The state as the native kernels have it, where they run this optimizer."""
    compute, master = dtypes
    update = host_update_of(optimizer)
    if update is None or master != torch.float32:
        return None
    splits = offload.master == "split" and compute == torch.bfloat16  # not what precision.keep names
    return StateForm(update, update.arrays(group), splits, offload.moments == "int8" and update.coded)


def no_kernel(name: str, optimizer: Optimizer, master: torch.dtype) -> str:
    """Why a parameter's state cannot rest on the disk, and what to type."""
    if host_update_of(optimizer) is None:
        why = f"they know Adam, AdamW and SGD, not {type(optimizer).__name__}"
    else:
        why = f"its master is {master}, not fp32"
    return (
        f'state on the disk is updated by the native kernels, and for `{name}` {why}: pass optimizer="host".'
    )


def overlaps(options: Options) -> bool:
    """Whether updates may begin in backward: `clip_norm` promises one step for each, and with fp16 the loss
    scaler looks at gradients first."""
    return options.clip_norm is not None and not scaled(options)


def scaled(options: Options) -> bool:
    """fp16 gradients are unscaled by GradScaler between backward and step, so nothing can be updated
    before."""
    return options.precision is not None and options.precision.compute == "float16"


def check_kernels(offload: Offload, options: Options, optimizers: Sequence[Optimizer]) -> None:
    """Options that could not take effect, and updates that would have another."""
    for optimizer in optimizers:
        update = host_update_of(optimizer)
        if update is not None and is_registered(optimizer) and not follows(optimizer, update):
            name = type(optimizer).__name__
            raise OptionError(
                f"the host's update of {name} is registered as {update.__name__}, and computes something "
                f"else than {name}.step() with the options of this one: weights part in a few steps. "
                "Build it without the options that the update does not know, or call "
                "zeroshard.extend.register_host_update() with an update that does the same."
            )
    wanted = [
        word
        for word, asked in (
            ('master="split"', offload.master == "split"),
            ('moments="int8"', offload.moments == "int8"),
        )
        if asked
    ]
    if not wanted:
        return
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if offload.moments == "int8" and any(group.get("amsgrad") for group in groups):
        raise OptionError(
            'Offload(moments="int8") and amsgrad=True do not go together: the largest second moments are '
            "kept beside second moments in fp32. Drop one of the two."
        )
    if offload.optimizer != "device":
        _check_host(f"Offload({' and '.join(wanted)})", offload, options, optimizers)
    elif not any(map(rows_suffice, optimizers)):
        raise OptionError(
            'Offload(master="split") on the device is for element-wise optimizers such as AdamW; this run '
            f"has {_names(optimizers)}."
        )
    precision = options.precision
    if offload.master == "split" and (
        precision is None or (precision.compute, precision.master) != ("bfloat16", "float32")
    ):
        compute = precision.compute if precision is not None else "the model's own dtype"
        raise OptionError(
            'Offload(master="split") needs bf16 compute weights and an fp32 master; this run computes in '
            f'{compute}. Pass precision="bf16", or master="plain".'
        )


def _check_host(what: str, offload: Offload, options: Options, optimizers: Sequence[Optimizer]) -> None:
    """What the overlapped update on the host needs."""
    updates = [update for update in map(host_update_of, optimizers) if update is not None]
    if options.clip_norm is None:
        raise OptionError(
            f"{what} is done by the overlapped host update, which needs clip_norm= (math.inf to clip "
            "nothing)."
        )
    if scaled(options):
        raise OptionError(
            f"{what} is done by the overlapped host update, which fp16 with its loss scaling rules out: pass "
            'precision="bf16".'
        )
    if not updates:
        raise OptionError(
            f"{what} is done by the overlapped host update, which knows Adam, AdamW and SGD; this run has "
            f"{_names(optimizers)}. zeroshard.extend.register_host_update() makes another one known."
        )
    if offload.moments == "int8" and not any(update.coded for update in updates):
        raise OptionError(
            f'Offload(moments="int8") is for Adam and AdamW, and this run has {_names(optimizers)} alone: '
            "drop it."
        )


def _names(optimizers: Sequence[Optimizer]) -> str:
    return ", ".join(sorted({type(o).__name__ for o in optimizers})) or "no optimizer"
