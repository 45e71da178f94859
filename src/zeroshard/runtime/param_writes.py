"""Notices what the loop writes into sharded parameters, and tells autograd of parameters that have changed.

The loop writes them in place, or by `p.data = ...`. Those that are DTensors say it themselves
(`params/write_versions.py`), by whatever name they are written. Plain ones have torch's count of writes,
which misses those through `p.data`. Where a plain sharded parameter is the unsharded parameter's own memory
nothing has to be told; but `p.data = ...` then takes it away from there.

The host may be updating a sharded parameter beside the loop. Of DTensors, what reads or writes waits for it.
Of plain ones nobody can tell before: they are counted, and what was written without waiting is an error at
the next look.

Autograd must refuse a backward through weights which its forward did not use. Torch finds that by its count
of writes: a graph that saved a weight at one count is not followed at another. Our updates write rows, which
are not what autograd saved, so they count by hand: each change of a parameter is one write of its unsharded
parameter. A plain sharded parameter that is the unsharded parameter's own memory shares its count, and
nothing is left to do (`ShardedParam.share_count`). At stage 3 `SavedView.restore` compares the counts, as
torch does not look at what hooks save. It is one parameter at a time: a step of the discriminator says
nothing of the generator's graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from operator import attrgetter, is_, ne
from typing import Protocol
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from zeroshard.comm import Transport
from zeroshard.errors import StateError
from zeroshard.offload.group import OffloadGroup
from zeroshard.offload.updates import HostUpdates
from zeroshard.optim.sharded_optimizer import ShardedOptimizer
from zeroshard.params.dtensor import ShardedDTensor
from zeroshard.params.sharded_param import BackgroundReader, ShardedParam, ShardedTensors
from zeroshard.params.write_versions import WriteVersions, place_of
from zeroshard.sync import SyncStrategy

_version = attrgetter("_version")


def inside_forward(what: str) -> StateError:
    return StateError(
        f"{what} was written inside a forward. While modules compute they hold copies, and what is written "
        "there is lost or differs between ranks. Write parameters in the loop, before or after the model is "
        "called."
    )


def _beside_the_host(name: str) -> StateError:
    return StateError(
        f"`{name}` was written by hand while the host may have been updating it, so it holds neither. With "
        "offload and clip_norm, write parameters inside `with run.gathered(write=True):`, or after a forward "
        "or `with run.gathered(): pass`, which wait for the host. Load the last checkpoint to go on."
    )


def _shown_only(name: str) -> StateError:
    return StateError(
        f"`{name}` was written by hand, and its values rest on the disk: what was written is lost, and all "
        "is as it was. Write them inside `with run.gathered(write=True):`."
    )


class WriteListener(Protocol):
    """What a run has to say before it is written by hand."""

    closed: bool
    transport: Transport
    sync_strategy: SyncStrategy

    @property
    def computing(self) -> bool: ...

    def await_host(self) -> None: ...

    def before_written(self) -> None: ...


class ParamWrites:
    """Looks at the sharded parameters of a run. `copied`: parameters whose unsharded parameters hold a
    copy of what their sharded parameters hold."""

    def __init__(
        self, sharded_tensors: ShardedTensors, params: Sequence[ShardedParam], copied: Sequence[ShardedParam]
    ) -> None:
        self._writes, self._count = sharded_tensors.writes, 0
        plain = sharded_tensors.mesh is None
        self._params = list(params) if plain else []
        self._sharded_params = [param.sharded_param for param in self._params]
        self._places = list(map(Tensor.data_ptr, self._sharded_params))
        self._counted = [param.sharded_param for param in copied] if plain else []
        self._versions: list[int] = []
        # Sharded parameters of which no optimizer writes what is counted: those that are not the master, that
        # the host updates beside the loop, or that are torch's own DTensors, which tell nothing (see
        # `dtensor_of`).
        self._told_by_sharded_tensors = any(
            isinstance(param.sharded_param, ShardedDTensor) for param in params
        )
        silent = not plain and not self._told_by_sharded_tensors
        # Of these nobody can tell before they are written by hand, and saves read the very memory.
        self.unforeseen = [p for p in params if (plain or silent) and p.master is None]
        self._watched = [param for param in params if silent or param.master is not None]
        self._of_watched = self._versions_of_watched()
        self._group_of: dict[int, OffloadGroup] = {}  # by id(param)
        self.reader: BackgroundReader | None = None  # a background save that may still be copying state

    def read_by(self, reader: BackgroundReader | None) -> None:
        """Whoever changes state waits for this reader from now on."""
        self.reader = reader

    def adopt_offload_groups(self, groups: Sequence[OffloadGroup]) -> None:
        """What the host updates."""
        overlapped = [g for g in groups if g.reduced_grad is None and not self._told_by_sharded_tensors]
        self._group_of = {id(param): group for group in overlapped for param in group.params}
        known = set(map(id, self._watched))
        added = [p for group in overlapped for p in group.params if id(p) not in known]
        self._watched += [p for p in added if p.local.numel()]  # of no elements none can be written
        self._of_watched = self._versions_of_watched()

    def note(self) -> None:
        """What was written until now is known to whom it concerns."""
        self._count = self._writes.looked()
        self._versions, self._of_watched = list(map(_version, self._counted)), self._versions_of_watched()

    def seen(self, stale: bool, quieten: Callable[[], None]) -> bool:
        """Whether sharded parameters were written since the last look. Those that were given other memory are
        then back in their own, and masters hold what their sharded parameters do, after `quieten`. Of plain
        sharded parameters that an optimizer writes only where they are not `stale` already: its writes count
        there too."""
        if self._told_by_sharded_tensors and self._writes.count == self._count:
            return False  # they would have said so
        moved, told = self._moved(), self._told()
        counted = not stale and list(map(_version, self._counted)) != self._versions
        written = self._writes.count != self._count or counted
        self.note()
        fault = next(filter(None, map(self._fault, (*told, *moved))), None)
        if fault is not None:
            for param in moved:
                param.sharded_param.data = param.local  # told once: then a checkpoint can be loaded
            raise fault
        behind = [param for param in told if param.master is not None]
        if moved or behind:
            quieten()
            for param in moved:
                _take_back(param)
            for param in behind:
                param.write_master(param.local)
        return written or bool(moved) or bool(told)

    def _fault(self, param: ShardedParam) -> StateError | None:
        """Why what was written cannot be taken over."""
        group = self._group_of.get(id(param))
        if group is not None and not group.update.known:
            return _beside_the_host(param.name)
        return None if param.local.is_contiguous() else _shown_only(param.name)

    def _versions_of_watched(self) -> list[int]:
        return (
            [] if self._told_by_sharded_tensors else [param.sharded_param._version for param in self._watched]
        )

    def _told(self) -> list[ShardedParam]:
        """Those of the watched that were written in place."""
        if self._told_by_sharded_tensors:
            touched = self._writes.touched
            return [
                p
                for p in self._watched
                if touched and place_of(ShardedTensors.local(p.sharded_param)) in touched
            ]
        both = zip(self._watched, map(ne, self._versions_of_watched(), self._of_watched), strict=True)
        return [param for param, differs in both if differs]

    def _moved(self) -> list[ShardedParam]:
        now = list(map(Tensor.data_ptr, self._sharded_params))
        if now == self._places:
            return []
        return [p for p, gone in zip(self._params, map(ne, now, self._places), strict=True) if gone]


@torch.no_grad()
def _take_back(param: ShardedParam) -> None:
    """Its values into the memory that the unsharded parameter knows, and the sharded parameter back there."""
    given, own = param.sharded_param.data, param.local
    if (given.shape, given.dtype, given.device) != (own.shape, own.dtype, own.device):
        raise StateError(
            f"`{param.name}`.data was replaced by a tensor of shape {tuple(given.shape)}, {given.dtype} on "
            f"{given.device}; zs.shard() keeps it as {tuple(own.shape)}, {own.dtype} on {own.device}. "
            "Cast or move the model before shard(), or pass shard(..., precision=...)."
        )
    param.write_master(given)
    param.sharded_param.data = own


def attach(writes: WriteVersions, run: WriteListener) -> None:
    """Sharded parameters ask the run before they are used. Weak, since they hold this."""
    writes.ask(partial(_before_write, ref(run)), partial(_before_read, ref(run)))


def _before_read(its: ref[WriteListener]) -> None:
    """The loop computes with rows."""
    live = its()
    if live is not None and not live.closed:
        live.await_host()


def _before_write(its: ref[WriteListener], first: bool) -> None:
    """Every rank writes rows; the first time since peers were told, all of them have read."""
    live = its()
    if live is None or live.closed:
        return
    if live.computing:
        raise inside_forward("a parameter")
    live.await_host()
    live.before_written()
    if first and not live.sync_strategy.apart:
        live.transport.fence()


_version_of, _grad = attrgetter("_version"), attrgetter("grad")


class VersionCounters:
    """Counts writes on the unsharded parameters of a run, where these do not share a version counter with
    their sharded parameters."""

    def __init__(self, params: Sequence[ShardedParam], writes: WriteVersions) -> None:
        self._apart = [param for param in params if not param.one_count]
        self._sharded_params = [param.sharded_param for param in self._apart]
        self._unsharded_param_of = {id(param.sharded_param): param.unsharded_param for param in self._apart}
        # Sharded DTensors tell that there was a write; what is written by `p.data` counts for them, but not
        # for torch.
        self._told = all(isinstance(sharded_param, ShardedDTensor) for sharded_param in self._sharded_params)
        self._writes, self._seen = writes, writes.count
        self._versions = list(map(_version_of, self._sharded_params))
        # By id(update): its sharded parameters, which of them had no gradient, and the unsharded
        # parameters of the others.
        self._due: dict[int, tuple[list[Tensor], list[bool], list[Tensor]]] = {}
        self.stepping = False  # an optimizer writes sharded parameters

    def of(self, params: Sequence[ShardedParam]) -> None:
        """Their rows were written past their sharded parameters."""
        increment_version([param.unsharded_param for param in params])

    def look(self) -> None:
        """What the loop has written into sharded parameters since the last look."""
        if self._told and self._seen == self._writes.count:
            return
        before = self._note()
        if before != self._versions:
            both = zip(self._apart, map(ne, before, self._versions), strict=True)
            self.of([param for param, differs in both if differs])

    def _note(self) -> list[int]:
        before, self._versions = self._versions, list(map(_version_of, self._sharded_params))
        self._seen = self._writes.count
        return before

    @contextmanager
    def in_step(self, update: ShardedOptimizer, host: HostUpdates | None) -> Iterator[None]:
        """Around a step: it changes what has a gradient, here or with the host."""
        self.look()
        # Mostly a step is like the one before. Then no gradient is looked at again, of thousands.
        known = self._with_gradient(update) if not update.alike else None
        begun = [param.unsharded_param for param in host.begun] if host is not None else []
        self.stepping = True
        try:
            yield
        finally:
            self.stepping = False
            known = self._with_gradient(update) if known is None else known
            increment_version([*known, *begun])
            if not self._told:
                self._note()  # an optimizer may have written plain sharded parameters themselves

    def _with_gradient(self, update: ShardedOptimizer) -> list[Tensor]:
        before, had, unsharded_params = self._due.get(id(update), ([], [], []))
        if update.alike or not self._apart:
            return unsharded_params
        sharded_params = [p for group in update.optimizer.param_groups for p in group["params"]]
        without = list(map(is_, map(_grad, sharded_params), repeat(None)))
        if without != had or not all(map(is_, sharded_params, before)):
            pairs = zip(sharded_params, without, strict=True)
            found = [self._unsharded_param_of.get(id(p)) for p, none in pairs if not none]
            unsharded_params = [p for p in found if p is not None]
            self._due[id(update)] = sharded_params, without, unsharded_params
        return unsharded_params
