"""Lightning's callbacks that average weights, which read and write whole parameters where here are rows; and
those that freeze weights to train them later."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn

import zeroshard as zs

_EMA, _SWA, _FINETUNING = "WeightAveraging", "StochasticWeightAveraging", "BaseFinetuning"
_CURRENT = "current_model_state"


def _is(callback: object, name: str) -> bool:
    """Of a class of that name in either of Lightning's packages."""
    return any(kind.__name__ == name and ".callbacks." in kind.__module__ for kind in type(callback).__mro__)


def follow(trainer: Any, run: zs.Run, is_loaded: Callable[[dict[str, Any]], bool]) -> None:
    """Let averages be made of whole parameters, and written to them. `is_loaded`: of a state that the model
    has already, from a checkpoint."""
    for callback in trainer.callbacks:
        if _is(callback, _EMA):
            _within(callback, "_swap_models", run, write=True)
            _within(callback, "_copy_average_to_current", run, write=True)
            if callback._average_model is not None:
                _within(callback._average_model, "update_parameters", run)
            _load_unless(callback, is_loaded)
        elif _is(callback, _SWA):
            _within(callback, "update_parameters", run)
            _within(callback, "transfer_weights", run, write=True)
            _clear_when_loaded(callback, trainer)


def finetunes(trainer: Any) -> bool:
    """Whether a callback has frozen parameters that it gives to the optimizer later."""
    return any(_is(callback, _FINETUNING) for callback in trainer.callbacks)


def keeps_current(module: Any, checkpoint: Any) -> bool:
    """Whether a callback is about to take the average out of a checkpoint, beside the model's own weights."""
    fits = _CURRENT in checkpoint and module.trainer.state.fn == "fit"
    return fits and any(_is(callback, _EMA) for callback in module.trainer.callbacks)


def _within(owner: Any, name: str, run: zs.Run, write: bool = False) -> None:
    plain = getattr(type(owner), name)
    static = isinstance(vars(next(k for k in type(owner).__mro__ if name in vars(k)))[name], staticmethod)
    function: Callable[..., Any] = plain if static else plain.__get__(owner)

    @wraps(function)
    def whole(*args: Any, **kwargs: Any) -> Any:
        with run.gathered(write=write):
            return function(*args, **kwargs)

    vars(owner)[name] = whole


def _load_unless(callback: Any, is_loaded: Callable[[dict[str, Any]], bool]) -> None:
    """The callback loads its average, and what the model had beside it where that is yet to be loaded."""
    load = type(callback).on_load_checkpoint

    def on_load_checkpoint(trainer: Any, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        loaded = _CURRENT in checkpoint and is_loaded(checkpoint[_CURRENT])
        load(callback, trainer, _Loaded() if loaded else module, checkpoint)

    vars(callback)["on_load_checkpoint"] = on_load_checkpoint


def _clear_when_loaded(callback: Any, trainer: Any) -> None:
    """Once it has a scheduler's state to go on with, the state of those of the model, which it has replaced,
    is not loaded. It sees to that as `fit` starts, when here no checkpoint has been read."""
    load = type(callback).load_state_dict

    def load_state_dict(state: dict[str, Any]) -> None:
        load(callback, state)
        if callback._scheduler_state is not None:
            callback._clear_schedulers(trainer)

    vars(callback)["load_state_dict"] = load_state_dict


class _Loaded:
    """In place of a model that has its weights already."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is left to load."""
