"""SGD with momentum on the host: rows of state, and the numbers of one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from zeroshard.errors import OptionError
from zeroshard.kernels import checks
from zeroshard.kernels.host_update import LEAST, HostStep, StateRows, to_f32


class SgdNumbers(NamedTuple):
    """What a step comes down to, in fp32."""

    grad_scale: float
    stride: float
    inertia: float
    gain: float
    decay: float
    first: bool
    nesterov: bool
    decays: bool


@dataclass(frozen=True)
class SgdStep(HostStep):
    """One step of torch.optim.SGD. `first`: the momentum holds nothing yet and becomes the gradient."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    grad_scale: float = 1.0
    first: bool = False

    def __post_init__(self) -> None:
        checks.numbers("SgdStep", lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        if self.nesterov and (self.momentum == 0.0 or self.dampening != 0.0):
            raise OptionError("SgdStep: nesterov needs a momentum above 0 and a dampening of 0")

    @property
    def invertible(self) -> bool:
        """As `AdamStep.invertible`: of a sum over no momentum the weights come back, and nothing else."""
        direct = self.momentum == 0.0 or self.nesterov
        decays = abs(1.0 - self.lr * self.weight_decay) if direct else 1.0
        return decays >= LEAST and (self.momentum == 0.0 or abs(self.momentum) >= LEAST)

    def leap(self, of_few: bool = False) -> float:
        """As `AdamStep.leap`."""
        return 1e4

    def numbers(self) -> SgdNumbers:
        """Computed in double and rounded once, as torch does."""
        scale = -self.grad_scale if self.maximize else self.grad_scale
        return SgdNumbers(
            grad_scale=to_f32(scale),
            stride=to_f32(-self.lr),
            inertia=to_f32(self.momentum),
            gain=to_f32(1.0 - self.dampening),
            decay=to_f32(self.weight_decay),
            first=self.first,
            nesterov=self.nesterov,
            decays=self.weight_decay != 0.0,
        )


@dataclass(frozen=True)
class SgdRows(StateRows):
    """Without momentum, the master alone."""

    kernel: ClassVar[str] = "sgd"
    shown: ClassVar[Mapping[str, str]] = {"momentum_buffer": "momentum"}
    begins_at_zero: ClassVar[bool] = False  # but with the first gradient, undampened
    optimizers = (torch.optim.SGD,)

    master: Tensor | None = None
    remainder: Tensor | None = None
    momentum: Tensor | None = None

    @classmethod
    def arrays(cls, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("momentum",) if group["momentum"] else ()

    @classmethod
    def step_of(cls, group: Mapping[str, Any], count: int, scale: float) -> SgdStep:
        return SgdStep(
            lr=float(group["lr"]),
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            weight_decay=float(group["weight_decay"]),
            nesterov=bool(group["nesterov"]),
            maximize=bool(group["maximize"]),
            grad_scale=scale,
            first=count == 1,
        )

    def fit(self, step: HostStep) -> None:
        assert isinstance(step, SgdStep)
        if (self.momentum is None) != (step.momentum == 0.0):
            held = "no buffer" if self.momentum is None else "a buffer"
            raise OptionError(f"update_rows: momentum={step.momentum}, but the rows hold {held} for it")

    def update(self, master: Tensor, grad: Tensor, numbers: SgdNumbers) -> None:
        change = grad.to(torch.float32) * numbers.grad_scale
        if numbers.decays:
            change = change + master * numbers.decay
        momentum = self.momentum
        if momentum is not None:
            if numbers.first:
                momentum.copy_(change)
            else:
                momentum.mul_(numbers.inertia).add_(change * numbers.gain)
            change = change + momentum * numbers.inertia if numbers.nesterov else momentum
        master.add_(change * numbers.stride)

    def take_back(self, master: Tensor, grad: Tensor, numbers: SgdNumbers) -> None:
        """See [Note: taking back] in adam.c."""
        momentum = self.momentum
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


Rows = SgdRows
