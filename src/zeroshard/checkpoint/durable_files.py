"""Makes bytes durable and changes atomic on a file system; calls the system where Python cannot."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from pathlib import Path

# Bytes after which the device is asked to begin writing; measured: hides most of the final sync.
WRITEBACK = 16 << 20
PAGE = 4096  # bytes: what direct I/O moves begins and ends with one, in memory and in the file
DIRECT = 16 << 20  # bytes that direct I/O moves by one call: several requests are then under way at once
_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)
_HERE = -100  # AT_FDCWD
_START = 2  # SYNC_FILE_RANGE_WRITE of sync_file_range(2)

_libc = ctypes.CDLL(None, use_errno=True)
write = os.write
write_at = os.pwrite
sync = os.fdatasync if hasattr(os, "fdatasync") else os.fsync


def start_writeback(fd: int, offset: int, count: int) -> None:
    """Ask the device to begin with these bytes. A hint: where it does not exist, the final sync does all the
    work."""
    call = getattr(_libc, "sync_file_range", None)
    if call is not None:
        call(fd, ctypes.c_int64(offset), ctypes.c_int64(count), _START)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step. False where the kernel or the file system cannot (NFS, other systems)."""
    call = getattr(_libc, "renameat2", None)
    if call is None:
        return False
    done: int = call(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE)
    return done == 0


def write_file(path: Path, data: bytes | bytearray) -> None:
    """A new file with this content, on the device when it returns."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        view = memoryview(data)
        while view:
            view = view[write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def write_pages(path: Path, data: memoryview, size: int) -> None:
    """A new file with the first `size` bytes of `data`, on the device when it returns. `data` are whole pages
    of memory: where the file system can, the device fetches them from there, and no processor copies."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        direct, at = _direct(fd, True), 0
        while at < size:
            chunk = data[at : min(at + DIRECT, -(-size // PAGE) * PAGE if direct else size)]
            try:
                at += write_at(fd, chunk, at)
            except OSError as error:
                if not direct or error.errno != errno.EINVAL:
                    raise
                direct = _direct(fd, False)  # larger pages, or the rest of a write that was cut short
        os.ftruncate(fd, size)
        sync(fd)
    finally:
        os.close(fd)


def _direct(fd: int, wanted: bool) -> bool:
    """Switch direct I/O on or off; returns whether it is on."""
    flag = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | flag if wanted else flags & ~flag)
    except OSError:  # this file system has none
        return False
    return wanted and flag != 0


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write below `path`."""
    state = os.statvfs(path)
    return state.f_bavail * state.f_frsize
