"""ZeroShard: train models that do not fit. ZeRO on PyTorch, in place, exact where it says exact."""

from .api import Run, shard
from .checkpoint import latest
from .config import Offload, Options, Precision
from .errors import (
    CheckpointError,
    ModelError,
    OptionError,
    PlanError,
    RankError,
    StateError,
    TierError,
    ZeroShardError,
)
from .launch.job import PREEMPTED
from .plan import Plan
from .planning import plan
from .policy import Adaptive, Delayed, EveryStep, Local, Nesterov
from .stats import Stats

__version__ = "0.1.0"

__all__ = [
    "PREEMPTED",
    "Adaptive",
    "CheckpointError",
    "Delayed",
    "EveryStep",
    "Local",
    "ModelError",
    "Nesterov",
    "Offload",
    "OptionError",
    "Options",
    "Plan",
    "PlanError",
    "Precision",
    "RankError",
    "Run",
    "StateError",
    "Stats",
    "TierError",
    "ZeroShardError",
    "latest",
    "plan",
    "shard",
]
