"""The shapes of a model and of what its runs are made of, as plain numbers. Integers only; the words are
those of DESIGN.md.

Costs do not grow with the world: the length of a wire is summed over ranks in closed form, not rank by
rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from zeroshard.config import DTYPE_BYTES

from .layout import ALIGN, FlatPack, Pack, Slot, aligned
from .placement import Rest

if TYPE_CHECKING:
    from zeroshard.codec import Codec, Compression

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
ROOT = "(root)"  # label of the unit without a name
BLOCK = 256  # elements that share the scales of 8-bit moments, as in the native kernels
# The disk tier: direct I/O moves whole grains, in requests of at most so many bytes, one in each lane.
# Weights pass through two blocks a lane: one that it fills, and one on its way to the device.
GRAIN, REQUEST, LANES = 4096, 4 * 2**20, 8
BLOCKS = 2 * LANES


@dataclass(frozen=True)
class Weight:
    """A parameter as the model has it. `number`: its place in `model.parameters()`; `rule`: whose update it
    gets, -1 for none; `used`: whether a step gives it a gradient."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    trainable: bool = True
    number: int = 0
    rule: int = 0
    used: bool = True

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def updated(self) -> bool:
        """Whether an optimizer's step changes it, and keeps state for it."""
        return self.trainable and self.used and self.rule >= 0


@dataclass(frozen=True)
class Rule:
    """What one parameter group of an optimizer keeps.

    - `moments`: tensors of a parameter's size in its state. `by_rows`: element-wise, so that rows suffice.
    - `temporaries`: copies that a step makes: of all tensors together (foreach), and beside those of the
      largest one and of the next (a loop over them). Fused steps make none.
    """

    name: str = "AdamW"
    moments: int = 2
    by_rows: bool = True
    temporaries: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True)
class Block:
    """A unit: its weights in registration order. The root's name is empty and it comes first."""

    name: str
    weights: tuple[Weight, ...]

    @property
    def label(self) -> str:
        return self.name or ROOT

    @property
    def numel(self) -> int:
        return sum(w.numel for w in self.weights)


@dataclass(frozen=True)
class Buffers:
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

    def __add__(self, other: Buffers) -> Buffers:
        return Buffers(
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
class Bundle:
    """Weights of one unit, one pair of dtypes and one codec of `gather=`, with their slots: what a gather
    moves."""

    unit: str
    compute: str
    master: str
    weights: tuple[Weight, ...]
    slots: tuple[Slot, ...]
    codec: Codec | None = None

    @cached_property
    def full(self) -> int:
        return sum(aligned(slot.numel) for slot in self.slots)

    def body(self, rank: int) -> int:
        return sum(aligned(slot.held(rank)) for slot in self.slots)


@dataclass(frozen=True)
class Bucket:
    """Weights whose gradients travel together. `part`: where they end, if their state is off the device."""

    weights: tuple[Weight, ...]
    slots: tuple[Slot, ...]
    wire: str
    landed: str
    align: int = ALIGN
    part: Part | None = None
    flat: bool = False  # stage 0: `FlatPack`
    codec: Compression | None = None

    @cached_property
    def wire_numel(self) -> int:
        if self.flat:
            return self.pack.world * self.piece(0)
        return sum(_over_ranks(slot, self.align) for slot in self.slots) + self.pack.world * self.pack.tail

    def piece(self, rank: int) -> int:
        return self.pack.piece(rank)

    @property
    def full(self) -> int:
        return self.pack.full

    @cached_property
    def pack(self) -> Pack:
        return (FlatPack if self.flat else Pack)(self.slots, self.slots[0].world, True, self.align)


@dataclass(frozen=True)
class Part:
    """Weights of a bundle and a rule whose state lies together off the device. `native`: updated overlapped;
    `kernel`: updated by the native kernels, overlapped or not; `paged`: the compute weights are on the disk
    with it."""

    weights: tuple[Weight, ...]
    numel: int
    native: bool
    splits: bool
    compute: str
    master: str
    rule: Rule
    unit: str = ""
    rest: Rest = "host"
    kernel: bool = True
    paged: bool = False

    def weight_bytes(self) -> int:
        """The compute weights as a stretch of the disk."""
        return aligned(self.numel * WIDTHS[self.compute], GRAIN)

    def disk_bytes(self, int8: bool) -> int:
        """The same as one stretch of the disk, as `form` lays it out: arrays at staggered offsets, in whole
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


def _over_ranks(slot: Slot, align: int) -> int:
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
