"""The global norm of a gradient that lies in rows on several ranks, and partly on the host, and clipping."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zeroshard.comm import Transport
from zeroshard.config import Options
from zeroshard.host.updates import HostUpdates
from zeroshard.life.shard import Faces, Param


class Clipping:
    """`clip_norm=` at work, once for each backward, whichever optimizer steps first.

    Gradients in fp16 are not written: small ones would be lost. They are multiplied when they are widened.
    """

    def __init__(self, options: Options, transport: Transport) -> None:
        self.limit = options.clip_norm
        self.norm = 0.0  # of the last gradient
        self.settled = True  # the last backward has been dealt with
        self._between = transport if options.shards_state and transport.size > 1 else None
        self._narrow = options.lands_in_fp16
        self._factor = 1.0

    @torch.no_grad()
    def settle(self, params: Sequence[Param], host: HostUpdates | None, loss_scale: float) -> float:
        """The global norm, what it clips, and whether the host's updates stand. Returns what gradients are
        still to be multiplied by: where they are fp16, and have the scale of the loss."""
        if self.limit is not None and not self.settled:
            self._factor = self._clip(self.limit, params, host, loss_scale)
            self.settled = True
        return self._factor / loss_scale if self._narrow else 1.0

    def _clip(
        self, limit: float, params: Sequence[Param], host: HostUpdates | None, loss_scale: float
    ) -> float:
        grads = [(p, Faces.local(p.home.grad)) for p in params if p.home.grad is not None]
        factor = 1.0
        if math.isfinite(limit):
            squares = host.squares() if host is not None else []
            self.norm = global_norm(grads, squares, self._between) / loss_scale
            factor = clip_scale(limit, self.norm)
        if host is not None:
            host.commit(self.norm, factor)
        if factor != 1.0 and grads and not self._narrow:
            torch._foreach_mul_([grad for _, grad in grads], factor)
        return factor


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
