"""For tests of sharded training: ranks that outlive a test, ranks as threads, assertions on numbers, bytes.

    from zeroshard.testing import assert_same_bits, ranks

    def train(stage):                       # a module-level function: it travels by name
        ...
        with run.gathered() as whole:
            return {name: p.detach().clone() for name, p in whole.items()}

    def test_stages_agree():
        plain, sharded = ranks(2).run(train, 0)[0], ranks(2).run(train, 3)[0]
        assert_same_bits(sharded, plain)

`ranks(n)` starts n processes once; a call then costs its own time and not that of importing torch. Processes
meet through a file and talk over the loopback interface: no port is fixed, so sessions can run side by side.
"""

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
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "Outcome",
    "PeakBytes",
    "RankFailure",
    "Ranks",
    "assert_bytes",
    "assert_losses",
    "assert_same_bits",
    "ranks",
    "run_threads",
    "tensor_bytes",
    "ulps",
]

# Imported once by the server that ranks are forked from, so that a pool starts in a fraction of a second.
_PRELOAD = ["torch.distributed.tensor", "torch._dynamo", "torch.utils.checkpoint", "zeroshard.testing"]
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


def _summary(function: Callable[..., Any], failed: Sequence[str], size: int) -> str:
    return "\n".join((f"{function.__qualname__} failed on {len(failed)} of {size} ranks", *failed))


class Ranks:
    """`size` processes in one gloo group that run functions sent to them. One that fails takes the pool
    along; the next call starts a new one. Warnings are errors there, unless `warn` names another action."""

    def __init__(self, size: int, warn: str = "error") -> None:
        self.size, self.warn = size, warn
        self._processes: list[Any] = []
        self._orders: list[Connection] = []
        self._lifelines: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """`function(*args)` on every rank: the results in rank order, or `RankFailure` if one failed."""
        outcomes = self.attempt(function, *args, timeout=timeout)
        if any(outcome.kind for outcome in outcomes):
            told = [f"--- rank {rank}\n{o.trace or o.message}" for rank, o in enumerate(outcomes) if o.kind]
            raise RankFailure(_summary(function, told, self.size))
        return [outcome.value for outcome in outcomes]

    def attempt(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Outcome]:
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
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self._folder = tempfile.TemporaryDirectory(prefix="zeroshard-ranks-")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            ear, lifeline = context.Pipe(duplex=False)
            where = (rank, self.size, self._folder.name)
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


_pools: dict[int, Ranks] = {}


def ranks(size: int) -> Ranks:
    """The pool of `size` ranks of this process, kept until it ends."""
    if size not in _pools:
        _pools[size] = Ranks(size)
        atexit.register(_pools[size].stop)
    return _pools[size]


def _serve(where: tuple[int, int, str], warn: str, orders: Connection, lifeline: Connection) -> None:
    """A rank's life: join the group, then run what is sent."""
    rank, size, folder = where
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
    stacks = open(Path(folder, f"stacks-{rank}"), "w", encoding="utf-8")  # noqa: SIM115 - open as long as the process
    faulthandler.register(signal.SIGUSR1, file=stacks)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no name resolution, and no way out of this host
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
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


# ---------------------------------------------------------------------- threads


def run_threads(size: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """`function(*args)` on `size` threads of this process, each a rank of one group; results in rank order.

    Cheap for many ranks, and a debugger sees them all. CPU only. Threads share torch's random numbers: draw
    from generators of your own.
    """
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    outcomes: list[Outcome | None] = [None] * size
    store = dist.HashStore()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    threaded._install_threaded_pg()
    try:
        body = partial(_thread, threaded.ProcessLocalGroup, store, outcomes, partial(function, *args))
        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
    told = [o.trace if o else "no answer in time" for o in outcomes]
    failed = [f"--- rank {rank}\n{text}" for rank, text in enumerate(told) if text]
    if failed:
        raise RankFailure(_summary(function, failed, size))
    return [outcome.value for outcome in outcomes if outcome is not None]


def _thread(
    group: Any, store: dist.Store, outcomes: list[Outcome | None], call: Callable[[], Any], rank: int
) -> None:
    size = len(outcomes)
    try:
        dist.init_process_group("threaded", store=store, rank=rank, world_size=size)
        outcomes[rank] = Outcome(call())
        dist.destroy_process_group()
    except BaseException as error:
        outcomes[rank] = Outcome.of(error)
        group.exception_handle(error)  # wakes the ranks that wait for this one


# ---------------------------------------------------------------------- numbers


def ulps(got: Tensor, want: Tensor) -> int:
    """The largest distance of two tensors, counted in floating-point numbers; NaNs of equal bits agree."""
    if got.shape != want.shape or got.dtype != want.dtype:
        sides = f"{tuple(got.shape)} {got.dtype} and {tuple(want.shape)} {want.dtype}"
        raise AssertionError(f"tensors of {sides} cannot be compared")
    if got.numel() == 0:
        return 0
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    first, second = (_ordered(t.detach().contiguous().view(width)) for t in (got, want))
    return int((first - second).abs().max())


def _ordered(bits: Tensor) -> Tensor:
    """Bit patterns as integers in the order of the numbers they stand for; both zeros are 0."""
    wide = bits.to(torch.int64)
    return torch.where(wide < 0, torch.iinfo(bits.dtype).min - wide, wide)


def assert_same_bits(got: Mapping[str, Tensor], want: Mapping[str, Tensor], within: int = 0) -> None:
    """The same names and, tensor by tensor, the same numbers, at most `within` ulps apart."""
    missing = sorted(set(got) ^ set(want))
    if missing:
        raise AssertionError(f"names on one side only: {', '.join(missing[:5])}")
    apart = {name: ulps(got[name], value) for name, value in want.items()}
    bad = {name: distance for name, distance in apart.items() if distance > within}
    if bad:
        shown = "; ".join(
            f"`{name}` by {distance} ulps, {(got[name] - want[name]).abs().max():.3g} in value"
            for name, distance in list(bad.items())[:5]
        )
        raise AssertionError(f"{len(bad)} of {len(apart)} tensors differ by more than {within} ulps: {shown}")


def assert_losses(got: Sequence[float], want: Sequence[float], relative: float) -> float:
    """Every loss within `relative` of the wanted one. Returns the largest relative difference."""
    if len(got) != len(want) or not got:
        raise AssertionError(f"{len(got)} losses cannot be compared with {len(want)}")
    gaps = [abs(a - b) / max(abs(b), 1e-30) for a, b in zip(got, want, strict=True)]
    worst = max(range(len(gaps)), key=lambda i: gaps[i] if gaps[i] == gaps[i] else float("inf"))
    if not gaps[worst] <= relative:
        both = f"loss {worst} is {got[worst]!r} and should be {want[worst]!r}"
        raise AssertionError(f"{both}: off by {gaps[worst]:.3g}, allowed {relative:.3g}")
    return gaps[worst]


# ---------------------------------------------------------------------- bytes


def tensor_bytes() -> tuple[int, dict[int, int]]:
    """Bytes of all storages that tensors of this process refer to: in private memory, and by inode in
    segments that several ranks map. To count a segment once, merge the second parts of all ranks.

    Found by walking Python's objects, and by nothing that the library says of itself.
    """
    gc.collect()
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if isinstance(thing, Tensor) and not thing.is_meta:
            local = getattr(thing, "_local_tensor", thing)
            storage = local.untyped_storage()
            storages[storage.data_ptr()] = max(storage.nbytes(), storages.get(storage.data_ptr(), 0))
    storages = _outermost(storages)
    shared = _shared_segments()
    private = sum(size for at, size in storages.items() if at not in shared)
    return private, {shared[at]: size for at, size in storages.items() if at in shared}


def _outermost(storages: dict[int, int]) -> dict[int, int]:
    """Without storages that are a part of another one's memory."""
    kept, end = {}, 0
    for at, size in sorted(storages.items()):
        if at + size > end:
            kept[at] = size
            end = at + size
    return kept


def _shared_segments() -> dict[int, int]:
    """Address → inode of every segment of shared memory that this process maps."""
    found = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *name = line.split(None, 5)
        if name and name[0].startswith("/memfd:"):
            found[int(span.split("-")[0], 16)] = int(inode)
    return found


def assert_bytes(got: float, want: float, within: float, what: str) -> None:
    """`got` within a fraction of `want`; the message has both and their ratio."""
    if not abs(got - want) <= within * want:
        wanted = f"expected {want:,.0f} within {within:.1%}, off by {got / want - 1:+.2%}"
        raise AssertionError(f"{what}: {got:,.0f} bytes, {wanted}")


class PeakBytes(TorchDispatchMode):
    """While active, counts the bytes of tensors that operations make, and the most that lived at one time.

    with PeakBytes() as peak:
        loss.backward()
    assert peak.most < 2**20
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in _flat(result):
            self._meet(tensor)
        return result

    def _meet(self, tensor: Tensor) -> None:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._part, key)

    def _part(self, key: int) -> None:
        self.now -= self._known.pop(key, 0)


def _flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
