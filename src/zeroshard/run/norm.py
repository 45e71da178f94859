"""The global norm of a gradient that lies in rows on several ranks, and partly on the host."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zeroshard.comm import Transport
from zeroshard.life.shard import Param


def clip_scale(limit: float, norm: float) -> float:
    """What clipping multiplies gradients by, as torch's `clip_grad_norm_` does: a NaN stays one, so that it
    spoils the weights instead of passing for a small norm."""
    scale = limit / (norm + 1e-6)
    return 1.0 if scale > 1.0 else scale


def global_norm(
    grads: list[tuple[Param, Tensor]], squares: list[Tensor], transport: Transport | None
) -> float:
    """Every row is counted once: by its owner, or where all ranks hold it, by rank 0.

    `squares` are sums of squares that others have counted. No `transport`: this rank holds everything.
    """
    mine = [g for p, g in grads if transport is None or p.slot.split != "copy" or transport.rank == 0]
    parts = [_square(g) for g in mine if g.numel()] + squares
    total = float(torch.stack([s.to(parts[0].device, torch.float64) for s in parts]).sum()) if parts else 0.0
    return math.sqrt(total if transport is None else transport.sum([total], "the norm of the gradients")[0])


def _square(grad: Tensor) -> Tensor:
    """The square of its norm, in fp32 or more."""
    real = torch.view_as_real(grad) if grad.is_complex() else grad
    norm: Tensor = torch.linalg.vector_norm(real, dtype=torch.promote_types(real.dtype, torch.float32))
    return norm.square()
