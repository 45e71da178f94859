"""Adam and AdamW on the host: rows of state, the numbers of one step, and the update, one pass over
memory."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from zeroshard.errors import OptionError
from zeroshard.kernels import checks, fallback, host_memory, library, moments8

from .split_master import Ties, check_master, weight_kind
from .threads import KernelTaker

LEAST = 1 / 16  # of what a step leaves of a number: four bits of 24 are lost with it


def to_f32(value: float) -> float:
    """`value` as the kernels see it."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


@dataclass(frozen=True)
class Bound:
    """Where nothing is updated, but for the weights, which are written as they are: unless `size`, one number
    in the CPU's memory that may come just before the update, is `most` or less. A NaN is not."""

    size: torch.Tensor
    most: float

    def __post_init__(self) -> None:
        checks.flat("Bound", "size", self.size, (torch.float32,), 1)

    @property
    def exceeded(self) -> bool:
        return self.exceeds(float(self.size))

    def exceeds(self, size: float) -> bool:
        return not size <= to_f32(self.most)


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
class AdamStep:
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
        result is nothing, or next to it. ([Note: taking back] in adam.h.)"""
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
class AdamRows:
    """Optimizer state of some rows, flat, on the host. The master is `master` (fp32), or split: then
    `remainder` (int16) is here and the bf16 weight, its other half, is passed to the update. The moments are
    fp32, or 8-bit with `scales`. `max_exp_avg_sq` makes it AMSGrad."""

    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    master: torch.Tensor | None = None
    remainder: torch.Tensor | None = None
    max_exp_avg_sq: torch.Tensor | None = None
    scales: torch.Tensor | None = None

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

    @property
    def numel(self) -> int:
        return self.exp_avg.numel()

    def rows(self, start: int, stop: int) -> AdamRows:
        """The same memory, rows start..stop. With 8-bit moments they must be whole blocks."""
        checks.rows("AdamRows", self.numel, start, stop)
        if self.scales is not None and (
            start % library.BLOCK or (stop % library.BLOCK and stop != self.numel)
        ):
            raise OptionError(
                f"AdamRows: rows {start}:{stop} cut a block of {library.BLOCK} of the 8-bit moments"
            )
        found: dict[str, torch.Tensor | None] = {}
        for field in fields(self):
            tensor = getattr(self, field.name)
            if field.name == "scales":
                part = slice(moments8.scale_count(start), moments8.scale_count(stop))
            else:
                part = slice(start, stop)
            found[field.name] = None if tensor is None else tensor[part]
        return AdamRows(**found)  # type: ignore[arg-type]


def adam_update(
    state: AdamRows,
    grad: torch.Tensor,
    weight: torch.Tensor | None,
    step: AdamStep | None,
    *,
    taken: AdamStep | None = None,
    start: int = 0,
    stop: int | None = None,
    ties: Ties = "even",
    team: KernelTaker | None = None,
    bound: Bound | None = None,
) -> None:
    """Update rows start..stop of `state` with `grad`, and write the new master, rounded, to `weight`.

    `grad` (bf16, fp16 or fp32) and `weight` (the same, or None) hold those rows and no others, so they may be
    slots of a staging ring. With a split master `weight` is read as well: it is the master's other half.
    `weight` may be the memory of `grad`. `ties` is the rounding of a plain master to a bf16 weight.
    On this thread, or on all of a `team`; different rows may be updated from different threads at once, and
    the result does not depend on how they are cut.

    `taken`: a step with the same gradient that is taken back first ([Note: taking back] in adam.h); with
    `step` None that is all. Moments that are 8-bit, and AMSGrad's maximum, cannot be taken back. `bound`: for
    a step without `taken`."""
    if taken is not None and (state.scales is not None or state.max_exp_avg_sq is not None):
        raise OptionError("adam_update: 8-bit moments and AMSGrad's maximum cannot be taken back")
    if step is None and taken is None:
        raise OptionError("adam_update: neither a step nor one to take back")
    first, last = checks.rows("adam_update", state.numel, start, stop)
    count = last - first
    checks.flat("adam_update", "grad", grad, checks.FLOATS, count)
    kind = weight_kind("adam_update", weight, count, state.master is None, ties)
    if (first, last) != (0, state.numel):
        state = state.rows(first, last)
    run_update("adam", _record, (state, grad, weight, kind), step, taken, team, bound)


def run_update(
    name: str,
    record_of: Callable[..., Any],
    rows: tuple[Any, torch.Tensor, torch.Tensor | None, int],
    step: Any,
    taken_step: Any,
    team: KernelTaker | None,
    bound: Bound | None,
) -> None:
    """Run the kernel `name` on the record of `rows` (state, gradient, weight and its kind) and of the step's
    numbers, with that of `taken_step`, which is taken back first; or torch, where there are no kernels."""
    now, before = (None if each is None else each.numbers() for each in (step, taken_step))
    state, grad, weight, kind = rows
    kernels = library.kernels()
    if kernels is None:
        now = None if bound is not None and bound.exceeded else now
        getattr(fallback, name)(state, grad, weight, now, kind, before)
        return
    record = partial(record_of, *rows)
    taken: Any = None if before is None else record(before)
    made: Any = taken if now is None else record(now)
    made.taken = None if taken is None else ctypes.addressof(taken)
    if bound is not None:
        made.size, made.most = bound.size.data_ptr(), bound.most
    made.kept = taken, bound  # which have only their addresses there, and must live as long
    kernel = f"{name}_back" if now is None else name
    if team is not None:
        team.take(kernel, made)
    else:
        getattr(kernels, kernel)(ctypes.byref(made))


def address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _record(
    state: AdamRows, grad: torch.Tensor, weight: torch.Tensor | None, kind: int, numbers: AdamNumbers
) -> library.AdamRecord:
    return library.AdamRecord(
        count=state.numel,
        master=address(state.master),
        remainder=address(state.remainder),
        exp_avg=address(state.exp_avg),
        exp_avg_sq=address(state.exp_avg_sq),
        peak=address(state.max_exp_avg_sq),
        scales=address(state.scales),
        grad=address(grad),
        weight=address(weight),
        grad_kind=library.KINDS[grad.dtype],
        weight_kind=kind,
        coupled=numbers.coupled,
        salt=moments8.salt(numbers.step),
        grad_scale=numbers.grad_scale,
        lerp=numbers.lerp,
        beta2=numbers.beta2,
        gain2=numbers.gain2,
        stride=numbers.stride,
        bias=numbers.bias,
        eps=numbers.eps,
        decay=numbers.decay,
        first=numbers.step == 1,
    )
