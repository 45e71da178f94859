"""Keras files of a sharded model: written whole by rank 0, read by all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from keras import Model as KerasModel
from keras.src.callbacks.backup_and_restore import BackupAndRestore

import zeroshard as zs

from .updates import innermost


class Files:
    """How models are saved in one session."""

    def __init__(self, session: Any) -> None:
        self.session, self.world = session, session.world

    def install(self, seams: Any) -> None:
        for name in ("save", "save_weights", "export"):
            seams.put(KerasModel, name, self._by_the_first)
        for kind, name in ((BackupAndRestore, "_save_model"), (BackupAndRestore, "on_train_end")):
            seams.put(kind, name, self._around)

    def _by_the_first(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Every rank calls it; rank 0 writes, and the others go on when it has."""

        @wraps(original)
        def save(model: Any, *args: Any, **keywords: Any) -> Any:
            if self.world.size == 1 and self.session.model_of(model) is None:
                return original(model, *args, **keywords)
            with self._whole(model):
                return self._first(lambda: original(model, *args, **keywords), original.__name__)

        return save

    def _first(self, write: Callable[[], Any], what: str) -> Any:
        result, failed = None, None
        if self.world.rank == 0:
            try:
                result = write()
            except Exception as error:
                failed = error
        told = self.world.from_first(None if failed is None else f"{type(failed).__name__}: {failed}")
        if failed is not None:
            raise failed
        if told is not None:
            raise zs.RankError(f"{what}() failed on rank 0, which writes for all: {told}")
        return result

    @contextmanager
    def _whole(self, model: Any) -> Iterator[None]:
        """What is read of weights and optimizer is whole, on rank 0, without asking the others."""
        sharded = [m for m in self.session.models if m.keras is model or _holds(model, m)]
        states = [(m, m.run.full_state_dict(0), m.engine.whole()) for m in sharded]
        for one, weights, slots in states:
            vars(innermost(one.optimizer))["_zeroshard_saved"] = slots
            for holding in one.tree.holdings.values():
                holding.saved = weights
        try:
            yield
        finally:
            for one, _, _ in states:
                vars(innermost(one.optimizer)).pop("_zeroshard_saved", None)
                for holding in one.tree.holdings.values():
                    holding.saved = None

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A callback that writes files beside the model's: rank 0's does, and what it saves is collected by
        all."""

        @wraps(original)
        def method(callback: Any, *args: Any, **keywords: Any) -> Any:
            if self.world.size == 1:
                return original(callback, *args, **keywords)
            with self._whole(callback.model):
                return self._first(
                    lambda: self._alone(original, callback, args, keywords), type(callback).__name__
                )

        return method

    def _alone(self, original: Callable[..., Any], callback: Any, args: Any, keywords: Any) -> Any:
        """On rank 0, inside: the model's own `save_weights` asks nobody any more."""
        model = callback.model
        plain = KerasModel.save_weights.__wrapped__
        vars(model)["save_weights"] = lambda *a, **k: plain(model, *a, **k)
        try:
            return original(callback, *args, **keywords)
        finally:
            del vars(model)["save_weights"]


def _holds(model: Any, sharded: Any) -> bool:
    return any(layer is sharded.keras for layer in model._flatten_layers(include_self=False))
