"""One bit a value: its sign, times the mean magnitude of its block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from zeroshard.policy import Numerics

from .base import Codec, check_freeze, check_steps, check_warmup
from .blocks import NAN, Blocked, Run, mean_scale, pack, unpack, wide


@dataclass(frozen=True)
class OneBit(Blocked):
    """Signs, and the mean magnitude of every `block`: 30.1 × fewer bytes than fp32. Numerics: approximate.

    What was not sent is kept and sent later (error feedback; 4 bytes a parameter of state). The first
    `warmup_steps` steps travel as they are, or through the codec `warmup`, e.g. ``Int4()``: signs serve once
    the optimizer's second moments have settled. `feedback` is to be turned off for changes of parameters
    only: ``gather=Delta(OneBit(feedback=False, warmup_steps=0))``.

    `freeze`: Adam's second moments stay as the warm-up leaves them (as in 1-bit Adam). Without it they follow
    what arrives, which says the same size of all values of a block. For Adam and AdamW; 4 more bytes a
    parameter, divided as the optimizer's state is.

    >>> codec = OneBit(warmup_steps=10)
    >>> codec.active(9), codec.active(10)
    (False, True)
    >>> codec.round_trip(torch.tensor([1.0, -0.5, 0.25, 0.25]))
    tensor([ 0.5000, -0.5000,  0.5000,  0.5000])
    """

    warmup_steps: int = 100
    freeze: bool = False
    warmup: Codec | None = None
    feedback: bool = True
    numerics: ClassVar[Numerics] = "approximate"
    bits: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_steps("OneBit", self.warmup_steps)
        check_freeze("OneBit", self.freeze, self.warmup_steps)
        check_warmup("OneBit", self, self.warmup, self.warmup_steps)

    @property
    def freezes(self) -> bool:
        return self.freeze

    def active(self, step: int) -> bool:
        return step >= self.warmup_steps

    @property
    def early(self) -> tuple[Codec, ...]:
        return () if self.warmup is None else (self.warmup,)

    def at(self, step: int) -> Codec | None:
        return self if self.active(step) else self.warmup

    def _encode_run(self, run: Run, values: Tensor, salt: int | None) -> Tensor:
        scale = mean_scale(values)
        run.scales.copy_(scale.view(-1))
        negative = (values.view(torch.int32) < 0) & (scale != NAN)
        pack(negative.to(torch.uint8), run.packed, 1)
        return values - _signed(negative, scale)

    def _decode_run(self, run: Run) -> Tensor:
        negative = unpack(run.packed, 1, run.shape[1]).to(torch.bool)
        return _signed(negative, run.scales.view(-1, 1))


def _signed(negative: Tensor, scale: Tensor) -> Tensor:
    """Minus the scale where `negative`, else the scale."""
    size = wide(scale)
    return torch.where(negative, -size, size)
