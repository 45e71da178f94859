"""Weights in other people's formats, as `Held` records: safetensors, Hugging Face folders, `torch.save`,
distributed checkpoints.

Nothing here runs code that a file brings: `torch.load` with ``weights_only`` (and mapped, so that memory
stays small), and an allow-list for the pickled metadata of torch.distributed.checkpoint (see `distcp.py`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zeroshard.errors import CheckpointError

from . import distcp
from .blocks import read_into
from .elements import DTYPE, byte_view, dtype_name, height
from .manifest import NAME
from .plainjson import parse
from .records import Alone, Held, Saved, Snapshot
from .saving import save
from .tensorfile import HEADER_LIMIT, Spot, open_regular, parse_header, read_header_bytes
from .wording import quoted, some

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")


@dataclass(frozen=True)
class Found:
    """A tensor of a source: `path` is its place in nested dicts, `read` gives rows of it."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[int, int], torch.Tensor]


def import_weights(
    source: str | os.PathLike[str], out: str | os.PathLike[str], prefix: str | None = None
) -> Saved:
    """Make a checkpoint at `out` with the weights of `source`: a file or a folder in one of the formats
    above.

    `prefix` picks one part of a nested or prefixed state dict and drops its name: ``model`` of ``{"model": …,
    "optim": …}``.
    """
    path = Path(os.path.abspath(source))
    if not path.exists():
        raise CheckpointError(f"{path} does not exist.")
    with open_source(path) as found:
        held = [_held(name, item) for name, item in choose(path, found, prefix)]
        return save(out, Snapshot(held, {"imported_from": path.name}), Alone())


def _held(name: str, item: Found) -> Held:
    def refuse(start: int, rows: torch.Tensor) -> None:
        raise AssertionError("a source is only read")

    return Held(name, "parameter", item.shape, item.dtype, (0, height(item.shape)), item.read, refuse)


@contextmanager
def open_source(path: Path) -> Iterator[list[Found]]:
    """The tensors of a source, readable inside the ``with``."""
    with ExitStack() as stack:
        if path.is_file():
            yield _file(path, stack)
        elif os.path.lexists(path / NAME):
            raise CheckpointError(f"{path} already is a ZeroShard checkpoint: load it as it is.")
        elif os.path.lexists(path / distcp.METADATA):
            yield [Found(*item) for item in distcp.tensors(path)]
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
        f"torch.save file and no {distcp.METADATA}. It holds {some(names, 5) or 'nothing'}."
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


def _file(path: Path, stack: ExitStack) -> list[Found]:
    return _safetensors(path, stack) if path.suffix == ".safetensors" else _torch_save(path)


def _safetensors(path: Path, stack: ExitStack) -> list[Found]:
    fd = open_regular(path, follow=True)
    stack.callback(os.close, fd)
    spots = parse_header(read_header_bytes(fd, path), os.fstat(fd).st_size, path)
    return [Found((spot.key,), spot.shape, spot.dtype, _reader(fd, path, spot)) for spot in spots.values()]


def _reader(fd: int, path: Path, spot: Spot) -> Callable[[int, int], torch.Tensor]:
    width = spot.bytes // max(1, height(spot.shape))

    def read(start: int, stop: int) -> torch.Tensor:
        data = torch.empty((stop - start) * width, dtype=torch.uint8)
        if width:
            read_into(fd, byte_view(data), spot.offset + start * width, path)
        return data.view(DTYPE[spot.dtype]).view((stop - start, *spot.shape[1:]) if spot.shape else ())

    return read


def _torch_save(path: Path) -> list[Found]:
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


def _nested(data: Any, path: tuple[str, ...]) -> Iterator[Found]:
    if len(path) > 32:
        raise CheckpointError("the state dict is nested deeper than 32 levels.")
    if isinstance(data, torch.Tensor):
        if data.layout != torch.strided or data.is_quantized:
            raise CheckpointError(
                f"{quoted('.'.join(path))} is sparse or quantized, which cannot be imported."
            )
        held = Held.of(".".join(path) or "tensor", "parameter", data.detach())
        yield Found(path or ("tensor",), held.shape, dtype_name(data.dtype), held.read)
    elif isinstance(data, Mapping):
        for key, item in data.items():
            yield from _nested(item, (*path, str(key)))


def _first_line(error: Exception) -> str:
    """Its first sentence: torch goes on with how to run the code in a file after all."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0].split('. ')[0][:200] if text else ''}"


def choose(source: Path, found: Sequence[Found], prefix: str | None) -> list[tuple[str, Found]]:
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


def _groups(found: Sequence[Found]) -> str:
    counts: dict[str, int] = {}
    for item in found:
        first = item.path[0] if len(item.path) > 1 else item.path[0].split(".")[0]
        counts[first] = counts.get(first, 0) + 1
    return some([f"{quoted(name)} ({count} tensors)" for name, count in counts.items()], 6) or "no tensors"
