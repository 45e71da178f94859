"""A plugin for axolotl: its trainers shard what they train.

plugins:
  - zeroshard.integrations.axolotl.Plugin
zeroshard:
  stage: 3
  offload: host
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import zeroshard as zs

from .options import check_options, typed_options

try:
    from axolotl.integrations.base import BasePlugin
    from pydantic import BaseModel
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"zeroshard.integrations.axolotl needs the package {missing.name!r}: pip install axolotl",
        name=missing.name,
    ) from missing

from . import hf

__all__ = ["Arguments", "Plugin"]


class Arguments(BaseModel):
    """What the plugin adds to axolotl's configuration: the options of `zs.shard`."""

    zeroshard: dict[str, Any] | None = None


class Plugin(BasePlugin):  # type: ignore[misc]
    """Shards what axolotl trains, with the options under `zeroshard:` in its configuration."""

    def register(self, cfg: Mapping[str, Any]) -> None:
        """Begin to shard; told before anything is loaded."""
        for engine in ("deepspeed", "fsdp", "fsdp_config"):
            if cfg.get(engine):
                raise zs.OptionError(
                    f"axolotl's configuration has {engine}: beside the plugin of ZeroShard, which shards in "
                    f"its place: drop {engine}:, and write stage: and offload: under zeroshard:."
                )
        options = typed_options(cfg.get("zeroshard") or {})
        check_options(options)
        hf.enable(**options)

    def on_config_validation_error(self, cfg: Mapping[str, Any]) -> None:
        """Trainers are plain again."""
        hf.disable()

    def get_input_args(self) -> str:
        """Where axolotl finds what the plugin adds to its configuration."""
        return f"{__name__}.{Arguments.__name__}"
