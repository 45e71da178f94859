"""Writes safetensors files as a stream and reads them by range, in checksummed blocks.

A file is 8 bytes of header length, a JSON header, raw bytes. The library of that name wants whole tensors in
memory; a rank's rows come in chunks from whatever tier holds them. The files are the same: tensors one after
another without holes, larger element sizes first so that each begins aligned. Blocks move in shards that stay
in the processor's cache, side by side where a rank has threads for it."""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch

from zeroshard.checkpoint import durable_files
from zeroshard.errors import CheckpointError
from zeroshard.kernels import crc32

from .records import CODE, NAME_OF_CODE, SIZE
from .untrusted import os_error, parse, quoted

# Bytes that are summed and moved before the next: less than a core's second-level cache.
CHUNK_BYTES = 512 << 10
_MOST = 4  # threads: copies into the page cache gain little from more

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


class BlockThreads:
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

    def __enter__(self) -> BlockThreads:
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
        count = durable_files.write_at(fd, data, offset)
        data, offset = data[count:], offset + count


def write_block(fd: int, data: memoryview, offset: int) -> int:
    """Write a block and return its checksum."""
    total = 0
    for at in range(0, len(data), CHUNK_BYTES):
        chunk = data[at : at + CHUNK_BYTES]
        total = crc32(chunk, total)
        write_at(fd, chunk, offset + at)
    return total


def read_block(fd: int, into: memoryview, offset: int, path: Path) -> int:
    """Fill `into` from the file and return the checksum of what came."""
    total = 0
    for at in range(0, len(into), CHUNK_BYTES):
        chunk = into[at : at + CHUNK_BYTES]
        read_into(fd, chunk, offset + at, path)
        total = crc32(chunk, total)
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


# Bytes: a header is read whole, so a claim of more is refused before anything is allocated.
HEADER_LIMIT = 64 << 20
_ALIGN = 64
_quote = json.encoder.encode_basestring_ascii
_GATHER = 1 << 20  # bytes: small tensors are collected to this before they are written


@dataclass(frozen=True, slots=True)
class TensorSpot:
    """One tensor of a file; `offset` counts from the start of the file."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def bytes(self) -> int:
        return prod(self.shape) * SIZE[self.dtype]


def header_of(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]
) -> tuple[bytes, list[int], int]:
    """The first bytes of a file with these (key, dtype, shape) in order, where each tensor will begin, and
    where the last one ends."""
    names, ends = {"__metadata__"}, [0]
    text = bytearray(8)  # for its length
    for key, part, end in header_parts(tensors, metadata):
        if key:
            if key in names:
                raise CheckpointError(
                    f"a safetensors file cannot hold a tensor named {quoted(key)} here: the name is taken."
                )
            names.add(key)
            ends.append(end)
        text += part
    begin = len(text)
    text[:8] = (begin - 8).to_bytes(8, "little")
    return bytes(text), [begin + end for end in ends[:-1]], begin + ends[-1]


def header_parts(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]
) -> Iterator[tuple[str, bytes, int]]:
    """A header after its length word, piece by piece: the key (none for what stands around them), its text,
    and where its tensor ends, counted from the end of the header."""
    end = 0
    first = f'{{"__metadata__":{json.dumps(metadata, separators=(",", ":"))}'.encode("ascii")
    length = len(first)
    yield "", first, end
    for key, dtype, shape in tensors:
        at, end = end, end + prod(shape) * SIZE[dtype]
        sizes = ",".join(map(str, shape))
        text = f',{_quote(key)}:{{"dtype":"{CODE[dtype]}","shape":[{sizes}],"data_offsets":[{at},{end}]}}'
        length += len(text)
        yield key, text.encode("ascii"), end
    yield "", b"}" + b" " * (-(length + 1 + 8) % _ALIGN), end


class TensorFileWriter:
    """Writes bytes in order to a new file. `close` returns once they are on the device."""

    def __init__(self, path: Path, header: bytes, lanes: BlockThreads | None = None) -> None:
        self.path = path
        self.written = 0
        self.header_sum = zlib.crc32(header)
        self._lanes = lanes
        self._gathered = bytearray()
        self._flushed = 0
        try:
            self._fd = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666
            )
        except OSError as error:
            raise os_error(error, "creating", path) from error
        self.write(memoryview(header))

    def write(self, data: memoryview) -> None:
        """Append."""
        if not self._gather(data):
            self._put(data, lambda at: write_at(self._fd, data, at))

    def write_blocks(self, data: memoryview, block: int) -> list[int]:
        """Append, and return the checksum of every `block` bytes."""
        chunks = [(at, data[at : at + block]) for at in range(0, len(data), block)]
        if self._gather(data):
            return [crc32(chunk) for _, chunk in chunks]
        sums: list[int] = []
        lanes = self._lanes
        assert lanes is not None

        def write(begin: int) -> None:
            sums.extend(lanes.map(lambda job: write_block(self._fd, job[1], begin + job[0]), chunks))

        self._put(data, write)
        return sums

    def _gather(self, data: memoryview) -> bool:
        """Collect what is small, to write it with what follows."""
        if len(data) >= _GATHER // 4:
            return False
        self._gathered += data
        self.written += len(data)
        if len(self._gathered) >= _GATHER:
            self._put(memoryview(b""), lambda at: None)
        return True

    def _put(self, data: memoryview, write: Callable[[int], None]) -> None:
        """What was gathered, then what `write` puts at the offset it is given."""
        try:
            if self._gathered:
                gathered, self._gathered = self._gathered, bytearray()
                write_at(self._fd, memoryview(gathered), self.written - len(gathered))
            write(self.written)
            self.written += len(data)
            if self.written - self._flushed >= durable_files.WRITEBACK:
                durable_files.start_writeback(self._fd, self._flushed, self.written - self._flushed)
                self._flushed = self.written
        except OSError as error:
            raise os_error(error, "writing", self.path) from error

    def close(self) -> None:
        try:
            self._put(memoryview(b""), lambda at: None)
            durable_files.sync(self._fd)
        except OSError as error:
            raise os_error(error, "writing", self.path) from error
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close without a promise about what is on the device."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def open_regular(path: Path, follow: bool = False) -> int:
    """A file descriptor for reading a regular file: no link (unless `follow`), no pipe, no device."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        fd = os.open(path, flags)
    except OSError as error:
        raise os_error(error, "opening", path) from error
    except ValueError as error:  # a NUL in the name
        raise CheckpointError(f"opening {str(path)!a} failed: {error}.") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointError(f"{path} is not a regular file.")
    return fd


def read_header_bytes(fd: int, path: Path) -> bytearray:
    """The length word and the header, after checking the claim against the file's size and our limit."""
    total = os.fstat(fd).st_size
    if total < 8:
        raise CheckpointError(f"{path} has {total} bytes: too short for a safetensors file.")
    word = bytearray(8)
    read_into(fd, memoryview(word), 0, path)
    length = int.from_bytes(word, "little")
    if length > total - 8 or length > HEADER_LIMIT:
        raise CheckpointError(
            f"{path} claims a header of {length} bytes; the file has {total} and headers may have "
            f"{HEADER_LIMIT}. It is damaged or not a safetensors file."
        )
    raw = bytearray(8 + length)
    read_into(fd, memoryview(raw), 0, path)
    return raw


def parse_header(raw: bytes | bytearray, total: int, path: Path) -> dict[str, TensorSpot]:
    """The tensors that a header names, each proven to lie inside a file of `total` bytes."""
    table = parse(raw[8:], str(path))
    if not isinstance(table, dict):
        raise CheckpointError(f"{path}: the header is not an object.")
    spots = {}
    for key, entry in table.items():
        if key != "__metadata__":
            spots[key] = _spot(key, entry, len(raw), total, path)
    return spots


def _spot(key: str, entry: Any, begin: int, total: int, path: Path) -> TensorSpot:
    wrong = CheckpointError(
        f"{path}: the header's entry for {quoted(key)} is malformed or points outside the file."
    )
    if not isinstance(entry, dict):
        raise wrong
    shape, offsets, code = _counts(entry.get("shape")), _counts(entry.get("data_offsets")), entry.get("dtype")
    if shape is None or offsets is None or len(offsets) != 2 or not isinstance(code, str):
        raise wrong
    if code not in NAME_OF_CODE:
        raise CheckpointError(f"{path}: {quoted(key)} has element type {quoted(code)}, which is not known.")
    spot = TensorSpot(key, NAME_OF_CODE[code], shape, begin + offsets[0])
    if offsets[1] - offsets[0] != spot.bytes or begin + offsets[1] > total:
        raise wrong
    return spot


def _counts(value: Any) -> tuple[int, ...] | None:
    """A short list of numbers that could be sizes or offsets; None for anything else."""
    if not isinstance(value, list) or len(value) > 32:
        return None
    return tuple(value) if all(type(number) is int and 0 <= number < 1 << 60 for number in value) else None
