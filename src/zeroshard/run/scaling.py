"""What passes between a `torch.amp.GradScaler` and an optimizer of a run.

A scaler leaves what it has found with optimizers that say they unscale by themselves, as torch's fused ones
do: `found_inf`, and `grad_scale` where `scaler.unscale_()` has not been called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.amp import grad_scaler
from torch.optim import Optimizer

from zeroshard.config import Options
from zeroshard.errors import StateError
from zeroshard.life.shard import Faces
from zeroshard.policy import delays, reunites

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
def unscale(optimizer: Optimizer) -> None:
    """Divide what the optimizer's kernel would: the norm of scaled gradients is not that of the gradients."""
    scale = getattr(optimizer, "grad_scale", None)
    held = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if scale is not None and held:
        inverse = 1.0 / float(scale)
        torch._foreach_mul_([Faces.local(grad) for grad in held], inverse)
        optimizer.grad_scale = None  # type: ignore[attr-defined]


class _Arrived(grad_scaler._MultiDeviceReplicator):
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
    grad_scaler._MultiDeviceReplicator = _Arrived  # type: ignore[misc]
