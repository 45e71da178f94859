"""Small agreements beside training: a thread may make them while the transport is busy with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from zeroshard.errors import RankError

from .connect import _own_store
from .rendezvous import Rendezvous

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_TIMEOUT = 1800.0  # seconds: a rank may be writing all of its rows meanwhile


class StoreExchange:
    """Values from every rank to every rank over the group's store, and over nothing that training uses.

    All ranks make it, and make their exchanges, in the same order; one thread at a time.
    """

    def __init__(self, store: Store, rank: int, size: int, cause: Callable[[], str | None]) -> None:
        self.rank, self.size = rank, size
        self._meeting = Rendezvous(store, rank, size, _TIMEOUT, cause=cause)
        self._turn = 0

    @classmethod
    def over(cls, group: dist.ProcessGroup | None, cause: Callable[[], str | None]) -> StoreExchange:
        """Between the ranks of `group` (default: all); `cause` says why a peer failed, if one has."""
        return cls(_own_store(group), dist.get_rank(group), dist.get_world_size(group), cause)

    def exchange(self, value: Any, what: str) -> list[Any]:
        """Everyone's JSON value in rank order."""
        self._turn += 1
        told: list[Any] = self._meeting.share(f"checkpoint/{self._turn}", [what, value])
        moments = [moment for moment, _ in told]
        if len(set(moments)) > 1:
            listed = "; ".join(f"rank {rank}: {moment}" for rank, moment in enumerate(moments))
            raise RankError(
                f"ranks are at different points of saving and loading ({listed}). "
                "Every rank must make the same calls of run.save() and run.load(), with the same paths."
            )
        # All ranks have come to this turn, so all have read what was told in the last.
        self._meeting.store.delete_key(f"checkpoint/{self._turn - 1}/{self.rank}")
        return [answer for _, answer in told]
