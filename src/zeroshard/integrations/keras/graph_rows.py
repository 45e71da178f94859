"""Keras's optimizers on rows, in TensorFlow's graphs: ranks exchange gradients and rows inside of functions
that the graph calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import torch

import zeroshard as zs

from .updates import (
    ENGINE,
    Engine,
    ScaledLoss,
    Sharded,
    elementwise,
    release,
    standing_in,
    whole_slots,
)
from .world import World

Array = np.ndarray[Any, Any]


class GraphRow(keras.Variable):  # type: ignore[misc]
    """This rank's rows of a weight, under its name."""

    def __init__(self, weight: Any, value: Array) -> None:
        super().__init__(value, dtype=value.dtype.name, trainable=True, autocast=False, name=weight.name)
        self._path, self._constraint = weight.path, weight.constraint
        self.stands_for = weight


class GraphEngine(Engine):
    """One Keras optimizer at work on rows, inside of graphs."""

    def __init__(self, optimizer: Any, weights: Sequence[Any], world: World, stage: int) -> None:
        self.optimizer, self.world = optimizer, world
        self.weights = list(weights)
        self._index = {id(weight): number for number, weight in enumerate(self.weights)}
        self.divided = world.size > 1 and stage > 0
        self._rows_suffice = elementwise(optimizer, weights)
        self.spans = self._shared_out()
        for weight in weights:
            if np.shape(np.array(weight)) != tuple(weight.shape):
                raise zs.StateError(
                    f"{weight.path} is made while a step is traced, so that ranks cannot compare it: build "
                    "the model first, by a keras.Input or model.build(shape)."
                )
        values = world.from_first([np.array(weight) for weight in weights] if world.rank == 0 else None)
        for weight, value in zip(weights, values, strict=True):
            weight.assign(value)
        own = [span[world.rank] for span in self.spans]
        self.rows = [
            GraphRow(weight, value.reshape(_rowed(value))[slice(*span)] if self.divided else value)
            for weight, value, span in zip(weights, values, own, strict=True)
        ]
        self.slots, self.reference, self.busy, self.scale, self.summed = [], None, False, None, False
        self._build()

    @property
    def by_rows(self) -> bool:
        return self._rows_suffice

    def _shared_out(self) -> list[list[tuple[int, int]]]:
        """By weight and rank, the rows: a share of each, or where the optimizer wants it all or nothing."""
        size, load, spans = self.world.size, [0] * self.world.size, []
        for weight in self.weights:
            length = weight.shape[0] if len(weight.shape) else 1
            if self._rows_suffice:
                spans.append([(length * r // size, length * (r + 1) // size) for r in range(size)])
                continue
            owner = load.index(min(load))
            load[owner] += int(np.prod(weight.shape))
            spans.append([(0, length if rank == owner else 0) for rank in range(size)])
        return spans

    def _build(self) -> None:
        optimizer = self.optimizer
        before = whole_slots(optimizer) if optimizer.built else None
        self._exclude(self.weights, self.rows)
        release(optimizer)
        vars(optimizer)[ENGINE] = self
        optimizer.__class__ = standing_in(type(optimizer), GraphSharded)
        optimizer.build(_Looked(self.rows, self))
        self.reference = None
        if before is not None:
            self.put(before)

    def _exclude(self, named: Sequence[Any], instead: Sequence[Any]) -> None:
        """Variables that the optimizer excludes from weight decay by these names go by others."""
        optimizer = self.optimizer
        if excluded := getattr(optimizer, "_exclude_from_weight_decay", None):
            key = optimizer._var_key
            names = {key(one): key(other) for one, other in zip(named, instead, strict=True)}
            optimizer._exclude_from_weight_decay = {names.get(name, name) for name in excluded}
            optimizer._exclude_from_weight_decay_cache = {}

    def close(self, values: Sequence[Array]) -> None:
        self._exclude(self.rows, self.weights)
        super().close(values)

    # ---- a step ----

    def apply(self, grads: Sequence[Any], weights: Sequence[Any] | None) -> None:
        given = self.weights if weights is None else list(weights)
        numbers = self.numbers_of(given, grads)
        present = [n for n, grad in zip(numbers, grads, strict=True) if grad is not None]
        dense = [tf.convert_to_tensor(grad) for grad in grads if grad is not None]
        self.refresh()
        reduced = dict(zip(present, self._reduced(present, dense), strict=True))
        here = [n for n in numbers if n not in reduced or self.by_rows or self.rows[n].shape[0:1] != (0,)]
        self.busy = True
        try:
            if any(n in reduced for n in here):
                self.optimizer.apply([reduced.get(n) for n in here], [self.rows[n] for n in here])
            else:
                self.optimizer._iterations.assign_add(1)
        finally:
            self.busy = False
        self.publish()

    def refresh(self) -> None:
        """Rows of the weights as they are."""
        for row, weight, span in zip(self.rows, self.weights, self.spans, strict=True):
            row.assign(_cut(weight.value, span[self.world.rank]) if self.divided else weight.value)

    def numbers_of(self, given: Sequence[Any], grads: Sequence[Any]) -> list[int]:
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
        return [number for number in known if number is not None]

    def _reduced(self, numbers: Sequence[int], grads: Sequence[Any]) -> list[Any]:
        """The mean over ranks of this rank's rows of the gradients."""
        if self.world.size == 1:
            return list(grads)

        def reduce(*values: Any) -> list[Array]:
            return self._exchanged(numbers, [value.numpy() for value in values])

        kinds = [grad.dtype for grad in grads]
        made = tf.py_function(reduce, list(grads), kinds)
        for one, number in zip(made, numbers, strict=True):
            one.set_shape(self.rows[number].shape)
        return list(made)

    def _exchanged(self, numbers: Sequence[int], grads: list[Array]) -> list[Array]:
        world, over = self.world, 1 if self.summed else self.world.size
        if not self.divided:
            flat = torch.cat([torch.from_numpy(np.array(g, "float32")).reshape(-1) for g in grads])
            total, shapes = world.sum(flat).div_(over).numpy(), [g.shape for g in grads]
        else:
            chunks = [
                np.concatenate([_of(g, self.spans[n][to]) for n, g in zip(numbers, grads, strict=True)])
                for to in range(world.size)
            ]
            told = world.exchange([torch.from_numpy(chunk) for chunk in chunks])
            total = torch.stack(told).sum(0).div_(over).numpy()
            shapes = [tuple(self.rows[number].shape) for number in numbers]
        parts = _split(total, [int(np.prod(shape)) for shape in shapes])
        pairs = zip(parts, shapes, grads, strict=True)
        return [part.reshape(shape).astype(g.dtype) for part, shape, g in pairs]

    def publish(self) -> None:
        """All ranks get the rows of all."""
        if not self.divided:
            for weight, row in zip(self.weights, self.rows, strict=True):
                weight.assign(row.value)
            return

        def gather(*rows: Any) -> list[Array]:
            return self._assembled([row.numpy() for row in rows])

        made = tf.py_function(
            gather, [row.value for row in self.rows], [row.value.dtype for row in self.rows]
        )
        for weight, whole in zip(self.weights, made, strict=True):
            whole.set_shape(weight.shape)
            weight.assign(whole)

    def _assembled(self, rows: list[Array]) -> list[Array]:
        world = self.world
        flat = torch.from_numpy(np.concatenate([row.reshape(-1).astype("float32") for row in rows]))
        widths = [int(np.prod(weight.shape[1:])) for weight in self.weights]
        sizes = [
            [(span[rank][1] - span[rank][0]) * width for span, width in zip(self.spans, widths, strict=True)]
            for rank in range(world.size)
        ]
        every = _split(world.rows_of_all(flat, list(map(sum, sizes))).numpy(), list(map(sum, sizes)))
        parts = zip(*(_split(part, size) for part, size in zip(every, sizes, strict=True)), strict=True)
        trios = zip(parts, self.weights, rows, strict=True)
        return [np.concatenate(p).reshape(w.shape).astype(row.dtype) for p, w, row in trios]

    def clip(self, grads: Sequence[Any], numbers: Sequence[int]) -> list[Any]:
        own = [tf.reduce_sum(tf.square(tf.cast(grad, tf.float32))) for grad in grads]
        full = tf.scatter_nd([[n] for n in numbers], tf.stack(own), [len(self.rows)])
        squares = tf.py_function(
            lambda one: self.world.sum(torch.from_numpy(np.array(one))).numpy(), [full], tf.float32
        )
        squares.set_shape([len(self.rows)])
        if (most := self.optimizer.global_clipnorm or 0) > 0:
            norm = tf.sqrt(tf.reduce_sum(squares))
            factor = most * tf.minimum(1 / norm, 1 / most) + (norm - norm)
            return [grad * tf.cast(factor, grad.dtype) for grad in grads]
        most = self.optimizer.clipnorm
        norms = tf.maximum(tf.sqrt(squares), most)
        return [g * tf.cast(most / norms[n], g.dtype) for n, g in zip(numbers, grads, strict=True)]

    # ---- state ----

    def put(self, whole: Sequence[Array]) -> None:
        of_slot = {id(variable): number for number, _, variable in self.slots}
        for variable, given in zip(self.optimizer._variables, whole, strict=True):
            number, value = of_slot.get(id(variable)), np.asarray(given)
            if number is not None and self.divided:
                start, stop = self.spans[number][self.world.rank]
                if value.shape == tuple(self.weights[number].shape):
                    value = value.reshape(_rowed(value))[start:stop]
                elif start == stop:
                    continue
            if value.shape != tuple(variable.shape):
                raise zs.StateError(
                    f"{self.optimizer.name}: a value of shape {value.shape} for {variable.path}, which has "
                    f"{tuple(variable.shape)}: it is that of another optimizer or model."
                )
            variable.assign(value)

    def whole(self) -> list[Array]:
        of_slot = {id(variable): number for number, _, variable in self.slots}
        result = list[Array]()
        for variable in self.optimizer._variables:
            number, value = of_slot.get(id(variable)), np.array(variable)
            if number is not None and self.divided:
                told = self.world.from_all((self.spans[number][self.world.rank], value))
                held = [part for (start, stop), part in told if stop > start]
                value = np.concatenate(held) if len(held) > 1 else held[0]
                if value.size == int(np.prod(self.weights[number].shape)):
                    value = value.reshape(self.weights[number].shape)
            result.append(value)
        return result

    def held(self) -> dict[str, int]:
        """Bytes on this rank, by what they are."""
        weights = sum(int(np.prod(w.shape)) * np.dtype(w.dtype).itemsize for w in self.weights)
        of_slots = sum(int(np.prod(v.shape)) * np.dtype(v.dtype).itemsize for v in self.optimizer._variables)
        rows = sum(int(np.prod(v.shape)) * np.dtype(v.dtype).itemsize for v in self.rows)
        return {"parameters": weights, "gradients": weights, "state": of_slots + rows}


class _Looked(list[Any]):
    """Rows that say which of them is being looked at."""

    def __init__(self, rows: Sequence[Any], engine: Engine) -> None:
        super().__init__(rows)
        self._engine = engine

    def __iter__(self) -> Any:
        for row in super().__iter__():
            self._engine.reference = row
            yield row
        self._engine.reference = None


def _rowed(value: Array) -> tuple[int, ...]:
    return value.shape or (1,)


def _of(value: Array, span: tuple[int, int]) -> Array:
    return np.array(value.reshape(_rowed(value))[slice(*span)], "float32").reshape(-1)


def _split(flat: Array, sizes: Sequence[int]) -> list[Array]:
    return np.split(flat, np.cumsum(sizes)[:-1])


def _cut(value: Any, span: tuple[int, int]) -> Any:
    return (value if len(value.shape) else value[None])[span[0] : span[1]]


class GraphSharded(Sharded):
    """What a Keras optimizer on rows does otherwise in graphs: there rows go by the names of their own."""

    def _var_key(self, variable: Any) -> Any:
        return super(Sharded, self)._var_key(variable)  # type: ignore[misc]


class GraphScaled(ScaledLoss):
    """A `LossScaleOptimizer` of which all ranks decide as one."""

    def check_finite(self, grads: Any) -> Any:
        own = super(ScaledLoss, self).check_finite(grads)  # type: ignore[misc]
        world = vars(self)["_zeroshard_world"]
        everywhere = tf.py_function(lambda one: not world.any(not bool(one)), [own], tf.bool)
        everywhere.set_shape(())
        return everywhere

    def _stateful_handle_finite_grads(self, grads: Any, trainable_variables: Any) -> None:
        super(ScaledLoss, self)._stateful_handle_finite_grads(grads, trainable_variables)  # type: ignore[misc]
