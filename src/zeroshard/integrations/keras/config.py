"""What a script tells `initialize`: a `Config`, each field of which is checked when it is set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import zeroshard as zs

_TRANSPORTS = ("auto", "shm", "gloo", "nodes", "nccl")


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise zs.OptionError(f"Config.{name}={value!r} must be a whole number, 1 or more.")
    return value


def _bytes(name: str, value: Any) -> int:
    try:
        return zs.Options(bucket_bytes=value).bucket_bytes
    except zs.OptionError as error:
        raise zs.OptionError(
            f'Config.{name}={value!r} is not a size: pass bytes, or a text such as "10GiB" or "512MiB".'
        ) from error


def _stage(name: str, value: Any) -> int:
    if isinstance(value, bool) or value not in (0, 1, 2, 3):
        raise zs.OptionError(f"Config.{name}={value!r} is not one of 0, 1, 2, 3.")
    return int(value)


def _offload(name: str, value: Any) -> zs.Offload:
    made = zs.Offload(value) if value in ("host", "disk") else value
    if not isinstance(made, zs.Offload):
        raise zs.OptionError(f'Config.{name}={value!r} must be "host", "disk" or a zs.Offload(...).')
    return made


def _codec(name: str, value: Any) -> Any:
    zs.Options(**{name: value})
    return value


def _sync(name: str, value: Any) -> Any:
    if not isinstance(value, (zs.EveryStep, zs.Delayed, zs.Local, zs.Adaptive)):
        raise zs.OptionError(
            f"Config.{name}={value!r} must be a zs.EveryStep(), zs.Delayed(), zs.Local(...) or "
            "zs.Adaptive(...)."
        )
    return value


def _transport(name: str, value: Any) -> str:
    if value not in _TRANSPORTS:
        raise zs.OptionError(f"Config.{name}={value!r} is not one of {', '.join(_TRANSPORTS)}.")
    return str(value)


_FIELDS: dict[str, Callable[[str, Any], Any]] = {
    "num_nodes": _count,
    "num_gpus_per_node": _count,
    "memory_limit_per_node": _bytes,
    "stage": _stage,
    "offload": _offload,
    "compress": _codec,
    "gather": _codec,
    "sync": _sync,
    "transport": _transport,
}


class Config:
    """How many ranks there are, what one node may use, and how `zs.shard` divides the model.

    - `num_nodes`, `num_gpus_per_node`: the world is their product; where neither is set it is the ranks that
      the launcher has started. A rank has a GPU, or without GPUs a process on the CPU.
    - `memory_limit_per_node`: bytes, or a text such as ``"10GiB"``, of the devices of one node together.
    - `stage`: 0 data parallel, 1 + optimizer state sharded, 2 + gradients, 3 + parameters. Default: 3, or
      with a memory limit the fastest that fits. On TensorFlow: 2.
    - `offload`, `compress`, `gather`, `sync`, `transport`: as `zs.shard` has them; `offload="host"` is
      `zs.Offload("host")`.

    Fields are given to the constructor or set one by one; a misspelt one is an error.
    """

    num_nodes: int | None
    num_gpus_per_node: int | None
    memory_limit_per_node: int | None
    stage: int | None
    offload: zs.Offload | None
    compress: Any
    gather: Any
    sync: Any
    transport: str | None

    def __init__(self, **fields: Any) -> None:
        vars(self).update(dict.fromkeys(_FIELDS))
        for name, value in fields.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _FIELDS:
            raise zs.OptionError(f"Config has no field {name!r}; it has {', '.join(_FIELDS)}.")
        vars(self)[name] = None if value is None else _FIELDS[name](name, value)

    def __repr__(self) -> str:
        told = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if value is not None)
        return f"Config({told})"

    @property
    def world(self) -> int | None:
        """The ranks that there have to be; None where nothing was said."""
        if self.num_nodes is None and self.num_gpus_per_node is None:
            return None
        return (self.num_nodes or 1) * (self.num_gpus_per_node or 1)

    def options(self) -> dict[str, Any]:
        """What `zs.shard` is told, without the limit."""
        names = ("stage", "offload", "compress", "gather", "sync", "transport")
        told = {name: vars(self)[name] for name in names}
        return {name: value for name, value in told.items() if value is not None}

    def limits(self) -> dict[str, Any]:
        """What a planned run is told beside them."""
        if self.memory_limit_per_node is None:
            return {}
        told = {"memory_limit_per_node": self.memory_limit_per_node}
        named = {"nodes": self.num_nodes, "ranks_per_node": self.num_gpus_per_node}
        return told | {name: value for name, value in named.items() if value is not None}

    def refuse_beyond_tensorflow(self) -> None:
        """What needs the hooks that torch has and TensorFlow's graphs have not."""
        asked = ("offload", "compress", "gather", "sync", "transport")
        words = [f"{name}={vars(self)[name]!r}" for name in asked if vars(self)[name] is not None]
        if self.stage == 3:
            words.append("stage=3")
        if words:
            raise zs.OptionError(
                f"Config({words[0]}) is for Keras's PyTorch backend, and this is TensorFlow, whose models "
                "have stages 0, 1 and 2: set the environment variable KERAS_BACKEND=torch, or drop it."
            )
