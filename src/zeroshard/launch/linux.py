"""Calls Linux for the launcher: prctl(2), which leaves no process behind, and signals one by one."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from collections.abc import Collection
from typing import NamedTuple

_SET_PDEATHSIG = 1
_SET_NAME = 15
_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, argument: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    value = ctypes.c_char_p(argument) if isinstance(argument, bytes) else ctypes.c_ulong(argument)
    if libc.prctl(ctypes.c_int(option), value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def die_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process when its parent dies, however it dies.

    The parent may have died before the request, which then would never fire: hence the comparison after it.
    """
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Makes descendants whose parent died children of this process, which can then end them."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def name_process(name: str) -> None:
    """Sets what `top` and `ps -o comm` show: at most 15 bytes."""
    _prctl(_SET_NAME, name.encode()[:15])


def children() -> set[int]:
    """The living children of this process, adopted ones included; zombies are not living."""
    found: set[int] = set()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                with open(f"/proc/{entry.name}/stat", encoding="utf-8", errors="replace") as file:
                    # The second field is the name in parentheses, which may itself hold spaces and
                    # parentheses.
                    state, parent = file.read().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if int(parent) == os.getpid() and state not in "ZX":
                found.add(int(entry.name))
    return found


_SIGINFO = 128  # bytes of siginfo_t on Linux
_SIGSET = 128  # and of sigset_t, which is shorter in some C libraries
# From the siginfo of a signal that the kernel sent, not a process: Ctrl-C, or a terminal that was closed.
_FROM_KERNEL = 0x80


class CaughtSignal(NamedTuple):
    """A signal, and whether the kernel sent it."""

    number: signal.Signals
    from_kernel: bool


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def heeded(numbers: Collection[signal.Signals]) -> frozenset[signal.Signals]:
    """Those that this process was not told to ignore: `nohup` means SIGHUP, and a shell's `&` Ctrl-C. Once
    blocked, they would be waited for all the same."""
    return frozenset(number for number in numbers if signal.getsignal(number) != signal.SIG_IGN)


def take(numbers: Collection[signal.Signals], seconds: float) -> CaughtSignal | None:
    """The next of these signals, which are blocked; None if none comes in that time, or sooner.

    Python's own `signal.sigtimedwait` returns what it never wrote where the wait was interrupted and its time
    is over, as after a stop: Ctrl-Z, then `fg`.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    wanted, info = (ctypes.c_char * _SIGSET)(), (ctypes.c_int * (_SIGINFO // 4))()
    libc.sigemptyset(wanted)
    for each in numbers:
        libc.sigaddset(wanted, ctypes.c_int(each))
    patience = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    number = libc.sigtimedwait(wanted, info, ctypes.byref(patience))
    if number > 0:
        return CaughtSignal(signal.Signals(number), from_kernel=info[2] == _FROM_KERNEL)
    trouble = ctypes.get_errno()
    if trouble not in (errno.EAGAIN, errno.EINTR):
        raise OSError(trouble, f"sigtimedwait: {os.strerror(trouble)}")
    return None
