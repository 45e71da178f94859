"""Supervises a run for the launcher: waits for ranks and signals, passes output on, ends what must end.

All decisions are made in one thread, once per tick; the relays only read pipes and hand over what
they read."""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .job import PREEMPTED, LaunchJob
from .linux import children, take
from .outcome import (
    FAREWELL,
    AttemptResult,
    RankEnding,
    RankReport,
    duration,
    exit_code,
    first_failure,
    narrate,
    rank_list,
    signal_name,
    summary,
)
from .output import OutputRelay, OutputStreams, filed, prefixed
from .rank import STACKS

SIGNALS = frozenset({signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
TIMED_OUT = 124
GRACE = 5.0
_TICK = 0.1
# How long the news that a peer is gone waits for the news of why.
_HOLD = 0.5


@dataclass(frozen=True)
class RankProcess:
    """A started rank and the read ends of its pipes. Rank 0 writes to the terminal, so it has one."""

    rank: int
    pid: int
    report: int
    stdout: int | None
    stderr: int | None


class LaunchStore(Protocol):
    """Where the ranks of an attempt meet. `trouble`: why it cannot be served."""

    trouble: str | None

    def ended_well(self, rank: int) -> None: ...


@dataclass
class SignalLadder:
    """Signals that get stronger, each with the second at which it is due."""

    begun: float
    rungs: list[tuple[float, signal.Signals]]
    patient: bool = False

    def due(self, now: float) -> list[signal.Signals]:
        """Takes the signals whose time has come."""
        ready = [number for after, number in self.rungs if now >= self.begun + after]
        self.rungs = self.rungs[len(ready) :]
        return ready


def after_failure(now: float) -> SignalLadder:
    """A rank failed: the others notice by themselves, or are stuck, and show where before they are ended; one
    that is stopped goes on for that."""
    shown = [(GRACE, signal.SIGCONT), (GRACE, STACKS)]
    return SignalLadder(now, [*shown, (GRACE + 0.5, signal.SIGTERM), (2 * GRACE, signal.SIGKILL)])


def after_signal(number: signal.Signals | None, now: float, patience: float) -> SignalLadder:
    """The run is told to stop, and may save first. `number` is passed on; None where the ranks know."""
    first = [(0.0, number)] if number is not None else []
    rungs = [*first, (patience, signal.SIGTERM), (patience + GRACE, signal.SIGKILL)]
    return SignalLadder(now, rungs, patient=True)


def after_timeout(now: float) -> SignalLadder:
    """Time is up: first every rank shows where it is."""
    return SignalLadder(now, [(0.0, STACKS), (1.0, signal.SIGTERM), (1.0 + GRACE, signal.SIGKILL)])


class RankRecords:
    """What the ranks of an attempt have said, and how they ended."""

    def __init__(self, screen: OutputStreams, log_dir: Path | None) -> None:
        self._screen, self._log_dir = screen, log_dir
        self.ended: dict[int, tuple[int, float]] = {}  # by rank: its status, and when it ended
        self.reports: dict[int, RankReport] = {}
        self._stopped: set[int] = set()  # were sent a signal
        self._finished: set[int] = set()  # said farewell
        self._news: queue.SimpleQueue[tuple[int, RankReport]] = queue.SimpleQueue()
        self._held: list[tuple[int, RankReport]] = []  # not shown yet: their cause may still come
        self._shown: list[RankReport] = []
        self._relays: list[OutputRelay] = []
        self._errors: dict[int, OutputRelay] = {}

    def listen(self, member: RankProcess) -> None:
        """Read its pipes from now on."""

        def reported(line: bytes) -> None:
            if line == FAREWELL:
                self._finished.add(member.rank)
            else:
                self._news.put((member.rank, RankReport.decode(line)))

        self._relays.append(OutputRelay(member.report, reported))
        if member.stdout is None or member.stderr is None:
            return
        stdout, stderr = self._sinks(member.rank)
        self._errors[member.rank] = OutputRelay(member.stderr, stderr)
        self._relays += [OutputRelay(member.stdout, stdout), self._errors[member.rank]]

    def _sinks(self, rank: int) -> tuple[Callable[[bytes], None], Callable[[bytes], None]]:
        if self._log_dir is None:
            screen = self._screen
            return prefixed(rank, screen, screen.stdout), prefixed(rank, screen, screen.stderr)
        accept = filed(self._log_dir / f"rank-{rank}.log")
        return accept, accept

    def end(self, rank: int, status: int) -> None:
        self.ended[rank] = (status, time.monotonic())

    def stop(self, rank: int) -> None:
        """It was sent a signal that ends it."""
        self._stopped.add(rank)

    def show(self, *, last: bool = False) -> None:
        """Take the reports that have come, and print those whose cause is known or does not come."""
        while not self._news.empty():
            rank, report = self._news.get()
            self.reports[rank] = report
            self._held.append((rank, report))
        silent = any(ending.failed and not ending.report for ending in self.endings())
        caused = silent or any(not report.follows for report in self.reports.values())
        now = time.monotonic()
        for rank, report in sorted(self._held, key=lambda item: (item[1].follows, item[1].at)):
            if last or caused or not report.follows or now - report.at > _HOLD:
                self._held.remove((rank, report))
                self._screen.write(self._screen.stderr, narrate(rank, report, self._shown, caused))
                self._shown.append(report)

    def endings(self) -> list[RankEnding]:
        return [
            RankEnding(
                rank,
                status,
                at,
                report=self.reports.get(rank),
                last_line=self._errors[rank].last_line if rank in self._errors else "",
                stopped=rank in self._stopped,
                finished=rank in self._finished,
            )
            for rank, (status, at) in sorted(self.ended.items())
        ]

    def close(self) -> None:
        """Read what is still in the pipes."""
        deadline = time.monotonic() + 1.0
        for relay in self._relays:
            relay.join(max(0.0, deadline - time.monotonic()))
        self.show(last=True)


class Supervisor:
    """One attempt, from its ranks' start to their end. `--timeout` counts from `begun`, the first one's
    start."""

    def __init__(
        self,
        job: LaunchJob,
        members: Sequence[RankProcess],
        screen: OutputStreams,
        started: float,
        begun: float,
        signals: frozenset[signal.Signals] = SIGNALS,
        store: LaunchStore | None = None,
    ) -> None:
        self._job = job
        self._members = {member.pid: member for member in members}
        self._screen = screen
        self._started, self._begun = started, begun
        self._signals, self._store = signals, store
        self._records = RankRecords(screen, job.log_dir)
        self._ladder: SignalLadder | None = None
        self._caught: signal.Signals | None = None
        self._timed_out = self._lacks_store = False
        for member in members:
            self._records.listen(member)

    def wait(self) -> AttemptResult:
        """Returns when every rank has ended."""
        while len(self._records.ended) < len(self._members):
            caught = take(self._signals, _TICK)
            if caught is not None and caught.number != signal.SIGCHLD:
                # Ctrl-C goes to the whole process group: the ranks have it already. That a terminal was
                # closed is told to the first process of its session alone.
                shared = caught.from_kernel and caught.number == signal.SIGINT
                self._heard(caught.number, from_terminal=shared)
            self._reap()
            self._records.show()
            self._escalate(time.monotonic())
        return self._conclude()

    def _heard(self, number: signal.Signals, *, from_terminal: bool) -> None:
        now = time.monotonic()
        if self._caught is not None:
            self._ladder = SignalLadder(now, [(0.0, signal.SIGKILL)])
            return
        self._caught = number
        self._ladder = after_signal(None if from_terminal else number, now, self._job.grace)
        if number == signal.SIGINT:
            self._screen.say("stopping; press Ctrl-C again to kill the ranks")

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            # Others are orphans that became ours: see `adopt_orphans`.
            if pid in self._members:
                rank, code = self._members[pid].rank, os.waitstatus_to_exitcode(status)
                self._records.end(rank, code)
                if code == 0 and self._store is not None:
                    self._store.ended_well(rank)

    def _escalate(self, now: float) -> None:
        statuses = {status for status, _ in self._records.ended.values()}
        trouble = None if self._store is None else self._store.trouble
        if trouble is not None and not self._lacks_store:
            self._lacks_store = True
            self._screen.say(trouble)
        failed = bool(self._records.reports) or bool(statuses - {0, PREEMPTED}) or self._lacks_store
        limit = self._job.timeout
        # A rank that saves after Ctrl-C has time, until one of its peers is gone.
        if failed and (self._ladder is None or self._ladder.patient):
            self._ladder = after_failure(now)
        elif self._ladder is None and PREEMPTED in statuses:
            self._ladder = after_signal(None, now, self._job.grace)  # a rank was told, and told its peers
        elif self._ladder is None and limit is not None and now - self._begun > limit:
            self._timed_out = True
            self._ladder = after_timeout(now)
        for number in self._ladder.due(now) if self._ladder else []:
            self._send(number)

    def _send(self, number: signal.Signals) -> None:
        for pid, member in self._members.items():
            if member.rank not in self._records.ended:
                os.kill(pid, number)
                if number not in (STACKS, signal.SIGCONT):
                    self._records.stop(member.rank)

    def _conclude(self) -> AttemptResult:
        if self._ladder is not None:
            self._sweep()
        self._records.close()
        endings = self._records.endings()
        lasted = duration(time.monotonic() - self._started)
        by = signal_name(self._caught or signal.SIGTERM)
        if {ending.status for ending in endings} == {PREEMPTED}:
            self._screen.say(f"told to stop by {by}: every rank left at the end of a step, after {lasted}")
            return AttemptResult(PREEMPTED)
        if self._caught is not None:
            self._screen.say(f"stopped by {by} after {lasted}; all ranks have ended")
            return AttemptResult(128 + self._caught)
        if self._timed_out:
            late = rank_list([ending.rank for ending in endings if ending.stopped])
            self._screen.say(
                f"--timeout {self._job.timeout:g} is over and {late} had not ended (see the stacks above)"
            )
            return AttemptResult(TIMED_OUT)
        first = first_failure(endings)
        if first is None:
            return AttemptResult(int(self._lacks_store))
        self._screen.say(summary(endings, self._started))
        return AttemptResult(exit_code(first), first)

    def _sweep(self) -> None:
        """Kills what failed ranks left behind. What a script left after a good run is meant to run."""
        deadline = time.monotonic() + GRACE
        while (orphans := children()) and time.monotonic() < deadline:
            for pid in orphans:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
            self._reap()
