"""Keras on TensorFlow over ranks: stages 0 to 2.

TensorFlow traces a step into a graph, so ranks exchange what they have inside of functions that the graph
calls. The optimizer is built on row variables of its own, with this rank's rows of every weight: gradients
are exchanged and added up row by row, the Keras optimizer's code runs on the rows, and all ranks then get the
rows of all. Weights and gradients are whole on every rank; the state is divided at stages 1 and 2.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from typing import Any
from weakref import WeakSet

import keras
import numpy as np
import tensorflow as tf
import torch
from keras import tree
from keras.src.backend.common.stateless_scope import StatelessScope, in_stateless_scope
from keras.src.backend.tensorflow import random as keras_random
from keras.src.backend.tensorflow import trainer as tf_trainer
from keras.src.callbacks.swap_ema_weights import SwapEMAWeights
from keras.src.layers.normalization.batch_normalization import BatchNormalization
from keras.src.losses import loss as keras_loss
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from keras.src.optimizers.multi_optimizer import MultiOptimizer
from keras.src.trainers.trainer import Trainer

import zeroshard as zs

from .config import Config
from .files import Files
from .graph_rows import Array, GraphEngine, GraphScaled
from .graph_shares import GraphShares
from .seams import Calls, Seams, forget_steps, refuse_compiled
from .updates import engine_of, innermost, standing_in
from .world import World

log = logging.getLogger("zeroshard")


class GraphSession:
    """One for each process, from `initialize` to `finish`."""

    def __init__(self, config: Config, world: World) -> None:
        self.config, self.world, self.shares = config, world, GraphShares(world)
        self.known: WeakSet[Any] = WeakSet()
        self.models: list[Any] = []
        self.engines: list[GraphEngine] = []
        self.depth = 0
        self.batch = 32
        if world.size > 1:  # where a script seeds nothing
            tf.random.set_seed(world.from_first(int(np.random.randint(2**31))))

    def model_of(self, keras_model: Any) -> None:
        return None

    def shard(self, optimizer: Any, weights: Sequence[Any]) -> GraphEngine:
        if isinstance(optimizer, MultiOptimizer):
            raise zs.ModelError(
                f"{optimizer.name} is a MultiOptimizer, and a sharded model has one optimizer: compile it "
                "with one of those inside."
            )
        stage = 2 if self.config.stage is None else self.config.stage
        with tf.init_scope():
            engine = GraphEngine(optimizer, weights, self.world, stage)
        self.engines.append(engine)
        if self.config.memory_limit_per_node is not None:
            self._keep_to_limit(engine)
        return engine

    def _keep_to_limit(self, engine: GraphEngine) -> None:
        limit = self.config.memory_limit_per_node or 0
        each = limit // (self.config.num_gpus_per_node or self.world.size)
        held = engine.held() | {"layer outputs": self._outputs(engine)}
        told = ", ".join(f"{name} {_shown(size)}" for name, size in held.items())
        if sum(held.values()) > each:
            raise zs.PlanError(
                f"memory_limit_per_node={limit} leaves {_shown(each)} for a rank, and it needs "
                f"{_shown(sum(held.values()))} ({told}): raise it, take smaller batches or more ranks, or "
                "set KERAS_BACKEND=torch, where parameters are divided and offloaded, too."
            )
        if self.world.rank == 0:
            log.warning("%s a rank of %s: %s", _shown(sum(held.values())), _shown(each), told)

    def _outputs(self, engine: GraphEngine) -> int:
        """What layers leave for backward, of one rank's samples, as far as their shapes are known."""
        wanted = {id(weight) for weight in engine.weights}
        models = [m for m in self.known if m.built and wanted <= {id(v) for v in m.trainable_variables}]
        samples, size = -(-self.batch // self.world.size), 0
        for layer in models[0]._flatten_layers(include_self=False, recursive=False) if models else ():
            for output in tree.flatten(getattr(layer, "output", None)) if layer._inbound_nodes else ():
                size += int(np.prod([samples, *(n or 1 for n in output.shape[1:])])) * 4
        return size

    def close(self) -> None:
        for engine in self.engines:
            engine.close(engine.whole())
        self.engines.clear()
        forget_steps(self.known)


def _shown(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


@dataclass(frozen=True)
class _Spec:
    """Of an array in a batch."""

    shape: tuple[int | None, ...]
    dtype: str


def _spec_of(given: Any) -> _Spec | None:
    return _Spec(tuple(given.shape), given.dtype.name) if isinstance(given, tf.TensorSpec) else None


def _spec_of_array(given: Any) -> _Spec | None:
    shape = getattr(given, "shape", None)
    return _Spec((None, *shape[1:]), keras.backend.standardize_dtype(given.dtype)) if shape else None


class Graphs(Calls):
    """The functions that stand in Keras for one session."""

    def __init__(self, session: Any) -> None:
        super().__init__(session)
        self._before: list[tuple[Any, Any]] = []  # metrics as they were before the step
        self._spec: Any = None  # of the batches of the call under way

    def install(self, seams: Seams) -> None:
        trainer, shares = tf_trainer.TensorFlowTrainer, self.shares
        self.install_calls(seams, trainer)
        for name, around in (("train", self._step), ("test", self._step), ("predict", self._predict)):
            seams.put(trainer, f"make_{name}_function", self._make(f"{name}_step", around))
        seams.put(Trainer, "get_metrics_result", self._metrics)
        seams.put(
            Trainer,
            "_aggregate_additional_loss",
            lambda original: lambda model, loss: shares.weighed(original(model, loss)),
        )
        seams.put(keras_loss, "reduce_values", shares.reduce_values)
        seams.put(keras_loss, "apply_mask", shares.apply_mask)
        for name in ("normal", "uniform", "randint", "truncated_normal"):
            seams.put(keras_random, name, shares.shaped)
        seams.put(keras_random, "dropout", shares.dropped)
        seams.put(BatchNormalization, "_moments", shares.moments)
        seams.put(BaseOptimizer, "apply", self._apply)
        seams.put(tf_trainer.TFEpochIterator, "__init__", self._seeded)
        for name in ("_swap_variables", "_finalize_ema_values"):
            seams.put(SwapEMAWeights, name, self._swapped)
        GraphFiles(self.session).install(seams)

    def entered(self, model: Any, name: str, args: Any) -> None:
        if name in ("train_on_batch", "test_on_batch") and len(args) > 1:
            self._spec = tree.map_structure(_spec_of_array, (args[0], args[1], None))

    def left(self) -> None:
        super().left()
        self._spec = None

    def _make(self, attribute: str, around: Callable[..., Any]) -> Callable[..., Any]:
        def replaced(original: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(original)
            def make(model: Any, force: bool = False) -> Any:
                refuse_compiled(model)
                self._prepare(model, attribute)
                if attribute in vars(model):
                    return original(model, force)
                vars(model)[attribute] = around(model, getattr(model, attribute))
                try:
                    return original(model, force)
                finally:
                    del vars(model)[attribute]

            return make

        return replaced

    def _prepare(self, model: Any, attribute: str) -> None:
        """Before a step is traced, in which nothing can be read: build the model and shard its optimizer."""
        optimizer = getattr(model, "optimizer", None)
        unbuilt = not all(layer.built for layer in model._flatten_layers())
        if unbuilt and self._spec is not None:
            model._symbolic_build(data_batch=self._spec)
        stock = type(model).train_step is tf_trainer.TensorFlowTrainer.train_step
        if optimizer is None or not model.built or not stock or attribute != "train_step":
            return
        weights = list(model.trainable_variables)
        engine = engine_of(innermost(optimizer))
        if weights and (engine is None or [id(w) for w in engine.weights] != [id(w) for w in weights]):
            engine = self.session.shard(innermost(optimizer), weights)
        if isinstance(optimizer, LossScaleOptimizer):
            vars(optimizer)["_zeroshard_world"] = self.world
            optimizer.__class__ = standing_in(type(optimizer), GraphScaled)
            if not optimizer.built:
                optimizer.build(weights)
            if engine is not None:
                engine.summed = self.world.size > 1

    def _step(self, model: Any, step: Callable[..., Any]) -> Callable[..., Any]:
        def shared(data: Any) -> Any:
            optimizer = getattr(model, "optimizer", None)
            engine = engine_of(innermost(optimizer)) if optimizer is not None else None
            self.shares.summed = engine is not None and engine.summed
            try:
                with self._dropped_if_empty(model):
                    return step(self.shares.take(data))
            finally:
                self._before = []

        return shared

    @contextmanager
    def _dropped_if_empty(self, model: Any) -> Any:
        """Of a share without samples, metrics forget what its dummy has told them; see `_metrics`."""
        self._before = []
        if self.world.size > 1:
            self._before = [(v, tf.identity(v.value)) for metric in model.metrics for v in metric.variables]
        yield

    def _predict(self, model: Any, step: Callable[..., Any]) -> Callable[..., Any]:
        def shared(data: Any) -> Any:
            outputs, share = step(self.shares.take(data)), self.shares.now
            if share is None:
                return outputs

            def whole(output: Any) -> Any:
                made = tf.py_function(self._chunks, [output, share.total], output.dtype)
                made.set_shape([None, *output.shape[1:]])
                return made

            return tree.map_structure(whole, outputs)

        return shared

    def _chunks(self, output: Any, total: Any) -> Array:
        ends = [int(total) * rank // self.world.size for rank in range(self.world.size + 1)]
        counts = [stop - start for start, stop in pairwise(ends)]
        every: Array = self.world.rows_of_all(torch.from_numpy(np.array(output)), counts).numpy()
        return every

    def _seeded(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def init(iterator: Any, *args: Any, **keywords: Any) -> None:
            self.world.seed_alike()
            self.session.batch = keywords.get("batch_size") or 32
            original(iterator, *args, **keywords)
            if self._spec is None:
                self._spec = tree.map_structure(_spec_of, iterator._distributed_dataset.element_spec)

        return init

    def _metrics(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def result(model: Any) -> Any:
            if self.world.size == 1 or in_stateless_scope() or not self.session.depth:
                return original(model)
            share = self.shares.now
            for variable, value in self._before:
                variable.assign(tf.where(share.empty, value, variable.value))
            self._before = []
            variables = list({id(v): v for metric in model.metrics for v in metric.variables}.values())
            if not variables:
                return original(model)
            flat = tf.concat([tf.reshape(tf.cast(v.value, tf.float64), [-1]) for v in variables], 0)
            sizes = [int(np.prod(v.shape)) for v in variables]
            parts = tf.split(self.shares._sum(flat), sizes)
            pairs = zip(variables, parts, strict=True)
            whole = [(v, tf.cast(tf.reshape(part, v.shape), v.value.dtype)) for v, part in pairs]
            with StatelessScope(state_mapping=whole):
                return original(model)

        return result

    def _swapped(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A callback that exchanges rows with their averages: the weights follow."""

        @wraps(original)
        def swap(callback: Any) -> None:
            for engine in self.session.engines:
                engine.refresh()
            original(callback)
            for engine in self.session.engines:
                engine.publish()

        return swap

    def _apply(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> None:
            if engine_of(optimizer) is None and not in_stateless_scope():
                weights = list(trainable_variables or optimizer._trainable_variables)
                self.session.shard(optimizer, weights).apply(list(grads), weights)
            else:
                original(optimizer, grads, trainable_variables)

        return apply


class GraphFiles(Files):
    """Weights are whole on every rank; slots are put together."""

    @contextmanager
    def _whole(self, model: Any) -> Any:
        optimizer = innermost(model.optimizer) if getattr(model, "optimizer", None) is not None else None
        engine = engine_of(optimizer) if optimizer is not None else None
        if engine is not None:
            vars(optimizer)["_zeroshard_saved"] = engine.whole()
        try:
            yield
        finally:
            if engine is not None:
                vars(optimizer).pop("_zeroshard_saved", None)


def begin(config: Config, world: World) -> GraphSession:
    return GraphSession(config, world)


def install(session: GraphSession, seams: Seams) -> None:
    Graphs(session).install(seams)
