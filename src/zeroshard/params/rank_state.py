"""State that differs by rank although it is about the same tensor, such as what a codec has not sent yet.

Unlike rows of a parameter it cannot be cut anew when the number of ranks changes. Whoever has such state
gives `RankState` records of it; checkpoints do the rest, see `snapshot.private_held` and `resume`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from zeroshard.layout.sharding import FlatPackLayout, PackLayout

from .sharded_param import GuardedState

# What a rank gets when another number of ranks loads it:
# - mean   of all ranks that saved. What the ranks have left unsent, taken over all of them, stays the same;
# - same   it was the same on every rank (a shared basis), so it is saved once and every rank gets it;
# - reset  zeros.
Join = Literal["mean", "same", "reset"]


@dataclass(frozen=True)
class RankState:
    """One tensor, flat. `spans` are (first element, flat view of the memory in use), in order and without
    holes; a load writes into them. `name` (of a parameter) and `key` must say the same at any stage, number
    of ranks and bucket size. `owner`: who changes it."""

    name: str
    key: str
    spans: tuple[tuple[int, Tensor], ...]
    join: Join = "mean"
    owner: GuardedState | None = None

    @property
    def numel(self) -> int:
        return sum(view.numel() for _, view in self.spans)

    @property
    def dtype(self) -> torch.dtype:
        return self.spans[0][1].dtype

    def cut(self, first: int, last: int) -> list[tuple[int, Tensor]]:
        """The spans of elements [first, last): how far from `first` each begins, and its memory."""
        found = []
        for at, view in self.spans:
            low, high = max(first, at), min(last, at + view.numel())
            if low < high:
                found.append((low - first, view[low - at : high - at]))
        return found

    def read(self, first: int, last: int) -> Tensor:
        parts = [view for _, view in self.cut(first, last)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @torch.no_grad()
    def write(self, first: int, values: Tensor, share: float | None = None) -> None:
        """Store `values` from element `first` on; with a `share`, add that share of them."""
        for at, view in self.cut(first, first + values.numel()):
            given = values[at : at + view.numel()].to(view.device)
            view.copy_(given) if share is None else view.add_(given.to(view.dtype), alpha=share)

    @torch.no_grad()
    def reset(self) -> None:
        for _, view in self.spans:
            view.zero_()


def in_wire(
    pack: PackLayout, flat: Tensor, key: str, join: Join = "mean", owner: GuardedState | None = None
) -> list[RankState]:
    """Records of a tensor laid out as a wire: the shards of all ranks, this rank's contribution to each."""
    if isinstance(pack, FlatPackLayout):
        places = zip(pack.slots, pack.full_offsets, strict=True)
        return [
            RankState(s.name, key, ((0, flat[at : at + s.numel]),), join, owner)
            for s, at in places
            if s.numel
        ]
    found = []
    offsets = [pack.offsets(rank) for rank in range(pack.world)]
    for index, slot in enumerate(pack.slots):
        spans = []
        for rank, start in enumerate(pack.starts):
            at = start + offsets[rank][index]
            spans.append((slot.rows(rank)[0] * slot.row, flat[at : at + slot.held(rank)]))
        if slot.split == "copy" and pack.world > 1:  # a copy in every shard, each with its own past
            found += [
                RankState(f"{slot.name}#{r}", key, (span,), join, owner) for r, span in enumerate(spans)
            ]
        else:
            found.append(RankState(slot.name, key, tuple(s for s in spans if s[1].numel()), join, owner))
    return [private for private in found if private.spans and private.numel]
