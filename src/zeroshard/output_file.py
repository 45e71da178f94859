"""Files that a person asked for by name: written whole or not at all, and over nothing that exists, unless
that was asked for. No torch."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path


def write_file(path: str | Path, text: str, overwrite: bool = False) -> None:
    """Make `path` a file with this text, which appears there when it is complete. Raises `FileExistsError`
    where something else is there and is not to be overwritten; several ranks may write the same."""
    target, data = Path(path), text.encode()
    if not overwrite and (target.is_dir() or not _free_for(target, data)):
        raise FileExistsError(f"{target} exists")
    if target.exists() and not target.is_file():  # /dev/stdout and pipes
        target.write_bytes(data)
        return
    draft = target.parent / f".{target.name}.{secrets.token_hex(8)}"
    try:
        draft.write_bytes(data)
        if overwrite:
            os.replace(draft, target)
        else:
            _name(draft, target, data)
    finally:
        with suppress(OSError):
            draft.unlink()


def _name(draft: Path, target: Path, data: bytes) -> None:
    """The draft's name becomes `target`, unless another process was quicker."""
    try:
        os.link(draft, target)
    except FileExistsError:
        if not _free_for(target, data):
            raise
    except OSError:  # a file system without links
        os.replace(draft, target)


def _free_for(target: Path, data: bytes) -> bool:
    """Whether nothing would be lost: nothing is there, or the same, or what keeps nothing (a pipe)."""
    if not os.path.lexists(target) or (target.exists() and not target.is_file()):
        return True
    return target.is_file() and target.stat().st_size == len(data) and target.read_bytes() == data
