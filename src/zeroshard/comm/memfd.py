"""Anonymous files in memory (memfd) that other processes of the host open through /proc/<pid>/fd/<fd>.

They have no name in any file system, so the kernel takes them back when the last process that maps them ends,
however it ends. Torch maps them, and not Python's mmap, which keeps a file descriptor open for every mapping.
"""

from __future__ import annotations

import os

import torch

__all__ = ["create", "open_peer"]


def create(name: str, nbytes: int, reserve: bool = True) -> int:
    """The descriptor of a new zero-filled memfd; close it once every peer has opened it.

    With `reserve`, lack of memory is an OSError now and not a SIGBUS later.
    """
    fd = os.memfd_create(f"zeroshard {name}"[:200], os.MFD_CLOEXEC)
    try:
        if reserve and nbytes > 0:
            os.posix_fallocate(fd, 0, nbytes)
        else:
            os.ftruncate(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_peer(pid: int, fd: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Map what process `pid` created, as a flat tensor. OSError where /proc does not show it to us."""
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    path = f"/proc/{pid}/fd/{fd}"
    # Torch would make a missing file, and reports any other trouble as a RuntimeError.
    os.stat(path)
    try:
        return torch.from_file(path, shared=True, size=numel, dtype=dtype)
    except RuntimeError as error:
        raise OSError(str(error).splitlines()[0]) from error
