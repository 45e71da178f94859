"""Ranks on this host: forked, watched, and never left behind.

The launcher imports torch once and forks the ranks, which so start in the time of one import whatever their
number. It listens on a port that the kernel chose before the first fork, so there is no port to guess and no
race, and serves the store on that socket itself: a rank that connects early waits in the backlog, and the
store outlives rank 0.

A failed attempt leaves nothing to the next: every attempt has its own socket and store, so no rank can meet
the address of a dead one, and is forked from the launcher as the first one was, so nothing is imported again.

Nothing outlives the launcher. Ranks die with it by `PR_SET_PDEATHSIG`, even if it is killed by SIGKILL, and
what they left behind when they failed becomes its child, since it is a subreaper, and is killed.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from zeroshard.errors import OptionError

from .environment import tell_end
from .job import Job, rank_environment, shared_environment
from .outcome import Result, signal_name
from .output import Screen
from .prctl import adopt_orphans
from .rank import Seat, become
from .restart import Restarts
from .watch import SIGNALS, Member, Watch

if TYPE_CHECKING:
    from torch.distributed import Store

_ADDRESS = "127.0.0.1"


def run(job: Job) -> int:
    """Runs a job to its end and returns the exit code. In a rank it returns too, with the script's exit code.

    So it must be called where nothing but the exit of the process follows, and no `finally` is open around
    it.
    """
    check(job)
    os.environ.update(shared_environment(job, os.environ, len(os.sched_getaffinity(0))))
    begun = time.monotonic()
    for name in job.preload:
        importlib.import_module(name)
    adopt_orphans()
    # The launcher waits for these signals instead of handling them. Blocked before the first fork, none can
    # be lost.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    # Objects that are never freed are never written to by the collector, so ranks go on sharing their pages.
    gc.freeze()
    screen = Screen(sys.stdout, sys.stderr)
    restarts = Restarts(job, screen)
    while True:
        ended = attempt(restarts.begin(), restarts.done, begun, screen)
        if isinstance(ended, Seat):
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            return become(ended, restarts.job)
        if not restarts.again(ended):
            return ended.code
        stopped = signal.sigtimedwait(SIGNALS - {signal.SIGCHLD}, restarts.pause)
        if stopped is not None:
            screen.say(f"stopped by {signal_name(stopped.si_signo)} between two attempts")
            return 128 + stopped.si_signo


def attempt(job: Job, number: int, begun: float, screen: Screen) -> Seat | Result:
    """Forks the ranks and watches them to their end; in a rank it returns its seat at once."""
    started = time.monotonic() if number else begun
    listener = socket.create_server((_ADDRESS, 0), backlog=max(128, job.ranks))
    members: list[Member] = []
    for rank in range(job.ranks):
        placed = place(job, rank, number, listener, members)
        if isinstance(placed, Seat):
            return placed
        members.append(placed)
    # Held here alone: the next attempt is forked after this store has ended.
    stores = [serve(listener)] if job.store else []

    def ended_well(rank: int) -> None:
        for store in stores:
            tell_end(store, number, rank)

    watch = Watch(job, members, screen, started, begun, ended_well)
    result = watch.wait()
    listener.close()
    stores.clear()
    return result


def check(job: Job) -> None:
    """Refuses what could not start, before anything is."""
    if not sys.platform.startswith("linux"):
        raise OptionError(
            f"`zeroshard run` needs Linux, and this is {sys.platform}. Use torchrun, or one process."
        )
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


def place(job: Job, rank: int, attempt: int, listener: socket.socket, earlier: list[Member]) -> Seat | Member:
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
        return Member(rank, pid, report[kept], stdout, stderr)
    listener.close()
    for member in earlier:
        for descriptor in (member.report, member.stdout, member.stderr):
            if descriptor is not None:
                os.close(descriptor)
    environment = rank_environment(job, rank, _ADDRESS, port, attempt)
    return Seat(rank, launcher, environment, report[kept], stdout, stderr)


def serve(listener: socket.socket) -> Store:
    """Serves torch's store on a socket that listens already; it ends with the returned object."""
    from torch.distributed import TCPStore

    port: int = listener.getsockname()[1]
    return TCPStore(
        _ADDRESS, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
