"""Brings a checkpoint back into a run: targets for its rows; then counts, hyperparameters, randomness.

[Note: into the same tensors] Loading writes into the state tensors that exist. Those of host updates are
views of the memory that the kernels work on: a replaced tensor would be state that nobody updates. Where a
fresh optimizer has none yet, they are made from what the checkpoint says, and attached when all of it has
been read: a load that fails leaves no half of an optimizer behind."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.checkpoint.manifest import Manifest, TensorEntry
from zeroshard.checkpoint.records import DTYPE, HeldRows, LoadResult
from zeroshard.errors import CheckpointError
from zeroshard.offload.group import OffloadGroup
from zeroshard.optim.frozen_moments import KEY as KEPT
from zeroshard.optim.optimizer_kinds import rows_suffice
from zeroshard.params.rank_state import RankState
from zeroshard.params.sharded_param import names_of

from .runtime import Runtime
from .snapshot import (
    MOMENTS,
    OWN_KEYS,
    ExtraState,
    OptimizerPlace,
    buffers_of,
    host_parts,
    optimizer_places_of,
    paged_held,
    parameter_held,
    places_of,
    private_held,
    restore_random,
    state_held,
    sync_held,
)

log = logging.getLogger("zeroshard")

# Optimizers whose state means the same.
ALIKE = {"AdamW": "Adam"}


@dataclass(frozen=True)
class CodedMoments:
    """A part whose moments are 8-bit, and the fp32 ones that were read for each of its parameters."""

    part: OffloadGroup
    states: list[dict[str, Tensor]]


@dataclass
class StateShares:
    """Where a rank's own state comes from: the records that read it, one for each rank whose share it is."""

    private: RankState
    held: list[HeldRows]
    begun: bool = False

    @classmethod
    def of(cls, private: RankState, manifest: Manifest, rank: int, world: int) -> StateShares:
        """From the rank of this number where as many saved it; else as the record says."""
        if private.join == "same" or manifest.world == world:
            return cls(private, [private_held(private, rank)])
        shares = cls(private, [])
        if private.join == "mean":
            for other in range(manifest.world):
                shares.held.append(shares._added(private_held(private, other, 1.0 / manifest.world)))
        return shares

    def _added(self, held: HeldRows) -> HeldRows:
        """Nothing is lost where the load fails before its first row: zeros are written with that."""

        def write(first: int, values: Tensor) -> None:
            if not self.begun:
                self.private.reset()
                self.begun = True
            held.write(first, values)

        return replace(held, sink=write)


@dataclass
class ResumeTargets:
    """Where a checkpoint's rows go, and what becomes of the optimizers once they are there."""

    held: list[HeldRows] = field(default_factory=list)
    # State that was made, and is not attached to its optimizer yet.
    fresh: list[tuple[OptimizerPlace, str, Tensor]] = field(default_factory=list)
    stepped: list[OptimizerPlace] = field(default_factory=list)  # get state
    empty: list[OptimizerPlace] = field(default_factory=list)  # had no state when saved
    thawed: list[OptimizerPlace] = field(default_factory=list)  # keep second moments, and did not when saved
    coded: dict[int, CodedMoments] = field(default_factory=dict)  # by id(part)
    groups: list[tuple[dict[str, Any], int, int]] = field(default_factory=list)  # and its place there
    private: list[StateShares] = field(default_factory=list)


def targets_of(
    runtime: Runtime, model: nn.Module, manifest: Manifest | None, extra_state: ExtraState, strict: bool
) -> ResumeTargets:
    """Decided from the manifest alone, so that all ranks decide, or raise, alike. Without one, loading will
    say why it cannot be read."""
    rank = runtime.transport.rank
    names = names_of(model, runtime.params)
    targets = ResumeTargets(
        [replace(parameter_held(p, rank), also=tuple(names[p.name])) for p in runtime.params]
    )
    sync = runtime.sync_strategy.state(wanted=True)
    targets.held.extend(sync_held(sync))
    targets.held.extend(HeldRows.of(name, "buffer", b) for name, b in buffers_of(model).items())
    if manifest is None:
        return targets
    if strict:
        _check_extra_state(extra_state, manifest)
    size = runtime.transport.size
    targets.private.extend(StateShares.of(private, manifest, rank, size) for private in sync.private)
    targets.held.extend(held for shares in targets.private for held in shares.held)
    kinds = [kind for kind in manifest.by_name if kind.startswith("state:")]
    saved = _saved_groups(manifest)
    types = {name: kind for kind, groups in saved for names in groups for name in names}
    for optimizer_place in optimizer_places_of(runtime):
        mine, was = type(optimizer_place.optimizer).__name__, types.get(optimizer_place.param.name)
        if was is not None and ALIKE.get(was, was) != ALIKE.get(mine, mine):
            if strict:
                raise CheckpointError(
                    f"`{optimizer_place.param.name}` was trained with {was} there and is with {mine} here, "
                    "whose state means something else. Pass strict=False to start the optimizer afresh."
                )
            continue
        _aim(targets, optimizer_place, kinds, manifest, rank)
    # Of another model loading says so itself.
    same_model = all(manifest.find("parameter", p.name) is not None for p in runtime.params)
    _pair_groups(targets, runtime, saved, strict and same_model)
    return targets


def _aim(
    targets: ResumeTargets,
    optimizer_place: OptimizerPlace,
    kinds: Sequence[str],
    manifest: Manifest,
    rank: int,
) -> None:
    """Targets for the state of one parameter; `kinds` are those of state that the checkpoint has."""
    name, begin = optimizer_place.param.name, f"state:{optimizer_place.prefix}"
    stored = {
        kind[len(begin) :]: entry
        for kind in kinds
        if kind.startswith(begin) and (entry := manifest.by_name[kind].get(name)) is not None
    }
    state = optimizer_place.state
    if not stored:
        if state and manifest.find("parameter", name) is not None:
            targets.empty.append(optimizer_place)
        return
    targets.stepped.append(optimizer_place)
    part = optimizer_place.part
    for key in [*stored, *(k for k, v in state.items() if k not in stored and isinstance(v, Tensor))]:
        entry, tensor = stored.get(key), state.get(key)
        if entry is None and key == KEPT:
            targets.thawed.append(optimizer_place)
            continue
        if entry is not None and key == KEPT and not optimizer_place.freezes:
            kind = optimizer_place.kind(key)  # of a codec that this run has not: no row of it is wanted
            targets.held.append(
                HeldRows(optimizer_place.param.name, kind, entry.shape, entry.dtype, (0, 0), _never, _never)
            )
            continue
        if part is not None and not part.visible and not part.coded and key in part.moments:
            targets.held.append(paged_held(optimizer_place, part, key, rank))
            continue
        if entry is not None and not isinstance(tensor, Tensor):
            # Optimizers that need whole tensors see only those that are here; element-wise ones have empty
            # state for the others.
            if not (rows_suffice(optimizer_place.optimizer) or optimizer_place.param.slot.held(rank)):
                continue
            tensor = _made(targets, optimizer_place, key, entry, manifest, rank)
        assert isinstance(tensor, Tensor)
        rows = None if entry is None else entry.shape == optimizer_place.param.slot.shape
        targets.held.append(state_held(optimizer_place, key, tensor, rank, rows))


def _never(*_: Any) -> Any:
    raise AssertionError("no rows are wanted")


def _made(
    targets: ResumeTargets,
    optimizer_place: OptimizerPlace,
    key: str,
    entry: TensorEntry,
    manifest: Manifest,
    rank: int,
) -> Tensor:
    """A tensor for state that the optimizer does not show yet."""
    part = optimizer_place.part
    if part is None:
        tensor = _blank(optimizer_place, key, entry, manifest, rank)
        targets.fresh.append((optimizer_place, key, tensor))
        return tensor
    if not (part.coded and key in MOMENTS):
        raise CheckpointError(
            f"`{optimizer_place.param.name}` has state `{key}` there, and the host update here was built "
            "without it. Build the optimizer with the same momentum and amsgrad."
        )
    coded = targets.coded.setdefault(id(part), CodedMoments(part, [{} for _ in part.params]))
    tensor = coded.states[optimizer_place.index][key] = torch.zeros(
        optimizer_place.param.slot.local_shape(rank)
    )
    return tensor


def _blank(
    optimizer_place: OptimizerPlace, key: str, entry: TensorEntry, manifest: Manifest, rank: int
) -> Tensor:
    """A state tensor as the optimizer would have made it: like the parameter, where it was so when saved."""
    param, local = optimizer_place.param, optimizer_place.param.local
    shape = param.slot.local_shape(rank) if entry.shape == param.slot.shape else entry.shape
    sharded_param = manifest.find("parameter", param.name)
    like = (
        sharded_param is not None and sharded_param.dtype == entry.dtype and entry.shape == param.slot.shape
    )
    device = local.device
    if key == "step" and not (optimizer_place.group.get("capturable") or optimizer_place.group.get("fused")):
        device = torch.device("cpu")  # where torch's optimizers keep it
    return torch.zeros(shape, dtype=param.master_dtype if like else DTYPE[entry.dtype], device=device)


def _saved_groups(manifest: Manifest) -> list[tuple[str, list[list[str]]]]:
    """Types and parameter names, by group, of the saved optimizers; nothing where the manifest is odd."""
    try:
        return [
            (str(o["type"]), [[str(name) for name in group["names"]] for group in o["groups"]])
            for o in manifest.values["optimizers"]
        ]
    except (KeyError, TypeError):
        return []


def _pair_groups(
    targets: ResumeTargets, runtime: Runtime, saved: list[tuple[str, list[list[str]]]], strict: bool
) -> None:
    """Groups of the same parameters are the same group, in whatever order they come."""
    if not saved:
        return
    where = {
        frozenset(names): (o, g) for o, (_, groups) in enumerate(saved) for g, names in enumerate(groups)
    }
    known = {id(p.sharded_param): p.name for p in runtime.params}
    for update in runtime.updates:
        for number, group in enumerate(update.optimizer.param_groups):
            names = [known[id(p)] for p in group["params"] if id(p) in known]
            found = where.get(frozenset(names))
            if found is not None:
                was, mine = saved[found[0]][0], type(update.optimizer).__name__
                if ALIKE.get(was, was) == ALIKE.get(mine, mine):
                    targets.groups.append((group, *found))
            elif strict and names:
                raise CheckpointError(
                    f"group {number} of {type(update.optimizer).__name__} has {len(names)} parameters (first "
                    f"`{names[0]}`), and no group there has just these. Build the same parameter groups, or "
                    "pass strict=False to keep the hyperparameters of this run."
                )


def adopt(
    runtime: Runtime, model: nn.Module, targets: ResumeTargets, loaded: LoadResult, extra_state: ExtraState
) -> dict[str, Any]:
    """After the rows: optimizers, schedulers, scalers and randomness. Returns the user's extra data."""
    values = loaded.values
    try:
        _adopt_state(targets, values.get("plain_state", {}))
        for group, o, g in targets.groups:
            _set_options(group, values["optimizers"][o]["groups"][g]["options"])
        same_world = loaded.own is not None and loaded.world == runtime.transport.size
        own = loaded.own if loaded.own is not None and same_world else {}
        _adopt_extra_state(extra_state, values, own)
        _adopt_private(targets.private, loaded, runtime.transport.size, runtime.transport.rank)
        runtime.sync_strategy.adopt(values.get("sync", {}), own.get("sync", {}))
        if loaded.own is not None:
            _adopt_own(runtime, model, loaded.own, same_world)
        runtime.steps.made, runtime.clipping.norm = int(values.get("step", 0)), float(values.get("norm", 0.0))
        updates = runtime.host.updates if runtime.host is not None else None
        if updates is not None and (norm := values.get("host_norm") or runtime.clipping.norm):
            updates.forecast.see(float(norm))
            updates.forecast.swing = float(values.get("host_swing", updates.forecast.swing))
            updates.go_on()
        extra: dict[str, Any] = dict(values.get("extra", {}))
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"{loaded.path}: its values do not fit this run ({type(error).__name__}: {error}). Weights and "
            "moments are loaded; load another checkpoint before training on."
        ) from error
    runtime.changed()
    runtime.supply.repeats = bool(values.get("published"))
    return extra


def _adopt_private(private: list[StateShares], loaded: LoadResult, world: int, rank: int) -> None:
    """What was not there begins at zero. Rank 0 says what another number of ranks has made of it."""
    absent, told = set(loaded.absent), Counter[tuple[str, str]]()
    for shares in private:
        mine = shares.private
        if all((held.kind, held.name) in absent for held in shares.held):
            mine.reset()
            why = f"it is not in {loaded.path}" if shares.held else "it is each rank's own"
            told[mine.key, f"begins at zero: {why}"] += 1
        elif len(shares.held) > 1:
            told[mine.key, f"is the mean of the {loaded.world} that were saved"] += 1
    if rank == 0:
        for (key, what), count in told.items():
            where = f"{count} tensors on each of {world} ranks"
            log.warning("%s of %s %s (%d ranks had saved)", key, where, what, loaded.world)


def _adopt_own(runtime: Runtime, model: nn.Module, own: Mapping[str, Any], same_world: bool) -> None:
    """What belonged to the rank of this number."""
    if "random" in own:
        restore_random(own["random"], runtime.transport.device)
    if same_world:
        local = own.get("buffers", {})
        for name, buffer in buffers_of(model).items():
            if name in local:
                buffer.copy_(local[name])
        _take_codes(runtime, own.get("codes", []))


def _adopt_state(targets: ResumeTargets, plain: Mapping[str, Any]) -> None:
    for optimizer_place, key, tensor in targets.fresh:
        optimizer_place.optimizer.state[optimizer_place.sharded_param][key] = tensor
    for optimizer_place in targets.thawed:
        del optimizer_place.state[KEPT]
    for optimizer_place in targets.stepped:
        found = plain.get(f"{optimizer_place.prefix}{optimizer_place.param.name}")
        if found and (optimizer_place.state or rows_suffice(optimizer_place.optimizer)):
            optimizer_place.optimizer.state[optimizer_place.sharded_param].update(found)
        if optimizer_place.part is not None:
            count = optimizer_place.state.get("step")
            # SGD has no count; all it asks is whether there was an update before.
            optimizer_place.part.steps[optimizer_place.index] = 1 if count is None else int(count)
    for optimizer_place in targets.empty:
        if optimizer_place.part is None:
            optimizer_place.state.clear()  # the dict stays: proxies know it
            continue
        optimizer_place.part.clear(optimizer_place.index)
    for coded in targets.coded.values():
        counts = coded.part.shown_steps
        coded.part.load([{"step": int(c), **s} for c, s in zip(counts, coded.states, strict=True)])


def _take_codes(runtime: Runtime, saved: list[Any]) -> None:
    """8-bit moments bit for bit, where the same rows lie in the same places."""
    parts = {str(places_of(part, runtime.transport.rank)): part for part in host_parts(runtime) if part.coded}
    for item in saved:
        part = parts.get(str(item["where"]))
        if part is not None:
            with part.lent(write=True):
                part.load_codes(item["codes"])


def _set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        if key in OWN_KEYS:
            continue
        if isinstance(group.get(key), Tensor):
            group[key].copy_(value) if isinstance(value, Tensor) else group[key].fill_(value)
        else:
            group[key] = (
                value.item() if isinstance(value, Tensor) and value.dim() == 0 and key in group else value
            )


def _check_extra_state(extra_state: ExtraState, manifest: Manifest) -> None:
    """Before anything is overwritten: a forgotten scheduler would begin again with its first step."""
    saved = manifest.values if isinstance(manifest.values, dict) else {}
    for what, objects in (("schedulers", extra_state.schedulers), ("scalers", extra_state.scalers)):
        states = saved.get(what, [])
        count = len(states) if isinstance(states, list) else 0
        if count != len(objects):
            raise CheckpointError(
                f"it holds {count} {what} and {len(objects)} were given. Pass to run.load() what run.save() "
                f"got, {what}=[...]; or strict=False to let them begin again."
            )


def _adopt_extra_state(extra_state: ExtraState, values: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    for what, objects in (("schedulers", extra_state.schedulers), ("scalers", extra_state.scalers)):
        for item, state in zip(objects, own.get(what) or values.get(what, []), strict=False):
            if state:  # a disabled scaler has none
                item.load_state_dict(_like(item.state_dict(), state))


def _like(mine: Any, saved: Any) -> Any:
    """`saved` with counters where `mine` has them, at any depth: a checkpoint holds them as dicts, and
    schedulers, also those inside others, ask them for more."""
    if isinstance(mine, Counter):
        return Counter(saved)
    if isinstance(mine, dict) and isinstance(saved, dict):
        return {key: _like(mine.get(key), value) for key, value in saved.items()}
    if isinstance(mine, list) and isinstance(saved, list) and len(mine) == len(saved):
        return [_like(one, other) for one, other in zip(mine, saved, strict=True)]
    return saved
