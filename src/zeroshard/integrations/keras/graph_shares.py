"""What `shares` does, in TensorFlow's graphs: the numbers of a share are tensors, since a step is traced once
for batches of any size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import torch
from keras import tree
from keras.src.backend.common.stateless_scope import in_stateless_scope

from .world import World


@dataclass(frozen=True)
class GraphShare:
    """This rank's samples of a batch, as numbers of the graph."""

    total: Any
    start: Any
    stop: Any
    ranks: int

    @property
    def empty(self) -> Any:
        return tf.equal(self.start, self.stop)

    @property
    def begin(self) -> Any:
        return tf.where(self.empty, 0, self.start)

    @property
    def end(self) -> Any:
        return tf.where(self.empty, 1, self.stop)

    @property
    def part(self) -> Any:
        return tf.cast(self.stop - self.start, tf.float32) / tf.cast(self.total, tf.float32)

    @property
    def known_part(self) -> Any:
        """Above zero."""
        return tf.maximum(self.part, 1 / tf.cast(self.total, tf.float32))


class GraphShares:
    """The share of the batch that is under way, or traced; None where every rank has all of it."""

    def __init__(self, world: World) -> None:
        self.world, self.summed = world, False
        self.now: GraphShare | None = None

    def take(self, batch: Any) -> Any:
        """This rank's rows of a batch."""
        arrays = [one for one in tree.flatten(batch) if one is not None and len(one.shape)]
        if self.world.size == 1 or not arrays:
            self.now = None
            return batch
        total = tf.shape(arrays[0])[0]
        start = total * self.world.rank // self.world.size
        stop = total * (self.world.rank + 1) // self.world.size
        share = self.now = GraphShare(total, start, stop, self.world.size)
        return tree.map_structure(
            lambda one: one if one is None or not len(one.shape) else one[share.begin : share.end], batch
        )

    def sum(self, own: Any) -> Any:
        """Over all ranks, in fp64 where it counts; gradients come back from all."""

        @tf.custom_gradient
        def summed(value: Any) -> Any:
            return self._sum(value), lambda grad: self._sum(grad)

        return summed(own)

    def _sum(self, own: Any) -> Any:
        made = tf.py_function(
            lambda one: self.world.sum(torch.from_numpy(np.array(one))).numpy(), [own], own.dtype
        )
        made.set_shape(own.shape)
        return made

    def weighed(self, loss: Any) -> Any:
        """A loss whose gradient counts as its samples do."""
        share = self.now
        if share is None:
            return loss
        weight = tf.cast(share.part if self.summed else share.part * share.ranks, loss.dtype)
        return loss * weight + tf.stop_gradient(loss - loss * weight)

    # ---- losses ----

    def _common(self, own: Any, share: GraphShare) -> Any:
        """A denominator of all ranks, as large as this rank's would be by its number of samples."""
        mine = tf.where(share.empty, tf.zeros_like(own), own)
        return self._sum(mine) * tf.cast(share.known_part, own.dtype)

    def apply_mask(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def masked(sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
            made, share = original(sample_weight, mask, dtype, reduction), self.now
            if share is None or mask is None or reduction not in ("mean", "sum_over_batch_size"):
                return made
            valid = tf.reduce_sum(tf.cast(mask, made.dtype))
            return made * tf.math.divide_no_nan(valid, self._common(valid, share))

        return masked

    def reduce_values(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def reduced(values: Any, sample_weight: Any = None, reduction: Any = "sum_over_batch_size") -> Any:
            loss, share = original(values, sample_weight, reduction), self.now
            if share is None or in_stateless_scope() or len(loss.shape):
                return loss
            if reduction == "sum" and len(values.shape):
                loss = loss / tf.cast(share.known_part, loss.dtype)
            elif reduction == "mean_with_sample_weight" and sample_weight is not None and len(values.shape):
                own = tf.cast(tf.reduce_sum(sample_weight), loss.dtype)
                loss = loss * tf.math.divide_no_nan(own, self._common(own, share))
            return self.weighed(loss)

        return reduced

    # ---- noise and statistics ----

    def _whole(self, length: Any, share: GraphShare) -> tuple[Any, Any, Any]:
        each = length // (share.end - share.begin)
        return share.total * each, share.begin * each, share.end * each

    def dropped(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def drawn(inputs: Any, rate: float, noise_shape: Any = None, seed: Any = None) -> Any:
            share = self.now
            if share is None or not len(inputs.shape) or in_stateless_scope():
                return original(inputs, rate, noise_shape, seed)
            total, begin, end = self._whole(tf.shape(inputs)[0], share)
            ones = tf.ones(tf.concat([[total], tf.shape(inputs)[1:]], 0), inputs.dtype)
            return inputs * tf.ensure_shape(original(ones, rate, noise_shape, seed)[begin:end], inputs.shape)

        return drawn

    def shaped(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def drawn(shape: Any, *args: Any, **keywords: Any) -> Any:
            share = self.now
            of_batch = tf.is_tensor(shape) or (len(shape) and (shape[0] is None or tf.is_tensor(shape[0])))
            if share is None or not of_batch or in_stateless_scope():
                return original(shape, *args, **keywords)
            total, begin, end = self._whole(shape[0], share)
            return original(tf.concat([[total], shape[1:]], 0), *args, **keywords)[begin:end]

        return drawn

    def moments(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def taken(layer: Any, inputs: Any, mask: Any) -> Any:
            share = self.now
            if share is None or in_stateless_scope():
                return original(layer, inputs, mask)
            axes, shown = list(layer._reduction_axes), tf.ones_like(inputs)
            if mask is not None:
                shown = tf.cast(tf.broadcast_to(mask[..., None], tf.shape(inputs)), inputs.dtype)
            shown = tf.where(share.empty, tf.zeros_like(shown), shown)
            count = self._sum(tf.reduce_sum(shown, axes))
            count = count + (keras.config.epsilon() if mask is not None else 0.0)
            mean = self.sum(tf.reduce_sum(inputs * shown, axes)) / count
            around = (inputs - self._spread(mean, inputs, axes)) * shown
            return mean, self.sum(tf.reduce_sum(tf.square(around), axes)) / count

        return taken

    def _spread(self, mean: Any, inputs: Any, axes: list[int]) -> Any:
        shape = [1 if axis in axes else inputs.shape[axis] for axis in range(len(inputs.shape))]
        return tf.reshape(mean, shape)
