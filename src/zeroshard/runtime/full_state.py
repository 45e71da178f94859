"""Gives and takes the whole state of a model or an optimizer, as plain PyTorch has it, on one rank or on all.

It is put together tensor by tensor in host memory, and loaded from there. `load_state_dict` takes whole
tensors, of which each rank keeps its rows, or the DTensors of a state dict; of the model, or of a module in
it.

What stands in the modules while `state_dict()` is asked are whole plain parameters, on the ranks that get
the state. So hooks, `_extra_state` and tied names are torch's own affair, and see what they would see in one
process.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from zeroshard.errors import ModelError, OptionError, RankError
from zeroshard.offload.group import OffloadGroup
from zeroshard.optim.sharded_optimizer import ShardedOptimizer
from zeroshard.params.sharded_param import ShardedParam, ShardedTensors, names_of

from .loading import refuse_weights
from .optimizer_state import dense, describe_state, whole_state
from .rank_agreement import together
from .runtime import Runtime
from .snapshot import OptimizerPlace, buffers_of, optimizer_places_of, refuse_untimely, untimely


class LoadedWeights:
    """Stands before and after the loads of one run. `hooks` registers both on every module, and torch calls
    them for modules inside of the one that is loaded, too. All is looked at before the first of them is
    loaded; each module's own parameters get their rows after hooks of the user, which may rename and compute.
    """

    def __init__(self, model: nn.Module, runtime: Runtime) -> None:
        self._model, self._runtime = model, runtime
        self._loaded: nn.Module | None = None  # the load under way is of this one

    @cached_property
    def _own(self) -> dict[int, list[tuple[str, ShardedParam]]]:
        """By id of a module: what stands in it. Few runs ever load a state dict."""
        own: dict[int, list[tuple[str, ShardedParam]]] = {}
        for param in self._runtime.params:
            for place in param.places:
                own.setdefault(id(place.module), []).append((place.attribute, param))
        return own

    def before(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
    ) -> None:
        """Check every shape, then hand each sharded parameter what it is made of. Every rank calls it."""
        if not prefix or module is self._model:  # the model itself may be a part of another one
            self._look(module, state, prefix)
        for attribute, param in self._own.get(id(module), ()):
            if _stands(param):
                metadata["assign_to_params_buffers"] = False  # sharded parameters stay what they are
                value = state.get(prefix + attribute)
                if isinstance(value, Tensor) and tuple(value.shape) == param.slot.shape:
                    state[prefix + attribute] = _taken(param, value, self._runtime.sharded_tensors)

    def _look(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        runtime = self._runtime
        names = {n: every for n, every in names_of(module, runtime.params).items() if every}
        params = [param for param in runtime.params if param.name in names and _stands(param)]
        if not params:
            return
        self._loaded = module
        runtime.settle()
        look = partial(refuse_weights, params, names, state, prefix, runtime.sharded_tensors.rank)
        together(runtime.transport, "model.load_state_dict()", look)
        runtime.before_change()
        runtime.transport.fence()

    def after(self, module: nn.Module, keys: Any) -> None:
        """All is copied: the next forward uses it."""
        if module is self._loaded:
            self._loaded = None
            self._runtime.changed()


def _stands(param: ShardedParam) -> bool:
    """Whether its sharded parameter is in its places. Inside `run.gathered()` whole tensors are, and take
    whole ones."""
    return all(place.module._parameters.get(place.attribute) is param.sharded_param for place in param.places)


def _taken(param: ShardedParam, value: Tensor, sharded_tensors: ShardedTensors) -> Tensor:
    """What the sharded parameter is loaded with. A master that is split or on the disk takes it in full
    precision, and its sharded parameter is loaded with itself."""
    rows = ShardedTensors.local(value)
    whole = rows is value and sharded_tensors.mesh is not None
    if whole and param.slot.split != "copy":
        start, stop = param.slot.rows(sharded_tensors.rank)
        rows = value[start:stop]
    if param.master is not None:
        param.write_master(rows)
        return param.sharded_param.detach()
    return (
        sharded_tensors.show(rows.to(param.local), param.slot) if sharded_tensors.mesh is not None else value
    )


_HOST = torch.device("cpu")
_Kept = Callable[[Any, Tensor], Tensor]


class _SentApart(NamedTuple):
    """What stands for a tensor that is sent apart from the rest of a state."""

    shape: torch.Size
    dtype: torch.dtype


# ---------------------------------------------------------------------- read


def model_state(
    runtime: Runtime, model: nn.Module, rank: int | None, dtype: torch.dtype | None
) -> dict[str, Any]:
    """`model.state_dict()` of whole tensors in host memory, on the ranks that get it; elsewhere it is
    empty."""
    what = "run.full_state_dict()"
    _check_dtype(dtype)
    _agreed(runtime, what, rank, str(dtype))
    refuse_untimely("read the whole state", _all_why_not(runtime, what))
    runtime.settle()
    wanted = rank is None or rank == runtime.transport.rank
    whole = {}
    for param in runtime.params:
        if any(
            place.module._parameters.get(place.attribute) is param.sharded_param for place in param.places
        ):
            tensor = runtime.collect(param.read_master(), param.slot)
            if wanted:
                whole[id(param)] = nn.Parameter(_on_host(tensor.to(param.wide), dtype), param.trainable)
            del tensor
    buffers = _of_first(runtime, model) if rank != 0 else {}
    state: dict[str, Any] = {}

    def read() -> None:
        nonlocal state
        with standing(runtime.params, whole), _buffered(model, buffers if wanted else {}):
            state = model.state_dict()
        own = {parameter.data_ptr() for parameter in whole.values()}
        take_to_host(state, own, dtype)

    together(runtime.transport, what, read if wanted else _nothing)
    return state


def _nothing() -> None:
    """What a rank does that gets no state."""


@contextmanager
def standing(params: list[ShardedParam], whole: dict[int, nn.Parameter]) -> Iterator[None]:
    """Whole parameters, by id of ours, where sharded parameters stand."""
    places = [
        (place, param.sharded_param, whole[id(param)])
        for param in params
        if id(param) in whole
        for place in param.places
        if place.module._parameters.get(place.attribute) is param.sharded_param
    ]
    for place, _, parameter in places:
        place.module._parameters[place.attribute] = parameter
    try:
        yield
    finally:
        for place, sharded_param, _ in places:
            place.module._parameters[place.attribute] = sharded_param


def _of_first(runtime: Runtime, model: nn.Module) -> dict[int, Tensor]:
    """Persistent buffers as rank 0 has them, by id of this rank's own: ranks' batch statistics drift apart
    between broadcasts, and a model has one state."""
    own = list(buffers_of(model).values()) if runtime.transport.size > 1 else []
    copies = [buffer.detach().clone() for buffer in own]
    if copies:
        runtime.transport.broadcast("buffers", copies)
    return {id(buffer): copy for buffer, copy in zip(own, copies, strict=True)}


@contextmanager
def _buffered(model: nn.Module, others: dict[int, Tensor]) -> Iterator[None]:
    """Other buffers, by id of those that stand there."""
    places = [
        (module._buffers, name, buffer)
        for module in (model.modules() if others else ())
        for name, buffer in module._buffers.items()
        if id(buffer) in others
    ]
    for buffers, name, buffer in places:
        buffers[name] = others[id(buffer)]
    try:
        yield
    finally:
        for buffers, name, buffer in places:
            buffers[name] = buffer


def take_to_host(state: dict[str, Any], own: set[int], dtype: torch.dtype | None) -> None:
    """All other tensors of a state into host memory of their own, so that training does not change them.
    Names of one tensor stay names of one."""
    taken: dict[Any, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and not (value.numel() and value.data_ptr() in own):
            place = value.untyped_storage().data_ptr() if value.numel() else id(value)
            key = (place, value.storage_offset(), value.shape, value.stride(), value.dtype)
            if key not in taken:
                taken[key] = _on_host(value.detach(), dtype, copy=True)
            state[name] = taken[key]


def _on_host(tensor: Tensor, dtype: torch.dtype | None, copy: bool = False) -> Tensor:
    """In host memory; floats in this precision, if one is given."""
    wide = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return tensor.to(_HOST, wide, copy=copy)


def optimizer_state(runtime: Runtime, optimizer: Optimizer | None, rank: int | None) -> dict[str, Any]:
    """`optimizer.state_dict()` of whole tensors in host memory, on the ranks that get it; elsewhere it is
    empty."""
    what = "run.full_optimizer_state_dict()"
    update = _update_of(runtime, optimizer, what)
    _agreed(runtime, what, rank, str(runtime.updates.index(update)))
    refuse_untimely("read the whole state", _all_why_not(runtime, what))
    runtime.settle()
    wanted = rank is None or rank == runtime.transport.rank
    found: dict[int, dict[str, Any]] = {}
    for optimizer_place, state in _states(runtime, update.optimizer):
        if update.sharded_tensors.mesh is not None:
            told = runtime.transport.exchange(
                describe_state(state, optimizer_place.param.slot, runtime.transport.rank), what
            )
            state = whole_state(state, optimizer_place.param, told, runtime.transport, runtime.collect, _HOST)
        if wanted:
            found[id(optimizer_place.sharded_param)] = tree_map_only(
                Tensor, partial(_on_host, dtype=None, copy=True), state
            )
    result: dict[str, Any] = {}

    def read() -> None:
        nonlocal result
        with update.showing(found):
            result = tree_map_only(Tensor, partial(_on_host, dtype=None), update.optimizer.state_dict())

    together(runtime.transport, what, read if wanted else _nothing)
    return result


def _states(runtime: Runtime, optimizer: Optimizer) -> Iterator[tuple[OptimizerPlace, dict[str, Any]]]:
    """What this rank has of each parameter's state. 8-bit moments and those on the disk are shown as fp32,
    one part of a host update at a time."""
    shown: tuple[OffloadGroup | None, dict[str, Tensor]] = (None, {})
    for optimizer_place in optimizer_places_of(runtime):
        if optimizer_place.optimizer is not optimizer:
            continue
        part = optimizer_place.part
        if optimizer_place.untouched:
            yield optimizer_place, {}
        elif part is not None and not part.visible:
            if shown[0] is not part:
                shown = (part, part.decoded())
            yield optimizer_place, part.shown(optimizer_place.index, shown[1])
        else:
            yield optimizer_place, optimizer_place.state


# ---------------------------------------------------------------------- load


def load_model_state(
    runtime: Runtime, model: nn.Module, state: Mapping[str, Any] | None, rank: int | None, strict: bool
) -> Any:
    """`model.load_state_dict()` on all ranks of what this rank has, or all of them. Each keeps its rows of
    what is sent, one tensor after another."""
    what = "run.load_full_state_dict()"
    _agreed(runtime, what, rank, str(strict))
    mine = rank is None or rank == runtime.transport.rank
    _refuse_rows(runtime, what, state if mine else {})
    if rank is not None and runtime.transport.size > 1:
        names = {name: p for p in runtime.params for name in names_of(model, [p])[p.name]}

        def kept(name: str, value: Tensor) -> Tensor:
            return _rows_of(runtime, names.get(name), value)

        given = dict(state) if mine and state is not None else {}
        tensors = {n: v for n, v in given.items() if isinstance(v, Tensor)}
        rest = given | {n: _SentApart(v.shape, v.dtype) for n, v in tensors.items()}
        told = _told(runtime, (rest, getattr(state, "_metadata", None)) if mine else None, rank)
        received = {
            name: _sent(runtime, tensors.get(name), value, rank, partial(kept, name))
            if isinstance(value, _SentApart)
            else value
            for name, value in told[0].items()
        }
        state = _WithMetadata(given if mine else received, told[1])
    return model.load_state_dict(state, strict=strict)  # type: ignore[arg-type]


class _WithMetadata(dict[str, Any]):
    """A state that tells the versions of its modules, as torch's own does."""

    def __init__(self, state: Mapping[str, Any], metadata: Any) -> None:
        super().__init__(state)
        if metadata is not None:
            self._metadata = metadata


def load_optimizer_state(
    runtime: Runtime, optimizer: Optimizer | None, state: Mapping[str, Any] | None, rank: int | None
) -> None:
    """`optimizer.load_state_dict()` on all ranks of what this rank has, or all of them."""
    what = "run.load_full_optimizer_state_dict()"
    update = _update_of(runtime, optimizer, what)
    _agreed(runtime, what, rank, str(runtime.updates.index(update)))
    mine = rank is None or rank == runtime.transport.rank
    _refuse_rows(runtime, what, state if mine else {})
    if rank is not None and runtime.transport.size > 1:
        tensors = dict(_entries(state)) if mine and state is not None else {}
        tensors = {name: value for name, value in tensors.items() if dense(value)}
        told = _told(runtime, _without(state or {}, tensors) if mine else None, rank)
        optimizer_places = {
            id(optimizer_place.sharded_param): optimizer_place.param
            for optimizer_place in optimizer_places_of(runtime)
            if optimizer_place.optimizer is update.optimizer
        }
        sharded_params = [p for group in update.optimizer.param_groups for p in group["params"]]
        numbers = [number for group in told["param_groups"] for number in group["params"]]
        params = {
            n: optimizer_places.get(id(sharded_param))
            for n, sharded_param in zip(numbers, sharded_params, strict=False)
        }
        for (number, key), value in dict(_entries(told, _SentApart)).items():
            kept = partial(_rows_of, runtime, params.get(number))
            told["state"][number][key] = _sent(runtime, tensors.get((number, key)), value, rank, kept)
        state = state if mine else told
    assert state is not None
    update.optimizer.load_state_dict(dict(state))


def _entries(state: Mapping[str, Any], kind: type = Tensor) -> Iterator[tuple[tuple[Any, str], Any]]:
    """What is of a kind among the entries of an optimizer's state, by number and key."""
    for number, entries in state["state"].items():
        if isinstance(entries, Mapping):
            for key, value in entries.items():
                if isinstance(value, kind):
                    yield (number, key), value


def _without(state: Mapping[str, Any], tensors: Mapping[tuple[Any, str], Tensor]) -> dict[str, Any]:
    """An optimizer's state with something small in the place of its tensors."""
    rest = dict(state, state={})
    for number, entries in state["state"].items():
        rest["state"][number] = dict(entries) if isinstance(entries, Mapping) else entries
    for (number, key), value in tensors.items():
        rest["state"][number][key] = _SentApart(value.shape, value.dtype)
    return rest


def _told(runtime: Runtime, value: Any, rank: int) -> Any:
    """What one rank has that is not large, on all of them."""
    file = io.BytesIO()
    if runtime.transport.rank == rank:
        torch.save(value, file)
    length = int(runtime.transport.max([float(file.tell())], "the length of a state")[0])
    data = torch.zeros(length, dtype=torch.uint8)
    if runtime.transport.rank == rank:
        data.copy_(torch.frombuffer(file.getbuffer(), dtype=torch.uint8))
    runtime.transport.broadcast("a state", [data], rank)
    if runtime.transport.rank == rank:
        return value
    # From a rank of this job, which runs the same program.
    return torch.load(io.BytesIO(data.numpy().tobytes()), map_location=_HOST, weights_only=False)


def _sent(
    runtime: Runtime, value: Tensor | None, told: _SentApart, rank: int, kept: Callable[[Tensor], Tensor]
) -> Tensor:
    """One tensor from `rank`, and what is kept of it."""
    device = runtime.transport.device
    if value is not None:
        whole = value.detach().to(device).contiguous()
    else:
        whole = torch.empty(told.shape, dtype=told.dtype, device=device)
    if whole.numel():
        runtime.transport.broadcast("a state", [whole], rank)
    return value if value is not None else kept(whole)


def _rows_of(runtime: Runtime, param: ShardedParam | None, value: Tensor) -> Tensor:
    """This rank's rows, where it is of a parameter whose rows are shown so; else all of it, on the host."""
    sharded_tensors = runtime.sharded_tensors
    if (
        param is None
        or sharded_tensors.mesh is None
        or tuple(value.shape) != param.slot.shape
        or not value.dim()
    ):
        return value.to(_HOST)
    start, stop = param.slot.rows(sharded_tensors.rank)
    return sharded_tensors.show(value[start:stop].clone().to(param.local.device), param.slot)


# ---------------------------------------------------------------------- what is refused


def _check_dtype(dtype: object) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise OptionError(
            f"run.full_state_dict(dtype={dtype!r}) takes a floating dtype of torch, such as torch.bfloat16."
        )


def _agreed(runtime: Runtime, what: str, rank: object, other: str) -> None:
    """All ranks ask for the same."""
    size = runtime.transport.size
    if rank is not None and (type(rank) is not int or not 0 <= rank < size):
        raise OptionError(
            f"{what}: rank={rank!r} is none of the {size} ranks; pass 0 to {size - 1}, or None."
        )
    told = runtime.transport.exchange([rank, other], what)
    if any(one != told[0] for one in told):
        listed = ", ".join(f"rank={one[0]} ({one[1]})" for one in told)  # type: ignore[index]
        raise RankError(
            f"{what}: ranks ask for different states, by rank: {listed}. Every rank makes the same call."
        )


def _why_not_now(runtime: Runtime) -> str | None:
    if runtime.computing:
        return (
            "inside a forward modules hold copies. Call it in the loop, before or after the model is called"
        )
    return runtime.sync_strategy.untimely() if runtime.unsynced else untimely(runtime)


def _all_why_not(runtime: Runtime, what: str) -> list[str | None]:
    """By rank, why now is no moment for it."""
    return [
        None if one is None else str(one) for one in runtime.transport.exchange(_why_not_now(runtime), what)
    ]


def _update_of(runtime: Runtime, optimizer: Any, what: str) -> ShardedOptimizer:
    """That of an optimizer, or of the only one. What wraps an optimizer has it as `optimizer`."""
    if optimizer is None and len(runtime.updates) == 1:
        return runtime.updates[0]
    inner = optimizer
    while inner is not None:
        for update in runtime.updates:
            if update.optimizer is inner:
                return update
        inner = getattr(inner, "optimizer", None)
    kinds = ", ".join(type(update.optimizer).__name__ for update in runtime.updates) or "none"
    raise OptionError(
        f"{what} takes one of the optimizers that zs.shard() was given ({kinds}), and this is "
        f"{type(optimizer).__name__}."
    )


def _refuse_rows(runtime: Runtime, what: str, state: Any) -> None:
    """What is loaded is whole, on the rank that has it."""

    def look() -> None:
        if not isinstance(state, Mapping):
            raise ModelError(f"{what} takes a state dict, and this is a {type(state).__name__}.")
        entries = _entries(state) if isinstance(state.get("state"), Mapping) else ()
        for name, value in [*state.items(), *entries]:
            if isinstance(value, Tensor) and ShardedTensors.local(value) is not value:
                raise ModelError(
                    f"{what}: {name!r} is rows, and not a whole tensor. Load what run.full_state_dict() or "
                    "plain PyTorch gives; rows go to load_state_dict() of the model and the optimizer."
                )

    together(runtime.transport, what, look)
