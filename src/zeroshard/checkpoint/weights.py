"""Reads the first values of a model from weight files, by rows: what `shard(weights=...)` is given.

Any format that `import_weights` knows, and checkpoints of our own, of which the model's part is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from zeroshard.errors import CheckpointError, OptionError
from zeroshard.field_checks import check_fields, path_text

from .loading import CheckpointReader
from .manifest import NAME, TensorEntry
from .records import CHUNK, row_bytes
from .sources import choose, open_source


@dataclass(frozen=True)
class Weights:
    """Files that `shard(weights=...)` fills a model from, and what need not match.

    - `path`: a folder (safetensors, with or without the index of Hugging Face; a distributed checkpoint; a
      checkpoint of this library) or one file.
    - `missing`: patterns of names that the files may lack, such as a new head: these tensors keep what they
      hold, or are filled as without weights where they are on the meta device.
    - `unused`: patterns of names in the files that the model need not have.
    - `prefix`: of a nested or prefixed state dict, the part to take, without its name.

    >>> Weights("bert", missing="classifier.*", unused="cls.*").missing
    ('classifier.*',)
    """

    path: str | os.PathLike[str]
    missing: str | tuple[str, ...] = ()
    unused: str | tuple[str, ...] = ()
    prefix: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", path_text(self.path, "weights"))
        check_fields(self)
        for field in ("missing", "unused"):
            given = getattr(self, field)
            patterns = (given,) if isinstance(given, str) else given
            if not isinstance(patterns, (tuple, list)) or not all(isinstance(p, str) for p in patterns):
                raise OptionError(
                    f'Weights({field}={given!r}): pass patterns of names, such as "head.*" or '
                    '("head.*", "*.bias").'
                )
            object.__setattr__(self, field, tuple(patterns))

    @classmethod
    def of(cls, given: object) -> Weights | None:
        """What `weights=` was given, as a record."""
        if given is None or isinstance(given, Weights):
            return given
        if not isinstance(given, (str, os.PathLike)):
            raise OptionError(
                f"weights= takes a folder, a file or zs.Weights(...), and got a {type(given).__name__}. "
                "A state dict in memory is loaded before shard(), with model.load_state_dict(state)."
            )
        return cls(given)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in weight files. `chunks(start, stop)` gives (first row, rows) in order, a few MiB at a time;
    a tensor without dims has one row. Rows are valid until the next are asked for."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunks: Callable[[int, int], Iterator[tuple[int, torch.Tensor]]]


def open_weights(weights: Weights, stack: ExitStack) -> dict[str, StoredTensor]:
    """The tensors of weight files by name, readable until the stack is closed."""
    path = Path(os.path.abspath(weights.path))
    if not path.exists():
        raise CheckpointError(
            f"weights: {path} does not exist. Pass a folder or a file on this host: nothing is downloaded."
        )
    if path.is_dir() and os.path.lexists(path / NAME):
        return _of_checkpoint(path, weights.prefix, stack)
    found = stack.enter_context(open_source(path))
    return {
        name: StoredTensor(
            name, item.shape, item.dtype, partial(_by_chunks, item.read, item.shape, item.dtype)
        )
        for name, item in choose(path, found, weights.prefix)
    }


def _of_checkpoint(path: Path, prefix: str | None, stack: ExitStack) -> dict[str, StoredTensor]:
    reader = stack.enter_context(CheckpointReader(path))
    stem = "" if prefix is None else prefix.rstrip(".") + "."
    return {
        entry.name[len(stem) :]: StoredTensor(
            entry.name, entry.shape, entry.dtype, partial(_proven, reader, entry)
        )
        for entry in reader.manifest.entries
        if entry.kind in ("parameter", "buffer") and entry.name.startswith(stem)
    }


def _proven(
    reader: CheckpointReader, entry: TensorEntry, start: int, stop: int
) -> Iterator[tuple[int, torch.Tensor]]:
    for first, rows in reader.rows(entry, start, stop):
        yield first, rows if entry.shape else rows.view(1)


def _by_chunks(
    read: Callable[[int, int], torch.Tensor], shape: tuple[int, ...], dtype: str, start: int, stop: int
) -> Iterator[tuple[int, torch.Tensor]]:
    step = max(1, CHUNK // max(1, row_bytes(shape, dtype)))
    for first in range(start, stop, step):
        rows = read(first, min(first + step, stop))
        yield first, rows if shape else rows.view(1)


def names_with_prefix(stored: Mapping[str, StoredTensor], known: set[str], prefix: object) -> dict[str, str]:
    """By name in the files, the name in the model: models of transformers are saved with the name of their
    base (``model.``) or, the base alone, without it."""
    if not isinstance(prefix, str) or not prefix or stored.keys() & known:
        return {name: name for name in stored}
    stem = prefix + "."
    if any(stem + name in known for name in stored):
        return {name: stem + name if stem + name in known else name for name in stored}
    return {name: name[len(stem) :] if name.startswith(stem) else name for name in stored}
