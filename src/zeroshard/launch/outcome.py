"""How ranks ended, and what to say of it. Pure: records in, text and exit codes out."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

# What a rank says when a peer went away. It is a consequence, so it never is the cause while another rank has
# one.
CONSEQUENCES = ("RankError", "DistBackendError", "DistNetworkError", "DistStoreError")
# What a rank writes to the launcher when its script has come to an end.
FAREWELL = b"end\n"
# Letters of an error that a summary repeats.
_BRIEF = 100
CONSEQUENCE_TEXTS = ("onnection closed by peer", "onnection reset by peer", "Broken pipe")


@dataclass(frozen=True)
class RankReport:
    """What a rank told the launcher of the exception that ended it. `at` is on the host's monotonic clock.

    `traceback` is what the rank's excepthook printed: empty where the script's own hook shows it elsewhere.
    """

    kind: str
    text: str
    traceback: str
    at: float

    def encode(self) -> bytes:
        """One line, so that the reader needs no end of file: a forked data loader may keep the pipe open."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> RankReport:
        """Reads back what `encode` wrote."""
        return cls(**json.loads(line))

    @property
    def headline(self) -> str:
        """The exception as the last line of a traceback has it, cut at its first line."""
        first = self.text.strip().split("\n", 1)[0]
        return f"{self.kind}: {first}" if first else self.kind

    @property
    def brief(self) -> str:
        """The headline in a summary, where the traceback with all of it is shown above: its beginning."""
        told = self.headline
        return told if not self.traceback or len(told) <= _BRIEF else told[: _BRIEF - 1].rstrip() + "…"

    @property
    def follows(self) -> bool:
        """Whether this is what a rank says when a peer went away."""
        return self.kind in CONSEQUENCES or any(text in self.text for text in CONSEQUENCE_TEXTS)


@dataclass(frozen=True)
class RankEnding:
    """How one rank ended. `status` is an exit code, or minus the signal; `at` is on the monotonic clock.
    `finished`: its script had come to its end."""

    rank: int
    status: int
    at: float
    report: RankReport | None = None
    last_line: str = ""
    stopped: bool = False
    finished: bool = True

    @property
    def left(self) -> bool:
        """Whether the rank went away in the middle of its script, with an exit code of 0 (`os._exit(0)`)."""
        return self.status == 0 and not self.finished

    @property
    def failed(self) -> bool:
        """Whether the rank failed of its own, and not because the launcher stopped it."""
        return self.report is not None or (self.status != 0 and not self.stopped)

    @property
    def failed_at(self) -> float:
        """When it went wrong. A rank that raised may take seconds to end, and its peers may end before it."""
        return self.report.at if self.report else self.at


@dataclass(frozen=True)
class AttemptResult:
    """How an attempt ended: its exit code, and the rank to blame where the ranks themselves ended it."""

    code: int
    blamed: RankEnding | None = None


def first_failure(endings: Iterable[RankEnding]) -> RankEnding | None:
    """The rank to blame: the earliest that failed; one that lost a peer only where there is no other."""
    every = list(endings)
    failures = [ending for ending in every if ending.failed]
    if not failures:
        return None
    if all(ending.report is not None and ending.report.follows for ending in failures):
        # Many scripts end by os._exit(0) in good order. One whose peers then miss it did not.
        failures += [ending for ending in every if ending.left]
    return min(failures, key=lambda e: (e.report is not None and e.report.follows, e.failed_at, e.rank))


def exit_code(ending: RankEnding) -> int:
    """The code a shell would give: 128 + signal for a killed process."""
    if ending.status < 0:
        return 1 if ending.stopped else 128 - ending.status
    return ending.status or 1


def describe(ending: RankEnding, started: float) -> str:
    """How one rank ended, as a clause: `rank 1 was killed by SIGKILL after 12 s`."""
    name = f"rank {ending.rank}"
    after = f"after {duration(ending.failed_at - started)}"
    if ending.report and ending.stopped:
        return f"{name} raised {ending.report.brief} {after} and did not end by itself"
    detail = ending.report.brief if ending.report else ending.last_line
    detail = f": {detail}" if detail else ""
    if ending.left:
        return f"{name} ended in the middle of its script {after}, with exit code 0 (os._exit?){detail}"
    if ending.status >= 0:
        return f"{name} exited with code {ending.status}{detail or f' {after}'}"
    hint = " (the kernel does this when memory runs out)" if -ending.status == signal.SIGKILL else ""
    return f"{name} was killed by {signal_name(-ending.status)} {after}{hint}{detail}"


def summary(endings: Sequence[RankEnding], started: float) -> str:
    """The last message of a run that failed: the rank to blame, and what became of the others."""
    first = first_failure(endings)
    assert first is not None
    others = [ending for ending in endings if ending is not first]
    same = [
        e.rank for e in others if e.report and first.report and e.report.headline == first.report.headline
    ]
    stopped = [e.rank for e in others if e.stopped and not e.report]
    followed = [e.rank for e in others if e.failed and e.rank not in same]
    clauses = [describe(first, started)]
    if same:
        clauses[0] = clauses[0].removesuffix(".")
        clauses.append(f"{rank_list(same)} failed with the same error")
    if followed:
        clauses.append(f"{rank_list(followed)} failed after it")
    if stopped:
        clauses.append(
            f"{rank_list(stopped)} did not end by {'itself' if len(stopped) == 1 else 'themselves'} and "
            f"{'was' if len(stopped) == 1 else 'were'} stopped"
        )
    return "; ".join(clauses)


def narrate(rank: int, report: RankReport, earlier: Sequence[RankReport], caused: bool) -> str:
    """What to print of an exception: the traceback, one line if the rank only lost a peer, or nothing.

    `earlier` are the reports printed before; one that only repeats them is left to the summary. `caused` says
    that some rank failed on its own account.
    """
    if any(report.headline == other.headline for other in earlier):
        return ""
    if caused and report.follows:
        return f"[rank {rank}] {report.headline}\n"
    return "".join(f"[rank {rank}] {line}\n" for line in report.traceback.splitlines())


def rank_list(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 2-7`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    spans = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(spans)}"


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; real-time signals, which have no name, by their number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def duration(seconds: float) -> str:
    """`0.4 s`, `12 s`, `3 min 5 s`, `2 h 10 min`."""
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
