"""Registers everything on the user's modules, tensors and optimizers; `remove` undoes it all. What then runs
in a step is in `forward`."""

from __future__ import annotations

import copy
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, TypeVar
from weakref import finalize, ref

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from zeroshard.errors import StateError
from zeroshard.optim.sharded_optimizer import ShardedOptimizer
from zeroshard.params.sharded_param import ShardedParam
from zeroshard.params.widening import Widening, has_forward
from zeroshard.runtime import clipping

from .asked_gradients import watch
from .forward import ForwardMethods, OptimizerCalls, UnitCalls, has_synced, recomputed
from .full_state import LoadedWeights
from .loading import refuse_state
from .model_changes import ModuleMoves
from .optimizer_state import show_state, take_state, widen_state
from .rank_agreement import together
from .runtime import Runtime, arrived, strayed
from .second_backward import second_backward
from .unit import RunningUnit
from .wrapper_words import tell_of_wrappers

_MODES = ("train", "eval")  # of schedule-free optimizers
F = TypeVar("F", bound=Callable[..., Any])


def _leave_in_place() -> None:
    """Instead of `nn.RNNBase.flatten_parameters`."""


def _uncompiled(function: F) -> F:
    """Hooks run outside of compiled graphs: they change what stands in the modules."""
    return typing.cast(F, torch.compiler.disable(function))


class Hooks:
    """Connects a model and its optimizers to a runtime."""

    def __init__(self, model: nn.Module, runtime: Runtime) -> None:
        self.model, self.runtime = model, runtime
        self._handles: list[Any] = []
        self._replaced: list[tuple[Any, str, Any]] = []  # owner, name, and what stood there before
        self._ends: list[Callable[[], object]] = []  # take away what is registered with torch itself
        self.entries = ForwardMethods(model, runtime)
        self.second = second_backward(runtime)
        if self.second is not None:
            self.entries.follow(self.second.end_forward)

    def install(self, recompute: list[str]) -> None:
        widening = Widening(self.runtime.options.precision)
        for module in widening.modules(self.model):
            self._replace(module, "forward", widening.forward(module.forward))
        for unit in self.runtime.units:
            self._on_modules(unit)
            self._on_params(unit)
        for module in self.model.modules():
            if isinstance(module, nn.RNNBase):
                # On a GPU it would move the weights that stand in it into a buffer of its own.
                self._replace(module, "flatten_parameters", _leave_in_place)
        self._watch_for_strangers()
        if any(unit.sharded for unit in self.runtime.units):
            self._ends.append(finalize(self, self.runtime.saved.watch()))
        self._ends.append(finalize(self, watch(self.runtime)))
        tell_of_wrappers(lambda module: hooks_of(module) is not None)
        self._on_root()
        for update in self.runtime.updates:
            self._on_optimizer(update)
        for unit in self.runtime.units:
            plain = unit.module.forward
            if unit.name in recompute:
                self._recompute(unit)
            if self.second is not None and unit.name in self.second.names:
                self._replace(unit.module, "forward", self.second.around(unit, plain, unit.module.forward))
        self._guard_moves()

    def remove(self) -> None:
        while self._replaced:
            _put_back(*self._replaced.pop())
        while self._handles:
            self._handles.pop().remove()
        while self._ends:
            self._ends.pop()()
        self.entries.let_go()

    def _keep(self, handle: Any) -> None:
        self._handles.append(handle)

    def _replace(self, owner: Any, name: str, function: Any) -> None:
        """An attribute of one object alone, in place of its class's."""
        self._replaced.append((owner, name, vars(owner).get(name)))
        vars(owner)[name] = function

    @contextmanager
    def _taken_off(self) -> Iterator[None]:
        """Nothing of ours is registered for the length of a block."""
        found = [(handle.hooks_dict_ref(), handle.id) for handle in self._handles]
        full = [
            (hooks, list(hooks.items())) for hooks in {id(h): h for h, _ in found if h is not None}.values()
        ]
        stood = [(owner, name, vars(owner)[name]) for owner, name, _ in self._replaced]
        for hooks, number in found:
            if hooks is not None:
                hooks.pop(number, None)
        for owner, name, before in reversed(self._replaced):
            _put_back(owner, name, before)
        try:
            yield
        finally:
            for hooks, items in full:
                hooks.clear()
                hooks.update(items)
            for owner, name, function in stood:
                vars(owner)[name] = function

    # ------------------------------------------------------------------ modules

    def _on_modules(self, unit: RunningUnit) -> None:
        """Enter and leave at the unit's own module, and for the root and for gathered units at every module
        that owns a parameter.

        The latter make methods other than `forward`, and recomputation of a part of a unit, work like a call
        of the unit. Units that are always whole need no such call in backward, and blocks are entered through
        their `forward`.
        """
        modules = {id(unit.module): unit.module}
        # Without a forward its layers are called from outside.
        if unit.sharded or not has_forward(unit.module) or not unit.name:
            modules |= {id(pl.module): pl.module for p in unit.params for pl in p.places}
        calls = UnitCalls(unit, self.entries)
        before, after = _uncompiled(calls.before), _uncompiled(calls.after)
        for module in modules.values():
            own = module is unit.module
            # In front of hooks that are there already, which may look at the parameters (weight_norm, prune).
            self._keep(module.register_forward_pre_hook(before if own else calls.before, prepend=True))
            self._keep(module.register_forward_hook(after if own else calls.after, always_call=True))

    def _on_params(self, unit: RunningUnit) -> None:
        # Weak: Python cannot see a cycle that goes through an unsharded parameter's hooks, and would never
        # free a model that was not closed.
        runtime = ref(self.runtime)
        landed = partial(arrived, runtime, ref(unit))
        for param in unit.params:
            if not param.trainable:
                continue
            # Stays after a run, which leaves it to nobody but the graphs of its forwards.
            param.unsharded_param.register_post_accumulate_grad_hook(landed)
            if self.runtime.transport.size > 1:
                self._keep(GradientHook(param.sharded_param, partial(strayed, runtime, ref(param))))

    def _on_root(self) -> None:
        """Calls from outside come through the root's forward, through methods that were registered, or
        through `generate` of transformers, inside of which ranks may stop at different lengths."""
        self._on_entry(self.model)
        for module in self.model.modules():
            if has_synced(module):
                self.register(module, "generate")

    def _on_entry(self, module: nn.Module) -> None:
        """A module that the loop calls itself."""
        before, after = _uncompiled(self.entries.begin), _uncompiled(self.entries.after)
        self.entries.known.add(id(module))
        self._keep(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
        self._keep(module.register_forward_hook(after, with_kwargs=True, always_call=True))

    def register(self, module: nn.Module, name: str) -> None:
        """A method that the loop calls in place of a forward: see `register_forward_method`."""
        if name == "forward":
            if id(module) not in self.entries.known:
                self._on_entry(module)
            return
        own = getattr(module, name)
        if getattr(own, "__func__", own) in self.entries.methods:
            return
        method = self.entries.method(module, own)
        self._replace(module, name, method)

    def _watch_for_strangers(self) -> None:
        """Torch says of every module and parameter that it is put somewhere; a model that is never closed
        lets go of its hooks when it is gone."""
        strangers = self.entries.strangers
        if strangers is None:
            return
        for register in (
            register_module_module_registration_hook,
            register_module_parameter_registration_hook,
        ):
            self._ends.append(finalize(self, register(strangers.put).remove))

    def _recompute(self, unit: RunningUnit) -> None:
        """A module compiled in place is recomputed with its hooks, because the compiler gives up at a
        checkpoint inside. Of all others only the forward is: the unit is entered again by hand, since a
        compiled layer's hooks would not do it."""
        module = unit.module
        entered = UnitCalls(unit, self.entries).around(module.forward)
        compiled = module._compiled_call_impl
        if compiled is None:
            self._replace(module, "forward", recomputed(module, unit.label, entered))
        else:
            self._replace(module, "_compiled_call_impl", partial(checkpoint, compiled, use_reentrant=False))

    # ------------------------------------------------------------------ optimizer

    def _on_optimizer(self, update: ShardedOptimizer) -> None:
        # Bound methods, because LR schedulers re-bind whatever they find as `optimizer.step`.
        optimizer, calls = update.optimizer, OptimizerCalls(update, self.entries)
        if calls.unscales_itself:
            self._replace(optimizer, clipping.SAYS_SO, True)
        wrapped = {"step": calls.step(), **calls.around_step()}
        for name in _MODES:
            if callable(getattr(optimizer, name, None)):
                wrapped[name] = calls.mode(getattr(optimizer, name))
        for name, function in wrapped.items():
            self._replace(optimizer, name, MethodType(function, optimizer))
        self._on_state(update)

    def _on_state(self, update: ShardedOptimizer) -> None:
        """State dicts, out and in."""
        optimizer, runtime = update.optimizer, self.runtime

        def shown(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            if runtime.host is not None and update.whole is None:
                runtime.host.show_decoded(optimizer, state)
            return show_state(update, state)

        given: list[dict[str, Any]] = []

        def taken(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            runtime.settle()
            look = partial(refuse_state, update, state)
            together(runtime.transport, "optimizer.load_state_dict()", look)
            runtime.before_change()
            given[:] = [take_state(update, state)]
            return given[0]

        self._keep(optimizer.register_state_dict_pre_hook(lambda _: runtime.settle()))
        self._keep(optimizer.register_state_dict_post_hook(shown))
        self._keep(optimizer.register_load_state_dict_pre_hook(taken))

        def loaded(_: Optimizer) -> None:
            if runtime.host is not None:
                runtime.host.take_loaded(optimizer, given[0])
            widen_state(update, given.pop())
            update.point_elsewhere()

        self._keep(optimizer.register_load_state_dict_post_hook(loaded))

    # ------------------------------------------------------------------ misuse, and loading

    def _guard_moves(self) -> None:
        """`model.to()` and casts that change anything would move sharded parameters away from the buffers
        they are views of; loading needs rows."""
        model, runtime = self.model, self.runtime

        moves = ModuleMoves(runtime.params)
        self._replace(model, "_is_accelerate_prepared", True)  # it puts no wrapper around such a one
        for module in model.modules():
            self._replace(module, "_ddp_params_and_buffers_to_ignore", _NeedsNoWrapper())
            self._replace(module, "zero_grad", partial(self._zeroed, module, module.zero_grad))
            if module is model or module._parameters:
                self._replace(module, "_apply", _uncompiled(partial(moves.apply, module)))
            self._replace(module, "__deepcopy__", partial(self._copied, module))
            self._replace(module, "__reduce_ex__", _refuse_pickle)
        self._keep(model.register_state_dict_pre_hook(lambda *_: runtime.settle()))
        owners = {id(place.module): place.module for p in _on_disk(runtime) for place in p.places}
        for module in owners.values():
            self._keep(module.register_state_dict_post_hook(partial(_show_masters, runtime)))
        weights = LoadedWeights(model, runtime)
        for module in model.modules():
            self._keep(module.register_load_state_dict_pre_hook(weights.before))
            self._keep(module.register_load_state_dict_post_hook(weights.after))

    def _zeroed(self, module: nn.Module, own: Callable[..., None], *args: Any, **keywords: Any) -> None:
        """`zero_grad` of the model, or of a module: then what was accumulated for others stays."""
        runtime = self.runtime
        if module is self.model:
            runtime.forget()
        elif runtime.unsynced:
            inside = set(map(id, module.modules()))
            for param in runtime.params:
                if any(id(place.module) in inside for place in param.places):
                    param.unsharded_param.grad = None
            runtime.unsynced = any(param.unsharded_param.grad is not None for param in runtime.params)
        own(*args, **keywords)

    def _copied(self, module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        """`copy.deepcopy`: a plain module of its own. What is ours must not come along: the copy would enter
        the units of the original, and recompute with its weights."""
        self.runtime.settle()
        standing = {id(p) for p in module.parameters()}
        meshed = self.runtime.sharded_tensors.mesh is not None
        for param in self.runtime.params:
            if id(param.sharded_param) in standing and (meshed or param.master is not None):
                raise StateError(
                    f"copy.deepcopy() of a sharded model: `{param.name}` is not whole here. Copy it inside "
                    "`with run.gathered():`, which every rank enters, or before zs.shard()."
                )
        with self._taken_off():
            return copy.deepcopy(module, memo)


class GradientHook:
    """A hook on the gradient of a tensor, which can be taken off. Torch's own handle takes some 300 bytes,
    and there is one for every parameter."""

    __slots__ = ("_hooks", "id")

    def __init__(self, tensor: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor]) -> None:
        handle = tensor.register_hook(hook)
        self._hooks: dict[int, Any] | None = handle.hooks_dict_ref()
        self.id = handle.id

    def hooks_dict_ref(self) -> dict[int, Any] | None:
        return self._hooks

    def remove(self) -> None:
        if self._hooks is not None:
            self._hooks.pop(self.id, None)


class _NeedsNoWrapper:
    """What DistributedDataParallel asks of a module that it is about to wrap."""

    def __iter__(self) -> Iterator[str]:
        raise StateError(
            "DistributedDataParallel around a sharded model: zs.shard() reduces its gradients already. Use "
            "the model as it is; run.no_sync() takes the place of that of the wrapper, and a wrapped model "
            "can be passed to zs.shard() instead."
        )


def _refuse_pickle(protocol: Any) -> Any:
    raise StateError(
        "a sharded model cannot be pickled, nor saved whole by torch.save(): use run.save(folder), save "
        "model.state_dict(), or call run.close() first."
    )


def hooks_of(module: nn.Module) -> Hooks | None:
    """Those of the open run to which a module belongs."""
    copies = vars(module).get("__deepcopy__")
    hooks = getattr(getattr(copies, "func", None), "__self__", None)
    return hooks if isinstance(hooks, Hooks) else None


def is_sharded(model: nn.Module) -> bool:
    """Whether the guards of an open run stand on any of its modules."""
    return any("_apply" in vars(module) for module in model.modules())


def _put_back(owner: Any, name: str, before: Any) -> None:
    if before is None:
        owner.__dict__.pop(name, None)
    else:
        owner.__dict__[name] = before


def _on_disk(runtime: Runtime) -> list[ShardedParam]:
    """Parameters whose sharded parameters may show NaN, since their masters are on the disk."""
    return [param for param in runtime.params if param.master is not None and param.master.on_disk]


def _show_masters(runtime: Runtime, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """After `state_dict`: what a module shows of masters on the disk, unless other tensors stand there."""
    for param in _on_disk(runtime):
        for place in param.places:
            if place.module is module and module._parameters[place.attribute] is param.sharded_param:
                state[prefix + place.attribute] = runtime.sharded_tensors.show(
                    param.read_master(), param.slot
                )
