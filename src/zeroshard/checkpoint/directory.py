"""Looks after a folder of checkpoints: which are complete, latest, too old, and what dead saves left."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zeroshard.checkpoint import durable_files, locks
from zeroshard.errors import CheckpointError
from zeroshard.field_checks import path_text

from .manifest import NAME, Manifest, ManifestHead, read_head, read_manifest
from .untrusted import quoted, some


@dataclass(frozen=True)
class ListedCheckpoint:
    path: Path
    head: ManifestHead


def listing(folder: Path) -> list[ListedCheckpoint]:
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
            found.append(ListedCheckpoint(folder / name, read_head(folder / name)))
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


def retire(target: Path, keep: int, removes: Callable[[Path], bool]) -> tuple[Path, ...]:
    """Remove the oldest checkpoints beyond `keep`, of those that the caller `removes`, never `target` itself;
    call it when `target` is complete.

    Only names that differ from the target's in their digits count (``step-900`` for ``step-1000``), so that
    ``best`` or another run's checkpoints beside it stay.
    """
    return tuple(path for path in _surplus(target, keep, removes) if _remove(path))


def make_room(target: Path, keep: int, need: int, removes: Callable[[Path], bool]) -> tuple[Path, ...]:
    """Before a save: where fewer than `need` bytes are free, remove what `retire` would remove after it, the
    oldest first, as far as it takes. The newest complete checkpoint of the folder stays in any case; and so
    do all where it would not do."""
    surplus = _surplus(target, keep, removes)
    short = need - durable_files.free_bytes(target.parent)
    if short <= 0 or not surplus:
        return ()
    newest = next((item.path for item in listing(target.parent) if is_complete(item.path)), None)
    removable = [path for path in reversed(surplus) if path != newest]
    if sum(map(_size, removable)) < short:
        return ()
    removed = []
    for path in removable:
        if durable_files.free_bytes(target.parent) >= need:
            break
        if _remove(path):
            removed.append(path)
    return tuple(removed)


def _surplus(target: Path, keep: int, removes: Callable[[Path], bool]) -> list[Path]:
    """The checkpoints of the target's family that `keep` leaves no place for, the newest of them first."""
    pattern = re.compile(r"\d+".join(re.escape(part) for part in re.split(r"\d+", target.name)), re.ASCII)
    family = [item.path for item in listing(target.parent) if pattern.fullmatch(item.path.name)]
    others = [path for path in family if path.name != target.name and not path.is_symlink() and removes(path)]
    return others[max(0, keep - 1) :]


def _remove(path: Path) -> bool:
    try:
        locks.check_target(path)  # something else was put inside: leave it to its owner
        aside = locks.set_aside(path)
    except (OSError, CheckpointError):
        return False
    shutil.rmtree(aside, ignore_errors=True)
    return True


def _size(path: Path) -> int:
    """Bytes that a checkpoint takes on the disk."""
    with suppress(OSError):
        return sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(path))
    return 0


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
        if locks.REMOVING.fullmatch(name):
            removed.append(root / name)
        elif match := locks.HOLDER.fullmatch(name):
            try:
                with locks.gate(root) as held:
                    if (root / name).is_dir() and (aside := locks.settle(root / match.group(1), held)):
                        removed.append(aside)
            except (OSError, CheckpointError):
                continue  # alive, or another process settled it first
    for path in removed:
        shutil.rmtree(path, ignore_errors=True)
    return removed
