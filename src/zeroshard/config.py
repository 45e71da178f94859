"""Options: few, frozen, typed, validated when made, never ignored.

Every option declares what it does to the numbers (`numerics`): ``exact`` (bit-equal to the run without it),
``rounding`` (the same mathematics in fewer bits) or ``approximate`` (other mathematics). No torch in this
file.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypedDict, get_args

from .codec import Codec, Compression
from .errors import OptionError
from .policy import EveryStep, Sync, check_sync, codec_choices, delays, least_exact, local_steps
from .policy import Numerics as Numerics
from .routes import Routes, check_compress, check_gather, routes_of

Stage = Literal[0, 1, 2, 3]
TransportName = Literal["auto", "shm", "gloo", "nodes", "nccl"]
TRANSPORTS = get_args(TransportName)
_EVERY_STEP = EveryStep()

_DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "float64": "float64",
    "fp64": "float64",
}
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_BYTES = re.compile(r"\s*(\d+(?:\.\d+)?)\s*((?:[kmgt]i?)?b?)\s*", re.IGNORECASE)
_SCALE = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint to append to an error: ``' Did you mean "blocks.*"?'`` or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f' Did you mean "{close[0]}"?' if close else ""


def parse_bytes(value: int | str, what: str) -> int:
    """A number of bytes from an int or a text.

    >>> parse_bytes("25MiB", "bucket_bytes")
    26214400
    """
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    else:
        match = _BYTES.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise OptionError(
                f'{what}={value!r} is not a size. Write bytes as an int, or a text such as "25MiB" or '
                '"1.5GB".'
            )
        number = int(float(match[1]) * _SCALE[match[2].lower().removesuffix("b")])
    if number <= 0:
        raise OptionError(f"{what}={value!r} must be more than zero bytes.")
    return number


def show_bytes(number: float) -> str:
    """Bytes for people: ``'25.0 MiB'``."""
    scale, unit = _unit(number)
    return f"{number / scale:.{0 if scale == 1 else 1}f} {unit}"


def show_apart(number: int, other: int) -> tuple[str, str]:
    """Two sizes that a message compares, with as many digits as it takes to tell them apart.

    >>> show_apart(2**30, 2**30 + 9 * 2**20)
    ('1.000 GiB', '1.009 GiB')
    """
    scale, unit = _unit(max(number, other))
    for digits in range(1, 5):
        texts = f"{number / scale:.{digits}f}", f"{other / scale:.{digits}f}"
        if number == other or (texts[0] != texts[1] and digits == 1):
            return show_bytes(number), show_bytes(other)
        if texts[0] != texts[1]:
            return f"{texts[0]} {unit}", f"{texts[1]} {unit}"
    return f"{number:,} bytes", f"{other:,} bytes"


def _unit(number: float) -> tuple[int, str]:
    """The unit that a size is shown in."""
    power = 0
    while abs(number) >= 1024**power * 1023.95 and power < 4:
        power += 1
    return 1024**power, ("B", "KiB", "MiB", "GiB", "TiB")[power]


def dtype_name(value: str, what: str) -> str:
    """The full name of a floating dtype: ``bf16`` and ``bfloat16`` both give ``bfloat16``."""
    name = _DTYPES.get(str(value).removeprefix("torch."))
    if name is None:
        raise OptionError(
            f"{what}={value!r} is not a floating dtype; choose one of {', '.join(DTYPE_BYTES)}."
        )
    return name


@dataclass(frozen=True)
class Precision:
    """In which dtype a model computes, keeps its master weights, and reduces its gradients.

    ``Precision("bfloat16")`` computes in bf16 with an fp32 master: parameters 2 bytes, gradients 2, master
    and Adam 12. ``Precision("float16")`` is the same for fp16; its gradients land in fp32, because torch's
    GradScaler refuses fp16 ones.

    - `compute`: dtype of the leaves that the modules use.
    - `master`: dtype of the homes that the optimizer updates.
    - `reduce`: dtype that travels (default: `compute`). The owner always adds 16-bit contributions in fp32.
    - `grad`: dtype of `p.grad` (default: `reduce`, but float32 for fp16).
    - `keep`: patterns of parameter names that compute in master precision, e.g. ``("*norm*",)``.
    """

    compute: str = "bfloat16"
    master: str = "float32"
    reduce: str | None = None
    grad: str | None = None
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("compute", "master", "reduce", "grad"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, dtype_name(value, f"Precision.{name}"))
        object.__setattr__(self, "keep", patterns(self.keep, "Precision.keep"))
        if DTYPE_BYTES[self.master] < DTYPE_BYTES[self.compute]:
            raise OptionError(
                f"Precision: a {self.master} master cannot hold {self.compute} weights; swap the two."
            )

    @property
    def numerics(self) -> Numerics:
        return "exact" if self.compute == self.master else "rounding"

    @property
    def wire(self) -> str:
        return self.reduce or self.compute

    @property
    def landed(self) -> str:
        return self.grad or ("float32" if self.compute == "float16" else self.wire)


def patterns(value: str | Sequence[str], what: str) -> tuple[str, ...]:
    """One pattern or several, as a tuple; anything else is an error."""
    result = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    if any(not isinstance(p, str) or not p for p in result):
        raise OptionError(f'{what}={value!r} must be a name pattern such as "blocks.*", or several.')
    return result


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
        known = {
            "optimizer": ("device", "host", "disk", "auto"),
            "parameters": ("device", "host", "disk", "auto"),
            "master": ("plain", "split"),
            "moments": ("float32", "int8"),
        }
        for name, values in known.items():
            value = getattr(self, name)
            if value not in values:
                raise OptionError(
                    f"Offload.{name}={value!r} is not one of "
                    f"{', '.join(values)}.{did_you_mean(str(value), values)}"
                )
        self._check_device()
        self._check_tiers()
        object.__setattr__(self, "stage_bytes", parse_bytes(self.stage_bytes, "Offload.stage_bytes"))
        for name, least in (("stages", 2), ("threads", 1)):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value >= least):
                raise OptionError(f"Offload.{name}={value!r} must be a whole number, {least} or more.")

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
                object.__setattr__(self, name, 0 if value == 0 else parse_bytes(value, f"Offload.{name}"))
                if not self.automatic:
                    raise OptionError(f'Offload.{name} is a limit for "auto", and nothing here is "auto".')
        if self.automatic and self.device_bytes is None:
            raise OptionError(
                'Offload: "auto" needs device_bytes=, what parameters and optimizer state may take of the '
                'device (such as "20GiB"); leave the rest for gradients and activations. zs.plan() tells '
                "how much they need."
            )
        if self.path is not None:
            object.__setattr__(self, "path", os.path.abspath(os.fspath(self.path)))
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


@dataclass(frozen=True)
class Options:
    """Everything that `shard` can be told, in one frozen record. See `shard` for the meaning of each."""

    stage: Stage = 3
    precision: Precision | None = None
    units: tuple[str, ...] | Literal["auto", "none"] = "auto"
    bucket_bytes: int = 25 * 2**20
    prefetch: int = 1
    recompute: tuple[str, ...] | bool = False
    split: Literal["auto", "rows", "level", "whole"] = "auto"
    buffers: Literal["broadcast", "local"] = "broadcast"
    transport: TransportName = "auto"
    offload: Offload | None = None
    clip_norm: float | None = None
    sync: Sync = _EVERY_STEP
    node_cache: bool = False
    ranks_per_node: int | None = None
    compress: Routes = ()
    gather: Routes = ()

    def __post_init__(self) -> None:
        put = object.__setattr__
        if self.stage not in (0, 1, 2, 3) or isinstance(self.stage, bool):
            raise OptionError(f"stage={self.stage!r} is not one of 0, 1, 2, 3.")
        if isinstance(self.precision, str):
            name = dtype_name(self.precision, "precision")
            put(self, "precision", None if name == "float32" else Precision(name))
        elif self.precision is not None and not isinstance(self.precision, Precision):
            raise OptionError(
                f"precision={self.precision!r} must be a Precision, or one of bf16, fp16, fp32."
            )
        if self.units not in ("auto", "none"):
            put(self, "units", patterns(self.units, "units"))
        put(self, "bucket_bytes", parse_bytes(self.bucket_bytes, "bucket_bytes"))
        if not isinstance(self.prefetch, int) or isinstance(self.prefetch, bool) or self.prefetch < 0:
            raise OptionError(f"prefetch={self.prefetch!r} must be a number of units, 0 or more.")
        if not isinstance(self.recompute, bool):
            put(self, "recompute", patterns(self.recompute, "recompute"))
        if self.offload is not None and not isinstance(self.offload, Offload):
            raise OptionError(f"offload={self.offload!r} must be a zs.Offload(...).")
        if self.clip_norm is not None and not (
            isinstance(self.clip_norm, (int, float)) and self.clip_norm > 0
        ):
            raise OptionError(
                f"clip_norm={self.clip_norm!r} must be above zero (math.inf: measure the norm, clip nothing)."
            )
        check_sync(self.sync, self.stage)
        if self.precision is not None and self.precision.compute == "float16" and delays(self.sync):
            raise OptionError(
                "sync=Delayed() and fp16 do not go together: a GradScaler divides by this step's scale, "
                "and the gradient is that of the step before (in the first step there is none). Pass "
                'precision="bf16", or drop Delayed().'
            )
        if self.offload is not None and local_steps(self.sync):
            raise OptionError(
                "sync=Local(...) and offload= do not go together: local steps change whole parameters on the "
                "device. Drop one of them; sync=Delayed() works with offload."
            )
        put(self, "compress", routes_of(self.compress))
        check_compress(self.compress, self.sync, self.stage, self.offload is not None)
        put(self, "gather", routes_of(self.gather, "gather"))
        check_gather(self.gather, self.stage, self.offload is not None)
        if self.offload is not None and codec_choices(self.sync):
            raise OptionError(
                "Adaptive chooses among codecs only without offload=, whose gradients have one way to the "
                "host: pass shard(..., compress=...) for one codec throughout."
            )
        for name, known in (
            ("split", ("auto", "rows", "level", "whole")),
            ("buffers", ("broadcast", "local")),
            ("transport", TRANSPORTS),
        ):
            value = getattr(self, name)
            if value not in known:
                raise OptionError(
                    f"{name}={value!r} is not one of {', '.join(known)}.{did_you_mean(str(value), known)}"
                )
        self._check_nodes()

    def _check_nodes(self) -> None:
        """What has to do with nodes, where it has an effect."""
        count = self.ranks_per_node
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise OptionError(f"ranks_per_node={count!r} must be a number of ranks, 1 or more.")
        if self.node_cache and self.stage != 3:
            raise OptionError(
                "node_cache=True keeps parameters that stage 3 would gather again, and this is stage "
                f'{self.stage}, which keeps all of them anyway: drop it; transport="nodes" is what makes '
                "other traffic cross between nodes once."
            )
        if self.node_cache and self.transport not in ("auto", "nodes"):
            raise OptionError(
                f'node_cache=True needs transport="nodes", not "{self.transport}": drop one of them.'
            )
        if self.transport == "nodes" and self.stage == 3 and not self.node_cache:
            raise OptionError(
                'transport="nodes" at stage 3 keeps the rows of other nodes inside the node: pass '
                'node_cache=True, which costs memory, or transport="gloo".'
            )
        if self.transport == "nodes" and self.stage == 0 and delays(self.sync):
            raise OptionError(
                'sync=Delayed() with transport="nodes" needs stage 1, 2 or 3: at stage 0 a sum goes from its '
                "owner straight to every rank, and would cross between nodes once for each. Pass stage=1, or "
                'transport="gloo".'
            )

    @classmethod
    def of(cls, given: dict[str, Any]) -> Options:
        """Options from keyword arguments; an unknown name is an error that offers the nearest one."""
        known = [f.name for f in fields(cls)]
        for name in given:
            if name not in known:
                raise OptionError(
                    f"shard() has no option {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}."
                )
        return cls(**given)

    @property
    def numerics(self) -> Numerics:
        """The least exact of all that it asks for."""
        codecs = (codec for _, codec in (*self.compress, *self.gather))
        asked = [self.precision, self.offload, self.sync, *codecs]
        return least_exact(one.numerics for one in asked if one is not None)

    @property
    def shards_state(self) -> bool:
        return self.stage >= 1

    @property
    def shards_grads(self) -> bool:
        return self.stage >= 2

    @property
    def shards_params(self) -> bool:
        return self.stage >= 3


class OptionKeys(TypedDict, total=False):
    """The keyword arguments of `shard`, for type checkers; `Options` holds their defaults and checks."""

    stage: Stage
    precision: Precision | str | None
    units: str | Sequence[str]
    bucket_bytes: int | str
    prefetch: int
    recompute: bool | str | Sequence[str]
    split: Literal["auto", "rows", "level", "whole"]
    buffers: Literal["broadcast", "local"]
    transport: TransportName
    offload: Offload | None
    clip_norm: float | None
    sync: Sync
    node_cache: bool
    ranks_per_node: int | None
    compress: Compression | Mapping[str, Compression | None] | None
    gather: Codec | Mapping[str, Codec | None] | None
