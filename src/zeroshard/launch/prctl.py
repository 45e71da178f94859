"""The three calls of Linux's prctl(2) that keep processes from being left behind."""

from __future__ import annotations

import ctypes
import os
import signal

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
