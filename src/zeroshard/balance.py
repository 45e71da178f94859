"""How evenly ranks are loaded. Integers only."""

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
