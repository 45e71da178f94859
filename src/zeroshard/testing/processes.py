"""Ranks as processes that stay alive between calls."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zeroshard.extend import PRELOAD

# Imported once by the server that ranks are forked from, so that a pool starts in a fraction of a second.
# What is not installed is passed over; the last one is told that all is there.
_PRELOAD = [*PRELOAD, "torch.utils.checkpoint", "pytest", "hypothesis", "zeroshard.testing.preloaded"]
_GRACE = 12.0  # for the other ranks once one has failed: longer than it takes a transport to notice


class RankFailure(AssertionError):
    """A function failed on some rank. The text holds every rank's own."""


@dataclass(frozen=True)
class Outcome:
    """What a function returned on one rank, or how it failed there: `kind` is the exception's class name."""

    value: Any = None
    kind: str | None = None
    message: str = ""
    trace: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Outcome:
        return cls(None, type(error).__name__, str(error), "".join(traceback.format_exception(error)))


def summary(function: Callable[..., Any], failed: Sequence[str], size: int) -> str:
    return "\n".join((f"{function.__qualname__} failed on {len(failed)} of {size} ranks", *failed))


def server() -> ForkServerContext:
    """Starts processes as forks of one that has imported torch and ZeroShard; the first starts that too."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


class Ranks:
    """`size` processes in one group that run functions sent to them. One that fails takes the pool along; the
    next call starts a new one. Warnings are errors there, unless `warn` names another action.

    `backend`: ``"gloo"``, or ``"nccl"`` for GPUs beside it. Ranks then take the GPUs by turns and share them
    where there are fewer, which NCCL allows between hosts: each rank says that it is one.
    """

    def __init__(self, size: int, warn: str = "error", backend: str = "gloo") -> None:
        self.size, self.warn, self.backend = size, warn, backend
        self._processes: list[Any] = []
        self._orders: list[Connection] = []
        self._lifelines: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 300.0) -> list[Any]:
        """`function(*args)` on every rank: the results in rank order, or `RankFailure` if one failed."""
        outcomes = self.attempt(function, *args, timeout=timeout)
        if any(outcome.kind for outcome in outcomes):
            told = [f"--- rank {rank}\n{o.trace or o.message}" for rank, o in enumerate(outcomes) if o.kind]
            raise RankFailure(summary(function, told, self.size))
        return [outcome.value for outcome in outcomes]

    def attempt(self, function: Callable[..., Any], *args: Any, timeout: float = 300.0) -> list[Outcome]:
        """As `run`, but a failure is an answer like any other."""
        order = pickle.dumps((function, args))
        if not self._processes:
            self._start()
        for pipe in self._orders:
            pipe.send_bytes(order)
        outcomes = self._answers(time.monotonic() + timeout)
        late = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
        stacks = self._stacks(late) if late else {}
        result = [o or Outcome(None, "TimeoutError", f"no answer in time; it was at\n{stacks.get(rank, '')}")
                  for rank, o in enumerate(outcomes)]  # fmt: skip
        if any(outcome.kind for outcome in result):
            self.stop()
        return result

    def _answers(self, deadline: float) -> list[Outcome | None]:
        """One answer per rank, None where there was none in time."""
        answers: list[Outcome | None] = [None] * self.size
        while waiting := [pipe for pipe, answer in zip(self._orders, answers, strict=True) if answer is None]:
            ready = wait(waiting, max(deadline - time.monotonic(), 0.0))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = self._orders.index(pipe)
                try:
                    answer: Outcome = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(1.0)
                    code = self._processes[rank].exitcode
                    answer = Outcome(None, "ProcessEnded", f"the process ended with exit code {code}")
                answers[rank] = answer
                if answer.kind:
                    deadline = min(deadline, time.monotonic() + _GRACE)
        return answers

    def _stacks(self, late: Sequence[int]) -> dict[int, str]:
        """Where ranks are that do not answer: each writes its stacks to a file when it gets the signal."""
        assert self._folder is not None
        for rank in late:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.3)
        files = {rank: Path(self._folder.name, f"stacks-{rank}") for rank in late}
        return {rank: file.read_text() for rank, file in files.items() if file.exists()}

    def _start(self) -> None:
        context = server()
        self._folder = tempfile.TemporaryDirectory(prefix="zeroshard-ranks-")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            ear, lifeline = context.Pipe(duplex=False)
            where = (rank, self.size, self._folder.name, self.backend)
            process = context.Process(target=_serve, args=(where, self.warn, theirs, ear), daemon=True)
            process.start()
            theirs.close()
            ear.close()
            self._processes.append(process)
            self._orders.append(ours)
            self._lifelines.append(lifeline)

    def stop(self) -> None:
        """Kill the processes, if any. The next call starts others."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._orders + self._lifelines:
            pipe.close()
        self._processes, self._orders, self._lifelines = [], [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


_pools: dict[tuple[int, str], Ranks] = {}


def ranks(size: int, backend: str = "gloo") -> Ranks:
    """The pool of `size` ranks of this process, kept until it ends."""
    key = size, backend
    if key not in _pools:
        _pools[key] = Ranks(size, backend=backend)
        atexit.register(_pools[key].stop)
    return _pools[key]


def _serve(where: tuple[int, int, str, str], warn: str, orders: Connection, lifeline: Connection) -> None:
    """A rank's life: join the group, then run what is sent."""
    rank, size, folder, backend = where
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
    stacks = open(Path(folder, f"stacks-{rank}"), "w", encoding="utf-8")  # noqa: SIM115 - open as long as the process
    faulthandler.register(signal.SIGUSR1, file=stacks)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no name resolution, and no way out of this host
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), size)
    device = None
    if backend == "nccl":
        os.environ |= {"NCCL_HOSTID": f"rank {rank}", "NCCL_SOCKET_IFNAME": "lo"}
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, device_id=device)
    # A rank that has joined may be the first whose task ends it, while others still connect to it.
    store.set(f"joined-{rank}", "yes")
    store.wait([f"joined-{other}" for other in range(size)])
    warnings.simplefilter(warn)  # type: ignore[arg-type]
    gc.collect()
    gc.freeze()  # what is there now stays: the collection after each call looks at the rest only
    while True:
        try:
            order = orders.recv_bytes()
        except EOFError:
            return
        try:
            function, args = pickle.loads(order)
            answer = Outcome(function(*args))
        except BaseException as error:
            # As if the process died of it, so that its transports tell the peers.
            sys.excepthook(type(error), error, error.__traceback__)
            answer = Outcome.of(error)
        orders.send_bytes(pickle.dumps(answer))
        del order, answer
        gc.collect()


def _end_with_parent(lifeline: Connection) -> None:
    """The other end closes when the parent ends, even by SIGKILL: a stuck rank must not stay behind."""
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv_bytes()
    os._exit(1)
