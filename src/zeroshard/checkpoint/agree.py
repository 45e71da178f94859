"""Doing a part of the work on every rank and learning how it went everywhere: a rank that raises alone is a
hang elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zeroshard.errors import CheckpointError

from .records import Peers
from .wording import os_error


class AgreedError(CheckpointError):
    """A failure that every rank knows of and raises with the same text."""


def together(peers: Peers, what: str, work: Callable[[], Any]) -> list[Any]:
    """Run `work` here and return every rank's result (JSON data); raise `AgreedError` on all ranks when one
    failed."""
    value: Any = None
    error: str | None = None
    cause: Exception | None = None
    try:
        value = work()
    except OSError as caught:
        cause, error = caught, str(os_error(caught, what, caught.filename or ""))
    except CheckpointError as caught:
        cause, error = caught, str(caught)
    except Exception as caught:  # a bug or a device error: the others must not wait for this rank
        cause, error = caught, f"{what} failed with {type(caught).__name__}: {caught}"
    answers = peers.exchange({"value": value, "error": error}, what)
    failed = [(rank, answer["error"]) for rank, answer in enumerate(answers) if answer["error"] is not None]
    if failed:
        raise AgreedError(_text(failed, peers.size)) from cause
    return [answer["value"] for answer in answers]


def _text(failed: list[tuple[int, str]], world: int) -> str:
    texts = {text for _, text in failed}
    if world == 1 or (len(texts) == 1 and len(failed) == world):
        return failed[0][1]
    also = f" ({len(failed) - 1} more of {world} ranks failed too)" if len(failed) > 1 else ""
    return f"rank {failed[0][0]}: {failed[0][1]}{also}"


def on_first(peers: Peers, what: str, work: Callable[[], Any]) -> Any:
    """Run `work` on rank 0 and give every rank its result."""
    return together(peers, what, work if peers.rank == 0 else lambda: None)[0]
