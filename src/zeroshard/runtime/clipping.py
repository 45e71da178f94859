"""Measures the global norm, clips by it, and works with `torch.amp.GradScaler`.

A gradient lies in rows on several ranks, and partly on the host.

A scaler leaves what it has found with optimizers that say they unscale by themselves, as torch's fused ones
do: `found_inf`, and `grad_scale` where `scaler.unscale_()` has not been called.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp import grad_scaler

from zeroshard.comm import Transport
from zeroshard.errors import StateError
from zeroshard.offload.updates import HostUpdates
from zeroshard.options import Options
from zeroshard.params.sharded_param import ShardedParam, ShardedTensors
from zeroshard.sync_policies import delays, reunites


class NormClipping:
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
    def settle(self, params: Sequence[ShardedParam], host: HostUpdates | None, loss_scale: float) -> float:
        """The global norm, what it clips, and whether the host's updates stand. Returns what gradients are
        still to be multiplied by: where they are fp16, and have the scale of the loss."""
        if self.limit is not None and not self.settled:
            self._factor = self._clip(self.limit, params, host, loss_scale)
            self.settled = True
        return self._factor / loss_scale if self._narrow else 1.0

    def _clip(
        self, limit: float, params: Sequence[ShardedParam], host: HostUpdates | None, loss_scale: float
    ) -> float:
        grads = [
            (p, ShardedTensors.local(p.sharded_param.grad))
            for p in params
            if p.sharded_param.grad is not None
        ]
        factor = 1.0
        squares = host.squares() if host is not None else []
        self.norm = global_norm(grads, squares, self._between) / loss_scale
        if math.isfinite(limit):
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
    grads: list[tuple[ShardedParam, Tensor]], squares: list[Tensor], transport: Transport | None
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


SAYS_SO = "_step_supports_amp_scaling"  # the attribute by which an optimizer says it


def why_not(options: Options, early: bool) -> str | None:
    """Why gradients of this run cannot be scaled. `early`: updates begin in backward."""
    if delays(options.sync):
        return (
            "a GradScaler does not go with sync=Delayed(): it divides by the scale of this step, and the "
            "gradient has that of the step before. Compute in bf16, which needs none, or drop Delayed()."
        )
    if reunites(options.sync):
        return (
            "a GradScaler does not go with an Adaptive() that has Local() beside other choices: ranks that "
            "train apart come to different scales, and then add their gradients up. Compute in bf16, which "
            "needs none, or drop Local()."
        )
    if early:
        return (
            "a GradScaler does not go with offload= and clip_norm= unless precision is fp16: updates begin "
            "in backward, before it could divide. Compute in bf16, which needs none, or drop clip_norm= and "
            "clip with clip_grad_norm_()."
        )
    return None


def refuse(optimizer: Any, why: str) -> None:
    """Raise if it is a scaler that calls the step. Otherwise torch would, for want of gradients; or, where
    only some are to be seen, nobody."""
    if hasattr(optimizer, "found_inf"):
        del optimizer.found_inf, optimizer.grad_scale
        raise StateError(why)


@torch.no_grad()
def settle(optimizer: Any, narrow: bool, alone: bool = True) -> float | None:
    """Deal with what a scaler has left, instead of the optimizer's kernel: the norm of scaled gradients is
    not that of the gradients, and other kernels than torch's fused ones know nothing of scales.

    Returns the scale that gradients still have: those of a `narrow` run, in fp16, where small ones would be
    lost. None: some are infinite, and the step is to be left out. `alone`: nobody measures gradients of other
    optimizers with these.
    """
    scale, found = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    if found is None:
        return 1.0
    if scale is not None and not narrow and not alone:
        del optimizer.grad_scale, optimizer.found_inf
        raise StateError(
            f"scaler.step() of {type(optimizer).__name__} before scaler.unscale_() of every optimizer: "
            "clip_norm= measures the gradients of all of them at the first step, and some still have the "
            "scale of the loss. Call scaler.unscale_(optimizer) for each optimizer before the first "
            "scaler.step()."
        )
    if bool(found):
        return None
    optimizer.grad_scale = optimizer.found_inf = None  # the scaler deletes them itself
    if scale is None or narrow:
        return 1.0 if scale is None else float(scale)
    held = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if held:
        torch._foreach_mul_([ShardedTensors.local(grad) for grad in held], 1.0 / float(scale))
    return 1.0


class _FoundInf(grad_scaler._MultiDeviceReplicator):
    """What a scaler on a GPU tells of itself to gradients that rest on the host. Torch copies it there
    without waiting, into locked memory, and computes with it at once: with whatever was there before, on a
    busy GPU."""

    def get(self, device: torch.device) -> torch.Tensor:
        found = super().get(device)
        if device.type == "cpu" and self.master.is_cuda:
            torch.cuda.current_stream(self.master.device).synchronize()
        return found


def await_copies() -> None:
    """Let scalers wait for what they copy to the host, from now on and in all of this process: there is no
    other place to wait in between."""
    grad_scaler._MultiDeviceReplicator = _FoundInf  # type: ignore[misc]
