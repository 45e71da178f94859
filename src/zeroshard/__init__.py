"""ZeroShard: train models that do not fit. ZeRO on PyTorch, in place, exact where it says exact.

The names are in `public` and are loaded at the first use of any: torch takes a second or two to import, and
the command line must answer at once.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from zeroshard.launch.rank import speak_at_the_end

if TYPE_CHECKING:
    from zeroshard.public import __all__ as __all__

    from .public import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if not name.startswith("_") and find_spec(f"{__name__}.{name}"):
        return import_module(f"{__name__}.{name}")
    if not name.startswith("_") or name == "__all__":
        public = import_module(f"{__name__}.public")
        globals().update({known: getattr(public, known) for known in public.__all__}, __all__=public.__all__)
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]


def __dir__() -> list[str]:
    """The public names and what every module has; not what this file itself uses."""
    return sorted({*__getattr__("__all__"), *(name for name in globals() if name.startswith("__"))})


speak_at_the_end()
