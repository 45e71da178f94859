"""Declares what a model and its runs are made of, as plain integers.

The words are those of docs/architecture/words.md. Costs do not grow with the world: the length of a wire is
summed over ranks in closed form, not rank by rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from zeroshard.compress.base import padded
from zeroshard.options import DTYPE_BYTES

from .placement import Rest
from .sharding import ALIGN, FlatPackLayout, PackLayout, ShardSpec, aligned

if TYPE_CHECKING:
    from zeroshard.compress import Codec, Compression

WIDTHS = DTYPE_BYTES | {
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
# Dtypes of wire and gradient, and the codec between. Gradients of one sort may share a bucket, and its
# buckets a ring of wires.
Sort = tuple[str, str, "Compression | None"]
ROOT = "(root)"  # label of the unit without a name
BLOCK = 256  # elements that share the scales of 8-bit moments, as in the native kernels
# The disk tier: direct I/O moves whole grains, in requests of at most so many bytes, one in each lane.
# Weights pass through two blocks a lane: one that it fills, and one on its way to the device.
GRAIN, REQUEST, LANES = 4096, 4 * 2**20, 8
BLOCKS = 2 * LANES


@dataclass(frozen=True)
class TransportTraits:
    """What runs and plans must know of a transport, however it moves bytes.

    - `overlaps`: operations go on while this thread computes.
    - `staged`: they pass through device memory that the transport keeps.
    - `adds_here`: sums are made by the thread that waits: there is a `reduce_by`.
    - `summed_first`: neighbouring ranks whose shards `reduce` adds before it adds those sums.
    - `keeps_order`: operations run one after another, so that all ranks must start them in one order.
    - `direct`: messages go from rank to rank: gathers need neither `open` nor one order on all ranks.
    """

    overlaps: bool = False
    staged: bool = False
    adds_here: bool = False
    summed_first: int = 1
    keeps_order: bool = False
    direct: bool = False


#: What plans assume where no run is at hand: ranks that exchange messages while they compute, and GPUs.
ASSUMED_TRAITS = TransportTraits(overlaps=True)
GPU_TRAITS = TransportTraits(overlaps=True, staged=True)


@dataclass(frozen=True)
class ParamSpec:
    """A parameter as the model has it. `number`: its place in `model.parameters()`; `rule`: whose update it
    gets, -1 for none; `used`: whether a step gives it a gradient."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    trainable: bool = True
    number: int = 0
    rule: int = 0
    used: bool = True

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def updated(self) -> bool:
        """Whether an optimizer's step changes it, and keeps state for it."""
        return self.trainable and self.used and self.rule >= 0


@dataclass(frozen=True)
class OptimizerRule:
    """What one parameter group of an optimizer keeps.

    - `moments`: tensors of a parameter's size in its state. `by_rows`: element-wise, so that rows suffice.
    - `factors`: of tensors with two dims or more, pairs of a row's and a column's means that it keeps in
      place of so many moments (Adafactor); of others it keeps `moments` and as many whole.
    - `kernel`: the native kernels know its update, of fp32 masters.
    - `temporaries`: copies that a step makes: of all tensors together (foreach), and beside those of the
      largest one and of the next (a loop over them). Fused steps make none.
    """

    name: str = "AdamW"
    moments: int = 2
    by_rows: bool = True
    temporaries: tuple[int, int, int] = (0, 0, 0)
    factors: int = 0
    kernel: bool = True

    def kept(self, shape: tuple[int, ...], numel: int) -> int:
        """Elements of state for `numel` of the elements of a tensor."""
        if len(shape) < 2 or not self.factors or not numel:
            return (self.moments + self.factors) * numel
        return self.moments * numel + self.factors * (numel // shape[-1] + numel // shape[-2])


@dataclass(frozen=True)
class UnitSpec:
    """A unit: its weights in registration order. The root's name is empty and it comes first."""

    name: str
    weights: tuple[ParamSpec, ...]

    @property
    def label(self) -> str:
        return self.name or ROOT

    @property
    def numel(self) -> int:
        return sum(w.numel for w in self.weights)


@dataclass(frozen=True)
class BufferBytes:
    """Lasting bytes of one rank, by the kinds of `run.stats()`. `staging` and `host` are host memory,
    `disk` is on a disk, the rest is on the device."""

    parameters: int = 0
    gradients: int = 0
    state: int = 0
    gathered: int = 0
    buckets: int = 0
    staging: int = 0
    host: int = 0
    disk: int = 0

    def __add__(self, other: BufferBytes) -> BufferBytes:
        return BufferBytes(
            self.parameters + other.parameters,
            self.gradients + other.gradients,
            self.state + other.state,
            self.gathered + other.gathered,
            self.buckets + other.buckets,
            self.staging + other.staging,
            self.host + other.host,
            self.disk + other.disk,
        )

    @property
    def device_bytes(self) -> int:
        return self.parameters + self.gradients + self.state + self.gathered + self.buckets

    @property
    def host_bytes(self) -> int:
        return self.staging + self.host


@dataclass(frozen=True)
class GatherGroupSpec:
    """Weights of one unit, one pair of dtypes and one codec of `gather=`, with their slots: what a gather
    moves.

    - `number`: which of its unit's it is. `codec`: what its rows travel through, if they do.
    - `keeps`: whether its unsharded parameters are always whole on the device.
    - `rows`, `state`: the tiers of its compute weights and of its optimizer state.
    - `master_width`: bytes an element of a master on the device beside the compute weights; 0 without one.
      `splits`: that master is a remainder, which makes the weight a whole one.
    """

    unit: str
    number: int
    compute: str
    master: str
    weights: tuple[ParamSpec, ...]
    slots: tuple[ShardSpec, ...]
    pack: PackLayout
    codec: Codec | None = None
    keeps: bool = True
    rows: Rest = "device"
    state: Rest = "device"
    splits: bool = False
    master_width: int = 0

    @property
    def key(self) -> str:
        """Its name in a run, the same on all ranks."""
        return f"{self.unit or ROOT}/{self.number}"

    @cached_property
    def codes(self) -> list[int]:
        """Bytes of the code that each rank's rows travel as; none without a codec."""
        if self.codec is None:
            return []
        return [padded(self.codec.wire_bytes(self.pack.body(rank))) for rank in range(self.pack.world)]


@dataclass(frozen=True)
class BucketSpec:
    """Weights whose gradients travel together. `part`: where they end, if their state is off the device."""

    weights: tuple[ParamSpec, ...]
    slots: tuple[ShardSpec, ...]
    wire: str
    landed: str
    align: int = ALIGN
    part: OffloadGroupSpec | None = None
    flat: bool = False  # stage 0: `FlatPackLayout`
    codec: Compression | None = None

    @cached_property
    def wire_numel(self) -> int:
        """Elements of the communication buffer."""
        if self.flat:
            return self.pack.world * self.pack.shard(0)
        return sum(_over_ranks(slot, self.align) for slot in self.slots) + self.pack.world * self.pack.tail

    @cached_property
    def pack(self) -> PackLayout:
        """How their slots lie in the communication buffer."""
        return (FlatPackLayout if self.flat else PackLayout)(
            self.slots, self.slots[0].world, True, self.align
        )


@dataclass(frozen=True)
class OffloadGroupSpec:
    """Weights of a gather group and a rule whose state lies together off the device. `native`: updated
    overlapped; `kernel`: updated by the native kernels, overlapped or not; `paged`: the compute weights are
    on the disk with it; `spans`: where each weight's rows on this rank begin in it, and how many elements
    they are; `gathered_by`: the key of its gather group."""

    weights: tuple[ParamSpec, ...]
    numel: int
    spans: tuple[tuple[int, int], ...]
    gathered_by: str
    native: bool
    splits: bool
    compute: str
    master: str
    rule: OptimizerRule
    unit: str = ""
    rest: Rest = "host"
    kernel: bool = True
    paged: bool = False

    def weight_bytes(self) -> int:
        """The compute weights as a segment of the disk."""
        return aligned(self.numel * WIDTHS[self.compute], GRAIN)

    def disk_bytes(self, int8: bool) -> int:
        """The same as one segment of the disk, as `form` lays it out: arrays at staggered offsets, in whole
        grains."""
        sizes = [self.numel * (2 if self.splits else 4)]
        if int8 and self.rule.name != "SGD":
            sizes += [self.numel, self.numel, 4 * 3 * -(-self.numel // BLOCK)]
        else:
            sizes += [4 * self.numel] * self.rule.moments
        apart, end = GRAIN // len(sizes) // 64 * 64, self.weight_bytes() if self.paged else 0
        for index, size in enumerate(sizes):
            end += (index * apart - end) % GRAIN + size
        return aligned(end, GRAIN) if self.numel else 0

    def state_bytes(self, int8: bool) -> int:
        """Master and moments of the overlapped update, or the master alone where torch's optimizer keeps
        the moments."""
        if not self.native:
            return self.numel * WIDTHS[self.master]
        master = self.numel * (2 if self.splits else 4)
        if int8 and self.rule.name != "SGD":
            return master + 2 * self.numel + 4 * 3 * -(-self.numel // BLOCK)
        return master + 4 * self.numel * self.rule.moments

    def stage_bytes(self, landed: str) -> int:
        grad, weight = WIDTHS[landed], WIDTHS[self.compute]
        if self.paged:
            return self.numel * grad
        return self.numel * (grad if grad == weight and not self.splits else grad + weight)


def _over_ranks(slot: ShardSpec, align: int) -> int:
    """The padded elements of a slot, summed over all ranks."""
    if slot.split == "copy":
        return slot.world * aligned(slot.numel, align)
    if slot.split == "whole":
        return aligned(slot.numel, align)
    if slot.split == "level":
        each, more = divmod(slot.height, slot.world)
        larger = more * aligned((each + 1) * slot.row, align)
        return larger + (slot.world - more) * aligned(each * slot.row, align)
    chunk = -(-slot.height // slot.world)
    if chunk == 0:
        return 0
    ranks, rest = divmod(slot.height, chunk)
    return ranks * aligned(chunk * slot.row, align) + aligned(rest * slot.row, align)


def share_of(numel: int, threads: int) -> int:
    """Elements of a part that one worker updates at a time: whole pages, which are whole blocks of 8-bit
    moments; not so few that handing out costs more than doing, nor so many that some workers wait."""
    page = 4096
    return min(1 << 22, max(1 << 16, -(-numel // (threads * page)) * page))
