"""Counts how codes lie on a wire of bytes, and how long it is. Integers only.

A wire has a part for every rank: the code of that rank's shard, then a byte for each parameter, whether the
sender used it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from zeroshard.compress.base import Codec, padded

from .sharding import FlatPackLayout, PackLayout, ShardSpec, aligned

Span = tuple[int, int]


@dataclass(frozen=True)
class WireParts:
    """The parts of a wire: `codes` bytes of code for each rank, each followed by `flags` bytes."""

    codes: tuple[int, ...]
    flags: int = 0

    @classmethod
    def of(cls, size: Callable[[int], int], bodies: Sequence[Span], flags: int = 0) -> WireParts:
        return cls(tuple(size(numel) for _, numel in bodies), flags)

    @cached_property
    def spans(self) -> list[Span]:
        """Offset and length of each part."""
        result, at = [], 0
        for size in self.codes:
            length = part_bytes(size, self.flags)
            result.append((at, length))
            at += length
        return result

    @cached_property
    def nbytes(self) -> int:
        return sum(length for _, length in self.spans)


def part_bytes(code: int, flags: int) -> int:
    return padded(code) + padded(flags)


def bodies_of(pack: PackLayout) -> list[Span]:
    """Where the numbers of every rank's shard begin in the pack's wire, and how many there are: all but the
    flags."""
    if isinstance(pack, FlatPackLayout):
        return [(at, min(max(pack.full - at, 0), n)) for at, n in zip(pack.starts, pack.shards, strict=True)]
    return [(start, pack.body(rank)) for rank, start in enumerate(pack.starts)]


def sizes_of(codec: Codec, width: int) -> list[Callable[[int], int]]:
    """Bytes of a shard by its length: coded, and in the warm-up, coded or as it is (`width` bytes a
    number)."""
    ways: list[Callable[[int], int]] = [codec.wire_bytes, *(early.wire_bytes for early in codec.early)]
    return ways if codec.at(0) is not None else [*ways, lambda numel: numel * width]


def wire_bytes(codec: Codec, pack: PackLayout, width: int) -> int:
    """Bytes of the wire that a coded bucket needs. Costs do not grow with the world: equal ranks are
    counted, not listed."""
    counts = _bodies_counted(pack)
    flags = len(pack.slots)
    return max(
        sum(count * part_bytes(size(numel), flags) for numel, count in counts)
        for size in sizes_of(codec, width)
    )


def back_bytes(codec: Codec, numel: int, width: int) -> int:
    """Bytes of the wire on which a sum of `numel` numbers goes back to everybody, at stage 0."""
    return max(padded(size(numel)) for size in sizes_of(codec, width))


def _bodies_counted(pack: PackLayout) -> list[tuple[int, int]]:
    """(numbers in a shard, how many ranks have such a shard)."""
    world = pack.world
    if isinstance(pack, FlatPackLayout):
        each = pack.shard(0)
        whole, rest = divmod(pack.full, each) if each else (0, 0)
        return [(each, whole), (rest, 1 if rest else 0), (0, world - whole - bool(rest))]
    return [(pack.body(band.start), len(band)) for band in pack.bands]


# ---------------------------------------------------------------------- codecs with a structure of their own

# Bytes in front of a code of rows: how many bytes count, and whether the sender used the parameter.
ROWS_HEAD = 16


def rows_spans(slot: ShardSpec, width: int) -> list[Span]:
    """The parts of a wire for the rows of one parameter, with room for all of them."""
    result, at = [], 0
    for rank in range(slot.world):
        length = rows_bytes(slot, rank, width)
        result.append((at, length))
        at += length
    return result


def rows_bytes(slot: ShardSpec, rank: int, width: int) -> int:
    start, stop = slot.rows(rank)
    return padded(ROWS_HEAD + 24 + 8 * -(-4 * (stop - start) // 8) + (stop - start) * slot.row * width)


def cut_of(numel: int, world: int) -> int:
    """The share of each rank of a flat tensor that is cut evenly."""
    return aligned(-(-numel // world))


def holes(pack: PackLayout) -> list[Span]:
    """Padding between the slots of a wire: a codec makes something of it, and it must stay nothing, also in
    what the codec keeps: that is not saved."""
    if isinstance(pack, FlatPackLayout):
        slots = zip(pack.slots, pack.full_offsets, strict=True)
        ends = [(at + s.numel, at + aligned(s.numel, pack.align)) for s, at in slots]
        return [(start, stop - start) for start, stop in ends if stop > start]
    return [(start + at, n) for rank, start in enumerate(pack.starts) for at, n in holes_of_shard(pack, rank)]


def holes_of_shard(pack: PackLayout, rank: int) -> list[Span]:
    slots = zip(pack.slots, pack.offsets(rank), strict=True)
    ends = [(at + s.held(rank), at + aligned(s.held(rank), pack.align)) for s, at in slots]
    return [(start, stop - start) for start, stop in ends if stop > start]
