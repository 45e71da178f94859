"""A team of native threads for updates on the host. Python hands over a part and sleeps; the team shares it
out in C, where a share costs next to nothing and needs no interpreter."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from zeroshard.errors import OptionError, StateError

from . import abi, loader

_KERNELS = {"adam": 0, "adam_back": 1, "sgd": 2, "sgd_back": 3}  # as in team.h
_PAGE, _LEAST, _TURNS = 4096, 1 << 15, 4


class Runs(Protocol):
    """Who runs a kernel over its record: a team, or a trip of one."""

    def run(self, kernel: str, record: ctypes.Structure) -> None: ...


class Team:
    """`threads` native threads. Several callers may be served at once."""

    def __init__(self, threads: int, calls: loader.TeamCalls, handle: int) -> None:
        self._threads, self._calls = threads, calls
        self._handle: int | None = handle
        self._lock, self._asking = threading.Condition(), 0

    @classmethod
    def open(cls, threads: int) -> Team | None:
        """A team; none where the kernels were not compiled or the system refused the threads."""
        if threads < 1:
            raise OptionError(f"Team: threads={threads}; at least one is needed")
        kernels = loader.kernels()
        calls = kernels.team if kernels is not None else None
        handle = calls.open(threads) if calls is not None else None
        return None if calls is None or handle is None else cls(threads, calls, handle)

    def __len__(self) -> int:
        return self._threads

    @property
    def handle(self) -> int:
        """C's own; whoever has it ends before the team is closed."""
        assert self._handle is not None
        return self._handle

    def share_of(self, numel: int) -> int:
        """Elements that a thread takes at a time: whole pages, which are whole blocks of 8-bit moments, and
        so few that a thread whose core was busy elsewhere holds up no other."""
        return max(_LEAST, -(-numel // (self._threads * _TURNS * _PAGE)) * _PAGE)

    def prepare(self, errand: abi.Errand, kernel: str, record: ctypes.Structure) -> None:
        """Write a kernel and its record down, which has to outlive the errand."""
        errand.record, errand.kernel = ctypes.addressof(record), _KERNELS[kernel]
        errand.share = self.share_of(record.count)

    def run(self, kernel: str, record: ctypes.Structure) -> None:
        """Run a kernel over its record, all threads together; returns when it is done."""
        errand = abi.Errand()
        self.prepare(errand, kernel, record)
        self.go(errand)

    def go(self, errand: abi.Errand) -> None:
        """Run what was prepared, and the copies around it; returns when it is done."""
        with self._held() as handle:
            errand.team = handle
            self._calls.run(ctypes.byref(errand))

    @contextmanager
    def _held(self) -> Iterator[int]:
        """The team cannot be closed meanwhile."""
        with self._lock:
            handle = self._handle  # `close` takes it away, and waits for those who have it
            if handle is None:
                raise StateError("Team: run after close; open a new one")
            self._asking += 1
        try:
            yield handle
        finally:
            with self._lock:
                self._asking -= 1
                self._lock.notify_all()

    def forget(self) -> None:
        """The threads are those of a parent, and not here."""
        self._handle, self._lock, self._asking = None, threading.Condition(), 0

    def close(self) -> None:
        """End the threads, after what was asked of them."""
        with self._lock:
            handle, self._handle = self._handle, None
            while self._asking:
                self._lock.wait()
        if handle is not None:
            self._calls.close(handle)
