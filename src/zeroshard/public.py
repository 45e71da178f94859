"""The public names: what `import zeroshard as zs` offers, loaded at the first use of any of them."""

from .api import Run, shard
from .checkpoint import latest
from .codec import Cast, Codec, Delta, Int4, Int8, LowRank, OneBit, Rows, Ternary, TopK, TwoBit
from .config import Options, Precision
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
from .offload import Offload
from .planning.answer import plan
from .planning.plan import Plan
from .policy import Adaptive, Delayed, EveryStep, Local, Nesterov
from .stats import Stats

__all__ = [
    "PREEMPTED",
    "Adaptive",
    "Cast",
    "CheckpointError",
    "Codec",
    "Delayed",
    "Delta",
    "EveryStep",
    "Int4",
    "Int8",
    "Local",
    "LowRank",
    "ModelError",
    "Nesterov",
    "Offload",
    "OneBit",
    "OptionError",
    "Options",
    "Plan",
    "PlanError",
    "Precision",
    "RankError",
    "Rows",
    "Run",
    "StateError",
    "Stats",
    "Ternary",
    "TierError",
    "TopK",
    "TwoBit",
    "ZeroShardError",
    "latest",
    "plan",
    "shard",
]
