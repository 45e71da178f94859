"""Memory and counts that all buckets with codecs share.

- `values`  fp32, the length of the longest wire: where a bucket's gradients are laid out to be encoded.
- `total`   fp32, the length of the longest shard: where sums are made that land in fewer bits. On a GPU the
  transport's stream uses it and nobody else, as the caller's uses `values`.
- `code`    uint8: codes on their way to a wire that is not on the device; else nothing.

[Note: what is measured] Every `EVERY`th turn a bucket decodes its own shard and compares it with the
gradient: |sent - gradient|² and |gradient|² are added up on the device and read when somebody asks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeroshard.compress import Codec
from zeroshard.compress.base import Compression
from zeroshard.params.rank_state import RankState
from zeroshard.params.sharded_param import GuardedState
from zeroshard.tiers.ledger import MemoryLedger

EVERY = 16


class CodecWorkspace(GuardedState):
    """What all coded buckets of a run share. `turns` counts reduced backward passes; codecs warm up and draw
    by it."""

    def __init__(
        self,
        device: torch.device,
        codecs: set[Compression],
        sizes: tuple[int, int, int],
        ledger: MemoryLedger,
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
        """A number that differs from turn to turn, and within one from shard to shard."""
        return (self.turn * 1_000_003 + bucket * 65_537 + source * 257 + target) % 2**31

    def private(self) -> list[RankState]:
        """Returns the number of turns so far, for checkpoints: codecs that warm up, draw or keep something go
        on from there."""
        if not self._remembers:
            return []
        return [RankState(f"({self._label})", "turns", ((0, self.turns),), "same", self)]

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
    """Whether what is sent depends on the steps before, or on their number."""
    warms_up = isinstance(codec, Codec) and codec.at(0) is not codec
    return codec.draws or codec.feedback or warms_up
