"""How the host updates an optimizer's state: rows of it, the numbers of a step, and one pass over memory.

Each optimizer that the host knows is a file of `updates`: a class of rows, a class of steps, and a kernel in
C beside it. Optimizers of others are updated by one of these, or by rows of their own, after
`register_host_update`.

[Note: taking back] An update may begin before the norm of all gradients is known, if the state before it can
be told from the state after it and the gradient (`HostStep.invertible`), for the case that the norm was too
large. Arrays that hold less than is needed for that are `StateRows.lossy`: the host waits for the norm."""

from __future__ import annotations

import ctypes
import functools
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, ClassVar, Self, get_type_hints

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.errors import OptionError, did_you_mean
from zeroshard.kernels import checks, fallback, library

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

    size: Tensor
    most: float

    @property
    def exceeded(self) -> bool:
        return self.exceeds(float(self.size))

    def exceeds(self, size: float) -> bool:
        return not size <= to_f32(self.most)


class HostStep(ABC):
    """One step of an optimizer, as its update needs it. Two that are equal do the same."""

    @property
    def invertible(self) -> bool:
        """See [Note: taking back]."""
        return False

    def leap(self, of_few: bool = False) -> float:
        """By how many times the square of a gradient may exceed those before, at a loss of four bits.
        `of_few`: where the state after this step is that of no more gradients than there were steps."""
        return 1e4

    @abstractmethod
    def numbers(self) -> Any:
        """What it comes down to, the same for C and for torch: a `NamedTuple` of `float` (fp32 in C) and
        `int` (32 bits), the fields of the kernel's struct in their order."""


class StateRows(ABC):
    """Optimizer state of some rows, flat, on the host. A frozen dataclass: its fields are fp32 arrays of
    equal length, among them the master, which is `master` (fp32), or split: then `remainder` (int16) is here
    and the bf16 weight, its other half, is passed to the update.

    - `kernel`: the C function that updates them, after ``zs_``, or "" where `update` does it in torch.
    - `shown`: what `optimizer.state` calls the arrays.
    - `lossy`: arrays with which an update cannot be taken back; see [Note: taking back].
    - `counts`: whether `optimizer.state` has a `step`. `begins_at_zero`: whether zeros are what a state
      begins with; where they are not, it is missing before the first step.
    - `coded`: whether `Offload(moments="int8")` is for them.
    - `optimizers`: those of torch that they belong to.
    """

    kernel: ClassVar[str] = ""
    shown: ClassVar[Mapping[str, str]]
    lossy: ClassVar[frozenset[str]] = frozenset()
    counts: ClassVar[bool] = False
    begins_at_zero: ClassVar[bool] = True
    coded: ClassVar[bool] = False
    optimizers: ClassVar[tuple[type[Optimizer], ...]] = ()

    master: Tensor | None
    remainder: Tensor | None

    @classmethod
    def arrays(cls, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Those that the options of a group of the optimizer ask for, beside the master."""
        return tuple(cls.shown.values())

    @classmethod
    @abstractmethod
    def step_of(cls, group: Mapping[str, Any], count: int, scale: float) -> HostStep:
        """The step with a group's hyperparameters. `count` begins with 1; gradients are multiplied by
        `scale` first."""

    @abstractmethod
    def update(self, master: Tensor, grad: Tensor, numbers: Any) -> None:
        """The update in torch, in place, of rows few enough for a cache; `grad` may not be changed. Where
        there is a kernel it has the same bits: every operation is rounded on its own."""

    def take_back(self, master: Tensor, grad: Tensor, numbers: Any) -> None:
        """The inverse of `update`."""
        raise AssertionError("`lossy`, or steps that are not `invertible`, say that it cannot be taken back")

    def in_torch(self, master: Tensor, grad: Tensor, numbers: Any, taken: Any) -> None:
        """Take back one step, and do another; either may be None."""
        if taken is not None:
            self.take_back(master, grad, taken)
        if numbers is not None:
            self.update(master, grad, numbers)

    def fit(self, step: HostStep) -> None:  # noqa: B027 (most rows fit all steps)
        """Raise where these are not the rows of such a step."""

    def __post_init__(self) -> None:
        numel = check_master(type(self).__name__, self.master, self.remainder)
        for name in _names(type(self)):
            if (tensor := getattr(self, name)) is not None:
                checks.flat(type(self).__name__, name, tensor, (torch.float32,), numel)

    @property
    def numel(self) -> int:
        master = self.remainder if self.master is None else self.master
        assert master is not None
        return master.numel()

    def rows(self, start: int, stop: int) -> Self:
        """The same memory, rows start..stop."""
        checks.rows(type(self).__name__, self.numel, start, stop)
        found = {name: getattr(self, name) for name in ("master", "remainder", *_names(type(self)))}
        return type(self)(**{n: None if t is None else t[start:stop] for n, t in found.items()})


@functools.cache
def _names(kind: type[StateRows]) -> tuple[str, ...]:
    """The arrays that lie beside the master."""
    return tuple(f.name for f in fields(kind) if f.name not in ("master", "remainder", "scales"))  # type: ignore[arg-type]


def update_rows(
    state: StateRows,
    grad: Tensor,
    weight: Tensor | None,
    step: HostStep | None,
    *,
    taken: HostStep | None = None,
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

    `taken`: a step with the same gradient that is taken back first ([Note: taking back]); with `step` None
    that is all. `bound`: for a step without `taken`."""
    some = step or taken
    if some is None:
        raise OptionError("update_rows: neither a step nor one to take back")
    if taken is not None:
        _check_lossless(state)
    if bound is not None:
        checks.flat("update_rows", "size", bound.size, (torch.float32,), 1)
    first, last = checks.rows("update_rows", state.numel, start, stop)
    checks.flat("update_rows", "grad", grad, checks.FLOATS, last - first)
    kind = weight_kind("update_rows", weight, last - first, state.master is None, ties)
    state.fit(some)
    state = state if (first, last) == (0, state.numel) else state.rows(first, last)
    kernels = library.kernels()
    kernel = kernels.update(_kernel_name(state, step)) if kernels is not None else None
    if kernel is None:
        now, before = (None if each is None else each.numbers() for each in (step, taken))
        now = None if bound is not None and bound.exceeded else now
        fallback.update(state, grad, weight, now, kind, before)
        return
    back = record_of(state, grad, weight, kind, taken) if taken is not None else None
    record = record_of(state, grad, weight, kind, some, back, bound)
    if team is not None:
        team.take(kernel, record)
    else:
        kernel(record)


def _kernel_name(state: StateRows, step: HostStep | None) -> str:
    return state.kernel if step is not None else f"{state.kernel}_back"


def _check_lossless(state: StateRows) -> None:
    lost = sorted(name for name in state.lossy if getattr(state, name) is not None)
    if lost:
        raise OptionError(f"update_rows: `{lost[0]}` of {type(state).__name__} cannot be taken back")


def record_of(
    state: StateRows,
    grad: Tensor,
    weight: Tensor | None,
    kind: int,
    step: HostStep,
    taken: library.StepRecord | None = None,
    bound: Bound | None = None,
) -> library.StepRecord:
    """An update as its kernel reads it."""
    numbers = step.numbers()
    kind_of_numbers: Any = type(numbers)
    form = _record_type(kind_of_numbers)
    scales: Tensor | None = getattr(state, "scales", None)
    rows = library.RowsRecord(
        state.numel,
        ctypes.sizeof(form),
        _address(state.master),
        _address(state.remainder),
        library.States(*(_address(getattr(state, name)) for name in _names(type(state)))),
        _address(scales),
        grad.data_ptr(),
        _address(weight),
        taken.address if taken is not None else None,
        _address(bound.size) if bound is not None else None,
        bound.most if bound is not None else 0.0,
        library.KINDS[grad.dtype],
        kind,
        4 if scales is None else 1,
    )
    return form(rows, form.Numbers(*numbers)).keep(taken, bound)


@functools.cache
def _record_type(kind: Any) -> type[library.StepRecord]:
    """The struct of an update whose numbers are a `NamedTuple` of this type."""
    types = {float: "f32", int: "i32", bool: "i32"}
    declared = ";".join(f"{types[of]}: {name}" for name, of in get_type_hints(kind).items())
    return library.step_record(getattr(kind, "__name__", "Step"), declared)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


# -- who is updated by what

_registered: dict[type[Optimizer], type[StateRows]] = {}


@functools.cache
def host_updates() -> dict[str, type[StateRows]]:
    """The updates that come with the library, by name: a file of `updates` each."""
    from zeroshard.kernels import updates

    names = [module.name for module in iter_modules(updates.__path__)]
    return {name: import_module(f"{updates.__name__}.{name}").Rows for name in names}


@functools.cache
def _torchs_own() -> dict[type[Optimizer], type[StateRows]]:
    return {kind: rows for rows in host_updates().values() for kind in rows.optimizers}


def register_host_update(optimizer: type[Optimizer], update: str | type[StateRows]) -> None:
    """Have the host update the state of an optimizer that is not torch's, on its fast path: beside the
    computation, with state in host memory or on the disk. On every rank, before `zs.plan()` and `zs.shard()`.

    `update` is one that comes with the library, by its name in `zeroshard.kernels.updates`, for a class that
    computes the same:

        from their_library import AdamWithLogs
        zeroshard.extend.register_host_update(AdamWithLogs, "adam")

        optimizer = AdamWithLogs(model.parameters(), lr=1e-4)
        run = zs.shard(model, optimizer, offload=zs.Offload(), clip_norm=1.0)

    or rows of your own, which update themselves in torch:

        @dataclass(frozen=True)
        class SignStep(HostStep):
            lr: float
            grad_scale: float

            def numbers(self):
                return self

        @dataclass(frozen=True)
        class SignRows(StateRows):
            shown = {}  # beside the master it keeps nothing
            master: Tensor | None = None
            remainder: Tensor | None = None

            @classmethod
            def step_of(cls, group, count, scale):
                return SignStep(float(group["lr"]), scale)

            def update(self, master, grad, numbers):
                master.sub_((grad.float() * numbers.grad_scale).sign(), alpha=numbers.lr)

        register_host_update(SignSgd, SignRows)

    `shard()` compares a few steps of the class with those of the update, and refuses what computes something
    else: an option that the update does not know, for example. Its name is all that is looked at, so a
    subclass is registered for itself."""
    if not (isinstance(optimizer, type) and issubclass(optimizer, Optimizer)):
        raise OptionError(
            f"register_host_update: {optimizer!r} is no class of optimizers; pass the class itself."
        )
    if optimizer.__module__.startswith("torch.optim."):
        raise OptionError(
            f"register_host_update: {optimizer.__name__} is torch's own; register a subclass of it instead."
        )
    known = host_updates()
    if isinstance(update, str):
        if update not in known:
            raise OptionError(
                f"register_host_update: there is no update {update!r}.{did_you_mean(update, known)} There "
                f"are {', '.join(sorted(known))}, or pass a subclass of StateRows."
            )
        update = known[update]
    elif not (isinstance(update, type) and issubclass(update, StateRows)):
        raise OptionError(
            f"register_host_update: {update!r} is no update; pass one of {', '.join(sorted(known))}, or a "
            "subclass of StateRows."
        )
    _registered[optimizer] = update


def host_update_of(optimizer: Optimizer | type[Optimizer]) -> type[StateRows] | None:
    """What updates the state of such an optimizer on the host; None: its own step alone."""
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    return _torchs_own().get(kind) or _registered.get(kind)


def is_registered(optimizer: Optimizer) -> bool:
    """Whether somebody has said so, and not this library."""
    return type(optimizer) in _registered
