"""Adam and AdamW on the host: rows of state, and the numbers of one step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from zeroshard.errors import OptionError
from zeroshard.kernels import checks, host_memory, library, moments8
from zeroshard.kernels.host_update import LEAST, HostStep, StateRows, to_f32
from zeroshard.kernels.split_master import check_master


class AdamNumbers(NamedTuple):
    """What a step comes down to, in fp32: the same values for the kernel and for the fallback."""

    grad_scale: float
    lerp: float
    beta2: float
    gain2: float
    stride: float
    bias: float
    eps: float
    decay: float
    coupled: bool
    step: int


@dataclass(frozen=True)
class AdamStep(HostStep):
    """One step of torch.optim.Adam (`decoupled=False`) or AdamW. `step` counts from 1. `grad_scale`
    multiplies the gradient first: averaging, unscaling and clipping at no cost."""

    lr: float
    step: int
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True
    maximize: bool = False
    grad_scale: float = 1.0

    def __post_init__(self) -> None:
        checks.numbers("AdamStep", lr=self.lr, eps=self.eps, weight_decay=self.weight_decay)
        checks.numbers("AdamStep", beta1=self.beta1, beta2=self.beta2)
        if self.beta1 >= 1.0 or self.beta2 >= 1.0:
            raise OptionError(f"AdamStep: beta1={self.beta1} and beta2={self.beta2} must be below 1")
        if self.step < 1:
            raise OptionError(f"AdamStep: step={self.step}; the first step is 1")

    @property
    def invertible(self) -> bool:
        """Whether the state before can be told from the state after and the gradient: no weight of it in the
        result is nothing, or next to it. ([Note: taking back] in adam.c.)"""
        n = self.numbers()
        return min(self.beta1, self.beta2, 1.0 if n.coupled else abs(n.decay)) >= LEAST and n.eps > 0.0

    def leap(self, of_few: bool = False) -> float:
        """By how many times the square of a gradient may exceed those before, at a loss of four bits.
        `of_few`: where the state after this step is that of no more gradients than there were steps."""
        lerp, gain2 = 1.0 - self.beta1, 1.0 - self.beta2
        if of_few:
            lerp, gain2 = lerp / (1.0 - self.beta1**self.step), gain2 / (1.0 - self.beta2**self.step)
        return min((10.0 / lerp) ** 2, 10.0 / gain2 if gain2 else math.inf, 1e4)

    def numbers(self) -> AdamNumbers:
        """Computed in double and rounded once, as torch does."""
        coupled = self.weight_decay != 0.0 and not self.decoupled
        decay = self.weight_decay if coupled else 1.0 - self.lr * self.weight_decay
        return AdamNumbers(
            grad_scale=to_f32(-self.grad_scale if self.maximize else self.grad_scale),
            lerp=to_f32(1.0 - self.beta1),
            beta2=to_f32(self.beta2),
            gain2=to_f32(1.0 - self.beta2),
            stride=to_f32(-(self.lr / (1.0 - self.beta1**self.step))),
            bias=to_f32((1.0 - self.beta2**self.step) ** 0.5),
            eps=to_f32(self.eps),
            decay=to_f32(decay),
            coupled=coupled,
            step=self.step,
        )


@dataclass(frozen=True)
class AdamRows(StateRows):
    """The moments are fp32, or 8-bit with `scales`. `max_exp_avg_sq` makes it AMSGrad. 8-bit moments cannot
    be taken back to their exact codes, nor AMSGrad's maximum to the one before."""

    kernel: ClassVar[str] = "adam"
    shown: ClassVar[Mapping[str, str]] = {name: name for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")}
    lossy: ClassVar[frozenset[str]] = frozenset({"scales", "max_exp_avg_sq"})
    counts: ClassVar[bool] = True
    coded: ClassVar[bool] = True
    optimizers = (torch.optim.Adam, torch.optim.AdamW)

    exp_avg: Tensor
    exp_avg_sq: Tensor
    master: Tensor | None = None
    remainder: Tensor | None = None
    max_exp_avg_sq: Tensor | None = None
    scales: Tensor | None = None

    def __post_init__(self) -> None:
        where = "AdamRows"
        numel = check_master(where, self.master, self.remainder)
        coded = self.scales is not None
        checks.flat(where, "exp_avg", self.exp_avg, (torch.int8 if coded else torch.float32,), numel)
        checks.flat(where, "exp_avg_sq", self.exp_avg_sq, (torch.uint8 if coded else torch.float32,), numel)
        if self.scales is not None:
            checks.flat(where, "scales", self.scales, (torch.float32,), moments8.scale_count(numel))
        if self.max_exp_avg_sq is not None:
            if coded:
                raise OptionError(
                    "AdamRows: AMSGrad needs fp32 moments; drop `max_exp_avg_sq` or the 8-bit moments"
                )
            checks.flat(where, "max_exp_avg_sq", self.max_exp_avg_sq, (torch.float32,), numel)

    @classmethod
    def zeros(
        cls,
        numel: int,
        *,
        master: Literal["fp32", "split"] = "fp32",
        moments: Literal["fp32", "int8"] = "fp32",
        amsgrad: bool = False,
    ) -> AdamRows:
        """Zeroed state in memory laid out for the kernels (see `pages`)."""
        dtypes = {"master": torch.float32} if master == "fp32" else {"remainder": torch.int16}
        dtypes["exp_avg"] = torch.int8 if moments == "int8" else torch.float32
        dtypes["exp_avg_sq"] = torch.uint8 if moments == "int8" else torch.float32
        if amsgrad:
            dtypes["max_exp_avg_sq"] = torch.float32
        tensors = dict(zip(dtypes, host_memory.allocate(numel, list(dtypes.values())), strict=True))
        if moments == "int8":
            tensors["scales"] = torch.zeros(moments8.scale_count(numel), dtype=torch.float32, device="cpu")
        return cls(**tensors)

    @classmethod
    def arrays(cls, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq") + (("max_exp_avg_sq",) if group["amsgrad"] else ())

    @classmethod
    def step_of(cls, group: Mapping[str, Any], count: int, scale: float) -> AdamStep:
        beta1, beta2 = (float(b) for b in group["betas"])
        return AdamStep(
            lr=float(group["lr"]),
            step=count,
            beta1=beta1,
            beta2=beta2,
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled=bool(group.get("decoupled_weight_decay", True)),
            maximize=bool(group.get("maximize", False)),
            grad_scale=scale,
        )

    def rows(self, start: int, stop: int) -> AdamRows:
        """The same memory, rows start..stop. With 8-bit moments they must be whole blocks."""
        checks.rows("AdamRows", self.numel, start, stop)
        if self.scales is not None and (
            start % library.BLOCK or (stop % library.BLOCK and stop != self.numel)
        ):
            raise OptionError(
                f"AdamRows: rows {start}:{stop} cut a block of {library.BLOCK} of the 8-bit moments"
            )
        found: dict[str, Tensor | None] = {}
        for field in fields(self):
            tensor = getattr(self, field.name)
            if field.name == "scales":
                part = slice(moments8.scale_count(start), moments8.scale_count(stop))
            else:
                part = slice(start, stop)
            found[field.name] = None if tensor is None else tensor[part]
        return AdamRows(**found)  # type: ignore[arg-type]

    def in_torch(
        self, master: Tensor, grad: Tensor, numbers: AdamNumbers | None, taken: AdamNumbers | None
    ) -> None:
        if self.scales is None:
            super().in_torch(master, grad, numbers, taken)
            return
        if numbers is None:
            return
        mean, square = (t.reshape(-1) for t in moments8.decode(self.exp_avg, self.exp_avg_sq, self.scales))
        AdamRows(mean, square, master).update(master, grad, numbers)
        codes = moments8.encode(mean.contiguous(), square.contiguous(), numbers.step)
        for stored, code in zip((self.exp_avg, self.exp_avg_sq, self.scales), codes, strict=True):
            stored.copy_(code)

    def update(self, master: Tensor, grad: Tensor, numbers: AdamNumbers) -> None:
        mean, square = self.exp_avg, self.exp_avg_sq
        grad = grad.to(torch.float32) * numbers.grad_scale
        if numbers.coupled:
            grad = grad + master * numbers.decay
        else:
            master.mul_(numbers.decay)
        if numbers.lerp < 0.5:
            mean.add_((grad - mean).mul_(numbers.lerp))
        else:
            mean.copy_(grad - (grad - mean).mul_(1.0 - numbers.lerp))
        square.mul_(numbers.beta2).add_((grad * numbers.gain2).mul_(grad))
        if self.max_exp_avg_sq is not None:
            square = torch.maximum(self.max_exp_avg_sq, square, out=self.max_exp_avg_sq)
        root = moments8.root_of(square).div_(numbers.bias).add_(numbers.eps)
        master.add_((mean * numbers.stride).div_(root))

    def take_back(self, master: Tensor, grad: Tensor, numbers: AdamNumbers) -> None:
        """See [Note: taking back] in adam.c."""
        mean, square = self.exp_avg, self.exp_avg_sq
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


Rows = AdamRows
