"""Lion on the host: rows of state, and the numbers of one step.

As Chen et al. wrote it, and `lion_pytorch.Lion` and `pytorch_optimizer.Lion` with their defaults: the sign of
a mean of momentum and gradient, with decoupled weight decay. Every operation is rounded on its own, where
torch's own loop fuses a multiplication with the addition that follows: the momentum differs in its last bit,
and a weight only where the mean is nothing but rounding, so that its sign is either."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from zeroshard.errors import OptionError
from zeroshard.kernels import checks
from zeroshard.kernels.host_update import HostStep, StateRows, to_f32


class LionNumbers(NamedTuple):
    """What a step comes down to, in fp32, as in lion.c."""

    grad_scale: float
    stride: float
    beta1: float
    gain1: float
    beta2: float
    gain2: float
    decay: float
    coupled: bool


@dataclass(frozen=True)
class LionStep(HostStep):
    """One step of Lion. `decoupled`: weight decay shrinks the weight; `fixed`: by `weight_decay` itself, and
    not by `lr` times that. Else it is added to the gradient."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0
    decoupled: bool = True
    fixed: bool = False
    maximize: bool = False
    grad_scale: float = 1.0

    def __post_init__(self) -> None:
        checks.numbers("LionStep", lr=self.lr, weight_decay=self.weight_decay)
        checks.numbers("LionStep", beta1=self.beta1, beta2=self.beta2)
        if self.beta1 >= 1.0 or self.beta2 >= 1.0:
            raise OptionError(f"LionStep: beta1={self.beta1} and beta2={self.beta2} must be below 1")

    def numbers(self) -> LionNumbers:
        coupled = self.weight_decay != 0.0 and not self.decoupled
        shrunk = 1.0 - (1.0 if self.fixed else self.lr) * self.weight_decay
        return LionNumbers(
            grad_scale=to_f32(-self.grad_scale if self.maximize else self.grad_scale),
            stride=to_f32(-self.lr),
            beta1=to_f32(self.beta1),
            gain1=to_f32(1.0 - self.beta1),
            beta2=to_f32(self.beta2),
            gain2=to_f32(1.0 - self.beta2),
            decay=to_f32(self.weight_decay if coupled else shrunk),
            coupled=coupled,
        )


@dataclass(frozen=True)
class LionRows(StateRows):
    """The momentum, and with it no update can be taken back: a sign does not tell what it was of."""

    kernel: ClassVar[str] = "lion"
    shown: ClassVar[Mapping[str, str]] = {"exp_avg": "exp_avg"}
    lossy: ClassVar[frozenset[str]] = frozenset({"exp_avg"})

    exp_avg: Tensor
    master: Tensor | None = None
    remainder: Tensor | None = None

    @classmethod
    def step_of(cls, group: Mapping[str, Any], count: int, scale: float) -> LionStep:
        beta1, beta2 = (float(b) for b in group["betas"])
        return LionStep(
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            weight_decay=float(group["weight_decay"]),
            decoupled=bool(group.get("weight_decouple", True)),
            fixed=bool(group.get("fixed_decay", False)),
            maximize=bool(group.get("maximize", False)),
            grad_scale=scale,
        )

    def update(self, master: Tensor, grad: Tensor, numbers: LionNumbers) -> None:
        grad = grad.to(torch.float32) * numbers.grad_scale
        if numbers.coupled:
            grad = grad + master * numbers.decay
        else:
            master.mul_(numbers.decay)
        sign = (self.exp_avg * numbers.beta1 + grad * numbers.gain1).sign_()
        self.exp_avg.mul_(numbers.beta2).add_(grad * numbers.gain2)
        master.add_(sign * numbers.stride)


Rows = LionRows
