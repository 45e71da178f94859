"""What `zeroshard.integrations.lightning` has, for scripts that import `pytorch_lightning`."""

from __future__ import annotations

from .attached import run_of
from .lightning_strategies.classes import classes_for
from .lightning_strategies.runs import grad_norm

__all__ = ["LogStats", "ZeroShardFabricStrategy", "ZeroShardStrategy", "grad_norm", "run_of"]

ZeroShardStrategy, ZeroShardFabricStrategy, LogStats = classes_for(
    __name__,
    "pytorch_lightning",
    "lightning_fabric",
    "'pytorch_lightning>=2.6,<3' (of lightning: zeroshard.integrations.lightning)",
)
