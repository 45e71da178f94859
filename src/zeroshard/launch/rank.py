"""Turns a forked process into one rank of `zeroshard run`: the user's script, which tells how it ended.

The fork comes after torch was imported, so N ranks pay for one import, and share its pages. Unlike a forked
worker of `multiprocessing`, a rank leaves through the interpreter's own exit: its atexit functions run, its
threads are joined.

A scheduler that wants the machine back sends SIGTERM, and some seconds later SIGKILL: the first is news for
the loop (`TerminationNotice`), which may save.

[Note: the end of a rank] `zeroshard run` sees its ranks end. Other launchers take a clean end for a success
and tell nobody; the others would wait in `shard` for a rank whose script was shorter. So under such a
launcher, and only there, importing zeroshard registers an exit handler by which the process tells its end.
Only the process that a launcher has started speaks for its rank: a helper that inherits the rank's
environment may end at any time."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import faulthandler
import importlib.util
import io
import linecache
import os
import re
import runpy
import signal
import site
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType

from zeroshard.errors import OptionError, ZeroShardError

from .job import LaunchJob, threads_in
from .join import Announcement, announcement_in
from .linux import die_with_parent, name_process
from .outcome import FAREWELL, RankReport


class TerminationNotice:
    """One per process, like the signal. It only takes note, so that it can arrive at any moment of a step."""

    _listening = False
    _given = False

    @classmethod
    def given(cls) -> bool:
        """Whether SIGTERM has come since the first call, which is when listening begins.

        Python lets only the main thread listen; in others (ranks as threads) the answer is that thread's.
        """
        if not cls._listening and threading.current_thread() is threading.main_thread():
            cls._listen()
        return cls._given

    @classmethod
    def _listen(cls) -> None:
        before = signal.getsignal(signal.SIGTERM)

        def note(number: int, frame: FrameType | None) -> None:
            cls._given = True
            if callable(before):
                before(number, frame)

        signal.signal(signal.SIGTERM, note)
        cls._listening = True


_LAUNCHERS = (
    "torchrun",
    "torch.distributed.run",
    "mpirun",
    "mpiexec",
    "orted",
    "prterun",
    "prted",
    "slurmstepd",
)
_PATIENCE = 2.0  # seconds; a store that does not answer is not waited for


def speak_at_the_end(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process will tell its end: it is a rank of several, and was started by a launcher."""
    try:
        group = announcement_in(environ)
    except OptionError:  # `shard` says what is wrong
        return False
    if group is None or group.world == 1 or not started_by_launcher():
        return False
    atexit.register(_at_exit, os.getpid(), group)
    return True


def started_by_launcher() -> bool:
    """Whether the parent of this process is a launcher of another kind."""
    return _is_launcher(_command(os.getppid()))


def _is_launcher(command: str) -> bool:
    """By the words of a command line: `/usr/bin/python /usr/bin/torchrun --nproc-per-node 2 train.py`."""
    words = command.replace("\0", " ").split()
    return any(Path(word).name.rstrip(":") in _LAUNCHERS for word in words[:5])


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _at_exit(pid: int, group: Announcement) -> None:
    # A forked child has inherited this; without torch.distributed nobody can be told.
    if os.getpid() == pid and "torch.distributed" in sys.modules:
        tell_own_end(group)


def tell_own_end(group: Announcement) -> None:
    """Over the group's store, if this rank has been in no `shard`: those that have tell their end by the
    roll."""
    import torch.distributed as dist

    from zeroshard.comm.connect import end_early, was_in_shard

    from .join import tell_end

    try:
        if was_in_shard():
            return
        if dist.is_available() and dist.is_initialized():
            end_early()
            return
        with socket.create_connection((group.meeting_point, group.port), _PATIENCE):
            pass  # a store that nobody serves yet would be waited for
        brief = timedelta(seconds=_PATIENCE)
        store = dist.TCPStore(
            group.meeting_point, group.port, group.world, False, brief, wait_for_workers=False
        )
        tell_end(store, group.attempt, group.rank)
    except (OSError, RuntimeError):  # whoever kept the store has ended: nobody waits there
        return


# Asks a rank where it is, before it is ended because time is up or another rank failed.
STACKS = signal.SIGUSR2
INTERRUPTED = 128 + signal.SIGINT
_FOREIGN = (os.path.dirname(os.path.dirname(__file__)), *site.getsitepackages())
_OURS = {__file__, runpy.__file__, "<frozen runpy>"}


@dataclass(frozen=True)
class RankSetup:
    """What a forked rank needs to know. Descriptors are write ends; `None` keeps the launcher's stream."""

    rank: int
    launcher: int
    environment: dict[str, str]
    report: int
    stdout: int | None
    stderr: int | None


def become(setup: RankSetup, job: LaunchJob, source: bytes | None = None) -> int:
    """Runs the job's script in this process and returns its exit code; `sys.exit` passes through. `source`:
    what the script says, where the launcher has read it."""
    take(setup)
    own = os.getpid()
    where = os.getcwd() if job.module else os.path.dirname(os.path.abspath(job.target))
    sys.path[0 : 0 if sys.flags.safe_path else 1] = [where]
    sys.argv[:] = [job.target, *job.arguments]
    try:
        if job.before is not None:
            job.before()
        if job.module:
            runpy.run_module(job.target, run_name="__main__", alter_sys=True)
        elif source is not None:
            execute(source, job.target)
        else:
            runpy.run_path(job.target, run_name="__main__")
    except KeyboardInterrupt as error:
        if os.getpid() == own:
            tell_interrupt(setup, error)
        return INTERRUPTED
    except SystemExit as stop:
        if isinstance(stop.code, str) and os.getpid() == own:
            tell(setup, RankReport("SystemExit", stop.code, "", time.monotonic()))
        elif os.getpid() == own:
            tell_end(setup)
        raise
    except BaseException as error:
        if os.getpid() != own:
            raise  # of a child that the script has forked: the rank goes on
        fail(setup, error)
        return 1
    if os.getpid() == own:
        tell_end(setup)
    return 0


def execute(source: bytes, name: str) -> None:
    """Runs a script that is no file, as `python NAME` would."""
    module = types.ModuleType("__main__")
    module.__file__, module.__builtins__ = name, builtins  # type: ignore[attr-defined]
    text, label = importlib.util.decode_source(source), f"<{name}>"
    linecache.cache[label] = len(source), None, text.splitlines(keepends=True), label  # for `inspect`
    sys.modules["__main__"] = module
    # By another name, since whoever prints a traceback would read the pipe.
    exec(compile(source, label, "exec"), module.__dict__)


def take(setup: RankSetup) -> None:
    """Makes the forked copy of the launcher a process of its own."""
    die_with_parent(setup.launcher)
    name_process(f"zs-rank-{setup.rank}")
    if setup.rank > 0:
        # Only one process can read the terminal.
        silence = os.open(os.devnull, os.O_RDONLY)
        os.dup2(silence, 0)
        os.close(silence)
    for stream, target in ((setup.stdout, 1), (setup.stderr, 2)):
        if stream is not None:
            os.dup2(stream, target)
            os.close(stream)
    # Lines leave whole and at once, so that those of several ranks do not mix and none is lost in a crash.
    for text in (sys.stdout, sys.stderr):
        if hasattr(text, "reconfigure"):
            text.reconfigure(line_buffering=True, write_through=False)
    os.environ.update(setup.environment)
    faulthandler.enable()
    # What stands when the interpreter has taken its own handler away at its end: a rank that has a long way
    # out was killed by being asked for its stack.
    signal.signal(STACKS, signal.SIG_IGN)
    faulthandler.register(STACKS, all_threads=True)
    threads = threads_in(os.environ)
    if "torch" in sys.modules and threads is not None:
        # OpenMP read the variable when torch was imported; whoever imported it may have done so before it was
        # set.
        sys.modules["torch"].set_num_threads(threads)
    if "numpy.random" in sys.modules:
        # Python's own generator reseeds itself after a fork, numpy's does not: ranks would draw the same
        # numbers.
        sys.modules["numpy.random"].seed()


def fail(setup: RankSetup, error: BaseException) -> None:
    """Hands an uncaught exception to the launcher, which prints it unless another rank said the same already.

    The hook in place is called, since transports and the script itself learn of the failure by it; what it
    would print goes to the launcher.
    """
    at = time.monotonic()
    trace = trim(error.__traceback__)
    if isinstance(error, ZeroShardError):
        trace = to_the_callers_line(trace)
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
    tell(setup, RankReport(type(error).__qualname__, str(error), text, at))


def tell_interrupt(setup: RankSetup, error: KeyboardInterrupt) -> None:
    """Where it was: the launcher, unless it was stopped too, names it as the cause. Without a traceback, of
    which every rank would print one after a Ctrl-C."""
    frames = traceback.extract_tb(trim(error.__traceback__))
    own = [frame for frame in frames if not frame.filename.startswith(_FOREIGN)] or frames
    where = f" at {os.path.basename(own[-1].filename)}:{own[-1].lineno}" if own else ""
    tell(setup, RankReport("KeyboardInterrupt", f"interrupted (SIGINT){where}", "", time.monotonic()))


def tell_end(setup: RankSetup) -> None:
    """The script came to its end, or to `sys.exit`: what follows is the interpreter's exit."""
    write(setup, FAREWELL)


def tell(setup: RankSetup, report: RankReport) -> None:
    """Writes a report."""
    write(setup, report.encode())


def write(setup: RankSetup, left: bytes) -> None:
    """To the launcher; one that is gone takes this process along anyway."""
    try:
        while left:
            left = left[os.write(setup.report, left) :]
    except OSError:
        return


def trim(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's first frame on: how it was started is no part of the error."""
    while trace is not None and trace.tb_frame.f_code.co_filename in _OURS:
        trace = trace.tb_next
    return trace


def to_the_callers_line(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without what was called inside of the package: an error of ours is about the line that
    called, and says what to type there."""
    links = []
    while trace is not None:
        links.append(trace)
        trace = trace.tb_next
    callers = [
        at
        for at, link in enumerate(links)
        if link.tb_frame.f_globals.get("__name__", "").partition(".")[0] != "zeroshard"
    ]
    shown = None
    for link in reversed(links[: callers[-1] + 1] if callers else links):
        shown = TracebackType(shown, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return shown
