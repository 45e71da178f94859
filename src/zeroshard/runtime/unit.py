"""A unit at run time: its gather groups, and which parameters stand in its modules; see [Note: what stands in
the modules] in `runtime`.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Iterator, Sequence
from operator import attrgetter, is_
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.errors import StateError
from zeroshard.offload.group import OffloadGroup
from zeroshard.optim.sharded_optimizer import ShardedOptimizer
from zeroshard.params.dtensor import ShardedDTensor
from zeroshard.params.gather_group import GatherGroup
from zeroshard.params.resharded import Away
from zeroshard.params.sharded_param import ShardedParam, ShardedTensors
from zeroshard.params.units import Unit

from .param_writes import inside_forward

_requires_grad, _version = attrgetter("requires_grad"), attrgetter("_version")
_place = Tensor.data_ptr


def after_close() -> StateError:
    return StateError(
        "this backward leads through a forward that was made before run.close(), and the parameters that it "
        "computed with are no longer the model's. Run backward before close(), or make the forward again."
    )


def outside_forward(name: str) -> StateError:
    return StateError(
        f"`{name}` was kept from a forward (in a variable or an attribute), and is used after it: at stage 3 "
        "its memory is lent to others by then. Take it from its module (self.weight) in the forward that "
        "uses it, or keep a copy (.clone())."
    )


class RunningUnit:
    """A unit with its gather groups, and where it is in the current forward or backward."""

    def __init__(self, unit: Unit, gather_groups: Sequence[GatherGroup]) -> None:
        self.name, self.label, self.module = unit.name, unit.label, unit.module
        self.gather_groups = list(gather_groups)
        self.params = [p for b in self.gather_groups for p in b.params]
        self.depth = 0  # entries that have not been left
        self.trainable = sum(p.trainable for p in self.params)
        self._frozen = {id(p) for p in self.params if not p.trainable}
        self.expected = self.trainable  # gradients that have yet to arrive in this backward
        self.sharded = any(not b.resident for b in self.gather_groups)
        self._optimizer_places = _optimizer_places(self.params)
        stand = [
            (optimizer_places, at, sharded_param)
            for optimizer_places, _, sharded_params in self._optimizer_places
            for at, sharded_param in sharded_params.items()
        ]
        self._stand = (
            [optimizer_places for optimizer_places, _, _ in stand],
            [at for _, at, _ in stand],
            [h for _, _, h in stand],
        )
        self._unsharded_params, self._sharded_params = (
            [p.unsharded_param for p in self.params],
            [p.sharded_param for p in self.params],
        )
        self._learning = list(map(_requires_grad, self._unsharded_params))
        self._away = [p.unsharded_param for b in self.gather_groups if not b.resident for p in b.params]
        told = [
            sharded_param.writes
            for sharded_param in self._sharded_params
            if isinstance(sharded_param, ShardedDTensor)
        ]
        self._writes = (
            told[0] if len(told) == len(self._sharded_params) > 0 else None
        )  # tells of new settings
        self._settings = 0
        # Where plain sharded parameters and unsharded parameters are; and how often leaves were written of
        # which there are copies: from
        # those nothing goes sharded parameter, or peers may have read them before or after.
        self._plain = [
            sharded_param
            for sharded_param in self._sharded_params
            if ShardedTensors.local(sharded_param) is sharded_param
        ]
        self._sharded_param_places = list(map(_place, self._plain))
        self._unsharded_param_places = list(map(_place, self._unsharded_params))
        copied = [
            b for b in self.gather_groups if not b.resident or b.refreshes or b.transport_buffer is not None
        ]
        self._lost = [p.unsharded_param for b in copied for p in b.params]
        self._versions: list[int] = []  # when the forward began
        self.parts: list[OffloadGroup] = []  # updates on the host that its weights wait for
        self._entries: dict[nn.Module, int] = {}  # since the last backward
        self._again: set[nn.Module] = set()  # some of its entries will be made again in the next

    def follow_sharded_params(self) -> None:
        """Takes over what the user has set as `requires_grad` on sharded parameters. Unfreezing a parameter
        without a bucket raises."""
        optimizer_places, names, sharded_params = self._stand
        if not all(map(is_, map(dict.get, optimizer_places, names), sharded_params)):
            raise self._replaced()
        if self._plain and list(map(_place, self._plain)) != self._sharded_param_places:
            raise inside_forward(f"a parameter of {self.label}")  # before it, `ParamWrites` has seen to that
        settings = self._writes.settings if self._writes is not None else -1
        if settings == self._settings:
            return
        learning = list(map(_requires_grad, self._sharded_params))
        for param in self.params if learning != self._learning else ():
            if param.unsharded_param.requires_grad is not param.sharded_param.requires_grad:
                if id(param) in self._frozen:
                    raise StateError(
                        f"`{param.name}` was frozen when zs.shard() was called, so its gradient has no "
                        "place. Freeze it after shard() instead of before: then it can be thawed."
                    )
                param.unsharded_param.requires_grad_(param.sharded_param.requires_grad)
        self._learning, self._settings = learning, max(settings, 0)

    def _replaced(self) -> StateError:
        """A forward is about to put unsharded parameters where something else than sharded ones stands."""
        found = zip(*self._stand, strict=True)
        gone = next(mine for places, at, mine in found if places.get(at) is not mine)
        name = next(p.name for p in self.params if p.sharded_param is gone)
        return StateError(
            f"`{name}` in the model is not what zs.shard() put there, and no forward would use it. "
            "It was replaced (by assignment, or load_state_dict(assign=True)), or this forward is "
            "inside run.gathered() or torch.func.functional_call(). Write values through "
            "run.gathered(write=True) and run the model after the block; run.kept_full() keeps what "
            "is gathered for several forwards; call functions on a copy made inside gathered()."
        )

    def stand_unsharded_params(self) -> None:
        for optimizer_places, unsharded_params, _ in self._optimizer_places:
            optimizer_places.update(unsharded_params)

    def begin(self, forward: bool) -> None:
        """It is whole, and its modules are about to compute with its unsharded parameters; in a `forward`,
        or recomputed in backward, when they stand there already."""
        for unsharded_param in self._away:
            unsharded_param.__class__ = nn.Parameter
        if forward:
            self.stand_unsharded_params()
            self._versions = list(map(_version, self._lost))  # a step counts as a write, too; see `changes`
            if self.sharded:
                self._unsharded_param_places = list(map(_place, self._unsharded_params))

    def end(self) -> None:
        """They have computed, in a forward or recomputed."""
        for unsharded_param in self._away:
            unsharded_param.__class__ = Away

    def end_forward(self, output: Any, kept: bool) -> StateError | None:
        """They have computed in a forward, perhaps for the last time in it. What was done that must not be;
        `kept`: it stays whole."""
        kept = kept or not self.sharded
        fault = self._fault(output, kept)
        self.stand_sharded_params()
        self.end()
        if not kept:
            self.release()
        return fault

    def used_again(self, module: nn.Module | None, learns: bool) -> list[ShardedParam]:
        """A forward enters it, at this module. Of which parameters backward will have more than one gradient,
        one after another; see [Note: used again] in `runtime`. `learns`: the forward as a whole does."""
        module = self.module if module is None else module
        self._entries[module] = count = self._entries.get(module, 0) + 1
        if learns and not torch.is_grad_enabled() and inside_function():
            self._again.add(module)
        if count < 2 or module not in self._again:
            return []
        if module is self.module:
            for part in self.parts:
                if part.held is None:
                    part.update.await_end()
        inner = set(module.modules())
        return [p for p in self.params if p.trainable and any(place.module in inner for place in p.places)]

    def end_backward(self, kept: bool) -> None:
        """All gradients are to come again, and it was not entered since. `kept`: it stays whole."""
        self.expected = self.trainable
        self._entries.clear()
        self._again.clear()
        if self.depth == 0:  # else this backward was one inside a forward, which goes on
            self.stand_sharded_params()
            if not kept:
                self.release()

    def _fault(self, output: Any, kept: bool) -> StateError | None:
        """A forward has ended: what it may have done to leaves, or with them."""
        if list(map(_place, self._unsharded_params)) != self._unsharded_param_places:
            for gather_group in self.gather_groups:
                gather_group.rejoin()
            return inside_forward(f"a parameter of {self.label}")
        if self._lost:
            versions, before = list(map(_version, self._lost)), self._versions
            if versions != before:
                written = [now != old for now, old in zip(versions, before, strict=True)].index(True)
                return inside_forward(f"`{self._name_of(self._lost[written])}`")
        return None if kept else self._returned(output)

    def _returned(self, output: Any) -> StateError | None:
        """It is about to be let go: what a forward returns of its memory would turn to NaN."""
        lent = [b.full for b in self.gather_groups if not b.resident and b.full is not None]
        memory = set(map(_memory, lent))
        for tensor in tensors_in(output) if memory else ():
            if _memory(tensor) in memory:
                return StateError(
                    f"the forward of {self.label} returned a parameter, or a view of one, of shape "
                    f"{tuple(tensor.shape)}: stage 3 lets it go when that forward ends. Return a copy "
                    "(.clone()), or name a unit that holds whoever uses it, too (units=)."
                )
        return None

    def _name_of(self, unsharded_param: Tensor) -> str:
        return next(p.name for p in self.params if p.unsharded_param is unsharded_param)

    def stand_sharded_params(self) -> None:
        for optimizer_places, _, sharded_params in self._optimizer_places:
            optimizer_places.update(sharded_params)

    def release(self) -> None:
        for gather_group in self.gather_groups:
            gather_group.release()

    def abandon(self) -> None:
        """As before its first entry."""
        self.depth = 0
        self.stand_sharded_params()
        self.end()
        self.release()


def inside_function() -> bool:
    """Whether this forward is made inside of a `torch.autograd.Function`, as a reentrant checkpoint does."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_argcount and code.co_varnames[0] == "ctx":
            return True
        frame = frame.f_back
    return False


ModuleParams = dict[str, nn.Parameter | None]
PlacedParams = tuple[ModuleParams, ModuleParams, ModuleParams]


def wants_all() -> bool:
    """Whether the backward that ends is to give every parameter its gradient: `loss.backward()`, and neither
    `torch.autograd.grad()` nor one with `inputs=`. Torch tells no hook, but the caller's stack does; on a GPU
    backward may end in a thread of torch's."""
    asked = _asked_by()
    return asked is not None and asked.f_code is _BACKWARD and not asked.f_locals.get("inputs")


def accumulates() -> bool:
    """Whether the backward under way adds to `.grad`, and does not return gradients."""
    asked = _asked_by()
    return asked is None or asked.f_code is _BACKWARD


_GRAD, _BACKWARD = torch.autograd.grad.__code__, torch.autograd.backward.__code__


def _asked_by() -> FrameType | None:
    """Who has called for a backward."""
    stacks = sys._current_frames()
    for frame in (stacks.pop(threading.get_ident()), *stacks.values()):
        at: FrameType | None = frame
        while at is not None:
            if at.f_code is _GRAD or at.f_code is _BACKWARD:
                return at
            at = at.f_back
    return None


def _optimizer_places(
    params: Sequence[ShardedParam],
) -> list[PlacedParams]:
    """Per module where parameters stand: its own parameters, and the unsharded parameters and sharded
    parameters to put there."""
    found: dict[int, PlacedParams] = {}
    for param in params:
        for place in param.places:
            optimizer_places = place.module._parameters
            _, unsharded_params, sharded_params = found.setdefault(
                id(optimizer_places), (optimizer_places, {}, {})
            )
            unsharded_params[place.attribute], sharded_params[place.attribute] = (
                param.unsharded_param,
                param.sharded_param,
            )
    return list(found.values())


def drop_accumulated(params: Sequence[ShardedParam], others: Sequence[ShardedOptimizer]) -> bool:
    """Drop what was accumulated without synchronisation, but for parameters that `others` update. Whether
    anything is left."""
    for param in params:
        if not any(id(param.sharded_param) in update.params for update in others):
            param.unsharded_param.grad = None
    return any(param.unsharded_param.grad is not None for param in params)


def unsharded_param_of(view: Tensor, trainable: bool) -> nn.Parameter:
    """An unsharded parameter over a gather group's memory. Through `.data`, so that refilling the buffer does
    not count as changing the unsharded parameter in place."""
    return nn.Parameter(view.data, requires_grad=trainable)


def tensors_in(value: Any, depth: int = 6) -> Iterator[Tensor]:
    """The tensors in whatever a model returns: nested containers, dataclasses, and objects with
    attributes."""
    if isinstance(value, Tensor):
        yield value
    elif depth:
        if isinstance(value, dict):
            inner: Any = value.values()
        elif isinstance(value, (list, tuple, set)):
            inner = value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            inner = [getattr(value, f.name) for f in dataclasses.fields(value)]
        elif hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)):
            inner = vars(value).values()
        else:
            inner = ()
        for item in inner:
            yield from tensors_in(item, depth - 1)


def _memory(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a wrapper without memory of its own
        return -1
