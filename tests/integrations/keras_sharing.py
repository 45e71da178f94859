"""Scripts of Keras in which models share weights, or an optimizer comes back to a model."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
from keras import layers
from keras_case import LOSS, Plain, arrays, dense, stepped

import zeroshard.integrations.keras as tz

o = keras.optimizers
Found = tuple[list[float], list[np.ndarray]]


def found(name: str, config: Plain | None = None) -> Found:
    """What a script told, and the weights to which it came: plain, or as one of the ranks."""
    if config is not None:
        tz.initialize(tz.Config(**config))
    try:
        keras.utils.set_random_seed(0)
        return SHARING[name]()
    finally:
        tz.finish()


def fitted(model: keras.Model, optimizer: Any) -> list[float]:
    """Compiled with this optimizer, and trained."""
    x, y = arrays(50)
    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy")
    losses: list[float] = model.fit(x, y, batch_size=16, epochs=2, verbose=0).history["loss"]
    return losses


def transferred() -> Found:
    """A trained model becomes a part of another: frozen there, then thawed; then it is trained alone again,
    with the optimizer that it had."""
    base, own = dense(), o.Adam(1e-2)
    told = fitted(base, own)
    base.trainable = False
    inputs = keras.Input((12,))
    model = keras.Model(
        inputs, layers.Dense(5, activation="softmax")(layers.Dropout(0.2, seed=1)(base(inputs)))
    )
    told += fitted(model, o.SGD(0.1, momentum=0.9))
    base.trainable = True
    told += fitted(model, o.SGD(0.1, momentum=0.9))
    told += fitted(base, own)
    return told, model.get_weights()


def parts() -> Found:
    """A loop with two optimizers, each for a part of one model."""
    model, optimizers = dense(), (o.Adam(1e-2), o.SGD(0.1, momentum=0.9))
    weights = model.trainable_weights
    halves = (SimpleNamespace(trainable_weights=weights[:4]), SimpleNamespace(trainable_weights=weights[4:]))
    x, y = arrays(48)
    for start in (*range(0, 48, 16), *range(0, 48, 16)):
        batch = tz.share((x[start : start + 16], y[start : start + 16]))
        for optimizer, half in zip(optimizers, halves, strict=True):
            stepped(
                model, optimizer, lambda b=batch: (LOSS()(b[1], model(b[0], training=True)), None), of=half
            )
    return [], model.get_weights()


def compiled_back() -> Found:
    """With one optimizer, with another, and with the first again, which goes on with its state."""
    model, first, second = dense(), o.Adam(1e-2), o.SGD(0.1, momentum=0.9)
    told = [loss for optimizer in (first, second, first) for loss in fitted(model, optimizer)]
    return told, model.get_weights()


def by_turns() -> Found:
    """A critic that is trained alone, and frozen inside of a model that trains a generator against it."""
    maker = keras.Sequential([keras.Input((12,)), layers.Dense(12)])
    critic = keras.Sequential([keras.Input((12,)), layers.Dense(8, activation="relu"), layers.Dense(1)])
    critic.compile(o.Adam(1e-2), "mse")
    inputs = keras.Input((12,))
    both = keras.Model(inputs, critic(maker(inputs)))
    critic.trainable = False
    both.compile(o.Adam(1e-2), "mse")
    x, told = arrays(48)[0], list[float]()
    for start in range(0, 48, 16):
        batch = x[start : start + 16]
        seen = np.concatenate([batch, maker.predict(batch, verbose=0)])
        critic.trainable = True
        told.append(float(critic.train_on_batch(seen, np.repeat([[1.0], [0.0]], 16, axis=0))))
        critic.trainable = False
        told.append(float(both.train_on_batch(batch, np.ones((16, 1)))))
    return told, both.get_weights()


def plain_later(optimizer: Any) -> Found:
    """Trained by the ranks, and then by plain Keras on each of them."""
    model = dense()
    told = fitted(model, optimizer)
    tz.finish()
    keras.utils.set_random_seed(1)
    x, y = arrays(50)
    told += model.fit(x, y, batch_size=16, verbose=0).history["loss"]
    return [*told, float(optimizer.iterations)], model.get_weights()


SHARING: dict[str, Callable[[], Found]] = {
    "a part of another": transferred,
    "an optimizer for each part": parts,
    "compiled again, and back": compiled_back,
    "trained by turns": by_turns,
    "plain afterwards": lambda: plain_later(o.Adam(1e-2)),
    "plain afterwards, with scaled losses": lambda: plain_later(
        o.LossScaleOptimizer(o.Adam(1e-2), initial_scale=64, dynamic_growth_steps=3)
    ),
    "plain afterwards, whole state": lambda: plain_later(o.Adafactor(1e-2)),
}
