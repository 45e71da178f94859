"""Where state and parameters rest: the `offload=` option of `shard`. A frozen record, no torch; `place` acts
on it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal, get_args

from .errors import OptionError, did_you_mean
from .fields import check_fields, path_text
from .policy import Numerics
from .sizes import parse_bytes

Tier = Literal["device", "host", "disk", "auto"]


@dataclass(frozen=True)
class Offload:
    """Where optimizer state and parameters rest.

    - `optimizer`: ``"host"`` keeps master weights and moments in host memory and updates them there;
      ``"disk"`` keeps them in a scratch file under `path`, and in host memory only while they are updated;
      ``"auto"`` fills the device first, then the host, then the disk, unit by unit.
    - `parameters`: ``"host"`` keeps the compute weights there too and streams them in unit by unit;
      ``"disk"`` (one rank) reads them from the scratch file, where they rest beside their state;
      ``"auto"`` does so for the units that have no room on the device, or none on the host.
    - `path`: a folder on a disk. It may differ between ranks. `device_bytes`, `host_bytes`: what ``"auto"``
      may take of this rank's device and host for parameters and state (host: by default nine tenths of what
      is free, shared by the ranks of the machine).
    - `master`: ``"split"`` stores an fp32 master as the bf16 weight plus a 16-bit remainder: 2 bytes fewer,
      bit-exact. In every tier; also with ``optimizer="device"``, where nothing else is offloaded.
    - `moments`: ``"int8"`` stores Adam's moments in blocks of 8-bit codes: 6 bytes fewer (`rounding`).
    - `undo`: whether gradients are kept until the norm is known (2 bytes a parameter on the device), so that
      updates can wait for it or be taken back. Without it every update begins at once, and a norm above
      `clip_norm` is an error.
    - `threads`: worker threads for the update (default: the cores that this process may use, less two).
    - `stages`, `stage_bytes`: how many parts of the middle size the pinned staging memory between device and
      host has room for, and how many berths there are between disk and host; gradients go out in parts of
      that size.

    Exact, except for 8-bit moments.
    """

    optimizer: Tier = "host"
    parameters: Tier = "device"
    master: Literal["plain", "split"] = "plain"
    moments: Literal["float32", "int8"] = "float32"
    undo: bool = True
    threads: int | None = None
    stages: int = 4
    stage_bytes: int = 64 * 2**20
    path: str | None = field(default=None, repr=False)  # ranks compare what is shown
    device_bytes: int | None = None
    host_bytes: int | None = None

    def __post_init__(self) -> None:
        tiers = get_args(Tier)
        known = {
            "optimizer": tiers,
            "parameters": tiers,
            "master": ("plain", "split"),
            "moments": ("float32", "int8"),
        }
        for name, values in known.items():
            value = getattr(self, name)
            if value not in values:
                near = did_you_mean(str(value), values)
                raise OptionError(f"Offload.{name}={value!r} is not one of {', '.join(values)}.{near}")
        self._check_device()
        self._check_tiers()
        object.__setattr__(self, "stage_bytes", parse_bytes(self.stage_bytes, "Offload.stage_bytes"))
        for name, least in (("stages", 2), ("threads", 1)):
            value = getattr(self, name)
            if not (isinstance(value, int) and value >= least) and (value is not None or name == "stages"):
                raise OptionError(f"Offload.{name}={value!r} must be a whole number, {least} or more.")
        check_fields(self)

    def _check_device(self) -> None:
        """What state that stays on the device rules out."""
        if self.optimizer != "device":
            return
        if self.parameters == "device" and self.master == "plain":
            raise OptionError(
                'Offload(optimizer="device", parameters="device") offloads nothing: drop offload=, say '
                '"host", or master="split" for 2 bytes fewer a parameter.'
            )
        if self.moments == "int8":
            raise OptionError('Offload: moments="int8" belongs to the host update: pass optimizer="host".')
        if self.master == "split" and self.parameters == "host":
            raise OptionError(
                'Offload(optimizer="device", parameters="host", master="split"): the weights are half of a '
                'split master, so the two rest together. Pass parameters="device", or optimizer="host".'
            )

    def _check_tiers(self) -> None:
        """Budgets and folders where they have a meaning, and only there."""
        for name in ("device_bytes", "host_bytes"):
            value = getattr(self, name)
            if value is not None:
                if type(value) is not int or value != 0:
                    object.__setattr__(self, name, parse_bytes(value, f"Offload.{name}"))
                if not self.automatic:
                    raise OptionError(f'Offload.{name} is a limit for "auto", and nothing here is "auto".')
        if self.automatic and self.device_bytes is None:
            raise OptionError(
                'Offload: "auto" needs device_bytes=, what parameters and optimizer state may take of the '
                'device (such as "20GiB"); leave the rest for gradients and activations. zs.plan() tells '
                "how much they need."
            )
        if self.path is not None:
            object.__setattr__(self, "path", os.path.abspath(path_text(self.path, "Offload.path")))
        if self.optimizer == "disk" and self.path is None:
            raise OptionError(
                'Offload(optimizer="disk") needs path=, a folder on a disk with room for the state.'
            )
        if self.parameters == "disk" and self.optimizer not in ("disk", "auto"):
            raise OptionError(
                f'Offload(parameters="disk", optimizer="{self.optimizer}"): weights rest on the disk beside '
                'their state, so that one transfer moves both. Pass optimizer="disk".'
            )
        if self.path is not None and self.optimizer not in ("disk", "auto"):
            raise OptionError(
                f'Offload(optimizer="{self.optimizer}") puts nothing on a disk: drop path=, or say "disk" or '
                '"auto".'
            )

    @property
    def automatic(self) -> bool:
        return "auto" in (self.optimizer, self.parameters)

    @property
    def numerics(self) -> Numerics:
        return "rounding" if self.moments == "int8" else "exact"
