"""The manifest: what a checkpoint holds, where each row lies, and the checksums that prove it.

The text is one JSON object whose first line is its *head*, so that a folder of many checkpoints is listed
without parsing them. ``checksum`` is the CRC-32 of all the text with its own eight digits set to zero.
Everything read is proven before it is believed: see `decode`.
"""

from __future__ import annotations

import math
import os
import re
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from zeroshard.errors import CheckpointError

from .blocks import read_into
from .elements import SIZE, height, row_bytes
from .plainjson import dump, parse
from .ranges import block_rows
from .records import slot
from .tensorfile import open_regular
from .turns import gently
from .wording import quoted

NAME = "manifest.json"
FORMAT = "zeroshard-checkpoint"
VERSION = 1
LIMIT = 64 << 20  # bytes of a manifest
_HEAD_LIMIT = 4096
_YEAR_9999 = 2.5e11  # seconds; NaN is below nothing
_START = b'{"checksum":"'
_BLANK = b"00000000"
RANK_FILE = re.compile(r"rank-\d{5,9}-of-\d{5,9}(-\d{4,9})?\.safetensors", re.ASCII)


@dataclass(frozen=True)
class Span:
    """Rows [start, stop) of a tensor, from byte `offset` of file number `file`, one checksum per block."""

    start: int
    stop: int
    file: int
    offset: int
    sums: bytes  # four bytes a block, big-endian

    def sum(self, block: int) -> int:
        return int.from_bytes(self.sums[4 * block : 4 * block + 4], "big")


@dataclass(frozen=True)
class Entry:
    """One tensor: its spans are sorted, disjoint and cover all its rows."""

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    spans: tuple[Span, ...]

    @cached_property
    def row_bytes(self) -> int:
        return row_bytes(self.shape, self.dtype)

    @cached_property
    def height(self) -> int:
        return height(self.shape)

    @property
    def bytes(self) -> int:
        return self.height * self.row_bytes

    def same_as(self, other: Entry) -> bool:
        """Whether both hold the same, by their checksums: a tied weight that was stored under two names."""
        mine, theirs = ([(s.start, s.stop, s.sums) for s in each.spans] for each in (self, other))
        return (self.shape, self.dtype, mine) == (other.shape, other.dtype, theirs)

    def rows_shape(self, count: int) -> tuple[int, ...]:
        """The shape of `count` of its rows."""
        return (count, *self.shape[1:]) if self.shape else ()

    def key(self, span: Span) -> str:
        """The name of a span inside its file."""
        return f"{self.kind}:{self.name}[{span.start}:{span.stop}]"


@dataclass(frozen=True)
class RankFile:
    name: str
    bytes: int
    header_sum: int


@dataclass(frozen=True)
class Head:
    """What a listing needs. `serial` grows by one with each save into a folder, so order does not hang on
    clocks."""

    serial: int
    saved_at: float
    step: int | None


@dataclass(frozen=True)
class Manifest:
    head: Head
    world: int
    block: int
    versions: dict[str, str]
    files: tuple[RankFile, ...]
    entries: tuple[Entry, ...]
    values: Any
    own: tuple[Any, ...]
    checksum: str = ""

    @cached_property
    def by_slot(self) -> dict[tuple[str, str], Entry]:
        return {slot(entry.kind, entry.name): entry for entry in self.entries}

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def in_file(self, number: int) -> list[tuple[Entry, Span]]:
        return self._by_file.get(number, [])

    @cached_property
    def _by_file(self) -> dict[int, list[tuple[Entry, Span]]]:
        found: dict[int, list[tuple[Entry, Span]]] = {}
        for entry in self.entries:
            for span in entry.spans:
                found.setdefault(span.file, []).append((entry, span))
        return found


def encode(manifest: Manifest) -> bytes:
    """The text of a manifest, with one tensor a line."""
    head = {
        "checksum": _BLANK.decode(),
        "format": FORMAT,
        "version": VERSION,
        "serial": manifest.head.serial,
        "saved_at": manifest.head.saved_at,
        "step": manifest.head.step,
    }
    entries = (
        [
            e.kind,
            e.name,
            list(e.shape),
            e.dtype,
            [[s.start, s.stop, s.file, s.offset, s.sums.hex()] for s in e.spans],
        ]
        for e in gently(manifest.entries)
    )
    body = (
        f'"world":{manifest.world},"block":{manifest.block},"versions":{dump(manifest.versions)},\n'
        f'"values":{dump(manifest.values)},\n"own":{dump(list(manifest.own))},\n'
        f'"files":{dump([[f.name, f.bytes, f"{f.header_sum:08x}"] for f in manifest.files])},\n'
        '"entries":[\n' + ",\n".join(dump(entry) for entry in entries) + "\n]}\n"
    )
    text = (dump(head)[:-1] + ",\n" + body).encode("ascii")
    if len(text) > LIMIT:
        raise CheckpointError(f"the manifest would have {len(text)} bytes; at most {LIMIT} are read back.")
    return _START + f"{zlib.crc32(text):08x}".encode() + text[len(_START) + len(_BLANK) :]


def read_head(folder: Path) -> Head:
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


def _read(folder: Path, limit: int) -> bytes:
    path = folder / NAME
    fd = open_regular(path)
    try:
        total = os.fstat(fd).st_size
        if total > LIMIT:
            raise CheckpointError(f"{path} has {total} bytes; a manifest has at most {LIMIT}.")
        data = bytearray(min(total, limit))
        read_into(fd, memoryview(data), 0, path)
        return bytes(data)
    finally:
        os.close(fd)


def decode(raw: bytes, where: str) -> Manifest:
    """A manifest from its text. First format and version, then the checksum, then every number."""
    data = parse(raw, where)
    head = _head(data, where)
    begin, end = len(_START), len(_START) + len(_BLANK)
    found = f"{zlib.crc32(raw[:begin] + _BLANK + raw[end:]):08x}"
    if not raw.startswith(_START) or data["checksum"] != found:
        raise CheckpointError(
            f"{where} does not match its own checksum: it was edited or damaged. Restore it from a copy, or "
            "load another."
        )
    check = Check(where)
    files = tuple(check.rank_file(item) for item in check.list(data, "files"))
    check.that(len({file.name for file in files}) == len(files), "names a file twice")
    block = check.count(data.get("block"), "block")
    check.that(1 <= block <= 1 << 26, f"has the impossible block size {block}")
    entries = tuple(check.entry(item, files, block) for item in check.list(data, "entries"))
    check.that(len({slot(e.kind, e.name) for e in entries}) == len(entries), "names a tensor twice")
    versions = data.get("versions")
    check.that(
        isinstance(versions, dict) and all(isinstance(v, str) for v in versions.values()), "has odd versions"
    )
    check.that(isinstance(data.get("values"), dict), "has values that are no object")
    world = check.count(data.get("world"), "world")
    own = tuple(check.list(data, "own"))
    check.that(len(own) in (0, world), "has values of some ranks only")
    return Manifest(head, world, block, dict(versions or {}), files, entries, data["values"], own, found)


def _head(data: Any, where: str) -> Head:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise CheckpointError(f"{where} is not the manifest of a ZeroShard checkpoint.")
    check = Check(where)
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
    return Head(check.count(data.get("serial"), "serial"), when, step)


@dataclass(frozen=True)
class Check:
    """Proves pieces of data from a manifest named `where`."""

    where: str

    def that(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise CheckpointError(f"{self.where} {otherwise}. It is damaged or was not written by ZeroShard.")

    def count(self, value: Any, what: str) -> int:
        self.that(type(value) is int and 0 <= value < 1 << 60, f"has a {what} that is no count")
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

    def entry(self, item: Any, files: tuple[RankFile, ...], block: int) -> Entry:
        self.that(isinstance(item, list) and len(item) == 5, "has a malformed tensor")
        kind, name, shape, dtype, spans = item
        named = isinstance(kind, str) and isinstance(name, str) and bool(kind) and bool(name)
        self.that(named, "has a nameless tensor")
        label = quoted(name)
        self.that(isinstance(shape, list) and len(shape) <= 32, f"has an odd shape for {label}")
        dims = tuple(self.count(dim, f"shape of {label}") for dim in shape)
        self.that(isinstance(dtype, str) and dtype in SIZE, f"has an unknown dtype for {label}")
        elements = math.prod(dim for dim in dims if dim)
        self.that(elements < 1 << 60, f"has the impossible shape {dims} for {label}")
        self.that(isinstance(spans, list), f"has no rows for {label}")
        width = row_bytes(dims, dtype)
        entry = Entry(
            kind, name, dims, dtype, tuple(self.span(span, label, width, files, block) for span in spans)
        )
        at = 0
        for span in entry.spans:
            self.that(span.start == at, f"has a gap or an overlap at row {at} of {label}")
            at = span.stop
        self.that(at == entry.height, f"has {at} of the {entry.height} rows of {label}")
        return entry

    def span(self, item: Any, label: str, width: int, files: tuple[RankFile, ...], block: int) -> Span:
        self.that(isinstance(item, list) and len(item) == 5, f"has malformed rows for {label}")
        start, stop, file, offset = (self.count(number, f"row range of {label}") for number in item[:4])
        self.that(start < stop and file < len(files), f"has rows of {label} in no file")
        total = (stop - start) * width
        self.that(offset + total <= files[file].bytes, f"has rows of {label} beyond the end of a file")
        return Span(start, stop, file, offset, self.sums(item[4], block_count(stop - start, width, block)))


def block_count(rows: int, width: int, block: int) -> int:
    """How many checksums `rows` rows of `width` bytes have."""
    return -(-rows // block_rows(width, block)) if width else 0
