"""How evenly ranks are loaded, and the ZeRO paper's table for orientation. Integers only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate

from .memory import Setup

# An element that is trained takes so many times the bytes of one that is not: gradient, moments. Where a step
# does not use it, it has a gradient's place alone.
TRAINED, UNUSED = 4, 2


def heaviest(setup: Setup) -> Setup:
    """The same, seen from the rank that owns most; of several from the first."""
    factors = {name: TRAINED if w.used else UNUSED for name, w in setup.trainable.items()}
    loads = _loads(setup, factors)
    return replace(setup, rank=max(loads, key=lambda rank: (loads[rank], -rank))) if loads else setup


def imbalance(setup: Setup) -> float:
    """How much more than the mean the fullest rank owns: 0.01 is 1 %. Nothing where nothing is divided."""
    total = sum(slot.numel for slot in setup.slots.values() if slot.split != "copy")
    return max(_loads(setup, {}).values()) * setup.world / total - 1.0 if total else 0.0


def _loads(setup: Setup, factors: Mapping[str, int]) -> dict[int, int]:
    """Elements of divided tensors that a rank owns, each times its tensor's factor: for the ranks that own
    more or less than the one before."""
    changes = Counter[int]()
    for name, slot in setup.slots.items():
        factor, before = factors.get(name, 1), 0
        for rank in sorted({0, *slot.edges()}) if slot.split != "copy" else ():
            if rank < setup.world:
                held = slot.held(rank) * factor
                changes[rank] += held - before
                before = held
    ranks = sorted(changes)
    return dict(zip(ranks, accumulate(changes[rank] for rank in ranks), strict=True))


def closed_form(numel: int, world: int, stage: int, width: int = 2, state: int = 12) -> float:
    """The ZeRO paper's table: bytes of a rank for `numel` parameters that take `width` bytes, as do their
    gradients, and `state` bytes of optimizer state each (fp32 master and Adam: 12). Without padding,
    gathered units, buckets and activations.

    >>> [round(closed_form(7_500_000_000, 64, stage) / 1e9, 2) for stage in range(4)]
    [120.0, 31.41, 16.64, 1.88]
    """
    shared = [state * (stage >= 1), width * (stage >= 2), width * (stage >= 3)]
    return numel * (2 * width + state - sum(shared) + sum(shared) / world)
