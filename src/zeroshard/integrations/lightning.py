"""Lightning: `Trainer` and `Fabric` stay, and what they train is sharded.

    from zeroshard.integrations.lightning import ZeroShardStrategy

    trainer = Trainer(strategy=ZeroShardStrategy(stage=3), devices=2)

With this import the strategies have names, too, for `Trainer` and for `Fabric`: `strategy="zeroshard"` (stage
3), `"zeroshard_2"`, `"zeroshard_3_offload"`. Scripts that import `pytorch_lightning` find the same in
`zeroshard.integrations.pytorch_lightning`.
"""

from __future__ import annotations

from .attached import run_of
from .lightning_strategies.classes import classes_for
from .lightning_strategies.runs import grad_norm

__all__ = ["LogStats", "ZeroShardFabricStrategy", "ZeroShardStrategy", "grad_norm", "run_of"]

ZeroShardStrategy, ZeroShardFabricStrategy, LogStats = classes_for(
    __name__,
    "lightning.pytorch",
    "lightning.fabric",
    "'zeroshard[lightning]' (of pytorch_lightning: zeroshard.integrations.pytorch_lightning)",
)
