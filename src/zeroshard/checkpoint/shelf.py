"""A folder of checkpoints: which are complete, which is the latest, which are too old, and what dead saves
left."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from zeroshard.errors import CheckpointError
from zeroshard.fields import path_text

from . import claim
from .manifest import NAME, Head, Manifest, read_head, read_manifest
from .wording import quoted, some


@dataclass(frozen=True)
class Listed:
    path: Path
    head: Head


def listing(folder: Path) -> list[Listed]:
    """The checkpoints of a folder, the newest first, by the heads of their manifests alone."""
    found = []
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    for name in names:
        if name.startswith(".") or not os.path.lexists(folder / name / NAME):
            continue
        try:
            found.append(Listed(folder / name, read_head(folder / name)))
        except CheckpointError:
            continue  # damaged or newer than this release: not ours to count on
    return sorted(
        found, key=lambda item: (item.head.serial, item.head.saved_at, item.path.name), reverse=True
    )


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint of `folder` (or `folder` itself when it is one), or None.

    Complete: the manifest proves itself, and every file is there with its size. Contents are proven when they
    are loaded.
    """
    root = Path(path_text(folder, "zs.latest(folder)"))
    if is_complete(root):
        return root
    return next((item.path for item in listing(root) if is_complete(item.path)), None)


def is_complete(path: Path) -> bool:
    try:
        return not missing_files(path, read_manifest(path))
    except (CheckpointError, OSError):
        return False


def missing_files(path: Path, manifest: Manifest) -> dict[int, str]:
    """What is wrong with the files of a checkpoint without reading them, by file number."""
    wrong = {}
    for number, file in enumerate(manifest.files):
        try:
            found = os.lstat(path / file.name).st_size
        except OSError:
            wrong[number] = "is missing"
            continue
        if found != file.bytes:
            wrong[number] = f"has {found} bytes and was saved with {file.bytes}: " + (
                "truncated" if found < file.bytes else "something was added"
            )
    return wrong


def tensors_of(manifest: Manifest, number: int) -> str:
    """The tensors of a file, for a message."""
    names = dict.fromkeys(f"{quoted(entry.name)} ({entry.kind})" for entry, _ in manifest.in_file(number))
    return f"it holds rows of {some(names)}" if names else "it holds no tensor"


def next_serial(folder: Path) -> int:
    return 1 + max((item.head.serial for item in listing(folder)), default=0)


def advice(path: Path) -> str:
    """The end of every error about a checkpoint: where the latest good one is."""
    parent = path.absolute().parent
    for item in listing(parent):
        if item.path.name != path.name and is_complete(item.path):
            return f"The latest complete checkpoint besides it is {item.path}."
    return f"There is no complete checkpoint besides it in {parent}."


def retire(target: Path, keep: int) -> tuple[Path, ...]:
    """Remove the oldest checkpoints beyond `keep`, never `target` itself; call it when `target` is complete.

    Only names that differ from the target's in their digits count (``step-900`` for ``step-1000``), so that
    ``best`` or another run's checkpoints beside it stay.
    """
    pattern = re.compile(r"\d+".join(re.escape(part) for part in re.split(r"\d+", target.name)), re.ASCII)
    family = [item.path for item in listing(target.parent) if pattern.fullmatch(item.path.name)]
    others = [path for path in family if path.name != target.name and not path.is_symlink()]
    removed = []
    for path in others[max(0, keep - 1) :]:
        try:
            claim.check_target(path)  # something else was put inside: leave it to its owner
            aside = claim.set_aside(path)
        except (OSError, CheckpointError):
            continue
        shutil.rmtree(aside, ignore_errors=True)
        removed.append(path)
    return tuple(removed)


def clean(folder: str | os.PathLike[str]) -> list[Path]:
    """Remove what dead saves left in `folder`, and finish replacements they were in the middle of. Living
    saves are left alone.

    Every save calls it; call it on one rank when a job starts.
    """
    root = Path(folder)
    removed: list[Path] = []
    try:
        names = os.listdir(root)
    except OSError:
        return removed
    for name in names:
        if claim.REMOVING.fullmatch(name):
            removed.append(root / name)
        elif match := claim.HOLDER.fullmatch(name):
            try:
                with claim.gate(root) as held:
                    if (root / name).is_dir() and (aside := claim.settle(root / match.group(1), held)):
                        removed.append(aside)
            except (OSError, CheckpointError):
                continue  # alive, or another process settled it first
    for path in removed:
        shutil.rmtree(path, ignore_errors=True)
    return removed
