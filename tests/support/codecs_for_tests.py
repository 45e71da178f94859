"""Codecs for tests: one that loses nothing, so that a run with it must have the bits of a run without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from zeroshard.compress import Codec
from zeroshard.sync_policies import Numerics


@dataclass(frozen=True)
class Same(Codec):
    """The values themselves, after `warmup` steps; twice as many bytes before, none of which count."""

    warmup: int = 0
    numerics: ClassVar[Numerics] = "exact"

    def active(self, step: int) -> bool:
        return step >= self.warmup

    def wire_bytes(self, numel: int) -> int:
        return 4 * numel

    def encode(self, values: Tensor, code: Tensor, state: dict[str, Tensor], step: int) -> None:
        code.view(torch.float32).copy_(values)

    def decode(self, code: Tensor, out: Tensor, add: bool) -> None:
        values = code.view(torch.float32)
        out.add_(values) if add else out.copy_(values)


@dataclass(frozen=True)
class Halves(Codec):
    """Sends half of what is due and one more, and keeps the other half: it makes something of zeros."""

    numerics: ClassVar[Numerics] = "approximate"

    @property
    def feedback(self) -> bool:
        return True

    def wire_bytes(self, numel: int) -> int:
        return 4 * numel

    def encode(self, values: Tensor, code: Tensor, state: dict[str, Tensor], step: int) -> None:
        due = values + state["residual"] + 1.0
        code.view(torch.float32).copy_(due / 2)
        state["residual"].copy_(due / 2)

    def decode(self, code: Tensor, out: Tensor, add: bool) -> None:
        values = code.view(torch.float32)
        out.add_(values) if add else out.copy_(values)
