"""Options: few, frozen, typed, validated when made, never ignored.

Every option declares what it does to the numbers (`numerics`): ``exact`` (bit-equal to the run without it),
``rounding`` (the same mathematics in fewer bits) or ``approximate`` (other mathematics). No torch in this
file.

Which codec each parameter gets: the `compress=` and `gather=` options of `shard`.

Where state and parameters rest: the `offload=` option of `shard`. A frozen record, no torch; `place` acts
on it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, TypedDict, get_args

from zeroshard.compress import Codec, Compression, Delta, MeanCodec, Rows
from zeroshard.errors import OptionError, did_you_mean
from zeroshard.field_checks import check_fields, path_text
from zeroshard.sizes import parse_bytes
from zeroshard.sync_policies import (
    Adaptive,
    EveryStep,
    Local,
    Sync,
    check_sync,
    choices_of,
    codec_choices,
    delays,
    least_exact,
    local_steps,
    reunites,
)
from zeroshard.sync_policies import Numerics as Numerics

Stage = Literal[0, 1, 2, 3]
TransportName = Literal["auto", "shm", "gloo", "nodes", "nccl"]
#: All names that `transport=` takes; `register_transport` adds to them.
TRANSPORTS: list[str] = [*get_args(TransportName)]
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

    - `compute`: dtype of the unsharded parameters that the modules use.
    - `master`: dtype of the sharded parameters that the optimizer updates.
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
    transport: TransportName | str = "auto"
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
        self._check_sync()
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
        self._check_repeats()

    def _check_sync(self) -> None:
        """What a sync policy needs of the other options."""
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

    def _check_repeats(self) -> None:
        """A backward runs twice where gradients would wait for the norm, and so for the step."""
        if self.offload is None or not self.offload.repeat_backward:
            return
        waits = self.defers or (
            self.offload.undo and self.clip_norm is not None and self.clip_norm < math.inf
        )
        half = self.precision is not None and self.precision.compute == "float16"
        plain = type(self.sync) is EveryStep and self.sync.compress is None and not self.compress
        if not waits or (half and self.clip_norm is not None) or not plain:
            raise OptionError(
                f"Offload(repeat_backward={self.offload.repeat_backward}) saves the room in which gradients "
                "wait for the norm, and in this run none waits so: it needs a finite clip_norm= (with fp16: "
                "none), or the loop's own clipping, and undo=True, without sync= and compress=."
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
    def defers(self) -> bool:
        """Whether gradients of offloaded state wait on the device for the loop's own clipping and step, from
        which the native kernels update."""
        plain = type(self.sync) is EveryStep and self.sync.compress is None and not self.compress
        undo = self.offload is not None and self.offload.undo
        return undo and self.clip_norm is None and plain

    @property
    def shards_grads(self) -> bool:
        return self.stage >= 2

    @property
    def shards_params(self) -> bool:
        return self.stage >= 3


class OptionArguments(TypedDict, total=False):
    """The keyword arguments of `shard`, for type checkers; `Options` holds their defaults and checks."""

    stage: Stage
    precision: Precision | str | None
    units: str | Sequence[str]
    bucket_bytes: int | str
    prefetch: int
    recompute: bool | str | Sequence[str]
    split: SplitName
    buffers: BufferWay
    transport: TransportName | str
    offload: Offload | None
    clip_norm: float | None
    sync: Sync
    node_cache: bool
    ranks_per_node: int | None
    compress: Compression | Mapping[str, Compression | None] | None
    gather: Codec | Mapping[str, Codec | None] | None


#: Patterns of parameter names and the codec of each, None: as they are. The first that matches counts.
Routes = tuple[tuple[str, Compression | None], ...]


def routes_of(value: Any, what: str = "compress") -> Routes:
    """`compress=` or `gather=` as pairs: a codec for all parameters, or a mapping from name patterns to
    codecs.

    >>> from zeroshard.compress import Int8
    >>> routes_of({"*norm*": None, "*": Int8()})
    (('*norm*', None), ('*', Int8(block=256, residual='float32', feedback=False, stochastic=False)))
    """
    if value is None:
        return ()
    if isinstance(value, Compression):
        value = {"*": value}
    pairs: Any = tuple(value.items()) if isinstance(value, Mapping) else value
    if isinstance(pairs, (list, tuple)):  # as a plan shows it
        pairs = tuple(tuple(pair) if isinstance(pair, list) else pair for pair in pairs)
    if not isinstance(pairs, tuple) or not all(_is_pair(pair) for pair in pairs):
        raise OptionError(
            f"{what}={value!r} must be a codec such as zs.Int8(), or a mapping from name patterns to "
            'codecs such as {"*norm*": None, "*": zs.Int8()}.'
        )
    for _, codec in pairs:
        if codec is not None:
            codec.settings()  # raises for a codec that ranks could not compare
        if isinstance(codec, Codec) and not isinstance(size := codec.wire_bytes(999), int):
            raise OptionError(
                f"{what}: wire_bytes(999) of {codec!r} is {size!r}: return a whole number, such as "
                "(numel + 1) // 2."
            )
    return tuple((str(pattern), codec) for pattern, codec in pairs)


def _is_pair(pair: object) -> bool:
    if not isinstance(pair, tuple) or len(pair) != 2:
        return False
    pattern, codec = pair
    return isinstance(pattern, str) and bool(pattern) and (codec is None or isinstance(codec, Compression))


def codec_for(routes: Routes, name: str, shape: Sequence[int]) -> Compression | None:
    """The codec of the first pattern that matches; None: the gradient travels as it is. So does one that has
    not the form that its codec is for: a vector among matrices. And a single number, of which every rank has
    a copy: coded for each beside other values, it would come out otherwise."""
    if not shape or not routes:
        return None
    codec = next((codec for pattern, codec in routes if fnmatchcase(name, pattern)), None)
    if isinstance(codec, MeanCodec) and not codec.suits(shape):
        return None
    return None if isinstance(codec, Rows) and (len(shape) < 2 or 0 in shape) else codec


def bucket_limit(codec: Compression | None, limit: int) -> int:
    """Bytes of gradients that travel together: of a codec for rows, those of one parameter."""
    return 1 if isinstance(codec, Rows) else limit


def check_patterns(routes: Routes, names: Iterable[str], what: str = "compress") -> None:
    """Every pattern of an option must decide about some parameter: an option is never ignored."""
    every = list(names)
    undecided = list(every)
    for pattern, _ in routes:
        taken = {name for name in undecided if fnmatchcase(name, pattern)}
        if not taken:
            earlier = " that no earlier pattern has taken" if len(undecided) < len(every) else ""
            raise OptionError(
                f'{what}: pattern "{pattern}" matches no {"trainable " if what == "compress" else ""}'
                f"parameter{earlier}. Patterns are tried in the order given."
            )
        undecided = [name for name in undecided if name not in taken]


def check_compress(routes: Routes, sync: Sync, stage: int, offloads: bool = False) -> None:
    """Whether any gradients travel that a codec could make smaller, and the codecs go with the rest."""
    choices = choices_of(sync)
    every = list(routes)
    for choice in choices:
        if isinstance(choice, EveryStep):
            every += routes_of(choice.compress)
    if routes and all(isinstance(choice, Local) for choice in choices):
        raise OptionError(
            "compress= encodes gradients, and with sync=Local(...) none travel: ranks meet by their "
            "parameters. Drop one of the two."
        )
    frozen = [codec for _, codec in every if codec is not None and codec.freezes]
    if frozen and isinstance(sync, Adaptive):
        raise OptionError(
            f"{frozen[0]!r} keeps Adam's second moments from its warm-up on, and Adaptive goes from one way "
            "to another and back: drop freeze=True, or Adaptive."
        )
    if frozen and offloads:
        raise OptionError(
            f"{frozen[0]!r} keeps Adam's second moments beside torch's own, and with offload= the host "
            "updates them: drop freeze=True, or offload=."
        )
    if any(isinstance(codec, Delta) for _, codec in every):
        raise OptionError(
            "Delta(...) sends what has changed in the parameters: pass it as gather=. Gradients are changes "
            "already; the codec inside it is one for compress=."
        )
    late = delays(sync)
    means = [type(codec).__name__ for _, codec in routes if isinstance(codec, MeanCodec)]
    if late and means:
        raise OptionError(
            f"{means[0]} sends a gradient in rounds that wait for one another, and sync=Delayed() waits for "
            "nothing: drop one of them, or take another codec."
        )
    if late and routes and stage == 0:
        raise OptionError(
            "compress= with sync=Delayed() needs stage 1, 2 or 3: at stage 0 sums would be encoded again for "
            "their way back, and only gradients as they are make it beside the computation. Pass stage=1."
        )


def gather_codec(routes: Routes, name: str) -> Codec | None:
    """The codec of `gather=` for a parameter; None: it travels as it is."""
    codec = next((codec for pattern, codec in routes if fnmatchcase(name, pattern)), None)
    assert codec is None or isinstance(codec, Codec)
    return codec


def check_gather(routes: Routes, stage: int, offloads: bool) -> None:
    """Whether the codecs of `gather=` can carry parameters, at a stage that gathers them."""
    for _, codec in routes:
        if codec is not None:
            _check_carrier(codec, stage, offloads)
    if routes and not any(codec for _, codec in routes):
        raise OptionError(f"gather={dict(routes)!r} names no codec: drop it, or name one such as zs.Int8().")


def _check_carrier(codec: Compression, stage: int, offloads: bool) -> None:
    """One codec of them."""
    if not isinstance(codec, Codec):
        raise OptionError(f"gather={codec!r} must be a codec such as zs.Int8().")
    if codec.state_names or not codec.active(0):
        raise OptionError(
            f"gather={codec!r}: parameters are encoded afresh every step, so a codec for them keeps no state "
            "and needs no warm-up. Pass zs.Int8(), zs.Int4(feedback=False) or zs.Cast(...)."
        )
    if stage == 0:
        raise OptionError(
            "gather= encodes parameters that ranks fetch from one another, and at stage 0 every rank updates "
            "all of them itself: drop it, or pass stage=1, 2 or 3."
        )
    if offloads and isinstance(codec, Delta):
        raise OptionError(
            "gather=Delta(...) keeps what all ranks believe on the device, which offload= is there to spare: "
            "pass gather=zs.Int8(), or drop offload=."
        )
    if offloads and stage < 3:
        raise OptionError(
            f"gather= with offload= needs stage=3, and this is stage {stage}: the host writes the new "
            "weights into the ones that compute, where decoded ones would have to be."
        )


Tier = Literal["device", "host", "disk", "auto"]
#: Names before ``://`` in `Offload.path`; `register_tier` adds to them.
TIER_SCHEMES: list[str] = []


def _place(path: str) -> str:
    """A folder by its absolute path; storage of the user's own as it is."""
    scheme, separator, _ = path.partition("://")
    if not separator:
        return os.path.abspath(path)
    if scheme not in TIER_SCHEMES:
        known = f"registered: {', '.join(TIER_SCHEMES)}" if TIER_SCHEMES else "none is registered"
        raise OptionError(
            f"Offload.path={path!r} names a tier of your own, and {known}: call "
            f"zeroshard.extend.register_tier({scheme!r}, ...) before, or pass a folder."
        )
    return path


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
    - `repeat_backward`: of so many units, those nearest the loss, no gradient waits for the norm: it is
      measured and dropped, and once the norm is known their backward runs a second time, for the update (one
      rank). Takes their forward and backward once more, and spares 2 bytes a parameter on the device.
    - `threads`: worker threads for the update (default: the cores that this process may use, less two).
    - `stages`, `stage_bytes`: how many parts of the middle size the pinned staging memory between device and
      host has room for, and how many frames there are between disk and host; gradients go out in parts of
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
    repeat_backward: int = 0

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
        for name, least in (("stages", 2), ("threads", 1), ("repeat_backward", 0)):
            value = getattr(self, name)
            whole = isinstance(value, int) and value >= least
            if not whole and (value is not None or name != "threads"):
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
            object.__setattr__(self, "path", _place(path_text(self.path, "Offload.path")))
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
