"""This rank's own rows of a bucket's gradients, added to what the peers sent straight out of the gradients.

Nobody else reads them, so to copy them into the wire would be a pass over memory for nothing. The gradients
live on until the next bucket is filled: `let_go` then copies after all, if the sum is not made yet. Not only
until the sum is made: when that is depends on the peers, and memory would with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroshard.comm import Span, sum_spans
from zeroshard.count.layout import FlatPack, Pack
from zeroshard.count.wires import HELD_BYTES
from zeroshard.native import Moves


@dataclass(frozen=True)
class Share:
    """Elements of a slot that one rank owns: where they begin in its piece and in the gradient."""

    slot: int
    at: int
    first: int
    numel: int


def shares_of(pack: Pack, rank: int) -> list[Share]:
    """What `rank` owns of each slot; of flat packs, where its cut falls."""
    if not isinstance(pack, FlatPack):
        places = zip(pack.slots, pack.offsets(rank), strict=True)
        return [Share(i, at, s.rows(rank)[0] * s.row, s.held(rank)) for i, (s, at) in enumerate(places)]
    start, stop = pack.starts[rank], pack.starts[rank] + pack.pieces[rank]
    found = []
    for index, (slot, at) in enumerate(zip(pack.slots, pack.full_offsets, strict=True)):
        low, high = max(at, start), min(at + slot.numel, stop)
        if low < high:
            found.append(Share(index, low - start, low - at, high - low))
    return found


class HeldRows:
    """Of one bucket. `values`: its wire; `flags`: where that has the used flags."""

    def __init__(self, pack: Pack, rank: int, values: Tensor, flags: Sequence[Tensor]) -> None:
        self._values, self._rank = values, rank
        self._piece = values[pack.starts[rank] : pack.starts[rank] + pack.pieces[rank]]
        width = values.element_size()
        self._own = [
            share
            for share in shares_of(pack, rank)
            if share.numel * width >= HELD_BYTES and pack.slots[share.slot].split != "copy"
        ]
        stays = {share.slot for share in self._own}
        sent = [
            (share, values[pack.starts[r] + share.at :][: share.numel])
            for r in range(pack.world)
            for share in shares_of(pack, r)
            if share.numel and not (r == rank and share.slot in stays)
        ]
        self._to = [view for _, view in sent] + list(flags)
        self._of = [share.slot for share, _ in sent]
        self._ones = [torch.ones(flag.shape, dtype=values.dtype) for flag in flags]
        shifts = [share.first * width for share, _ in sent] + [0] * len(flags)
        self._moves = Moves(self._to, self._to, shifts=shifts, past=True)
        self._spans = list(_spans(self._own, pack.pieces[rank]))
        self._grads: list[Tensor] = []
        self._added = False

    def __bool__(self) -> bool:
        """Whether any rows are worth it."""
        return bool(self._own)

    def fits(self, grads: Sequence[Tensor]) -> bool:
        """Whether these lie as the wire has them."""
        return all(
            grad.dtype == self._values.dtype and grad.device.type == "cpu" and grad.is_contiguous()
            for grad in grads
        )

    def fill(self, grads: list[Tensor]) -> None:
        """Copy what goes to the peers, and keep the gradients."""
        self._grads, self._added = grads, False
        self._moves.run(self._to, [grads[index] for index in self._of] + self._ones, "source")

    def add(self, out: Tensor, pieces: Sequence[Tensor], scale: float) -> None:
        """`scale` times the sum of everybody's piece, in rank order."""
        grads, self._added = self._grads, True
        spans = [
            Span(start, numel)
            if share is None or not grads
            else Span(start, numel, grads[share.slot], share.first)
            for start, numel, share in self._spans
        ]
        sum_spans(out, pieces, scale, self._rank, spans)

    @torch.no_grad()
    def let_go(self) -> None:
        """Keep the gradients no longer; copy the own rows into the wire, if they have not been added yet."""
        grads, self._grads = self._grads, []
        for share in self._own if grads and not self._added else ():
            own = grads[share.slot].view(-1)[share.first : share.first + share.numel]
            self._piece[share.at : share.at + share.numel].copy_(own)


def _spans(own: Sequence[Share], length: int) -> list[tuple[int, int, Share | None]]:
    """A piece from end to end: shares that stay in their gradients, and what lies between them."""
    result: list[tuple[int, int, Share | None]] = []
    at = 0
    for share in own:
        if share.at > at:
            result.append((at, share.at - at, None))
        result.append((share.at, share.numel, share))
        at = share.at + share.numel
    return [*result, (at, length - at, None)] if at < length else result
