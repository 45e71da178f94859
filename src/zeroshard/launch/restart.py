"""Decides whether, when, with how many ranks and from which checkpoint a failed job begins again.

Not on the elastic agent of torchrun: over gloo its restarts read stale addresses from the reused store. Here
an attempt shares nothing with the one before it but the folder of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .job import PREEMPTED, USAGE, LaunchJob
from .outcome import AttemptResult, RankEnding
from .output import OutputStreams

# Errors that another attempt would meet again. Where data, disks and peers have a part in it, none is sure.
_SURE = ("OptionError", "ModelError", "PlanError", "SyntaxError", "IndentationError", "ModuleNotFoundError")
_SHORTEST, _LONGEST = 0.5, 30.0


@dataclass(frozen=True)
class AttemptFailure:
    """One attempt that failed: the rank to blame, and whether a checkpoint was completed before."""

    rank: int
    progress: bool


def pause(failures: Sequence[AttemptFailure]) -> float:
    """Seconds to wait: short after progress, doubled with every failure in a row that had none."""
    fruitless = 0
    for failure in reversed(failures):
        if failure.progress:
            break
        fruitless += 1
    return min(_LONGEST, _SHORTEST * 2.0 ** max(0, fruitless - 1))


def lost(failures: Sequence[AttemptFailure]) -> bool:
    """A rank that was started again and fails again, with no checkpoint in between, does not come back."""
    if len(failures) < 2:
        return False
    before, last = failures[-2:]
    return before.rank == last.rank and not last.progress


def hopeless(ending: RankEnding, code: int) -> str | None:
    """Why a restart would fail in the same way, if it would."""
    if code == USAGE:
        return "exit code 2 says that the script was called wrongly"
    if code == PREEMPTED:
        return f"exit code {PREEMPTED} says that a rank was told to stop"
    if ending.report is not None and ending.report.kind in _SURE:
        return f"another attempt would meet the same {ending.report.kind}"
    return None


class RestartPolicy:
    """The attempts at one job so far."""

    def __init__(self, job: LaunchJob, screen: OutputStreams) -> None:
        self.job, self._screen = job, screen
        self.done = 0
        self.failures: list[AttemptFailure] = []
        self._from: Path | None = None

    @property
    def pause(self) -> float:
        return pause(self.failures)

    def begin(self) -> LaunchJob:
        """The job as it is to be started now; what dead saves left in its folder is gone."""
        if self.job.resume is not None:
            from zeroshard.checkpoint import clean

            clean(self.job.resume)
            self._from = self._latest()
        return self.job

    def again(self, result: AttemptResult) -> bool:
        """Whether to start again after this; says so, or why not."""
        blamed = result.blamed
        if blamed is None or self.job.restarts == 0:
            return False
        why = hopeless(blamed, result.code)
        if why is not None:
            self._screen.say(f"no restart: {why}")
            return False
        if self.done == self.job.restarts:
            self._screen.say(f"gave up after {self.done} restart{'s' if self.done != 1 else ''}")
            return False
        latest = self._latest()
        self.failures.append(AttemptFailure(blamed.rank, latest is not None and latest != self._from))
        self._shrink()
        self.done += 1
        self._screen.say(
            f"restart {self.done} of {self.job.restarts} in {self.pause:g} s with {self.job.ranks} "
            f"rank{'s' if self.job.ranks != 1 else ''}, {self._origin(latest)}"
        )
        return True

    def _shrink(self) -> None:
        fewest = self.job.fewest or self.job.ranks
        if lost(self.failures) and self.job.ranks > fewest:
            self._screen.say(
                f"rank {self.failures[-1].rank} failed again without a checkpoint in between and does not "
                f"come back: one rank fewer (--ranks {fewest}:…)"
            )
            self.job = replace(self.job, ranks=self.job.ranks - 1, fewest=fewest)
            # Ranks have other numbers now: what the old ones did says nothing about the new ones.
            self.failures[-1] = replace(self.failures[-1], rank=-1)

    def _latest(self) -> Path | None:
        if self.job.resume is None:
            return None
        from zeroshard.checkpoint import latest

        return latest(self.job.resume)

    def _origin(self, found: Path | None) -> str:
        if self.job.resume is None:
            return "from whatever the script goes on from (--resume FOLDER names it)"
        if found is None:
            return f"from the beginning: {self.job.resume} holds no complete checkpoint"
        return f"from {found}"
