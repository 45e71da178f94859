"""Runs saves beside training, and remembers for a run how the last of them went."""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from zeroshard.errors import CheckpointError, OptionError, ZeroShardError
from zeroshard.params.sharded_param import GuardedState

from .locks import RunFolders
from .pacing import CopyProgress, beside
from .records import RunSnapshot, SavePeers, SaveResult
from .saving import SaveJob, SavePlan
from .staging import SaveStaging

log = logging.getLogger("zeroshard")


class PendingSave:
    """A save under way in a thread. Python waits for it when the process ends, unless it is killed."""

    def __init__(self, job: SaveJob, staging: SaveStaging, writer: ThreadPoolExecutor) -> None:
        self.path: Path = job.target
        self._progress = CopyProgress()
        self._saved: SaveResult | None = None
        self._error: Exception | None = None
        self._ended = writer.submit(self._run, job, staging)

    def _run(self, job: SaveJob, staging: SaveStaging) -> None:
        try:
            with beside(lambda: self._progress.hurried):
                job.stage(staging, self._progress)
                self._saved = job.run()
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
        job = SaveJob(path, snapshot, self.peers, keep, background, self._save_plan, overwrite)
        job.folders = self._folders
        job.after_failure = failure
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
