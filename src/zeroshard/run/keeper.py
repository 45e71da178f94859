"""Who saves and loads a run: takes snapshots at the right moments, and keeps training from changing what is
still being read."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path as FolderPath
from typing import Any

from torch import nn

from zeroshard.checkpoint.agree import AgreedError, on_first
from zeroshard.checkpoint.background import PendingSave, Saver
from zeroshard.checkpoint.loading import load
from zeroshard.checkpoint.manifest import NAME, read_manifest
from zeroshard.checkpoint.records import Peers, Saved, Snapshot
from zeroshard.checkpoint.shelf import clean, is_complete, latest, listing
from zeroshard.checkpoint.verifying import verify
from zeroshard.checkpoint.wording import some
from zeroshard.errors import CheckpointError, ZeroShardError

from .resume import adopt, targets_of
from .runtime import Runtime
from .snapshot import Company, refuse_untimely, snapshot_of, untimely

log = logging.getLogger("zeroshard")
Path = str | os.PathLike[str]


class Keeper:
    """The saves and loads of one run. `meet` makes what the ranks talk over, at their first save or load."""

    def __init__(self, model: nn.Module, runtime: Runtime, meet: Callable[[], Peers]) -> None:
        self.model, self.runtime, self._meet = model, runtime, meet
        self._made: Saver | None = None

    @property
    def _saver(self) -> Saver:
        if self._made is None:
            self._made = Saver(self._meet())
        return self._made

    def save(self, path: Path, company: Company, keep: int | None, background: bool) -> Saved | PendingSave:
        self.finish()  # the ranks talk about one save at a time
        runtime, saver = self.runtime, self._saver
        snapshot = snapshot_of(runtime, self.model, company, saver.peers, background)
        pending = saver.save(path, snapshot, keep=keep, background=background)
        if isinstance(pending, PendingSave):
            # The copy is made beside training, and whoever changes something waits for that.
            runtime.reader = pending
            for owner in {id(h.owner): h.owner for h in snapshot.held}.values():
                if owner is not None:
                    owner.read_by(pending)
        return pending

    def load(self, path: Path, company: Company, strict: bool) -> dict[str, Any]:
        self.finish()
        runtime, peers = self.runtime, self._saver.peers
        refuse_untimely("load", peers.exchange(untimely(runtime), f"loading {os.path.abspath(path)}"))
        try:
            manifest = read_manifest(os.path.abspath(path))
        except (CheckpointError, OSError):
            manifest = None  # `load` says so, on all ranks, and where a good one is
        try:
            targets = targets_of(runtime, self.model, manifest, company, strict)
        except CheckpointError as error:
            raise CheckpointError(f"{path} does not fit this run: {error}") from error
        runtime.settle()
        runtime.transport.fence()  # peers have read the rows that are about to change
        try:
            loaded = load(path, Snapshot(targets.held), peers, strict)
        finally:
            runtime.changed(runtime.params)
        return adopt(runtime, self.model, targets, loaded, company)

    def newest(self, folder: Path) -> str | None:
        """The checkpoint to go on from, as rank 0 sees it; the same, or the same error, on every rank."""
        self.finish()
        root = os.path.abspath(folder)
        return self._on_first(f"looking for checkpoints in {root}", lambda: _newest(root))

    def older(self, folder: Path, failed: Sequence[str]) -> str | None:
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

    def finish(self) -> None:
        """Wait for a background save. How it failed was logged, and the next save tells it."""
        if self._made is not None and self._made.pending is not None:
            self.runtime.reader = None
            try:
                self._made.pending.wait()
            except ZeroShardError:
                return


def _newest(root: str) -> str | None:
    """Training must not begin afresh beside checkpoints that cannot be read: a person decides that."""
    if os.path.lexists(root) and not os.path.isdir(root):
        raise CheckpointError(f"{root} is no folder: pass the folder that holds the checkpoints.")
    clean(root)
    found = latest(root)
    if found is not None:
        log.info("going on from %s", found)
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
