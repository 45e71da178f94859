"""JSON from a file that may be hostile: bounded in bytes, in containers and in depth, and strict about what
numbers are."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from zeroshard.errors import CheckpointError

# An empty object costs 64 bytes of memory for 3 of text: this is what bounds the memory.
MOST_CONTAINERS = 4_000_000


def parse(raw: bytes, where: str) -> Any:
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


def dump(data: Any) -> str:
    """Compact text; refuses what JSON has no word for (values mark those before they come here)."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")
