"""Ends a run: a plain model and plain optimizers, whole on every rank, and nothing that outlives it.

[Note: what lives on] The handle does, in whatever variable it is, and so may a loss whose graph leads to the
runtime. So a runtime that has ended lets go of all that it owns, and a backward through a graph of its time
is an error."""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass

from zeroshard.params.sharded_param import ShardedParam, ShardedTensors
from zeroshard.sizes import show_bytes

from .hooks import Hooks
from .optimizer_state import give_back, not_sent
from .runtime import Runtime
from .snapshot import refuse_untimely

log = logging.getLogger("zeroshard")


def refuse_close(runtime: Runtime, gathered: bool) -> None:
    """Raise on every rank, with one text, where something would be lost. `gathered`: whole parameters stand
    in the model. Every rank calls it."""
    runtime.notice()
    if runtime.sharded_tensors.mesh is not None:
        runtime.publish()  # a peer may still be in a forward that this rank did not make
    told = runtime.transport.exchange(_why_not(runtime, gathered), "run.close()")
    refuse_untimely("close", [None if one is None else str(one) for one in told])


def _why_not(runtime: Runtime, gathered: bool) -> str | None:
    if gathered:
        return (
            "inside `with run.gathered():` the model holds parameters that are taken out when the block "
            "ends. Call run.close() after the block; it gives whole parameters, too"
        )
    if runtime.unsynced:
        return (
            "gradients accumulated under run.no_sync() are on each rank alone, and would be lost. Run the "
            "last micro-batch's backward outside of the block first, or drop them with zero_grad()"
        )
    unsent = not_sent(runtime.updates) if runtime.sharded_tensors.mesh is not None else None
    return unsent or _no_room(runtime)


def _no_room(runtime: Runtime) -> str | None:
    """Where the device has no room for all that a plain model and its optimizers are."""
    most, used = _device_memory(runtime.transport.device)
    added = _plain_bytes(runtime)
    if most is None or used + added <= most:
        return None
    return (
        f"it puts the model and its optimizers' state on {runtime.transport.device} whole: "
        f"{show_bytes(added)} more than the {show_bytes(used)} in use, where {show_bytes(most)} may be. "
        "Nothing has changed. Save with run.save() or run.full_state_dict(), and let the process end as it is"
    )


def _device_memory(device: torch.device) -> tuple[int | None, int]:
    """How many bytes of the device this process may use, if that is known, and how many it does."""
    if device.type != "cuda":
        return None, 0
    read = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    share = float(read(device)) if read is not None else 1.0
    total = torch.cuda.get_device_properties(device).total_memory
    return int(share * total), torch.cuda.memory_allocated(device)


def _plain_bytes(runtime: Runtime) -> int:
    """What is made anew: whole parameters with their gradients, and state that was not on the device."""
    whole = runtime.sharded_tensors.mesh is not None
    total = 0
    for param in runtime.params:
        copies = 1 + (param.sharded_param.grad is not None)
        total += copies * param.slot.numel * param.wide.itemsize
    for group in runtime.host.parts if runtime.host is not None else ():
        numel = sum(param.slot.numel for param in group.params)
        total += len(group.moments) * numel * torch.float32.itemsize
    if whole:
        slots = {id(param.sharded_param): param.slot.numel for param in runtime.params}
        for update in runtime.updates:
            for sharded_param, state in update.optimizer.state.items():
                kept = [t for t in state.values() if isinstance(t, Tensor) and t.dim() and t.is_cuda]
                total += sum(slots.get(id(sharded_param), 0) * t.element_size() for t in kept)
    return total


def end(runtime: Runtime, hooks: Hooks) -> None:
    """Leave the model and the optimizers as if they had never been sharded. Every rank calls it."""
    _tell(runtime)
    runtime.sync_strategy.wind_up()
    if runtime.host_updates is not None:
        runtime.host_updates.bring_dropped(last=True)
    runtime.close()
    hooks.remove()
    successors = _plain_parameters(runtime)
    for update in runtime.updates:
        if runtime.host is not None:
            runtime.host.give_back(update.optimizer)
        give_back(update, successors, runtime.transport, runtime.collect)
    if runtime.host is not None:
        runtime.host.close()
    runtime.sharded_tensors.readings.close()
    runtime.transport.close()
    _let_go(runtime)


def _tell(runtime: Runtime) -> None:
    """What a plain loop may not expect, and nobody can mend here."""
    if runtime.transport.rank != 0:
        return
    if runtime.transport.size > 1 and runtime.sync_strategy.untimely() is not None:
        log.warning(
            "run.close() while the ranks' parameters differ: each rank keeps its own. Call "
            "run.synchronise() before it for one model."
        )
    if runtime.host is not None and runtime.host.updates is not None and runtime.host.updates.pending:
        log.warning(
            "run.close() between backward and optimizer.step(): with offload and clip_norm the gradients "
            "are with the host, and are dropped (with clip_norm=math.inf it has applied them already). Call "
            "it after the step."
        )


def _plain_parameters(runtime: Runtime) -> dict[int, nn.Parameter]:
    """By id(sharded parameter): what stands in the model from now on."""
    successors: dict[int, nn.Parameter] = {}
    for param, used in zip(runtime.params, _used(runtime), strict=True):
        whole = (
            _divided(runtime, param, used) if runtime.sharded_tensors.mesh is not None else _undivided(param)
        )
        successors[id(param.sharded_param)] = whole
        param.stand(whole)
    return successors


def _used(runtime: Runtime) -> list[bool]:
    """Which parameters have a gradient on any rank. A loop may have dropped some on one rank alone, and all
    have to take part in putting one together."""
    mine = [param.sharded_param.grad is not None for param in runtime.params]
    if runtime.sharded_tensors.mesh is None:
        return mine
    told: list[list[bool]] = runtime.transport.exchange(mine, "run.close()")  # type: ignore[assignment]
    return [any(of_ranks) for of_ranks in zip(*told, strict=True)]


def _divided(runtime: Runtime, param: ShardedParam, used: bool) -> nn.Parameter:
    """From the rows of all ranks."""

    def whole(rows: Tensor) -> Tensor:
        return runtime.collect(rows, param.slot).to(param.unsharded_param.device, param.wide)

    made = nn.Parameter(whole(param.read_master()), requires_grad=param.trainable)
    if used:
        grad = param.sharded_param.grad
        rows = (
            torch.zeros_like(param.local)
            if grad is None
            else ShardedTensors.local(grad).to(param.local.device)
        )
        made.grad = whole(rows.to(param.wide))
    return made


def _undivided(param: ShardedParam) -> nn.Parameter:
    """What is whole here, in memory of its own: sharded parameters and gradients may be views of buffers."""
    whole, grad, device = param.sharded_param, param.sharded_param.grad, param.unsharded_param.device
    whole.grad = None
    if param.master is not None:
        whole = nn.Parameter(param.read_master().to(device), requires_grad=param.trainable)
    else:
        whole.data = whole.data.to(device, param.wide, copy=True)
    whole.grad = None if grad is None else grad.to(device, whole.dtype, copy=True)
    return whole


def _let_go(runtime: Runtime) -> None:
    """See [Note: what lives on]. What travels still is dropped unread, since peers may have ended."""
    with DisableTorchFunctionSubclass():
        for param in runtime.params:
            # Graphs hold it, and may run through others before it can say that they must not.
            unsharded_param = param.unsharded_param
            blank = torch.full((), math.nan if unsharded_param.is_floating_point() else 0).to(unsharded_param)
            unsharded_param.data = blank.expand(unsharded_param.shape)
    runtime.let_go()
