"""Writes a checkpoint: every rank streams its rows into files, and rank 0 writes the manifest last, in the
call or in a thread beside training.

Each part runs on all ranks through `together`, so that all of them succeed or all of them raise the same
text: a rank that raises alone is a hang elsewhere. Until the last move nothing at the target has changed;
whatever fails before leaves the old checkpoints as they were."""

from __future__ import annotations

import logging
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint import directory, durable_files, locks, staging
from zeroshard.errors import CheckpointError, OptionError, ZeroShardError
from zeroshard.field_checks import check_flag
from zeroshard.params.sharded_param import GuardedState
from zeroshard.sizes import show_apart

from .locks import RunFolders, has_saved, is_own
from .manifest import NAME, Manifest, ManifestHead, RankFile, RowSpan, TensorEntry, encode
from .pacing import CopyProgress, beside, gently
from .ranges import DescribedTensor, FilePlan, SavePlan, describe
from .records import HeldRows, RunSnapshot, SavePeers, SaveResult, as_bytes, height, row_bytes
from .staging import FileImage, SaveStaging, chunks
from .tensor_file import BlockThreads, TensorFileWriter
from .untrusted import os_error, quoted
from .values import joined, pack

log = logging.getLogger("zeroshard")


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
        folders: RunFolders | None = None,
        after_failure: str | None = None,
    ) -> None:
        check_flag(overwrite, "overwrite")
        if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
            raise CheckpointError(
                f"keep={keep!r} is no number of checkpoints to keep; pass 1 or more, or None for all."
            )
        self.target = Path(os.path.abspath(path))
        self._peers, self._keep, self._overwrite = peers, keep, overwrite
        self._folders, self._after_failure = folders, after_failure  # the folders of the run
        self._save_plan = save_plan or SavePlan()
        step = snapshot.values.get("step")
        self._step = step if type(step) is int and step >= 0 else None
        self._lock: locks.SaveLock | None = None
        self._removed: tuple[Path, ...] = ()  # before the save, to make room
        self._unstorable: CheckpointError | None = None
        self._values: Any = {}
        self._told: dict[str, Any] = {}  # to the other ranks, with what it holds
        self._held = [*snapshot.held]
        try:
            self._values, shared = pack(snapshot.values if peers.rank == 0 else {}, copy)
            own, private = pack(snapshot.own)
            self._told = {"own": own, "parts": pack(snapshot.parts)[0]}
            for kind, tensors in (("value", shared), (f"own:{peers.rank}", private)):
                for name, tensor in tensors.items():
                    record = tensor if isinstance(tensor, HeldRows) else HeldRows.of(name, kind, tensor)
                    self._held.append(replace(record, name=name, kind=kind))
        except CheckpointError as error:  # raised where every rank learns of it
            self._unstorable = error

    def run(self, memory: SaveStaging | None = None, progress: CopyProgress | None = None) -> SaveResult:
        """Save; on any failure remove what was begun, and raise on every rank.

        With `memory` this rank's share is copied first, each tensor when `progress` says so, and the
        originals may change from then on.
        """
        try:
            # Who writes what: the same answer, or the same error, on every rank, since all compute it from
            # the same data.
            answers = together(self._peers, f"saving to {self.target}", self._describe)
            try:
                self._save_plan.make([answer["held"] for answer in answers])
                values = {**self._values, **joined([answer["parts"] for answer in answers])}
            except CheckpointError as error:
                raise AgreedError(str(error)) from error
            own = [answer["own"] for answer in answers]
            del answers  # thousands of records
            images: list[FileImage] = []
            if memory is not None:
                together(self._peers, "copying", lambda: images.extend(self._copy(memory, progress)))
            began = time.perf_counter()
            token = on_first(self._peers, "preparing to save", self._begin)
            folder = locks.holder_of(self.target) / token
            wrote = together(
                self._peers, "writing", lambda: self._write(folder, None if memory is None else images)
            )
            done = on_first(self._peers, "finishing", lambda: self._finish(values, own, wrote))
        except AgreedError as error:
            raise self._reported(error) from error
        finally:
            if self._lock is not None:
                self._lock.release()
        removed = tuple(Path(name) for name in done["removed"])
        seconds = time.perf_counter() - began
        return SaveResult(self.target, done["bytes"], seconds, removed, self._after_failure)

    def _describe(self) -> dict[str, Any]:
        if self._unstorable is not None:
            raise self._unstorable
        return {"held": describe(self._held), **self._told}

    def _copy(self, memory: SaveStaging, progress: CopyProgress | None) -> list[FileImage]:
        assert progress is not None
        images = memory.copy(self._held, self._save_plan.file_plans(self._held, self._peers.rank), progress)
        progress.end()
        return images

    def _begin(self) -> str:
        """Rank 0: take the path, and see that there is room before anyone writes."""
        if self._folders is not None:
            self._folders.hold(self.target.parent)
        directory.clean(self.target.parent)
        self._lock = locks.take(self.target, overwrite=self._overwrite or self._removes(self.target))
        tensors = self._save_plan.tensors
        need = sum(height(tensor.shape) * row_bytes(tensor.shape, tensor.dtype) for tensor in gently(tensors))
        need += _PAPERS * len(tensors)
        if self._keep:
            self._removed = directory.make_room(self.target, self._keep, need, self._removes)
        free = durable_files.free_bytes(self._lock.staging)
        if free < need:
            needs, has = show_apart(need, free)
            keep = "pass keep= to remove old checkpoints"
            if self._keep:
                keep = (
                    f"keep fewer: keep={self._keep} takes room for {max(self._keep, 2)}, since the newest "
                    "complete checkpoint is never removed before the next one is complete"
                )
            raise CheckpointError(
                f"saving to {self.target} needs {needs} and {has} are free there. "
                f"Free space, save elsewhere, or {keep}."
            )
        return self._lock.staging.name

    def _removes(self, path: Path) -> bool:
        """Whether a checkpoint that exists may go unasked: of a run, those that it saved or went on from."""
        return self._folders is None or is_own(path)

    def _write(self, folder: Path, images: list[FileImage] | None) -> dict[str, Any]:
        """This rank's files: of what was copied, or of the rows where they rest. Returns what the manifest
        needs to know about them."""
        deadline = time.monotonic() + _VISIBLE
        while not folder.is_dir():  # network file systems may show late what rank 0 made
            if time.monotonic() > deadline or self._peers.rank == 0:
                raise CheckpointError(
                    f"{folder}, which rank 0 made, is not there. All ranks must save to one shared folder, "
                    "and nothing else may remove it."
                )
            time.sleep(0.05)
        plans = self._save_plan.file_plans(self._held, self._peers.rank)
        if images is not None:
            wrote = [image.write(folder) for image in images]
        else:
            with BlockThreads() as lanes:
                wrote = [write_file(folder, self._held, plan, lanes) for plan in plans]
        spans = [
            (task.index, task.start, task.stop, part, offset, text)
            for part, (plan, (_, sums)) in enumerate(zip(plans, wrote, strict=True))
            for task, offset, text in gently(zip(plan.tasks, plan.offsets, sums, strict=True))
        ]
        spans.sort()
        columns = [list(column) for column in zip(*spans, strict=True)] or [[]] * 6
        return {"files": [file for file, _ in wrote], "spans": columns}

    def _finish(self, values: Any, own: list[Any], wrote: Sequence[Any]) -> dict[str, Any]:
        lock = self._lock
        assert lock is not None
        manifest = Manifest(
            ManifestHead(directory.next_serial(self.target.parent), time.time(), self._step),
            len(wrote),
            staging.BLOCK,
            versions(),
            tuple(RankFile(*file) for answer in wrote for file in answer["files"]),
            (),
            values,
            tuple(own),
        )
        if wrong := directory.missing_files(lock.staging, manifest):
            number, problem = next(iter(wrong.items()))
            raise CheckpointError(
                f"{manifest.files[number].name}, just written by its rank, {problem} as rank 0 sees it in "
                f"{lock.staging}. All ranks must save to one shared folder, and nothing else may write "
                "there."
            )
        text = encode(manifest, entries_of(self._save_plan.tensors, wrote))
        durable_files.write_file(lock.staging / NAME, text)
        lock.commit()
        removed = self._removed
        if self._keep:
            removed += directory.retire(self.target, self._keep, self._removes)
        if self._folders is not None:
            has_saved(self.target)
        return {"bytes": manifest.bytes, "removed": [str(path) for path in removed]}

    def _reported(self, error: AgreedError) -> CheckpointError:
        """The error with the way out: which checkpoint is good."""
        here = "" if self._peers.rank else directory.advice(self.target)
        old = (
            ""
            if self._peers.rank or not directory.is_complete(self.target)
            else f" {self.target} is as it was."
        )
        hint = self._peers.exchange(here + old, "reporting a failed save")[0]
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
    it is an error. `keep` then removes the oldest of its family beyond that many. See `Saver` for saves that
    go on beside training.
    """
    return SaveJob(path, snapshot, peers, keep, overwrite=overwrite).run()


def write_file(
    folder: Path, held: Sequence[HeldRows], file_plan: FilePlan, lanes: BlockThreads
) -> tuple[list[Any], list[str]]:
    """Stream rows into one file: ``[name, bytes, header checksum]``, and the checksums of each task."""
    writer = TensorFileWriter(folder / file_plan.name, file_plan.header, lanes)
    try:
        found: list[str] = []
        for task in gently(file_plan.tasks):
            item, sums = held[task.index], bytearray()
            try:
                for rows, block in chunks(item, task):
                    for total in writer.write_blocks(as_bytes(rows), block):
                        sums += total.to_bytes(4, "big")
            except CheckpointError as error:
                raise CheckpointError(f"{error} It was at {quoted(item.name)} ({item.kind}).") from error
            found.append(sums.hex())
        writer.close()
    finally:
        writer.abandon()
    return [file_plan.name, writer.written, writer.header_sum], found


def entries_of(tensors: Sequence[DescribedTensor], wrote: Sequence[Any]) -> Iterator[TensorEntry]:
    """All tensors, with where all ranks wrote their rows (`SaveJob._write`), one at a time."""
    first, before = [], 0  # the number of each rank's first file
    for answer in wrote:
        first.append(before)
        before += len(answer["files"])
    for tensor in gently(tensors):
        spans = []
        for holder in tensor.holders:
            indexes, starts, stops, parts, offsets, sums = wrote[holder.rank]["spans"]
            at = bisect_left(indexes, holder.index)
            while at < len(indexes) and indexes[at] == holder.index:
                file = first[holder.rank] + parts[at]
                spans.append(RowSpan(starts[at], stops[at], file, offsets[at], bytes.fromhex(sums[at])))
                at += 1
        yield TensorEntry(tensor.kind, tensor.name, tensor.shape, tensor.dtype, tuple(sorted(spans)))


def versions() -> dict[str, str]:
    """Of what wrote a checkpoint."""
    try:
        ours = version("zeroshard")
    except PackageNotFoundError:  # run from a source tree
        ours = "unknown"
    return {"zeroshard": ours, "torch": str(torch.__version__)}


class PendingSave:
    """A save under way in a thread. Python waits for it when the process ends, unless it is killed."""

    def __init__(self, job: SaveJob, memory: SaveStaging, writer: ThreadPoolExecutor) -> None:
        self.path: Path = job.target
        self._progress = CopyProgress()
        self._saved: SaveResult | None = None
        self._error: Exception | None = None
        self._ended = writer.submit(self._run, job, memory)

    def _run(self, job: SaveJob, memory: SaveStaging) -> None:
        try:
            with beside(lambda: self._progress.hurried):
                self._saved = job.run(memory, self._progress)
        except Exception as error:  # kept for wait(); a thread has nobody to raise to
            self._error = error
            log.error("the background save to %s failed: %s", self.path, error)
        finally:
            self._progress.end()

    @property
    def done(self) -> bool:
        return self._ended.done()

    @property
    def error(self) -> Exception | None:
        """Why it failed, once it is done."""
        return self._error if self.done else None

    def copied(self) -> None:
        """Return once all that is saved has been copied, so that it may change. Call it before an update."""
        self._progress.wait()

    def copied_of(self, owner: GuardedState | None) -> None:
        """Return once all that `owner` changes has been copied; it is copied next."""
        self._progress.wait_of(owner)

    def wait(self, timeout: float | None = None) -> SaveResult:
        """The finished save, or its error."""
        if timeout is not None and not isinstance(timeout, (int, float)):
            raise OptionError(f"wait(timeout={timeout!r}): pass a number of seconds, or None.")
        with self._progress.hurry():
            ended = wait([self._ended], timeout).done
        if not ended:
            raise CheckpointError(
                f"the background save to {self.path} has not finished after {timeout} s; it goes on."
            )
        if self._error is not None:
            if isinstance(self._error, ZeroShardError):
                raise self._error
            raise CheckpointError(
                f"the background save to {self.path} failed: {self._error}"
            ) from self._error
        assert self._saved is not None
        return self._saved


class Saver:
    """Saves one after another. A background save that failed does not stop the run: the next save reports it
    and is the retry.

    Every rank makes the same calls in the same order.
    """

    def __init__(self, peers: SavePeers, folders: RunFolders | None = None) -> None:
        self.peers, self._folders = peers, folders
        self.pending: PendingSave | None = None
        self.staging = SaveStaging()
        self._save_plan = SavePlan()
        # One thread for all saves: to start one takes longer than all else that a caller waits for.
        self._writer = ThreadPoolExecutor(1, "save")

    def save(
        self,
        path: str | os.PathLike[str],
        snapshot: RunSnapshot,
        *,
        keep: int | None = None,
        background: bool = False,
        overwrite: bool = True,
    ) -> SaveResult | PendingSave:
        """Save now; or, with `background`, copy what this rank will write, and write the copy, in a thread.

        The caller promises to call `PendingSave.copied` before it changes anything of what is saved, or
        `copied_of` before it changes what is of one owner.
        """
        failure = self._settle()
        job = SaveJob(
            path, snapshot, self.peers, keep, background, self._save_plan, overwrite, self._folders, failure
        )
        if not background:
            return job.run()
        self.staging.bridge.begin()
        self.pending = PendingSave(job, self.staging, self._writer)
        return self.pending

    def wait(self) -> SaveResult | None:
        """Wait for the save under way, if any; raises its error."""
        pending, self.pending = self.pending, None
        return pending.wait() if pending is not None else None

    def close(self) -> None:
        """Let go of the thread and the copy. What is under way is finished first."""
        self._writer.shutdown()
        self.staging = SaveStaging()

    def _settle(self) -> str | None:
        pending, self.pending = self.pending, None
        if pending is None:
            return None
        try:
            pending.wait()
        except ZeroShardError as error:
            log.warning("saving again after the background save to %s failed: %s", pending.path, error)
            return str(error)
        return None
