"""Keras's optimizers on rows.

`zs.shard` wants a torch optimizer: `RowOptimizer` is one, whose step lets the Keras optimizer update *row
variables*: variables that show this rank's rows of a weight. The Keras optimizer is built on those, so that
its slots have the shape of the rows, and its own code runs on them. What needs to see a whole gradient
(clipping by norms, the finiteness that a loss scale looks for) asks all ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import keras
import numpy as np
import torch
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zeroshard as zs

from .world import World

#: Keras's optimizers that treat every element alone, so that they may work on any rows.
ELEMENTWISE = ("SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Nadam", "Ftrl", "Lion")
ENGINE = "_zeroshard_engine"


def elementwise(optimizer: Any, variables: Iterable[Any]) -> bool:
    """Whether it gives the same result on rows as on whole weights: constraints look at whole ones."""
    known = any(
        type(optimizer).__name__ == name and isinstance(optimizer, getattr(keras.optimizers, name))
        for name in ELEMENTWISE
    )
    return known and all(variable.constraint is None for variable in variables)


class RowVariable(keras.Variable):  # type: ignore[misc]
    """This rank's rows of a weight, under its name."""

    def __init__(self, weight: Any, rows: Tensor) -> None:
        self._name, self._path = weight.name, weight.path
        self._shape, self._ndim = tuple(rows.shape), rows.dim()
        self._initializer = None
        self._regularizer, self._constraint = None, weight.constraint
        self._trainable, self._autocast = True, False
        self._aggregation, self._synchronization, self._layout = "none", "auto", None
        self._dtype = keras.backend.standardize_dtype(rows.dtype)
        self._overwrite_with_gradient = weight.overwrite_with_gradient
        self._value = rows
        self.stands_for = weight
        self.written = False

    def _direct_assign(self, value: Any) -> None:
        super()._direct_assign(value)
        self.written = True


class RowOptimizer(torch.optim.Optimizer):
    """What `zs.shard` knows of a Keras optimizer. Its class is made for each: see `for_keras`."""

    elementwise = True

    def __init__(self, params: Any, config: Any = None) -> None:
        super().__init__(params, {"config": config})
        self.engine: Engine | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of the rows that the groups show, by the Keras optimizer's own code."""
        shown = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if self.engine is None:  # of a twin, by which the planner learns how much state there is
            group = self.param_groups[0]
            optimizer = keras.optimizers.deserialize(copy.deepcopy(group["config"]))
            weights = [keras.Variable(p, name=f"weight_{n}") for n, p in enumerate(group["params"])]
            self.engine = Engine(optimizer, self, weights, group["params"], World(0, 1))
        self.engine.update(shown)


def for_keras(optimizer: Any, weights: Sequence[Any]) -> RowOptimizer:
    """A torch optimizer over the parameters of the weights."""
    name = type(optimizer).__name__
    kind = type(name, (RowOptimizer,), {"elementwise": elementwise(optimizer, weights)})
    config = keras.optimizers.serialize(optimizer)
    # What tries it out learns of state; clipping by norms is what the ranks do together.
    config["config"] |= {"learning_rate": 0.01, "clipnorm": None, "global_clipnorm": None}
    return cast(RowOptimizer, kind([variable._value for variable in weights], config))


class _Told(list[RowVariable]):
    """Rows that say which of them is being looked at."""

    def __init__(self, rows: Iterable[RowVariable], engine: Engine) -> None:
        super().__init__(rows)
        self._engine = engine

    def __iter__(self) -> Iterator[RowVariable]:
        for row in super().__iter__():
            self._engine.reference = row
            yield row
        self._engine.reference = None


class Engine:
    """One Keras optimizer at work on rows."""

    def __init__(
        self,
        optimizer: Any,
        torch_side: RowOptimizer,
        weights: Sequence[Any],
        sharded_params: Sequence[Any],
        world: World,
    ) -> None:
        self.optimizer, self.torch_side, self.world = optimizer, torch_side, world
        self.weights, self.sharded_params = list(weights), list(sharded_params)
        self._index = {id(weight): n for n, weight in enumerate(self.weights)}
        locals_ = [_local(sharded_param) for sharded_param in self.sharded_params]
        self.rows = [RowVariable(w, rows) for w, rows in zip(self.weights, locals_, strict=True)]
        self.divided = world.size > 1 and any(
            isinstance(sharded_param, DTensor) for sharded_param in self.sharded_params
        )
        self.slots: list[tuple[int, str, Any]] = []  # of which weight, its name, the variable
        self.reference: RowVariable | None = None  # beside which the optimizer makes variables now
        self.busy = False
        self.scale: Any = None  # that of the loss, for the step under way
        self.summed = False  # gradients are parts of a sum, of which their mean over ranks was taken
        self._device = locals_[0].device if locals_ else torch.device("cpu")
        self._build()

    # ---- building ----

    def _build(self) -> None:
        """Make its variables anew, on rows; values that it had stay."""
        optimizer = self.optimizer
        before = whole_slots(optimizer) if optimizer.built else None
        release(optimizer)
        vars(optimizer)[ENGINE] = self
        optimizer.__class__ = standing_in(type(optimizer), Sharded)
        with self._on_device():
            optimizer.build(_Told(self.rows, self))
        self.reference = None
        for variable in optimizer._variables:
            variable._value = nn.Parameter(variable._value.detach().to(self._device), requires_grad=False)
        if before is not None:
            self.put(before)

    def slot(self, name: Any, variable: Any) -> None:
        """The optimizer has made a variable, mostly beside rows."""
        if self.reference is not None:
            number = self._index[id(self.reference.stands_for)]
            alike = sum((number, str(name)) == (other, known) for other, known, _ in self.slots)
            self.slots.append((number, f"{name} {alike}" if alike else str(name), variable))

    def _on_device(self) -> AbstractContextManager[Any]:
        """Rows may rest in host memory while the model is on a GPU."""
        return cast(AbstractContextManager[Any], keras.device(str(self._device).replace("cuda", "gpu")))

    def close(self, values: Sequence[np.ndarray[Any, Any]]) -> None:
        """The optimizer is a plain one again, with these as its state: what `whole` gave."""
        optimizer = self.optimizer
        release(optimizer)
        optimizer.build(self.weights)
        for variable, value in zip(optimizer._variables, values, strict=True):
            variable.assign(value)

    # ---- a step ----

    def take(self, grads: Sequence[Any], weights: Sequence[Any] | None) -> None:
        """What the loop passes to `apply`: mostly the gradients that the parameters have already."""
        given = self.weights if weights is None else list(weights)
        known = [self._index.get(id(weight)) for weight in given]
        if None in known:
            strange = given[known.index(None)]
            raise zs.StateError(
                f"{self.optimizer.name}.apply() got {getattr(strange, 'path', strange)!r}, and it was built "
                "for other variables: make an optimizer for each set of them."
            )
        if len(grads) != len(given):
            raise zs.StateError(
                f"{self.optimizer.name}.apply() got {len(grads)} gradients for {len(given)} variables."
            )
        for number, grad in zip(known, grads, strict=True):
            sharded_param = self.sharded_params[cast(int, number)]
            if grad is not sharded_param.grad:
                sharded_param.grad = grad
        for number in set(range(len(self.sharded_params))) - set(cast("list[int]", known)):
            self.sharded_params[number].grad = None

    def apply(self, grads: Sequence[Any], weights: Sequence[Any] | None) -> None:
        """The Keras optimizer's `apply`, called by the loop."""
        self.take(grads, weights)
        self.torch_side.step()

    def update(self, shown: Sequence[Tensor]) -> None:
        """Inside of the step: the rows that torch's side shows."""
        optimizer, whole = self.optimizer, not self.torch_side.elementwise
        present = [
            n
            for n, sharded_param in enumerate(self.sharded_params)
            if sharded_param.grad is not None and (not whole or _local(sharded_param).numel())
        ]
        assert len(present) == len(shown), "the optimizer is stepped through apply() alone"
        self._take_state(present, shown)
        grads: list[Any] = [None] * len(self.rows)
        for number, param in zip(present, shown, strict=True):
            self.rows[number]._value = param
            grads[number] = param.grad if self.scale is None else param.grad / self.scale.to(param.grad)
        here = [
            n
            for n, sharded_param in enumerate(self.sharded_params)
            if sharded_param.grad is None or n in set(present)
        ]
        self.busy = True
        try:
            with self._on_device():
                if present:
                    optimizer.apply([grads[n] for n in here], [self.rows[n] for n in here])
                else:  # other ranks have all that trains
                    optimizer._iterations.assign_add(1)
        finally:
            self.busy = False
            self._stand()
        self._show_state(present, shown)

    def _stand(self) -> None:
        """Between steps rows are those of the sharded parameters."""
        for row, sharded_param in zip(self.rows, self.sharded_params, strict=True):
            row._value, row.written = _local(sharded_param), False

    @property
    def rewritten(self) -> bool:
        """Whether somebody has written rows between steps."""
        found = any(row.written for row in self.rows)
        for row in self.rows:
            row.written = False
        return found

    # ---- state ----

    def _entries(
        self, present: Sequence[int], shown: Sequence[Tensor]
    ) -> Iterator[tuple[Tensor, str, Tensor]]:
        """What torch's side has as the state of each parameter, for checkpoints and sizes: the slots beside
        it, and what the optimizer has but once."""
        params = dict(zip(present, shown, strict=True))
        beside = {id(variable) for _, _, variable in self.slots}
        once = [(f"own {n}", v) for n, v in enumerate(self.optimizer._variables) if id(v) not in beside]
        for number, name, variable in self.slots:
            if number in params:
                yield params[number], name, variable._value.data
        for param in shown:
            for name, variable in once:
                yield param, name, variable._value.data

    def _show_state(self, present: Sequence[int], shown: Sequence[Tensor]) -> None:
        for param, name, value in self._entries(present, shown):
            self.torch_side.state[param][name] = value

    def _take_state(self, present: Sequence[int], shown: Sequence[Tensor]) -> None:
        """What a checkpoint of the run has put there."""
        for param, name, value in self._entries(present, shown):
            given = self.torch_side.state.get(param, {}).get(name)
            if given is not None and given.data_ptr() != value.data_ptr():
                value.copy_(given)

    def put(self, whole: Sequence[np.ndarray[Any, Any]]) -> None:
        """Values of all of the optimizer's variables, as one process would have them, in their order."""
        of_slot = {id(variable): number for number, _, variable in self.slots}
        for variable, given in zip(self.optimizer._variables, whole, strict=True):
            value = torch.as_tensor(given)
            number = of_slot.get(id(variable))
            own = variable._value
            if number is not None and self.divided:
                sharded_param = self.sharded_params[number]
                if tuple(value.shape) == tuple(sharded_param.shape):
                    value = rows_like(value, sharded_param, self.world)
                elif not _local(sharded_param).numel():
                    continue  # of a weight that is whole on another rank
            if value.shape != own.shape:
                raise zs.StateError(
                    f"{self.optimizer.name}: a value of shape {tuple(value.shape)} for {variable.path}, "
                    f"which has {tuple(own.shape)}: it is that of another optimizer or model."
                )
            own.data.copy_(value)

    def whole(self) -> list[np.ndarray[Any, Any]]:
        """The values of all of the optimizer's variables, as one process would have them. Every rank calls
        it."""
        of_slot = {id(variable): number for number, _, variable in self.slots}
        result = list[np.ndarray[Any, Any]]()
        for variable in self.optimizer._variables:
            number, value = of_slot.get(id(variable)), variable._value.detach()
            if number is not None and self.divided:
                value = whole_of(value, self.sharded_params[number], self.world)
            result.append(value.cpu().numpy())
        return result

    # ---- norms over all ranks ----

    def squares(self, grads: Sequence[Tensor | None], numbers: Sequence[int]) -> Tensor:
        """The sum of squares of each whole gradient."""
        own = torch.zeros(len(self.rows), dtype=torch.float32, device=self._device)
        for number, grad in zip(numbers, grads, strict=True):
            if grad is not None:
                once = self.world.size if self.divided and _replicated(self.sharded_params[number]) else 1
                own[number] = grad.float().square().sum() / once
        return self.world.sum(own) if self.divided else own

    def clip(self, grads: Sequence[Any], numbers: Sequence[int]) -> list[Any]:
        """As Keras clips whole gradients, by the norm of all or of each."""
        squares, optimizer = self.squares(grads, numbers), self.optimizer
        if (most := optimizer.global_clipnorm or 0) > 0:
            norm = squares.sum().sqrt()
            factor = most * torch.minimum(1 / norm, norm.new_tensor(1 / most)) + (norm - norm)
            return [grad if grad is None else grad * factor for grad in grads]
        most = optimizer.clipnorm
        norms = squares.sqrt().clamp_min(most)
        pairs = zip(numbers, grads, strict=True)
        return [grad if grad is None else grad * most / norms[number] for number, grad in pairs]

    @property
    def by_rows(self) -> bool:
        """Whether a rank has a part of each weight; else some weights, whole."""
        return bool(self.torch_side.elementwise)

    def publish(self) -> None:
        """Rows have been written outside of a step; the next forward notices."""

    def number_of(self, row: RowVariable) -> int:
        return self._index[id(row.stands_for)]


def _local(sharded_param: Any) -> Tensor:
    """The plain rows inside of what the run shows."""
    return cast(
        Tensor, sharded_param.to_local() if isinstance(sharded_param, DTensor) else sharded_param
    ).detach()


def _replicated(sharded_param: Any) -> bool:
    """Whether every rank has all of it."""
    if not isinstance(sharded_param, DTensor) or getattr(sharded_param, "uneven", False):
        return not isinstance(sharded_param, DTensor)
    return all(placement.is_replicate() for placement in sharded_param.placements)


def rows_like(whole: Tensor, sharded_param: Any, world: World) -> Tensor:
    """This rank's rows of what has the shape of a sharded parameter."""
    own = _local(sharded_param)
    if _replicated(sharded_param):
        return whole
    counts = world.from_all(own.shape[0] if own.dim() else own.numel())
    start = sum(counts[: world.rank])
    return whole[start : start + own.shape[0]]


def whole_of(rows: Tensor, sharded_param: Any, world: World) -> Tensor:
    """What all ranks have of a slot. Beside a weight that is whole on one rank, that rank's."""
    if _replicated(sharded_param):
        return rows
    told = world.from_all((_local(sharded_param).numel(), rows.cpu().numpy()))
    held = [torch.from_numpy(part) for count, part in told if count]
    return torch.cat(held) if len(held) > 1 else held[0]


def whole_slots(optimizer: Any) -> list[np.ndarray[Any, Any]]:
    """The variables' values of an optimizer that is built and not sharded."""
    return [np.array(variable) for variable in optimizer._variables]


def release(optimizer: Any) -> None:
    """An optimizer as before it was built: with no variables but its counter and rate."""
    kept = {id(optimizer._iterations), id(optimizer._learning_rate)}
    for variable in list(optimizer._variables):
        if id(variable) not in kept:
            optimizer._untrack_variable(variable)
    optimizer._trainable_variables_indices = {}
    vars(optimizer).pop(ENGINE, None)
    optimizer.__class__ = plain_class(type(optimizer))
    optimizer.built = False


def engine_of(optimizer: Any) -> Engine | None:
    found = vars(optimizer).get(ENGINE)
    return found if isinstance(found, Engine) else None


class Sharded:
    """What a Keras optimizer on rows does otherwise; in front of its own class."""

    def add_variable_from_reference(self, reference_variable: Any, *args: Any, **keywords: Any) -> Any:
        engine = cast(Engine, engine_of(self))
        before, engine.reference = engine.reference, reference_variable
        try:
            return super().add_variable_from_reference(reference_variable, *args, **keywords)  # type: ignore[misc]
        finally:
            engine.reference = before

    def add_variable(self, *args: Any, **keywords: Any) -> Any:
        made = super().add_variable(*args, **keywords)  # type: ignore[misc]
        cast(Engine, engine_of(self)).slot(keywords.get("name") or len(vars(self)["_variables"]), made)
        return made

    def _var_key(self, variable: Any) -> int:
        return id(getattr(variable, "stands_for", variable))

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        engine = cast(Engine, engine_of(self))
        if engine.busy:
            super().apply(grads, trainable_variables)  # type: ignore[misc]
        else:
            engine.apply(list(grads), trainable_variables)

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
        vars(self)["_zeroshard_clipped"] = trainable_variables
        super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        """By norms of whole gradients."""
        engine, own = cast(Engine, engine_of(self)), cast(Any, self)
        each = (own.clipnorm or 0) > 0 and engine.by_rows
        if not engine.divided or not ((own.global_clipnorm or 0) > 0 or each):
            return super()._clip_gradients(grads)  # type: ignore[misc]
        return engine.clip(grads, [engine.number_of(row) for row in vars(self)["_zeroshard_clipped"]])

    def finalize_variable_values(self, var_list: Any) -> None:
        engine = cast(Engine, engine_of(self))
        super().finalize_variable_values(engine.rows)  # type: ignore[misc]
        engine.publish()

    def save_own_variables(self, store: Any) -> None:
        saved = vars(self).get("_zeroshard_saved")
        values = saved if saved is not None else cast(Engine, engine_of(self)).whole()
        for number, value in enumerate(values):
            store[str(number)] = value

    def load_own_variables(self, store: Any) -> None:
        engine, own = cast(Engine, engine_of(self)), cast(Any, self)
        if len(store.keys()) != len(own.variables):
            super().load_own_variables(store)  # type: ignore[misc]  # which says what is wrong
            return
        engine.put([np.asarray(store[str(n)][()]) for n in range(len(own.variables))])


_classes: dict[tuple[type, type], type] = {}


def standing_in(kind: type, mixin: type) -> type:
    """A class that goes by the name of its own, with a mixin in front."""
    if issubclass(kind, mixin):
        return kind
    if (kind, mixin) not in _classes:
        told = {"__module__": kind.__module__, "_zeroshard_plain": kind}
        _classes[kind, mixin] = type(kind.__name__, (mixin, kind), told)
    return _classes[kind, mixin]


def plain_class(kind: type) -> type:
    """What a class stands in for."""
    plain = vars(kind).get("_zeroshard_plain", kind)
    return cast(type, plain)


class ScaledLoss:
    """What a `LossScaleOptimizer` around an optimizer on rows does otherwise: all ranks decide as one."""

    def check_finite(self, grads: Any) -> Any:
        engine = cast(Engine, engine_of(cast(Any, self).inner_optimizer))
        own = all(bool(torch.isfinite(_local(g)).all()) for g in grads if g is not None)
        return torch.tensor(not engine.world.any(not own))

    def _stateful_handle_finite_grads(self, grads: Any, trainable_variables: Any) -> None:
        own = cast(Any, self)
        engine = cast(Engine, engine_of(own.inner_optimizer))
        engine.scale = own.dynamic_scale.value / (engine.world.size if engine.summed else 1)
        try:
            own.inner_optimizer.apply(grads, trainable_variables)
        finally:
            engine.scale = None
        if int(own.step_counter) == own.dynamic_growth_steps - 1:
            own.step_counter.assign(0)
            own.dynamic_scale.assign(own.dynamic_scale * 2.0)
        else:
            own.step_counter.assign_add(1)

    def save_own_variables(self, store: Any) -> None:
        own = cast(Any, self)
        inner: dict[str, Any] = {}
        own.inner_optimizer.save_own_variables(inner)
        values = [np.asarray(variable) for variable in own._variables] + list(inner.values())
        for number, value in enumerate(values):
            store[str(number)] = value

    def load_own_variables(self, store: Any) -> None:
        own = cast(Any, self)
        if len(store.keys()) != len(own.variables):
            super().load_own_variables(store)  # type: ignore[misc]
            return
        values = [store[str(number)][()] for number in range(len(own.variables))]
        for variable, value in zip(own._variables, values, strict=False):
            variable.assign(value)
        rest = values[len(own._variables) :]
        own.inner_optimizer.load_own_variables({str(n): np.asarray(value) for n, value in enumerate(rest)})


def innermost(optimizer: Any) -> Any:
    """The optimizer that updates weights."""
    return optimizer.inner_optimizer if isinstance(optimizer, LossScaleOptimizer) else optimizer
