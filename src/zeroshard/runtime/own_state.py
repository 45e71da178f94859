"""Gives one rank by itself the whole state of a model: where each rank computes with whole parameters in the
masters' own precision, and has them when a step ends.

[Note: a state of one rank alone] Updated parameters come with the next forward, so the state after a step
takes all ranks. `keep` lets each rank hand on its rows at the end of every step instead. Then all that a
rank needs is there, and `read` asks nobody to come. The same bytes travel, unless a loop writes parameters
between the step and the forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zeroshard.errors import StateError
from zeroshard.sync_policies import EveryStep

from .full_state import standing, take_to_host
from .runtime import Runtime
from .saves import CheckpointMethods


def keep(run: CheckpointMethods) -> bool:
    """Let every rank have the whole state at the end of each step from now on. False where it has not: at
    stage 3, and where it computes with something else than the masters."""
    runtime = run._open()
    if not _has_all(runtime):
        return False
    runtime.hands_on_in_step = True
    runtime.publish()
    return True


def read(run: CheckpointMethods) -> dict[str, Any]:
    """`model.state_dict()` as this rank has it, whole and in host memory, with its own buffers. A rank may
    call it alone, once `keep` has said that it can."""
    runtime = run._open()
    if not runtime.hands_on_in_step:
        raise StateError(
            "the state of one rank alone is read of a run that was told to keep it: call "
            "zeroshard.extend.keep_own_state(run) on every rank, after zs.shard()."
        )
    runtime.settle()
    runtime.notice()
    with torch.no_grad(), runtime.kept_full():
        whole = {
            id(param): nn.Parameter(param.unsharded_param.detach().to("cpu", copy=True), param.trainable)
            for param in runtime.params
        }
    with standing(runtime.params, whole):
        state: dict[str, Any] = run._keeper.model.state_dict()
    take_to_host(state, {parameter.data_ptr() for parameter in whole.values()}, None)
    return state


def _has_all(runtime: Runtime) -> bool:
    groups = [group for unit in runtime.units for group in unit.gather_groups]
    return (
        runtime.host_updates is None
        and isinstance(runtime.options.sync, EveryStep)
        and all(group.rests.resident and group.memory.coded is None for group in groups)
        and all(p.master is None and p.local.dtype == p.unsharded_param.dtype for p in runtime.params)
    )
