"""Writes and proves the manifest: what a checkpoint holds, where each row lies, and the checksums of all.

The text is one JSON object whose first line is its *head*, so that a folder of many checkpoints is listed
without parsing them. ``checksum`` is the CRC-32 of all the text with its own eight digits set to zero.
Everything read is proven before it is believed: see `decode`."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from zeroshard.errors import CheckpointError

from .ranges import block_rows
from .records import SIZE, height, namespace, row_bytes
from .tensor_file import open_regular, read_into
from .untrusted import parse, quoted

NAME = "manifest.json"
FORMAT = "zeroshard-checkpoint"
VERSION = 1
LIMIT = 64 << 20  # bytes of a manifest
_HEAD_LIMIT = 4096
_COUNTS = 1 << 60  # what a number of elements or bytes is below
_YEAR_9999 = 2.5e11  # seconds; NaN is below nothing
_START = b'{"checksum":"'
_BLANK = b"00000000"
_ENTRIES, _END = b',\n"entries":[\n', b"\n]}\n"
_BATCH = 1 << 17  # bytes of entries that are parsed at once
# Compact, and refuses what JSON has no word for: values mark those before they come here.
_JSON = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True, allow_nan=False)
_quote = json.encoder.encode_basestring_ascii
RANK_FILE = re.compile(r"rank-\d{5,9}-of-\d{5,9}(-\d{4,9})?\.safetensors", re.ASCII)


class RowSpan(NamedTuple):
    """Rows [start, stop) of a tensor, from byte `offset` of file number `file`, one checksum per block."""

    start: int
    stop: int
    file: int
    offset: int
    sums: bytes  # four bytes a block, big-endian

    def sum(self, block: int) -> int:
        return int.from_bytes(self.sums[4 * block : 4 * block + 4], "big")


class TensorEntry(NamedTuple):
    """One tensor: its spans are sorted, disjoint and cover all its rows."""

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    spans: tuple[RowSpan, ...]

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.shape, self.dtype)

    @property
    def height(self) -> int:
        return height(self.shape)

    @property
    def bytes(self) -> int:
        return self.height * self.row_bytes

    def same_as(self, other: TensorEntry) -> bool:
        """Whether both hold the same, by their checksums: a tied weight that was stored under two names."""
        mine, theirs = ([(s.start, s.stop, s.sums) for s in each.spans] for each in (self, other))
        return (self.shape, self.dtype, mine) == (other.shape, other.dtype, theirs)

    def rows_shape(self, count: int) -> tuple[int, ...]:
        """The shape of `count` of its rows."""
        return (count, *self.shape[1:]) if self.shape else ()

    def key(self, span: RowSpan) -> str:
        """The name of a span inside its file."""
        return f"{self.kind}:{self.name}[{span.start}:{span.stop}]"


@dataclass(frozen=True)
class RankFile:
    name: str
    bytes: int
    header_sum: int


@dataclass(frozen=True)
class ManifestHead:
    """What a listing needs. `serial` grows by one with each save into a folder, so order does not hang on
    clocks."""

    serial: int
    saved_at: float
    step: int | None


@dataclass(frozen=True)
class Manifest:
    head: ManifestHead
    world: int
    block: int
    versions: dict[str, str]
    files: tuple[RankFile, ...]
    entries: tuple[TensorEntry, ...]
    values: Any
    own: tuple[Any, ...]
    checksum: str = ""

    @cached_property
    def by_name(self) -> dict[str, dict[str, TensorEntry]]:
        """The entries by namespace and name."""
        found: dict[str, dict[str, TensorEntry]] = {}
        for entry in self.entries:
            found.setdefault(namespace(entry.kind), {})[entry.name] = entry
        return found

    def find(self, kind: str, name: str) -> TensorEntry | None:
        """The entry of this name, where a tensor of this kind would be."""
        return self.by_name.get(namespace(kind), {}).get(name)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def in_file(self, number: int) -> list[tuple[TensorEntry, RowSpan]]:
        """What lies in file `number`."""
        entries = self._by_file.get(number, ())
        return [(entry, span) for entry in entries for span in entry.spans if span.file == number]

    @cached_property
    def _by_file(self) -> dict[int, list[TensorEntry]]:
        found: dict[int, list[TensorEntry]] = {}
        for entry in self.entries:
            for number in {span.file for span in entry.spans}:
                found.setdefault(number, []).append(entry)
        return found


def encode(manifest: Manifest, entries: Iterable[TensorEntry]) -> bytearray:
    """The text of a manifest with these entries, one a line. They come one at a time: a manifest of thousands
    takes no more memory than its text."""
    head = {
        "checksum": _BLANK.decode(),
        "format": FORMAT,
        "version": VERSION,
        "serial": manifest.head.serial,
        "saved_at": manifest.head.saved_at,
        "step": manifest.head.step,
    }
    files = [[f.name, f.bytes, f"{f.header_sum:08x}"] for f in manifest.files]
    text = bytearray(
        f"{_JSON.encode(head)[:-1]},\n"
        f'"world":{manifest.world},"block":{manifest.block},"versions":{_JSON.encode(manifest.versions)},\n'
        f'"values":{_JSON.encode(manifest.values)},\n"own":{_JSON.encode(list(manifest.own))},\n'
        f'"files":{_JSON.encode(files)},\n'
        '"entries":['.encode("ascii")
    )
    before = "\n"
    for entry in entries:
        spans = ",".join([f'[{s.start},{s.stop},{s.file},{s.offset},"{s.sums.hex()}"]' for s in entry.spans])
        text += (
            f"{before}[{_quote(entry.kind)},{_quote(entry.name)},[{','.join(map(str, entry.shape))}],"
            f'"{entry.dtype}",[{spans}]]'
        ).encode("ascii")
        before = ",\n"
    text += b"\n]}\n"
    if len(text) > LIMIT:
        raise CheckpointError(f"the manifest would have {len(text)} bytes; at most {LIMIT} are read back.")
    text[len(_START) : len(_START) + len(_BLANK)] = f"{zlib.crc32(text):08x}".encode()
    return text


def read_head(folder: Path) -> ManifestHead:
    """The first line of a checkpoint's manifest. Its checksum is not proven: for listing only."""
    raw, where = _read(folder, _HEAD_LIMIT), str(folder / NAME)
    line = raw.split(b"\n", 1)[0]
    return _head(parse(line.rstrip(b",") + b"}", where), where)


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """The manifest of the checkpoint at `path`, proven consistent in itself; raises `CheckpointError`."""
    folder = Path(path)
    refuse_other(folder)
    if not os.path.lexists(folder / NAME):
        files = len(_rank_files(folder))
        raise CheckpointError(f"{folder} holds {files} rank files and no {NAME}, so its save did not finish.")
    return decode(_read(folder, LIMIT + 1), str(folder / NAME))


def refuse_other(folder: Path) -> None:
    """Raises where a path leads to no checkpoint at all, not even to an unfinished one."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder, so not a checkpoint.")
    if os.path.lexists(folder / NAME) or _rank_files(folder):
        return
    inside = sorted(name for name in os.listdir(folder) if os.path.lexists(folder / name / NAME))
    hint = f" It holds checkpoints, for example {folder / inside[-1]}: name one of them." if inside else ""
    raise CheckpointError(f"{folder} holds no {NAME}, so it is not a checkpoint.{hint}")


def _rank_files(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if RANK_FILE.fullmatch(name)]


def _read(folder: Path, limit: int) -> bytearray:
    path = folder / NAME
    fd = open_regular(path)
    try:
        total = os.fstat(fd).st_size
        if total > LIMIT:
            raise CheckpointError(f"{path} has {total} bytes; a manifest has at most {LIMIT}.")
        data = bytearray(min(total, limit))
        read_into(fd, memoryview(data), 0, path)
        return data
    finally:
        os.close(fd)


def decode(raw: bytes | bytearray, where: str) -> Manifest:
    """A manifest from its text. First format and version, then the checksum, then every number."""
    data, lines = _parsed(raw, where)
    head = _head(data, where)
    begin, end = len(_START), len(_START) + len(_BLANK)
    found = f"{zlib.crc32(memoryview(raw)[end:], zlib.crc32(raw[:begin] + _BLANK)):08x}"
    if not raw.startswith(_START) or data["checksum"] != found:
        raise CheckpointError(
            f"{where} does not match its own checksum: it was edited or damaged. Restore it from a copy, or "
            "load another."
        )
    check = BlockCheck(where)
    files = tuple(check.rank_file(item) for item in check.list(data, "files"))
    check.that(len({file.name for file in files}) == len(files), "names a file twice")
    block = check.count(data.get("block"), "block")
    check.that(1 <= block <= 1 << 26, f"has the impossible block size {block}")
    items = check.list(data, "entries") if lines is None else _in_batches(raw, lines, where)
    entries = tuple([check.entry(item, files, block) for item in items])
    versions = data.get("versions")
    check.that(
        isinstance(versions, dict) and all(isinstance(v, str) for v in versions.values()), "has odd versions"
    )
    check.that(isinstance(data.get("values"), dict), "has values that are no object")
    world = check.count(data.get("world"), "world")
    own = tuple(check.list(data, "own"))
    check.that(len(own) in (0, world), "has values of some ranks only")
    manifest = Manifest(head, world, block, dict(versions or {}), files, entries, data["values"], own, found)
    named = sum(len(names) for names in manifest.by_name.values())
    check.that(named == len(entries), "names a tensor twice")
    return manifest


def _parsed(raw: bytes | bytearray, where: str) -> tuple[Any, int | None]:
    """The data of a manifest; and, where it is laid out as `encode` does, without its entries, and where
    those begin: as objects of Python they take many times the memory of the text."""
    at = raw.rfind(_ENTRIES)
    if at > 0 and raw.endswith(_END):
        with suppress(CheckpointError):
            return parse(raw[:at] + b',\n"entries":[]}', where), at + len(_ENTRIES)
    return parse(raw, where), None


def _in_batches(raw: bytes | bytearray, at: int, where: str) -> Iterator[Any]:
    """The entries whose lines begin at `at`, some at a time."""
    given, end = 0, len(raw) - len(_END)
    while at < end:
        stop = raw.find(b"\n", min(at + _BATCH, end))
        try:
            items = parse(b"[" + raw[at:stop].rstrip(b",") + b"]", where)
        except CheckpointError:  # not one to a line after all
            data, stop = parse(raw, where), end
            items = BlockCheck(where).list(data if isinstance(data, dict) else {}, "entries")[given:]
        given += len(items)
        yield from items
        at = stop + 1


def _head(data: Any, where: str) -> ManifestHead:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise CheckpointError(f"{where} is not the manifest of a ZeroShard checkpoint.")
    check = BlockCheck(where)
    version = check.count(data.get("version"), "version")
    if version > VERSION:
        raise CheckpointError(
            f"{where} has format version {version}, and this ZeroShard reads up to {VERSION}: "
            "it was saved by a newer release. Upgrade with `pip install --upgrade zeroshard`."
        )
    saved_at, step = data.get("saved_at"), data.get("step")
    when = float(saved_at) if type(saved_at) is float else float(check.count(saved_at, "time"))
    check.that(0 <= when < _YEAR_9999, "has an odd time")
    check.that(isinstance(data.get("checksum"), str), "has no checksum")
    step = None if step is None else check.count(step, "step")
    return ManifestHead(check.count(data.get("serial"), "serial"), when, step)


@dataclass(frozen=True)
class BlockCheck:
    """Proves blocks of data from a manifest named `where`."""

    where: str
    shapes: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)  # that were met

    def that(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.refuse(otherwise)

    def refuse(self, why: str) -> NoReturn:
        raise CheckpointError(f"{self.where} {why}. It is damaged or was not written by ZeroShard.")

    def count(self, value: Any, what: str) -> int:
        if not (type(value) is int and 0 <= value < _COUNTS):
            self.refuse(f"has a {what} that is no count")
        return int(value)

    def list(self, data: Any, key: str) -> list[Any]:
        value = data.get(key)
        self.that(isinstance(value, list), f"has no list of {key}")
        return list(value)

    def rank_file(self, item: Any) -> RankFile:
        self.that(isinstance(item, list) and len(item) == 3, "has a malformed file")
        name, count, header_sum = item
        self.that(isinstance(name, str), "has a file without a name")
        self.that(
            RANK_FILE.fullmatch(name) is not None,
            f"names the file {quoted(name)}, which is not one of a checkpoint",
        )
        return RankFile(name, self.count(count, "file size"), int.from_bytes(self.sums(header_sum, 1), "big"))

    def sums(self, text: Any, blocks: int) -> bytes:
        self.that(isinstance(text, str) and len(text) == 8 * blocks, "has missing or extra checksums")
        try:
            return bytes.fromhex(text)
        except ValueError:
            raise CheckpointError(f"{self.where} has a checksum that is not hexadecimal.") from None

    def entry(self, item: Any, files: tuple[RankFile, ...], block: int) -> TensorEntry:
        self.that(isinstance(item, list) and len(item) == 5, "has a malformed tensor")
        kind, name, shape, dtype, spans = item
        named = isinstance(kind, str) and isinstance(name, str) and bool(kind) and bool(name)
        self.that(named, "has a nameless tensor")
        # A checkpoint has thousands: a message is put together where it is needed.
        if not (isinstance(shape, list) and len(shape) <= 32):
            self.refuse(f"has an odd shape for {quoted(name)}")
        if not _are_counts(shape):
            self.refuse(f"has a shape of {quoted(name)} that is no count")
        if not (isinstance(dtype, str) and dtype in SIZE):
            self.refuse(f"has an unknown dtype for {quoted(name)}")
        dims = tuple(shape)
        dims = self.shapes.setdefault(dims, dims)
        if math.prod(filter(None, dims)) >= _COUNTS:
            self.refuse(f"has the impossible shape {dims} for {quoted(name)}")
        if not isinstance(spans, list):
            self.refuse(f"has no rows for {quoted(name)}")
        width, rows = row_bytes(dims, dtype), height(dims)
        found = tuple([self.span(span, name, width, files, block) for span in spans])
        at = 0
        for span in found:
            if span.start != at:
                self.refuse(f"has a gap or an overlap at row {at} of {quoted(name)}")
            at = span.stop
        if at != rows:
            self.refuse(f"has {at} of the {rows} rows of {quoted(name)}")
        # Thousands of entries have few kinds and shapes, and the names of the parameters.
        return TensorEntry(sys.intern(kind), sys.intern(name), dims, sys.intern(dtype), found)

    def span(self, item: Any, name: str, width: int, files: tuple[RankFile, ...], block: int) -> RowSpan:
        if not (isinstance(item, list) and len(item) == 5):
            self.refuse(f"has malformed rows for {quoted(name)}")
        start, stop, file, offset, sums = item
        if not _are_counts(item[:4]):
            self.refuse(f"has a row range of {quoted(name)} that is no count")
        if not (start < stop and file < len(files)):
            self.refuse(f"has rows of {quoted(name)} in no file")
        if offset + (stop - start) * width > files[file].bytes:
            self.refuse(f"has rows of {quoted(name)} beyond the end of a file")
        return RowSpan(start, stop, file, offset, self.sums(sums, block_count(stop - start, width, block)))


def _are_counts(values: list[Any]) -> bool:
    """Whether all are numbers that could be sizes or offsets."""
    for value in values:
        if not (type(value) is int and 0 <= value < _COUNTS):
            return False
    return True


def block_count(rows: int, width: int, block: int) -> int:
    """How many checksums `rows` rows of `width` bytes have."""
    return -(-rows // block_rows(width, block)) if width else 0
