"""The public names: what `import zeroshard as zs` offers, loaded at the first use of any of them."""

from zeroshard import compress
from zeroshard.api import Run, register_forward_method, shard
from zeroshard.checkpoint import Weights, latest
from zeroshard.compress import *  # noqa: F403
from zeroshard.convert import from_deepspeed
from zeroshard.errors import (
    CheckpointError,
    ModelError,
    OptionError,
    PlanError,
    RankError,
    StateError,
    TierError,
    ZeroShardError,
)
from zeroshard.launch.job import PREEMPTED
from zeroshard.options import Offload, Options, Precision
from zeroshard.planner.answer import plan
from zeroshard.planner.plan import Plan
from zeroshard.runtime.stats import Stats
from zeroshard.sync_policies import Adaptive, Delayed, EveryStep, Local, Nesterov

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
    "Weights",
    "ZeroShardError",
    "from_deepspeed",
    "latest",
    "plan",
    "register_forward_method",
    "shard",
]
__all__ += compress.__all__
