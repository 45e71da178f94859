"""Loading: each rank reads the rows it wants, wherever they were saved. Nothing here depends on how many
ranks saved."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from zeroshard.errors import CheckpointError

from . import shelf
from .agree import AgreedError, together
from .elements import DTYPE, convertible
from .manifest import Entry, Manifest, Span, read_manifest
from .ranges import overlaps
from .reader import Reader
from .records import Held, Loaded, Peers, Snapshot, optional, slot
from .values import unpack
from .wording import quoted, some

_TOLD = 1000  # differences that one rank tells the others: more would drown the message anyway


@dataclass(frozen=True)
class Match:
    """How one rank's targets and a checkpoint fit; known on every rank before anything is overwritten."""

    pairs: tuple[tuple[Held, Entry], ...]
    absent: tuple[Held, ...]
    unused: tuple[int, ...]
    mismatched: tuple[str, ...]

    @property
    def converted(self) -> tuple[tuple[str, str], ...]:
        return tuple((held.kind, held.name) for held, entry in self.pairs if held.dtype != entry.dtype)


def match(manifest: Manifest, targets: Sequence[Held]) -> Match:
    """Find for each target its entry."""
    pairs, absent, mismatched = [], [], []
    wanted = set()
    for held in targets:
        slots = [slot(held.kind, name) for name in (held.name, *held.also)]
        found = [each for each in map(manifest.by_slot.get, slots) if each is not None]
        entry = found[0] if found else None
        wanted.add(slots[0])
        wanted.update(slot(each.kind, each.name) for each in found if each.same_as(found[0]))
        if entry is None:
            absent.append(held)
        elif entry.shape == held.shape and convertible(entry.dtype, held.dtype):
            pairs.append((held, entry))
        elif optional(held.kind):
            absent.append(held)  # of another world size or codec: it starts afresh
        else:
            mismatched.append(
                f"{quoted(held.name)} ({held.kind}) is {entry.shape} {entry.dtype} there and {held.shape} "
                f"{held.dtype} here"
            )
    unused = tuple(
        i for i, entry in enumerate(manifest.entries) if slot(entry.kind, entry.name) not in wanted
    )
    return Match(tuple(pairs), tuple(absent), unused, tuple(mismatched))


def load(path: str | os.PathLike[str], targets: Snapshot, peers: Peers, strict: bool = True) -> Loaded:
    """Read the rows that `targets.held` name into them, and return the saved values; raises one text on every
    rank.

    `strict` refuses tensors that are missing or left over; kinds of a single rank (RNG, what
    codecs left unsent) are never required. Shapes must always agree; floats may change their dtype. When it
    raises while reading, targets may be partly overwritten.
    """
    folder = Path(os.path.abspath(path))
    found: list[tuple[Manifest, Match]] = []

    def look() -> dict[str, Any]:
        manifest = read_manifest(folder)
        fit = match(manifest, targets.held)
        found.append((manifest, fit))
        missing = [[held.kind, held.name] for held in fit.absent if not optional(held.kind)]
        return {
            "checksum": manifest.checksum,
            "missing": missing[:_TOLD],
            "mismatched": fit.mismatched[:_TOLD],
            "unused": fit.unused,
        }

    try:
        answers = together(peers, f"reading {folder}", look)
        manifest, fit = found[0]
        unused = _judge(folder, manifest, answers, strict)
        with Reader(folder, manifest) as reader:
            together(peers, f"reading {folder}", lambda: _fill(reader, fit))
            values, own = _values(reader, peers)
    except AgreedError as error:
        hint = peers.exchange("" if peers.rank else shelf.advice(folder), "reporting a failed load")[0]
        raise CheckpointError(f"{error} {hint}") from error
    absent = tuple((held.kind, held.name) for held in fit.absent)
    return Loaded(folder, values, own, manifest.world, absent, unused, fit.converted)


def _judge(
    folder: Path, manifest: Manifest, answers: Sequence[Any], strict: bool
) -> tuple[tuple[str, str], ...]:
    """Raise when a checkpoint is not one of this model, with the first differences and what they may come
    from.

    What no rank wants is left over; what some rank misses is missing. Returns what is left over.
    """
    if len({answer["checksum"] for answer in answers}) > 1:
        raise AgreedError(
            f"ranks see different checkpoints at {folder}: it must be one shared folder, not being replaced."
        )
    left = set(answers[0]["unused"]).intersection(*(answer["unused"] for answer in answers[1:]))
    unused = [(entry.kind, entry.name) for i, entry in enumerate(manifest.entries) if i in left]
    missing = dict.fromkeys((kind, name) for answer in answers for kind, name in answer["missing"])
    mismatched = dict.fromkeys(text for answer in answers for text in answer["mismatched"])
    needless = [item for item in unused if not optional(item[0])]
    refuse(folder, list(missing) if strict else [], needless if strict else [], list(mismatched))
    return tuple(item for item in unused if item[0].split(":")[0] not in ("value", "own"))


def refuse(
    folder: Path, missing: list[tuple[str, str]], unused: list[tuple[str, str]], mismatched: list[str]
) -> None:
    """Raise unless all three lists are empty."""
    lines = [some(mismatched)] if mismatched else []
    if missing:
        lines.append(f"{len(missing)} tensors are not in it: {some(_named(*item) for item in missing)}")
        spare = [name[:200] for _, name in unused[:2000]]
        if close := get_close_matches(missing[0][1][:200], spare, n=1, cutoff=0.6):
            lines.append(
                f"it has {quoted(close[0])}: did you mean that (a module or a wrapper changed its name)"
            )
    if unused:
        lines.append(
            f"{len(unused)} of its tensors are not in this run: {some(_named(*item) for item in unused)}"
        )
    if lines:
        way = "" if mismatched else " Pass strict=False to load what agrees."
        raise AgreedError(
            f"{folder} is not a checkpoint of this model and optimizer: {'; '.join(lines)}.{way}"
        )


def _named(kind: str, name: str) -> str:
    return f"{quoted(name)} ({kind})"


def _fill(reader: Reader, fit: Match) -> None:
    """Read every overlap into its target, file by file in order, so that disks see a stream."""
    work: list[tuple[int, int, Held, Entry, Span, int, int]] = []
    for held, entry in fit.pairs:
        ranges = [(span.start, span.stop) for span in entry.spans]
        for number, start, stop in overlaps(ranges, *held.rows):
            span = entry.spans[number]
            work.append((span.file, span.offset, held, entry, span, start, stop))
    work.sort(key=lambda item: item[:2])
    for _, _, held, entry, span, start, stop in work:
        done = (start, start)
        if held.place is not None and entry.dtype == held.dtype:
            mine = held.place[start - held.rows[0] : stop - held.rows[0]]
            done = reader.fill(entry, span, start, stop, mine)
        for first, last in ((start, done[0]), (done[1], stop)):
            if first < last:
                for row, rows in reader.span_rows(entry, span, first, last):
                    held.write(row, rows if entry.dtype == held.dtype else rows.to(DTYPE[held.dtype]))


def _values(reader: Reader, peers: Peers) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The saved values and this rank's own, with their tensors."""
    result: dict[str, Any] = {}
    tensors: dict[tuple[str, str], torch.Tensor] = {}

    def tensor(kind: str, name: str) -> torch.Tensor:
        entry = reader.manifest.by_slot.get((kind, name))
        if entry is None:
            raise CheckpointError(
                f"{reader.path}: the values refer to the tensor {quoted(name)}, which is not stored."
            )
        if (kind, name) not in tensors:  # read once, however often a hostile manifest names it
            tensors[kind, name] = reader.whole(entry)
        return tensors[kind, name]

    def read() -> None:
        own, kind = reader.manifest.own, f"own:{peers.rank}"
        result["values"] = unpack(reader.manifest.values, lambda name: tensor("value", name))
        result["own"] = (
            unpack(own[peers.rank], lambda name: tensor(kind, name)) if peers.rank < len(own) else None
        )

    together(peers, f"reading the values of {reader.path}", read)
    return result["values"], result["own"]
