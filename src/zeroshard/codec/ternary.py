"""Three values of a block's size, five to a byte, and the few largest of the block apart.

The bytes of a block: its digits (0, 1: plus, 2: minus) in five planes, then the places of the large values,
largest first, and what these are in units of the size. Scales are those of [Note: layout of blocks].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from zeroshard.errors import OptionError
from zeroshard.native.codes import Blocks
from zeroshard.policy import Numerics

from .blocks import NAN, Blocked, Run, mean_scale, wide

# In units of the block's mean magnitude: what a value becomes, and from where on it does. Short, so that
# their product with a bf16 scale is exact.
SIZE, BORDER = 2.0, 1.0
_POWERS = (1, 3, 9, 27, 81)
_LEVELS = 127


@dataclass(frozen=True)
class Ternary(Blocked):
    """Minus, nothing or plus twice the mean magnitude of the `block`, and its `large` largest values as
    multiples of that: 16.5 × fewer bytes than fp32. Numerics: approximate.

    A gradient has few large values, and those must not wait, as they do where `TwoBit` cuts them off. No
    warm-up is needed. `block`: at most 256. `feedback`: what was not sent is kept and sent later (4 bytes a
    parameter of state); on unless you say otherwise.

    >>> Ternary(large=1).round_trip(torch.tensor([1.0, -1.0, 0.5, 8.0, -3.0, 2.5, 0.0, 0.0]))
    tensor([ 0.,  0.,  0.,  8., -4.,  4.,  0.,  0.])
    """

    block: int = 240
    large: int = 4
    feedback: bool = True
    numerics: ClassVar[Numerics] = "approximate"
    bits: ClassVar[int] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block > 256:
            raise OptionError(f"Ternary(block={self.block}): at most 256, so that a byte can say a place.")
        if not 0 <= self.large <= self.block:
            raise OptionError(f"Ternary(large={self.large}): a number from 0 to {self.block} is needed.")

    def _form(self, step: int = 0) -> Blocks:
        return Blocks(self.block, self.bits, large=self.large)

    def _encode_run(self, run: Run, values: Tensor, salt: int | None) -> Tensor:
        scale = mean_scale(values)
        run.scales.copy_(scale.view(-1))
        size, finite = wide(scale) * SIZE, scale != NAN
        big = (values.abs() > wide(scale) * BORDER) & finite
        digits = torch.where(big, 1 + (values < 0).to(torch.uint8), 0).to(torch.uint8)
        places = torch.where(finite, self._largest(values), 0)
        ratios = values.gather(1, places) / torch.where(size > 0, size, 1.0)
        levels = torch.where(finite, ratios.round().clamp(-_LEVELS, _LEVELS), 0.0).to(torch.int8)
        digits.scatter_(1, places, 0)
        width = -(-run.shape[1] // 5)
        filled = torch.nn.functional.pad(digits, (0, 5 * width - run.shape[1])).view(-1, 5, width)
        powers = torch.tensor(_POWERS, dtype=torch.int32, device=digits.device).view(1, 5, 1)
        run.packed[:, :width] = (filled * powers).sum(1).to(torch.uint8)
        run.packed[:, width : width + places.shape[1]] = places.to(torch.uint8)
        run.packed[:, width + places.shape[1] :] = levels.view(torch.uint8)
        return values - self._decode_run(run)

    def _largest(self, values: Tensor) -> Tensor:
        """Their places, a row for each block; of equals the first."""
        bits = values.abs().view(torch.int32).to(torch.int64)
        order = torch.arange(255, 255 - values.shape[1], -1, device=values.device)
        found: Tensor = ((bits << 8) + order).topk(min(self.large, values.shape[1]), 1).indices
        return found

    def _decode_run(self, run: Run) -> Tensor:
        count, width = min(self.large, run.shape[1]), -(-run.shape[1] // 5)
        packed = run.packed[:, :width].unsqueeze(1)
        powers = torch.tensor(_POWERS, dtype=torch.uint8, device=packed.device).view(1, 5, 1)
        digits = (packed // powers % 3).flatten(1)[:, : run.shape[1]]
        signs = (digits == 1).float() - (digits == 2).float()
        places, levels = run.packed[:, width : width + count], run.packed[:, width + count :]
        signs.scatter_(1, places.to(torch.int64), levels.contiguous().view(torch.int8).float())
        return signs * (wide(run.scales.view(-1, 1)) * SIZE)
