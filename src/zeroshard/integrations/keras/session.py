"""What `initialize` begins: the ranks, the shares of batches, and the models that are sharded."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import keras
import numpy as np
import torch
from keras import tree as nest
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from keras.src.optimizers.multi_optimizer import MultiOptimizer
from torch import Tensor
from torch.distributed.tensor import DTensor

import zeroshard as zs

from .config import Config
from .holders import Tree, list_anew
from .seams import forget_steps
from .shares import Shares
from .updates import Engine, ScaledLoss, engine_of, for_keras, innermost, plain_class, rows_like, standing_in
from .world import World

log = logging.getLogger("zeroshard")


class Model:
    """A Keras model that is sharded, with its optimizer."""

    def __init__(self, keras_model: Any, optimizer: Any, world: World, options: dict[str, Any]) -> None:
        self.keras, self.optimizer, self.world = keras_model, optimizer, world
        inner = innermost(optimizer)
        weights = list(keras_model.trainable_variables)
        self.tree = Tree(keras_model)
        torch_side = for_keras(inner, weights)
        units = self.tree.units()
        self.tree.stand()
        try:
            self.run = zs.shard(self.tree.root, torch_side, units=units or "none", **options)
        except BaseException:
            self.tree.fall()
            raise
        self.tree.begin(self.run)
        sharded_params = [self.tree.holdings[id(weight)].standing for weight in weights]
        self.engine = torch_side.engine = Engine(inner, torch_side, weights, sharded_params, world)
        if isinstance(optimizer, LossScaleOptimizer):
            optimizer.__class__ = standing_in(type(optimizer), ScaledLoss)
            if not optimizer.built:
                optimizer.build(weights)

    def close(self) -> None:
        """Plain again, the optimizer too: on every rank it has the whole state, and goes on with it wherever
        it is used next."""
        values = self.engine.whole()
        self.run.close()
        self.tree.fall()
        self.engine.close(values)
        self.optimizer.__class__ = plain_class(type(self.optimizer))

    def step_on(self, grads: Sequence[Tensor | None]) -> None:
        """The step that was under way when the model was sharded: with whole gradients, the same on every
        rank."""
        for sharded_param, grad in zip(self.engine.sharded_params, grads, strict=True):
            if grad is None:
                continue
            rows = rows_like(grad.to(sharded_param.device), sharded_param, self.world)
            with torch.no_grad():
                sharded_param.grad = torch.zeros_like(sharded_param)
                (
                    sharded_param.grad.to_local()
                    if isinstance(sharded_param.grad, DTensor)
                    else sharded_param.grad
                ).copy_(rows)
        self.engine.torch_side.step()


class Session:
    """One for each process, from `initialize` to `finish`."""

    def __init__(self, config: Config, world: World) -> None:
        self.config, self.world = config, world
        self.shares = Shares(world)
        self.known: WeakSet[Any] = WeakSet()  # Keras models of this process
        self.models: list[Model] = []
        self.taken_apart: WeakSet[Any] = WeakSet()  # Keras models, since others have their weights
        self.by_turns = False  # whether it was said that such models cost time
        self.depth = 0  # calls of fit, evaluate and the like under way

    def model_of(self, keras_model: Any) -> Model | None:
        return next((model for model in self.models if model.keras is keras_model), None)

    def shard(self, keras_model: Any, optimizer: Any, batch: Any = None) -> Model:
        """The model with this optimizer; divided now, if it is not yet."""
        found = self.model_of(keras_model)
        if found is not None and found.optimizer is optimizer and self._as_it_was(found):
            return found
        if found is not None:
            self.forget(found)
        for other in self._sharing(keras_model):
            self.forget(other)
        if isinstance(innermost(optimizer), MultiOptimizer):
            raise zs.ModelError(
                f"{optimizer.name} is a MultiOptimizer, and a sharded model has one optimizer: compile it "
                "with one of those inside."
            )
        options = self.config.options() | self.config.limits()
        if self.config.memory_limit_per_node is not None and batch is not None:
            options |= {"batch": batch, "loss": _any_loss}
        model = Model(keras_model, optimizer, self.world, options)
        self.models.append(model)
        for outer in self.known:
            if any(layer is keras_model for layer in outer._flatten_layers()):
                list_anew(outer)
                vars(outer)["zero_grad"] = partial(self._zero_grad, outer)
        return model

    def _sharing(self, keras_model: Any) -> list[Model]:
        """Sharded models that have weights of this one, such as a part of it that was trained before: a
        weight is in one run."""
        ours = {id(weight) for weight in keras_model.weights}
        sharing = [model for model in self.models if ours & model.tree.holdings.keys()]
        if sharing and keras_model in self.taken_apart and not self.by_turns and self.world.rank == 0:
            self.by_turns = True
            log.warning(
                "%s and %s share weights and train by turns: each is divided anew when its turn comes, which "
                "costs time. A train_step of one model that has both, with an optimizer each, does not.",
                keras_model.name,
                sharing[0].keras.name,
            )
        self.taken_apart.update(model.keras for model in sharing)
        return sharing

    def _zero_grad(self, outer: Any, set_to_none: bool = True) -> None:
        """Of a Keras model that is sharded, or has parts that are."""
        type(outer).zero_grad(outer, set_to_none)
        inside = {id(layer) for layer in outer._flatten_layers()}
        for model in self.models:
            if id(model.keras) in inside:
                model.tree.root.zero_grad(set_to_none)

    def _as_it_was(self, model: Model) -> bool:
        """Whether the same weights train."""
        return [id(v) for v in model.keras.trainable_variables] == [id(v) for v in model.engine.weights]

    def forget(self, model: Model) -> None:
        model.close()
        self.models.remove(model)
        for outer in self.known:
            if any(layer is model.keras for layer in outer._flatten_layers()):
                list_anew(outer)
                vars(outer).pop("zero_grad", None)

    def apply(self, optimizer: Any, grads: Sequence[Any], weights: Sequence[Any]) -> bool:
        """A loop's first `apply` with an optimizer that is not sharded: shard the model whose weights these
        are, and make the step. False where they are of no model."""
        owner = self._owner(weights)
        if owner is None or engine_of(innermost(optimizer)) is not None:
            return False
        by_weight = dict(zip(map(id, weights), grads, strict=True))
        every = [by_weight.get(id(weight)) for weight in owner.trainable_variables]
        if self.model_of(owner) is not None:  # with another optimizer: its run has added them up
            whole = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in every]
        else:
            whole = self.world.mean(every) if self.world.size > 1 else every
        for weight in owner.trainable_variables:
            weight._value.grad = None
        self.shard(owner, optimizer).step_on(whole)
        return True

    def averaged(self, optimizer: Any, grads: Sequence[Any], weights: Sequence[Any]) -> list[Any]:
        """Of weights that are of no model: every rank has all of them, and the mean of the gradients."""
        if not optimizer.built and self.world.size > 1:
            values = self.world.from_first([np.array(w) for w in weights] if self.world.rank == 0 else None)
            for weight, value in zip(weights, values, strict=True):
                weight.assign(value)
        return self.world.mean(grads) if self.world.size > 1 else list(grads)

    def _owner(self, weights: Sequence[Any]) -> Any:
        """The smallest model that has all of them, and of those with the same the outermost."""
        wanted = {id(weight) for weight in weights}
        behind = {id(model._functional) for model in self.known if hasattr(model, "_functional")}
        having = [model for model in self.known if model.built and id(model) not in behind]
        having = [model for model in having if wanted <= {id(v) for v in model.trainable_variables}]
        if not having:
            return None
        fewest = min(len(model.trainable_variables) for model in having)
        having = [model for model in having if len(model.trainable_variables) == fewest]
        inside = {id(layer) for model in having for layer in model._flatten_layers(include_self=False)}
        return next((model for model in having if id(model) not in inside), having[0])

    def close(self) -> None:
        """Every model is plain again."""
        for model in list(self.models):
            self.forget(model)
        forget_steps(self.known)


def example_of(batch: Any) -> Any:
    """What the model is called with, of a batch: for a plan."""
    inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
    return (nest.map_structure(keras.ops.convert_to_tensor, inputs),)


def _any_loss(output: Any) -> Tensor:
    """A scalar of a model's outputs: what memory a step takes depends on their shapes alone."""
    return torch.stack([one.float().mean() for one in nest.flatten(output)]).sum()
