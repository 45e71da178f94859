"""Shows optimizer state as others see it: DTensors in `state_dict()`, rows when loaded, whole when closed.

State tensors that have the shape of a parameter's local rows are rows; all others (Adam's `step`, Adafactor's
factors of a whole tensor) are taken as they are."""

from __future__ import annotations

import base64
import io
import pickle
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Adagrad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zeroshard.comm import Transport
from zeroshard.layout.sharding import ShardSpec
from zeroshard.optim.optimizer_kinds import ElsewhereState, rows_suffice
from zeroshard.optim.sharded_optimizer import ShardedOptimizer
from zeroshard.params.sharded_param import ShardedParam, ShardedTensors

Collect = Callable[[Tensor, ShardSpec], Tensor]


def renew_state(update: ShardedOptimizer) -> None:
    """Adagrad makes its state when it is built, for whole parameters. Those that it updates get one for the
    rows, where they rest."""
    optimizer = update.optimizer
    if type(optimizer) is not Adagrad:
        return
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for sharded_param in group["params"]:
            param = update.params[id(sharded_param)]
            if param.trainable:
                optimizer.state[sharded_param] = _first_state(group, param.local, param.master_dtype)


def _first_state(group: dict[str, Any], like: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Adagrad's, before its first step."""
    first = group["initial_accumulator_value"]
    value = complex(first, first) if like.is_complex() else first
    return {
        "step": torch.tensor(0.0, device=like.device if group["fused"] else None),
        "sum": torch.full(like.shape, value, dtype=dtype, device=like.device),
    }


def show_state(update: ShardedOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """After `optimizer.state_dict()`: rows appear as DTensors with their global shape, never as an
    anonymous half."""
    sharded_tensors = update.sharded_tensors
    if update.whole is not None:
        return _with_whole(update, state_dict, update.whole)
    if sharded_tensors.mesh is None:
        return state_dict

    def show(value: Tensor, slot: ShardSpec, key: str) -> Tensor:
        if tuple(value.shape) != slot.local_shape(sharded_tensors.rank):
            return value
        if slot.split == "whole" and not rows_suffice(update.optimizer):  # what else would all ranks look for
            key += f" (which rank {slot.owner} alone has: run.full_optimizer_state_dict() gives it to all)"
        return sharded_tensors.show(value, slot, what=key)

    return _map_state(update, state_dict, show)


def _with_whole(
    update: ShardedOptimizer, state_dict: dict[str, Any], whole: Mapping[int, dict[str, Any]]
) -> dict[str, Any]:
    """With the whole state of each parameter of ours, by id of its sharded parameter, where it has any."""
    order = [p for group in update.optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    result = dict(state_dict, state=dict(state_dict["state"]))
    for number, sharded_param in zip(numbers, order, strict=True):
        if id(sharded_param) in update.params:
            result["state"].pop(number, None)
            if whole.get(id(sharded_param)):
                result["state"][number] = whole[id(sharded_param)]
    return result


def take_state(update: ShardedOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Before `optimizer.load_state_dict()`: this rank's rows of what was given, whole or as DTensors, once it
    is known to fit (`loading`)."""
    rank, apart = update.sharded_tensors.rank, update.sharded_tensors.mesh is not None

    def take(value: Tensor, slot: ShardSpec, key: str) -> Tensor:
        if tuple(value.shape) != slot.shape:
            return value
        local = ShardedTensors.local(value)
        if local is not value or slot.split == "copy" or not apart:
            return local
        start, stop = slot.rows(rank)
        if dense(value):
            return value[start:stop].clone()
        # What wraps other tensors may not know how to be cut at no row, nor to be copied.
        return value if stop - start == len(value) else torch.zeros(slot.local_shape(rank))

    return _map_state(update, _without_others(update, state_dict), take)


def _without_others(update: ShardedOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Without the state of parameters that lie whole on another rank, of which nothing is kept here."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    params = [p for group in update.optimizer.param_groups for p in group["params"]]
    others = {number for number, param in zip(numbers, params, strict=True) if update.is_elsewhere(param)}
    return dict(state_dict, state={n: own for n, own in state_dict["state"].items() if n not in others})


def widen_state(update: ShardedOptimizer, given: dict[str, Any]) -> None:
    """After `optimizer.load_state_dict(given)`, which has cast state on the device to the dtype of the
    sharded parameters: that of a split master is fp32."""
    optimizer = update.optimizer
    keys = [key for group in given["param_groups"] for key in group["params"]]
    sharded_params = [p for group in optimizer.param_groups for p in group["params"]]
    for key, sharded_param in zip(keys, sharded_params, strict=True):
        param, state = update.params.get(id(sharded_param)), optimizer.state.get(sharded_param, {})
        if param is None or param.master is None:
            continue
        for name, value in given["state"].get(key, {}).items():
            cast = state.get(name)
            if name != "step" and isinstance(cast, Tensor) and cast.dtype == param.local.dtype:
                state[name] = value.to(param.local.device, param.master_dtype)


def _map_state(
    update: ShardedOptimizer, state_dict: dict[str, Any], change: Callable[[Tensor, ShardSpec, str], Tensor]
) -> dict[str, Any]:
    order = [p for group in update.optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    held = state_dict["state"].items()
    result = dict(
        state_dict, state={key: own for key, own in held if own or not isinstance(own, ElsewhereState)}
    )
    for number, sharded_param in zip(numbers, order, strict=True):
        param, entries = update.params.get(id(sharded_param)), result["state"].get(number)
        if param is not None and isinstance(entries, Mapping):
            result["state"][number] = {
                key: change(value, param.slot, key) if _may_be_rows(key, value) else value
                for key, value in entries.items()
            }
    return result


def _may_be_rows(key: str, value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and key != "step"


def not_sent(updates: Sequence[ShardedOptimizer]) -> str | None:
    """Why state cannot be put together from the ranks: sparse rows, objects that cannot be pickled."""
    for update in updates:
        for param in update.params.values():
            for key, value in update.optimizer.state.get(param.sharded_param, {}).items():
                name, place = type(update.optimizer).__name__, f"`{key}` of `{param.name}`"
                if isinstance(value, Tensor):
                    rows = tuple(value.shape) == param.slot.local_shape(update.sharded_tensors.rank)
                    if rows and param.slot.by_rows and not dense(value):
                        kind = type(value).__name__ if value.layout is torch.strided else "sparse tensor"
                        return (
                            f"{name} keeps the rows of a {kind} ({place}), and only dense ones can be "
                            "put together. Keep it dense, or drop the state: optimizer.state.clear()"
                        )
                    if not is_traceable_wrapper_subclass(value):
                        continue
                try:
                    pack(value)
                except Exception as error:
                    return (
                        f"{name} keeps a {type(value).__name__} ({place}) that cannot be sent to other ranks "
                        f"({type(error).__name__}: {error}). Make it one that pickle takes, or drop the "
                        "state: optimizer.state.clear()"
                    )
    return None


class _Packer(pickle.Pickler):
    """Takes dense tensors out of whatever holds them, to be sent apart."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Tensor) or not dense(obj):
            return None
        self.tensors.append(obj.detach())
        return len(self.tensors) - 1

    def reducer_override(self, obj: Any) -> Any:
        """Sparse tensors go whole: their parts must not be taken for rows, whatever their shapes. Others are
        made of plain ones."""
        if not isinstance(obj, Tensor):
            return NotImplemented
        if is_traceable_wrapper_subclass(obj):
            names, context = obj.__tensor_flatten__()
            parts = {name: getattr(obj, name) for name in names}
            return _wrapped, (type(obj), parts, context, obj.shape, obj.stride())
        file = io.BytesIO()
        torch.save(obj.detach().cpu(), file)
        return _opened, (file.getvalue(), obj.device.type)


def _wrapped(
    kind: Any, parts: dict[str, Tensor], context: Any, shape: torch.Size, stride: tuple[int, ...]
) -> Tensor:
    return cast(Tensor, kind.__tensor_unflatten__(parts, context, shape, stride))


def _opened(data: bytes, device: str) -> Tensor:
    tensor = torch.load(io.BytesIO(data), weights_only=True)
    assert isinstance(tensor, Tensor)
    return tensor.to(device)


class _Unpacker(pickle.Unpickler):
    """Puts tensors back into what held them."""

    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> Tensor:
        return self._tensors[int(pid)]


def pack(value: object) -> tuple[str, list[Tensor]]:
    """What holds tensors (a list, a sparse tensor, any object), as text without them, and they themselves."""
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(value)
    return base64.b64encode(file.getvalue()).decode(), packer.tensors


def unpack(text: str, tensors: Sequence[Tensor]) -> Any:
    """What `pack` was given, around these tensors. From a rank of this job, which runs the same program."""
    return _Unpacker(io.BytesIO(base64.b64decode(text)), tensors).load()


def dense(tensor: Tensor) -> bool:
    """Whether it is one piece of memory, and no wrapper around others."""
    return tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)


def _plain(value: object) -> bool:
    """Whether a value can be stored as JSON and read back unchanged."""
    return value is None or type(value) in (bool, int, float, str)


def give_back(
    update: ShardedOptimizer, successors: dict[int, nn.Parameter], transport: Transport, collect: Collect
) -> None:
    """Leave the optimizer as if it had never been sharded: plain parameters, whole state. Every rank calls
    it."""
    if update.sharded_tensors.mesh is not None:
        old = update.optimizer.state
        params = list(update.params.values())
        described = transport.exchange(
            [describe_state(old.get(p.sharded_param, {}), p.slot, transport.rank) for p in params],
            "run.close()",
        )
        update.optimizer.state = defaultdict(dict)
        for index, param in enumerate(params):
            told: list[Any] = [rank[index] for rank in described]  # type: ignore[index]
            state = whole_state(
                old.get(param.sharded_param, {}),
                param,
                told,
                transport,
                collect,
                param.unsharded_param.device,
            )
            if state:
                update.optimizer.state[successors[id(param.sharded_param)]] = state
    else:
        held = update.optimizer.state.items()
        update.optimizer.state = defaultdict(
            dict, {successors.get(id(sharded_param), sharded_param): kept for sharded_param, kept in held}
        )
    update.adopt(successors)
    if type(update.optimizer) is Adagrad:
        for group in update.optimizer.param_groups:
            for whole in group["params"]:
                if whole not in update.optimizer.state:
                    update.optimizer.state[whole] = _first_state(group, whole, whole.dtype)


def describe_state(state: dict[str, Any], slot: ShardSpec, rank: int) -> dict[str, list[Any]]:
    """Key → what it is (rows, tensor, value, or what holds tensors) and what of each tensor enough for a rank
    that has none of it to take part."""
    result: dict[str, list[Any]] = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and dense(value):
            result[key] = _described(value, slot, rank)
        elif _plain(value):
            result[key] = ["value", value]
        else:
            text, tensors = pack(value)
            result[key] = ["packed", text, [_described(tensor, slot, rank) for tensor in tensors]]
    return result


def _described(value: Tensor, slot: ShardSpec, rank: int) -> list[Any]:
    """Its shape, dtype and kind of device."""
    rows = value.dim() > 0 and slot.by_rows and tuple(value.shape) == slot.local_shape(rank)
    dtype = str(value.dtype).removeprefix("torch.")
    return ["rows" if rows else "tensor", list(value.shape), dtype, value.device.type]


@dataclass(frozen=True)
class _Source:
    """Where whole tensors of one parameter's state come from, and where they rest then."""

    param: ShardedParam
    rank: int
    transport: Transport
    collect: Collect
    rests: torch.device

    def whole(self, mine: Tensor | None, what: str, shape: list[int], dtype_name: str, device: str) -> Tensor:
        """One tensor, of which this rank may have rows, all or nothing. Every rank calls it."""
        dtype, slot = getattr(torch, dtype_name), self.param.slot
        if what == "rows":
            if mine is None:
                mine = torch.empty(slot.local_shape(self.transport.rank), dtype=dtype)
            return self.collect(mine.to(self.param.local.device), slot).to(self.rests)
        # Where the source has it: a transport may send host and device memory by different ways.
        there = torch.device("cpu") if device == "cpu" else self.transport.device
        if mine is not None and list(mine.shape) == shape:
            tensor = mine.to(there, copy=True)
        else:
            tensor = torch.empty(shape, dtype=dtype, device=there)
        self.transport.broadcast("state", [tensor], self.rank)
        return tensor


def whole_state(
    state: dict[str, Any],
    param: ShardedParam,
    told: Sequence[Any],
    transport: Transport,
    collect: Collect,
    rests: torch.device,
) -> dict[str, Any]:
    """The whole state of one parameter, from the ranks that hold rows of it, and where it `rests` then.
    `told`: what each rank describes. Every rank calls it."""
    holders = [rank for rank, keys in enumerate(told) if keys]
    if param.slot.split == "whole" and param.slot.owner in holders:
        holders = [param.slot.owner]  # others may have a state without rows
    if not holders:
        return {}
    source = _Source(param, holders[0], transport, collect, rests)
    whole: dict[str, Any] = {}
    for key, (what, *facts) in told[source.rank].items():
        mine = state.get(key)
        if what == "value":
            whole[key] = facts[0]
        elif what == "packed":
            text, described = facts
            own: Sequence[Tensor | None] = [] if mine is None else pack(mine)[1]
            own = own if len(own) == len(described) else [None] * len(described)
            whole[key] = unpack(text, [source.whole(t, *d) for t, d in zip(own, described, strict=True)])
        else:
            whole[key] = source.whole(mine, what, *facts)
    return whole
