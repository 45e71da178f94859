"""Keras's training loop over ranks, on the PyTorch backend."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import wraps
from typing import Any

import keras
import numpy as np
import torch
from keras import tree
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.backend.torch import random as keras_random
from keras.src.backend.torch import trainer as torch_trainer
from keras.src.backend.torch.layer import TorchLayer
from keras.src.layers.layer import Layer
from keras.src.layers.normalization.batch_normalization import BatchNormalization
from keras.src.losses import loss as keras_loss
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from keras.src.trainers.trainer import Trainer
from torch import Tensor

import zeroshard as zs

from .config import Config
from .files import Files
from .holders import track_plain
from .seams import Calls, Seams, refuse_compiled
from .session import Session, example_of
from .shares import Losses, Moments, Noise
from .updates import engine_of, innermost
from .world import World


class Loops(Calls):
    """The functions that stand in Keras for one session."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._empties: list[tuple[Any, Tensor]] = []  # metrics as they were before a share without samples
        self._first_batch = False

    def left(self) -> None:
        super().left()
        self._empties = []

    def install(self, seams: Seams) -> None:
        trainer, losses = torch_trainer.TorchTrainer, keras_loss
        self.install_calls(seams, trainer)
        seams.put(trainer, "make_train_function", self._make("train_function", self._train))
        seams.put(trainer, "make_test_function", self._make("test_function", self._test))
        seams.put(trainer, "make_predict_function", self._make("predict_function", self._predict))
        seams.put(Trainer, "get_metrics_result", self._metrics)
        seams.put(Trainer, "_aggregate_additional_loss", self._additional)
        seams.put(torch_trainer.TorchEpochIterator, "_get_iterator", self._iterator)
        several = Losses(self.shares, losses.reduce_values, losses.apply_mask)
        seams.put(losses, "reduce_values", lambda _: several.reduce_values)
        seams.put(losses, "apply_mask", lambda _: several.apply_mask)
        noise = Noise(self.shares)
        for name in ("normal", "uniform", "randint", "truncated_normal"):
            seams.put(keras_random, name, noise.shaped)
        seams.put(keras_random, "dropout", noise.dropped)
        seams.put(BatchNormalization, "_moments", Moments(self.shares).of)
        seams.put(Layer, "_get_regularization_losses", self._penalties)
        seams.put(TorchLayer, "_track_variables", self._tracked)
        seams.put(BaseOptimizer, "apply", self._apply)
        Files(self.session).install(seams)

    # ---- steps ----

    def _make(self, attribute: str, around: Callable[..., Any]) -> Callable[..., Any]:
        """`make_train_function` and the like: what they make gets this rank's rows."""

        def replaced(original: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(original)
            def make(model: Any, force: bool = False) -> Any:
                refuse_compiled(model)
                made = original(model, force)
                function = getattr(model, attribute)
                if getattr(function, "_zeroshard", None) is not self:
                    wrapped = around(model, function)
                    wrapped._zeroshard = self
                    setattr(model, attribute, wrapped)
                    made = wrapped
                return made

            return make

        return replaced

    def _train(self, model: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        def step(data: Any) -> Any:
            batch = self._share(model, data)
            stock = type(model).train_step is torch_trainer.TorchTrainer.train_step
            if stock and model.optimizer is not None:
                sharded = self.session.shard(model, model.optimizer, example_of(batch))
                halves = isinstance(model.optimizer, LossScaleOptimizer)
                self.shares.summed = sharded.engine.summed = halves and self.shares.now is not None
            return function([batch])

        return step

    def _test(self, model: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda data: function([self._share(model, data)])

    def _predict(self, model: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        def step(data: Any) -> Any:
            outputs = function([self._share(model, data)])
            share = self.shares.now
            if share is None:
                return outputs
            counts = share.counts

            def whole(output: Any) -> Any:
                mine = isinstance(output, Tensor) and output.dim() and output.shape[0] == share.count
                return self.world.rows_of_all(output, counts) if mine else output

            return tree.map_structure(whole, outputs)

        return step

    def _share(self, model: Any, data: Any) -> Any:
        if self._first_batch:
            self._first_batch = False
            self._compare(model, data[0])
        batch = self.shares.take(data[0])
        share = self.shares.now
        self._empties = []
        if share is not None and share.empty:
            self._empties = [(v, v._value.detach().clone()) for m in model.metrics for v in m.variables]
        sharded = self.session.model_of(model)
        if sharded is not None and sharded.engine.rewritten:
            sharded.run.publish()
        return batch

    def _compare(self, model: Any, batch: Any) -> None:
        """Each rank draws the same batches; a loader that draws others would train with each sample of one
        rank and lose those of the others."""
        sums = [
            hashlib.blake2b(np.ascontiguousarray(keras.ops.convert_to_numpy(one)).tobytes()).hexdigest()
            for one in tree.flatten(batch)
            if one is not None
        ]
        others = [rank for rank, told in enumerate(self.world.from_all(sums)) if told != sums]
        if others:
            raise zs.RankError(
                f"{model.name}: rank {self.world.rank} draws other data than rank {others[0]}. Every rank "
                "draws the whole batches, and takes its rows of each: shuffle and augment with "
                "keras.utils.set_random_seed() or a seed of your own, and leave out what shards by rank."
            )

    def _iterator(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def get(iterator: Any) -> Any:
            if self.session.depth:
                self.world.seed_alike()
                self._first_batch = True
            return original(iterator)

        return get

    # ---- what all ranks know ----

    def _metrics(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Of all ranks: Keras says of every variable of a metric how those of replicas are put together."""

        @wraps(original)
        def result(model: Any) -> Any:
            if self.world.size == 1 or in_stateless_scope() or not self.session.depth:
                return original(model)
            for variable, value in self._empties:
                variable._value.data.copy_(value)
            self._empties = []
            variables = list({id(v): v for metric in model.metrics for v in metric.variables}.values())
            kept = [variable._value for variable in variables]
            if self.shares.now is not None and variables:
                self._put_together(variables)
            try:
                return original(model)
            finally:
                for variable, value in zip(variables, kept, strict=True):
                    variable._value = value

        return result

    def _put_together(self, variables: list[Any]) -> None:
        values = [variable._value.detach() for variable in variables]
        wide = [value.to(torch.float64).reshape(-1) for value in values]
        for part, variable in zip(wide, variables, strict=True):
            if variable.aggregation == "mean":
                part.div_(self.world.size)
            elif variable.aggregation == "only_first_replica" and self.world.rank:
                part.zero_()
        whole = self.world.sum(torch.cat(wide)).split([part.numel() for part in wide])
        for variable, value, part in zip(variables, values, whole, strict=True):
            variable._value = part.view(value.shape).to(value.dtype)

    def _additional(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return wraps(original)(lambda model, loss: self.shares.weighed(original(model, loss)))

    def _penalties(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What regularizers made of weights while these were whole; and of others, what they make now."""

        @wraps(original)
        def losses(layer: Any) -> Any:
            sharded = self.session.model_of(layer)
            if sharded is None or in_stateless_scope():
                return original(layer)
            found = sharded.tree.penalties()
            weights = [v for v in layer.trainable_weights if v.regularizer is not None]
            return [found[id(v)] if id(v) in found else v.regularizer(v) for v in weights]

        return losses

    def _tracked(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def track(layer: Any) -> None:
            if not track_plain(layer):
                original(layer)

        return track

    def _apply(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The first `apply` of a loop shards the model."""

        @wraps(original)
        def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> None:
            if engine_of(innermost(optimizer)) is None and not in_stateless_scope():
                weights = trainable_variables or optimizer._trainable_variables
                grads, weights = list(grads), list(weights)
                if weights and self.session.apply(optimizer, grads, weights):
                    return
                if weights and not isinstance(optimizer, LossScaleOptimizer):
                    grads, trainable_variables = self.session.averaged(optimizer, grads, weights), weights
            original(optimizer, grads, trainable_variables)

        return apply


def begin(config: Config, world: World) -> Session:
    return Session(config, world)


def install(session: Session, seams: Seams) -> None:
    Loops(session).install(seams)
