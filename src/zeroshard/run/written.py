"""What the loop writes into homes by hand: in place, or by `p.data = ...`.

Homes that are DTensors say it themselves (`face.Writes`), by whatever name they are written. Plain ones have
torch's count of writes, which misses those through `p.data`. Where a plain home is the leaf's own memory
nothing has to be told; but `p.data = ...` then takes it away from there.

The host may be updating a home beside the loop. Of DTensors, what reads or writes waits for it. Of plain ones
nobody can tell before: they are counted, and what was written without waiting is an error at the next look.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, ne
from typing import Protocol
from weakref import ref

import torch
from torch import Tensor

from zeroshard.comm import Transport
from zeroshard.errors import StateError
from zeroshard.host.part import Part
from zeroshard.life.face import Face, Writes, place_of
from zeroshard.life.shard import Faces, Param
from zeroshard.sync import Pace

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


class Computes(Protocol):
    """What a run has to say before it is written by hand."""

    closed: bool
    transport: Transport
    pace: Pace

    @property
    def computing(self) -> bool: ...

    def await_host(self) -> None: ...


class Written:
    """Looks at the homes of a run. `copied`: parameters whose leaves hold a copy of what their homes hold."""

    def __init__(self, faces: Faces, params: Sequence[Param], copied: Sequence[Param]) -> None:
        self._writes, self._count = faces.writes, 0
        self._plain = faces.mesh is None
        self._params = list(params) if self._plain else []
        self._homes = [param.home for param in self._params]
        self._places = list(map(Tensor.data_ptr, self._homes))
        self._counted = [param.home for param in copied] if self._plain else []
        self._versions: list[int] = []
        # Homes of which no optimizer writes what is counted: those that are not the master, that the host
        # updates beside the loop, or that are torch's own DTensors, which tell nothing (see `face_of`).
        self._told_by_faces = any(isinstance(param.home, Face) for param in params)
        silent = not self._plain and not self._told_by_faces
        self._watched = [param for param in params if silent or param.master is not None]
        self._of_watched = self._versions_of_watched()
        self._part_of: dict[int, Part] = {}  # by id(param)

    def adopt_parts(self, parts: Sequence[Part]) -> None:
        """What the host updates."""
        overlapped = [part for part in parts if part.landing is None and not self._told_by_faces]
        self._part_of = {id(param): part for part in overlapped for param in part.params}
        known = set(map(id, self._watched))
        added = [p for part in overlapped for p in part.params if id(p) not in known]
        self._watched += [p for p in added if p.local.numel()]  # of no elements none can be written
        self._of_watched = self._versions_of_watched()

    def note(self) -> None:
        """What was written until now is known to whom it concerns."""
        self._count = self._writes.looked()
        self._versions, self._of_watched = list(map(_version, self._counted)), self._versions_of_watched()

    def seen(self, stale: bool, quieten: Callable[[], None]) -> bool:
        """Whether homes were written since the last look. Those that were given other memory are then back in
        their own, and masters hold what their homes do, after `quieten`. Of plain homes that an optimizer
        writes only where they are not `stale` already: its writes count there too."""
        moved, told = self._moved(), self._told()
        counted = not stale and list(map(_version, self._counted)) != self._versions
        written = self._writes.count != self._count or counted
        self.note()
        fault = next(filter(None, map(self._fault, (*told, *moved))), None)
        if fault is not None:
            for param in moved:
                param.home.data = param.local  # told once: then a checkpoint can be loaded
            raise fault
        behind = [param for param in told if param.master is not None]
        if moved or behind:
            quieten()
            for param in moved:
                _take_back(param)
            for param in behind:
                param.write_master(param.local)
        return written or bool(moved) or bool(told)

    def _fault(self, param: Param) -> StateError | None:
        """Why what was written cannot be taken over."""
        part = self._part_of.get(id(param))
        if part is not None and not part.known:
            return _beside_the_host(param.name)
        return None if param.local.is_contiguous() else _shown_only(param.name)

    def _versions_of_watched(self) -> list[int]:
        return [] if self._told_by_faces else [param.home._version for param in self._watched]

    def _told(self) -> list[Param]:
        """Those of the watched that were written in place."""
        if self._told_by_faces:
            touched = self._writes.touched
            return [p for p in self._watched if touched and place_of(Faces.local(p.home)) in touched]
        both = zip(self._watched, map(ne, self._versions_of_watched(), self._of_watched), strict=True)
        return [param for param, differs in both if differs]

    def _moved(self) -> list[Param]:
        now = list(map(Tensor.data_ptr, self._homes))
        if now == self._places:
            return []
        return [p for p, gone in zip(self._params, map(ne, now, self._places), strict=True) if gone]


@torch.no_grad()
def _take_back(param: Param) -> None:
    """Its values into the memory that the leaf knows, and the home back there."""
    given, own = param.home.data, param.local
    if (given.shape, given.dtype, given.device) != (own.shape, own.dtype, own.device):
        raise StateError(
            f"`{param.name}`.data was replaced by a tensor of shape {tuple(given.shape)}, {given.dtype} on "
            f"{given.device}; zs.shard() keeps it as {tuple(own.shape)}, {own.dtype} on {own.device}. "
            "Cast or move the model before shard(), or pass shard(..., precision=...)."
        )
    param.write_master(given)
    param.home.data = own


def attach(writes: Writes, run: Computes) -> None:
    """Homes ask the run before they are used. Weak, since they hold this."""
    writes.before, writes.before_reads = partial(_before_write, ref(run)), partial(_before_read, ref(run))


def _before_read(its: ref[Computes]) -> None:
    """The loop computes with rows."""
    live = its()
    if live is not None and not live.closed:
        live.await_host()


def _before_write(its: ref[Computes], first: bool) -> None:
    """Every rank writes rows; the first time since peers were told, all of them have read."""
    live = its()
    if live is None or live.closed:
        return
    if live.computing:
        raise inside_forward("a parameter")
    live.await_host()
    if first and not live.pace.apart:
        live.transport.fence()
