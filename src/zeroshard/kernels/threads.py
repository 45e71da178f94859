"""Runs host work on persistent Python threads (`Workers`) and on teams of native ones (`ThreadTeam`).

Kernels release the GIL, so chunks run side by side; torch's own threads would all start on the caller's core
and could not be kept off it. To a team Python hands over a whole update and sleeps; the team shares it out in
C, where a share costs next to nothing and needs no interpreter."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

from zeroshard.errors import OptionError, StateError
from zeroshard.kernels import library

T = TypeVar("T")
_Item = tuple[Callable[[], Any], "Future[Any]"]


def usable_cores() -> tuple[int, ...]:
    """The cores that this process may run on, no more than its control group's quota pays for."""
    cores = (
        tuple(sorted(os.sched_getaffinity(0)))
        if hasattr(os, "sched_getaffinity")
        else range(os.cpu_count() or 1)
    )
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        if quota != "max":
            return tuple(cores[: max(1, int(quota) // int(period))])
    except (OSError, ValueError):
        pass
    return tuple(cores)


class Workers:
    """`threads` daemon threads named zeroshard-host-0 …"""

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise OptionError(f"Workers: threads={threads}; at least one is needed")
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._open = True
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._work, name=f"zeroshard-host-{index}", daemon=True)
            for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()
        _pools.add(self)

    def __len__(self) -> int:
        return len(self._threads)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            task, future = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(task())
                except BaseException as error:
                    future.set_exception(error)
            # Nothing may outlive its task here while the thread waits for the next one: tasks hold staging
            # memory.
            del item, task, future

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Run `task` on one of the threads, in order of submission."""
        future: Future[T] = Future()
        with self._lock:
            if not self._open:
                raise StateError("Workers: submit after close; make a new pool")
            self._queue.put((task, future))
        return future

    def run(self, tasks: Iterable[Callable[[], T]]) -> list[T]:
        """Run all `tasks` and return their results in order; when some raise, all are waited for, then the
        first of those errors is raised here."""
        if threading.current_thread() in self._threads:
            raise StateError("Workers: run inside one of its own tasks would wait for itself; submit instead")
        futures = [self.submit(task) for task in tasks]
        wait(futures)
        return [future.result() for future in futures]

    def spread(self, numel: int, grain: int, work: Callable[[int, int], T]) -> list[T]:
        """Run `work(start, stop)` over 0..numel in chunks of at most `grain`. Where a kernel's blocks matter
        (8-bit moments, sums of squares), `grain` must be a multiple of the block."""
        if grain < 1:
            raise OptionError(f"Workers: grain={grain}; at least one element is needed")

        def chunk(start: int) -> Callable[[], T]:
            return lambda: work(start, min(start + grain, numel))

        return self.run(chunk(start) for start in range(0, numel, grain))

    def close(self) -> None:
        """Finish what was submitted and end the threads."""
        with self._lock:
            if not self._open:
                return
            self._open = False
            for _ in self._threads:
                self._queue.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def halt(self) -> None:
        """Drop what has not begun and end the threads. For the end of the interpreter: a thread that still
        runs then is torn out of its C++ frames, and takes the process down with it."""
        with contextlib.suppress(Empty):
            while True:
                self._queue.get_nowait()
        self.close()


_pools: weakref.WeakSet[Workers] = weakref.WeakSet()
os.register_at_fork(after_in_child=_pools.clear)  # a child has none of their threads


@atexit.register
def _halt_all() -> None:
    for pool in list(_pools):
        pool.halt()


_PAGE, _LEAST, _TURNS = 4096, 1 << 15, 4


class KernelTaker(Protocol):
    """Takes a kernel and its record: runs it at once, or records it for a trip that others make."""

    def take(self, kernel: library.UpdateKernel, record: library.StepRecord) -> None: ...


class ThreadTeam:
    """`threads` native threads. Several callers may be served at once."""

    def __init__(self, threads: int, calls: library.TeamCalls, handle: int) -> None:
        self._threads, self._calls = threads, calls
        self._handle: int | None = handle
        self._lock, self._asking = threading.Condition(), 0

    @classmethod
    def open(cls, threads: int) -> ThreadTeam | None:
        """A team; none where the kernels were not compiled or the system refused the threads."""
        if threads < 1:
            raise OptionError(f"Team: threads={threads}; at least one is needed")
        kernels = library.kernels()
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

    def take(self, kernel: library.UpdateKernel, record: library.StepRecord) -> None:
        """Run a kernel over its record, all threads together; returns when it is done."""
        share = self.share_of(record.rows.count)
        self.go(library.UpdateRecord(None, record.address, kernel.address, share))

    def go(self, update_record: library.UpdateRecord) -> None:
        """Run what it says, and the copies around it; returns when it is done."""
        with self._held() as handle:
            self._calls.run(ctypes.byref(update_record.by(handle)))

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
