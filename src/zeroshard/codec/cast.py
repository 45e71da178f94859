"""Sixteen bits a value, rounded to nearest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from zeroshard.fields import check_fields
from zeroshard.native import accumulate, cast
from zeroshard.native.codes import spread
from zeroshard.policy import Numerics

from . import gpu
from .base import Codec, check, padded

Half = Literal["bfloat16", "float16"]


@dataclass(frozen=True)
class Cast(Codec):
    """bf16 or fp16: 2 × fewer bytes. Numerics: rounding.

    Off by at most 2⁻⁸ of a value in bf16, 2⁻¹¹ in fp16 within its range; fp16 overflows to infinity from
    65,520 and has steps of 6e-8 near zero, so it is for gradients that a loss scale keeps in range.

    >>> Cast("bfloat16").round_trip(torch.tensor([1.0, 1.001, 3.14159]))
    tensor([1.0000, 1.0000, 3.1406])
    """

    dtype: Half = "bfloat16"
    numerics: ClassVar[Numerics] = "rounding"

    def __post_init__(self) -> None:
        check_fields(self)

    def wire_bytes(self, numel: int) -> int:
        return padded(2 * numel)

    def encode(self, values: Tensor, code: Tensor, state: dict[str, Tensor], step: int) -> None:
        check(self, values, code)
        code[2 * values.numel() :].zero_()
        halves = self._halves(code, values.numel())
        if values.device.type == "cpu":
            spread(values.numel(), 1, lambda start, stop: cast(halves[start:stop], values[start:stop]))
        else:
            halves.copy_(values)

    def decode(self, code: Tensor, out: Tensor, add: bool) -> None:
        check(self, out, code, "out")
        halves = self._halves(code, out.numel())
        if out.device.type == "cpu":
            land = accumulate if add else cast
            spread(out.numel(), 1, lambda start, stop: land(out[start:stop], halves[start:stop]))
        elif out.device.type != "cuda" or not gpu.widen(halves, out, add):
            out.add_(halves) if add else out.copy_(halves)

    def _halves(self, code: Tensor, numel: int) -> Tensor:
        return code[: 2 * numel].view(getattr(torch, self.dtype))
