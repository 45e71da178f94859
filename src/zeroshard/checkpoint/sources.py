"""Reads weights in other libraries' formats: safetensors, Hugging Face folders, DCP, `torch.save` files.

Nothing here runs code that a file brings: `torch.load` with ``weights_only`` (and mapped, so that memory
stays small), and an allow-list for the metadata of torch.distributed.checkpoint. That is a pickle, which
torch itself loads with no restriction: a hostile folder could run code. Here an unpickler knows only the
handful of records that an honest one consists of, and builds stand-ins for them. The ``.distcp`` files are
slices, each a tensor as `torch.save` writes it."""

from __future__ import annotations

import io
import os
import pickle
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint import locks
from zeroshard.errors import CheckpointError
from zeroshard.field_checks import check_flag
from zeroshard.kernels import allocate

from .manifest import NAME
from .records import CHUNK, DTYPE, HeldRows, NoPeers, RunSnapshot, SaveResult, byte_view, dtype_name, height
from .saving import save
from .tensor_file import HEADER_LIMIT, TensorSpot, open_regular, parse_header, read_header_bytes, read_into
from .untrusted import os_error, parse, quoted, some

METADATA = ".metadata"
_LIMIT = 256 << 20
_FILE = re.compile(r"[\w.\-]+", re.ASCII)
_PACKAGE = "torch.distributed.checkpoint."

Found = tuple[tuple[str, ...], tuple[int, ...], str, Callable[[int, int], torch.Tensor]]


class _DcpRecord:
    """Stands in for any of their records: keeps the fields that were pickled."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        state = getattr(self, "state", None)
        return state.get(name) if isinstance(state, dict) else None


class _DcpTensorRecord(_DcpRecord):
    pass


def _word(*parts: Any) -> str:
    return "/".join(map(str, parts))


def _sizes(dims: Any = ()) -> tuple[int, ...]:
    return tuple(int(dim) for dim in dims)


_KNOWN: dict[tuple[str, str], Any] = {
    (_PACKAGE + "metadata", "Metadata"): _DcpRecord,
    (_PACKAGE + "metadata", "TensorStorageMetadata"): _DcpTensorRecord,
    (_PACKAGE + "metadata", "BytesStorageMetadata"): _DcpRecord,
    (_PACKAGE + "metadata", "ChunkStorageMetadata"): _DcpRecord,
    (_PACKAGE + "metadata", "TensorProperties"): _DcpRecord,
    (_PACKAGE + "metadata", "MetadataIndex"): _DcpRecord,
    (_PACKAGE + "metadata", "StorageMeta"): _DcpRecord,
    (_PACKAGE + "metadata", "_MEM_FORMAT_ENCODING"): _word,
    (_PACKAGE + "filesystem", "_StorageInfo"): _DcpRecord,
    ("torch.serialization", "_get_layout"): _word,
    ("torch", "Size"): _sizes,
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): _word,
    ("pathlib", "PurePosixPath"): _word,
    ("pathlib._local", "PosixPath"): _word,  # where Python 3.13 pickles it from
}


class _DcpUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"{module}.{name} has no business there")
        return _KNOWN[module, name]


@dataclass(frozen=True)
class DcpSlice:
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
        metadata = _DcpUnpickler(io.BytesIO(path.read_bytes())).load()
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
    loaded: dict[tuple[str, int], torch.Tensor] = {}
    for name, record in metadata.get("state_dict_metadata").items():
        if not isinstance(record, _DcpTensorRecord):
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
        tensor = DcpTensor(folder, name, shape, dtype, tuple(slices), loaded)
        yield place, shape, dtype_name(dtype), tensor.read


def _slice(
    folder: Path, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], info: _DcpRecord
) -> DcpSlice:
    file = info.get("relative_path")
    if not isinstance(file, str) or not _FILE.fullmatch(file) or file in (".", ".."):
        raise CheckpointError(f"{folder / METADATA} names a file outside its folder: {quoted(str(file))}.")
    if info.get("transform_descriptors"):
        raise CheckpointError(
            f"{folder}: {quoted(name)} is compressed or transformed by an extension of the writer. "
            "Save it without extensions and import that."
        )
    return DcpSlice(offsets, sizes, file, int(info.get("offset")), int(info.get("length")))


def _check_cover(folder: Path, name: str, shape: tuple[int, ...], slices: list[DcpSlice]) -> None:
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
class DcpTensor:
    """Gives rows of one tensor. It keeps the slices that later rows need, until another tensor is read."""

    folder: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    slices: tuple[DcpSlice, ...]
    loaded: dict[tuple[str, int], torch.Tensor]  # of all tensors of the folder

    def read(self, start: int, stop: int) -> torch.Tensor:
        if not self.shape:
            return self._load(self.slices[0])
        for key in [key for key in self.loaded if key[0] != self.name]:
            del self.loaded[key]
        rows = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        for number, part in enumerate(self.slices):
            first, last = part.offsets[0], part.offsets[0] + part.sizes[0]
            if first >= stop or last <= start:
                continue
            source = self.loaded.get((self.name, number))
            if source is None:
                source = self.loaded[self.name, number] = self._load(part)
            begin, end = max(first, start), min(last, stop)
            place = (slice(begin - start, end - start), *self._columns(part))
            rows[place] = source[begin - first : end - first]
            if last <= stop:
                del self.loaded[self.name, number]
        return rows

    @staticmethod
    def _columns(part: DcpSlice) -> tuple[slice, ...]:
        return tuple(slice(o, o + s) for o, s in zip(part.offsets[1:], part.sizes[1:], strict=True))

    def _load(self, part: DcpSlice) -> torch.Tensor:
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


_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of a source: `path` is its place in nested dicts, `read` gives rows of it."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[int, int], torch.Tensor]


def import_weights(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    prefix: str | None = None,
    *,
    overwrite: bool = False,
) -> SaveResult:
    """Make a checkpoint at `out` with the weights of `source`: a file or a folder in one of the formats
    above. A checkpoint that is there already is replaced with `overwrite` only.

    `prefix` picks one part of a nested or prefixed state dict and drops its name: ``model`` of ``{"model": …,
    "optim": …}``.
    """
    path = Path(os.path.abspath(source))
    if not path.exists():
        raise CheckpointError(f"{path} does not exist.")
    check_flag(overwrite, "overwrite")
    locks.check_target(Path(os.path.abspath(out)), overwrite=overwrite)  # before a large source is looked at
    with open_source(path) as found:
        held = [_held(name, item) for name, item in choose(path, found, prefix)]
        return save(out, RunSnapshot(held, {"imported_from": path.name}), NoPeers(), overwrite=overwrite)


def _held(name: str, item: SourceTensor) -> HeldRows:
    def refuse(start: int, rows: torch.Tensor) -> None:
        raise AssertionError("a source is only read")

    return HeldRows(name, "parameter", item.shape, item.dtype, (0, height(item.shape)), item.read, refuse)


@contextmanager
def open_source(path: Path) -> Iterator[list[SourceTensor]]:
    """The tensors of a source, readable inside the ``with``."""
    with ExitStack() as stack:
        if path.is_file():
            yield _file(path, stack)
        elif os.path.lexists(path / NAME):
            raise CheckpointError(f"{path} already is a ZeroShard checkpoint: load it as it is.")
        elif os.path.lexists(path / METADATA):
            yield [SourceTensor(*item) for item in tensors(path)]
        else:
            yield [item for file in _files(path) for item in _file(file, stack)]


def _files(folder: Path) -> list[Path]:
    """The weight files of a Hugging Face folder: those its index names, or the only kind there is."""
    for index in _INDEXES:
        if (folder / index).exists():
            return [_inside(folder, name) for name in _indexed(folder / index)]
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}.") from error
    for suffix in _SUFFIXES:
        if found := [name for name in names if name.endswith(suffix) and name != "training_args.bin"]:
            return [folder / name for name in found]
    raise CheckpointError(
        f"{folder} holds no weights in a known format: no safetensors file, no {' or '.join(_INDEXES)}, no "
        f"torch.save file and no {METADATA}. It holds {some(names, 5) or 'nothing'}."
    )


def _indexed(path: Path) -> list[str]:
    fd = open_regular(path, follow=True)
    try:
        total = os.fstat(fd).st_size
        if total > HEADER_LIMIT:
            raise CheckpointError(f"{path} has {total} bytes; an index has at most {HEADER_LIMIT}.")
        raw = bytearray(total)
        read_into(fd, memoryview(raw), 0, path)
    finally:
        os.close(fd)
    data = parse(bytes(raw), str(path))
    places = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{path} has no weight_map, so it is not an index.")
    return list(dict.fromkeys(places.values()))


def _inside(folder: Path, name: str) -> Path:
    """A file of the folder; names that lead elsewhere are refused. Links are followed: Hugging Face caches
    are made of them."""
    if not name.isprintable() or name in ("", ".", "..") or "/" in name or "\\" in name:
        raise CheckpointError(
            f"{folder}: the index names the file {quoted(name)}, which is not one of its folder."
        )
    return folder / name


def _file(path: Path, stack: ExitStack) -> list[SourceTensor]:
    return _safetensors(path, stack) if path.suffix == ".safetensors" else _torch_save(path)


def _safetensors(path: Path, stack: ExitStack) -> list[SourceTensor]:
    fd = open_regular(path, follow=True)
    stack.callback(os.close, fd)
    spots = parse_header(read_header_bytes(fd, path), os.fstat(fd).st_size, path)
    room = ChunkRoom()
    return [
        SourceTensor((spot.key,), spot.shape, spot.dtype, _reader(fd, path, spot, room))
        for spot in spots.values()
    ]


class ChunkRoom:
    """Memory that rows are read into, chunk after chunk: each takes the place of the one before.

    It is no part of the heap: of blocks freed between what a model keeps, a heap gives little back.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def take(self, count: int) -> torch.Tensor:
        if self._bytes.numel() < count:
            (self._bytes,) = allocate(max(count, CHUNK), [torch.uint8])
        return self._bytes[:count]


def _reader(fd: int, path: Path, spot: TensorSpot, room: ChunkRoom) -> Callable[[int, int], torch.Tensor]:
    width = spot.bytes // max(1, height(spot.shape))

    def read(start: int, stop: int) -> torch.Tensor:
        data = room.take((stop - start) * width)
        if width:
            read_into(fd, byte_view(data), spot.offset + start * width, path)
        return data.view(DTYPE[spot.dtype]).view((stop - start, *spot.shape[1:]) if spot.shape else ())

    return read


def _torch_save(path: Path) -> list[SourceTensor]:
    data = None
    for mapped in (True, False):  # files older than torch 1.6 cannot be mapped
        try:
            data = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
            break
        except Exception as error:  # the unpickler of a hostile file may raise anything
            if not mapped:
                raise CheckpointError(
                    f"{path} cannot be read as weights ({_first_line(error)}). Only plain state dicts are "
                    "read, never code: save model.state_dict() alone."
                ) from error
    found = list(_nested(data, ()))
    if not found:
        raise CheckpointError(f"{path} holds no tensors.")
    return found


def _nested(data: Any, path: tuple[str, ...]) -> Iterator[SourceTensor]:
    if len(path) > 32:
        raise CheckpointError("the state dict is nested deeper than 32 levels.")
    if isinstance(data, torch.Tensor):
        if data.layout != torch.strided or data.is_quantized:
            raise CheckpointError(
                f"{quoted('.'.join(path))} is sparse or quantized, which cannot be imported."
            )
        held = HeldRows.of(".".join(path) or "tensor", "parameter", data.detach())
        yield SourceTensor(path or ("tensor",), held.shape, dtype_name(data.dtype), held.read)
    elif isinstance(data, Mapping):
        for key, item in data.items():
            yield from _nested(item, (*path, str(key)))


def _first_line(error: Exception) -> str:
    """Its first sentence: torch goes on with how to run the code in a file after all."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0].split('. ')[0][:200] if text else ''}"


def choose(source: Path, found: Sequence[SourceTensor], prefix: str | None) -> list[tuple[str, SourceTensor]]:
    """Names for the tensors wanted. A state dict nested in others is taken when it is the only one; else the
    caller says which."""
    if prefix is not None:
        stem = prefix.rstrip(".") + "."
        named = [
            (name[len(stem) :], item) for item in found if (name := ".".join(item.path)).startswith(stem)
        ]
        if not named:
            raise CheckpointError(
                f"{source} holds no tensor below {quoted(prefix)}; it holds {_groups(found)}."
            )
    elif len(groups := {item.path[0] if len(item.path) > 1 else "" for item in found}) == 1:
        skip = 0 if groups == {""} else 1
        named = [(".".join(item.path[skip:]), item) for item in found]
    else:
        raise CheckpointError(
            f"{source} holds several things: {_groups(found)}. Say which are the weights with prefix."
        )
    twice = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if twice:
        raise CheckpointError(f"{source} names {some(map(quoted, twice))} twice.")
    return named


def _groups(found: Sequence[SourceTensor]) -> str:
    counts: dict[str, int] = {}
    for item in found:
        first = item.path[0] if len(item.path) > 1 else item.path[0].split(".")[0]
        counts[first] = counts.get(first, 0) + 1
    return some([f"{quoted(name)} ({count} tensors)" for name, count in counts.items()], 6) or "no tensors"
