"""SGD with momentum on the host: rows of state, the numbers of one step, and the update, one pass over
memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from zeroshard.errors import OptionError
from zeroshard.kernels import checks, library

from .adam import LEAST, Bound, address, run_update, to_f32
from .split_master import Ties, check_master, weight_kind
from .threads import KernelTaker


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
class SgdStep:
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
class SgdRows:
    """Optimizer state of some rows, flat, on the host; the master whole or split as in `AdamRows`."""

    master: torch.Tensor | None = None
    remainder: torch.Tensor | None = None
    momentum: torch.Tensor | None = None

    def __post_init__(self) -> None:
        numel = check_master("SgdRows", self.master, self.remainder)
        if self.momentum is not None:
            checks.flat("SgdRows", "momentum", self.momentum, (torch.float32,), numel)

    @property
    def numel(self) -> int:
        master = self.remainder if self.master is None else self.master
        assert master is not None
        return master.numel()

    def rows(self, start: int, stop: int) -> SgdRows:
        """The same memory, rows start..stop."""
        checks.rows("SgdRows", self.numel, start, stop)
        return SgdRows(
            *(t if t is None else t[start:stop] for t in (self.master, self.remainder, self.momentum))
        )


def sgd_update(
    state: SgdRows,
    grad: torch.Tensor,
    weight: torch.Tensor | None,
    step: SgdStep | None,
    *,
    taken: SgdStep | None = None,
    start: int = 0,
    stop: int | None = None,
    ties: Ties = "even",
    team: KernelTaker | None = None,
    bound: Bound | None = None,
) -> None:
    """Update rows start..stop of `state` with `grad`, and write the new master, rounded, to `weight`;
    arguments as in `adam_update`."""
    first, last = checks.rows("sgd_update", state.numel, start, stop)
    count = last - first
    checks.flat("sgd_update", "grad", grad, checks.FLOATS, count)
    kind = weight_kind("sgd_update", weight, count, state.master is None, ties)
    some = step or taken
    if some is None:
        raise OptionError("sgd_update: neither a step nor one to take back")
    if (state.momentum is None) != (some.momentum == 0.0):
        held = "no buffer" if state.momentum is None else "a buffer"
        raise OptionError(f"sgd_update: momentum={some.momentum}, but the rows hold {held} for it")
    state = state.rows(first, last)
    run_update("sgd", _record, (state, grad, weight, kind), step, taken, team, bound)


def _record(
    state: SgdRows, grad: torch.Tensor, weight: torch.Tensor | None, kind: int, numbers: SgdNumbers
) -> library.SgdRecord:
    return library.SgdRecord(
        count=state.numel,
        master=address(state.master),
        remainder=address(state.remainder),
        momentum=address(state.momentum),
        grad=address(grad),
        weight=address(weight),
        grad_kind=library.KINDS[grad.dtype],
        weight_kind=kind,
        first=numbers.first,
        nesterov=numbers.nesterov,
        decays=numbers.decays,
        grad_scale=numbers.grad_scale,
        stride=numbers.stride,
        inertia=numbers.inertia,
        gain=numbers.gain,
        decay=numbers.decay,
    )
