"""Saves and loads a run at the right moments: `run.save`, `run.load`, `run.resume`.

It takes snapshots between two steps, keeps training from changing what is still being read, and hears when
it is time to leave.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pathlib import Path as FolderPath
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zeroshard.checkpoint.directory import clean, is_complete, latest, listing
from zeroshard.checkpoint.loading import load
from zeroshard.checkpoint.locks import FolderLockedError, RunFolders, goes_on
from zeroshard.checkpoint.manifest import NAME, read_manifest
from zeroshard.checkpoint.records import RunSnapshot, SavePeers, SaveResult
from zeroshard.checkpoint.saving import AgreedError, PendingSave, Saver, on_first
from zeroshard.checkpoint.untrusted import some
from zeroshard.checkpoint.verifying import verify
from zeroshard.collector import collector_paused
from zeroshard.errors import CheckpointError, OptionError, ZeroShardError
from zeroshard.field_checks import check_flag, path_text
from zeroshard.launch.join import announced, resume_folder
from zeroshard.launch.rank import TerminationNotice
from zeroshard.planner.plan import Plan

from .full_state import load_model_state, load_optimizer_state, model_state, optimizer_state
from .resume import adopt, targets_of
from .runtime import Runtime
from .snapshot import UNFORESEEN, ExtraState, refuse_untimely, snapshot_of, untimely

log = logging.getLogger("zeroshard")
PathLike = str | os.PathLike[str]


class CheckpointKeeper:
    """The saves and loads of one run. `meet` makes what the ranks talk over, at their first save or load."""

    def __init__(self, model: nn.Module, runtime: Runtime, meet: Callable[[], SavePeers]) -> None:
        self.model, self.runtime, self._meet = model, runtime, meet
        self._made: Saver | None = None
        self._folders = _folders_of()
        self._claimed: set[str] = set()  # the same on every rank

    @property
    def _saver(self) -> Saver:
        if self._made is None:
            self._made = Saver(self._meet(), self._folders)
        return self._made

    @collector_paused()
    def save(
        self, path: PathLike, extra_state: ExtraState, keep: int | None, background: bool, overwrite: bool
    ) -> SaveResult | PendingSave:
        self.finish()  # the ranks talk about one save at a time
        runtime, saver = self.runtime, self._saver
        snapshot = snapshot_of(runtime, self.model, extra_state, saver.peers, background)
        if background:
            self._held_lock(os.path.dirname(os.path.abspath(path)))
        pending = saver.save(path, snapshot, keep=keep, background=background, overwrite=overwrite)
        if isinstance(pending, PendingSave):
            # The copy is made beside training, and whoever changes something waits for that.
            runtime.written.read_by(pending)
            for owner in {id(h.owner): h.owner for h in snapshot.held}.values():
                if owner is UNFORESEEN:
                    pending.copied_of(owner)
                elif owner is not None:
                    owner.read_by(pending)
        return pending

    @collector_paused()
    def load(self, path: PathLike, extra_state: ExtraState, strict: bool) -> dict[str, Any]:
        self.finish()
        runtime, peers = self.runtime, self._saver.peers
        refuse_untimely("load", peers.exchange(untimely(runtime), f"loading {os.path.abspath(path)}"))
        try:
            manifest = read_manifest(os.path.abspath(path))
        except (CheckpointError, OSError):
            manifest = None  # `load` says so, on all ranks, and where a good one is
        try:
            targets = targets_of(runtime, self.model, manifest, extra_state, strict)
        except CheckpointError as error:
            raise CheckpointError(f"{path} does not fit this run: {error}") from error
        runtime.settle()
        runtime.transport.fence()  # peers have read the rows that are about to change
        try:
            loaded = load(path, RunSnapshot(targets.held), peers, strict, manifest)
        finally:
            runtime.changed(runtime.params)
        goes_on(os.path.dirname(os.path.abspath(path)))
        return adopt(runtime, self.model, targets, loaded, extra_state)

    def _held_lock(self, folder: str) -> None:
        """Before the first background save into a folder: where another run is there, refuse it in the call,
        on every rank. Every save sees that the claim still stands."""
        if folder not in self._claimed:
            if self._on_first(f"claiming {folder}", lambda: self._try_held_lock(folder)) is None:
                self._claimed.add(folder)

    def _try_held_lock(self, folder: str) -> str | None:
        """Why it cannot be claimed, if not because another run is there: then nobody can save there."""
        try:
            self._folders.hold(FolderPath(folder))
        except FolderLockedError:
            raise
        except CheckpointError as error:
            return str(error)
        return None

    def newest(self, folder: PathLike) -> str | None:
        """The checkpoint to go on from, as rank 0 sees it; the same, or the same error, on every rank. Who
        goes on in a folder will save there, so it is claimed, if this user may write there at all."""
        self.finish()
        root = os.path.abspath(folder)

        def look() -> str | None:
            if not os.path.lexists(root) or (os.path.isdir(root) and not is_complete(FolderPath(root))):
                self._try_held_lock(root)
                goes_on(root)
            return _newest(root)

        return self._on_first(f"looking for checkpoints in {root}", look)

    def older(self, folder: PathLike, failed: Sequence[str]) -> str | None:
        """Where loading the last of `failed` has raised: the newest complete checkpoint that is none of them,
        if that one is damaged; None if it is sound, and only not one of this run."""
        root = os.path.abspath(folder)

        def look() -> str | None:
            if verify(failed[-1]).ok:
                return None
            others = (item.path for item in listing(FolderPath(root)) if str(item.path) not in failed)
            return next((str(path) for path in others if is_complete(path)), None)

        return self._on_first(f"verifying {failed[-1]}", look)

    def _on_first(self, what: str, look: Callable[[], str | None]) -> str | None:
        try:
            found = on_first(self._saver.peers, what, look)
        except AgreedError as error:
            raise CheckpointError(str(error)) from error
        assert found is None or isinstance(found, str)
        return found

    def close(self) -> None:
        self.finish()
        if self._made is not None:
            self._made.close()
            self._made = None  # it knows what the last snapshot held
        self._folders.release()

    def finish(self) -> None:
        """Wait for a background save. How it failed was logged, and the next save tells it."""
        if self._made is not None and self._made.pending is not None:
            self.runtime.written.read_by(None)
            try:
                self._made.pending.wait()
            except ZeroShardError:
                return


def _folders_of() -> RunFolders:
    """The folders of a run. Processes of one job, whose runs may each save beside the others, are told apart
    from other jobs by the address at which they have met."""
    try:
        job = announced()
    except OptionError:  # half of an announcement, for a run that met otherwise
        job = None
    return RunFolders(job.address, job.port, job.rank) if job is not None and job.world > 1 else RunFolders()


def _newest(root: str) -> str | None:
    """Training must not begin afresh beside checkpoints that cannot be read: a person decides that."""
    if os.path.lexists(root) and not os.path.isdir(root):
        raise CheckpointError(f"{root} is no folder: pass the folder that holds the checkpoints.")
    clean(root)
    found = latest(root)
    if found is not None:
        log.warning("going on from %s", found)  # of all that a job says first, this has to be seen
        return str(found)
    names = sorted(entry.name for entry in os.scandir(root)) if os.path.isdir(root) else []
    broken = [n for n in names if not n.startswith(".") and os.path.lexists(os.path.join(root, n, NAME))]
    if broken:
        raise CheckpointError(
            f"{root} holds no checkpoint that can be loaded, but {some(broken)}: damaged, or written by a "
            f"newer release. `zeroshard verify {os.path.join(root, broken[-1])}` says which; move them away "
            "to begin afresh."
        )
    return None


def listed(what: str, given: Any) -> tuple[Any, ...]:
    """As a tuple; one that came without its brackets is an error."""
    if isinstance(given, (list, tuple)):
        return tuple(given)
    raise OptionError(f"{what}= takes a list, and this is a {type(given).__name__}: pass {what}=[...].")


class CheckpointMethods(ABC):
    """What `Run` offers about checkpoints. Every rank makes the same calls."""

    def __init__(self, keeper: CheckpointKeeper) -> None:
        self._keeper = keeper
        self._folder: Path | None = None

    @abstractmethod
    def _open(self) -> Runtime: ...

    @property
    @abstractmethod
    def plan(self) -> Plan | None: ...

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        extra: Mapping[str, Any] | None = None,
        schedulers: Sequence[Any] = (),
        scalers: Sequence[Any] = (),
        keep: int | None = None,
        background: bool = False,
        overwrite: bool = False,
    ) -> SaveResult | PendingSave:
        """Save all that training needs to go on, at any number of ranks, stage or tier. Every rank calls it,
        after a step.

        - `extra`: plain data and tensors of yours, such as the position in the data; rank 0's is stored.
        - `schedulers`, `scalers`: objects whose `state_dict()` is saved.
        - `keep`: remove the oldest checkpoints beside this one beyond that many.
        - `background`: go on training while a thread writes; `wait()` of the result is the finished save. A
          failed one is logged, and told by the next.
        - `overwrite`: replace a checkpoint of another job at `path`. Those that this one has saved, or that
          lie in a folder from which it goes on, are replaced in any case, and `keep` removes no others.
        """
        self._open()
        path = path_text(path, "run.save(path)")
        check_flag(background, "background")
        check_flag(overwrite, "overwrite")
        extra_state = ExtraState(
            extra, listed("schedulers", schedulers), listed("scalers", scalers), self.plan
        )
        return self._keeper.save(path, extra_state, keep, background, overwrite)

    def load(
        self,
        path: str | os.PathLike[str],
        *,
        schedulers: Sequence[Any] = (),
        scalers: Sequence[Any] = (),
        strict: bool = True,
    ) -> dict[str, Any]:
        """Go on from a checkpoint: into the model, its optimizers and what is handed in. Every rank calls it.
        Returns the `extra`.

        `strict=False` loads what agrees where the model or the optimizer has changed.
        """
        self._open()
        path = path_text(path, "run.load(path)")
        check_flag(strict, "strict")
        extra_state = ExtraState(None, listed("schedulers", schedulers), listed("scalers", scalers))
        return self._keeper.load(path, extra_state, strict)

    def resume(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        schedulers: Sequence[Any] = (),
        scalers: Sequence[Any] = (),
        strict: bool = True,
    ) -> dict[str, Any] | None:
        """Go on from the latest complete checkpoint in `folder`, if there is one, and return its `extra`;
        None where training begins. Every rank calls it, once, before the loop.

        Without a folder it is that of `zeroshard run --resume`; `run.folder` is the one in use. Rank 0 looks,
        and removes what dead saves left, so all ranks go on from the same. Where its files turn out damaged
        while they are read, that is logged, and the next older one is taken.
        """
        self._open()
        check_flag(strict, "strict")
        chosen = Path(path_text(folder, "run.resume(folder)")) if folder is not None else resume_folder()
        if chosen is None:
            raise OptionError(
                "run.resume() has no folder: pass one, run.resume('ckpt'), or start the script with "
                "`zeroshard run --resume ckpt ...`."
            )
        self._folder = chosen
        found, failed = self._keeper.newest(chosen), list[str]()
        while found is not None:
            try:
                return self.load(found, schedulers=schedulers, scalers=scalers, strict=strict)
            except CheckpointError as error:
                failed.append(found)
                found = self._keeper.older(chosen, failed)
                if found is None:
                    raise
                log.error("%s Going on from %s instead.", error, found)
        return None

    def full_state_dict(self, rank: int | None = 0, *, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """`model.state_dict()` as plain PyTorch has it: whole tensors in master precision, in host memory,
        under all names; on that rank (None: on all), and `{}` elsewhere. Every rank calls it.

        For savers of other libraries. It is put together tensor by tensor, so that a rank needs room for the
        state it gets and one tensor beside. `dtype`: floats in this precision instead.
        """
        return model_state(self._open(), self._keeper.model, rank, dtype)

    def load_full_state_dict(
        self, state: Mapping[str, Any] | None, rank: int | None = 0, *, strict: bool = True
    ) -> Any:
        """`model.load_state_dict(state, strict)` of whole tensors that one rank has (None: that all have).
        Others may pass None. Every rank calls it, and gets what torch returns."""
        return load_model_state(self._open(), self._keeper.model, state, rank, strict)

    def full_optimizer_state_dict(
        self, optimizer: Optimizer | None = None, rank: int | None = 0
    ) -> dict[str, Any]:
        """`optimizer.state_dict()` as plain PyTorch has it: whole tensors in host memory, on that rank
        (None: on all), and `{}` elsewhere. Every rank calls it. Without an optimizer it is the only one that
        there is."""
        return optimizer_state(self._open(), optimizer, rank)

    def load_full_optimizer_state_dict(
        self,
        state: Mapping[str, Any] | None,
        optimizer: Optimizer | None = None,
        rank: int | None = 0,
    ) -> None:
        """`optimizer.load_state_dict(state)` of whole tensors that one rank has (None: that all have). Others
        may pass None. Every rank calls it."""
        load_optimizer_state(self._open(), optimizer, state, rank)

    @property
    def folder(self) -> Path | None:
        """Where `resume` looked for checkpoints, so where to save them; None before it was called."""
        return self._folder

    def preempted(self) -> bool:
        """Whether any rank was told to stop by SIGTERM: save then, and leave with `sys.exit(zs.PREEMPTED)`.

        Every rank asks after each step, and all get the same answer; it costs one small agreement. From the
        first call on SIGTERM no longer ends the process by itself.
        """
        runtime = self._open()
        return bool(runtime.transport.max([float(TerminationNotice.given())], "run.preempted()")[0])
