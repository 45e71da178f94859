"""The only file that registers anything on the user's modules, tensors and optimizers. Everything
registered is undone by `remove`."""

from __future__ import annotations

import copy
import dataclasses
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, TypeVar
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from zeroshard.errors import ModelError, StateError
from zeroshard.life.shard import Param
from zeroshard.life.step import Update
from zeroshard.planning.widening import Widening, cast, has_forward

from . import scaling
from .again import recomputed
from .agree import together
from .late import LateHooks, Strangers
from .live import LiveUnit
from .loading import refuse_state
from .runtime import Runtime
from .state import show_state, take_state, widen_state
from .weights import Weights

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
        self.after_step: Callable[[], None] | None = None
        self.on_inputs: Callable[[Any], None] | None = None  # of forwards that a backward may follow

    def install(self, recompute: list[str]) -> None:
        widening = Widening(self.runtime.options.precision)
        for module in widening.modules(self.model):
            self._replace(module, "forward", widening.forward(module.forward))
        for unit in self.runtime.units:
            self._on_modules(unit)
            for param in unit.params:
                if param.trainable:
                    self._on_leaf(unit, param)
        for module in self.model.modules():
            if isinstance(module, nn.RNNBase):
                # On a GPU it would move the weights that stand in it into a buffer of its own.
                self._replace(module, "flatten_parameters", _leave_in_place)
        self._on_root()
        for update in self.runtime.updates:
            self._on_optimizer(update)
        for unit in self.runtime.units:
            if unit.name in recompute:
                self._recompute(unit)
        self._guard_moves()

    def remove(self) -> None:
        while self._replaced:
            _put_back(*self._replaced.pop())
        while self._handles:
            self._handles.pop().remove()
        while self._ends:
            self._ends.pop()()

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

    def _on_modules(self, unit: LiveUnit) -> None:
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
        runtime = self.runtime

        @_uncompiled
        def before(module: nn.Module, args: Any) -> None:
            runtime.recover()
            runtime.enter(unit)

        @_uncompiled
        def after(module: nn.Module, args: Any, output: Any) -> None:
            runtime.leave(unit, output)

        opened: list[nn.Module] = []

        # In a compiled unit the unit's own hooks have run already, and these would cut the graph at every
        # layer. A frame that was begun compiled may be ended uncompiled: so only what was opened is closed.
        def before_inner(module: nn.Module, args: Any) -> None:
            if not torch.compiler.is_compiling():
                runtime.enter(unit)
                opened.append(module)

        def after_inner(module: nn.Module, args: Any, output: Any) -> None:
            if not torch.compiler.is_compiling() and opened and opened[-1] is module:
                opened.pop()
                runtime.leave(unit, output)

        for module in modules.values():
            own = module is unit.module
            # In front of hooks that are there already, which may look at the parameters (weight_norm, prune).
            self._keep(module.register_forward_pre_hook(before if own else before_inner, prepend=True))
            self._keep(module.register_forward_hook(after if own else after_inner, always_call=True))

    def _on_leaf(self, unit: LiveUnit, param: Param) -> None:
        # Weak: Python cannot see a cycle that goes through a leaf's hooks, and would never free a model that
        # was not closed.
        runtime, its_unit, its_param = ref(self.runtime), ref(unit), ref(param)

        def arrived(leaf: Tensor) -> None:
            live, where, which = runtime(), its_unit(), its_param()
            if live is not None and live.closed:
                live.begin_backward()  # which says that it comes too late
            if live is not None and where is not None and which is not None:
                live.arrived(where, which)

        # Stays after a run, which leaves it to nobody but the graphs of its forwards.
        param.leaf.register_post_accumulate_grad_hook(arrived)
        if self.runtime.transport.size > 1 and self.runtime.faces.mesh is None:
            # Otherwise homes are DTensors, which say themselves that they do not compute with plain tensors.
            self._keep(param.home.register_hook(partial(_strayed, runtime, its_param)))

    def _on_root(self) -> None:
        """At the root: cast the inputs, keep buffers in step, and notice a coming backward."""
        runtime, precision, hooks = self.runtime, self.runtime.options.precision, self
        compute = getattr(torch, precision.compute) if precision is not None else None
        late = LateHooks(runtime.faces, runtime.params, runtime.transport.size)
        strangers = self._watch_for_strangers() if runtime.transport.size > 1 else None

        @_uncompiled
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if runtime.supply.stale:  # once a step
                late.refuse()
            if strangers is not None and torch.is_grad_enabled():
                strangers.refuse(module)
            if hooks.on_inputs is not None and torch.is_grad_enabled():
                hooks.on_inputs((args, kwargs))
            together = runtime.sync and not runtime.pace.apart
            if runtime.buffers and together and module.training and torch.is_grad_enabled():
                with torch.no_grad():
                    # Through `.data`: a backward that is yet to come may have saved them, as in a GAN's two
                    # forward passes.
                    runtime.transport.broadcast("buffers", [buffer.data for buffer in runtime.buffers])
            if compute is None:
                return None
            return cast(args, compute), cast(kwargs, compute)

        @_uncompiled
        def after(module: nn.Module, args: Any, output: Any) -> None:
            if torch.is_grad_enabled():
                for tensor in _tensors(output):
                    if tensor.requires_grad and tensor.grad_fn is not None:
                        tensor.register_hook(lambda grad: runtime.begin_backward())

        self._keep(self.model.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
        self._keep(self.model.register_forward_hook(after))

    def _watch_for_strangers(self) -> Strangers:
        """Torch says of every module and parameter that it is put somewhere; a model that is never closed
        lets go of its hooks when it is gone."""
        strangers = Strangers(self.model, self.runtime.params)
        for register in (
            register_module_module_registration_hook,
            register_module_parameter_registration_hook,
        ):
            self._ends.append(finalize(self, register(strangers.put).remove))
        return strangers

    def _recompute(self, unit: LiveUnit) -> None:
        """A module compiled in place is recomputed with its hooks, because the compiler gives up at a
        checkpoint inside. Of all others only the forward is: the unit is entered again by hand, since a
        compiled layer's hooks would not do it."""
        module, runtime, plain = unit.module, self.runtime, unit.module.forward

        def entered(*args: Any, **kwargs: Any) -> Any:
            runtime.enter(unit)
            try:
                return plain(*args, **kwargs)
            finally:
                runtime.leave(unit)

        compiled = module._compiled_call_impl
        if compiled is None:
            self._replace(module, "forward", recomputed(module, unit.label, entered))
        else:
            self._replace(module, "_compiled_call_impl", partial(checkpoint, compiled, use_reentrant=False))

    # ------------------------------------------------------------------ optimizer

    def _on_optimizer(self, update: Update) -> None:
        optimizer, runtime, hooks = update.optimizer, self.runtime, self
        own_step, own_zero, own_add = optimizer.step, optimizer.zero_grad, optimizer.add_param_group

        options, host, narrow = runtime.options, runtime.host, runtime.options.lands_in_fp16
        unscales = narrow or options.clip_norm is not None or (host is not None and host.steps_parts)
        unscalable = scaling.why_not(options, host is not None and host.updates_early)
        if unscalable is not None or narrow:
            self._replace(optimizer, scaling.SAYS_SO, True)
        if unscalable is None and host is not None:
            scaling.await_copies()

        def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            if unscalable is not None:
                scaling.refuse(optimizer, unscalable)
            scale = scaling.settle(optimizer, narrow) if unscales else 1.0
            if scale is None:
                return None
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            runtime.step(update, own_step, scale)
            if hooks.after_step is not None:
                hooks.after_step()
            return loss

        def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
            runtime.forget(optimizer)
            own_zero(set_to_none)

        def add_param_group(self: Optimizer, group: dict[str, Any]) -> None:
            own_add(group)
            try:
                update.meet_late(runtime.params, self.param_groups[-1]["params"], runtime.transport.size)
            except ModelError:
                self.param_groups.pop()
                raise

        if hasattr(own_step, "_wrapped_by_lr_sched"):
            # A scheduler built before shard() looks for its mark, and would warn that step() was replaced.
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        # Bound methods, because LR schedulers re-bind whatever they find as `optimizer.step`.
        wrapped: dict[str, Callable[..., Any]] = {
            "step": step,
            "zero_grad": zero_grad,
            "add_param_group": add_param_group,
        }
        for name, function in wrapped.items():
            self._replace(optimizer, name, MethodType(function, optimizer))

        def shown(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            if runtime.host is not None:
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

        self._keep(optimizer.register_load_state_dict_post_hook(loaded))

    # ------------------------------------------------------------------ misuse, and loading

    def _guard_moves(self) -> None:
        """`model.to()` and casts would move homes away from the buffers they are views of; loading needs
        rows."""
        model, runtime = self.model, self.runtime

        def refuse(fn: Any, recurse: bool = True) -> Any:
            raise StateError(
                "model.to(), .cuda(), .cpu(), .half() and the like have no effect after zs.shard(): the "
                "parameters are rows of shared buffers. Move or cast the model before shard(), or pass "
                "shard(..., precision=...)."
            )

        for module in model.modules():
            self._replace(module, "zero_grad", partial(self._zeroed, module, module.zero_grad))
            if module is model or module._parameters:
                self._replace(module, "_apply", refuse)
            self._replace(module, "__deepcopy__", partial(self._copied, module))
            self._replace(module, "__reduce_ex__", _refuse_pickle)
        self._keep(model.register_state_dict_pre_hook(lambda *_: runtime.settle()))
        owners = {id(place.module): place.module for p in _on_disk(runtime) for place in p.places}
        for module in owners.values():
            self._keep(module.register_state_dict_post_hook(partial(_show_masters, runtime)))
        weights = Weights(model, runtime)
        for module in model.modules():
            self._keep(module.register_load_state_dict_pre_hook(weights.before))
            self._keep(module.register_load_state_dict_post_hook(weights.after))

    def _zeroed(self, module: nn.Module, own: Callable[[bool], None], set_to_none: bool = True) -> None:
        """`zero_grad` of the model, or of a module: then what was accumulated for others stays."""
        runtime = self.runtime
        if module is self.model:
            runtime.forget()
        elif runtime.unsynced:
            inside = set(map(id, module.modules()))
            for param in runtime.params:
                if any(id(place.module) in inside for place in param.places):
                    param.leaf.grad = None
            runtime.unsynced = any(param.leaf.grad is not None for param in runtime.params)
        own(set_to_none)

    def _copied(self, module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        """`copy.deepcopy`: a plain module of its own. What is ours must not come along: the copy would enter
        the units of the original, and recompute with its weights."""
        self.runtime.settle()
        standing = {id(p) for p in module.parameters()}
        meshed = self.runtime.faces.mesh is not None
        for param in self.runtime.params:
            if id(param.home) in standing and (meshed or param.master is not None):
                raise StateError(
                    f"copy.deepcopy() of a sharded model: `{param.name}` is not whole here. Copy it inside "
                    "`with run.gathered():`, which every rank enters, or before zs.shard()."
                )
        with self._taken_off():
            return copy.deepcopy(module, memo)


def _refuse_pickle(protocol: Any) -> Any:
    raise StateError(
        "a sharded model cannot be pickled, nor saved whole by torch.save(): use run.save(folder), save "
        "model.state_dict(), or call run.close() first."
    )


def _strayed(runtime: ref[Runtime], param: ref[Param], grad: Tensor) -> Tensor:
    live, which = runtime(), param()
    return grad if live is None or which is None else live.strayed(which, grad)


def is_sharded(model: nn.Module) -> bool:
    """Whether the guards of an open run stand on any of its modules."""
    return any("_apply" in vars(module) for module in model.modules())


def _put_back(owner: Any, name: str, before: Any) -> None:
    if before is None:
        owner.__dict__.pop(name, None)
    else:
        owner.__dict__[name] = before


def _on_disk(runtime: Runtime) -> list[Param]:
    """Parameters whose homes may show NaN, since their masters are on the disk."""
    return [param for param in runtime.params if param.master is not None and param.master.on_disk]


def _show_masters(runtime: Runtime, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """After `state_dict`: what a module shows of masters on the disk, unless other tensors stand there."""
    for param in _on_disk(runtime):
        for place in param.places:
            if place.module is module and module._parameters[place.attribute] is param.home:
                state[prefix + place.attribute] = runtime.faces.show(param.read_master(), param.slot)


def _tensors(value: Any, depth: int = 6) -> Iterator[Tensor]:
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
            yield from _tensors(item, depth - 1)
