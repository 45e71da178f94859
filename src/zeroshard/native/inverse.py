"""A step taken back, in torch: what `adam_back` and `sgd_back` of the kernels compute, see [Note: taking
back] in adam.h."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .adam import AdamNumbers
    from .sgd import SgdNumbers


def adam_back(
    master: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, grad: torch.Tensor, numbers: AdamNumbers
) -> None:
    """The master and the moments before a step, in place."""
    n, rest = numbers, 1.0 - numbers.lerp
    m, v, x = mean.double(), square.double(), master.double()
    g = (grad.to(torch.float32) * n.grad_scale).double()
    before = x - n.stride * m / (v.sqrt() / n.bias + n.eps)
    if n.coupled:
        g = g + n.decay * before
    else:
        before = before / n.decay
    master.copy_(before)
    if n.step == 1:  # exactly, where the difference of two large numbers would leave a rest
        mean.zero_()
        square.zero_()
        return
    part = m - n.lerp * g
    older = torch.where(part.abs() <= 2.0**-23 * m.abs(), 0.0, part) / rest
    mean.copy_(older)
    if n.beta2 == 0.0:
        square.zero_()
        return
    share = rest * rest / n.beta2
    least = n.gain2 * (1.0 - share) / (n.lerp * n.lerp) if share < 1.0 else 0.0
    left, floor = (v - n.gain2 * g * g) / n.beta2, older * older * least
    square.copy_(torch.where(left < floor, floor, left))


def sgd_back(
    master: torch.Tensor, momentum: torch.Tensor | None, grad: torch.Tensor, numbers: SgdNumbers
) -> None:
    """The master and the momentum before a step, in place."""
    n = numbers
    x, g = master.double(), (grad.to(torch.float32) * n.grad_scale).double()
    decay = n.decay if n.decays else 0.0
    ran = torch.zeros_like(x) if momentum is None else momentum.double()
    if momentum is None or n.nesterov:
        before = (x - n.stride * (g + n.inertia * ran)) / (1.0 + n.stride * decay)
    else:
        before = x - n.stride * ran
    master.copy_(before)
    if momentum is None:
        return
    if n.first:
        momentum.zero_()
    else:
        momentum.copy_((ran - n.gain * (g + decay * before)) / n.inertia)
