"""What `zeroshard run` is asked for, and the environment it gives to the ranks. Pure: it starts nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zeroshard.errors import OptionError

# Imported once by the launcher, before the ranks are forked from it. Every training script needs all of them:
# DTensor holds the homes, and a torch optimizer imports dynamo at its first `zero_grad`.
PRELOAD = ("torch", "torch.distributed", "torch.distributed.tensor", "torch._dynamo")


@dataclass(frozen=True)
class Job:
    """A script or module, and how many ranks of it to run on this host."""

    ranks: int
    target: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    threads: int | None = None
    timeout: float | None = None
    log_dir: Path | None = None
    preload: tuple[str, ...] = PRELOAD
    store: bool = True

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise OptionError(f"--ranks must be at least 1, not {self.ranks}")
        if self.threads is not None and self.threads < 1:
            raise OptionError(f"--threads must be at least 1, not {self.threads}")
        if self.timeout is not None and self.timeout <= 0:
            raise OptionError(f"--timeout must be a positive number of seconds, not {self.timeout:g}")


def shared_environment(job: Job, environ: Mapping[str, str], cores: int) -> dict[str, str]:
    """What every rank gets, to be set before torch is imported, since OpenMP reads it when it is loaded.

    Without a limit each rank would start a thread per core, and the ranks would fight over them.
    """
    if job.threads is not None:
        return {"OMP_NUM_THREADS": str(job.threads)}
    if "OMP_NUM_THREADS" in environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, cores // job.ranks))}


def rank_environment(job: Job, rank: int, address: str, port: int) -> dict[str, str]:
    """The variables that torchrun would set, so that a script cannot tell the difference.

    The launcher serves the store itself, on the port it got, and so says that every rank is a client of it.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.ranks),
        "LOCAL_WORLD_SIZE": str(job.ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
