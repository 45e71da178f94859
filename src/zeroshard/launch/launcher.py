"""Starts ranks on this host, watches them, and leaves none behind.

The launcher imports torch once and forks the ranks, which so start in the time of one import whatever their
number. It listens on a port that the kernel chose before the first fork, so there is no port to guess and no
race, and serves the store on that socket itself: a rank that connects early waits in the backlog, and the
store outlives rank 0.

A failed attempt leaves nothing to the next: every attempt has its own socket and store, so no rank can meet
the address of a dead one, and is forked from the launcher as the first one was, so nothing is imported again.

Nothing outlives the launcher. Ranks die with it by `PR_SET_PDEATHSIG`, even if it is killed by SIGKILL, and
what they left behind when they failed becomes its child, since it is a subreaper, and is killed."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import stat
import sys
import threading
import time
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from zeroshard.errors import OptionError

from .job import STARTED, LaunchJob, rank_environment, shared_environment
from .join import announced, tell_end
from .linux import CaughtSignal, adopt_orphans, heeded, take
from .outcome import AttemptResult
from .output import OutputStreams, open_streams
from .rank import RankSetup, become, started_by_launcher
from .restart import RestartPolicy
from .supervisor import SIGNALS, RankProcess, Supervisor

if TYPE_CHECKING:
    from torch.distributed import Store

_ADDRESS = "127.0.0.1"
_STORE = 60.0  # seconds that the launcher waits for its own store to answer


def run(job: LaunchJob) -> int:
    """Runs a job to its end and returns the exit code. In a rank it returns too, with the script's exit code.

    So it must be called where nothing but the exit of the process follows, and no `finally` is open around
    it.
    """
    open_streams()
    check(job)
    source = script_of(job)
    os.environ.update(shared_environment(job, os.environ, len(os.sched_getaffinity(0))))
    begun = time.monotonic()
    for name in job.preload:
        importlib.import_module(name)
    adopt_orphans()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, nobody learns how a child ended
    # The launcher waits for these signals instead of handling them. Blocked before the first fork, none can
    # be lost.
    signals = heeded(SIGNALS)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    # Objects that are never freed are never written to by the collector, so ranks go on sharing their pages.
    gc.freeze()
    screen = OutputStreams(sys.stdout, sys.stderr)
    restarts = RestartPolicy(job, screen)
    while True:
        ended = attempt(restarts.begin(), restarts.done, begun, screen, signals)
        if isinstance(ended, RankSetup):
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            return become(ended, restarts.job, source)
        if not restarts.again(ended):
            return ended.code
        stopped = told_within(restarts.pause, signals - {signal.SIGCHLD})
        if stopped is not None:
            screen.say(f"stopped by {stopped.number.name} between two attempts")
            return 128 + stopped.number


def told_within(seconds: float, signals: Collection[signal.Signals]) -> CaughtSignal | None:
    """The signal that came in this time, if one did."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        caught = take(signals, left)
        if caught is not None:
            return caught
    return None


def attempt(
    job: LaunchJob, number: int, begun: float, screen: OutputStreams, signals: frozenset[signal.Signals]
) -> RankSetup | AttemptResult:
    """Forks the ranks and watches them to their end; in a rank it returns its seat at once."""
    started = time.monotonic() if number else begun
    listener = socket.create_server((_ADDRESS, 0), backlog=max(128, job.ranks))
    members: list[RankProcess] = []
    for rank in range(job.ranks):
        placed = place(job, rank, number, listener, members)
        if isinstance(placed, RankSetup):
            return placed
        members.append(placed)
    keeper = StoreServer(listener, number) if job.store else None
    watch = Supervisor(job, members, screen, started, begun, signals, keeper)
    result = watch.wait()
    if keeper is not None:
        keeper.close()
    listener.close()
    return result


def check(job: LaunchJob) -> None:
    """Refuses what could not start, before anything is."""
    if not sys.platform.startswith("linux"):
        raise OptionError(
            f"`zeroshard run` needs Linux, and this is {sys.platform}. Use torchrun, or one process."
        )
    refuse_copies()
    if not job.module and not Path(job.target).exists():
        where = f" in {os.getcwd()}" if not os.path.isabs(job.target) else ""
        raise OptionError(
            f"there is no script {job.target!r}{where}. For a module: zeroshard run --ranks N -m NAME"
        )
    if job.log_dir is not None:
        try:
            job.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(
                f"--log-dir {job.log_dir} cannot be made: {error.strerror}. Name a folder that this user may "
                "write to"
            ) from error


def refuse_copies() -> None:
    """Another launcher that starts this one several times would start several jobs that know nothing of one
    another. A job inside a rank of `zeroshard run` is meant."""
    group = announced()
    if group is None or group.world == 1 or os.environ.get(STARTED) == str(group.port):
        return
    if group.source in ("Slurm", "Open MPI") or started_by_launcher():
        raise OptionError(
            f"`zeroshard run` starts all ranks of a job itself, on one host, and {group.source} has started "
            f"it {group.world} times (this is number {group.rank}): each would train a job of its own. Give "
            "the script itself to that launcher (srun -n 2 python train.py), or start this one once (srun "
            "-n 1 zeroshard run …)"
        )


def script_of(job: LaunchJob) -> bytes | None:
    """What a script says that can be read only once, as a pipe, for all ranks and attempts; else None."""
    path = Path(job.target)
    if job.module or path.is_dir():
        return None
    # /dev/stdin of another rank is another file.
    own = os.path.abspath(path).startswith(("/dev/", "/proc/"))
    return path.read_bytes() if own or not stat.S_ISREG(path.stat().st_mode) else None


def place(
    job: LaunchJob, rank: int, attempt: int, listener: socket.socket, earlier: list[RankProcess]
) -> RankSetup | RankProcess:
    """Forks a rank. In the rank it returns its seat, in the launcher the member to watch."""
    report = os.pipe()
    streams = [os.pipe(), os.pipe()] if rank > 0 else []
    sys.stdout.flush()
    sys.stderr.flush()
    launcher = os.getpid()
    port: int = listener.getsockname()[1]
    with warnings.catch_warnings():
        # Python 3.12 warns if there are threads. numpy's BLAS has some, and stops them itself before a fork.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        pid = os.fork()
    kept, closed = (1, 0) if pid == 0 else (0, 1)
    for pipe in (report, *streams):
        os.close(pipe[closed])
    stdout, stderr = (pipe[kept] for pipe in streams) if streams else (None, None)
    if pid != 0:
        return RankProcess(rank, pid, report[kept], stdout, stderr)
    listener.close()
    for member in earlier:
        for descriptor in (member.report, member.stdout, member.stderr):
            if descriptor is not None:
                os.close(descriptor)
    environment = rank_environment(job, rank, _ADDRESS, port, attempt)
    return RankSetup(rank, launcher, environment, report[kept], stdout, stderr)


class StoreServer:
    """Serves torch's store on a socket that listens already.

    In a thread of its own: the store connects to itself while it starts, which takes minutes where loopback
    does not answer, and the launcher has to hear signals meanwhile. The next attempt is forked after it has
    ended.
    """

    def __init__(self, listener: socket.socket, attempt: int) -> None:
        self._attempt = attempt
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._ended: list[int] = []  # ranks that ended well before the store was there
        self.trouble: str | None = None
        self._thread = threading.Thread(target=self._serve, args=(listener,), daemon=True)
        self._thread.start()

    def _serve(self, listener: socket.socket) -> None:
        from datetime import timedelta

        from torch.distributed import TCPStore

        port: int = listener.getsockname()[1]
        try:
            store = TCPStore(
                _ADDRESS,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=_STORE),
                master_listen_fd=listener.detach(),
            )
        except RuntimeError as error:
            self.trouble = (
                f"the store at {_ADDRESS}:{port}, over which ranks meet, does not answer: "
                f"{str(error).splitlines()[0]}. Is the loopback interface up (ip link set lo up)?"
            )
            return
        with self._lock:
            self._store = store
        self._tell()

    def ended_well(self, rank: int) -> None:
        """A rank has ended, and nobody shall wait for it."""
        with self._lock:
            self._ended.append(rank)
        self._tell()

    def _tell(self) -> None:
        with self._lock:
            while self._store is not None and self._ended:
                tell_end(self._store, self._attempt, self._ended.pop())

    def close(self) -> None:
        """The store ends with this; a thread that still waits for it is left behind."""
        self._thread.join(0.0)
        with self._lock:
            self._store = None
