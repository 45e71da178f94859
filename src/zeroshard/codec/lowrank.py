"""Matrices as products of two thin ones (PowerSGD)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from zeroshard.errors import OptionError
from zeroshard.fields import check_fields
from zeroshard.policy import Numerics

from .base import Compression


@dataclass(frozen=True)
class LowRank(Compression):
    """A matrix (m, n) travels as P (m, rank) and Q (n, rank): one power iteration a step (PowerSGD).
    Numerics: approximate.

    Two plain means instead of one: `begin` gives P, `middle` takes its mean and gives Q, `end` takes that
    mean, and ``P Qᵀ`` (`expand`) is the gradient. What was not sent is kept and sent later (error feedback):
    a rank keeps what its own projection left over, so that the mean of the ranks' residuals and what was sent
    add up to the mean gradient. Tensors of more dimensions are matrices of shape[0] rows; those for which
    `suits` is false travel as they are. If P or Q is not finite, so is the gradient, on every rank, and
    residual and basis stay as they were.

    All tensors are flat fp32, rows first. State: ``residual`` of the matrix's size, ``basis`` of Q's.

    >>> codec, grad = LowRank(rank=1), torch.outer(torch.arange(3.0), torch.ones(4)).flatten()
    >>> state, (p, q) = codec.state((3, 4)), (torch.empty(size) for size in codec.factors((3, 4)))
    >>> codec.begin(grad, state, p)               # then p becomes its mean over the ranks
    >>> codec.middle(grad, p, state, q)           # and so does q
    >>> codec.end(q, state)
    >>> codec.expand(p, q, out := torch.empty(12))
    >>> out.view(3, 4)[:, 0].round(decimals=4).abs()
    tensor([0., 1., 2.])
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

    def suits(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape is a matrix that becomes smaller."""
        if len(shape) < 2 or 0 in shape:
            return False
        rows, columns = _matrix(shape)
        return self.rank < min(rows, columns) and self.rank * (rows + columns) < rows * columns

    def factors(self, shape: Sequence[int]) -> tuple[int, int]:
        """The elements of P and of Q: the values that travel."""
        rows, columns = _matrix(shape)
        return rows * self.rank, columns * self.rank

    def state(self, shape: Sequence[int], device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """The state of a matrix before the first step; the same basis on every rank."""
        generator = torch.Generator().manual_seed(self.rank)
        basis = torch.randn(self.factors(shape)[1], generator=generator).to(device)
        return {"residual": torch.zeros(math.prod(shape), device=device), "basis": basis}

    def state_bytes(self, shape: Sequence[int]) -> int:
        """The bytes of `state`, without making it."""
        return 4 * (math.prod(shape) + self.factors(shape)[1])

    def begin(self, values: Tensor, state: dict[str, Tensor], p: Tensor) -> None:
        """Add the residual to `values`, which must stay until `middle`, and write this rank's P."""
        values.add_(state["residual"])
        basis = self._thin(state["basis"])
        torch.mm(values.view(-1, len(basis)), basis, out=self._thin(p))

    def middle(self, values: Tensor, p: Tensor, state: dict[str, Tensor], q: Tensor) -> None:
        """Make the mean P orthonormal, in place; write this rank's Q; keep what it does not hold."""
        left, right = self._thin(p), self._thin(q)
        finite = left.isfinite().all()
        left.copy_(torch.linalg.qr(torch.where(finite, left, 0.0)).Q).masked_fill_(~finite, torch.nan)
        matrix = values.view(len(left), len(right))
        torch.mm(matrix.T, left, out=right)
        rest = torch.addmm(matrix, left, right.T, alpha=-1.0).view(-1)
        residual = state["residual"]
        torch.where(finite & right.isfinite().all(), rest, residual, out=residual)

    def end(self, q: Tensor, state: dict[str, Tensor]) -> None:
        """The mean Q is the next step's basis."""
        basis = state["basis"]
        torch.where(q.isfinite().all(), q, basis, out=basis)

    def expand(self, p: Tensor, q: Tensor, out: Tensor) -> None:
        """``P Qᵀ`` of some rows of P."""
        left, right = self._thin(p), self._thin(q)
        torch.mm(left, right.T, out=out.view(len(left), len(right)))

    def _thin(self, flat: Tensor) -> Tensor:
        return flat.view(-1, self.rank)


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    return shape[0], math.prod(shape[1:])
