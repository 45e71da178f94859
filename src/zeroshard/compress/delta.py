"""What has changed since the last time, in place of the values themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from zeroshard.errors import OptionError
from zeroshard.sync_policies import Numerics

from .base import Codec
from .quantized import Int4


@dataclass(frozen=True)
class Delta(Codec):
    """For `gather=`: what has changed in the parameters since the last time, through `codec`.
    Numerics: approximate.

    All ranks keep what they believe the parameters to be (4 bytes a parameter on every rank, also at stage
    3), and add what arrives to it. A change is small, so that four bits say much more of it than of the
    weight itself, and what they lose is in the next change: errors do not add up. Rows travel once a step,
    however often a unit is gathered. The first time they go as they are.

    >>> Delta().wire_bytes(1024) == Int4(block=32, feedback=False).wire_bytes(1024)
    True
    """

    codec: Codec = Int4(block=32, feedback=False)  # noqa: RUF009 (frozen)
    numerics: ClassVar[Numerics] = "approximate"

    def __post_init__(self) -> None:
        fits = isinstance(self.codec, Codec) and not isinstance(self.codec, Delta)
        if not fits or self.codec.state_names or not self.codec.active(0):
            raise OptionError(
                f"Delta({self.codec!r}): a codec is needed that keeps nothing and does not warm up, because "
                "what it loses is in the next change. Pass zs.Int4(feedback=False), "
                "zs.TwoBit(feedback=False), zs.Int8() or zs.Cast(...)."
            )

    @property
    def draws(self) -> bool:
        return self.codec.draws

    def wire_bytes(self, numel: int) -> int:
        return self.codec.wire_bytes(numel)

    def encode(self, values: Tensor, code: Tensor, state: dict[str, Tensor], step: int) -> None:
        self.codec.encode(values, code, state, step)

    def decode(self, code: Tensor, out: Tensor, add: bool) -> None:
        self.codec.decode(code, out, add)
