"""A rank, seen from inside: the forked process takes its seat and becomes the user's script.

The fork comes after torch was imported, so N ranks pay for one import, and share its pages. Unlike a forked
worker of `multiprocessing`, a rank leaves through the interpreter's own exit: its atexit functions run, its
threads are joined.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import re
import runpy
import signal
import site
import sys
import time
import traceback
from dataclasses import dataclass
from types import TracebackType

from .job import Job
from .outcome import Report
from .prctl import die_with_parent, name_process

# Asks a rank where it is. Only `--timeout` sends it.
STACKS = signal.SIGUSR2
INTERRUPTED = 128 + signal.SIGINT
_FOREIGN = (os.path.dirname(os.path.dirname(__file__)), *site.getsitepackages())
_OURS = {__file__, runpy.__file__, "<frozen runpy>"}


@dataclass(frozen=True)
class Seat:
    """What a forked rank needs to know. Descriptors are write ends; `None` keeps the launcher's stream."""

    rank: int
    launcher: int
    environment: dict[str, str]
    report: int
    stdout: int | None
    stderr: int | None


def become(seat: Seat, job: Job) -> int:
    """Runs the job's script in this process and returns its exit code; `sys.exit` passes through."""
    take(seat)
    own = os.getpid()
    where = os.getcwd() if job.module else os.path.dirname(os.path.abspath(job.target))
    sys.path[0 : 0 if sys.flags.safe_path else 1] = [where]
    sys.argv[:] = [job.target, *job.arguments]
    try:
        if job.module:
            runpy.run_module(job.target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(job.target, run_name="__main__")
    except KeyboardInterrupt as error:
        if os.getpid() == own:
            tell_interrupt(seat, error)
        return INTERRUPTED
    except SystemExit as stop:
        if isinstance(stop.code, str) and os.getpid() == own:
            tell(seat, Report("SystemExit", stop.code, "", time.monotonic()))
        raise
    except BaseException as error:
        if os.getpid() != own:
            raise  # of a child that the script has forked: the rank goes on
        fail(seat, error)
        return 1
    return 0


def take(seat: Seat) -> None:
    """Makes the forked copy of the launcher a process of its own."""
    die_with_parent(seat.launcher)
    name_process(f"zs-rank-{seat.rank}")
    if seat.rank > 0:
        # Only one process can read the terminal.
        silence = os.open(os.devnull, os.O_RDONLY)
        os.dup2(silence, 0)
        os.close(silence)
    for stream, target in ((seat.stdout, 1), (seat.stderr, 2)):
        if stream is not None:
            os.dup2(stream, target)
            os.close(stream)
    # Lines leave whole and at once, so that those of several ranks do not mix and none is lost in a crash.
    for text in (sys.stdout, sys.stderr):
        if hasattr(text, "reconfigure"):
            text.reconfigure(line_buffering=True, write_through=False)
    os.environ.update(seat.environment)
    faulthandler.enable()
    faulthandler.register(STACKS, all_threads=True)
    if "torch" in sys.modules and "OMP_NUM_THREADS" in os.environ:
        # OpenMP read the variable when torch was imported; whoever imported it may have done so before it was
        # set.
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if "numpy.random" in sys.modules:
        # Python's own generator reseeds itself after a fork, numpy's does not: ranks would draw the same
        # numbers.
        sys.modules["numpy.random"].seed()


def fail(seat: Seat, error: BaseException) -> None:
    """Hands an uncaught exception to the launcher, which prints it unless another rank said the same already.

    The hook in place is called, since transports and the script itself learn of the failure by it; what it
    would print goes to the launcher.
    """
    at = time.monotonic()
    trace = trim(error.__traceback__)
    error = error.with_traceback(trace)
    # What the interpreter sets before it calls the hook; exit handlers read it to know that the process is
    # failing.
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            sys.excepthook(type(error), error, trace)
    except Exception:
        printed.write(traceback.format_exc())
    # torch.distributed's hook puts the rank before each line, as the launcher will.
    text = re.sub(r"(?m)^\[rank\d+\]: ", "", printed.getvalue())
    tell(seat, Report(type(error).__qualname__, str(error), text, at))


def tell_interrupt(seat: Seat, error: KeyboardInterrupt) -> None:
    """Where it was: the launcher, unless it was stopped too, names it as the cause. Without a traceback, of
    which every rank would print one after a Ctrl-C."""
    frames = traceback.extract_tb(trim(error.__traceback__))
    own = [frame for frame in frames if not frame.filename.startswith(_FOREIGN)] or frames
    where = f" at {os.path.basename(own[-1].filename)}:{own[-1].lineno}" if own else ""
    tell(seat, Report("KeyboardInterrupt", f"interrupted (SIGINT){where}", "", time.monotonic()))


def tell(seat: Seat, report: Report) -> None:
    """Writes a report; a launcher that is gone takes this process along anyway."""
    left = report.encode()
    try:
        while left:
            left = left[os.write(seat.report, left) :]
    except OSError:
        return


def trim(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's first frame on: how it was started is no part of the error."""
    while trace is not None and trace.tb_frame.f_code.co_filename in _OURS:
        trace = trace.tb_next
    return trace
