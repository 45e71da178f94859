"""ZeroShard: train models that do not fit. ZeRO on PyTorch, in place, exact where it says exact.

The names are in `public` and are loaded at the first use of any: torch takes a second or two to import, and
the command line must answer at once.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .launch.leaving import speak_at_the_end

if TYPE_CHECKING:
    from .public import *  # noqa: F403
    from .public import __all__ as __all__

__version__ = "0.1.0"
_FUNCTIONS = ("plan", "shard")  # which modules are named like


class _Package(ModuleType):
    """`zs.shard` and `zs.plan` are functions. Modules have these names too, and importing one must not put
    it in the function's place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and name in _FUNCTIONS):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in _FUNCTIONS and not name.startswith("_") and find_spec(f"{__name__}.{name}"):
            return import_module(f"{__name__}.{name}")
        if not name.startswith("_") or name == "__all__":
            public = import_module(f"{__name__}.public")
            names = {known: getattr(public, known) for known in public.__all__}
            self.__dict__.update(names, __all__=public.__all__)
        if name not in self.__dict__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return self.__dict__[name]

    def __dir__(self) -> list[str]:
        return sorted({*self.__all__, *self.__dict__})


sys.modules[__name__].__class__ = _Package
speak_at_the_end()
