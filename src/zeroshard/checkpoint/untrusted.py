"""Reads JSON from files that may be hostile, and quotes names from them in errors.

JSON is bounded in bytes, in containers and in depth, and strict about what numbers are. Names may carry
control characters or be a megabyte long; messages may not."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from zeroshard.errors import CheckpointError

_LONGEST = 160


def quoted(name: str) -> str:
    """A name from outside, safe to print on a terminal."""
    short = name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"
    return f"`{short}`" if short.isprintable() else ascii(short)


def some(items: Iterable[str], limit: int = 3) -> str:
    """The first few of a list and how many more there are.

    >>> some(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    listed = list(items)
    more = len(listed) - limit
    return ", ".join(listed) if more <= 0 else ", ".join(listed[:limit]) + f" and {more} more"


_REASONS = {
    errno.ENOSPC: "the disk is full. Free space or save elsewhere",
    errno.EDQUOT: "the quota is used up. Free space or save elsewhere",
    errno.EFBIG: "the file would be larger than this process may write (ulimit -f)",
    errno.EROFS: "the file system is read-only. Save elsewhere",
    errno.EACCES: "this user may not write or read there. Change its permissions or go elsewhere",
    errno.EPERM: "this user may not write or read there. Change its permissions or go elsewhere",
    errno.ENOENT: "it is not there; if it was a moment ago, something removed it",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.ELOOP: "it is a link, and files of a checkpoint must not be links",
    errno.ENAMETOOLONG: "the name is too long for the file system",
    errno.EIO: "the device reports an input/output error",
}


def os_error(error: OSError, doing: str, path: Path | str) -> CheckpointError:
    """An `OSError` as ours: what was being done, where, and what the system's reason means here."""
    reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
    return CheckpointError(f"{doing} {path} failed: {reason}.")


# An empty object costs 64 bytes of memory for 3 of text: this is what bounds the memory.
MOST_CONTAINERS = 4_000_000


def parse(raw: bytes | bytearray, where: str) -> Any:
    """The data in `raw`, or `CheckpointError` naming `where`."""
    if raw.count(b"{") + raw.count(b"[") > MOST_CONTAINERS:
        raise CheckpointError(
            f"{where} holds more than {MOST_CONTAINERS} lists and objects; none of ours does."
        )
    try:
        return json.loads(raw.decode("utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(
            f"{where} is not valid JSON ({reason}): damaged, or not what its name says."
        ) from None


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")
