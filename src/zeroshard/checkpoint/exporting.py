"""Exports to the layout that Hugging Face libraries read: numbered safetensors files and an index."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from zeroshard.checkpoint import durable_files, locks
from zeroshard.errors import CheckpointError
from zeroshard.field_checks import check_flag
from zeroshard.layout.sharding import buckets
from zeroshard.sizes import show_apart

from .loading import CheckpointReader
from .manifest import TensorEntry
from .records import DTYPE, SIZE, as_bytes
from .tensor_file import TensorFileWriter, header_of
from .untrusted import os_error

SHARD = 5_000_000_000  # bytes: what Hugging Face libraries cut at
INDEX = "model.safetensors.index.json"
EXPORT = locks.LockKind(
    "an export",
    re.compile(r"model(-[0-9]{5,}-of-[0-9]{5,})?\.safetensors|" + re.escape(INDEX)),
)


@dataclass(frozen=True)
class ExportResult:
    path: Path
    files: tuple[str, ...]
    tensors: int
    bytes: int


def export(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    max_shard_bytes: int = SHARD,
    dtype: str | None = None,
    progress: Callable[[int], None] = lambda count: None,
    *,
    overwrite: bool = False,
) -> ExportResult:
    """Write parameters and buffers of the checkpoint `path` to the folder `out`; floats as `dtype` if given.
    An export that is there already is replaced with `overwrite` only.

    Memory stays at one chunk whatever the model. `out` appears when it is complete.
    """
    if dtype is not None and (dtype not in DTYPE or not DTYPE[dtype].is_floating_point):
        floats = ", ".join(name for name in DTYPE if DTYPE[name].is_floating_point)
        raise CheckpointError(f"dtype {dtype!r} is not one to export to; pass one of {floats}.")
    if max_shard_bytes < 1:
        raise CheckpointError(f"max_shard_bytes={max_shard_bytes} holds nothing; pass for example {SHARD}.")
    target = Path(os.path.abspath(out))
    check_flag(overwrite, "overwrite")
    locks.check_target(target, EXPORT, overwrite)
    with CheckpointReader(Path(os.path.abspath(path))) as reader:
        entries = [entry for entry in reader.manifest.entries if entry.kind in ("parameter", "buffer")]
        if not entries:
            raise CheckpointError(f"{reader.path} holds no parameters, so there is nothing to export.")
        shards = _shards(entries, max_shard_bytes, dtype)
        ticket = locks.take(target, EXPORT, overwrite)
        try:
            total = sum(_bytes(entry, dtype) for entry in entries)
            if (free := durable_files.free_bytes(ticket.staging)) < total:
                room = "{} are needed and {} are free".format(*show_apart(total, free))
                raise CheckpointError(f"the disk has no room to export to {target}: {room}.")
            names = _write_all(reader, shards, dtype, ticket.staging, progress)
            ticket.commit()
        except OSError as error:
            raise os_error(error, "exporting to", target) from error
        finally:
            ticket.release()
    return ExportResult(target, names, len(entries), total)


def _as(entry: TensorEntry, dtype: str | None) -> str:
    return dtype if dtype is not None and DTYPE[entry.dtype].is_floating_point else entry.dtype


def _bytes(entry: TensorEntry, dtype: str | None) -> int:
    return entry.bytes // SIZE[entry.dtype] * SIZE[_as(entry, dtype)]


def _shards(entries: list[TensorEntry], limit: int, dtype: str | None) -> list[list[TensorEntry]]:
    """Whole tensors into files of at most `limit` bytes, in the model's order; a larger tensor has a file of
    its own."""
    by_name = {entry.name: entry for entry in entries}
    files = buckets([(entry.name, _bytes(entry, dtype)) for entry in entries], limit)
    return [[by_name[name] for name in names] for names in files]


def _write_all(
    reader: CheckpointReader,
    shards: list[list[TensorEntry]],
    dtype: str | None,
    folder: Path,
    progress: Callable[[int], None],
) -> tuple[str, ...]:
    names = []
    places: dict[str, str] = {}
    for number, shard in enumerate(shards):
        many = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        names.append(many if len(shards) > 1 else "model.safetensors")
        places |= {entry.name: names[-1] for entry in shard}
        _write(reader, shard, dtype, folder / names[-1], progress)
    if len(shards) > 1:
        total = sum(_bytes(entry, dtype) for shard in shards for entry in shard)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        durable_files.write_file(folder / INDEX, json.dumps(index, indent=2).encode() + b"\n")
        names.append(INDEX)
    return tuple(names)


def _write(
    reader: CheckpointReader,
    shard: list[TensorEntry],
    dtype: str | None,
    path: Path,
    progress: Callable[[int], None],
) -> None:
    shard = sorted(shard, key=lambda entry: -SIZE[_as(entry, dtype)])
    header, _, _ = header_of(
        [(entry.name, _as(entry, dtype), entry.shape) for entry in shard], {"format": "pt"}
    )
    writer = TensorFileWriter(path, header)
    try:
        for entry in shard:
            for part in (part for span in entry.spans for part in reader.stream(entry, span)):
                data = as_bytes(part.view(DTYPE[entry.dtype]).to(DTYPE[_as(entry, dtype)]))
                writer.write(data)
                progress(len(data))
        writer.close()
    finally:
        writer.abandon()
