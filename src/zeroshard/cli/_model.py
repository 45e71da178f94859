"""How a model, built without memory, differs from a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from zeroshard.extend import Manifest


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
