"""What `zeroshard run` is asked for, and the environment it gives to the ranks. Pure: it starts nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from zeroshard.errors import OptionError

# Imported once by the launcher, before the ranks are forked from it. Every training script needs all of them:
# DTensor holds the sharded parameters, and a torch optimizer imports dynamo at its first `zero_grad`.
PRELOAD = ("torch", "torch.distributed", "torch.distributed.tensor", "torch._dynamo", "zeroshard.public")


# The environment variable by which ranks learn of `--resume`.
RESUME = "ZEROSHARD_RESUME"
# And of `--stuck-after`.
STUCK_AFTER = "ZEROSHARD_STUCK_AFTER"
# Says to a rank that `zeroshard run` has started it, by the port of its store: a launcher inside has another.
STARTED = "ZEROSHARD_RUN"
# The exit code of a run that was told to stop and saved first: EX_TEMPFAIL of sysexits.h, "try again later".
PREEMPTED = 75
MOST_DIGITS = 10  # of a number of threads
USAGE = 2


@dataclass(frozen=True)
class LaunchJob:
    """A script or module, and how many ranks of it to run on this host.

    After a failure it is started again up to `restarts` times, with no fewer than `fewest` ranks. `resume` is
    the folder of its checkpoints; `grace` are the seconds in which a run that is told to stop may save.
    """

    ranks: int
    target: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    threads: int | None = None
    timeout: float | None = None
    stuck_after: float | None = None
    log_dir: Path | None = None
    preload: tuple[str, ...] = PRELOAD
    store: bool = True
    fewest: int | None = None
    restarts: int = 0
    resume: Path | None = None
    grace: float = 30.0
    before: Callable[[], object] | None = None  # what each rank calls before the script begins

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise OptionError(f"--ranks must be at least 1, not {self.ranks}")
        if self.fewest is not None and not 1 <= self.fewest <= self.ranks:
            raise OptionError(f"--ranks MIN:MAX must be 1 or more, smaller first: {self.fewest}:{self.ranks}")
        if self.fewest not in (None, self.ranks) and not (self.restarts and self.resume):
            raise OptionError(
                f"--ranks {self.fewest}:{self.ranks} goes on with fewer ranks after a restart, so it needs "
                "--max-restarts N and --resume FOLDER"
            )
        if self.restarts < 0:
            raise OptionError(f"--max-restarts must be 0 or more, not {self.restarts}")
        if not self.grace > 0:
            raise OptionError(f"--grace must be a positive number of seconds, not {self.grace:g}")
        if self.threads is not None and self.threads < 1:
            raise OptionError(f"--threads must be at least 1, not {self.threads}")
        if self.timeout is not None and self.timeout <= 0:
            raise OptionError(f"--timeout must be a positive number of seconds, not {self.timeout:g}")
        if self.stuck_after is not None and not 0 < self.stuck_after < 1e8:
            raise OptionError(f"--stuck-after must be a positive number of seconds, not {self.stuck_after:g}")


def rank_range(text: str) -> tuple[int, int]:
    """The fewest and the most ranks of `4` or `1:4`."""
    least, colon, most = text.partition(":")
    try:
        return int(least), int(most if colon else least)
    except ValueError:
        raise OptionError(f"--ranks takes a number, or MIN:MAX as in 1:4, not {text!r}") from None


def shared_environment(job: LaunchJob, environ: Mapping[str, str], cores: int) -> dict[str, str]:
    """What every rank gets, to be set before torch is imported, since OpenMP reads it when it is loaded.

    Without a limit each rank would start a thread per core, and the ranks would fight over them.
    """
    if job.threads is not None:
        return {"OMP_NUM_THREADS": str(job.threads)}
    if threads_in(environ) is not None:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, cores // job.ranks))}


def threads_in(environ: Mapping[str, str]) -> int | None:
    """The limit that OMP_NUM_THREADS sets: of a list (`4,2`, for nested regions) the first number. None where
    it says nothing, which OpenMP passes over as well: empty, 0, a word, more than an int of C."""
    first = environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    said = int(first) if first.isdecimal() and len(first) <= MOST_DIGITS else 0
    return said if 0 < said < 2**31 else None


def rank_environment(job: LaunchJob, rank: int, address: str, port: int, attempt: int = 0) -> dict[str, str]:
    """The variables that torchrun would set, so that a script cannot tell the difference.

    The launcher serves the store itself, on the port it got, and so says that every rank is a client of it.
    """
    own = {} if job.resume is None else {RESUME: str(job.resume.absolute())}
    if job.stuck_after is not None:
        own[STUCK_AFTER] = str(job.stuck_after)
    return own | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.ranks),
        "LOCAL_WORLD_SIZE": str(job.ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(job.restarts),
        STARTED: str(port),
    }
