"""Ranks for the tests of transports: as threads of this process, or as processes that may be killed."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist

from zeroshard.comm import GlooTransport, LocalTransport, NodesTransport, ShmTransport, Transport
from zeroshard.comm.topology import by_count
from zeroshard.testing.processes import server

KINDS = {"shm": ShmTransport, "gloo": GlooTransport}


def make(kind: str, store: Any, rank: int, size: int, timeout: float = 60.0) -> Transport:
    if size == 1:
        return LocalTransport(torch.device("cpu"))
    if kind == "nodes":
        return NodesTransport(store, rank, by_count(size, 2), torch.device("cpu"), timeout)
    return KINDS[kind](store, rank, size, timeout=timeout)


def threads(
    kind: str, size: int, body: Callable[[Transport], Any], fails: bool = False, timeout: float = 60.0
) -> list[Any]:
    """Run `body` on every rank as a thread. With `fails` exceptions are results, else the first is raised."""
    store = dist.HashStore()
    results: list[Any] = [None] * size
    meet = threading.Barrier(size)

    def run(rank: int) -> None:
        try:
            transport = make(kind, store, rank, size, timeout)
            try:
                results[rank] = body(transport)
                if not fails:
                    meet.wait(300)
            finally:
                transport.close()
        except BaseException as error:
            results[rank] = error
            meet.abort()

    ranks = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(300)
    assert not any(thread.is_alive() for thread in ranks), "\n".join(_hanging(ranks))
    if not fails:
        for result in sorted(results, key=lambda result: isinstance(result, threading.BrokenBarrierError)):
            if isinstance(result, BaseException):
                raise result
    return results


def _hanging(ranks: list[threading.Thread]) -> list[str]:
    """Where those are that do not end."""
    frames = sys._current_frames()
    return [
        f"rank {rank} hangs:\n" + "".join(traceback.format_stack(frames[thread.ident]))
        for rank, thread in enumerate(ranks)
        if thread.ident in frames
    ]


class Ranks:
    """Processes that each run `body(rank, store path, report)`; `report(value)` sends a value to the test."""

    def __init__(self, size: int, body: Callable[..., None], *arguments: Any) -> None:
        context = server()
        self._folder = tempfile.TemporaryDirectory()
        path = os.path.join(self._folder.name, "store")
        # A pipe each, and no queue: what was sent is out before the process is killed.
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        self._ends = {end: rank for rank, (end, _) in enumerate(pipes)}
        self.processes = [
            context.Process(target=_run, args=(body, rank, path, pipes[rank][1], *arguments), daemon=True)
            for rank in range(size)
        ]
        for process, (_, other) in zip(self.processes, pipes, strict=True):
            process.start()
            other.close()

    def reports(self, seconds: float) -> dict[int, Any]:
        """The first value that each rank reported; "nothing" from one that ended without."""
        found: dict[int, Any] = {}
        deadline = time.monotonic() + seconds
        while len(found) < len(self.processes):
            ready = wait(
                [end for end, rank in self._ends.items() if rank not in found], deadline - time.monotonic()
            )
            if not ready:
                break
            for end in ready:
                try:
                    found[self._ends[end]] = end.recv()
                except EOFError:
                    found[self._ends[end]] = "nothing"
        return found

    def join(self, seconds: float) -> list[int | None]:
        """Exit codes, or None for a process that still runs after so long; it is then killed."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            if process.exitcode is None:
                process.kill()
                process.join()
        for end in self._ends:
            end.close()
        self._folder.cleanup()
        return codes


def _run(body: Callable[..., None], rank: int, path: str, pipe: Any, *arguments: Any) -> None:
    torch.set_num_threads(1)
    body(rank, path, pipe.send, *arguments)
