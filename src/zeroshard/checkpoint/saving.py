"""Writes a checkpoint: every rank streams its rows into files, and rank 0 writes the manifest last.

Each part runs on all ranks through `together`, so that all of them succeed or all of them raise the same
text: a rank that raises alone is a hang elsewhere. Until the last move nothing at the target has changed;
whatever fails before leaves the old checkpoints as they were."""

from __future__ import annotations

import hashlib
import marshal
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint import directory, durable_files, locks
from zeroshard.checkpoint import staging as file_plans
from zeroshard.errors import CheckpointError
from zeroshard.field_checks import check_flag
from zeroshard.sizes import show_apart

from .dtypes import as_bytes, height, row_bytes
from .locks import RunFolders, has_saved, is_own
from .manifest import NAME, Manifest, ManifestHead, RankFile, RowSpan, TensorEntry, encode
from .pacing import CopyProgress, gently
from .ranges import DescribedTensor, WriteTask, assign, check_description, merge
from .records import HeldRows, RunSnapshot, SavePeers, SaveResult, slot
from .staging import FileImage, FilePlan, SaveStaging, chunks, file_plans_of
from .tensor_file import BlockThreads, TensorFileWriter
from .untrusted import os_error, quoted
from .values import joined, pack


class AgreedError(CheckpointError):
    """A failure that every rank knows of and raises with the same text."""


def together(peers: SavePeers, what: str, work: Callable[[], Any]) -> list[Any]:
    """Run `work` here and return every rank's result (JSON data); raise `AgreedError` on all ranks when one
    failed."""
    value: Any = None
    error: str | None = None
    cause: Exception | None = None
    try:
        value = work()
    except OSError as caught:
        cause, error = caught, str(os_error(caught, what, caught.filename or ""))
    except CheckpointError as caught:
        cause, error = caught, str(caught)
    except Exception as caught:  # a bug or a device error: the others must not wait for this rank
        cause, error = caught, f"{what} failed with {type(caught).__name__}: {caught}"
    answers = peers.exchange({"value": value, "error": error}, what)
    failed = [(rank, answer["error"]) for rank, answer in enumerate(answers) if answer["error"] is not None]
    if failed:
        raise AgreedError(_text(failed, peers.size)) from cause
    return [answer["value"] for answer in answers]


def _text(failed: list[tuple[int, str]], world: int) -> str:
    texts = {text for _, text in failed}
    if world == 1 or (len(texts) == 1 and len(failed) == world):
        return failed[0][1]
    also = f" ({len(failed) - 1} more of {world} ranks failed too)" if len(failed) > 1 else ""
    return f"rank {failed[0][0]}: {failed[0][1]}{also}"


def on_first(peers: SavePeers, what: str, work: Callable[[], Any]) -> Any:
    """Run `work` on rank 0 and give every rank its result."""
    return together(peers, what, work if peers.rank == 0 else lambda: None)[0]


_VISIBLE = 5.0  # seconds
_PAPERS = 256  # bytes of a tensor in headers and in the manifest, about


@dataclass(frozen=True)
class SaveDescription:
    """What every rank knows: all tensors, each rank's own values, and those that the ranks held parts of."""

    tensors: list[DescribedTensor]
    own: list[Any]
    joined: dict[str, Any]


class SavePlan:
    """Who writes what and how it lies in files, from what all ranks hold. Kept from save to save, since the
    next mostly finds the same, and Python for thousands of tensors is what holds training up most."""

    def __init__(self) -> None:
        self.tensors: list[DescribedTensor] = []
        self.tasks: list[list[WriteTask]] = []
        self._of = b""  # the digest of what the ranks hold
        self._file_plans: list[FilePlan] | None = None

    def draw(self, descriptions: list[Any]) -> None:
        """For ranks that hold these rows; raises where they cannot be put together."""
        # Version 2 of marshal says the same of equal lists.
        digest = hashlib.sha256(marshal.dumps(descriptions, 2)).digest()
        if digest != self._of:
            self._of, self._file_plans = b"", None
            self.tensors = merge(descriptions)
            self.tasks = assign(self.tensors, len(descriptions))
            self._of = digest

    def file_plans(self, held: Sequence[HeldRows], rank: int) -> list[FilePlan]:
        """The files of `rank`: always the same rank's."""
        if self._file_plans is None:
            self._file_plans = file_plans_of(held, self.tasks[rank], rank, len(self.tasks))
        return self._file_plans


class SaveJob:
    """One save, prepared in the caller's thread (so that later changes of values do not show) and run in any
    thread."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        snapshot: RunSnapshot,
        peers: SavePeers,
        keep: int | None = None,
        copy: bool = False,
        save_plan: SavePlan | None = None,
        overwrite: bool = True,
    ) -> None:
        check_flag(overwrite, "overwrite")
        if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
            raise CheckpointError(
                f"keep={keep!r} is no number of checkpoints to keep; pass 1 or more, or None for all."
            )
        self.target = Path(os.path.abspath(path))
        self.peers = peers
        self.keep, self.overwrite = keep, overwrite
        self.after_failure: str | None = None
        self.folders: RunFolders | None = None  # those of the run
        self._save_plan = save_plan or SavePlan()
        self.step = snapshot.values.get("step")
        self._ticket: locks.SaveLock | None = None
        self._division: SaveDescription | None = None
        self._images: list[FileImage] | None = None
        self._unstorable: CheckpointError | None = None
        self._removed: tuple[Path, ...] = ()  # before the save, to make room
        self.values: Any = {}
        self.own: Any = {}
        self.parts: Any = {}
        self.held = [*snapshot.held]
        try:
            self._take_values(snapshot, copy)
        except CheckpointError as error:  # raised by `_describe`, where every rank learns of it
            self._unstorable = error

    def _take_values(self, snapshot: RunSnapshot, copy: bool) -> None:
        self.values, shared = pack(snapshot.values if self.peers.rank == 0 else {}, copy)
        self.own, private = pack(snapshot.own)
        self.parts, _ = pack(snapshot.parts)
        self.held += [_held(tensor, name, "value") for name, tensor in shared.items()]
        self.held += [_held(tensor, name, f"own:{self.peers.rank}") for name, tensor in private.items()]

    def stage(self, staging: SaveStaging, progress: CopyProgress) -> None:
        """Copy this rank's share, so that the originals may change before `run` is through: each when
        `progress` says so."""
        try:
            self._agree()
            together(self.peers, "copying", lambda: self._copy(staging, progress))
        except AgreedError as error:
            raise self._reported(error) from error

    def run(self) -> SaveResult:
        """Save; on any failure remove what was begun, and raise on every rank."""
        began = time.perf_counter()
        try:
            plan = self._agree()
            token = on_first(self.peers, "preparing to save", lambda: self._begin(plan.tensors))
            folder = locks.holder_of(self.target) / token
            wrote = together(self.peers, "writing", lambda: self._write(folder))
            done = on_first(self.peers, "finishing", lambda: self._finish(plan, wrote))
        except AgreedError as error:
            raise self._reported(error) from error
        finally:
            if self._ticket is not None:
                self._ticket.release()
        removed = tuple(Path(name) for name in done["removed"])
        return SaveResult(
            self.target, done["bytes"], time.perf_counter() - began, removed, self.after_failure
        )

    def _agree(self) -> SaveDescription:
        """Who writes what: the same answer, or the same error, on every rank, since all compute it from the
        same data."""
        if self._division is None:
            answers = together(self.peers, f"saving to {self.target}", self._describe)
            try:
                self._save_plan.draw([answer["held"] for answer in answers])
                shared = joined([answer["parts"] for answer in answers])
            except CheckpointError as error:
                raise AgreedError(str(error)) from error
            self._division = SaveDescription(
                self._save_plan.tensors, [answer["own"] for answer in answers], shared
            )
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

    def _copy(self, staging: SaveStaging, progress: CopyProgress) -> None:
        self._images = staging.copy(
            self.held, self._save_plan.file_plans(self.held, self.peers.rank), progress
        )
        progress.end()

    def _begin(self, tensors: Sequence[DescribedTensor]) -> str:
        """Rank 0: take the path, and see that there is room before anyone writes."""
        if self.folders is not None:
            self.folders.hold(self.target.parent)
        directory.clean(self.target.parent)
        self._ticket = locks.take(self.target, overwrite=self.overwrite or self._removes(self.target))
        need = sum(height(tensor.shape) * row_bytes(tensor.shape, tensor.dtype) for tensor in tensors)
        need += _PAPERS * len(tensors)
        if self.keep:
            self._removed = directory.make_room(self.target, self.keep, need, self._removes)
        free = durable_files.free_bytes(self._ticket.staging)
        if free < need:
            needs, has = show_apart(need, free)
            keep = "pass keep= to remove old checkpoints"
            if self.keep:
                keep = (
                    f"keep fewer: keep={self.keep} takes room for {max(self.keep, 2)}, since the newest "
                    "complete checkpoint is never removed before the next one is complete"
                )
            raise CheckpointError(
                f"saving to {self.target} needs {needs} and {has} are free there. "
                f"Free space, save elsewhere, or {keep}."
            )
        return self._ticket.token

    def _removes(self, path: Path) -> bool:
        """Whether a checkpoint that exists may go unasked: of a run, those that it saved or went on from."""
        return self.folders is None or is_own(path)

    def _write(self, folder: Path) -> dict[str, Any]:
        """This rank's files. Returns what the manifest needs to know about them."""
        self._await(folder)
        if self._images is not None:
            wrote = [image.write(folder) for image in self._images]
        else:
            files = self._save_plan.file_plans(self.held, self.peers.rank)
            with BlockThreads() as lanes:
                wrote = [write_file(folder, self.held, file_plan, lanes) for file_plan in files]
        spans = []
        for part, (_, found) in enumerate(wrote):
            for span in found:
                span.append(part)
            spans += found
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

    def _finish(self, plan: SaveDescription, wrote: Sequence[Any]) -> dict[str, Any]:
        ticket = self._ticket
        assert ticket is not None
        manifest = replace(
            assemble(plan.tensors, wrote, {**self.values, **plan.joined}, plan.own),
            head=ManifestHead(directory.next_serial(self.target.parent), time.time(), _step(self.step)),
        )
        if wrong := directory.missing_files(ticket.staging, manifest):
            number, problem = next(iter(wrong.items()))
            raise CheckpointError(
                f"{manifest.files[number].name}, just written by its rank, {problem} as rank 0 sees it in "
                f"{ticket.staging}. All ranks must save to one shared folder, and nothing else may write "
                "there."
            )
        durable_files.write_file(ticket.staging / NAME, encode(manifest))
        ticket.commit()
        removed = self._removed + (
            directory.retire(self.target, self.keep, self._removes) if self.keep else ()
        )
        if self.folders is not None:
            has_saved(self.target)
        return {"bytes": manifest.bytes, "removed": [str(path) for path in removed]}

    def _reported(self, error: AgreedError) -> CheckpointError:
        """The error with the way out: which checkpoint is good."""
        here = "" if self.peers.rank else directory.advice(self.target)
        old = (
            ""
            if self.peers.rank or not directory.is_complete(self.target)
            else f" {self.target} is as it was."
        )
        hint = self.peers.exchange(here + old, "reporting a failed save")[0]
        return CheckpointError(f"{error} Nothing was saved to {self.target}. {hint}")


def save(
    path: str | os.PathLike[str],
    snapshot: RunSnapshot,
    peers: SavePeers,
    *,
    keep: int | None = None,
    overwrite: bool = True,
) -> SaveResult:
    """Save what the ranks hold to `path`, together; raises `CheckpointError` with one text on every rank.

    A complete checkpoint at `path` is replaced in one step when the new one is complete; without `overwrite`
    it is an error. `keep` then removes the oldest of its family beyond that many. See `background.Saver` for
    saves that go on beside training.
    """
    return SaveJob(path, snapshot, peers, keep, overwrite=overwrite).run()


def write_file(
    folder: Path, held: Sequence[HeldRows], file_plan: FilePlan, lanes: BlockThreads
) -> tuple[list[Any], list[list[Any]]]:
    """Stream rows into one file: ``[name, bytes, header checksum]``, and ``[index, start, stop, offset,
    checksums]`` each."""
    writer = TensorFileWriter(folder / file_plan.name, file_plan.header, lanes)
    try:
        spans = []
        for task, offset in zip(file_plan.tasks, file_plan.offsets, strict=True):
            item, sums = held[task.index], bytearray()
            try:
                for rows, block in chunks(item, task):
                    for found in writer.write_blocks(as_bytes(rows), block):
                        sums += found.to_bytes(4, "big")
            except CheckpointError as error:
                raise CheckpointError(f"{error} It was at {quoted(item.name)} ({item.kind}).") from error
            spans.append([task.index, task.start, task.stop, offset, sums.hex()])
        writer.close()
    finally:
        writer.abandon()
    return [file_plan.name, writer.written, writer.header_sum], spans


def assemble(
    tensors: Sequence[DescribedTensor], wrote: Sequence[Any], values: Any, own: Sequence[Any]
) -> Manifest:
    """The manifest of what all ranks wrote; its head is still to be filled in."""
    files: list[RankFile] = []
    spans: dict[tuple[int, int], list[RowSpan]] = {}
    for rank, answer in enumerate(wrote):
        first = len(files)
        files += [RankFile(*file) for file in answer["files"]]
        for index, start, stop, offset, sums, part in gently(answer["spans"]):
            spans.setdefault((rank, index), []).append(
                RowSpan(start, stop, first + part, offset, bytes.fromhex(sums))
            )
    entries = []
    for tensor in gently(tensors):
        mine = [span for holder in tensor.holders for span in spans.get((holder.rank, holder.index), ())]
        ordered = tuple(sorted(mine, key=lambda span: span.start))
        entries.append(TensorEntry(tensor.kind, tensor.name, tensor.shape, tensor.dtype, ordered))
    head = ManifestHead(0, 0.0, None)
    return Manifest(
        head, len(wrote), file_plans.BLOCK, versions(), tuple(files), tuple(entries), values, tuple(own)
    )


def versions() -> dict[str, str]:
    try:
        ours = version("zeroshard")
    except PackageNotFoundError:  # run from a source tree
        ours = "unknown"
    return {"zeroshard": ours, "torch": str(torch.__version__)}


def _held(tensor: torch.Tensor | HeldRows, name: str, kind: str) -> HeldRows:
    """A tensor that stood among values, or the record of one."""
    if isinstance(tensor, HeldRows):
        return replace(tensor, name=name, kind=kind)
    return HeldRows.of(name, kind, tensor)


def _step(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None
