"""Anonymous files in memory (memfd) that other processes of the host open through /proc/<pid>/fd/<fd>.

They have no name in any file system, so the kernel takes them back when the last process that maps them ends,
however it ends.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

__all__ = ["Segment", "create", "open_peer"]


@dataclass
class Segment:
    """A mapped memfd. `fd` is open only until every peer has opened it too."""

    map: mmap.mmap
    fd: int

    def close_fd(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def create(name: str, nbytes: int, reserve: bool = True) -> Segment:
    """A new zero-filled segment. With `reserve`, lack of memory is an OSError now, not a SIGBUS later."""
    nbytes = max(nbytes, 1)
    fd = os.memfd_create(f"zeroshard {name}"[:200], os.MFD_CLOEXEC)
    try:
        if reserve:
            os.posix_fallocate(fd, 0, nbytes)
        else:
            os.ftruncate(fd, nbytes)
        return Segment(mmap.mmap(fd, nbytes), fd)
    except BaseException:
        os.close(fd)
        raise


def open_peer(pid: int, fd: int, nbytes: int) -> mmap.mmap:
    """Map what process `pid` created. OSError where /proc does not show it to us."""
    here = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(here, max(nbytes, 1))
    finally:
        os.close(here)
