"""The launcher's side of a run: waits for ranks and signals, passes output on, and ends what has to be ended.

All decisions are made in one thread, once per tick; the relays only read pipes and hand over what they read.
"""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .job import PREEMPTED, Job
from .outcome import (
    Ending,
    Report,
    Result,
    duration,
    exit_code,
    first_failure,
    narrate,
    rank_list,
    signal_name,
    summary,
)
from .output import Relay, Screen, filed, prefixed
from .prctl import children
from .rank import STACKS

SIGNALS = frozenset({signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
TIMED_OUT = 124
GRACE = 5.0
_TICK = 0.1
# How long the news that a peer is gone waits for the news of why.
_HOLD = 0.5
# From the siginfo of a signal that the terminal sent: the ranks, in the same process group, have it already.
_FROM_KERNEL = 0x80


@dataclass(frozen=True)
class Member:
    """A started rank and the read ends of its pipes. Rank 0 writes to the terminal, so it has one."""

    rank: int
    pid: int
    report: int
    stdout: int | None
    stderr: int | None


@dataclass
class Ladder:
    """Signals that get stronger, each with the second at which it is due."""

    begun: float
    rungs: list[tuple[float, signal.Signals]]
    patient: bool = False

    def due(self, now: float) -> list[signal.Signals]:
        """Takes the signals whose time has come."""
        ready = [number for after, number in self.rungs if now >= self.begun + after]
        self.rungs = self.rungs[len(ready) :]
        return ready


def after_failure(now: float) -> Ladder:
    """A rank failed: the others notice by themselves, or are stuck."""
    return Ladder(now, [(GRACE, signal.SIGTERM), (2 * GRACE, signal.SIGKILL)])


def after_signal(number: signal.Signals | None, now: float, patience: float) -> Ladder:
    """The run is told to stop, and may save first. `number` is passed on; None where the ranks know."""
    first = [(0.0, number)] if number is not None else []
    rungs = [*first, (patience, signal.SIGTERM), (patience + GRACE, signal.SIGKILL)]
    return Ladder(now, rungs, patient=True)


def after_timeout(now: float) -> Ladder:
    """Time is up: first every rank shows where it is."""
    return Ladder(now, [(0.0, STACKS), (1.0, signal.SIGTERM), (1.0 + GRACE, signal.SIGKILL)])


class Watch:
    """One attempt, from its ranks' start to their end. `--timeout` counts from `begun`, the first one's
    start."""

    def __init__(
        self,
        job: Job,
        members: Sequence[Member],
        screen: Screen,
        started: float,
        begun: float,
        ended_well: Callable[[int], None] = lambda rank: None,
    ) -> None:
        self._job = job
        self._members = {member.pid: member for member in members}
        self._screen = screen
        self._started, self._begun = started, begun
        self._ended_well = ended_well
        self._ended: dict[int, tuple[int, float]] = {}
        self._stopped: set[int] = set()
        self._news: queue.SimpleQueue[tuple[int, Report]] = queue.SimpleQueue()
        self._held: list[tuple[int, Report]] = []
        self._reports: dict[int, Report] = {}
        self._told: list[Report] = []
        self._ladder: Ladder | None = None
        self._caught: signal.Signals | None = None
        self._timed_out = False
        self._relays: list[Relay] = []
        self._errors: dict[int, Relay] = {}
        for member in members:
            self._listen(member)

    def wait(self) -> Result:
        """Returns when every rank has ended."""
        while len(self._ended) < len(self._members):
            info = signal.sigtimedwait(SIGNALS, _TICK)
            if info is not None and info.si_signo != signal.SIGCHLD:
                self._heard(signal.Signals(info.si_signo), from_terminal=info.si_code == _FROM_KERNEL)
            self._reap()
            self._hear_reports()
            self._escalate(time.monotonic())
        return self._conclude()

    def _listen(self, member: Member) -> None:
        def reported(line: bytes) -> None:
            self._news.put((member.rank, Report.decode(line)))

        self._relays.append(Relay(member.report, reported))
        if member.stdout is None or member.stderr is None:
            return
        stdout, stderr = self._sinks(member.rank)
        self._errors[member.rank] = Relay(member.stderr, stderr)
        self._relays += [Relay(member.stdout, stdout), self._errors[member.rank]]

    def _sinks(self, rank: int) -> tuple[Callable[[bytes], None], Callable[[bytes], None]]:
        if self._job.log_dir is None:
            screen = self._screen
            return prefixed(rank, screen, screen.stdout), prefixed(rank, screen, screen.stderr)
        accept = filed(self._job.log_dir / f"rank-{rank}.log", again=self._started > self._begun)
        return accept, accept

    def _heard(self, number: signal.Signals, *, from_terminal: bool) -> None:
        now = time.monotonic()
        if self._caught is not None:
            self._ladder = Ladder(now, [(0.0, signal.SIGKILL)])
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
                self._ended[rank] = (code, time.monotonic())
                if code == 0:
                    self._ended_well(rank)

    def _hear_reports(self, *, last: bool = False) -> None:
        while not self._news.empty():
            rank, report = self._news.get()
            self._reports[rank] = report
            self._held.append((rank, report))
        silent = any(ending.failed and not ending.report for ending in self._endings())
        caused = silent or any(not report.follows for report in self._reports.values())
        now = time.monotonic()
        for rank, report in sorted(self._held, key=lambda item: (item[1].follows, item[1].at)):
            if last or caused or not report.follows or now - report.at > _HOLD:
                self._held.remove((rank, report))
                self._screen.write(self._screen.stderr, narrate(rank, report, self._told, caused))
                self._told.append(report)

    def _escalate(self, now: float) -> None:
        statuses = {status for status, _ in self._ended.values()}
        failed = bool(self._reports) or bool(statuses - {0, PREEMPTED})
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
            if member.rank not in self._ended:
                os.kill(pid, number)
                if number != STACKS:
                    self._stopped.add(member.rank)

    def _endings(self) -> list[Ending]:
        return [
            Ending(
                rank,
                status,
                at,
                report=self._reports.get(rank),
                last_line=self._errors[rank].last_line if rank in self._errors else "",
                stopped=rank in self._stopped,
            )
            for rank, (status, at) in sorted(self._ended.items())
        ]

    def _conclude(self) -> Result:
        if self._ladder is not None:
            self._sweep()
        deadline = time.monotonic() + 1.0
        for relay in self._relays:
            relay.join(max(0.0, deadline - time.monotonic()))
        self._hear_reports(last=True)
        endings = self._endings()
        lasted = duration(time.monotonic() - self._started)
        by = signal_name(self._caught or signal.SIGTERM)
        if {ending.status for ending in endings} == {PREEMPTED}:
            self._screen.say(f"told to stop by {by}: every rank left at the end of a step, after {lasted}")
            return Result(PREEMPTED)
        if self._caught is not None:
            self._screen.say(f"stopped by {by} after {lasted}; all ranks have ended")
            return Result(128 + self._caught)
        if self._timed_out:
            late = rank_list([ending.rank for ending in endings if ending.stopped])
            self._screen.say(
                f"--timeout {self._job.timeout:g} is over and {late} had not ended (see the stacks above)"
            )
            return Result(TIMED_OUT)
        first = first_failure(endings)
        if first is None:
            return Result(0)
        self._screen.say(summary(endings, self._started))
        return Result(exit_code(first), first)

    def _sweep(self) -> None:
        """Kills what failed ranks left behind. What a script left after a good run is meant to run."""
        deadline = time.monotonic() + GRACE
        while (orphans := children()) and time.monotonic() < deadline:
            for pid in orphans:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
            self._reap()
