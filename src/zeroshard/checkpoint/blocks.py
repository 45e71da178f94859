"""Blocks between memory and files, each with its checksum: in pieces that stay in the processor's cache, and
side by side where a rank has threads for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch

from zeroshard.errors import CheckpointError
from zeroshard.native import crc32

from . import disk
from .wording import os_error

# Bytes that are summed and moved before the next: less than a core's second-level cache.
PIECE = 512 << 10
_MOST = 4  # threads: copies into the page cache gain little from more

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


class Lanes:
    """As many blocks at a time as a rank has threads, up to four; with one thread, in the caller's own."""

    def __init__(self) -> None:
        count = min(_MOST, torch.get_num_threads())
        self._pool = ThreadPoolExecutor(count, "blocks") if count > 1 else None

    def map(self, work: Callable[[_Job], _Result], jobs: Iterable[_Job]) -> list[_Result]:
        """The results in order; the first error is raised when nothing is under way any more."""
        if self._pool is None:
            return [work(job) for job in jobs]
        results: list[_Result] = []
        waiting = iter(jobs)
        # A few at a time: a damaged manifest may have millions of blocks.
        while group := [_begun(self._pool, work, job) for job in islice(waiting, 4 * _MOST)]:
            wait(group)
            results += [future.result() for future in group]
        return results

    def __enter__(self) -> Lanes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def _begun(pool: ThreadPoolExecutor, work: Callable[[_Job], _Result], job: _Job) -> Future[_Result]:
    try:
        return pool.submit(work, job)
    except RuntimeError:  # Python is ending: it waits for a save under way, and lets no other thread begin
        done: Future[_Result] = Future()
        try:
            done.set_result(work(job))
        except Exception as error:
            done.set_exception(error)
        return done


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """All of it, however many calls that takes."""
    while data:
        count = disk.write_at(fd, data, offset)
        data, offset = data[count:], offset + count


def write_block(fd: int, data: memoryview, offset: int) -> int:
    """Write a block and return its checksum."""
    total = 0
    for at in range(0, len(data), PIECE):
        piece = data[at : at + PIECE]
        total = crc32(piece, total)
        write_at(fd, piece, offset + at)
    return total


def read_block(fd: int, into: memoryview, offset: int, path: Path) -> int:
    """Fill `into` from the file and return the checksum of what came."""
    total = 0
    for at in range(0, len(into), PIECE):
        piece = into[at : at + PIECE]
        read_into(fd, piece, offset + at, path)
        total = crc32(piece, total)
    return total


def read_into(fd: int, buffer: memoryview, offset: int, path: Path) -> None:
    """Fill `buffer` from `offset`, or say that the file is too short."""
    at = 0
    try:
        while at < len(buffer):
            count = os.preadv(fd, [buffer[at:]], offset + at)
            if not count:
                raise CheckpointError(
                    f"{path} ends at byte {offset + at} and {len(buffer) - at} more are needed: truncated."
                )
            at += count
    except OSError as error:
        raise os_error(error, "reading", path) from error
