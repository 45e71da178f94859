"""A rank that ends before its first `shard` says so, and the others do not wait for it.

`zeroshard run` sees its ranks end. Other launchers take a clean end for a success and tell nobody, so the
process tells it itself, from the moment that it has imported zeroshard. Only the process that a launcher has
started speaks for its rank: a helper that inherits the rank's environment may end at any time.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from zeroshard.errors import OptionError

from .announce import Announcement, announced

__all__ = ["speak_at_the_end", "tell_own_end"]

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
        group = announced(environ)
    except OptionError:  # `shard` says what is wrong
        return False
    if group is None or group.world == 1 or not _is_launcher(_command(os.getppid())):
        return False
    atexit.register(_at_exit, os.getpid(), group)
    return True


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

    from .environment import tell_end

    try:
        if was_in_shard():
            return
        if dist.is_available() and dist.is_initialized():
            end_early()
            return
        with socket.create_connection((group.address, group.port), _PATIENCE):
            pass  # a store that nobody serves yet would be waited for
        brief = timedelta(seconds=_PATIENCE)
        store = dist.TCPStore(group.address, group.port, group.world, False, brief, wait_for_workers=False)
        tell_end(store, group.attempt, group.rank)
    except (OSError, RuntimeError):  # whoever kept the store has ended: nobody waits there
        return
