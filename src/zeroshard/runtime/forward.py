"""What is done where the loop calls into a sharded model: in the root's forward, in methods that were
registered, and where ranks compare their batches and steps.

What belongs to the beginning of a forward (inputs are cast, buffers kept in step, late changes found) is done
there. A part of the model that the loop calls past them is an entry of its own: the parameters of its units
are brought all the same, but nobody casts for it, and where statistics would drift apart it is refused.

A unit's forward that is computed again in backward must leave things behind once: running statistics of norms
stay as the first forward made them. And what it was given must still be there: a forward that writes its
inputs in place would begin with what it wrote. Torch finds that out in backward, and does not say whose
forward it was.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from zeroshard.comm import Transport
from zeroshard.errors import ModelError, StateError
from zeroshard.optim.probe import numbers_of
from zeroshard.optim.sharded_optimizer import ShardedOptimizer
from zeroshard.params.units import unit_of
from zeroshard.params.widening import cast
from zeroshard.runtime import clipping

from .model_changes import LateHooks, LateParams
from .runtime import Runtime
from .unit import RunningUnit, tensors_in


def recomputed(module: nn.Module, label: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a unit that keeps nothing but its inputs for backward."""
    kept = partial(checkpoint, forward, use_reentrant=False)
    if tracks_statistics(module):
        kept = partial(kept, context_fn=lambda: (nullcontext(), Still(module)))

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return kept(*args, **kwargs)
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and not t.is_inference()]
        before = [tensor._version for tensor in given]
        output = kept(*args, **kwargs)
        if [tensor._version for tensor in given] != before:
            raise StateError(
                f"the forward of {label} writes a tensor that it was given, in place, and recomputation "
                "would begin with what it wrote. Write to a copy there (x = x + y), or leave the unit out of "
                "recompute=."
            )
        return output

    return run


def tracks_statistics(module: nn.Module) -> bool:
    """Whether its forward changes running statistics."""
    return any(_tracks(norm) for norm in module.modules())


def _tracks(norm: nn.Module) -> bool:
    return isinstance(norm, _NormBase) and norm.track_running_stats


class Still:
    """While active, norms leave their running statistics as they are: their momentum is zero, and batches are
    not counted. Without statistics they would do so too, but autograd would save other tensors.

    Entered for every backward that goes through the graph: a graph may be kept."""

    def __init__(self, module: nn.Module) -> None:
        self._norms = [norm for norm in module.modules() if isinstance(norm, _NormBase) and _tracks(norm)]
        self._before: list[tuple[float | None, Tensor | None]] = []

    def __enter__(self) -> None:
        self._before = [(norm.momentum, norm._buffers["num_batches_tracked"]) for norm in self._norms]
        for norm in self._norms:
            norm.momentum, norm._buffers["num_batches_tracked"] = 0.0, None

    def __exit__(self, *_: object) -> None:
        for norm, (momentum, count) in zip(self._norms, self._before, strict=True):
            norm.momentum, norm._buffers["num_batches_tracked"] = momentum, count


log = logging.getLogger("zeroshard")
FIRST, SELDOM = 3, 100  # steps: each of the first, then every so many
ELEMENTS = 64  # of a tensor of inputs that are looked at
_SAID = "an input of the forward"
_SYNCED = "synced_gpus"  # of transformers: all ranks go on until the last one has generated its text
_UNLIKE = ("same dtype", "expected scalar type", "Input type", "expected m1 and m2", "mixed dtype")


class ForwardMethods:
    """The forward methods of one run. `known`: modules whose forward is one; `methods`: what stands in place
    of others."""

    def __init__(self, model: nn.Module, runtime: Runtime) -> None:
        self._model, self.runtime = model, runtime
        self.known, self.methods = set[int](), set[Callable[..., Any]]()
        self.alone: nn.Module | None = None  # called past all of them, and at work
        self.on_inputs: Callable[[Any], None] | None = None  # of forwards that a backward may follow
        self.after_step: Callable[[], None] | None = None
        self.on_outputs: Callable[[Any], None] | None = None  # of calls from outside
        precision, several = runtime.options.precision, runtime.transport.size > 1
        self._compute = getattr(torch, precision.compute) if precision is not None else None
        self._late = LateHooks(runtime.sharded_tensors, runtime.params, runtime.transport.size)
        self.strangers = LateParams(model) if several else None
        self.peers = PeerComparison(runtime.transport)
        # Those that forward changes are broadcast from rank 0, unless they stay local.
        in_step = several and runtime.options.buffers == "broadcast"
        self._buffers = _statistics_of(model) if in_step else []
        if in_step:
            runtime.sync_strategy.take_buffers(self._buffers)

    def watch(self, on_inputs: Callable[[Any], None], after_step: Callable[[], None]) -> None:
        """Tell of the inputs of forwards that a backward may follow, and of steps."""
        self.on_inputs, self.after_step = on_inputs, after_step

    def follow(self, on_outputs: Callable[[Any], None]) -> None:
        """Tell of what calls from outside return."""
        self.on_outputs = on_outputs

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """It has computed."""
        if output is None:  # it may have failed
            self.explain((args, kwargs))
        else:
            self.expect_backward(output)

    def method(self, module: nn.Module, own: Callable[..., Any]) -> Callable[..., Any]:
        """What stands in place of a method of `module` that the loop calls in place of a forward."""
        units = self.units_of(module)

        @wraps(own)
        def method(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self.begin(module, args, kwargs, named=True) or (args, kwargs)
            with self.enter(units):
                output = own(*args, **self.suited(own, kwargs))
            self.expect_backward(output)
            return output

        self.methods.add(method)
        return method

    def expect_backward(self, output: Any) -> None:
        """Notice a coming backward by what a call from outside returns. These hooks end with the graph."""
        runtime = self.runtime  # and not the model, which a loss must not keep
        if self.on_outputs is not None:
            self.on_outputs(output)
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad and tensor.grad_fn is not None:
                    tensor.register_hook(lambda grad: runtime.begin_backward())

    def begin(self, module: nn.Module, args: Any, kwargs: Any, named: bool = False) -> tuple[Any, Any] | None:
        """A call from outside, or of the root inside of one that was. Its arguments, where they were cast.
        `named`: of a method, whose arguments may be more than the forward's."""
        runtime, learns, self.alone = self.runtime, torch.is_grad_enabled(), None
        if runtime.supply.stale and runtime.sharded_tensors.writes.settings != self._late.seen:
            self._late.refuse()  # once a step, or once where something was registered
        if self.strangers is not None and learns and self.strangers.due:
            self.strangers.refuse(self._model, runtime.params)
        if learns and self.peers.looks:
            self.peers.saw((args, kwargs))
        if self.on_inputs is not None and learns and not named:
            self.on_inputs((args, kwargs))
        trains = self._buffers and learns and self._model.training and self._keeps_in_step
        if trains and not runtime.forward.inside:
            with torch.no_grad():
                # Through `.data`: a backward that is yet to come may have saved them, as in a GAN's two
                # forward passes.
                runtime.transport.broadcast("buffers", [buffer.data for buffer in self._buffers])
        return None if self._compute is None else (cast(args, self._compute), cast(kwargs, self._compute))

    @property
    def _keeps_in_step(self) -> bool:
        return bool(self._buffers) and self.runtime.sync and not self.runtime.sync_strategy.apart

    def let_go(self) -> None:
        """The run has ended: its handle lives on, and must keep none of its parameters."""
        self._late = LateHooks(self.runtime.sharded_tensors, [], self.runtime.transport.size)
        self.strangers, self._buffers = None, []

    def enter(self, units: Sequence[RunningUnit]) -> ExitStack:
        """A method begins: what it uses of its module itself is whole, until the end of the block that is
        returned. No context manager itself: a forward's frame is the first that is not ours."""
        self.runtime.recover()
        with ExitStack() as left:
            for unit in units:
                self.runtime.enter(unit)
                left.callback(self.runtime.leave, unit)
            return left.pop_all()

    def units_of(self, module: nn.Module) -> list[RunningUnit]:
        """Whose parameters a method of this module may use itself."""
        units = {unit.name: unit for unit in self.runtime.units}
        path = next(path for path, other in self._model.named_modules() if other is module)
        inside = units[unit_of(path, set(units) - {""})] if path else units[""]
        own = [u for u in units.values() if any(pl.module is module for p in u.params for pl in p.places)]
        return list({id(unit): unit for unit in (inside, *own)}.values())

    def look(self, module: nn.Module) -> None:
        """A module is about to compute: is it called past all entries?"""
        if id(module) in self.known or self.runtime.forward.inside or self.runtime.backward.task is not None:
            return
        if self._keeps_in_step and torch.is_grad_enabled() and _learns_statistics(module):
            path = next(path for path, other in self._model.named_modules() if other is module)
            raise StateError(
                f"`{path}` was called from outside of the forward of {type(self._model).__name__}, with "
                "which rank 0's batch statistics are broadcast: every rank would train with its own. Say "
                'which method the loop calls: zs.register_forward_method(model, "training_step"), or '
                f'zs.register_forward_method(model.{path}, "forward"); or pass shard(..., buffers="local").'
            )
        self.alone = module

    def left(self) -> None:
        """The one that was alone has computed, or failed: torch's words on dtypes do not say where."""
        error, self.alone = sys.exc_info()[1], None
        if self._compute is not None and isinstance(error, RuntimeError):
            if any(words in str(error) for words in _UNLIKE):
                error.add_note(
                    f"precision= casts what {type(self._model).__name__}.forward is given, and this part was "
                    "called past it. Say which method the loop calls, "
                    'zs.register_forward_method(model, "training_step"), or cast its inputs yourself.'
                )

    def explain(self, inputs: Any) -> None:
        """A forward from outside has ended, or failed: torch's words on devices do not say whose is where."""
        error, params = sys.exc_info()[1], self.runtime.params
        if not isinstance(error, RuntimeError) or "device" not in str(error) or not params:
            return
        here = params[0].unsharded_param.device
        tensors = [one for one in tree_leaves(inputs) if isinstance(one, torch.Tensor)]
        there = next((tensor.device for tensor in tensors if tensor.device != here), None)
        if there is not None and _SAID not in "".join(getattr(error, "__notes__", ())):
            error.add_note(
                f"{_SAID} is on {there}, and {type(self._model).__name__} computes on {here}: type "
                f'x = x.to("{here}") before the forward, or move the model before zs.shard().'
            )

    def suited(self, method: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Keywords of a `generate` that ranks may end at different lengths: where gathers need all ranks, all
        go on until the last one is done."""
        runtime = self.runtime
        together = (
            runtime.transport.size > 1 and runtime.transport.traits.overlaps and not runtime.supply.keeps_full
        )
        if not together or not takes_synced(method) or not any(unit.sharded for unit in runtime.units):
            return kwargs
        return kwargs if kwargs.get(_SYNCED) is not None else {**kwargs, _SYNCED: True}


class UnitCalls:
    """What the hooks of a unit's modules do."""

    def __init__(self, unit: RunningUnit, entries: ForwardMethods) -> None:
        self._unit, self._entries, self._runtime = unit, entries, entries.runtime
        self._opened: list[nn.Module] = []

    # In a compiled unit the unit's own hooks have run already, and those of its layers would cut the graph. A
    # frame that was begun compiled may be ended uncompiled: so only what was opened is closed.

    def before(self, module: nn.Module, args: Any) -> None:
        """A module is about to compute: the unit's own, or one that owns a parameter of it."""
        if not torch.compiler.is_compiling():
            if module is self._unit.module:
                self._runtime.recover()
            self._entries.look(module)
            self._runtime.enter(self._unit, module)
            self._opened.append(module)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """It has computed, or failed."""
        if not torch.compiler.is_compiling() and self._opened and self._opened[-1] is module:
            self._opened.pop()
            self._runtime.leave(self._unit, output)
            if self._entries.alone is module:
                self._entries.expect_backward(output)
                self._entries.left()

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of the unit's own module, which enters it by itself."""
        unit, runtime = self._unit, self._runtime

        def entered(*args: Any, **kwargs: Any) -> Any:
            runtime.enter(unit)
            try:
                return forward(*args, **kwargs)
            finally:
                runtime.leave(unit)

        return entered


class OptimizerCalls:
    """What stands in place of methods of an optimizer. `unscales_itself`: a GradScaler is to leave gradients
    as they are."""

    def __init__(self, update: ShardedOptimizer, entries: ForwardMethods) -> None:
        self._update, self._entries, runtime = update, entries, entries.runtime
        self._runtime, self._optimizer = runtime, update.optimizer
        options, host = runtime.options, runtime.host
        self._narrow = options.lands_in_fp16
        self._unscales = (
            self._narrow or options.clip_norm is not None or (host is not None and host.steps_parts)
        )
        self._unscalable = clipping.why_not(options, host is not None and host.updates_early)
        self._alone = options.clip_norm is None or len(runtime.updates) == 1
        self.unscales_itself = self._unscalable is not None or self._narrow or not self._alone
        if self._unscalable is None and host is not None:
            clipping.await_copies()

    def step(self) -> Callable[..., Any]:
        """The loop calls `optimizer.step(closure)`."""
        calls, own_step = self, self._optimizer.step

        def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            if calls._unscalable is not None:
                clipping.refuse(calls._optimizer, calls._unscalable)
            scale = clipping.settle(calls._optimizer, calls._narrow, calls._alone) if calls._unscales else 1.0
            if scale is None:
                return None
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            calls._runtime.step(calls._update, own_step, scale)
            if not calls._runtime.sync_strategy.apart:
                calls._entries.peers.stepped(calls._update)
            if calls._entries.after_step is not None:
                calls._entries.after_step()
            return loss

        if hasattr(own_step, "_wrapped_by_lr_sched"):
            # A scheduler built before shard() looks for its mark, and would warn that step() was replaced.
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        return step

    def around_step(self) -> dict[str, Callable[..., Any]]:
        """Of methods that every optimizer has beside `step`."""
        update, optimizer, runtime = self._update, self._optimizer, self._runtime
        own_zero, own_add = optimizer.zero_grad, optimizer.add_param_group

        @wraps(type(optimizer).zero_grad)  # wrappers of others look at what it takes
        def zero_grad(self: Optimizer, *args: Any, **keywords: Any) -> None:
            runtime.forget(optimizer)
            own_zero(*args, **keywords)

        def add_param_group(self: Optimizer, group: dict[str, Any]) -> None:
            own_add(group)
            try:
                update.meet_late(runtime.params, self.param_groups[-1]["params"], runtime.transport.size)
            except ModelError:
                self.param_groups.pop()
                raise

        return {"zero_grad": zero_grad, "add_param_group": add_param_group}

    def mode(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Between training and evaluation a schedule-free optimizer rewrites parameters. Every rank calls
        it."""
        update, runtime = self._update, self._runtime

        def mode(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
            runtime.settle()
            runtime.before_change()
            runtime.transport.fence()  # peers have read the rows that are about to change
            try:
                return update.change(partial(own, *args, **kwargs))
            finally:
                runtime.changed(list(update.params.values()))

        return mode


class PeerComparison:
    """Compares the ranks now and then while they train: the numbers that their optimizers go by, which must
    be the same on all of them, and the batches of the first steps, which should not be. It costs one small
    exchange at each of those steps."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._made = Counter[int]()  # steps, by id of the update
        self._batches: list[str] = []  # of the first training forwards
        self._told = transport.size == 1
        self.looks = not self._told  # at batches

    def saw(self, inputs: Any) -> None:
        """A forward that a backward may follow has been given inputs."""
        with suppress(RuntimeError):  # inside of a transform, where tensors have no values
            given = [_some(tensor) for tensor in tree_leaves(inputs) if _is_data(tensor)]
            self._batches.append(_numbers_digest(given))
        self.looks = len(self._batches) < FIRST

    def stepped(self, update: ShardedOptimizer) -> None:
        """An optimizer has stepped. All ranks get here together, or none; and all raise the same."""
        self._made[id(update)] += 1
        made = self._made[id(update)]
        if self._transport.size == 1 or (made > FIRST and made % SELDOM):
            return
        mine = _held_numbers(update)
        several = len(self._batches) == FIRST and len(set(self._batches)) == FIRST
        seen = _numbers_digest(self._batches) if several and not self._told else None
        everyone: Any = self._transport.exchange([_numbers_digest(mine), seen], "optimizer.step()")
        if len({numbers for numbers, _ in everyone}) > 1:
            every: Any = self._transport.exchange(mine, "optimizer.step()")
            self._refuse(update, every, made)
        if not self._told and made >= FIRST:
            self._told, self.looks = True, False
            if seen is not None and all(other == seen for _, other in everyone):
                self._warn()

    def _warn(self) -> None:
        if self._transport.rank == 0:
            log.warning(
                "all %d ranks were given the same batches in the first %d steps: together they learn what "
                "one rank would alone. Give each its own part: DistributedSampler(data, run.size, run.rank), "
                "or seeds that depend on run.rank.",
                self._transport.size,
                FIRST,
            )

    def _refuse(self, update: ShardedOptimizer, every: list[Any], made: int) -> None:
        """Where those who hold something of a group do not go by the same numbers."""
        kind = type(update.optimizer).__name__
        for index, groups in enumerate(zip(*every, strict=True)):
            for key in dict.fromkeys(key for group in groups if group is not None for key in group):
                texts = [None if group is None else group.get(key, "missing") for group in groups]
                if len({text for text in texts if text is not None}) > 1:
                    shown = ", ".join(f"{t} on rank {r}" for r, t in enumerate(texts) if t is not None)
                    raise StateError(
                        f"after step {made} the ranks go by different numbers: `{key}` of group {index} of "
                        f"{kind} is {shown}. Where the loop sets it (a scheduler by a loss), let all ranks "
                        "decide by the same: torch.distributed.all_reduce() the loss first. Where the "
                        f"optimizer does, it would have to see all parameters: pass stage=0."
                    )


def _held_numbers(update: ShardedOptimizer) -> list[dict[str, str] | None]:
    """Those of each group of which this rank updates anything."""
    numbers = numbers_of(update.optimizer)
    held = [
        any(
            id(sharded_param) not in update.params or update.params[id(sharded_param)].local.numel()
            for sharded_param in group["params"]
        )
        for group in update.optimizer.param_groups
    ]
    return [
        {key: repr(value) for key, value in own.items()} if any_of_it else None
        for own, any_of_it in zip(numbers, held, strict=True)
    ]


def _is_data(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() > 1 and not value.is_meta


def _some(tensor: Tensor) -> list[Any]:
    """A few of its elements, from all over it."""
    with torch.no_grad():
        flat = tensor.detach().reshape(-1)
        picked = flat[:: max(1, flat.numel() // ELEMENTS)][: 2 * ELEMENTS]
        return [list(tensor.shape), picked.cpu().tolist()]


def _numbers_digest(value: Any) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=12).hexdigest()


def has_synced(module: nn.Module) -> bool:
    """Whether it generates as models of transformers do."""
    return takes_synced(getattr(type(module), "generate", None))


def takes_synced(method: Any) -> bool:
    return callable(method) and _SYNCED in inspect.signature(method).parameters


def _statistics_of(model: nn.Module) -> list[Tensor]:
    modules = [module for module in model.modules() if getattr(module, "track_running_stats", False)]
    return [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]


def _learns_statistics(module: nn.Module) -> bool:
    return any(getattr(m, "track_running_stats", False) and m.training for m in module.modules())
