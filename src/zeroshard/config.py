"""Options: few, frozen, typed, validated when made, never ignored.

Every option declares what it does to the numbers (`numerics`): ``exact`` (bit-equal to the run without it),
``rounding`` (the same mathematics in fewer bits) or ``approximate`` (other mathematics). No torch in this
file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict, get_args

from .codec import Codec, Compression
from .errors import OptionError, did_you_mean
from .fields import check_fields
from .offload import Offload
from .policy import EveryStep, Sync, check_sync, codec_choices, delays, least_exact, local_steps, reunites
from .policy import Numerics as Numerics
from .routes import Routes, check_compress, check_gather, routes_of
from .sizes import parse_bytes

Stage = Literal[0, 1, 2, 3]
TransportName = Literal["auto", "shm", "gloo", "nodes", "nccl"]
TRANSPORTS = get_args(TransportName)
SplitName = Literal["auto", "rows", "level", "whole"]
BufferWay = Literal["broadcast", "local"]
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
    and Adam 12. ``Precision("float16")`` computes in fp16; its gradients land in fp32, so that loops may call
    `scaler.unscale_`, which refuses fp16 ones: 2 bytes more. ``Precision("float16", grad="float16")`` saves
    them: gradients keep the scale of the loss until the step widens them, so `scaler.step` alone divides, and
    `clip_norm=` clips.

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
            if value is not None or name in ("compute", "master"):
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


@dataclass(frozen=True)
class Options:
    """Everything that `shard` can be told, in one frozen record. See `shard` for the meaning of each."""

    stage: Stage = 3
    precision: Precision | None = None
    units: tuple[str, ...] | Literal["auto", "none"] = "auto"
    bucket_bytes: int = 25 * 2**20
    prefetch: int = 1
    recompute: tuple[str, ...] | bool = False
    split: SplitName = "auto"
    buffers: BufferWay = "broadcast"
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
        if type(self.stage) is not int or self.stage not in (0, 1, 2, 3):
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
            isinstance(self.clip_norm, (int, float)) and self.clip_norm > 0 and self.clip_norm is not True
        ):
            raise OptionError(
                f"clip_norm={self.clip_norm!r} must be above zero (math.inf: measure the norm, clip nothing)."
            )
        check_sync(self.sync, self.stage)
        half = self.precision is not None and self.precision.compute == "float16"
        if half and delays(self.sync):
            raise OptionError(
                "sync=Delayed() and fp16 do not go together: a GradScaler divides by this step's scale, "
                "and the gradient is that of the step before (in the first step there is none). Pass "
                'precision="bf16", or drop Delayed().'
            )
        if half and reunites(self.sync):
            raise OptionError(
                "an Adaptive() that has Local() beside other choices does not go with fp16: ranks that train "
                "apart come to different scales of a GradScaler, and then add their gradients up. Pass "
                'precision="bf16", or drop Local().'
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
            ("split", get_args(SplitName)),
            ("buffers", get_args(BufferWay)),
            ("transport", TRANSPORTS),
        ):
            value = getattr(self, name)
            if value not in known:
                raise OptionError(
                    f"{name}={value!r} is not one of {', '.join(known)}.{did_you_mean(str(value), known)}"
                )
        check_fields(self, name="")
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

    @property
    def numerics(self) -> Numerics:
        """The least exact of all that it asks for."""
        codecs = (codec for _, codec in (*self.compress, *self.gather))
        asked = [self.precision, self.offload, self.sync, *codecs]
        return least_exact(one.numerics for one in asked if one is not None)

    @property
    def rows(self) -> Literal["rows", "level", "copy"]:
        """How tensors are divided that need not stay whole; with `split="whole"` there are none."""
        return "copy" if not self.shards_state else "level" if self.split == "level" else "rows"

    @property
    def shards_state(self) -> bool:
        return self.stage >= 1

    @property
    def lands_in_fp16(self) -> bool:
        """Whether gradients keep the scale of the loss until they are widened for the step."""
        return self.precision is not None and self.precision.landed == "float16"

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
    split: SplitName
    buffers: BufferWay
    transport: TransportName
    offload: Offload | None
    clip_norm: float | None
    sync: Sync
    node_cache: bool
    ranks_per_node: int | None
    compress: Compression | Mapping[str, Compression | None] | None
    gather: Codec | Mapping[str, Codec | None] | None
