"""Takes an update back: the state before a step from the state after it and the gradient, by the inverse
formula in fp64.

Right to fp32 rounding. Used in the rare step whose norm exceeds the limit after updates had begun.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .native import AdamRows, AdamStep, SgdRows, SgdStep, join, split
from .part import Part, Stretch


@torch.no_grad()
def take_back(part: Part, grad: Tensor, run: Stretch, block: int = 1 << 20) -> None:
    """The state before a run, from the state after it and the gradient: the inverse formula in fp64. The
    state is in memory."""
    weights, step = _joined_weights(part), run.step
    for at in range(run.start, run.stop, block):
        rows = slice(at, min(at + block, run.stop))
        g = grad[rows].double() * step.grad_scale * (-1.0 if step.maximize else 1.0)
        if isinstance(part.rows, AdamRows):
            assert isinstance(step, AdamStep)
            _take_back_adam(part.rows, weights, g, step, rows)
        else:
            assert isinstance(step, SgdStep)
            _take_back_sgd(part.rows, weights, g, step, rows)
    if part.splits:
        _store_split(part, weights)


def _take_back_adam(state: AdamRows, w: Tensor, g: Tensor, step: AdamStep, rows: slice) -> None:
    n = step.numbers()
    m, v, x = state.exp_avg[rows].double(), state.exp_avg_sq[rows].double(), w[rows].double()
    before = x - n.stride * m / (v.sqrt() / n.bias + n.eps)
    if n.coupled:
        g = g + n.decay * before
    else:
        before = before / n.decay
    w[rows] = before.to(w.dtype)
    if n.step == 1:  # exactly, where the difference of two large numbers would leave a rest
        state.exp_avg[rows] = state.exp_avg_sq[rows] = 0.0
        return
    rest = m - n.lerp * g
    rest[rest.abs() <= 2.0**-23 * m.abs()] = 0.0  # a mean of zero, but for the rounding of the update
    mean, square = rest / (1.0 - n.lerp), ((v - n.gain2 * g * g) / n.beta2).clamp_(min=0.0)
    # Next to a large gradient a small square is lost, and a mean over no square would be a huge step. By
    # Cauchy and Schwarz no square is smaller than this share of the mean's.
    decay = (1.0 - n.lerp) ** 2 / n.beta2 if n.beta2 > 0.0 else 1.0
    if decay < 1.0:
        square = torch.maximum(square, mean.square() * (n.gain2 * (1.0 - decay) / n.lerp**2))
    state.exp_avg[rows], state.exp_avg_sq[rows] = mean.float(), square.float()


def _take_back_sgd(state: SgdRows, w: Tensor, g: Tensor, step: SgdStep, rows: slice) -> None:
    n = step.numbers()
    x = w[rows].double()
    buf = state.momentum[rows].double() if state.momentum is not None else None
    # x' = x + stride * d, with d linear in g and x where weight decay is coupled: solve for x first.
    if buf is None:
        before = (x - n.stride * g) / (1.0 + n.stride * n.decay)
    elif n.nesterov:
        before = (x - n.stride * (g + n.inertia * buf)) / (1.0 + n.stride * n.decay)
    else:
        before = x - n.stride * buf
    w[rows] = before.to(w.dtype)
    if buf is not None:
        assert state.momentum is not None
        full = g + n.decay * before
        state.momentum[rows] = (
            torch.zeros_like(buf) if n.first else (buf - n.gain * full) / n.inertia
        ).float()


def _joined_weights(part: Part) -> Tensor:
    if part.rows.master is not None:
        return part.rows.master
    assert part.rows.remainder is not None
    weight = torch.zeros(part.numel, dtype=torch.bfloat16)
    for (at, n), row in zip(part.spans, part.rows_of_weights(), strict=True):
        weight[at : at + n].copy_(row)
    return join(weight, part.rows.remainder)


def _store_split(part: Part, master: Tensor) -> None:
    assert part.rows.remainder is not None
    weight, remainder = split(master)
    part.rows.remainder.copy_(remainder)
    for (at, n), row in zip(part.spans, part.rows_of_weights(), strict=True):
        row.copy_(weight[at : at + n])
