"""One file per rank that holds what rests on the disk. It has no name from the moment it is open, so that a
process that is killed leaves nothing behind; and all of its blocks from the beginning, so that a disk that is
too small is an error before training.

Direct I/O: state is read once and written once a step, and a page cache in between would take the host memory
that the disk is to spare. Offsets, lengths and addresses are multiples of `GRAIN`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import tempfile
import weakref

from zeroshard.count.shapes import GRAIN
from zeroshard.errors import TierError

from .folder import check_folder, free_bytes, full

log = logging.getLogger("zeroshard")

_PREFIX, _SUFFIX = "zeroshard-", ".scratch"


def grains(nbytes: int) -> int:
    """`nbytes`, rounded up to what direct I/O moves."""
    return -(-nbytes // GRAIN) * GRAIN


class Scratch:
    """`nbytes` of a disk that read as zeros until they are written."""

    def __init__(self, folder: str | os.PathLike[str], nbytes: int, direct: bool = True) -> None:
        self.folder, self.nbytes = os.fspath(folder), grains(nbytes)
        with contextlib.suppress(OSError):  # what is wrong with the folder is said next
            sweep(self.folder)
        check_folder(self.folder, self.nbytes)
        self.fd, name = _open(self.folder)
        self._end = weakref.finalize(self, _dispose, self.fd, name)
        try:
            if self.nbytes:
                os.posix_fallocate(self.fd, 0, self.nbytes)
        except OSError as error:
            self.close()
            if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise full(self.folder, self.nbytes, free_bytes(self.folder)) from error
            raise TierError(f"no scratch file could be made in {self.folder}: {error}.") from error
        self.direct = direct and self.nbytes > 0 and self._go_direct()
        if direct and self.nbytes and not self.direct:
            log.warning("%s has no direct I/O: the disk tier goes through the page cache", self.folder)

    def _go_direct(self) -> bool:
        """After the blocks are there: where a file system cannot reserve them, they are written one by one,
        at places that direct I/O would refuse."""
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            with mmap.mmap(-1, GRAIN) as probe:
                os.preadv(self.fd, [probe], 0)
        except (OSError, AttributeError):
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags)
            return False
        return True

    def read(self, memory: memoryview, offset: int) -> None:
        """Fill `memory` from the file. Blocks; other threads may read and write meanwhile."""
        done = 0
        while done < len(memory):
            count = os.preadv(self.fd, [memory[done:]], offset + done)
            if count <= 0:
                raise OSError(
                    errno.EIO, f"the scratch file in {self.folder} ends before byte {offset + done}"
                )
            done += count

    def write(self, memory: memoryview, offset: int) -> None:
        done = 0
        while done < len(memory):
            done += os.pwritev(self.fd, [memory[done:]], offset + done)

    def close(self) -> None:
        self._end()


def _open(folder: str) -> tuple[int, str | None]:
    """A file without a name; or with one, where the file system cannot take it away from an open file."""
    try:
        if hasattr(os, "O_TMPFILE"):
            with contextlib.suppress(OSError):
                return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600), None
        fd, name = tempfile.mkstemp(prefix=_PREFIX, suffix=_SUFFIX, dir=folder)
    except OSError as error:
        raise TierError(
            f"no scratch file could be made in {folder}: {error.strerror}. Pass path= of a folder that this "
            "process may write to."
        ) from error
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # tells `sweep` that its owner lives
    try:
        os.unlink(name)
    except OSError:
        return fd, name
    return fd, None


def _dispose(fd: int, name: str | None) -> None:
    os.close(fd)
    if name is not None:
        with contextlib.suppress(OSError):
            os.unlink(name)


def sweep(folder: str) -> list[str]:
    """Remove scratch files that dead processes left where they could not be unnamed; returns their names."""
    removed = []
    for entry in os.scandir(folder):
        if not (entry.name.startswith(_PREFIX) and entry.name.endswith(_SUFFIX)):
            continue
        with contextlib.suppress(OSError):
            fd = os.open(entry.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(entry.path)
                removed.append(entry.name)
            finally:
                os.close(fd)
    return removed
