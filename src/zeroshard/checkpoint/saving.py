"""Saving: every rank streams its rows into files, rank 0 writes the manifest last and moves the whole into
place.

Each part runs on all ranks through `together`, so that all of them succeed or all of them raise the same
text. Until the last move nothing at the target has changed; whatever fails before leaves the old checkpoints
as they were.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from zeroshard.errors import CheckpointError
from zeroshard.sizes import show_apart

from . import claim, disk, sheets, shelf
from .agree import AgreedError, on_first, together
from .blocks import Lanes
from .elements import as_bytes, height, row_bytes
from .manifest import NAME, Entry, Head, Manifest, RankFile, Span, encode
from .progress import Progress
from .ranges import Described, Task, assign, check_description, merge
from .records import Held, Peers, Saved, Snapshot, slot
from .sheets import Sheet, chunks, sheets_of
from .staging import Image, Staging
from .tensorfile import TensorFileWriter
from .turns import gently
from .values import joined, pack
from .wording import quoted

_VISIBLE = 5.0  # seconds


@dataclass(frozen=True)
class Division:
    """What every rank knows: all tensors, each rank's own values, and those that the ranks held parts of."""

    tensors: list[Described]
    own: list[Any]
    joined: dict[str, Any]


class Drawn:
    """Who writes what and how it lies in files, from what all ranks hold. Kept from save to save, since the
    next mostly finds the same, and Python for thousands of tensors is what holds training up most."""

    def __init__(self) -> None:
        self.tensors: list[Described] = []
        self.tasks: list[list[Task]] = []
        self._of: list[Any] | None = None
        self._sheets: list[Sheet] | None = None

    def draw(self, descriptions: list[Any]) -> None:
        """For ranks that hold these rows; raises where they cannot be put together."""
        if descriptions != self._of:
            self._of, self._sheets = None, None
            self.tensors = merge(descriptions)
            self.tasks = assign(self.tensors, len(descriptions))
            self._of = descriptions

    def sheets(self, held: Sequence[Held], rank: int) -> list[Sheet]:
        """The files of `rank`: always the same rank's."""
        if self._sheets is None:
            self._sheets = sheets_of(held, self.tasks[rank], rank, len(self.tasks))
        return self._sheets


class Job:
    """One save, prepared in the caller's thread (so that later changes of values do not show) and run in any
    thread."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        snapshot: Snapshot,
        peers: Peers,
        keep: int | None = None,
        copy: bool = False,
        drawn: Drawn | None = None,
    ) -> None:
        if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
            raise CheckpointError(
                f"keep={keep!r} is no number of checkpoints to keep; pass 1 or more, or None for all."
            )
        self.target = Path(os.path.abspath(path))
        self.peers = peers
        self.keep = keep
        self.after_failure: str | None = None
        self._drawn = drawn or Drawn()
        self.step = snapshot.values.get("step")
        self._ticket: claim.Claim | None = None
        self._division: Division | None = None
        self._images: list[Image] | None = None
        self._unstorable: CheckpointError | None = None
        self.values: Any = {}
        self.own: Any = {}
        self.parts: Any = {}
        self.held = [*snapshot.held]
        try:
            self._take_values(snapshot, copy)
        except CheckpointError as error:  # raised by `_describe`, where every rank learns of it
            self._unstorable = error

    def _take_values(self, snapshot: Snapshot, copy: bool) -> None:
        self.values, shared = pack(snapshot.values if self.peers.rank == 0 else {}, copy)
        self.own, private = pack(snapshot.own)
        self.parts, _ = pack(snapshot.parts)
        self.held += [_held(tensor, name, "value") for name, tensor in shared.items()]
        self.held += [_held(tensor, name, f"own:{self.peers.rank}") for name, tensor in private.items()]

    def stage(self, staging: Staging, progress: Progress) -> None:
        """Copy this rank's share, so that the originals may change before `run` is through: each when
        `progress` says so."""
        try:
            self._agree()
            together(self.peers, "copying", lambda: self._copy(staging, progress))
        except AgreedError as error:
            raise self._reported(error) from error

    def run(self) -> Saved:
        """Save; on any failure remove what was begun, and raise on every rank."""
        began = time.perf_counter()
        try:
            plan = self._agree()
            token = on_first(self.peers, "preparing to save", lambda: self._begin(plan.tensors))
            folder = claim.holder_of(self.target) / token
            wrote = together(self.peers, "writing", lambda: self._write(folder))
            done = on_first(self.peers, "finishing", lambda: self._finish(plan, wrote))
        except AgreedError as error:
            raise self._reported(error) from error
        finally:
            if self._ticket is not None:
                self._ticket.release()
        removed = tuple(Path(name) for name in done["removed"])
        return Saved(self.target, done["bytes"], time.perf_counter() - began, removed, self.after_failure)

    def _agree(self) -> Division:
        """Who writes what: the same answer, or the same error, on every rank, since all compute it from the
        same data."""
        if self._division is None:
            answers = together(self.peers, f"saving to {self.target}", self._describe)
            try:
                self._drawn.draw([answer["held"] for answer in answers])
                shared = joined([answer["parts"] for answer in answers])
            except CheckpointError as error:
                raise AgreedError(str(error)) from error
            self._division = Division(self._drawn.tensors, [answer["own"] for answer in answers], shared)
        return self._division

    def _describe(self) -> dict[str, Any]:
        if self._unstorable is not None:
            raise self._unstorable
        seen: set[tuple[str, str]] = set()
        for held in gently(self.held):
            check_description(held.kind, held.name, held.shape, held.dtype)
            if slot(held.kind, held.name) in seen:
                raise CheckpointError(f"{quoted(held.name)} ({held.kind}) is given twice.")
            seen.add(slot(held.kind, held.name))
        return {
            "held": [[h.kind, h.name, list(h.shape), h.dtype, *h.rows] for h in self.held],
            "own": self.own,
            "parts": self.parts,
        }

    def _copy(self, staging: Staging, progress: Progress) -> None:
        self._images = staging.copy(self.held, self._drawn.sheets(self.held, self.peers.rank), progress)
        progress.end()

    def _begin(self, tensors: Sequence[Described]) -> str:
        """Rank 0: take the path, and see that there is room before anyone writes."""
        shelf.clean(self.target.parent)
        self._ticket = claim.take(self.target)
        need = sum(height(tensor.shape) * row_bytes(tensor.shape, tensor.dtype) for tensor in tensors)
        free = disk.free_bytes(self._ticket.staging)
        if free < need:
            needs, has = show_apart(need, free)
            raise CheckpointError(
                f"saving to {self.target} needs {needs} and {has} are free there. "
                "Free space, save elsewhere, or pass keep= to remove old checkpoints."
            )
        return self._ticket.token

    def _write(self, folder: Path) -> dict[str, Any]:
        """This rank's files. Returns what the manifest needs to know about them."""
        self._await(folder)
        if self._images is not None:
            wrote = [image.write(folder) for image in self._images]
        else:
            files = self._drawn.sheets(self.held, self.peers.rank)
            with Lanes() as lanes:
                wrote = [write_file(folder, self.held, sheet, lanes) for sheet in files]
        spans = [[part, *span] for part, (_, found) in enumerate(wrote) for span in found]
        return {"files": [file for file, _ in wrote], "spans": spans}

    def _await(self, staging: Path) -> None:
        """See the folder that rank 0 made; network file systems may show it late."""
        deadline = time.monotonic() + _VISIBLE
        while not staging.is_dir():
            if time.monotonic() > deadline or self.peers.rank == 0:
                raise CheckpointError(
                    f"{staging}, which rank 0 made, is not there. All ranks must save to one shared folder, "
                    "and nothing else may remove it."
                )
            time.sleep(0.05)

    def _finish(self, plan: Division, wrote: Sequence[Any]) -> dict[str, Any]:
        ticket = self._ticket
        assert ticket is not None
        manifest = replace(
            assemble(plan.tensors, wrote, {**self.values, **plan.joined}, plan.own),
            head=Head(shelf.next_serial(self.target.parent), time.time(), _step(self.step)),
        )
        if wrong := shelf.missing_files(ticket.staging, manifest):
            number, problem = next(iter(wrong.items()))
            raise CheckpointError(
                f"{manifest.files[number].name}, just written by its rank, {problem} as rank 0 sees it in "
                f"{ticket.staging}. All ranks must save to one shared folder, and nothing else may write "
                "there."
            )
        disk.write_file(ticket.staging / NAME, encode(manifest))
        ticket.commit()
        removed = shelf.retire(self.target, self.keep) if self.keep else ()
        return {"bytes": manifest.bytes, "removed": [str(path) for path in removed]}

    def _reported(self, error: AgreedError) -> CheckpointError:
        """The error with the way out: which checkpoint is good."""
        here = "" if self.peers.rank else shelf.advice(self.target)
        old = "" if self.peers.rank or not shelf.is_complete(self.target) else f" {self.target} is as it was."
        hint = self.peers.exchange(here + old, "reporting a failed save")[0]
        return CheckpointError(f"{error} Nothing was saved to {self.target}. {hint}")


def save(path: str | os.PathLike[str], snapshot: Snapshot, peers: Peers, *, keep: int | None = None) -> Saved:
    """Save what the ranks hold to `path`, together; raises `CheckpointError` with one text on every rank.

    A complete checkpoint at `path` is replaced in one step when the new one is complete. `keep` then removes
    the oldest of its family beyond that many. See `background.Saver` for saves that go on beside training.
    """
    return Job(path, snapshot, peers, keep).run()


def write_file(
    folder: Path, held: Sequence[Held], sheet: Sheet, lanes: Lanes
) -> tuple[list[Any], list[list[Any]]]:
    """Stream rows into one file: ``[name, bytes, header checksum]``, and ``[index, start, stop, offset,
    checksums]`` each."""
    writer = TensorFileWriter(folder / sheet.name, sheet.header, lanes)
    try:
        spans = []
        for task, spot in zip(sheet.tasks, sheet.spots, strict=True):
            item, sums = held[task.index], bytearray()
            try:
                for rows, block in chunks(item, task):
                    for found in writer.write_blocks(as_bytes(rows), block):
                        sums += found.to_bytes(4, "big")
            except CheckpointError as error:
                raise CheckpointError(f"{error} It was at {quoted(item.name)} ({item.kind}).") from error
            spans.append([task.index, task.start, task.stop, spot.offset, sums.hex()])
        writer.close()
    finally:
        writer.abandon()
    return [sheet.name, writer.written, writer.header_sum], spans


def assemble(tensors: Sequence[Described], wrote: Sequence[Any], values: Any, own: Sequence[Any]) -> Manifest:
    """The manifest of what all ranks wrote; its head is still to be filled in."""
    files: list[RankFile] = []
    spans: dict[tuple[int, int], list[Span]] = {}
    for rank, answer in enumerate(wrote):
        first = len(files)
        files += [RankFile(*file) for file in answer["files"]]
        for part, index, start, stop, offset, sums in gently(answer["spans"]):
            spans.setdefault((rank, index), []).append(
                Span(start, stop, first + part, offset, bytes.fromhex(sums))
            )
    entries = []
    for tensor in gently(tensors):
        mine = [span for holder in tensor.holders for span in spans.get((holder.rank, holder.index), ())]
        ordered = tuple(sorted(mine, key=lambda span: span.start))
        entries.append(Entry(tensor.kind, tensor.name, tensor.shape, tensor.dtype, ordered))
    head = Head(0, 0.0, None)
    return Manifest(
        head, len(wrote), sheets.BLOCK, versions(), tuple(files), tuple(entries), values, tuple(own)
    )


def versions() -> dict[str, str]:
    try:
        ours = version("zeroshard")
    except PackageNotFoundError:  # run from a source tree
        ours = "unknown"
    return {"zeroshard": ours, "torch": str(torch.__version__)}


def _held(tensor: torch.Tensor | Held, name: str, kind: str) -> Held:
    """A tensor that stood among values, or the record of one."""
    if isinstance(tensor, Held):
        return replace(tensor, name=name, kind=kind)
    return Held.of(name, kind, tensor)


def _step(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None
