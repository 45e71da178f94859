"""Opens what state rests on below the host: a scratch file, or storage of your own (`register_tier`).

Each rank has one scratch file. It has no name from the moment it is open, so that a process that is killed
leaves nothing behind; and all of its blocks from the beginning, so that a disk that is too small is an error
before training.

Direct I/O: state is read once and written once a step, and a page cache in between would take the host memory
that the disk is to spare. Offsets, lengths and addresses are multiples of `GRAIN`."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import re
import tempfile
import weakref
from collections.abc import Callable
from typing import Protocol

from zeroshard.errors import OptionError, TierError
from zeroshard.layout.specs import GRAIN
from zeroshard.options import TIER_SCHEMES
from zeroshard.sizes import show_apart, show_bytes

RAM_DISKS = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
_ESCAPE = re.compile(r"\\(\d{3})")


class TierStorage(Protocol):
    """Bytes of one rank that read as zeros until they are written. Several threads read and write at once,
    different places each; offsets and lengths are multiples of 4096, but for the end. Errors are OSErrors.

    >>> class InMemory:
    ...     def __init__(self, where, nbytes):
    ...         self.nbytes, self._bytes = nbytes, bytearray(nbytes)
    ...     def read(self, memory, offset):
    ...         memory[:] = self._bytes[offset : offset + len(memory)]
    ...     def write(self, memory, offset):
    ...         self._bytes[offset : offset + len(memory)] = memory
    ...     def close(self):
    ...         self._bytes = bytearray()

    After ``register_tier("ram", InMemory)``, ``zs.Offload(optimizer="disk", path="ram://")`` rests there.
    """

    nbytes: int

    def read(self, memory: memoryview, offset: int) -> None:
        """Fill `memory` with the bytes from `offset` on."""

    def write(self, memory: memoryview, offset: int) -> None:
        """Keep the bytes of `memory`; a read that begins later sees them."""

    def close(self) -> None:
        """Give everything back. May be called again."""


_makers: dict[str, Callable[[str, int], TierStorage]] = {}


def register_tier(scheme: str, make: Callable[[str, int], TierStorage]) -> None:
    """Let ``path="SCHEME://WHERE"`` of `Offload` mean storage of your own: ``make(WHERE, nbytes)``.

    Every process registers it before `Offload` is made. Plans price it as a disk. A scheme that exists is
    refused.
    """
    if scheme in TIER_SCHEMES:
        raise OptionError(f"tier {scheme!r} exists already: take another name.")
    _makers[scheme] = make
    TIER_SCHEMES.append(scheme)


def open_storage(path: str, nbytes: int) -> TierStorage:
    """Storage of so many bytes: a scratch file in a folder, or what was registered for the path's scheme."""
    scheme, separator, where = path.partition("://")
    return _makers[scheme](where, grains(nbytes)) if separator else ScratchFile(path, nbytes)


def check_folder(path: str, nbytes: int) -> None:
    """Raise, naming the path, the bytes needed and what to type, unless `nbytes` can be placed there."""
    need = f"optimizer state on the disk needs {show_bytes(nbytes)} a rank"
    if not os.path.exists(path):
        raise TierError(
            f"{need}, and {path} does not exist: create it (mkdir -p {path}), or pass another path=."
        )
    if not os.path.isdir(path):
        raise TierError(f"{need}, and {path} is not a folder: pass path= of a folder on a disk.")
    kind = filesystem_of(path)
    if kind in RAM_DISKS:
        raise TierError(
            f"{need}, and {path} is on a RAM disk ({kind}), which takes the memory that offloading "
            'is to free. Pass path= of a folder on a disk, or optimizer="host".'
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise TierError(f"{need}, and {path} cannot be written by this user: pass another path=.")
    free = free_bytes(path)
    if nbytes > free:
        raise full(path, nbytes, free)


def full(path: str, nbytes: int, free: int) -> TierError:
    needs, has = show_apart(nbytes, free)
    return TierError(
        f"optimizer state on the disk needs {needs} ({nbytes} bytes) a rank, and {path} has "
        f"{has} free: make room there, pass path= of another disk, or keep more on the host "
        '(optimizer="auto" with host_bytes=).'
    )


def free_bytes(path: str) -> int:
    """What a process without privileges may still write there."""
    told = os.statvfs(path)
    return told.f_bavail * told.f_frsize


def filesystem_of(path: str, mounts: str = "/proc/self/mountinfo") -> str:
    """The type of the file system that `path` is on; empty where the system does not tell."""
    try:
        with open(mounts, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError:
        return ""
    real, best, kind = os.path.realpath(path), -1, ""
    for line in lines:
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) < 5 or not right:
            continue
        point = _ESCAPE.sub(lambda found: chr(int(found[1], 8)), fields[4])
        inside = point == "/" or real == point or real.startswith(point + "/")
        if inside and len(point) >= best:  # of two mounts at one point the later one is seen
            best, kind = len(point), right.split()[0]
    return kind


log = logging.getLogger("zeroshard")

_PREFIX, _SUFFIX = "zeroshard-", ".scratch"


def grains(nbytes: int) -> int:
    """`nbytes`, rounded up to what direct I/O moves."""
    return -(-nbytes // GRAIN) * GRAIN


class ScratchFile:
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
