"""What stands in Keras in place of its own, and how it is put back; and what all backends have of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from keras import callbacks as keras_callbacks
from keras import tree
from keras.src.saving import serialization_lib
from keras.src.trainers.trainer import Trainer

import zeroshard as zs

from .updates import plain_class

#: They write, or show something, once for all ranks.
OF_THE_FIRST = ("ProgbarLogger", "CSVLogger", "TensorBoard", "RemoteMonitor")


class Seams:
    """What stands in place of attributes of Keras's classes and modules."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """`make` gets what stood there."""
        before = vars(owner)[name]
        self._replaced.append((owner, name, before))
        setattr(owner, name, make(before))

    def take_away(self) -> None:
        while self._replaced:
            owner, name, before = self._replaced.pop()
            setattr(owner, name, before)


class Agreement(keras_callbacks.Callback):  # type: ignore[misc]
    """The last callback: where one rank's have asked to stop, all stop. After batches it asks only where
    there are callbacks of the user's own that look at batches."""

    def __init__(self, session: Any, each_batch: bool) -> None:
        super().__init__()
        self._session, self._each_batch = session, each_batch

    def _agree(self) -> None:
        self.model.stop_training = self._session.world.any(bool(self.model.stop_training))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._each_batch:
            self._agree()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._agree()


class EpochStats(keras_callbacks.Callback):  # type: ignore[misc]
    """Among the callbacks of `fit`, lets all others and the `History` have `run.stats()` of rank 0 at the end
    of each epoch: memory by kind, bytes and seconds waited since the epoch before."""

    session: Any = None
    _before: zs.Stats | None = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Before all other callbacks, wherever it stands among them."""
        model = self.session.model_of(self.model) if self.session is not None else None
        if model is None or logs is None:
            return
        now, before = model.run.stats(), self._before
        self._before = now
        since = now - before if before is not None and before.steps <= now.steps else now
        told = self.session.world.from_first(since.scalars())
        logs.update({f"zeroshard/{name}": value for name, value in told.items()})


class Calls:
    """`fit` and the like, for all ranks. The session is the backend's own."""

    def __init__(self, session: Any) -> None:
        self.session, self.world, self.shares = session, session.world, session.shares

    def install_calls(self, seams: Seams, trainer: type) -> None:
        for name in ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"):
            seams.put(trainer, name, self._call)
        seams.put(Trainer, "_symbolic_build", self._symbolic_build)
        seams.put(Trainer, "__init__", self._noted)
        seams.put(serialization_lib, "serialize_with_public_class", _serialized)

    def entered(self, model: Any, name: str, args: Any) -> None:
        """A call begins."""

    def left(self) -> None:
        """A call has ended."""
        self.shares.now, self.shares.summed = None, False

    def _call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`fit` and the like: ranks other than the first show nothing, and all stop together."""
        session = self.session
        trains = original.__name__ == "fit"
        shows = original.__name__ in ("fit", "evaluate", "predict")

        @wraps(original)
        def call(model: Any, *args: Any, **keywords: Any) -> Any:
            outermost = session.depth == 0
            if outermost and shows:
                args, keywords = _named(original, model, args, keywords)
                if self.world.rank:
                    keywords["verbose"] = 0
                if not isinstance(keywords.get("callbacks"), keras_callbacks.CallbackList):
                    keywords["callbacks"] = self._callbacks(keywords.get("callbacks"), trains)
            session.known.add(model)
            self.entered(model, original.__name__, args)
            session.depth += 1
            try:
                return original(model, *args, **keywords)
            except BaseException:
                self.world.leave()
                raise
            finally:
                session.depth -= 1
                self.left()

        return call

    def _callbacks(self, given: Any, trains: bool) -> list[Any]:
        listed = tree.flatten(given) if given else []
        own = [c for c in listed if not type(c).__module__.startswith("keras.")]
        looks = any(
            getattr(type(c), name) is not getattr(keras_callbacks.Callback, name)
            for c in own
            for name in ("on_train_batch_end", "on_batch_end", "on_train_batch_begin", "on_batch_begin")
        ) or any(isinstance(c, keras_callbacks.LambdaCallback) for c in listed)
        for callback in listed:
            if isinstance(callback, EpochStats):
                callback.session = self.session
        listed.sort(key=lambda callback: not isinstance(callback, EpochStats))
        if self.world.rank:
            listed = [c for c in listed if type(c).__name__ not in OF_THE_FIRST]
        if trains and self.world.size > 1:
            listed.append(Agreement(self.session, looks))
        return listed

    def _symbolic_build(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """But for the optimizer, which is built on rows, or by the first `apply`."""

        @wraps(original)
        def build(model: Any, *args: Any, **keywords: Any) -> Any:
            optimizer = model.optimizer
            if optimizer is None or optimizer.built:
                return original(model, *args, **keywords)
            optimizer.built = True
            try:
                return original(model, *args, **keywords)
            finally:
                optimizer.built = False

        return build

    def _noted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def init(model: Any, *args: Any, **keywords: Any) -> None:
            original(model, *args, **keywords)
            self.session.known.add(model)

        return init


def forget_steps(models: Iterable[Any]) -> None:
    """Keras makes the functions of their steps again when they are called next."""
    for model in models:
        for name in ("train_function", "test_function", "predict_function"):
            if getattr(model, name, None) is not None:
                setattr(model, name, None)


def refuse_compiled(model: Any) -> None:
    """A step in one compiled graph."""
    if getattr(model, "jit_compile", False):
        raise zs.OptionError(
            f"{model.name}.compile(jit_compile=True) compiles a whole step into one graph, which ranks "
            "cannot meet in: drop jit_compile."
        )


def _named(function: Any, model: Any, args: Any, keywords: Any) -> tuple[Any, dict[str, Any]]:
    """Positional arguments by their names."""
    code = function.__wrapped__.__code__ if hasattr(function, "__wrapped__") else function.__code__
    names = code.co_varnames[1 : code.co_argcount]
    return (), dict(zip(names, args, strict=False)) | keywords


def _serialized(original: Callable[..., Any]) -> Callable[..., Any]:
    """Classes that were made for a run are saved as those that they stand for."""

    @wraps(original)
    def serialize(cls: Any, *args: Any, **keywords: Any) -> Any:
        return original(plain_class(cls) if isinstance(cls, type) else cls, *args, **keywords)

    return serialize
