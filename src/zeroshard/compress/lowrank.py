"""Matrices as products of two thin ones (PowerSGD)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from zeroshard.errors import OptionError
from zeroshard.field_checks import check_fields
from zeroshard.sync_policies import Numerics

from .base import MeanCodec


@dataclass(frozen=True)
class LowRank(MeanCodec):
    """A matrix (m, n) travels as P (m, rank) and Q (n, rank): one power iteration a step (PowerSGD).
    Numerics: approximate.

    Two exchanges: P is the matrix times the last step's Q; once its mean is orthonormal, Q is what the matrix
    has in its columns, and ``P Qᵀ`` is the gradient. What was not sent is kept and sent later (error
    feedback): a rank keeps what its own projection left over, so that the mean of the ranks' residuals and
    what was sent add up to the mean gradient. Tensors of more dimensions are matrices of shape[0] rows; those
    for which `suits` is false travel as they are. If P or Q is not finite, so is the gradient, on every rank,
    and residual and basis stay as they were.

    State: ``residual`` of the matrix's size, ``basis`` of Q's.

    >>> matrix = torch.outer(torch.arange(1.0, 4.0), torch.ones(4))
    >>> LowRank(rank=1).round_trip(matrix)[:, 0].round(decimals=4)
    tensor([1., 2., 3.])
    """

    rank: int = 4
    numerics: ClassVar[Numerics] = "approximate"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.rank < 1:
            raise OptionError(f"LowRank(rank={self.rank}): 1 or more is needed.")

    @property
    def feedback(self) -> bool:
        return True

    @property
    def draws(self) -> bool:
        return False

    def suits(self, shape: Sequence[int]) -> bool:
        return super().suits(shape) and self.rank < min(_matrix(shape))

    def lengths(self, shape: Sequence[int]) -> tuple[int, int]:
        """The elements of P and of Q."""
        rows, columns = _matrix(shape)
        return rows * self.rank, columns * self.rank

    def state(self, shape: Sequence[int], device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """The same basis on every rank."""
        generator = torch.Generator().manual_seed(self.rank)
        basis = torch.randn(self.lengths(shape)[1], generator=generator).to(device)
        return {"residual": torch.zeros(math.prod(shape), device=device), "basis": basis}

    def state_bytes(self, shape: Sequence[int]) -> int:
        return 4 * (math.prod(shape) + self.lengths(shape)[1])

    def send(self, number: int, matrix: Tensor, sent: Sequence[Tensor], state: dict[str, Tensor]) -> None:
        left = self._thin(sent[0])
        if number == 0:
            matrix.add_(state["residual"].view_as(matrix))
            torch.mm(matrix, self._thin(state["basis"]), out=left)
            return
        right, residual = self._thin(sent[1]), state["residual"]
        finite = left.isfinite().all()
        left.copy_(torch.linalg.qr(torch.where(finite, left, 0.0)).Q).masked_fill_(~finite, torch.nan)
        torch.mm(matrix.T, left, out=right)
        rest = torch.addmm(matrix, left, right.T, alpha=-1.0).view(-1)
        torch.where(finite & right.isfinite().all(), rest, residual, out=residual)

    def finish(self, sent: Sequence[Tensor], state: dict[str, Tensor]) -> None:
        """The mean Q is the next step's basis."""
        basis = state["basis"]
        torch.where(sent[1].isfinite().all(), sent[1], basis, out=basis)

    def expand(self, sent: Sequence[Tensor], start: int, stop: int, out: Tensor) -> None:
        torch.mm(self._thin(sent[0])[start:stop], self._thin(sent[1]).T, out=out)

    def _thin(self, flat: Tensor) -> Tensor:
        return flat.view(-1, self.rank)


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    return shape[0], math.prod(shape[1:])
