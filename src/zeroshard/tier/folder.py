"""A folder that shall hold a scratch file: whether it can, said before anything is written to it."""

from __future__ import annotations

import os
import re

from zeroshard.errors import TierError
from zeroshard.sizes import show_apart, show_bytes

RAM_DISKS = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
_ESCAPE = re.compile(r"\\(\d{3})")


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
