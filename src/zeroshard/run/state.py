"""Optimizer state as others see it: as DTensors in `state_dict()`, as this rank's rows when loaded, whole
when a run is closed.

State tensors that have the shape of a parameter's local rows are rows; all others (Adam's `step`, Adafactor's
factors of a whole tensor) are taken as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adagrad
from torch.utils._pytree import tree_leaves

from zeroshard.comm import Transport
from zeroshard.count.layout import Slot
from zeroshard.life.shard import Faces, Param
from zeroshard.life.step import Update

Collect = Callable[[Tensor, Slot], Tensor]


def renew_state(update: Update) -> None:
    """Adagrad makes its state when it is built, for whole parameters. Those that it updates get one for the
    rows, where they rest."""
    optimizer = update.optimizer
    if type(optimizer) is not Adagrad:
        return
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for home in group["params"]:
            param = update.params[id(home)]
            if param.trainable:
                optimizer.state[home] = _first_state(group, param.local, param.master_dtype)


def _first_state(group: dict[str, Any], like: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Adagrad's, before its first step."""
    first = group["initial_accumulator_value"]
    value = complex(first, first) if like.is_complex() else first
    return {
        "step": torch.tensor(0.0, device=like.device if group["fused"] else None),
        "sum": torch.full(like.shape, value, dtype=dtype, device=like.device),
    }


def show_state(update: Update, state_dict: dict[str, Any]) -> dict[str, Any]:
    """After `optimizer.state_dict()`: rows appear as DTensors with their global shape, never as an
    anonymous half."""
    faces = update.faces
    if faces.mesh is None:
        return state_dict

    def show(value: Tensor, slot: Slot, key: str) -> Tensor:
        rows = tuple(value.shape) == slot.local_shape(faces.rank)
        return faces.show(value, slot, what=key) if rows else value

    return _map_state(update, state_dict, show)


def take_state(update: Update, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Before `optimizer.load_state_dict()`: this rank's rows of what was given, whole or as DTensors, once it
    is known to fit (`loading`)."""
    rank, apart = update.faces.rank, update.faces.mesh is not None

    def take(value: Tensor, slot: Slot, key: str) -> Tensor:
        if tuple(value.shape) != slot.shape:
            return value
        local = Faces.local(value)
        if local is not value or slot.split == "copy" or not apart:
            return local
        start, stop = slot.rows(rank)
        return value[start:stop].clone()

    return _map_state(update, state_dict, take)


def widen_state(update: Update, given: dict[str, Any]) -> None:
    """After `optimizer.load_state_dict(given)`, which has cast state on the device to the dtype of the
    homes: that of a split master is fp32."""
    optimizer = update.optimizer
    keys = [key for group in given["param_groups"] for key in group["params"]]
    homes = [p for group in optimizer.param_groups for p in group["params"]]
    for key, home in zip(keys, homes, strict=True):
        param, state = update.params.get(id(home)), optimizer.state.get(home, {})
        if param is None or param.master is None:
            continue
        for name, value in given["state"].get(key, {}).items():
            cast = state.get(name)
            if name != "step" and isinstance(cast, Tensor) and cast.dtype == param.local.dtype:
                state[name] = value.to(param.local.device, param.master_dtype)


def _map_state(
    update: Update, state_dict: dict[str, Any], change: Callable[[Tensor, Slot, str], Tensor]
) -> dict[str, Any]:
    order = [p for group in update.optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    result = dict(state_dict, state=dict(state_dict["state"]))
    for number, home in zip(numbers, order, strict=True):
        param, entries = update.params.get(id(home)), result["state"].get(number)
        if param is not None and isinstance(entries, Mapping):
            result["state"][number] = {
                key: change(value, param.slot, key) if _may_be_rows(key, value) else value
                for key, value in entries.items()
            }
    return result


def _may_be_rows(key: str, value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and key != "step"


def nested(updates: Sequence[Update]) -> str | None:
    """Why state can be neither put together nor saved: tensors in lists and the like have no name."""
    for update in updates:
        for param in update.params.values():
            for key, value in update.optimizer.state.get(param.home, {}).items():
                if not isinstance(value, Tensor) and any(isinstance(x, Tensor) for x in tree_leaves(value)):
                    name, kind = type(update.optimizer).__name__, type(value).__name__
                    return (
                        f"{name} keeps tensors in a {kind} (`{key}` of `{param.name}`), and only those that "
                        "are entries of its state themselves can be put together from the ranks, or saved. "
                        "Give each an entry of its own, or drop them: optimizer.state.clear()"
                    )
    return None


def give_back(
    update: Update, successors: dict[int, nn.Parameter], transport: Transport, collect: Collect
) -> None:
    """Leave the optimizer as if it had never been sharded: plain parameters, whole state. Every rank calls
    it."""
    if update.faces.mesh is not None:
        old = update.optimizer.state
        params = list(update.params.values())
        described = transport.exchange(
            [_describe(old.get(p.home, {}), p.slot, transport.rank) for p in params], "run.close()"
        )
        update.optimizer.state = defaultdict(dict)
        for index, param in enumerate(params):
            told: list[Any] = [rank[index] for rank in described]  # type: ignore[index]
            state = _whole(old.get(param.home, {}), param, told, transport, collect)
            if state:
                update.optimizer.state[successors[id(param.home)]] = state
    else:
        held = update.optimizer.state.items()
        update.optimizer.state = defaultdict(
            dict, {successors.get(id(home), home): kept for home, kept in held}
        )
    update.adopt(successors)
    if type(update.optimizer) is Adagrad:
        for group in update.optimizer.param_groups:
            for whole in group["params"]:
                if whole not in update.optimizer.state:
                    update.optimizer.state[whole] = _first_state(group, whole, whole.dtype)


def _describe(state: dict[str, Any], slot: Slot, rank: int) -> dict[str, list[Any]]:
    """Key → what it is (rows, tensor, value), its shape, dtype and kind of device: enough for a rank that has
    none of it to take part."""
    result: dict[str, list[Any]] = {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            result[key] = ["value", value]
        else:
            rows = value.dim() > 0 and slot.by_rows and tuple(value.shape) == slot.local_shape(rank)
            result[key] = [
                "rows" if rows else "tensor",
                list(value.shape),
                str(value.dtype).removeprefix("torch."),
                value.device.type,
            ]
    return result


def _whole(
    state: dict[str, Any], param: Param, told: list[Any], transport: Transport, collect: Collect
) -> dict[str, Any]:
    """The whole state of one parameter, from the ranks that hold rows of it."""
    holders = [rank for rank, keys in enumerate(told) if keys]
    if param.slot.split == "whole" and param.slot.owner in holders:
        holders = [param.slot.owner]  # others may have a state without rows
    source = next(iter(holders), None)
    if source is None:
        return {}
    whole: dict[str, Any] = {}
    for key, (what, *facts) in told[source].items():
        if what == "value":
            whole[key] = facts[0]
            continue
        dtype = getattr(torch, facts[1])
        mine = state.get(key)
        if what == "rows":
            local = (
                mine if mine is not None else torch.empty(param.slot.local_shape(transport.rank), dtype=dtype)
            )
            whole[key] = collect(local.to(param.local.device), param.slot).to(param.leaf.device)
        else:
            # Where the source has it: a transport may send host and device memory by different ways.
            device = torch.device("cpu") if facts[2] == "cpu" else transport.device
            tensor = (
                mine.to(device, copy=True)
                if mine is not None and list(mine.shape) == facts[0]
                else torch.empty(facts[0], dtype=dtype, device=device)
            )
            transport.broadcast("state", [tensor], source)
            whole[key] = tensor
    return whole
