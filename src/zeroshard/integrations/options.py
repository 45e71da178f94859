"""Options of `zs.shard` for scripts that do not name it: checked, read from a command line, and in force once
the script imports what they are for."""

from __future__ import annotations

import ast
import atexit
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, cast, get_args, get_type_hints

import zeroshard as zs

#: What scripts import, and what then is enabled. Before it is imported, a script may set its environment.
_FRONT_ENDS = {
    "accelerate": "zeroshard.integrations.accelerate",
    "transformers.trainer": "zeroshard.integrations.hf",
}


def option_names() -> tuple[str, ...]:
    """All keyword arguments of `zs.shard` but the optimizer."""
    hints = get_type_hints(zs.shard, localns={"ProcessGroup": object})
    parameters = inspect.signature(zs.shard).parameters.values()
    named = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    return (*get_args(hints["options"])[0].__annotations__, *named)


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse names that `zs.shard` does not know, and values of its plain options that cannot be."""
    known = option_names()
    unknown = [name for name in options if name not in known]
    if unknown:
        raise zs.OptionError(
            f"neither zs.shard() nor what it is called by here has an option {unknown[0]!r}; those of "
            f"zs.shard() are {', '.join(known)}."
        )
    plain = {field.name for field in fields(zs.Options)}
    zs.Options(**{name: value for name, value in options.items() if name in plain})


def parse_options(words: Iterable[str]) -> dict[str, Any]:
    """Options as they are typed: `stage=3,precision=bf16`, `offload=host`, `limit=20GiB`.

    >>> parse_options(["stage=3,clip_norm=1.0", "precision=bf16"])
    {'stage': 3, 'clip_norm': 1.0, 'precision': 'bf16'}
    """
    options: dict[str, Any] = {}
    for word in ",".join(words).split(","):
        name, equals, text = (part.strip() for part in word.partition("="))
        if not name or not equals or not text:
            raise zs.OptionError(f"{word!r} is no option with its value: type stage=3 or offload=host.")
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = text
        if name in options:
            raise zs.OptionError(f"{name}= stands there twice.")
        options[name] = value
    options = typed_options(options)
    check_options(options)
    return options


def typed_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that were written as text: `offload: host`, or with the fields of an `Offload` below it."""
    offload = options.get("offload")
    if isinstance(offload, str):
        return {**options, "offload": zs.Offload(cast(Any, offload))}
    if isinstance(offload, Mapping):
        return {**options, "offload": zs.Offload(**offload)}
    return dict(options)


def enable_when_imported(options: Mapping[str, Any], word: str) -> None:
    """Let front ends shard with these options from when the script imports them. Where it imports none, it
    is told so at its end, by the word that asked for it."""
    watch = _Watch(options)
    sys.meta_path.insert(0, watch)
    for name in _FRONT_ENDS:
        if name in sys.modules:
            watch.enable(name)

    def tell() -> None:
        if not watch.enabled and os.environ.get("RANK", "0") == "0":
            told = "had no effect: the script imports neither transformers.Trainer nor accelerate."
            print(f"zeroshard: {word} {told}", file=sys.stderr)

    atexit.register(tell)


class _Watch(MetaPathFinder):
    """Sees what is imported, and finds nothing by itself."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options, self.enabled = dict(options), False
        self._busy: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _FRONT_ENDS or name in self._busy:
            return None
        self._busy.add(name)
        try:
            spec = find_spec(name)
        finally:
            self._busy.discard(name)
        if spec is not None and spec.loader is not None:
            _and_then(spec.loader, lambda: self.enable(name))
        return spec

    def enable(self, name: str) -> None:
        self.enabled = True
        import_module(_FRONT_ENDS[name]).enable(**self.options)


def _and_then(loader: Loader, done: Callable[[], None]) -> None:
    """Something to do once a module stands."""
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        run(module)
        done()

    loader.exec_module = exec_module  # type: ignore[method-assign]
