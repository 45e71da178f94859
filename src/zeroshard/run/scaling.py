"""What passes between a `torch.amp.GradScaler` and an optimizer of a run.

A scaler leaves what it has found with optimizers that say they unscale by themselves, as torch's fused ones
do: `found_inf`, and `grad_scale` where `scaler.unscale_()` has not been called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.amp import grad_scaler

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
def settle(optimizer: Any, narrow: bool) -> float | None:
    """Deal with what a scaler has left, instead of the optimizer's kernel: the norm of scaled gradients is
    not that of the gradients, and other kernels than torch's fused ones know nothing of scales.

    Returns the scale that gradients still have: those of a `narrow` run, in fp16, where small ones would be
    lost. None: some are infinite, and the step is to be left out.
    """
    scale, found = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    if found is None:
        return 1.0
    if bool(found):
        return None
    optimizer.grad_scale = optimizer.found_inf = None  # the scaler deletes them itself
    if scale is None or narrow:
        return 1.0 if scale is None else float(scale)
    held = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if held:
        torch._foreach_mul_([Faces.local(grad) for grad in held], 1.0 / float(scale))
    return 1.0


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
