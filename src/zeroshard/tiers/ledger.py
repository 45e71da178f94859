"""Counts how many bytes exist for what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from zeroshard.errors import PlanError
from zeroshard.sizes import show_apart, show_bytes

Kind = Literal["parameters", "gradients", "state", "gathered", "buckets", "host", "staging", "disk"]
KINDS: tuple[Kind, ...] = (
    "parameters",
    "gradients",
    "state",
    "gathered",
    "buckets",
    "host",
    "staging",
    "disk",
)


class MemoryLedger:
    """Live and peak bytes by kind. Whoever makes a lasting tensor books it here."""

    def __init__(self) -> None:
        self.live: dict[str, int] = dict.fromkeys(KINDS, 0)
        self.peak: dict[str, int] = dict.fromkeys(KINDS, 0)
        self._caps: list[tuple[tuple[str, ...], int, str, int]] = []

    def cap(self, kinds: Sequence[str], most: int, what: str, aside: int = 0) -> None:
        """These kinds together may not take more than so many bytes: a plan's limit, named `what`. `aside`:
        bytes of them that do not pass this ledger, or are still to come."""
        self._caps.append((tuple(kinds), most, what, aside))

    def book(self, kind: Kind, nbytes: int) -> None:
        for kinds, most, what, aside in self._caps:
            after = sum(self.live[k] for k in kinds) + aside + nbytes
            if kind in kinds and nbytes > 0 and after > most:
                would, has = show_apart(after, most)
                raise PlanError(
                    f"{show_bytes(nbytes)} more of {kind} would make {would}, and {what} is {has}. "
                    "Nothing was allocated for them."
                )
        self.live[kind] += nbytes
        self.peak[kind] = max(self.peak[kind], self.live[kind])

    def forget_peak(self) -> None:
        """The most from now on."""
        self.peak = dict(self.live)
