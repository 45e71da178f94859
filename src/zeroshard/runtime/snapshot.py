"""Shows a run to a checkpoint: what this rank holds.

Rows are described where they rest (device, host, split master) and streamed from there; nothing is gathered.
The optimizer's state goes by parameter name, so it finds its way at any world size, stage and tier:

- state tensors with the shape of a parameter's local rows are rows of it (Adam's moments);
- all others are whole, and whoever holds one offers it (Adam's `step`, Adafactor's factors);
- state that is no tensor travels as plain values;
- what every rank has of its own about the same tensor (`RankState`) is saved once a rank."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from zeroshard.checkpoint.records import HeldRows, RunSnapshot, SavePeers, dtype_name
from zeroshard.errors import OptionError, StateError
from zeroshard.kernels.library import BLOCK
from zeroshard.kernels.moments8 import decode, scale_count
from zeroshard.offload.group import OffloadGroup
from zeroshard.optim.sharded_optimizer import ShardedOptimizer
from zeroshard.params.rank_state import RankState
from zeroshard.params.sharded_param import GuardedState, ShardedParam, ShardedTensors
from zeroshard.planner.plan import Plan, settings_of
from zeroshard.sync import SyncState

from .runtime import Runtime

# How an optimizer computes is the new run's choice; what it computes with is the checkpoint's.
OWN_KEYS = frozenset(("params", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"))
MOMENTS = ("exp_avg", "exp_avg_sq")
# Who changes weights of which nobody is told before the loop writes them by hand: their copies are made
# in the call of a background save.
UNFORESEEN = GuardedState()


@dataclass(frozen=True)
class ExtraState:
    """What is saved with a run: plain data of the user, objects that have a state_dict, the plan."""

    extra: Mapping[str, Any] | None = None
    schedulers: Sequence[Any] = ()
    scalers: Sequence[Any] = ()
    plan: Plan | None = None  # what the run keeps to

    def __post_init__(self) -> None:
        if self.extra is not None and not isinstance(self.extra, Mapping):
            raise OptionError(
                f"extra= takes a dict, such as {{'step': 500}}, and this is a {type(self.extra).__name__}."
            )
        for what in ("schedulers", "scalers"):
            for one in getattr(self, what):
                if not hasattr(one, "state_dict") or not hasattr(one, "load_state_dict"):
                    raise OptionError(f"{what}=[...]: {one!r} has no state_dict() that could be saved.")


@dataclass(frozen=True, slots=True)
class OptimizerPlace:
    """One parameter in one optimizer, with its place in a host update if it has one."""

    optimizer: Optimizer
    group: dict[str, Any]
    sharded_param: Tensor
    param: ShardedParam
    prefix: str  # of its kinds: empty, unless an earlier optimizer has the same parameter
    part: OffloadGroup | None
    index: int
    freezes: bool = False  # a codec keeps its second moments, see `moments`

    @property
    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = self.optimizer.state.get(self.sharded_param, {})
        return found

    def kind(self, key: str) -> str:
        return sys.intern(f"state:{self.prefix}{key}")

    @property
    def untouched(self) -> bool:
        """The host's state is there from the beginning; before its first update it says nothing."""
        return self.part is not None and self.part.steps[self.index] == 0


def sync_held(state: SyncState) -> list[HeldRows]:
    """What belongs to the policy that keeps the ranks together: gradients to come, outer momentum."""
    return [HeldRows.of(k.name, f"sync:{k.key}", k.rows, k.start, k.height, k.owner) for k in state.rows]


def private_kind(private: RankState, rank: int) -> str:
    return f"private:{'same' if private.join == 'same' else rank}:{private.key}"


def private_held(private: RankState, rank: int, share: float | None = None) -> HeldRows:
    """What `rank` had of its own, flat; with a `share`, loading adds that share of it."""

    def write(first: int, values: Tensor) -> None:
        private.write(first, values, share)

    kind, count, dtype = private_kind(private, rank), private.numel, dtype_name(private.dtype)
    return HeldRows(private.name, kind, (count,), dtype, (0, count), private.read, write, owner=private.owner)


def host_parts(runtime: Runtime) -> list[OffloadGroup]:
    return runtime.host.parts if runtime.host is not None else []


def optimizer_places_of(runtime: Runtime) -> Iterator[OptimizerPlace]:
    known = {id(p.sharded_param): p for p in runtime.params}
    parts = host_parts(runtime)
    hosted = {id(p): (part, index) for part in parts for index, p in enumerate(part.params)}
    seen: set[str] = set()
    for number, update in enumerate(runtime.updates):
        for group in update.optimizer.param_groups:
            for sharded_param in group["params"]:
                param = known.get(id(sharded_param))
                if param is not None:
                    part, index = hosted.get(id(param), (None, 0))
                    prefix = f"{number}." if param.name in seen else ""
                    seen.add(param.name)
                    freezes = update.held is not None and id(sharded_param) in update.held.codecs
                    yield OptimizerPlace(
                        update.optimizer, group, sharded_param, param, prefix, part, index, freezes
                    )


# ---------------------------------------------------------------------- what is held


def parameter_held(param: ShardedParam, rank: int, owner: GuardedState | None = None) -> HeldRows:
    """The master rows, streamed: where they are split or on the disk, a chunk at a time. `owner`: who updates
    them on the host."""
    start, stop = param.slot.rows(rank)
    master, row = param.master, param.slot.row
    if master is None:
        return HeldRows.of(param.name, "parameter", param.local, start, param.slot.height, owner)

    def read(first: int, last: int) -> Tensor:
        flat = master.read((first - start) * row, (last - start) * row)
        return flat.view(last - first, *param.slot.shape[1:]) if param.slot.shape else flat.view(())

    def write(first: int, rows: Tensor) -> None:
        with torch.no_grad():
            master.write((first - start) * row, rows.float().reshape(-1).contiguous())

    return HeldRows(
        param.name, "parameter", param.slot.shape, "float32", (start, stop), read, write, owner=owner
    )


def state_held(
    optimizer_place: OptimizerPlace, key: str, tensor: Tensor, rank: int, rows: bool | None = None
) -> HeldRows:
    local, slot = ShardedTensors.local(tensor), optimizer_place.param.slot
    owner = optimizer_place.part if key != "step" else None  # the host's counts change in a step, as any
    if rows is None:
        rows = tuple(local.shape) == slot.local_shape(rank)
    if rows and local.dim():
        return HeldRows.of(
            optimizer_place.param.name,
            optimizer_place.kind(key),
            local,
            slot.rows(rank)[0],
            slot.height,
            owner,
        )
    return HeldRows.of(optimizer_place.param.name, optimizer_place.kind(key), local, owner=owner)


def coded_held(optimizer_place: OptimizerPlace, part: OffloadGroup, number: int, rank: int) -> HeldRows:
    """8-bit moments (0: the first, 1: the second) as the fp32 that they stand for, decoded chunk by chunk."""
    slot, (at, _), key = optimizer_place.param.slot, part.spans[optimizer_place.index], MOMENTS[number]
    start, stop = slot.rows(rank)

    def read(first: int, last: int) -> Tensor:
        low, high = at + (first - start) * slot.row, at + (last - start) * slot.row
        begin, end = low // BLOCK * BLOCK, min(-(-high // BLOCK) * BLOCK, part.numel)
        first_codes, second_codes = (part.read(name, begin, end) for name in MOMENTS)
        scales = part.read("scales", scale_count(begin), scale_count(end))
        wide = decode(first_codes, second_codes, scales)[number][low - begin : high - begin]
        return wide.view(last - first, *slot.shape[1:]) if slot.shape else wide.view(())

    kind = optimizer_place.kind(key)
    return HeldRows(
        optimizer_place.param.name, kind, slot.shape, "float32", (start, stop), read, _unwritten, owner=part
    )


def _unwritten(first: int, rows: Tensor) -> None:
    raise AssertionError("8-bit moments are encoded a part at a time")


def paged_held(optimizer_place: OptimizerPlace, part: OffloadGroup, key: str, rank: int) -> HeldRows:
    """Moments on the disk, read and written there a chunk at a time."""
    slot, (at, _), name = optimizer_place.param.slot, part.spans[optimizer_place.index], part.moments[key]
    start, stop = slot.rows(rank)

    def read(first: int, last: int) -> Tensor:
        flat = part.read(name, at + (first - start) * slot.row, at + (last - start) * slot.row)
        return flat.view(last - first, *slot.shape[1:]) if slot.shape else flat.view(())

    def write(first: int, rows: Tensor) -> None:
        part.write(name, at + (first - start) * slot.row, rows.float().cpu().reshape(-1))

    kind = optimizer_place.kind(key)
    return HeldRows(
        optimizer_place.param.name, kind, slot.shape, "float32", (start, stop), read, write, owner=part
    )


def codes_of(part: OffloadGroup, rank: int, begun: Begun) -> dict[str, Any]:
    """The very codes of 8-bit moments, and where they belong. Decoding and encoding again would round them
    anew; a run with the same rows takes these instead."""
    ends = {"exp_avg": part.numel, "exp_avg_sq": part.numel, "scales": scale_count(part.numel)}
    codes = [array_held(part, name, end) for name, end in ends.items()]
    return {"where": places_of(part, rank), "codes": [once_done(code, begun) for code in codes]}


def places_of(part: OffloadGroup, rank: int) -> list[list[Any]]:
    """Whose rows lie in a part, and where."""
    return [[p.name, at, list(p.slot.rows(rank))] for p, (at, _) in zip(part.params, part.spans, strict=True)]


def array_held(part: OffloadGroup, name: str, end: int) -> HeldRows:
    """One array of a part's state, flat, wherever it rests."""
    dtype = dtype_name(part.form.dtypes()[name])
    return HeldRows("", "", (end,), dtype, (0, end), partial(part.read, name), _unwritten, owner=part)


def state_rows(optimizer_place: OptimizerPlace, rank: int) -> list[HeldRows]:
    """This rank's rows of one parameter's optimizer state, wherever they rest."""
    tensors = {key: value for key, value in optimizer_place.state.items() if isinstance(value, Tensor)}
    rows = [state_held(optimizer_place, key, value, rank) for key, value in tensors.items()]
    part = optimizer_place.part
    if part is not None and part.coded:
        rows += [coded_held(optimizer_place, part, number, rank) for number in range(len(MOMENTS))]
    elif part is not None and not part.visible:
        rows += [paged_held(optimizer_place, part, key, rank) for key in part.moments]
    return rows


Begun = dict[int, Callable[[], None]]  # by id of the part: waits for updates begun by now


def once_done(held: HeldRows, begun: Begun) -> HeldRows:
    """The same, to be read when the updates that change it are done."""
    wait, rows_of = begun.get(id(held.owner)), held.read
    if wait is None:
        return held

    def read(first: int, last: int) -> Tensor:
        wait()
        return rows_of(first, last)

    return replace(held, source=read)


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a state dict would have."""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set and not buffer.is_meta:
                found[f"{path}.{name}" if path else name] = buffer
    return found


def snapshot_of(
    runtime: Runtime, model: nn.Module, extra_state: ExtraState, peers: SavePeers, background: bool = False
) -> RunSnapshot:
    """All that this rank wants saved. Every rank calls it; where the moment is wrong, all of them raise."""
    rank = runtime.transport.rank
    optimizer_places = list(optimizer_places_of(runtime))
    problem = untimely(runtime) or nested(runtime.updates)
    # What training uses is quicker than what saves talk over, and this holds training up.
    if runtime.transport.max([float(problem is not None)], "a save")[0]:
        refuse_untimely("save", peers.exchange(problem, "saving at a wrong moment"))
    begun: Begun = {}
    if background:  # whoever copies a part waits for what the host has begun
        for gather_group in runtime.gather_groups:
            gather_group.catch_up()
        updates = runtime.host.updates if runtime.host is not None else None
        if updates is not None:
            begun = {id(part): partial(updates.finish, part, part.update.done) for part in updates.parts}
    else:
        runtime.settle()
    owners: dict[int, GuardedState] = {id(p): part for part in host_parts(runtime) for p in part.params}
    if background:
        busy = {id(p) for part in host_parts(runtime) if not part.update.known for p in part.params}
        owners |= {id(p): UNFORESEEN for p in runtime.written.unforeseen if id(p) not in busy}
    sync = runtime.sync_strategy.state()
    held = [parameter_held(p, rank, owners.get(id(p))) for p in runtime.params] + sync_held(sync)
    held += [private_held(private, rank) for private in sync.private]
    for optimizer_place in optimizer_places:
        if not optimizer_place.untouched:
            held += state_rows(optimizer_place, rank)
    buffers = buffers_of(model)
    if background:  # forward changes buffers, and the save reads while it runs
        buffers = {name: buffer.detach().clone() for name, buffer in buffers.items()}
    if rank == 0:  # ranks' batch statistics drift apart between broadcasts: rank 0's are the model's
        held += [HeldRows.of(name, "buffer", buffer) for name, buffer in buffers.items()]
    own: dict[str, Any] = {"random": random_states(runtime.transport.device)}
    if runtime.options.buffers == "local" and runtime.transport.size > 1:
        own["buffers"] = buffers
    own["sync"] = sync.own
    if runtime.sync_strategy.apart:
        # A gradient that overflows on one rank changes the loss scale of that rank alone.
        own["scalers"] = [scaler.state_dict() for scaler in extra_state.scalers]
    own["codes"] = [codes_of(part, rank, begun) for part in host_parts(runtime) if part.coded]
    held = [once_done(item, begun) for item in held] if begun else held
    return RunSnapshot(
        held, _values(runtime, sync, extra_state), own, {"plain_state": _plain_state(optimizer_places)}
    )


def _values(runtime: Runtime, sync: SyncState, extra_state: ExtraState) -> dict[str, Any]:
    names = {id(p.sharded_param): p.name for p in runtime.params}
    optimizers = []
    for update in runtime.updates:
        groups = [
            {
                "names": [names[id(p)] for p in group["params"] if id(p) in names],
                "options": {k: v for k, v in group.items() if k not in OWN_KEYS and not callable(v)},
            }
            for group in update.optimizer.param_groups
        ]
        optimizers.append({"type": type(update.optimizer).__name__, "groups": groups})
    updates = runtime.host.updates if runtime.host is not None else None
    return {
        "step": runtime.steps.made,
        "published": not runtime.supply.stale,
        "norm": runtime.clipping.norm,
        **({"host_norm": updates.forecast.norm, "host_swing": updates.forecast.swing} if updates else {}),
        "world": runtime.transport.size,
        "sync": sync.values,
        "options": settings_of(runtime.options),
        "plan": extra_state.plan.to_json() if extra_state.plan is not None else None,
        "optimizers": optimizers,
        "schedulers": [s.state_dict() for s in extra_state.schedulers],
        "scalers": [s.state_dict() for s in extra_state.scalers],
        "extra": dict(extra_state.extra or {}),
    }


def _plain_state(optimizer_places: Sequence[OptimizerPlace]) -> dict[str, Any]:
    """State that is no tensor, by kind and name."""
    found: dict[str, Any] = {}
    for optimizer_place in optimizer_places:
        plain = {key: value for key, value in optimizer_place.state.items() if not isinstance(value, Tensor)}
        if plain:
            found[f"{optimizer_place.prefix}{optimizer_place.param.name}"] = plain
    return found


def untimely(runtime: Runtime) -> str | None:
    """Why now is no moment at which a checkpoint would be whole."""
    if runtime.unsynced:
        return (
            "gradients accumulated under run.no_sync() are on each rank alone; no checkpoint holds them. "
            "Finish the accumulation with a backward outside of the block and optimizer.step() first, or "
            "drop it with optimizer.zero_grad()"
        )
    updates = runtime.host.updates if runtime.host is not None else None
    if updates is not None and (updates.pending or runtime.sync_strategy.begun):
        return (
            "between backward (with sync=Delayed() forward) and optimizer.step() the host's updates are "
            "under way, so its state is that of no step. Call optimizer.step() first, or zero_grad() to drop "
            "the gradients"
        )
    return runtime.sync_strategy.untimely()


def nested(updates: Sequence[ShardedOptimizer]) -> str | None:
    """Why state cannot be saved: tensors in lists and the like have no name, sparse ones no rows."""
    for update in updates:
        for param in update.params.values():
            for key, value in update.optimizer.state.get(param.sharded_param, {}).items():
                name = type(update.optimizer).__name__
                if isinstance(value, Tensor):
                    if value.layout is not torch.strided:
                        return (
                            f"{name} keeps a sparse tensor (`{key}` of `{param.name}`), and only dense ones "
                            "can be saved. Keep it dense, or drop the state: optimizer.state.clear()"
                        )
                    if is_traceable_wrapper_subclass(value):
                        return (
                            f"{name} keeps its state in tensors of its own kind ({type(value).__name__}: "
                            f"`{key}` of `{param.name}`), and only plain ones can be saved. Save what "
                            "run.full_optimizer_state_dict() gives by torch.save(), and the weights by "
                            "run.full_state_dict(); or drop the state: optimizer.state.clear()"
                        )
                elif any(isinstance(x, Tensor) for x in tree_leaves(value)):
                    return (
                        f"{name} keeps tensors in a {type(value).__name__} (`{key}` of `{param.name}`), and "
                        "only entries of its state that are tensors themselves can be saved. Give each an "
                        "entry of its own, save run.full_optimizer_state_dict() with torch.save(), or drop "
                        "them: optimizer.state.clear()"
                    )
    return None


def refuse_untimely(verb: str, problems: Sequence[str | None]) -> None:
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise StateError(f"cannot {verb} now (rank {rank}): {problem}.")


# ---------------------------------------------------------------------- randomness


def random_states(device: torch.device) -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = [name, keys.tolist(), *rest]
    return states


def restore_random(states: Mapping[str, Any], device: torch.device) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    if (numpy := sys.modules.get("numpy")) is not None and "numpy" in states:
        name, keys, *rest = states["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype="uint32"), *rest))
