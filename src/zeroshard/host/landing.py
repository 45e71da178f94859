"""Gradients that land on the host and stay visible, for optimizers and loops that update by themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from zeroshard.life.shard import Faces, Param


class HostGradients:
    """The plain way to the host: gradients land there and `home.grad` shows them; the optimizer's own step
    updates the master.

    For optimizers without a native kernel, and for loops that clip or unscale gradients themselves.
    """

    def __init__(self, params: list[Param], grads: list[Tensor], flat: Tensor) -> None:
        self.params, self.grads, self.flat = params, grads, flat
        self._own = [Faces.local(grad).detach() for grad in grads]  # stays, whatever becomes of `p.grad.data`

    @torch.no_grad()
    def accept(self, flat: Tensor, used: list[bool]) -> None:
        held = [None if p.home.grad is None else Faces.local(p.home.grad).clone() for p in self.params]
        self.flat.copy_(flat[: self.flat.numel()])
        for param, grad, local, old, has in zip(self.params, self.grads, self._own, held, used, strict=True):
            if Faces.local(grad).data_ptr() != local.data_ptr():
                grad.data = local
            if old is not None:
                local.add_(old) if has else local.copy_(old)
            param.home.grad = grad if has or old is not None else None

    @property
    def shown(self) -> bool:
        """Whether any of the parameters has a gradient."""
        return any(param.home.grad is not None for param in self.params)

    @torch.no_grad()
    def collect(self) -> tuple[Tensor, list[bool]]:
        """The gradients that the parameters show now, flat, and which have one."""
        for param, local in zip(self.params, self._own, strict=True):
            seen = param.home.grad
            if seen is not None and Faces.local(seen).data_ptr() != local.data_ptr():
                local.copy_(Faces.local(seen))  # the loop has put another tensor there
        return self.flat, [param.home.grad is not None for param in self.params]
