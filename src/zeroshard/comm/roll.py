"""Which ranks of a job have ended, told through the store.

A rank that waits for the others to come to `shard` has no transport to them yet, and a rank that has ended
never comes: its script was shorter, or failed. Every rank that has once been in a `shard` says here how it
ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import failure

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Roll"]


class Roll:
    """This rank's entry, written as the process ends, and its view of the others'."""

    def __init__(self, store: Store, rank: int) -> None:
        self.rank = rank
        self._store = store
        self._told = False
        failure.listen(self)

    def report(self, text: str) -> None:
        """How this rank ends. The first word stays."""
        if self._told:
            return
        self._told = True
        try:
            self._store.set(f"ended/{self.rank}", text)
        except RuntimeError:  # the process that kept the store has ended before
            return

    def cause(self) -> str | None:
        return None

    def close(self) -> None:
        self.report(
            f"rank {self.rank} has ended, and others wait for it in `shard`. Every rank must call `shard` as "
            "often as the others; check branches and early exits that depend on the rank."
        )

    def ended(self, rank: int) -> str | None:
        """How a rank ended, if it has."""
        key = f"ended/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else None
