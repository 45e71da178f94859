"""Decides on which device a run computes: where the model is, or where it is asked for."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zeroshard.errors import OptionError

log = logging.getLogger("zeroshard")


def devices_of(model: nn.Module) -> set[torch.device]:
    """The devices that the parameters are on; the meta device is none."""
    return {p.device for p in model.parameters() if not p.is_meta}


def device_asked(given: object) -> torch.device | None:
    """What `device=` was given, as a device that torch has."""
    if given is None:
        return None
    try:
        device = torch.device(given)  # type: ignore[call-overload]
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise OptionError(f'device={given!r}: pass "cuda", "cuda:1" or "cpu".')
    assert isinstance(device, torch.device)
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise OptionError(
            f"device={given!r}: torch sees {count} GPUs here. Drop device= to train where the model is."
        )
    return torch.device("cpu") if device.type == "cpu" else device


def device_for(model: nn.Module, wanted: torch.device | None, asked: Mapping[str, Any]) -> torch.device:
    """The device that the ranks compute on. That which was asked for; else the model's, or the current one
    where it is on the meta device. A model on the CPU whose plan is for a GPU goes there: `asked`, of a plan,
    has a limit, and batches that are on a GPU, or none."""
    if wanted is not None:
        return _current() if wanted == torch.device("cuda") else wanted
    here = next(iter(devices_of(model)), None)
    if here is None:
        return _current() if torch.cuda.is_available() else torch.device("cpu")
    if here.type == "cpu" and asked and torch.cuda.is_available():
        batches = {x.device for x in tree_leaves(asked.get("batch")) if isinstance(x, Tensor)}
        on_gpu = next((device for device in batches if device.type == "cuda"), None)
        if on_gpu is not None or torch.device("cpu") not in batches:
            there = on_gpu or _current()
            log.info('the limit is of %s, so the model moves there; device="cpu" keeps it here', there)
            return there
    return here


def tell_of_idle_gpus(here: torch.device, wanted: torch.device | None, ranks: int) -> None:
    """A model was left on the CPU where every rank could have a GPU, and nobody has said that it is meant."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if here.type == "cpu" and wanted is None and count >= (int(local) if local.isdecimal() else ranks):
        log.warning(
            'the model is on the CPU and trains there, beside %d GPU%s: zs.shard(..., device="cuda") takes '
            'it to one per rank; device="cpu" says that it is meant.',
            count,
            "s" * (count > 1),
        )


def _current() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
