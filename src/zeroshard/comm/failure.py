"""When this process fails, its transports tell the peers why before it is gone.

Python ends a failing process in two ways that matter here: through `sys.excepthook`, and inside
`multiprocessing`, which prints the traceback itself but runs its finalizers while the exception is in flight.
A process killed by a signal says nothing: its peers notice that it is gone. One that ends well says that too.
A child that a rank forks (a worker that loads data) ends as it likes: it has no transports.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
import os
import sys
import weakref
from types import TracebackType
from typing import Protocol

from zeroshard.errors import RankError

__all__ = ["EXIT_STUCK", "describe", "give_up", "listen", "unlisten"]

# The exit status of a rank that was stuck where no exception reaches it: EX_SOFTWARE of sysexits.h. Not
# EX_TEMPFAIL, with which a rank leaves that was told to stop (`launch.job.PREEMPTED`).
EXIT_STUCK = 70


class Listener(Protocol):
    rank: int

    def report(self, text: str) -> None: ...

    def cause(self) -> str | None: ...

    def close(self) -> None: ...


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
os.register_at_fork(after_in_child=_listeners.clear)
_installed = False


def listen(listener: Listener) -> None:
    """From now on `listener.report(text)` is called if this process fails."""
    _install()
    _listeners.add(listener)


def unlisten(listener: Listener) -> None:
    _listeners.discard(listener)


def describe(rank: int, error: BaseException) -> str:
    """One line for the peers. A RankError already names rank and cause: it is passed on as it is."""
    if isinstance(error, RankError):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"rank {rank} failed: {type(error).__name__}" + (f": {lines[0]}" if lines else "")


def give_up(rank: int, trouble: str) -> None:
    """End the process: the rank is stuck in a driver or in torch, where no exception can reach it."""
    sys.stdout.flush()
    print(f"zeroshard: rank {rank} ends: RankError: {trouble}", file=sys.stderr, flush=True)
    os._exit(EXIT_STUCK)


def _announce(error: BaseException) -> None:
    for listener in list(_listeners):
        try:
            cause = None if isinstance(error, RankError) else listener.cause()
            if cause is not None:
                # Torch's collectives only say that a connection was closed.
                print(f"zeroshard: before this error on rank {listener.rank}, {cause}", file=sys.stderr)
            listener.report(cause or describe(listener.rank, error))
        except Exception:  # a note that cannot be left must not hide the failure itself
            continue


def _install() -> None:
    global _installed
    if _installed:
        return
    _installed = True
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _announce(error)
        previous(kind, error, trace)

    sys.excepthook = hook
    atexit.register(_close_all)
    if multiprocessing.parent_process() is not None:
        multiprocessing.util.Finalize(None, _in_flight, exitpriority=1000)


def _close_all() -> None:
    """A rank that comes to its end has not died, even if it did not close its run."""
    for listener in list(_listeners):
        listener.close()


def _in_flight() -> None:
    """Runs as a multiprocessing child ends: a failure is then the exception being handled."""
    error = sys.exc_info()[1]
    # torch.multiprocessing turns every exception into SystemExit(1), raised while handling the real one.
    while isinstance(error, SystemExit) and error.__context__ is not None:
        error = error.__context__
    if error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0)):
        _announce(error)
    _close_all()
