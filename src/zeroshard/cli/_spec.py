"""A model from a SPEC: a function of a module or a script, or a config.json; built without memory."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroshard.extend import OptionError, did_you_mean

if TYPE_CHECKING:
    from torch import nn


class Spec:
    """What a SPEC names. `build(**values)` makes the model on the meta device, and a batch where one came
    with it; `values` are arguments of the function, or entries of the config."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._make = _configured(text) if _is_config(text) else _called(text)

    def build(self, values: Mapping[str, Any]) -> tuple[nn.Module, Any]:
        import torch

        made = self._make(values)
        model, batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(model, torch.nn.Module):
            raise OptionError(f"{self.text} returned a {type(model).__name__}, not a module.")
        return model, batch


def _is_config(text: str) -> bool:
    return text.endswith(".json") or Path(text, "config.json").is_file()


def values_of(words: list[str]) -> dict[str, Any]:
    """``name=value`` words as a dictionary; a value is JSON where it can be read so, else a text."""
    result: dict[str, Any] = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign or not name:
            raise OptionError(f"--set {word!r} must be NAME=VALUE, for example layers=24.")
        try:
            result[name] = json.loads(value)
        except ValueError:
            result[name] = value
    return result


# ---------------------------------------------------------------------- functions


def _called(text: str) -> Callable[[Mapping[str, Any]], Any]:
    import torch

    place, _, name = text.rpartition(":")
    if not place or not name:
        raise OptionError(f"SPEC {text!r} must be module:function, script.py:function, or a config.json.")
    try:
        module = _module(place)
    except (ImportError, OSError) as error:
        raise OptionError(f"SPEC {text!r} cannot be loaded: {error}.") from error
    except SystemExit as error:
        raise OptionError(
            f"SPEC {text!r} cannot be loaded: {place} ends the process. Let what is not to run here stand "
            'under if __name__ == "__main__".'
        ) from error
    except Exception as error:  # the user's code: say that it was that
        why = f"{type(error).__name__}: {error}".rstrip(".")
        raise OptionError(f"SPEC {text!r} cannot be loaded: {place} raised {why}.") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise OptionError(f"SPEC {text!r}: {place} has no function {name!r}.{_offered(module, name)}")

    def make(values: Mapping[str, Any]) -> Any:
        try:
            inspect.signature(found).bind(**values)
        except (TypeError, ValueError) as error:
            raise OptionError(
                f"{text}{inspect.signature(found)} cannot be called with "
                f"{', '.join(f'{n}={v!r}' for n, v in values.items()) or 'no arguments'}: {error}. Give its "
                "arguments with --set NAME=VALUE."
            ) from error
        try:
            with torch.device("meta"):
                return found(**values)
        except SystemExit as error:
            raise OptionError(f"{text}() ends the process instead of returning a model.") from error
        except Exception as error:  # the user's code: say that it was that
            raise OptionError(
                f"{text}() raised {type(error).__name__} on the meta device: {error}"
            ) from error

    return make


def _offered(module: Any, name: str) -> str:
    """The functions, and the classes of models, that a module has of its own, for an error."""
    import torch

    def makes(value: Any) -> bool:
        model = inspect.isclass(value) and issubclass(value, torch.nn.Module)
        return (inspect.isfunction(value) or model) and value.__module__ == module.__name__

    own = [name for name, value in vars(module).items() if makes(value) and not name.startswith("_")]
    return f"{did_you_mean(name, own)} It has: {', '.join(own)}." if own else ""


def _module(place: str) -> Any:
    """A module by its dotted name, the current folder searched first; or a script, under a name that is not
    `__main__`."""
    if not place.endswith(".py"):
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        return importlib.import_module(place)
    path = Path(place)
    if not path.exists():
        raise OSError(f"there is no file {place}")
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[path.stem] = module
    found.loader.exec_module(module)
    return module


# ---------------------------------------------------------------------- configs of Hugging Face


def _configured(text: str) -> Callable[[Mapping[str, Any]], Any]:
    """The model of a config.json: by transformers where it is installed, else by shapes of our own."""
    path = Path(text, "config.json") if Path(text).is_dir() else Path(text)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"there is no file {path}: {error.strerror}.") from error
    except ValueError as error:
        raise OptionError(f"{path} is not JSON: {error}.") from error
    if not isinstance(config, dict):
        raise OptionError(f"{path} is not a config of a model: it holds a {type(config).__name__}.")

    def make(values: Mapping[str, Any]) -> Any:
        import torch

        with torch.device("meta"):
            if importlib.util.find_spec("transformers") is not None:
                return _by_transformers(config | dict(values), str(path))
            from ._architecture import build

            return build(config, str(path), values)

    return make


def _by_transformers(told: dict[str, Any], where: str) -> Any:
    try:
        transformers = importlib.import_module("transformers")
    except Exception as error:  # found, and broken: a dependency of its own is missing, or torch is too old
        raise OptionError(
            f"transformers, which is installed and would build the model of {where}, cannot be imported: "
            f"{type(error).__name__}: {error}. Repair it (pip install --upgrade transformers) or uninstall "
            "it: common types are then built from shapes of our own."
        ) from error
    try:
        rest = {key: value for key, value in told.items() if key != "model_type"}
        config = transformers.AutoConfig.for_model(told.get("model_type"), **rest)
        config.use_cache = False
        named = [getattr(transformers, name, None) for name in told.get("architectures") or ()]
        if named and named[0] is not None:
            return named[0](config)
        return transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:  # another library on a file of the user's: say that it was that
        raise OptionError(
            f"transformers cannot build the model of {where}: {type(error).__name__}: {error}"
        ) from error
