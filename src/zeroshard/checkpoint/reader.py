"""Reading rows of a checkpoint: by range, through one buffer, each block proven by its checksum before anyone
sees it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch

from zeroshard.errors import CheckpointError
from zeroshard.native import crc32
from zeroshard.sizes import show_apart

from .blocks import Lanes, read_block, read_into
from .elements import DTYPE, byte_view
from .manifest import Entry, Manifest, Span, read_manifest
from .ranges import block_rows, overlaps
from .records import CHUNK
from .shelf import tensors_of
from .tensorfile import open_regular, parse_header, read_header_bytes
from .wording import quoted

_MOST_OPEN = 16


class Reader:
    """An open checkpoint. Files are opened at first use, and proven (size, header) when they are."""

    def __init__(self, path: Path, manifest: Manifest | None = None) -> None:
        self.path = path
        self.manifest = manifest if manifest is not None else read_manifest(path)
        self._open: dict[int, int] = {}
        self._proven: set[int] = set()
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._lanes = Lanes()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lanes.__exit__(kind, error, trace)
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()

    def file(self, number: int) -> int:
        """A descriptor of file `number`. The oldest of those open is closed when there are many."""
        if number not in self._open:
            if len(self._open) >= _MOST_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[number] = self._prove(number)
        return self._open[number]

    def _prove(self, number: int) -> int:
        known = self.manifest.files[number]
        path = self.path / known.name
        try:
            fd = open_regular(path)
        except CheckpointError as error:
            raise CheckpointError(f"{error} ({tensors_of(self.manifest, number)})") from error
        try:
            total = os.fstat(fd).st_size
            if total != known.bytes:
                what = "truncated" if total < known.bytes else "something was added"
                raise CheckpointError(
                    f"{path} has {total} bytes and was saved with {known.bytes}: {what} "
                    f"({tensors_of(self.manifest, number)})."
                )
            if number not in self._proven:
                self._prove_header(fd, number, path)
                self._proven.add(number)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _prove_header(self, fd: int, number: int, path: Path) -> None:
        """The header must be the one that was saved, and must say the same as the manifest."""
        raw = read_header_bytes(fd, path)
        if crc32(memoryview(raw)) != self.manifest.files[number].header_sum:
            raise CheckpointError(
                f"{path}: the header does not match its checksum: damaged "
                f"({tensors_of(self.manifest, number)})."
            )
        spots = parse_header(raw, os.fstat(fd).st_size, path)
        for entry, span in self.manifest.in_file(number):
            spot = spots.get(entry.key(span))
            same = spot and (spot.dtype, spot.shape, spot.offset) == (
                entry.dtype,
                entry.rows_shape(span.stop - span.start),
                span.offset,
            )
            if not same:
                raise CheckpointError(
                    f"{path}: the header and the manifest disagree about {quoted(entry.name)}."
                )

    def rows(self, entry: Entry, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, rows) of an entry in order, in chunks. A chunk is valid until the next one is asked
        for."""
        for number, first, last in overlaps([(span.start, span.stop) for span in entry.spans], start, stop):
            yield from self.span_rows(entry, entry.spans[number], first, last)

    def span_rows(
        self, entry: Entry, span: Span, start: int, stop: int
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """As `rows`, within one span. Whole blocks are read, since a checksum covers a block."""
        width = entry.row_bytes
        dtype = DTYPE[entry.dtype]
        if not width:
            yield start, torch.empty(entry.rows_shape(stop - start), dtype=dtype)
            return
        block = block_rows(width, self.manifest.block)
        step = block * max(1, CHUNK // (block * width))
        begin = span.start + (start - span.start) // block * block
        for first in range(begin, stop, step):
            # Up to the end of the block in which the last wanted row lies, or the end of the span.
            wanted = min(first + step, stop)
            last = min(span.stop, span.start + -(-(wanted - span.start) // block) * block)
            data = self._read(entry, span, first, last)
            rows = data.view(dtype).view((last - first, *entry.shape[1:]) if entry.shape else (1,))
            keep = rows[max(0, start - first) : wanted - first]
            yield max(first, start), keep if entry.shape else keep.reshape(())

    def _read(self, entry: Entry, span: Span, first: int, last: int) -> torch.Tensor:
        """Rows [first, last) as bytes; `first` begins a block."""
        count = (last - first) * entry.row_bytes
        if self._buffer.numel() < count:
            self._buffer = _room(max(count, min(CHUNK, entry.bytes)), entry)
        data = self._buffer[:count]
        view = byte_view(data)
        self._read_blocks(entry, span, first, last, view)
        return data

    def _read_blocks(self, entry: Entry, span: Span, first: int, last: int, into: memoryview) -> None:
        """Rows [first, last) of a span; `first` begins a block and `last` ends one."""
        width, block = entry.row_bytes, block_rows(entry.row_bytes, self.manifest.block)
        fd, path = self.file(span.file), self.path / self.manifest.files[span.file].name

        def read(row: int) -> tuple[int, int]:
            piece = into[(row - first) * width : (min(row + block, last) - first) * width]
            return row, read_block(fd, piece, span.offset + (row - span.start) * width, path)

        for row, found in self._lanes.map(read, range(first, last, block)):
            if found != span.sum((row - span.start) // block):
                raise self._damaged(entry, path, row, min(row + block, last))

    def fill(self, entry: Entry, span: Span, start: int, stop: int, place: torch.Tensor) -> tuple[int, int]:
        """Read what whole blocks hold of rows [start, stop) straight into `place`, the memory of just these
        rows, and return the rows that were read: the others share their blocks with rows of someone else."""
        width = entry.row_bytes
        if not width:
            return start, start
        block = block_rows(width, self.manifest.block)
        first = span.start + -(-(start - span.start) // block) * block
        last = stop if stop == span.stop else span.start + (stop - span.start) // block * block
        if first >= last:
            return start, start
        view = byte_view(place.reshape(-1).view(torch.uint8))
        step = block * max(1, CHUNK // (block * width))
        for row in range(first, last, step):
            until = min(row + step, last)
            self._read_blocks(entry, span, row, until, view[(row - start) * width : (until - start) * width])
        return first, last

    def stream(self, entry: Entry, span: Span) -> Iterator[torch.Tensor]:
        """The bytes of a span in order, a chunk at a time however large its rows are.

        A block is proven when its last chunk has been given out.
        """
        fd, path = self.file(span.file), self.path / self.manifest.files[span.file].name
        block = block_rows(entry.row_bytes, self.manifest.block) * entry.row_bytes
        total = (span.stop - span.start) * entry.row_bytes
        if self._buffer.numel() < min(total, CHUNK):
            self._buffer = torch.empty(min(total, CHUNK), dtype=torch.uint8)
        at, running = 0, 0
        while at < total:
            end = min(at - at % block + block, total)
            data = self._buffer[: min(end - at, CHUNK)]
            view = byte_view(data)
            read_into(fd, view, span.offset + at, path)
            running = crc32(view, running)
            yield data
            at += len(view)
            if at == end:
                if running != span.sum((at - 1) // block):
                    first = span.start + (at - 1) // block * block // entry.row_bytes
                    raise self._damaged(entry, path, first, span.start + at // entry.row_bytes)
                running = 0

    def _damaged(self, entry: Entry, path: Path, first: int, last: int) -> CheckpointError:
        rows = f"rows {first} to {last} of {quoted(entry.name)} ({entry.kind})"
        return CheckpointError(f"{path}: {rows} do not match their checksum. The file is damaged.")

    def whole(self, entry: Entry) -> torch.Tensor:
        """All rows of an entry in memory; refused when the machine has not that much left."""
        _check_memory(entry.bytes, entry)
        tensor = torch.empty(entry.shape, dtype=DTYPE[entry.dtype])
        for first, rows in self.rows(entry, 0, entry.height):
            (tensor[first : first + rows.shape[0]] if entry.shape else tensor).copy_(rows)
        return tensor


def _room(count: int, entry: Entry) -> torch.Tensor:
    if count > CHUNK:
        _check_memory(count, entry)
    return torch.empty(count, dtype=torch.uint8)


def _check_memory(count: int, entry: Entry) -> None:
    """What a file claims must not be what we allocate, unless the machine has it."""
    if count > (free := _free_memory()):
        sizes = "{} are needed and {} are free".format(*show_apart(count, free))
        raise CheckpointError(f"{quoted(entry.name)} ({entry.kind}) does not fit into memory: {sizes}.")


def _free_memory() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return 1 << 62
