"""A part's way to the host and back without the interpreter: gradient out, updates, weights back.

[Note: without the interpreter] Whenever a thread of the host takes the interpreter, the thread that launches
kernels has to sleep and be woken, which costs it more than what the other does meanwhile. An update that
comes back to Python for each of its copies and waits asks for it some twenty times; a trip twice, and a
parcel of `post` not at all.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zeroshard.errors import TierError

from . import abi
from .team import Team


class Copy(NamedTuple):
    """Addresses, and how many bytes."""

    to: int
    source: int
    nbytes: int


@dataclass(frozen=True)
class Roads:
    """How a GPU is reached: the runtime's functions, and a stream for each direction."""

    device: abi.Device
    leaving: int
    coming: int


@dataclass(frozen=True)
class Signs:
    """Events of a trip over `roads`, by their handles: `landed` is when there is something to fetch,
    `arrived` and `ready` are recorded when the copies out and back are done."""

    roads: Roads
    landed: int | None
    arrived: int
    ready: int


class _Arrays:
    """Copies as C reads them."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        self.count = len(copies)
        to, sources, sizes = zip(*copies, strict=True) if copies else ((), (), ())
        self._to, self._source = ((ctypes.c_void_p * self.count)(*each) for each in (to, sources))
        self._bytes = (ctypes.c_int64 * self.count)(*sizes)

    @property
    def fields(self) -> tuple[int, int, int, int]:
        address = ctypes.addressof
        return self.count, address(self._to), address(self._source), address(self._bytes)


class Journey:
    """So many `updates` of one part, and the copies around them: before the first `out` is fetched, and after
    the last `back` is sent. Without `signs` all of it is in the CPU's memory.

    `run` is what an update asks of a team. Here it is only written down."""

    def __init__(
        self,
        team: Team,
        out: Sequence[Copy],
        back: Sequence[Copy],
        updates: int = 1,
        signs: Signs | None = None,
    ) -> None:
        self._team, self._signs = team, signs
        self._out, self._back = _Arrays(out), _Arrays(back)
        self._records: list[ctypes.Structure] = []
        self.errands = (abi.Errand * updates)()

    def run(self, kernel: str, record: ctypes.Structure) -> None:
        errand, signs = self.errands[len(self._records)], self._signs
        if not self._records:
            errand.outs, errand.out_to, errand.out_source, errand.out_bytes = self._out.fields
        self._records.append(record)
        if len(self._records) == len(self.errands):
            errand.backs, errand.back_to, errand.back_source, errand.back_bytes = self._back.fields
        if signs is not None:
            errand.device = ctypes.addressof(signs.roads.device)
            errand.leaving, errand.coming = signs.roads.leaving, signs.roads.coming
            errand.landed, errand.arrived, errand.ready = signs.landed, signs.arrived, signs.ready
        self._team.prepare(errand, kernel, record)


class Trip(Journey):
    """Made by the calling thread, each update as soon as it is asked for."""

    def run(self, kernel: str, record: ctypes.Structure) -> None:
        super().run(kernel, record)
        errand = self.errands[len(self._records) - 1]
        self._team.go(errand)
        if errand.error:
            raise TierError(f"CUDA answered a copy between device and host with error {errand.error}")
