"""What the environment says about a group of ranks: torchrun and `zeroshard run`, Open MPI, Slurm. Pure.

A launcher that announces everything wins over one that announces a part, since people export `WORLD_SIZE` in
the batch scripts of other launchers. If none is complete but one has begun, that is an error: training alone,
on a part of the data, is not what was meant.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from zeroshard.errors import OptionError

from .job import STARTED

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Below the ports that kernels hand out, above those that services use.
_FIRST_PORT, _PORTS = 15_000, 15_000


@dataclass(frozen=True)
class Announcement:
    """The group that the environment announces, and this process's place in it.

    `served` says that the launcher serves the store, so that rank 0 must not; `attempt` counts elastic
    restarts.
    """

    source: str
    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int
    served: bool = False
    attempt: int = 0


@dataclass(frozen=True)
class _Incomplete:
    """A launcher that announced something, and what it did not."""

    source: str
    seen: str
    missing: tuple[str, ...]
    advice: str


def announced(environ: Mapping[str, str]) -> Announcement | None:
    """Reads the environment; `None` means one process on its own."""
    readings = [read(environ) for read in (_torchrun, _open_mpi, _slurm)]
    for reading in readings:
        if isinstance(reading, Announcement):
            return _checked(reading)
    for reading in readings:
        if isinstance(reading, _Incomplete):
            raise OptionError(
                f"the environment announces a group of ranks ({reading.source}: {reading.seen}) but not "
                f"{' and '.join(reading.missing)}. {reading.advice}"
            )
    return None


def _torchrun(environ: Mapping[str, str]) -> Announcement | _Incomplete | None:
    seen = [name for name in ("RANK", "WORLD_SIZE") if name in environ]
    if not seen:
        return None
    missing = tuple(n for n in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if n not in environ)
    if missing and environ.get("WORLD_SIZE") == "1":
        return None
    if missing:
        advice = (
            "Start the script with `zeroshard run --ranks N` or torchrun, or unset what another run left."
        )
        return _Incomplete("torchrun", _shown(environ, seen), missing, advice)
    rank, world = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
    address = environ["MASTER_ADDR"]
    # Kubernetes operators name no local rank and start one process per host.
    alone = (rank, world) if address in _LOOPBACK else (0, 1)
    return Announcement(
        source=_torchruns_like(environ),
        rank=rank,
        world=world,
        local_rank=_integer(environ, "LOCAL_RANK", alone[0]),
        local_world=_integer(environ, "LOCAL_WORLD_SIZE", alone[1]),
        address=address,
        port=_integer(environ, "MASTER_PORT"),
        served=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_integer(environ, "TORCHELASTIC_RESTART_COUNT", 0),
    )


def _torchruns_like(environ: Mapping[str, str]) -> str:
    """Who has set torchrun's variables."""
    if environ.get(STARTED) == environ["MASTER_PORT"]:
        return "zeroshard run"
    return "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "RANK and WORLD_SIZE"


def _open_mpi(environ: Mapping[str, str]) -> Announcement | _Incomplete | None:
    prefix = "OMPI_COMM_WORLD_"
    names = [prefix + name for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    seen = [name for name in names if name in environ]
    if not seen or environ.get(prefix + "SIZE") == "1":
        return None
    missing = [name for name in names if name not in environ]
    one_host = not missing and environ[prefix + "SIZE"] == environ[prefix + "LOCAL_SIZE"]
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    if not one_host and "MASTER_ADDR" not in environ:
        missing.append("MASTER_ADDR")
    if job is None and "MASTER_PORT" not in environ:
        missing.append("MASTER_PORT")
    if missing:
        advice = "Pass them on: mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=<a free port> …"
        return _Incomplete("Open MPI", _shown(environ, seen), tuple(missing), advice)
    return Announcement(
        source="Open MPI",
        rank=_integer(environ, prefix + "RANK"),
        world=_integer(environ, prefix + "SIZE"),
        local_rank=_integer(environ, prefix + "LOCAL_RANK"),
        local_world=_integer(environ, prefix + "LOCAL_SIZE"),
        address=environ.get("MASTER_ADDR", _LOOPBACK[0]),
        port=_integer(environ, "MASTER_PORT", port_of(job or "")),
    )


def _slurm(environ: Mapping[str, str]) -> Announcement | _Incomplete | None:
    # Only srun sets the step's variables. The batch script itself has SLURM_PROCID=0 and SLURM_NTASKS too,
    # and one process there would wait for ever for peers that nobody started.
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID")
    if tasks not in environ or environ[tasks] == "1" or not (step or tasks == "SLURM_STEP_NUM_TASKS"):
        return None
    nodes = (
        environ.get("SLURM_STEP_NODELIST")
        or environ.get("SLURM_JOB_NODELIST")
        or environ.get("SLURM_NODELIST")
    )
    missing = [name for name in ("SLURM_PROCID", "SLURM_LOCALID") if name not in environ]
    if nodes is None and "MASTER_ADDR" not in environ:
        missing.append("SLURM_STEP_NODELIST (or MASTER_ADDR)")
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    if job is None and "MASTER_PORT" not in environ:
        missing.append("SLURM_JOB_ID (or MASTER_PORT)")
    if missing:
        return _Incomplete("Slurm", _shown(environ, [tasks]), tuple(missing), "Start the script with srun.")
    world = _integer(environ, tasks)
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or str(world)
    return Announcement(
        source="Slurm",
        rank=_integer(environ, "SLURM_PROCID"),
        world=world,
        local_rank=_integer(environ, "SLURM_LOCALID"),
        local_world=tasks_on_node(per_node, _integer(environ, "SLURM_NODEID", 0)),
        address=environ.get("MASTER_ADDR") or first_host(nodes or ""),
        port=_integer(environ, "MASTER_PORT", port_of(f"{job}.{step}")),
    )


def first_host(nodes: str) -> str:
    """The first of Slurm's node list: `gpu[003-006,9],login` → `gpu003`."""
    depth, end = 0, len(nodes)
    for position, letter in enumerate(nodes):
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            end = position
            break
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodes[:end])


def tasks_on_node(tasks: str, node: int) -> int:
    """Slurm's tasks per node, run-length coded: the 2nd node of `4(x2),3` has 4."""
    counts: list[int] = []
    for part in tasks.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise OptionError(f"Slurm's tasks per node are {tasks!r}, which is not a list like '4(x2),3'")
        counts += [int(match[1])] * int(match[2] or 1)
    if not 0 <= node < len(counts):
        raise OptionError(
            f"SLURM_NODEID is {node}, but the tasks per node {tasks!r} name {len(counts)} nodes"
        )
    return counts[node]


def port_of(job: str) -> int:
    """A port that all ranks of a job derive alike, where the launcher names none."""
    return _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS


def _checked(found: Announcement) -> Announcement:
    if not (0 <= found.rank < found.world and 0 <= found.local_rank < found.local_world <= found.world):
        raise OptionError(
            f"the environment ({found.source}) places this process at rank {found.rank} of {found.world}, "
            f"{found.local_rank} of {found.local_world} on this host, which cannot be. Ranks count from 0."
        )
    if not 0 < found.port < 65536:
        raise OptionError(f"MASTER_PORT is {found.port}; a port lies between 1 and 65535")
    return found


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise OptionError(f"the environment variable {name} is {text!r}, which is not a number") from None


def _shown(environ: Mapping[str, str], names: list[str]) -> str:
    return ", ".join(f"{name}={environ[name]}" for name in names)
