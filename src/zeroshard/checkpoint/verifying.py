"""Proves a checkpoint: every file, every header, every block. Collects all that is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from zeroshard.checkpoint import directory
from zeroshard.errors import CheckpointError

from .loading import CheckpointReader
from .manifest import NAME, read_manifest, refuse_other

_MOST = 1000  # problems listed


@dataclass(frozen=True)
class VerifyReport:
    """`problems` is empty when every byte is as it was saved; `strangers` are files that are no part of the
    checkpoint."""

    path: Path
    files: int
    tensors: int
    bytes: int
    problems: tuple[str, ...]
    strangers: tuple[str, ...]
    advice: str

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(
    path: str | os.PathLike[str], progress: Callable[[int], None] = lambda count: None
) -> VerifyReport:
    """Read all of a checkpoint against its checksums. `progress` is told the bytes read since it was last
    told. Raises `CheckpointError` where `path` leads to none: that is a slip, not damage."""
    folder = Path(os.path.abspath(path))
    refuse_other(folder)
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return VerifyReport(folder, 0, 0, 0, (str(error),), (), directory.advice(folder))
    problems: list[str] = []
    with CheckpointReader(folder, manifest) as reader:
        for number in range(len(manifest.files)):
            try:
                reader.file(number)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            for entry, span in sorted(manifest.in_file(number), key=lambda item: item[1].offset):
                try:
                    for data in reader.stream(entry, span):
                        progress(data.nbytes)
                except CheckpointError as error:
                    problems.append(str(error))
                if len(problems) >= _MOST:
                    break
    known = {NAME, *(file.name for file in manifest.files)}
    strangers = tuple(sorted(name for name in os.listdir(folder) if name not in known))
    advice = directory.advice(folder) if problems else ""
    return VerifyReport(
        folder, len(manifest.files), len(manifest.entries), manifest.bytes, tuple(problems), strangers, advice
    )
