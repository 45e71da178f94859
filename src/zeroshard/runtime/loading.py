"""Checks what `load_state_dict` is given before anything changes, and collects whole tensors.

State of another shape would be torch's error in a later step, or nothing at all where it happens to be that
of a rank's rows; and a fused kernel writes past the end of what is too short. Of optimizers that are not
torch's own it is not known what shapes their entries have, beside that of the parameter.

Whole tensors are put together from the rows of all ranks for reading, closing and state dicts, never on the
path of a training step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adafactor, Optimizer

from zeroshard.comm import Transport, TransportBuffer
from zeroshard.errors import ModelError
from zeroshard.layout.sharding import ShardSpec
from zeroshard.optim.frozen_moments import KEY
from zeroshard.optim.sharded_optimizer import ShardedOptimizer
from zeroshard.params.sharded_param import ShardedParam, ShardedTensors


@torch.no_grad()
def collect(transport: Transport, local: Tensor, slot: ShardSpec) -> Tensor:
    """The whole tensor from every rank's rows; all ranks call it in the same order."""
    if slot.split == "copy" or transport.size == 1:
        return local.detach().clone()
    rank, size = transport.rank, transport.size
    full = torch.empty(slot.shape, dtype=local.dtype, device=local.device)
    transport_buffer: TransportBuffer = transport.allocate("collect", max(slot.held(rank), 1), local.dtype)
    transport_buffer.mine[: local.numel()].copy_(local.reshape(-1))
    flat = full.view(-1)
    cuts = [[(0, slot.held(r))] for r in range(size)]
    out = [[flat[slot.rows(r)[0] * slot.row : slot.rows(r)[1] * slot.row]] for r in range(size)]
    transport.barrier("collect")
    transport.gather("collect", f"collect/{slot.name}", transport_buffer, cuts, out).wait()
    transport.barrier("collected")
    transport.free(transport_buffer)
    return full


# Entries of torch's optimizers: those of the parameter's shape, and single numbers.
_WHOLE = frozenset(
    (
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", KEY),
        *("momentum_buffer", "square_avg", "grad_avg", "acc_delta", "sum", "variance"),
        *("prev", "step_size", "ax"),
    )
)
_SINGLE = frozenset(("step", "eta", "mu", "mu_product"))
_WHAT = "optimizer.load_state_dict()"


def refuse_state(update: ShardedOptimizer, state: Mapping[str, Any]) -> None:
    """Of an optimizer: raise where it does not fit the whole parameters."""
    optimizer = update.optimizer
    counts = [[len(group["params"]) for group in groups] for groups in _groups(optimizer, state)]
    if counts[0] != counts[1]:
        raise ModelError(
            f"{_WHAT}: the parameter groups of the given state have {_listed(counts[1])} parameters, and "
            f"those of {type(optimizer).__name__} {_listed(counts[0])}. Load what was saved with the same "
            "groups. Nothing was loaded."
        )
    sharded_params, keys = (
        [p for group in groups for p in group["params"]] for groups in _groups(optimizer, state)
    )
    for sharded_param, key in zip(sharded_params, keys, strict=True):
        param, entries = update.params.get(id(sharded_param)), state["state"].get(key)
        if param is None or not isinstance(entries, Mapping):
            continue
        for name, value in entries.items():
            if isinstance(value, Tensor):
                _refuse_shape(optimizer, param, name, value)
                _refuse_division(param, name, value, update.sharded_tensors.rank)


def _groups(optimizer: Optimizer, state: Mapping[str, Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    return optimizer.param_groups, state["param_groups"]


def _listed(counts: list[int]) -> str:
    return ", ".join(map(str, counts)) or "no"


def _refuse_shape(optimizer: Optimizer, param: ShardedParam, key: str, value: Tensor) -> None:
    found, slot = tuple(value.shape), param.slot
    expected = _expected(optimizer, key, slot.shape)
    fewer = slot.by_rows and _has_fewer_rows(found, slot.shape)
    if expected is None:  # it may be anything, but not what would be taken for rows from then on
        rows = fewer and any(found == slot.local_shape(rank) for rank in range(slot.world))
        fits = key == "step" or not rows
    else:
        fits = value.numel() == 1 if key in _SINGLE else found == expected
    if fits:
        return
    must = "a single number" if expected is not None and key in _SINGLE else f"{expected or slot.shape}"
    hint = "The state is of another model, or of the same parameters in another order."
    if fewer:
        hint = (
            "These may be the rows of one rank: load whole tensors, as plain PyTorch saves them and of which "
            "each rank takes its rows, or the DTensors of optimizer.state_dict()."
        )
    raise ModelError(
        f"{_WHAT}: `{key}` of `{param.name}` is {found} in the given state and must be {must}; the whole "
        f"parameter is {slot.shape}. {hint} Nothing was loaded."
    )


def _has_fewer_rows(found: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    return len(found) == len(whole) > 0 and found[1:] == whole[1:] and found[0] < whole[0]


def _expected(optimizer: Optimizer, key: str, whole: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of an entry for a whole parameter; None where that is not known: in an optimizer whose step
    is not torch's own, or where somebody has put an entry beside torch's."""
    if not type(optimizer).step.__module__.startswith("torch.optim."):
        return None
    if key in _SINGLE:
        return ()
    if isinstance(optimizer, Adafactor) and len(whole) > 1 and key in ("row_var", "col_var"):
        return (*whole[:-1], 1) if key == "row_var" else (*whole[:-2], 1, whole[-1])
    return whole if key in _WHOLE else None


def _refuse_division(param: ShardedParam, key: str, value: Tensor, rank: int) -> None:
    """Raises for a DTensor of the right shape that holds other rows than this rank owns."""
    if tuple(value.shape) == param.slot.shape and _divided_otherwise(param, value, rank):
        raise ModelError(f"{_WHAT}: `{key}` of `{param.name}` {_others(param, value, rank)}")


def _others(param: ShardedParam, value: Tensor, rank: int) -> str:
    """What rows are that are not this rank's, and what to load in their place."""
    told, (start, stop) = ShardedTensors.rows_of(value), param.slot.rows(rank)
    found = f"has {ShardedTensors.local(value).shape[0]} rows here"
    if told is not None:
        found = f"has rows {told[2]} to {told[3]} of rank {told[0]} of {told[1]}"
    return (
        f"{found}, and this is rank {rank} of {param.slot.world}, with rows {start} to {stop}. A file of "
        "rows (torch.save of a state_dict()) is for the rank that saved it, with as many ranks and the same "
        "split=. Load whole tensors: save run.full_state_dict(rank=0), called on every rank, or use "
        "run.save(folder) and run.load(folder). Nothing was loaded."
    )


def refuse_weights(
    params: Sequence[ShardedParam],
    names: Mapping[str, Sequence[str]],
    state: Mapping[str, Any],
    prefix: str,
    rank: int,
) -> None:
    """Of a model: raise where a tensor is of another shape, or rows are others than this run's. `names`: all
    that a parameter has."""
    for param in params:
        for name in names[param.name]:
            value = state.get(prefix + name)
            if isinstance(value, Tensor) and tuple(value.shape) != param.slot.shape:
                raise ModelError(
                    f"load_state_dict: `{name}` is {tuple(value.shape)} in the given state and "
                    f"{param.slot.shape} in the model. Nothing was loaded."
                )
            if isinstance(value, Tensor) and _divided_otherwise(param, value, rank):
                raise ModelError(f"load_state_dict: `{name}` {_others(param, value, rank)}")


def _divided_otherwise(param: ShardedParam, value: Tensor, rank: int) -> bool:
    local = ShardedTensors.local(value)
    if local is value:
        return False
    told, slot = ShardedTensors.rows_of(value), param.slot
    other = told is not None and slot.split != "copy" and told != (rank, slot.world, *slot.rows(rank))
    return other or tuple(local.shape) != slot.local_shape(rank)
