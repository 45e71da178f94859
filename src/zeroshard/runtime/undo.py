"""Undoes a `shard()` that fails half way: the user's model and optimizers are what they were.

[Note: what is taken] Units are built one by one, and what the user's parameters had of a unit is let go when
its rows stand: sharding is there to save that memory. Where this rank keeps the values whole (on one rank, at
stage 0, and at stages 1 and 2 in a dtype that loses nothing) they are put back. Elsewhere each rank has its
rows alone, and a peer that failed cannot be asked for the others: any use of such a parameter is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.optim import Optimizer

from zeroshard.errors import StateError
from zeroshard.params.sharded_param import MasterRows
from zeroshard.params.units import ParamRef, Unit

log = logging.getLogger("zeroshard")


class LostParam(nn.Parameter):
    """A parameter whose values went with a `shard()` that has failed."""

    told = ""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise StateError(cls.told)


@dataclass
class TakenValue:
    """What is known of one parameter before it is taken, and where its values are from then on."""

    param_ref: ParamRef
    whole: Tensor | None  # all of it in the dtype that is computed with, where that stays on this rank
    local: Tensor | None  # this rank's rows, if those are all, and their master if they show fewer bits
    master: MasterRows | None

    def __post_init__(self) -> None:
        parameter = self.param_ref.parameter
        self._place, self._grad_dtype = _place(parameter), parameter.grad_dtype
        self._dtype, self._device = parameter.dtype, parameter.device

    @torch.no_grad()
    def put_back(self) -> bool:
        """Whether the parameter has its values, as before."""
        parameter = self.param_ref.parameter
        if parameter.is_meta:
            return True
        if _place(parameter) != self._place:
            value = self._value()
            if value is None:
                return False
            with suppress(RuntimeError):  # no memory: it stays where it is
                value = value.to(self._device, self._dtype, copy=True)
            if value.dtype != self._dtype or value.device != self._device:
                return False
            parameter.data = value.view(parameter.shape)
        parameter.grad_dtype = self._grad_dtype
        return True

    def _value(self) -> Tensor | None:
        """All of it, with no bit lost."""
        if self.local is not None and self.master is not None:
            if torch.promote_types(self._dtype, torch.float32) == torch.float32:
                return self.master.read(0, self.local.numel())
        elif self.local is not None and _holds(self.local.dtype, self._dtype):
            return self.local
        return self.whole if self.whole is not None and _holds(self.whole.dtype, self._dtype) else None


def _place(parameter: Tensor) -> tuple[object, ...]:
    with DisableTorchFunctionSubclass():
        return parameter.data_ptr(), parameter.device, parameter.dtype, tuple(parameter.stride())


def _holds(wide: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether each value of one dtype is a value of the other."""
    return torch.promote_types(wide, dtype) == wide


class ShardUndo:
    """What one `shard()` has changed so far."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        self._taken: list[TakenValue] = []
        self._groups = [(g, g["params"]) for o in optimizers for g in o.param_groups]
        self._states = [(optimizer, dict(optimizer.state)) for optimizer in optimizers]
        self._buffers = [
            (module, name, buffer, buffer.data)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._written: list[tuple[Tensor, Tensor]] = []
        self._refs: list[ParamRef] = []

    def begin(self, units: Sequence[Unit], written: Sequence[Tensor]) -> None:
        """These units will be built. `written`: buffers that are filled in place."""
        self._refs = [param_ref for unit in units for param_ref in unit.param_refs]
        self._written = [(buffer, buffer.data.clone()) for buffer in written if not buffer.is_meta]

    def taking(self, taken: TakenValue) -> None:
        """The values of this parameter rest elsewhere, too, and are about to be let go."""
        self._taken.append(taken)

    def undo(self, error: BaseException | None) -> None:
        """Put everything back; what cannot be, says so when it is used."""
        for param_ref in self._refs:
            for place in param_ref.places:
                place.module._parameters[place.attribute] = param_ref.parameter
        for group, params in self._groups:
            group["params"] = params
        for optimizer, state in self._states:
            optimizer.state.clear()
            optimizer.state.update(state)
        for module, name, buffer, data in self._buffers:
            module._buffers[name] = buffer
            if not buffer.is_meta and _place(buffer) != _place(data):
                buffer.data = data
        for buffer, values in self._written:
            buffer.data.copy_(values)
        lost = [taken.param_ref for taken in self._taken if not taken.put_back()]
        self._taken.clear()
        if lost:
            self._mark(lost, error)

    def _mark(self, lost: Sequence[ParamRef], error: BaseException | None) -> None:
        first = str(error).strip().partition("\n")[0].rstrip(".")
        why = "" if error is None else f" ({type(error).__name__}{': ' if first else ''}{first})"
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        told = (
            f"zs.shard() failed{why} when ranks had divided the values of `{lost[0].name}`{more} among them, "
            "and no rank has all of them any more: build the model and its optimizer again, and call "
            "zs.shard() with those."
        )
        kind: Any = type("LostParam", (LostParam,), {"told": told})
        for param_ref in lost:
            param_ref.parameter.__class__ = kind
        log.error("%s", told)
