"""What the loop writes into homes by hand: in place, or by `p.data = ...`.

Homes that are DTensors say it themselves (`face.Writes`), by whatever name they are written. Plain ones have
torch's count of writes, which misses those through `p.data`. Where a plain home is the leaf's own memory
nothing has to be told; but `p.data = ...` then takes it away from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, ne
from typing import Protocol
from weakref import ref

import torch
from torch import Tensor

from zeroshard.comm import Transport
from zeroshard.errors import StateError
from zeroshard.life.shard import Faces, Param
from zeroshard.sync import Pace

_version = attrgetter("_version")


def inside_forward(what: str) -> StateError:
    return StateError(
        f"{what} was written inside a forward. While modules compute they hold copies, and what is written "
        "there is lost or differs between ranks. Write parameters in the loop, before or after the model is "
        "called."
    )


class Computes(Protocol):
    """What a run has to say before it is written by hand."""

    closed: bool
    transport: Transport
    pace: Pace

    @property
    def computing(self) -> bool: ...


class Written:
    """Looks at the homes of a run. `copied`: parameters whose leaves hold a copy of what their homes hold."""

    def __init__(self, faces: Faces, params: Sequence[Param], copied: Sequence[Param]) -> None:
        self._writes, self._count = faces.writes, 0
        plain = faces.mesh is None
        self._params = list(params) if plain else []
        self._homes = [param.home for param in self._params]
        self._places = list(map(Tensor.data_ptr, self._homes))
        self._counted = [param.home for param in copied] if plain else []
        self._versions: list[int] = []

    def seen(self, stale: bool, quieten: Callable[[], None]) -> bool:
        """Whether homes were written since the last look; those that were given other memory are back in
        their own, after `quieten`. Of plain homes only where they are not `stale` already: the optimizer's
        writes count there too."""
        moved = self._moved()
        if moved:
            quieten()
            for param in moved:
                _take_back(param)
        versions = list(map(_version, self._counted))
        count = self._writes.looked()
        written = count != self._count or (not stale and versions != self._versions)
        self._count, self._versions = count, versions
        return written or bool(moved)

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


def before_writes(run: Computes) -> Callable[[bool], None]:
    """What is done before the loop writes rows. Every rank writes; the first time since peers were told, all
    of them have read. Weak, since homes hold it."""
    its = ref(run)

    def before(first: bool) -> None:
        live = its()
        if live is None or live.closed:
            return
        if live.computing:
            raise inside_forward("a parameter")
        if first and not live.pace.apart:
            live.transport.fence()

    return before
