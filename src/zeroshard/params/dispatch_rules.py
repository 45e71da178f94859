"""Lets torch ask a subclass of DTensor what its operations make of it.

Torch 2.11 computes with every DTensor in C++, past the `__torch_dispatch__` of a subclass. Before it does so,
it looks for a rule that was registered for the operation and the class, as `torch.library` registers them
(`register_torch_dispatch`): there is one for each operation then.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._library.simple_registry import singleton

from zeroshard.errors import StateError

_rules: dict[type, set[str]] = {}  # classes that torch does not ask, and which operations have a rule of them
_seen: set[type] = set()


def be_asked(probe: torch.Tensor) -> None:
    """Have torch ask the class of this tensor, whatever the operation. Looked at once for each class."""
    kind = type(probe)
    if kind in _seen:
        return
    _seen.add(kind)
    if type(probe.detach()) is kind:
        return
    _rules[kind] = set()
    renew()
    if type(probe.detach()) is not kind:
        _seen.discard(kind)
        raise StateError(
            f"torch {torch.__version__} computes with DTensors without asking the subclass that shows "
            "sharded parameters: numbers read off them would be wrong. Take torch 2.11 to 2.15."
        )


def renew() -> None:
    """Rules for operations that were defined since, as libraries do."""
    for kind, known in _rules.items():
        for name in torch._C._dispatch_get_all_op_names():
            if name not in known:
                known.add(name)
                singleton.find(name).torch_dispatch_rules.register(kind, _by_class)


def _by_class(kind: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    return kind.__torch_dispatch__(func, types, args, kwargs or {})
