"""Holds Adam's second moments as the warm-up of a codec left them.

Signs say the same size of a whole block, and top-k sends rare spikes of all that waited: second moments that
follow them forget which elements have large gradients and which have small ones. A codec with `freeze` keeps
them instead (as 1-bit Adam does). The optimizer is torch's own and knows nothing of it: before each of its
steps the second moment is set so that what it divides by comes out as

    sqrt(kept + (1 - beta2) / (1 - beta2**t) * gradient**2)

for any t: `kept` is what the bias-corrected moment was when the codec came into force. What the gradient of
this one step adds is small, and is a bound on its own update. An element without any gradient until then has
nothing to keep, and goes on as ever."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.compress import Compression
from zeroshard.errors import OptionError
from zeroshard.grads import CodecWorkspace

KEY = "exp_avg_sq_kept"  # beside `exp_avg_sq` in the optimizer's state, so that checkpoints have it


class FrozenMoments:
    """Of the parameters of one optimizer. `codecs`: those that freeze, by the id of the sharded parameter."""

    def __init__(
        self, optimizer: Optimizer, codecs: Mapping[int, Compression], workspace: CodecWorkspace
    ) -> None:
        self.optimizer, self.codecs, self.workspace = optimizer, codecs, workspace

    @torch.no_grad()
    def hold(self) -> None:
        """Before a step whose gradients came through the codec."""
        turn = self.workspace.turn - 1
        for group in self.optimizer.param_groups:
            beta = float(group["betas"][1])
            for sharded_param in group["params"]:
                codec, state = self.codecs.get(id(sharded_param)), self.optimizer.state.get(sharded_param)
                if codec is not None and state and beta > 0.0 and codec.active(turn):
                    _hold(state, beta)


def _hold(state: dict[str, Tensor], beta: float) -> None:
    moment, step = state["exp_avg_sq"], state["step"]
    if KEY not in state:
        state[KEY] = moment / _share(beta, step)
    kept = state[KEY]
    moment.copy_(torch.where(kept > 0, kept * (_share(beta, step + 1) / beta), moment))


def _share(beta: float, step: Tensor) -> Tensor:
    """How much of a running mean has been filled after so many steps."""
    return 1.0 - torch.pow(torch.full_like(step, beta), step)


def refuse_freezing(codec: Compression, optimizer: Optimizer) -> None:
    """Raise where an optimizer has no second moments that `codec` could keep."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise OptionError(
            f"{codec!r} keeps Adam's second moments, and {type(optimizer).__name__} is neither Adam "
            "nor AdamW: drop freeze=True."
        )
    if any(group["amsgrad"] for group in optimizer.param_groups):
        raise OptionError(
            f"{codec!r} keeps Adam's second moments, and amsgrad=True keeps the largest of them: "
            "drop one of the two."
        )
