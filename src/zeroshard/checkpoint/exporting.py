"""Out to the layout that Hugging Face libraries read: ``model-00001-of-00003.safetensors`` and an index,
streamed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from zeroshard.count.layout import buckets
from zeroshard.errors import CheckpointError
from zeroshard.sizes import show_apart

from . import claim, disk
from .elements import DTYPE, SIZE, as_bytes
from .manifest import Entry
from .reader import Reader
from .tensorfile import TensorFileWriter, header_of
from .wording import os_error

SHARD = 5_000_000_000  # bytes: what Hugging Face libraries cut at
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Exported:
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
) -> Exported:
    """Write parameters and buffers of the checkpoint `path` to the new folder `out`; floats as `dtype` if
    given.

    Memory stays at one chunk whatever the model. `out` appears when it is complete.
    """
    if dtype is not None and (dtype not in DTYPE or not DTYPE[dtype].is_floating_point):
        floats = ", ".join(name for name in DTYPE if DTYPE[name].is_floating_point)
        raise CheckpointError(f"dtype {dtype!r} is not one to export to; pass one of {floats}.")
    if max_shard_bytes < 1:
        raise CheckpointError(f"max_shard_bytes={max_shard_bytes} holds nothing; pass for example {SHARD}.")
    target = Path(os.path.abspath(out))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists; export to a new folder.")
    with Reader(Path(os.path.abspath(path))) as reader:
        entries = [entry for entry in reader.manifest.entries if entry.kind in ("parameter", "buffer")]
        if not entries:
            raise CheckpointError(f"{reader.path} holds no parameters, so there is nothing to export.")
        shards = _shards(entries, max_shard_bytes, dtype)
        ticket = claim.take(target)
        try:
            total = sum(_bytes(entry, dtype) for entry in entries)
            if (free := disk.free_bytes(ticket.staging)) < total:
                room = "{} are needed and {} are free".format(*show_apart(total, free))
                raise CheckpointError(f"the disk has no room to export to {target}: {room}.")
            names = _write_all(reader, shards, dtype, ticket.staging, progress)
            ticket.commit()
        except OSError as error:
            raise os_error(error, "exporting to", target) from error
        finally:
            ticket.release()
    return Exported(target, names, len(entries), total)


def _as(entry: Entry, dtype: str | None) -> str:
    return dtype if dtype is not None and DTYPE[entry.dtype].is_floating_point else entry.dtype


def _bytes(entry: Entry, dtype: str | None) -> int:
    return entry.bytes // SIZE[entry.dtype] * SIZE[_as(entry, dtype)]


def _shards(entries: list[Entry], limit: int, dtype: str | None) -> list[list[Entry]]:
    """Whole tensors into files of at most `limit` bytes, in the model's order; a larger tensor has a file of
    its own."""
    by_name = {entry.name: entry for entry in entries}
    files = buckets([(entry.name, _bytes(entry, dtype)) for entry in entries], limit)
    return [[by_name[name] for name in names] for names in files]


def _write_all(
    reader: Reader,
    shards: list[list[Entry]],
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
        disk.write_file(folder / INDEX, json.dumps(index, indent=2).encode() + b"\n")
        names.append(INDEX)
    return tuple(names)


def _write(
    reader: Reader, shard: list[Entry], dtype: str | None, path: Path, progress: Callable[[int], None]
) -> None:
    shard = sorted(shard, key=lambda entry: -SIZE[_as(entry, dtype)])
    header, _ = header_of([(entry.name, _as(entry, dtype), entry.shape) for entry in shard], {"format": "pt"})
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
