"""Stage 0, a step behind: gradients whose sums every rank gets back while it computes.

- `back`    bytes, a transport region: this rank's reduced piece (`landed`), dealt to everybody.
- `coming`  as `whole`: the gradient under way. What is shown stays until it is complete.

[Note: both ways] The owner of a piece deals its sum on as soon as somebody looks and all contributions are
there, at any moment of the step. Ranks may look in different orders. Over a transport that keeps one order
the second way is queued behind the first one at once: it needs no look, and no rank can differ.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zeroshard.comm import Work
from zeroshard.tier.pool import Ledger

from .plain import Bucket


class WholeBucket(Bucket):
    """See the module's docstring."""

    coming: Tensor

    @property
    def _shows_wire(self) -> bool:
        return False

    def _make_whole(self, in_place: bool, ledger: Ledger) -> None:
        pack, transport = self.pack, self.transport
        piece = pack.pieces[transport.rank] * self.dtype.itemsize
        self._back = transport.allocate(f"{self.wire.key} {self.index} back", piece, torch.uint8)
        self.landed = self._back.mine.view(self.dtype)
        self.whole = torch.zeros(pack.wire, dtype=self.dtype, device=self.device)
        self.coming = torch.zeros_like(self.whole)
        self.grads = self.views_in(self.whole)
        ledger.book("gradients", self.whole.nbytes + self.coming.nbytes)
        ledger.book("buckets", self._back.mine.nbytes)

    def reduce(self) -> Work:
        """There and back; see [Note: both ways]."""
        self.transport.fill(self._back)
        return _BothWays(super().reduce(), self._deal_on, self.transport.keeps_order)

    def _deal_on(self) -> Work:
        width, rank, world = self.dtype.itemsize, self.transport.rank, self.pack.world
        lengths = [numel * width for numel in self.pack.pieces]
        offers, takes = [(0, lengths[rank])] * world, [(0, length) for length in lengths]
        return self.transport.deal("reduce", self._back.key, self._back, offers, takes, self._spread)

    def _spread(self, parts: list[Tensor]) -> None:
        for start, part in zip(self.pack.starts, parts, strict=True):
            values = part.view(self.dtype)
            self.coming[start : start + values.numel()].copy_(values)


class _BothWays:
    """A second operation behind a first."""

    def __init__(self, first: Work, then: Callable[[], Work], at_once: bool) -> None:
        self._first, self._then = first, then
        self._second = then() if at_once else None

    def poll(self) -> bool:
        if self._second is None:
            if not self._first.poll():
                return False
            self._second = self._then()
        return self._second.poll()

    def wait(self) -> None:
        if self._second is None:
            self._first.wait()
            self._second = self._then()
        self._second.wait()
