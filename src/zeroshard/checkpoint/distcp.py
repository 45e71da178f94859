"""Folders of torch.distributed.checkpoint, read without that package and without trusting them.

Their ``.metadata`` is a pickle, which torch itself loads with no restriction: a hostile folder could run
code. Here an unpickler knows only the handful of records that an honest one consists of, and builds stand-ins
for them. The ``.distcp`` files are slices, each a tensor as `torch.save` writes it, read with
``weights_only``.
"""

from __future__ import annotations

import io
import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zeroshard.errors import CheckpointError

from .blocks import read_into
from .elements import dtype_name
from .tensorfile import open_regular
from .wording import os_error, quoted

METADATA = ".metadata"
_LIMIT = 256 << 20
_FILE = re.compile(r"[\w.\-]+", re.ASCII)
_PACKAGE = "torch.distributed.checkpoint."

Found = tuple[tuple[str, ...], tuple[int, ...], str, Callable[[int, int], torch.Tensor]]


class _Record:
    """Stands in for any of their records: keeps the fields that were pickled."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        state = getattr(self, "state", None)
        return state.get(name) if isinstance(state, dict) else None


class _TensorRecord(_Record):
    pass


def _word(*parts: Any) -> str:
    return "/".join(map(str, parts))


def _sizes(dims: Any = ()) -> tuple[int, ...]:
    return tuple(int(dim) for dim in dims)


_KNOWN: dict[tuple[str, str], Any] = {
    (_PACKAGE + "metadata", "Metadata"): _Record,
    (_PACKAGE + "metadata", "TensorStorageMetadata"): _TensorRecord,
    (_PACKAGE + "metadata", "BytesStorageMetadata"): _Record,
    (_PACKAGE + "metadata", "ChunkStorageMetadata"): _Record,
    (_PACKAGE + "metadata", "TensorProperties"): _Record,
    (_PACKAGE + "metadata", "MetadataIndex"): _Record,
    (_PACKAGE + "metadata", "StorageMeta"): _Record,
    (_PACKAGE + "metadata", "_MEM_FORMAT_ENCODING"): _word,
    (_PACKAGE + "filesystem", "_StorageInfo"): _Record,
    ("torch.serialization", "_get_layout"): _word,
    ("torch", "Size"): _sizes,
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): _word,
    ("pathlib", "PurePosixPath"): _word,
    ("pathlib._local", "PosixPath"): _word,  # where Python 3.13 pickles it from
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"{module}.{name} has no business there")
        return _KNOWN[module, name]


@dataclass(frozen=True)
class Slice:
    """One stored part of a tensor: where it belongs in the tensor, and where its bytes are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    at: int
    length: int


def tensors(folder: Path) -> Iterator[Found]:
    """(path in the nested dict, shape, dtype, read) of each tensor; what is no tensor is left out."""
    path = folder / METADATA
    try:
        if path.stat().st_size > _LIMIT:
            raise CheckpointError(f"{path} has more than {_LIMIT} bytes.")
        metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
        found = list(_tensors(folder, metadata))
    except OSError as error:
        raise os_error(error, "reading", path) from error
    except CheckpointError:
        raise
    except Exception as error:  # a damaged or hostile pickle may raise anything
        raise CheckpointError(
            f"{path} is damaged, or is no metadata of torch.distributed.checkpoint: {str(error)[:200]}."
        ) from error
    yield from found


def _tensors(folder: Path, metadata: Any) -> Iterator[Found]:
    places = {
        (index.get("fqn"), _sizes(index.get("offset") or ())): info
        for index, info in metadata.get("storage_data").items()
    }
    paths = metadata.get("planner_data")
    for name, record in metadata.get("state_dict_metadata").items():
        if not isinstance(record, _TensorRecord):
            continue
        shape = _sizes(record.get("size"))
        dtype = record.get("properties").state[0]
        slices = []
        for chunk in record.get("chunks"):
            offsets = _sizes(chunk.get("offsets"))
            slices.append(_slice(folder, name, offsets, _sizes(chunk.get("sizes")), places[name, offsets]))
        _check_cover(folder, name, shape, slices)
        nested = paths.get(name) if isinstance(paths, dict) else None
        place = tuple(str(part) for part in nested) if nested else (name,)
        yield place, shape, dtype_name(dtype), Tensor(folder, name, shape, dtype, tuple(slices)).read


def _slice(folder: Path, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], info: _Record) -> Slice:
    file = info.get("relative_path")
    if not isinstance(file, str) or not _FILE.fullmatch(file) or file in (".", ".."):
        raise CheckpointError(f"{folder / METADATA} names a file outside its folder: {quoted(str(file))}.")
    if info.get("transform_descriptors"):
        raise CheckpointError(
            f"{folder}: {quoted(name)} is compressed or transformed by an extension of the writer. "
            "Save it without extensions and import that."
        )
    return Slice(offsets, sizes, file, int(info.get("offset")), int(info.get("length")))


def _check_cover(folder: Path, name: str, shape: tuple[int, ...], slices: list[Slice]) -> None:
    """The slices lie inside the tensor and have its number of elements: no absurd shape is believed."""

    def count(dims: tuple[int, ...]) -> int:
        total = 1
        for dim in dims:
            total *= dim
        return total

    inside = all(
        len(part.offsets) == len(part.sizes) == len(shape)
        and all(
            o >= 0 and s >= 0 and o + s <= d for o, s, d in zip(part.offsets, part.sizes, shape, strict=True)
        )
        and part.at >= 0
        and part.length >= 0
        for part in slices
    )
    if not inside or sum(count(part.sizes) for part in slices) != count(shape):
        raise CheckpointError(f"{folder}: the parts of {quoted(str(name))} do not make up its shape {shape}.")


@dataclass
class Tensor:
    """Gives rows of one tensor; keeps the slices that later rows need, and no others."""

    folder: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    slices: tuple[Slice, ...]
    loaded: dict[int, torch.Tensor] = field(default_factory=dict)

    def read(self, start: int, stop: int) -> torch.Tensor:
        if not self.shape:
            return self._load(self.slices[0])
        rows = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        for number, part in enumerate(self.slices):
            first, last = part.offsets[0], part.offsets[0] + part.sizes[0]
            if first >= stop or last <= start:
                continue
            source = self.loaded.get(number)
            if source is None:
                source = self.loaded[number] = self._load(part)
            begin, end = max(first, start), min(last, stop)
            place = (slice(begin - start, end - start), *self._columns(part))
            rows[place] = source[begin - first : end - first]
            if last <= stop:
                del self.loaded[number]
        return rows

    @staticmethod
    def _columns(part: Slice) -> tuple[slice, ...]:
        return tuple(slice(o, o + s) for o, s in zip(part.offsets[1:], part.sizes[1:], strict=True))

    def _load(self, part: Slice) -> torch.Tensor:
        path = self.folder / part.file
        fd = open_regular(path)
        try:
            if part.at + part.length > os.fstat(fd).st_size:
                raise CheckpointError(f"{path} is truncated: it ends inside {quoted(self.name)}.")
            raw = bytearray(part.length)
            read_into(fd, memoryview(raw), part.at, path)
        finally:
            os.close(fd)
        try:
            tensor = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
        except Exception as error:  # the unpickler of a hostile file may raise anything
            raise CheckpointError(
                f"{path}: {quoted(self.name)} cannot be read: {str(error)[:200]}."
            ) from error
        if not isinstance(tensor, torch.Tensor) or (tuple(tensor.shape), tensor.dtype) != (
            part.sizes,
            self.dtype,
        ):
            raise CheckpointError(f"{path}: {quoted(self.name)} is not what {METADATA} says it is.")
        return tensor
