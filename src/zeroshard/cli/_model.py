"""A model from ``module:factory``, built without memory, and how it differs from a checkpoint."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

from zeroshard.errors import OptionError

if TYPE_CHECKING:
    from torch import nn

    from zeroshard.checkpoint import Manifest


def build(factory: str) -> nn.Module:
    """Call the factory on the meta device. The current folder is searched for its module first, as Python
    does."""
    import torch

    module, _, name = factory.partition(":")
    if not module or not name:
        raise OptionError(f"--against {factory!r} must be MODULE:FACTORY, for example project.model:build.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise OptionError(f"--against {factory!r} cannot be loaded: {error}.") from error
    try:
        with torch.device("meta"):
            model = found()
    except Exception as error:  # the user's code: say that it was that
        raise OptionError(f"{factory}() raised {type(error).__name__} on the meta device: {error}") from error
    if not isinstance(model, torch.nn.Module):
        raise OptionError(f"{factory}() returned a {type(model).__name__}, not a module.")
    return model


def differences(manifest: Manifest, model: nn.Module) -> list[str]:
    """One line for each tensor that is missing, unexpected or of another shape. Tied tensors count once."""
    stored = {entry.name: entry for entry in manifest.entries if entry.kind in ("parameter", "buffer")}
    lines: list[str] = []
    seen: set[str] = set()
    for names, shape in _wanted(model):
        seen.update(names)
        found = next((stored[name] for name in names if name in stored), None)
        if found is None:
            lines.append(f"missing: {names[0]} {shape}")
        elif found.shape != shape:
            lines.append(f"differs: {found.name} is {found.shape} in the checkpoint and {shape} in the model")
    lines += [f"unexpected: {name} {stored[name].shape}" for name in stored if name not in seen]
    return lines


def _wanted(model: nn.Module) -> list[tuple[list[str], tuple[int, ...]]]:
    """The names (several where tied) and the shape of each tensor that a state dict would hold."""
    groups: dict[int, tuple[list[str], tuple[int, ...]]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), ([], tuple(tensor.shape)))[0].append(name)
    return list(groups.values())
