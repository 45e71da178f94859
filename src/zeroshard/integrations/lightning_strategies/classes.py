"""The classes that scripts name. Lightning comes in two packages of the same text, whose classes are not the
same, so these are made for each."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from .fabric import FabricSharding, SyncControl
from .logs import StatsLogging
from .runs import forwarded, register
from .trainer import TrainerSharding


def classes_for(module: str, pytorch: str, fabric: str, install: str) -> tuple[Any, Any, Any]:
    """`ZeroShardStrategy`, `ZeroShardFabricStrategy` and `LogStats`, of this module of ours and on top of the
    classes in these of Lightning's, where the strategies then have their names."""
    try:
        environments = import_module(f"{fabric}.plugins.environments")
        fabrics, trainers = import_module(f"{fabric}.strategies"), import_module(f"{pytorch}.strategies")
        wrappers, optimizers = import_module(f"{fabric}.wrappers"), import_module(f"{pytorch}.core.optimizer")
        callback = import_module(f"{pytorch}.callbacks").Callback
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"{module} needs the package {missing.name!r}: pip install {install}", name=missing.name
        ) from missing

    def made(name: str, ours: type, theirs: type, **own: Any) -> Any:
        kind = type(name, (ours, theirs), {"__module__": module, "__doc__": ours.__doc__} | own)
        setattr(sys.modules[module], name, kind)  # ranks that Lightning starts itself are sent objects of it
        return kind

    started = {"environment": environments.TorchElasticEnvironment}
    control = made("_Control", SyncControl, fabrics.strategy._BackwardSyncControl)
    strategy = made("ZeroShardStrategy", TrainerSharding, trainers.DDPStrategy, **started)
    fabric_strategy = made(
        "ZeroShardFabricStrategy", FabricSharding, fabrics.DDPStrategy, sync_control=control, **started
    )
    register(trainers.StrategyRegistry, strategy)
    register(fabrics.STRATEGY_REGISTRY, fabric_strategy)
    forwarded(optimizers.LightningOptimizer, wrappers._FabricOptimizer)
    return strategy, fabric_strategy, made("LogStats", StatsLogging, callback)
