"""How evenly ranks are loaded, and the ZeRO paper's table for orientation. Integers only."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from .memory import Setup


def heaviest(setup: Setup) -> Setup:
    """The same, seen from the rank that owns most. Rows make that the first; whole tensors, the one that
    was dealt most."""
    load = Counter[int]()
    for slot in setup.slots.values():
        if slot.split == "whole":
            load[slot.owner] += slot.numel
    return replace(setup, rank=max(load, key=lambda rank: (load[rank], -rank))) if load else setup


def imbalance(setup: Setup) -> float:
    """How much more than the mean the fullest rank owns: 0.01 is 1 %. Nothing where nothing is divided."""
    divided = [slot for slot in setup.slots.values() if slot.split != "copy"]
    total = sum(slot.numel for slot in divided)
    if not total:
        return 0.0
    rank = heaviest(setup).rank
    return sum(slot.held(rank) for slot in divided) * setup.world / total - 1.0


def closed_form(numel: int, world: int, stage: int, width: int = 2, state: int = 12) -> float:
    """The ZeRO paper's table: bytes of a rank for `numel` parameters that take `width` bytes, as do their
    gradients, and `state` bytes of optimizer state each (fp32 master and Adam: 12). Without padding,
    gathered units, buckets and activations.

    >>> [round(closed_form(7_500_000_000, 64, stage) / 1e9, 2) for stage in range(4)]
    [120.0, 31.41, 16.64, 1.88]
    """
    shared = [state * (stage >= 1), width * (stage >= 2), width * (stage >= 3)]
    return numel * (2 * width + state - sum(shared) + sum(shared) / world)
