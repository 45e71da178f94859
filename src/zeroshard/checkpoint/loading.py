"""Reads a checkpoint: each rank reads the rows it wants, wherever they were saved, however many ranks saved.

Rows are read by range, through one buffer, each block proven by its checksum before anyone sees it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from zeroshard.checkpoint import directory
from zeroshard.errors import CheckpointError
from zeroshard.kernels import crc32, raw
from zeroshard.sizes import show_apart

from .directory import tensors_of
from .manifest import Manifest, RowSpan, TensorEntry, read_manifest
from .ranges import METADATA, block_rows, overlaps
from .records import (
    CHUNK,
    DTYPE,
    HeldRows,
    LoadResult,
    RunSnapshot,
    SavePeers,
    byte_view,
    convertible,
    optional,
)
from .saving import AgreedError, together
from .tensor_file import (
    BlockThreads,
    header_parts,
    open_regular,
    parse_header,
    read_block,
    read_header_bytes,
    read_into,
)
from .untrusted import quoted, some
from .values import unpack

_MOST_OPEN = 16


class CheckpointReader:
    """An open checkpoint. Files are opened at first use, and proven (size, header) when they are."""

    def __init__(self, path: Path, manifest: Manifest | None = None) -> None:
        self.path = path
        self.manifest = manifest if manifest is not None else read_manifest(path)
        self._paths = [path / file.name for file in self.manifest.files]
        self._open: dict[int, int] = {}
        self._proven: set[int] = set()
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._lanes = BlockThreads()

    def __enter__(self) -> CheckpointReader:
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
        known, path = self.manifest.files[number], self._paths[number]
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
        found = sorted(self.manifest.in_file(number), key=lambda item: item[1].offset)
        if _is_header_of(raw, found):
            return
        # Of another release, or not ours.
        spots = parse_header(raw, os.fstat(fd).st_size, path)
        for entry, span in found:
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

    def rows(self, entry: TensorEntry, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, rows) of an entry in order, in chunks. A chunk is valid until the next one is asked
        for."""
        for number, first, last in overlaps([(span.start, span.stop) for span in entry.spans], start, stop):
            yield from self.span_rows(entry, entry.spans[number], first, last)

    def span_rows(
        self, entry: TensorEntry, span: RowSpan, start: int, stop: int
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

    def _read(self, entry: TensorEntry, span: RowSpan, first: int, last: int) -> torch.Tensor:
        """Rows [first, last) as bytes; `first` begins a block."""
        count = (last - first) * entry.row_bytes
        if self._buffer.numel() < count:
            self._buffer = _room(max(count, min(CHUNK, entry.bytes)), entry)
        data = self._buffer[:count]
        view = byte_view(data)
        self._read_blocks(entry, span, first, last, view)
        return data

    def _read_blocks(
        self, entry: TensorEntry, span: RowSpan, first: int, last: int, into: memoryview
    ) -> None:
        """Rows [first, last) of a span; `first` begins a block and `last` ends one."""
        width = entry.row_bytes
        block, fd, path = block_rows(width, self.manifest.block), self.file(span.file), self._paths[span.file]

        def read(row: int) -> None:
            end = min(row + block, last)
            chunk = into[(row - first) * width : (end - first) * width]
            found = read_block(fd, chunk, span.offset + (row - span.start) * width, path)
            if found != span.sum((row - span.start) // block):
                raise self._damaged(entry, path, row, end)

        self._lanes.map(read, range(first, last, block))

    def fill(
        self, entry: TensorEntry, span: RowSpan, start: int, stop: int, place: torch.Tensor
    ) -> tuple[int, int]:
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
        view = byte_view(raw(place))
        step = block * max(1, CHUNK // (block * width))
        for row in range(first, last, step):
            until = min(row + step, last)
            self._read_blocks(entry, span, row, until, view[(row - start) * width : (until - start) * width])
        return first, last

    def stream(self, entry: TensorEntry, span: RowSpan) -> Iterator[torch.Tensor]:
        """The bytes of a span in order, a chunk at a time however large its rows are.

        A block is proven when its last chunk has been given out.
        """
        fd, path = self.file(span.file), self._paths[span.file]
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

    def _damaged(self, entry: TensorEntry, path: Path, first: int, last: int) -> CheckpointError:
        rows = f"rows {first} to {last} of {quoted(entry.name)} ({entry.kind})"
        return CheckpointError(f"{path}: {rows} do not match their checksum. The file is damaged.")

    def whole(self, entry: TensorEntry) -> torch.Tensor:
        """All rows of an entry in memory; refused when the machine has not that much left."""
        _check_memory(entry.bytes, entry)
        tensor = torch.empty(entry.shape, dtype=DTYPE[entry.dtype])
        for span in entry.spans:
            place = tensor[span.start : span.stop] if entry.shape else tensor
            self.fill(entry, span, span.start, span.stop, place)
        return tensor


def _is_header_of(raw: bytearray, found: Sequence[tuple[TensorEntry, RowSpan]]) -> bool:
    """Whether these are the bytes that a save writes in front of these. Compared piece by piece: thousands
    of tensors have long headers."""
    table = (
        (entry.key(span), entry.dtype, entry.rows_shape(span.stop - span.start)) for entry, span in found
    )
    at, ends = 8, [len(raw)]
    for key, part, end in header_parts(table, METADATA):
        if not raw.startswith(part, at):
            return False
        at += len(part)
        if key:
            ends.append(len(raw) + end)
    whole = at == len(raw) and int.from_bytes(raw[:8], "little") == at - 8
    return whole and ends[:-1] == [span.offset for _, span in found]


def _room(count: int, entry: TensorEntry) -> torch.Tensor:
    if count > CHUNK:
        _check_memory(count, entry)
    return torch.empty(count, dtype=torch.uint8)


def _check_memory(count: int, entry: TensorEntry) -> None:
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


_TOLD = 1000  # differences that one rank tells the others: more would drown the message anyway


@dataclass(frozen=True)
class LoadMatch:
    """How one rank's targets and a checkpoint fit; known on every rank before anything is overwritten."""

    pairs: list[tuple[HeldRows, TensorEntry]]
    absent: list[HeldRows]
    unused: list[int]
    mismatched: list[str]

    @property
    def converted(self) -> tuple[tuple[str, str], ...]:
        return tuple((held.kind, held.name) for held, entry in self.pairs if held.dtype != entry.dtype)


def match(manifest: Manifest, targets: Sequence[HeldRows]) -> LoadMatch:
    """Find for each target its entry."""
    fit, wanted = LoadMatch([], [], [], []), set[int]()
    for held in targets:
        entry = manifest.find(held.kind, held.name)
        for name in held.also:  # a tied weight may be stored under all its names
            other = manifest.find(held.kind, name)
            if entry is None:
                entry = other
            elif other is not None and other.same_as(entry):
                wanted.add(id(other))
        if entry is None:
            fit.absent.append(held)
            continue
        wanted.add(id(entry))
        if entry.shape == held.shape and convertible(entry.dtype, held.dtype):
            fit.pairs.append((held, entry))
        elif optional(held.kind):
            fit.absent.append(held)  # of another world size or codec: it starts afresh
        else:
            fit.mismatched.append(
                f"{quoted(held.name)} ({held.kind}) is {entry.shape} {entry.dtype} there and {held.shape} "
                f"{held.dtype} here"
            )
    fit.unused.extend(i for i, entry in enumerate(manifest.entries) if id(entry) not in wanted)
    return fit


def load(
    path: str | os.PathLike[str],
    targets: RunSnapshot,
    peers: SavePeers,
    strict: bool = True,
    known: Manifest | None = None,
) -> LoadResult:
    """Read the rows that `targets.held` name into them, and return the saved values; raises one text on every
    rank.

    `strict` refuses tensors that are missing or left over; kinds of a single rank (RNG, what
    codecs left unsent) are never required. Shapes must always agree; floats may change their dtype. When it
    raises while reading, targets may be partly overwritten. `known`: its manifest, where that was read.
    """
    folder = Path(os.path.abspath(path))
    found: list[tuple[Manifest, LoadMatch]] = []

    def look() -> dict[str, Any]:
        manifest = known if known is not None else read_manifest(folder)
        fit = match(manifest, targets.held)
        found.append((manifest, fit))
        missing = [[held.kind, held.name] for held in fit.absent if not optional(held.kind)]
        return {
            "checksum": manifest.checksum,
            "missing": missing[:_TOLD],
            "mismatched": fit.mismatched[:_TOLD],
            "unused": fit.unused,
        }

    try:
        answers = together(peers, f"reading {folder}", look)
        manifest, fit = found[0]
        unused = _judge(folder, manifest, answers, strict)
        with CheckpointReader(folder, manifest) as reader:
            together(peers, f"reading {folder}", lambda: _fill(reader, fit.pairs))
            values, own = _values(reader, peers)
    except AgreedError as error:
        hint = peers.exchange("" if peers.rank else directory.advice(folder), "reporting a failed load")[0]
        raise CheckpointError(f"{error} {hint}") from error
    absent = tuple((held.kind, held.name) for held in fit.absent)
    return LoadResult(folder, values, own, manifest.world, absent, unused, fit.converted)


def _judge(
    folder: Path, manifest: Manifest, answers: Sequence[Any], strict: bool
) -> tuple[tuple[str, str], ...]:
    """Raise when a checkpoint is not one of this model, with the first differences and what they may come
    from.

    What no rank wants is left over; what some rank misses is missing. Returns what is left over.
    """
    if len({answer["checksum"] for answer in answers}) > 1:
        raise AgreedError(
            f"ranks see different checkpoints at {folder}: it must be one shared folder, not being replaced."
        )
    left = set(answers[0]["unused"]).intersection(*(answer["unused"] for answer in answers[1:]))
    unused = [(entry.kind, entry.name) for i, entry in enumerate(manifest.entries) if i in left]
    missing = dict.fromkeys((kind, name) for answer in answers for kind, name in answer["missing"])
    mismatched = dict.fromkeys(text for answer in answers for text in answer["mismatched"])
    needless = [item for item in unused if not optional(item[0])]
    refuse(folder, list(missing) if strict else [], needless if strict else [], list(mismatched))
    return tuple(item for item in unused if item[0].split(":")[0] not in ("value", "own"))


def refuse(
    folder: Path, missing: list[tuple[str, str]], unused: list[tuple[str, str]], mismatched: list[str]
) -> None:
    """Raise unless all three lists are empty."""
    lines = [some(mismatched)] if mismatched else []
    if missing:
        lines.append(f"{len(missing)} tensors are not in it: {some(_named(*item) for item in missing)}")
        spare = [name[:200] for _, name in unused[:2000]]
        if close := get_close_matches(missing[0][1][:200], spare, n=1, cutoff=0.6):
            lines.append(
                f"it has {quoted(close[0])}: did you mean that (a module or a wrapper changed its name)"
            )
    if unused:
        lines.append(
            f"{len(unused)} of its tensors are not in this run: {some(_named(*item) for item in unused)}"
        )
    if lines:
        way = "" if mismatched else " Pass strict=False to load what agrees."
        raise AgreedError(
            f"{folder} is not a checkpoint of this model and optimizer: {'; '.join(lines)}.{way}"
        )


def _named(kind: str, name: str) -> str:
    return f"{quoted(name)} ({kind})"


def _fill(reader: CheckpointReader, pairs: Sequence[tuple[HeldRows, TensorEntry]]) -> None:
    """Read every overlap into its target, file by file in order, so that disks see a stream."""
    by_file: dict[int, list[tuple[int, HeldRows, TensorEntry]]] = {}
    for held, entry in pairs:
        for number, span in enumerate(entry.spans):
            if span.start < held.rows[1] and span.stop > held.rows[0]:
                by_file.setdefault(span.file, []).append((number, held, entry))
    for file in sorted(by_file):
        here = by_file.pop(file)
        here.sort(key=lambda item: item[2].spans[item[0]].offset)
        for number, held, entry in here:
            span, same = entry.spans[number], entry.dtype == held.dtype
            start, stop = max(span.start, held.rows[0]), min(span.stop, held.rows[1])
            done = (start, start)
            if same and (place := held.place) is not None:
                if held.shape:
                    place = place[start - held.rows[0] : stop - held.rows[0]]
                done = reader.fill(entry, span, start, stop, place)
            for first, last in ((start, done[0]), (done[1], stop)):
                if first < last:
                    for row, rows in reader.span_rows(entry, span, first, last):
                        held.write(row, rows if same else rows.to(DTYPE[held.dtype]))


def _values(reader: CheckpointReader, peers: SavePeers) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The saved values and this rank's own, with their tensors."""
    result: dict[str, Any] = {}
    tensors: dict[tuple[str, str], torch.Tensor] = {}

    def tensor(kind: str, name: str) -> torch.Tensor:
        entry = reader.manifest.find(kind, name)
        if entry is None:
            raise CheckpointError(
                f"{reader.path}: the values refer to the tensor {quoted(name)}, which is not stored."
            )
        if (kind, name) not in tensors:  # read once, however often a hostile manifest names it
            tensors[kind, name] = reader.whole(entry)
        return tensors[kind, name]

    def read() -> None:
        own, kind = reader.manifest.own, f"own:{peers.rank}"
        result["values"] = unpack(reader.manifest.values, lambda name: tensor("value", name))
        result["own"] = (
            unpack(own[peers.rank], lambda name: tensor(kind, name)) if peers.rank < len(own) else None
        )

    together(peers, f"reading the values of {reader.path}", read)
    return result["values"], result["own"]
