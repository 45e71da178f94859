"""Tells the peers that a rank has ended, and why.

A rank that waits for the others to come to `shard` has no transport to them yet, and a rank that has ended
never comes: its script was shorter, or failed. So every rank that has once been in a `shard` says in the
store how it ends. Later its transports tell the peers why before the process is gone.

Python ends a failing process in two ways that matter here: through `sys.excepthook`, and inside
`multiprocessing`, which prints the traceback itself but runs its finalizers while the exception is in flight.
A process killed by a signal says nothing: its peers notice that it is gone. One that ends well says that too.
A child that a rank forks (a worker that loads data) ends as it likes: it has no transports."""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
import os
import sys
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from zeroshard.errors import RankError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class ExitRegistry:
    """This rank's entry, written as the process ends, and its view of the others'."""

    def __init__(self, store: Store, rank: int) -> None:
        self.rank = rank
        self._store = store
        self._told = False
        listen(self)

    def report(self, text: str) -> None:
        """How this rank ends. The first word stays."""
        if self._told:
            return
        self._told = True
        try:
            self._store.set(f"ended/{self.rank}", text)
        except RuntimeError:  # the process that kept the store has ended before
            return

    def cause(self) -> str | None:
        return None

    def close(self) -> None:
        self.report(
            f"rank {self.rank} has ended, and others wait for it in `shard`. Every rank must call `shard` as "
            "often as the others; check branches and early exits that depend on the rank."
        )

    def ended(self, rank: int) -> str | None:
        """How a rank ended, if it has."""
        key = f"ended/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else None


# The exit status of a rank that was stuck where no exception reaches it: EX_SOFTWARE of sysexits.h. Not
# EX_TEMPFAIL, with which a rank leaves that was told to stop (`launch.job.PREEMPTED`).
EXIT_STUCK = 70


class FailureListener(Protocol):
    rank: int

    def report(self, text: str) -> None: ...

    def cause(self) -> str | None: ...

    def close(self) -> None: ...


_listeners: weakref.WeakSet[FailureListener] = weakref.WeakSet()
os.register_at_fork(after_in_child=_listeners.clear)
_installed = False


def listen(listener: FailureListener) -> None:
    """From now on `listener.report(text)` is called if this process fails."""
    _install()
    _listeners.add(listener)


def unlisten(listener: FailureListener) -> None:
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
