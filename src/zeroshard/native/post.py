"""Couriers in C: parcels are made due, and carried without the interpreter; see [Note: without the
interpreter] in `trip`. Python asks whether they are done."""

from __future__ import annotations

import ctypes

from zeroshard.errors import StateError

from . import abi, loader
from .team import Team
from .trip import Journey, Roads


class Parcel(Journey):
    """Made by a courier. Its addresses are written down as if its staging memory began at `place`; the
    courier finds `nbytes` for it elsewhere. `turn`: as which of all parts forward asks for it."""

    def address(self, place: int, nbytes: int, turn: int) -> None:
        errands = ctypes.addressof(self.errands)
        self.record = abi.Parcel(errands, len(self.errands), place, nbytes, turn)

    @property
    def done(self) -> bool:
        return bool(self.record.done)


class Post:
    """Couriers who carry parcels to a team and back, through staging memory of so many bytes at `memory`."""

    def __init__(self, calls: loader.PostCalls, handle: int) -> None:
        self._calls = calls
        self._handle: int | None = handle

    @classmethod
    def open(cls, team: Team, memory: int, nbytes: int, roads: Roads | None, number: int) -> Post | None:
        """None where the system refused the threads. `number`: of the device at the other end of `roads`."""
        kernels = loader.kernels()
        calls = kernels.post if kernels is not None else None
        if calls is None:
            return None
        device = None if roads is None else ctypes.addressof(roads.device)
        handle = calls.open(team.handle, device, number, memory, nbytes)
        return None if handle is None else cls(calls, handle)

    def send(self, parcel: Parcel, backlog: int | None = None) -> None:
        """Make a parcel due. `backlog`: while so many are, this one is not added."""
        self._calls.send(self._open(), ctypes.byref(parcel.record), backlog or 0)

    def wait(self, parcel: Parcel, seconds: float) -> bool:
        """Whether a parcel is done, within so much time, and that nothing has failed."""
        return bool(self._calls.wait(self._open(), ctypes.byref(parcel.record), int(1000 * seconds)))

    @property
    def error(self) -> int:
        """What CUDA answered when something failed."""
        return 0 if self._handle is None else int(self._calls.error(self._handle))

    def drop(self) -> None:
        """Forget what is due and has not been taken up."""
        if self._handle is not None:
            self._calls.drop(self._handle)

    def close(self) -> None:
        """End the couriers, after what is due."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._calls.close(handle)

    def forget(self) -> None:
        """The couriers are those of a parent, and not here."""
        self._handle = None

    def _open(self) -> int:
        if self._handle is None:
            raise StateError("Post: used after close; open a new one")
        return self._handle
