"""Acts on the policies of `sync_policies.py`: when gradients are reduced, when an update uses them, and when
ranks that train apart meet.

A *sync strategy* is one policy at work on one run: it owns the gradients' way to the sharded parameters,
and runs the update.
"""

from __future__ import annotations

from .adaptive import AdaptiveSync
from .delayed import DelayedSync
from .local import LocalSync
from .strategy import SavedRows, SyncState, SyncStrategy

__all__ = [
    "AdaptiveSync",
    "DelayedSync",
    "SavedRows",
    "LocalSync",
    "SyncState",
    "SyncStrategy",
]
