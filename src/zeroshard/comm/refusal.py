"""A call that one rank refuses is refused on all: a rank that raises alone is a hang elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zeroshard.errors import RankError


def told_of(error: Exception | None) -> list[str] | None:
    """What a rank tells the others of how a part of a call went: nothing, or the kind and text of its
    error."""
    return None if error is None else [type(error).__name__, str(error)]


def raise_together(what: str, told: Sequence[Any], mine: Exception | None) -> None:
    """Raise where any rank was refused; `told` is what each of them told, in rank order.

    Where all made the same mistake, each raises its own error. Otherwise all raise a `RankError` with one
    text, the first of those ranks' cause.
    """
    refused = [rank for rank, one in enumerate(told) if one is not None]
    if not refused:
        return
    if mine is not None and len(refused) == len(told) and len({kind for kind, _ in told}) == 1:
        raise mine
    kind, text = told[refused[0]]
    more = f" and of {len(refused) - 1} more" if len(refused) > 1 else ""
    raise RankError(
        f"{what} is refused on all {len(told)} ranks because of rank {refused[0]}{more} (check code and "
        f"files that depend on the rank): {kind}: {text}"
    ) from mine
