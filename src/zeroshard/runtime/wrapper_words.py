"""Adds a word of ours to an error of torch's: `model.module`, which only a wrapper has.

`hasattr(model, "module")` stays False, which is what front ends ask, and the class of the model is the
user's. So the error is torch's own, and a word is added to it when it ends the script.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch import nn

_told: list[Any] = []  # hooks of ours that were put in place


def tell_of_wrappers(sharded: Callable[[nn.Module], bool]) -> None:
    """At the end of a script that asks a sharded model for what is inside of a wrapper. Put in place once."""
    if _told:
        return
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        note(error, sharded)
        previous(kind, error, trace)

    _told.append(hook)
    sys.excepthook = hook


def note(error: BaseException, sharded: Callable[[nn.Module], bool]) -> None:
    """Say what to type, where that is the error."""
    if not isinstance(error, AttributeError) or error.name != "module":
        return
    if isinstance(error.obj, nn.Module) and sharded(error.obj):
        error.add_note(
            "zeroshard: zs.shard() changes the model in place, and there is no wrapper around it: where a "
            "script for DDP says model.module, write model."
        )
