"""First contact over the store of `torch.distributed`: one JSON value from every rank to every rank."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from zeroshard.errors import RankError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_NAP = 0.002
_SPEAKS = 10.0  # seconds after which a wait says what it is for: ranks load and compile at different speeds


class Rendezvous:
    """Shares values by name. It asks the store instead of blocking in it, so a failed peer is noticed."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: float,
        ended: Callable[[int], str | None] = lambda rank: None,
        cause: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.cause = cause
        self._ended = ended

    def share(self, name: str, value: object) -> list[object]:
        """Every rank's value of this name, in rank order. A name is used once."""
        try:
            self.store.set(f"{name}/{self.rank}", json.dumps(value))
            return [self._fetch(name, rank) for rank in range(self.size)]
        except RuntimeError as error:
            if isinstance(error, RankError):
                raise
            raise RankError(
                f"rank {self.rank} lost the store while it waited for '{name}': {error}. "
                "The process that keeps the store, usually rank 0, has probably ended; its output says why."
            ) from error

    def _fetch(self, name: str, rank: int) -> object:
        key = f"{name}/{rank}"
        begun = time.monotonic()
        deadline, speaks = begun + self.timeout, begun + min(_SPEAKS, self.timeout / 2)
        nap = _NAP / 16
        while not self.store.check([key]):
            cause = self.cause()
            if cause is not None:
                raise RankError(cause)
            end = self._ended(rank)
            if end is not None and not self.store.check([key]):
                raise RankError(end)
            if time.monotonic() > deadline:
                raise RankError(
                    f"rank {rank} did not come to '{name}' within {self.timeout:.0f} s of rank {self.rank}. "
                    "Every rank must call `shard` in the same order; see whether that rank is still running."
                )
            if time.monotonic() > speaks:
                speaks = math.inf
                self._say(name, rank, time.monotonic() - begun)
            time.sleep(nap)
            nap = min(nap * 2, 10 * _NAP)
        return json.loads(self.store.get(key))

    def _say(self, name: str, rank: int, waited: float) -> None:
        """One line of a long wait, by the first of the ranks that have come."""
        if self.rank == min({0, 1} - {rank}):
            print(
                f"zeroshard: rank {self.rank} has waited {waited:.0f} s for rank {rank} to come to `shard` "
                f"('{name}')",
                file=sys.stderr,
                flush=True,
            )
