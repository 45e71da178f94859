"""Acts on the policies of `policy.py`: when gradients are reduced, when an update uses them, when ranks that
train apart meet.

A *pace* is one policy at work on one run: it owns the gradients' way to the homes, and runs the update.
"""

from __future__ import annotations

from .adaptive import AdaptivePace
from .delayed import DelayedGradients, DelayedLocalGradients, DelayedPace
from .local import LocalPace
from .pace import Kept, Pace

__all__ = [
    "AdaptivePace",
    "DelayedGradients",
    "DelayedLocalGradients",
    "DelayedPace",
    "Kept",
    "LocalPace",
    "Pace",
]
