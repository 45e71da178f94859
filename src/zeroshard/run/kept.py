"""The handle's part that outlives a process: save, load, resume, and the news that it is time to leave."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zeroshard.checkpoint import PendingSave, Saved
from zeroshard.errors import CheckpointError, OptionError
from zeroshard.fields import check_flag, path_text
from zeroshard.launch.environment import resume_folder
from zeroshard.launch.notice import Notice
from zeroshard.planning.plan import Plan

from .keeper import Keeper
from .runtime import Runtime
from .snapshot import Company

log = logging.getLogger("zeroshard")


def listed(what: str, given: Any) -> tuple[Any, ...]:
    """As a tuple; one that came without its brackets is an error."""
    if isinstance(given, (list, tuple)):
        return tuple(given)
    raise OptionError(f"{what}= takes a list, and this is a {type(given).__name__}: pass {what}=[...].")


class Kept(ABC):
    """What `Run` offers about checkpoints. Every rank makes the same calls."""

    def __init__(self, keeper: Keeper) -> None:
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
    ) -> Saved | PendingSave:
        """Save all that training needs to go on, at any number of ranks, stage or tier. Every rank calls it,
        after a step.

        - `extra`: plain data and tensors of yours, such as the position in the data; rank 0's is stored.
        - `schedulers`, `scalers`: objects whose `state_dict()` is saved.
        - `keep`: remove the oldest checkpoints beside this one beyond that many.
        - `background`: go on training while a thread writes; `wait()` of the result is the finished save. A
          failed one is logged, and told by the next.
        """
        self._open()
        path = path_text(path, "run.save(path)")
        check_flag(background, "background")
        company = Company(extra, listed("schedulers", schedulers), listed("scalers", scalers), self.plan)
        return self._keeper.save(path, company, keep, background)

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
        company = Company(None, listed("schedulers", schedulers), listed("scalers", scalers))
        return self._keeper.load(path, company, strict)

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
        return bool(runtime.transport.max([float(Notice.given())], "run.preempted()")[0])
