"""Scripts as users of Keras write them, run by plain Keras in one process, or by ranks after `initialize`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("KERAS_HOME", tempfile.mkdtemp(prefix="keras-home-"))

import keras
import numpy as np
from keras import layers, ops

import zeroshard as zs
import zeroshard.integrations.keras as tz

Plain = Mapping[str, Any]
BACKEND = keras.backend.backend()


@dataclass
class Script:
    """What one script does. `model`, `optimizer`, `callbacks`, `data`: names of functions below."""

    model: str = "dense"
    optimizer: str = "adam"
    fit: Plain = field(default_factory=dict)
    compile: Plain = field(default_factory=dict)
    callbacks: str = "none"
    data: str = "arrays"
    samples: int = 50
    batch: int = 16
    epochs: int = 2
    seed: int = 0
    folder: str = ""


@dataclass
class Outcome:
    """What it came to: losses and metrics by epoch, the last evaluation, weights, the optimizer's state and
    predictions."""

    history: dict[str, list[float]]
    evaluated: dict[str, float]
    weights: list[np.ndarray]
    slots: list[np.ndarray]
    predicted: np.ndarray
    stats: Any = None
    told: list[Any] = field(default_factory=list)


# ---- models ----


def dense() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((12,)),
            layers.Dense(16, activation="relu"),
            layers.Dense(16, activation="relu"),
            layers.Dense(5, activation="softmax"),
        ]
    )


def noisy() -> keras.Model:
    """What draws random numbers, and what looks at the whole batch."""
    inputs = keras.Input((12,))
    x = layers.Dense(16)(inputs)
    x = layers.BatchNormalization()(x)
    x = layers.Dropout(0.3)(layers.Activation("relu")(x))
    x = layers.GaussianNoise(0.1, seed=4)(x)
    x = layers.Dense(16, activity_regularizer=keras.regularizers.L2(1e-2))(x)
    return keras.Model(inputs, layers.Dense(5, activation="softmax")(layers.Dropout(0.2, seed=1)(x)))


def penalised() -> keras.Model:
    """Regularizers and constraints."""
    l2 = keras.regularizers.L2(1e-2)
    return keras.Sequential(
        [
            layers.Dense(16, activation="relu", kernel_regularizer=l2, bias_regularizer="l1"),
            layers.Dense(16, kernel_constraint=keras.constraints.MaxNorm(0.7), use_bias=False),
            layers.Dense(5, activation="softmax", kernel_regularizer=keras.regularizers.L1L2(1e-3, 1e-3)),
        ]
    )


@keras.saving.register_keras_serializable("case")
class Block(layers.Layer):
    """Attention and a perceptron, as a layer of layers."""

    def __init__(self, width: int, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.norm = layers.LayerNormalization()
        self.attention = layers.MultiHeadAttention(2, width // 2)
        self.up, self.down = layers.Dense(2 * width, activation="gelu"), layers.Dense(width)

    def get_config(self) -> Any:
        return super().get_config() | {"width": self.down.units}

    def build(self, shape: Any) -> None:
        self.norm.build(shape)
        self.attention.build(shape, shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], 2 * shape[-1]))

    def call(self, x: Any) -> Any:
        y = self.norm(x)
        x = x + self.attention(y, y)
        return x + self.down(self.up(x))


class Text(keras.Model):
    """Tokens with a mask, repeated blocks, and an embedding that is used twice."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.tokens = layers.Embedding(7, 8, mask_zero=True)
        self.blocks = [Block(8) for _ in range(3)]
        self.memory = layers.GRU(8)
        self.head = layers.Dense(5, activation="softmax")

    def call(self, x: Any) -> Any:
        tokens = ops.cast(ops.clip(ops.abs(x) * 3, 0, 6), "int32")
        y = self.tokens(tokens)
        for block in self.blocks:
            y = block(y)
        return self.head(self.memory(y))


def stepped(model: Any, optimizer: Any, forward: Callable[[], Any], of: Any = None) -> Any:
    """Forward, backward and update of a loop of one's own, as each backend writes them. `of`: a part of the
    model that this updates."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss, made = forward()
            weights = list((of or model).trainable_weights)
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss, made
    import torch

    loss, made = forward()
    weights = list((of or model).trainable_weights)
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        optimizer.apply([v.value.grad for v in weights], weights)
    return loss, made


class Own(keras.Model):
    """A training step of its own, as the guides show it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = layers.Dense(16, activation="relu"), layers.Dense(5, activation="softmax")
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, x: Any) -> Any:
        return self.head(self.inner(x))

    def train_step(self, data: Any) -> Any:
        x, y, *_ = data
        loss, y_pred = stepped(
            self, self.optimizer, lambda: (self.compute_loss(y=y, y_pred=(p := self(x, training=True))), p)
        )
        self.seen.update_state(ops.mean(y_pred[:, 0]), sample_weight=ops.shape(x)[0])
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss, sample_weight=ops.shape(x)[0])
            elif metric.name != "seen":
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics} and self.get_metrics_result()


def branched() -> keras.Model:
    """Two inputs, two outputs, a layer that is used twice, a model inside of the model, convolution."""
    first, second = keras.Input((12,), name="first"), keras.Input((12,), name="second")
    shared = layers.Dense(12, activation="tanh")
    inner = keras.Sequential(
        [keras.Input((12,)), layers.Reshape((12, 1)), layers.Conv1D(4, 3), layers.Flatten()]
    )
    x = layers.Concatenate()(
        [inner(shared(first)), layers.Bidirectional(layers.LSTM(3))(layers.Reshape((4, 3))(shared(second)))]
    )
    return keras.Model(
        {"first": first, "second": second},
        {
            "kind": layers.Dense(5, activation="softmax", name="kind")(x),
            "size": layers.Dense(1, name="size")(x),
        },
    )


MODELS: dict[str, Callable[[], keras.Model]] = {
    "dense": dense,
    "noisy": noisy,
    "penalised": penalised,
    "text": Text,
    "own": Own,
    "branched": branched,
}

# ---- optimizers ----

o = keras.optimizers


def _excluding() -> Any:
    optimizer = o.AdamW(1e-2, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adam": lambda: o.Adam(1e-2),
    "gentle": lambda: o.SGD(0.02),
    "sgd": lambda: o.SGD(0.1, momentum=0.9, nesterov=True, global_clipnorm=0.3),
    "rmsprop": lambda: o.RMSprop(1e-2, centered=True, momentum=0.5, clipnorm=0.1),
    "adamw": _excluding,
    "adadelta": lambda: o.Adadelta(1.0, clipvalue=0.02),
    "adagrad": lambda: o.Adagrad(0.1, use_ema=True, ema_momentum=0.9),
    "adamax": lambda: o.Adamax(1e-2, weight_decay=0.01),
    "nadam": lambda: o.Nadam(o.schedules.ExponentialDecay(1e-2, 3, 0.7)),
    "ftrl": lambda: o.Ftrl(0.1),
    "lion": lambda: o.Lion(1e-3),
    "adafactor": lambda: o.Adafactor(1e-2, global_clipnorm=0.3),
    "lamb": lambda: o.Lamb(1e-2, clipnorm=0.1),
    "muon": lambda: o.Muon(1e-2),
    "schedulefree": lambda: o.ScheduleFreeAdamW(1e-2),
    "accumulating": lambda: o.Adam(1e-2, gradient_accumulation_steps=3, global_clipnorm=0.2),
    "overwriting": lambda: o.SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3),
    "amsgrad": lambda: o.Adam(1e-2, amsgrad=True),
    "scaled": lambda: o.LossScaleOptimizer(o.Adam(1e-2), initial_scale=1024, dynamic_growth_steps=3),
}

LOSS = keras.losses.SparseCategoricalCrossentropy

# ---- data ----


def arrays(samples: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(3)
    x = generator.normal(size=(samples, 12)).astype("float32")
    return x, (x[:, :5].argmax(-1)).astype("int32")


class Sequence(keras.utils.PyDataset):
    """Batches of different sizes, in an order of its own."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.x, self.y = arrays(samples)
        self.ends = np.cumsum([0, 7, 1, 12, 5, samples - 25])

    def __len__(self) -> int:
        return 5

    def __getitem__(self, number: int) -> Any:
        rows = slice(self.ends[number], self.ends[number + 1])
        return self.x[rows], self.y[rows]

    def on_epoch_end(self) -> None:
        order = np.random.permutation(len(self.x))
        self.x, self.y = self.x[order], self.y[order]


def _loader(samples: int) -> Any:
    import torch

    x, y = (torch.from_numpy(array) for array in arrays(samples))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=9, shuffle=True)


def _generator(samples: int) -> Any:
    x, y = arrays(samples)
    while True:
        for start in range(0, samples - 9, 10):
            yield x[start : start + 10], y[start : start + 10], np.linspace(0.1, 1, 10)


def _pipeline(samples: int) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(arrays(samples)).shuffle(samples, seed=3).batch(9)


DATA: dict[str, Callable[[int], Any]] = {
    "arrays": arrays,
    "sequence": Sequence,
    "loader": _loader,
    "generator": _generator,
    "pipeline": _pipeline,
}

# ---- callbacks ----


class Told(keras.callbacks.Callback):
    """What batches were told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.told.append(float(logs["loss"]))


class StopsOne(keras.callbacks.Callback):
    """Asks to stop on one rank alone, after some batches."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        import torch.distributed as dist

        if batch == 1 and (not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1):
            self.model.stop_training = True


def _kept(folder: str) -> list[Any]:
    return [
        keras.callbacks.ModelCheckpoint(f"{folder}/best.keras", monitor="val_loss", save_best_only=True),
        keras.callbacks.ModelCheckpoint(f"{folder}/{{epoch}}.weights.h5", save_weights_only=True),
        keras.callbacks.CSVLogger(f"{folder}/log.csv"),
        keras.callbacks.BackupAndRestore(f"{folder}/backup"),
    ]


CALLBACKS: dict[str, Callable[[str], list[Any]]] = {
    "none": lambda _: [],
    "told": lambda _: [Told()],
    "early": lambda _: [
        keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=0.2, restore_best_weights=True)
    ],
    "plateau": lambda _: [keras.callbacks.ReduceLROnPlateau("loss", factor=0.3, patience=0, min_delta=0.5)],
    "stops": lambda _: [StopsOne()],
    "swap": lambda _: [keras.callbacks.SwapEMAWeights()],
    "kept": _kept,
    "stats": lambda folder: [keras.callbacks.CSVLogger(f"{folder}/log.csv"), tz.LogStats()],
}


# ---- scripts ----


def ran(script: Script, config: Plain | None = None, do: str = "script") -> Outcome:
    """A script in this process: plain, or as one of the ranks."""
    if config is not None:
        tz.initialize(tz.Config(**config))
    try:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
        return SCRIPTS[do](script)
    finally:
        keras.config.set_dtype_policy("float32")
        if config is not None:
            tz.finish()


def compiled(script: Script) -> keras.Model:
    keras.utils.set_random_seed(script.seed)
    model = MODELS[script.model]()
    options = {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]} | dict(script.compile)
    model.compile(optimizer=OPTIMIZERS[script.optimizer](), **options)
    if BACKEND == "tensorflow" and model.built:
        model.optimizer.build(model.trainable_variables)  # Keras would do it while it traces a step
    return model


def fitted(model: keras.Model, script: Script) -> Outcome:
    given = DATA[script.data](script.samples)
    x, y = given if isinstance(given, tuple) else (given, None)
    callbacks = CALLBACKS[script.callbacks](script.folder)
    val = arrays(11)
    own = {} if y is None else {"batch_size": script.batch}
    options = {"epochs": script.epochs, "verbose": 0, "validation_data": val, "callbacks": callbacks, **own}
    options |= dict(script.fit)
    done = model.fit(x, y, **{name: value for name, value in options.items() if value is not None})
    evaluated = model.evaluate(*val, batch_size=4, verbose=0, return_dict=True)
    predicted = model.predict(val[0], batch_size=4, verbose=0)
    run = tz.run_of(model)
    told = [one for callback in callbacks for one in getattr(callback, "told", [])]
    store: dict[str, Any] = {}
    model.optimizer.save_own_variables(store)
    slots = [np.asarray(store[str(n)]) for n in range(len(store))]
    stats = run.stats() if run is not None else None
    return Outcome(done.history, evaluated, model.get_weights(), slots, predicted, stats, told)


def _script(script: Script) -> Outcome:
    return fitted(compiled(script), script)


def _mixed(script: Script) -> Outcome:
    keras.config.set_dtype_policy("mixed_float16")
    return _script(script)


def _bf16(script: Script) -> Outcome:
    keras.config.set_dtype_policy("mixed_bfloat16")
    return _script(script)


def _again(script: Script) -> Outcome:
    """Saved after some epochs, loaded as another model, and trained on."""
    model = compiled(script)
    fitted(model, script)
    path = Path(script.folder, "saved.keras")
    model.save(path)
    if tz.run_of(model) is not None:
        assert path.exists()
    keras.utils.set_random_seed(7)
    return fitted(keras.models.load_model(path, custom_objects={"Own": Own, "Text": Text}), script)


def _loop(script: Script) -> Outcome:
    """A loop of one's own."""
    keras.utils.set_random_seed(script.seed)
    model, optimizer = MODELS[script.model](), OPTIMIZERS[script.optimizer]()
    loss_of = keras.losses.SparseCategoricalCrossentropy()
    x, y = arrays(script.samples)
    for start in [*range(0, script.samples, script.batch)] * script.epochs:
        batch = tz.share((x[start : start + script.batch], y[start : start + script.batch]))
        stepped(model, optimizer, lambda b=batch: (loss_of(b[1], model(b[0], training=True)), None))
    run = tz.run_of(model)
    stats = run.stats() if run is not None else None
    store: dict[str, Any] = {}
    optimizer.save_own_variables(store)
    slots = [np.asarray(store[str(n)]) for n in range(len(store))]
    weights = model.get_weights()
    predicted = model.predict(arrays(11)[0], verbose=0)
    return Outcome({}, {}, weights, slots, predicted, stats)


def _bare(script: Script) -> Outcome:
    """Variables of no model."""
    keras.utils.set_random_seed(script.seed)
    weight, optimizer = (
        keras.Variable(keras.random.normal((12, 3)), name="weight"),
        OPTIMIZERS[script.optimizer](),
    )
    for start in range(0, 48, 12):
        x = tz.share(arrays(48)[0][start : start + 12])
        loss = ops.mean(ops.square(ops.matmul(ops.convert_to_tensor(x), weight)))
        weight.value.grad = None
        loss.backward()
        optimizer.apply([weight.value.grad], [weight])
    return Outcome({}, {}, [weight.numpy()], [], np.zeros(1))


def _onbatch(script: Script) -> Outcome:
    model = compiled(script)
    x, y = arrays(script.samples)
    told = [model.train_on_batch(x[s : s + 9], y[s : s + 9]) for s in range(0, script.samples, 9)]
    told += [model.test_on_batch(x[:5], y[:5])]
    predicted = model.predict_on_batch(x[:7])
    return Outcome({}, {}, model.get_weights(), [], predicted, None, [v for pair in told for v in pair])


def _branched(script: Script) -> Outcome:
    keras.utils.set_random_seed(script.seed)
    model = branched()
    model.compile(
        optimizer=OPTIMIZERS[script.optimizer](),
        loss={"kind": LOSS(), "size": "mse"},
        loss_weights={"kind": 1.0, "size": 0.3},
        metrics={"kind": ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)], "size": ["mae"]},
        weighted_metrics={"size": [keras.metrics.RootMeanSquaredError()]},
    )
    x, y = arrays(script.samples)
    inputs, targets = {"first": x, "second": -x}, {"kind": y, "size": x[:, :1]}
    done = model.fit(inputs, targets, batch_size=16, epochs=2, verbose=0, validation_split=0.2)
    evaluated = model.evaluate(inputs, targets, verbose=0, return_dict=True)
    predicted = model.predict(inputs, verbose=0)
    both = np.concatenate([predicted["kind"], predicted["size"]], 1)
    return Outcome(done.history, evaluated, model.get_weights(), [], both)


def _rewound(script: Script) -> Outcome:
    """A run goes back to a checkpoint of its own."""
    model = compiled(script)
    x, y = arrays(script.samples)
    model.fit(x, y, epochs=1, shuffle=False, verbose=0)
    run = tz.run_of(model)
    if run is not None:
        run.save(Path(script.folder, "rewind"))
        model.fit(x, y, epochs=1, shuffle=False, verbose=0)
        run.load(Path(script.folder, "rewind"))
    return fitted(model, replace(script, fit={"shuffle": False}))


def _frozen(script: Script) -> Outcome:
    """A layer is frozen, trained, and thawed."""
    model = compiled(script)
    model.layers[0].trainable = False
    model.compile(optimizer=OPTIMIZERS[script.optimizer](), loss="sparse_categorical_crossentropy")
    fitted(model, script)
    model.layers[0].trainable = True
    model.compile(optimizer=OPTIMIZERS[script.optimizer](), loss="sparse_categorical_crossentropy")
    return fitted(model, script)


def _changed(script: Script) -> Outcome:
    """Weights are read and written between epochs."""
    model = compiled(script)
    fitted(model, script)
    model.set_weights([weight * 0.5 for weight in model.get_weights()])
    model.layers[0].kernel.assign(model.layers[0].kernel.numpy() * 2)
    return fitted(model, script)


class Gan(keras.Model):
    """Two models with an optimizer each, trained in turns by a step of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.Sequential([keras.Input((12,)), layers.Dense(12)])
        self.critic = keras.Sequential(
            [keras.Input((12,)), layers.Dense(8, activation="relu"), layers.Dense(1)]
        )
        self.built = True

    def compile(self, first: Any, second: Any) -> None:
        super().compile()
        self.first, self.second = first, second
        self.judge = keras.losses.MeanSquaredError()

    def train_step(self, data: Any) -> Any:
        x, _ = data
        told = {}
        for name, model, optimizer, wanted in (
            ("critic", self.critic, self.first, ops.zeros_like(x[:, :1])),
            ("generator", self.generator, self.second, ops.ones_like(x[:, :1])),
        ):
            told[name], _ = stepped(
                self,
                optimizer,
                lambda wanted=wanted: (self.judge(wanted, self.critic(self.generator(x))), None),
                of=model,
            )
        return told


def _gan(script: Script) -> Outcome:
    keras.utils.set_random_seed(script.seed)
    model = Gan()
    model.compile(OPTIMIZERS["adam"](), OPTIMIZERS["gentle"]())
    x, y = arrays(48)
    model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    predicted = model.generator.predict(x[:5], verbose=0)
    return Outcome({}, {}, model.generator.get_weights() + model.critic.get_weights(), [], predicted)


class Ends(keras.callbacks.Callback):
    """The job ends after its first epoch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            raise KeyboardInterrupt


def _resumed(script: Script) -> Outcome:
    """A job that was ended goes on from what `BackupAndRestore` has kept."""
    model = compiled(script)
    backup = keras.callbacks.BackupAndRestore(f"{script.folder}/backup")
    if script.folder:
        x, y = arrays(script.samples)
        try:
            model.fit(x, y, epochs=3, shuffle=False, verbose=0, callbacks=[backup, Ends()])
        except KeyboardInterrupt:
            model = compiled(script)
    fit = {"shuffle": False, "epochs": 3, "batch_size": 32, "callbacks": [backup] if script.folder else []}
    return fitted(model, replace(script, fit=fit))


def _whole(script: Script) -> Outcome:
    """What one rank's share of memory is, of a model that fills it."""
    model = keras.Sequential([keras.Input((12,)), *(layers.Dense(128) for _ in range(6))])
    model.compile(optimizer="adam", loss="mse")
    x = arrays(64)[0]
    model.fit(x, np.ones((64, 128), "float32"), batch_size=64, epochs=3, verbose=0)
    run = tz.run_of(model)
    return Outcome({}, {}, [], [], x, run.stats() if run else None, [run.plan if run else None])


SCRIPTS: dict[str, Callable[[Script], Outcome]] = {
    "script": _script,
    "mixed": _mixed,
    "bf16": _bf16,
    "again": _again,
    "loop": _loop,
    "bare": _bare,
    "onbatch": _onbatch,
    "branched": _branched,
    "frozen": _frozen,
    "changed": _changed,
    "gan": _gan,
    "rewound": _rewound,
    "resumed": _resumed,
    "whole": _whole,
}


def refused(case: str) -> str:
    """What is said about a misuse."""
    try:
        MISUSES[case]()
    except (zs.ZeroShardError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        tz.finish()
    return "nothing"


def _set(**fields: Any) -> Callable[[], Any]:
    return lambda: tz.Config(**fields)


def trained(**config: Any) -> keras.Model:
    """A model that has been sharded and fitted for a step."""
    tz.initialize(tz.Config(**config))
    model = dense()
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy")
    model.fit(*arrays(8), batch_size=8, verbose=0)
    return model


def _replaced() -> None:
    trained().layers[0].kernel._value = None


def _foreign() -> None:
    trained().optimizer.apply([None], [keras.Variable(np.zeros(2))])


def _too_few() -> None:
    model = trained()
    model.optimizer.apply([None], model.trainable_variables)


def _other_state() -> None:
    optimizer = trained().optimizer
    optimizer.load_own_variables({str(n): np.zeros((3, 3)) for n in range(len(optimizer.variables))})


def _apart() -> None:
    import torch.distributed as dist

    tz.initialize(tz.Config(num_gpus_per_node=2))
    model = dense()
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy")
    x, y = arrays(8)
    model.fit(x + dist.get_rank(), y, verbose=0)


class Fails(keras.callbacks.Callback):
    """An error in user code on one rank."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        import torch.distributed as dist

        if batch == 1 and dist.get_rank() == 1:
            raise ValueError("the disk of the second rank is full")


def failing(stage: int) -> None:
    tz.initialize(tz.Config(num_gpus_per_node=2, stage=stage))
    model = dense()
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy")
    model.fit(*arrays(50), batch_size=8, verbose=0, callbacks=[Fails()])


def ended_early(stage: int) -> None:
    """One rank's data ends before those of the other."""
    import torch.distributed as dist

    tz.initialize(tz.Config(num_gpus_per_node=2, stage=stage))
    model = dense()
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy")
    x, y = arrays(48)

    def batches() -> Any:
        for start in range(0, 48 - 16 * dist.get_rank(), 8):
            yield x[start : start + 8], y[start : start + 8]

    model.fit(batches(), verbose=0)


class Unready:
    """A variable of which a trace knows the shape alone."""

    shape, path, constraint = (2,), "layer/kernel", None

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        return np.zeros(0)


def _traced() -> None:
    from zeroshard.integrations.keras.graph_rows import GraphEngine
    from zeroshard.integrations.keras.world import World

    GraphEngine(o.SGD(), [Unready()], World(0, 1), 2)


def _several() -> None:
    tz.initialize()
    model = dense()
    model.compile(optimizer=o.MultiOptimizer({".*bias": o.SGD()}, o.Adam()), loss="mse")
    model.fit(arrays(8)[0], np.ones((8, 5)), verbose=0)


def _unnamed_file() -> None:
    trained(num_gpus_per_node=2).save("model.txt")


MISUSES: dict[str, Callable[[], Any]] = {
    "misspelt": _set(num_node=2),
    "nodes": _set(num_nodes=0),
    "limit": _set(memory_limit_per_node="much"),
    "stage": _set(stage=4),
    "offload": _set(offload="tape"),
    "sync": _set(sync="often"),
    "transport": _set(transport="mpi"),
    "no config": lambda: tz.initialize({"stage": 2}),
    "world": lambda: tz.initialize(tz.Config(num_nodes=2, num_gpus_per_node=2)),
    "twice": lambda: [tz.initialize(), tz.initialize()],
    "compiled": lambda: [tz.initialize(), _script(Script(compile={"jit_compile": True}))],
    "replaced": _replaced,
    "foreign": _foreign,
    "too few": _too_few,
    "other state": _other_state,
    "unnamed file": _unnamed_file,
    "apart": _apart,
    "several": _several,
    "tensorflow limit": lambda: ran(Script(), {"memory_limit_per_node": "8KiB"}),
    "traced": _traced,
    "too small": lambda: ran(Script(), {"memory_limit_per_node": "8KiB"}, "whole"),
}
