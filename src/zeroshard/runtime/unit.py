"""Units at run time, and the forward and the backward that go through them: which parameters stand in their
modules ([Note: what stands in the modules] in `runtime`), and what a forward must not do to them.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Iterator, Sequence
from operator import attrgetter, is_, ne
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import TransformType

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
_data_ptr = Tensor.data_ptr


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


def inside_no_sync() -> StateError:
    return StateError(
        "optimizer.step() inside run.no_sync(): gradients of this rank alone are not the gradient. "
        "Leave the block before the last micro-batch's backward, then step."
    )


def never_synchronised() -> StateError:
    return StateError(
        "gradients accumulated under run.no_sync() were never synchronised: run the last "
        "micro-batch's backward outside of the block before optimizer.step()."
    )


def refuse_transform(kind: TransformType) -> None:
    """Inside of `torch.func.grad` and its like every tensor that is made is one of theirs, without memory."""
    if kind != TransformType.Vmap:
        raise StateError(
            "a forward inside torch.func (grad, vjp, jvp, jacrev, hessian) of a sharded model: parameters "
            "cannot be gathered there. Use torch.autograd.grad() or torch.autograd.functional, or transform "
            "a copy of the model made inside `with run.gathered():`."
        )


class ParamsInModules:
    """What stands in a unit's modules: the sharded or the unsharded parameters."""

    def __init__(self, label: str, gather_groups: Sequence[GatherGroup]) -> None:
        self._label = label
        params = self._params = [p for group in gather_groups for p in group.params]
        # Unsharded parameters whose memory is there only while the unit computes.
        self._lent = [p.unsharded_param for g in gather_groups if not g.rests.resident for p in g.params]
        self.writes = ForwardWrites(label, gather_groups)
        self._modules = _params_by_module(params)
        standing = [
            (in_module, attribute, sharded_param)
            for in_module, _, sharded_params in self._modules
            for attribute, sharded_param in sharded_params.items()
        ]
        # Where each sharded parameter stands, in three lists: so that a check is one pass of C.
        self._in_module = [in_module for in_module, _, _ in standing]
        self._attributes = [attribute for _, attribute, _ in standing]
        self._standing = [sharded_param for _, _, sharded_param in standing]
        self._plain = [
            p.sharded_param for p in params if ShardedTensors.local(p.sharded_param) is p.sharded_param
        ]
        self._memory = list(map(_data_ptr, self._plain))

    def check(self) -> None:
        """A forward is about to replace them: they are those that `zs.shard()` put there, in their memory."""
        if not all(map(is_, map(dict.get, self._in_module, self._attributes), self._standing)):
            raise self._replaced()
        if self._plain and list(map(_data_ptr, self._plain)) != self._memory:
            # Of what was written before the forward, `ParamWrites` has taken notice.
            raise inside_forward(f"a parameter of {self._label}")

    def _replaced(self) -> StateError:
        standing = zip(self._in_module, self._attributes, self._standing, strict=True)
        gone = next(own for in_module, attribute, own in standing if in_module.get(attribute) is not own)
        name = next(p.name for p in self._params if p.sharded_param is gone)
        return StateError(
            f"`{name}` in the model is not what zs.shard() put there, and no forward would use it. "
            "It was replaced (by assignment, or load_state_dict(assign=True)), or this forward is "
            "inside run.gathered() or torch.func.functional_call(). Write values through "
            "run.gathered(write=True) and run the model after the block; run.kept_full() keeps what "
            "is gathered for several forwards; call functions on a copy made inside gathered()."
        )

    def begin(self, forward: bool) -> None:
        """The unit is gathered and about to compute: in a `forward`, or recomputed in a backward, when the
        unsharded parameters stand there already."""
        for unsharded_param in self._lent:
            unsharded_param.__class__ = nn.Parameter
        if forward:
            self.put_unsharded()
            self.writes.begin()

    def put_unsharded(self) -> None:
        for in_module, unsharded_params, _ in self._modules:
            in_module.update(unsharded_params)

    def put_sharded(self) -> None:
        for in_module, _, sharded_params in self._modules:
            in_module.update(sharded_params)

    def end(self) -> None:
        """The unit has computed: whoever uses a lent parameter from now on is to say so; see `Away`."""
        for unsharded_param in self._lent:
            unsharded_param.__class__ = Away


class ForwardWrites:
    """Notices what a forward writes into unsharded parameters that are copies: it would be lost when the unit
    is released, or peers may have read the parameter before or after."""

    def __init__(self, label: str, gather_groups: Sequence[GatherGroup]) -> None:
        self._label, self._gather_groups = label, gather_groups
        self._params = [p for group in gather_groups for p in group.params]
        self._unsharded_params = [p.unsharded_param for p in self._params]
        self._memory = list(map(_data_ptr, self._unsharded_params))
        self._moves = any(not group.rests.resident for group in gather_groups)  # to the buffer that is lent
        copied = [
            group
            for group in gather_groups
            if not group.rests.resident or group.own.refreshes or group.memory.transport_buffer is not None
        ]
        self._copies = [p for group in copied for p in group.params]
        self._counted = [p.unsharded_param for p in self._copies]
        self._versions: list[int] = []

    def begin(self) -> None:
        """The unit is about to compute in a forward. An optimizer's step counts as a write, too; see
        `VersionCounters`."""
        self._versions = list(map(_version, self._counted))
        if self._moves:
            self._memory = list(map(_data_ptr, self._unsharded_params))

    def fault(self) -> StateError | None:
        """The unit has computed: what it has written that it must not."""
        if list(map(_data_ptr, self._unsharded_params)) != self._memory:
            for gather_group in self._gather_groups:
                gather_group.rejoin()
            return inside_forward(f"a parameter of {self._label}")
        versions = list(map(_version, self._counted))
        if versions == self._versions:
            return None
        written = list(map(ne, versions, self._versions)).index(True)
        return inside_forward(f"`{self._copies[written].name}`")


class LearningParams:
    """Follows `requires_grad`, which is the user's to change on sharded parameters that have a bucket."""

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        self._params = params
        self._sharded_params = [p.sharded_param for p in params]
        self._learning = [p.unsharded_param.requires_grad for p in params]
        self._frozen = {id(p) for p in params if not p.trainable}  # when `zs.shard()` was called
        writes = [p.writes for p in self._sharded_params if isinstance(p, ShardedDTensor)]
        # Sharded DTensors count changes of settings; of others each is looked at.
        self._writes = writes[0] if len(writes) == len(params) > 0 else None
        self._settings = 0  # changes that are known

    def follow(self) -> None:
        """Give the unsharded parameters the `requires_grad` of the sharded ones."""
        settings = self._writes.settings if self._writes is not None else -1
        if settings == self._settings:
            return
        learning = list(map(_requires_grad, self._sharded_params))
        changed = learning != self._learning
        for param, learns in zip(self._params, learning, strict=True) if changed else ():
            if param.unsharded_param.requires_grad is not learns:
                if id(param) in self._frozen:
                    raise StateError(
                        f"`{param.name}` was frozen when zs.shard() was called, so its gradient has no "
                        "place. Freeze it after shard() instead of before: then it can be thawed."
                    )
                param.unsharded_param.requires_grad_(learns)
        self._learning, self._settings = learning, max(settings, 0)


class UnitEntries:
    """Counts how often a unit's modules were entered since the last backward; see [Note: used again] in
    `runtime`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._counts: dict[nn.Module, int] = {}
        self._recomputed: set[nn.Module] = set()  # entered in a forward that backward will make again

    def enter(self, module: nn.Module | None, learns: bool) -> nn.Module | None:
        """A forward enters the unit at this module, or at its own. The module, if backward will give its
        parameters more than one gradient, one after another. `learns`: the forward as a whole does."""
        module = self._module if module is None else module
        self._counts[module] = count = self._counts.get(module, 0) + 1
        if learns and not torch.is_grad_enabled() and inside_function():
            self._recomputed.add(module)
        return module if count > 1 and module in self._recomputed else None

    def clear(self) -> None:
        self._counts.clear()
        self._recomputed.clear()


class RunningUnit:
    """A unit with its gather groups, and where it is in the current forward or backward."""

    def __init__(self, unit: Unit, gather_groups: Sequence[GatherGroup]) -> None:
        self.name, self.label, self.module = unit.name, unit.label, unit.module
        self.gather_groups = list(gather_groups)
        self.params = [p for group in self.gather_groups for p in group.params]
        self.param_of = {id(p.unsharded_param): p for p in self.params}
        self.depth = 0  # entries that have not been left
        self.trainable = sum(p.trainable for p in self.params)
        self.expected = self.trainable  # gradients that have yet to arrive in this backward
        self.sharded = any(not group.rests.resident for group in self.gather_groups)
        self.in_modules = ParamsInModules(self.label, self.gather_groups)
        self.learning = LearningParams(self.params)
        self.entries = UnitEntries(self.module)
        self.offload_groups: list[OffloadGroup] = []  # updates on the host that its weights wait for

    def used_again(self, module: nn.Module) -> list[ShardedParam]:
        """A forward has entered it at this module more than once, to be recomputed in backward. The
        parameters that will have more than one gradient."""
        if module is self.module:
            for group in self.offload_groups:
                if group.held is None:
                    group.update.await_end()
        inner = set(module.modules())
        return [p for p in self.params if p.trainable and any(place.module in inner for place in p.places)]

    def end_forward(self, output: Any, kept: bool) -> StateError | None:
        """Its modules have computed in a forward, perhaps for the last time in it. Returns what was done that
        must not be. `kept`: it stays whole."""
        kept = kept or not self.sharded
        fault = self.in_modules.writes.fault() or (None if kept else self._returned(output))
        self.in_modules.put_sharded()
        self.in_modules.end()
        if not kept:
            self.release()
        return fault

    def end_backward(self, kept: bool) -> None:
        """All gradients are to come again, and it was not entered since. `kept`: it stays whole."""
        self.expected = self.trainable
        self.entries.clear()
        if self.depth == 0:  # else this backward was one inside a forward, which goes on
            self.in_modules.put_sharded()
            if not kept:
                self.release()

    def _returned(self, output: Any) -> StateError | None:
        """It is about to be released: what a forward returns of its memory would turn to NaN."""
        pool = self.gather_groups[0].pool
        for tensor in tensors_in(output):
            if pool.lender_of(tensor) in self.gather_groups:
                return StateError(
                    f"the forward of {self.label} returned a parameter, or a view of one, of shape "
                    f"{tuple(tensor.shape)}: stage 3 lets it go when that forward ends. Return a copy "
                    "(.clone()), or name a unit that holds whoever uses it, too (units=)."
                )
        return None

    def release(self) -> None:
        for gather_group in self.gather_groups:
            gather_group.release()

    def abandon(self) -> None:
        """As before its first entry."""
        self.depth = 0
        self.in_modules.put_sharded()
        self.in_modules.end()
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


def _params_by_module(params: Sequence[ShardedParam]) -> list[PlacedParams]:
    """Per module where parameters stand: its own dict of parameters, and the unsharded and the sharded ones
    to put there."""
    by_module: dict[int, PlacedParams] = {}
    for param in params:
        for place in param.places:
            in_module = place.module._parameters
            _, unsharded, sharded = by_module.setdefault(id(in_module), (in_module, {}, {}))
            unsharded[place.attribute], sharded[place.attribute] = param.unsharded_param, param.sharded_param
    return list(by_module.values())


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
