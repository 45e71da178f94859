"""What all coded buckets of a run share.

- `values`  fp32, the length of the longest wire: where a bucket's gradients are laid out to be encoded.
- `total`   fp32, the length of the longest piece: where sums are made that land in fewer bits. On a GPU the
  transport's stream uses it and nobody else, as the caller's uses `values`.
- `code`    uint8: codes on their way to a wire that is not on the device; else nothing.

[Note: what is measured] Every `EVERY`th turn a bucket decodes its own piece and compares it with the
gradient: |sent - gradient|² and |gradient|² are added up on the device and read when somebody asks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeroshard.codec import Cast, Codec, Compression, Int4, Int8, Rows
from zeroshard.tier.pool import Ledger

from ..guard import Guarded
from ..private import Private

EVERY = 16


class Desk(Guarded):
    """See the module's docstring. `turns` counts reduced backward passes; codecs warm up and draw by it."""

    def __init__(
        self,
        device: torch.device,
        codecs: set[Compression],
        sizes: tuple[int, int, int],
        ledger: Ledger,
    ) -> None:
        self.device, self._label = device, ", ".join(sorted(map(repr, codecs)))
        self._remembers = any(_remembers(codec) for codec in codecs)
        values, total, code = sizes
        self.values = torch.zeros(values, device=device)
        self.total = torch.zeros(total, device=device)
        self.code = torch.zeros(code, dtype=torch.uint8, device=device)
        self.turns = torch.zeros(1, dtype=torch.int64)
        self._errors: dict[str, Tensor] = {}
        ledger.book("buckets", self.values.nbytes + self.total.nbytes + self.code.nbytes)

    @property
    def turn(self) -> int:
        return int(self.turns)

    def over(self) -> None:
        """A reduced backward pass has ended."""
        self.before_change()
        self.turns += 1

    def seed(self, bucket: int, source: int, target: int) -> int:
        """A number that differs from turn to turn, and within one from piece to piece."""
        return (self.turn * 1_000_003 + bucket * 65_537 + source * 257 + target) % 2**31

    def private(self) -> list[Private]:
        """Where codecs warm up, draw or keep something: from which turn they go on."""
        if not self._remembers:
            return []
        return [Private(f"({self._label})", "turns", ((0, self.turns),), "same", self)]

    # ------------------------------------------------------------------ see [Note: what is measured]

    @property
    def measures(self) -> bool:
        return self.turn % EVERY == 0

    def compare(self, codec: Codec, values: Tensor, code: Tensor) -> None:
        """Add what a code loses to the count of its codec."""
        if values.numel() == 0:
            return
        sent = torch.empty_like(values)
        codec.decode(code, sent, add=False)
        lost = torch.stack([(sent - values).square().sum(), values.square().sum()]).double()
        lost = torch.where(lost.isfinite().all(), lost, 0.0)
        known = self._errors.get(repr(codec))
        self._errors[repr(codec)] = lost if known is None else known + lost

    def errors(self) -> dict[str, float]:
        """By codec: the norm of what was lost over the norm of the gradient."""
        sums = {name: pair.tolist() for name, pair in self._errors.items()}
        return {name: (lost / whole) ** 0.5 if whole else 0.0 for name, (lost, whole) in sums.items()}


def _remembers(codec: Compression) -> bool:
    """Whether a code depends on more than the values. Of a codec of the user's own one cannot know."""
    plain = isinstance(codec, (Cast, Int4, Int8, Rows))
    return not plain or codec.feedback or getattr(codec, "stochastic", False)
