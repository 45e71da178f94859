"""Joins the ranks that a launcher announced: reads its environment and initialises `torch.distributed`.

It knows the variables of torchrun and `zeroshard run`, Open MPI and Slurm. A launcher that announces
everything wins over one that announces a part, since people export `WORLD_SIZE` in the batch scripts of other
launchers. If none is complete but one has begun, that is an error: training alone, on a part of the data, is
not what was meant."""

from __future__ import annotations

import atexit
import os
import platform
import re
import socket
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from zeroshard.errors import OptionError, RankError

from .job import RESUME, STARTED, STUCK_AFTER
from .outcome import rank_list

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store


LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Below the ports that kernels hand out, above those that services use.
_FIRST_PORT, _PORTS = 15_000, 15_000


@dataclass(frozen=True)
class Announcement:
    """The group that the environment announces, and this process's place in it.

    `served` says that the launcher serves the store, so that rank 0 must not; `attempt` counts elastic
    restarts; `one_host`: all ranks are said to be on this host.
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
    one_host: bool = False

    @property
    def meeting_point(self) -> str:
        """The address of the store: loopback where ranks of one host serve it themselves."""
        return LOOPBACK[0] if self.one_host and not self.served else self.address


@dataclass(frozen=True)
class _Incomplete:
    """A launcher that announced something, and what it did not."""

    source: str
    seen: str
    missing: tuple[str, ...]
    advice: str


def announcement_in(environ: Mapping[str, str]) -> Announcement | None:
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
    alone = (rank, world) if address in LOOPBACK else (0, 1)
    # They may also call rank 0's own host localhost.
    sure = "LOCAL_WORLD_SIZE" in environ or "KUBERNETES_SERVICE_HOST" not in environ
    local_world = _integer(environ, "LOCAL_WORLD_SIZE", alone[1])
    return Announcement(
        source=_torchruns_like(environ),
        rank=rank,
        world=world,
        local_rank=_integer(environ, "LOCAL_RANK", alone[0]),
        local_world=local_world,
        address=address,
        port=_integer(environ, "MASTER_PORT"),
        served=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_integer(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        one_host=sure and local_world == world,
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
        address=environ.get("MASTER_ADDR", LOOPBACK[0]),
        port=_integer(environ, "MASTER_PORT", port_of(job or "")),
        one_host=one_host,
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
    local_world = tasks_on_node(per_node, _integer(environ, "SLURM_NODEID", 0))
    return Announcement(
        source="Slurm",
        rank=_integer(environ, "SLURM_PROCID"),
        world=world,
        local_rank=_integer(environ, "SLURM_LOCALID"),
        local_world=local_world,
        address=environ.get("MASTER_ADDR") or first_host(nodes or ""),
        port=_integer(environ, "MASTER_PORT", port_of(f"{job}.{step}")),
        one_host=local_world == world,
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


_CPU = "cpu"
_PATIENCE = timedelta(minutes=5)
_LONGEST_NAP = 0.25
_FOREVER = 1e8  # what clocks and locks take
_WAIT = 600.0  # seconds that a rank waits for another


def announced() -> Announcement | None:
    """The group that this process's environment announces, or `None`."""
    return announcement_in(os.environ)


def resume_folder() -> Path | None:
    """The folder that `zeroshard run --resume` named, or `None`."""
    folder = os.environ.get(RESUME)
    return Path(folder) if folder else None


def patience(timeout: object = None) -> float:
    """Seconds that a rank waits for another: as the program says, or `zeroshard run --stuck-after`."""
    if timeout is None:
        said = os.environ.get(STUCK_AFTER, "")
        try:
            timeout = float(said or _WAIT)
        except ValueError:
            timeout = said
    if not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or not 0 < timeout < _FOREVER:
        raise OptionError(
            f"timeout={timeout!r}: pass the seconds that a rank waits for another, more than 0."
        )
    return float(timeout)


def join(device: torch.device | str | None = None, patience: timedelta = _PATIENCE) -> bool:
    """Initialises the default process group if the environment announces one and there is none yet.

    Returns whether it did. With CUDA, this rank's device becomes the current one. The backend is NCCL where
    every rank has a GPU to itself, and gloo otherwise; since ranks must not decide that alone, they compare
    devices first.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return False
    group = announced()
    if group is None:
        return False
    if not dist.is_available():
        raise OptionError(
            f"{group.source} announces {group.world} ranks, but this torch has no torch.distributed"
        )
    chosen = choose_device(group, device)
    store = meet(group, chosen, patience)
    backend = backend_for([store.get(f"device/{rank}").decode() for rank in range(group.world)])
    listen(group, store, patience)
    bound = chosen if backend == "nccl" else None
    dist.init_process_group(backend, store=store, rank=group.rank, world_size=group.world, device_id=bound)
    atexit.register(_leave, os.getpid())
    return True


def choose_device(group: Announcement, device: torch.device | str | None) -> torch.device:
    """The device of this rank: the one asked for, or the GPU of its local rank, or the CPU."""
    import torch

    asked = torch.device(device) if device is not None else None
    if asked is not None and asked.type != "cuda":
        return asked
    if not torch.cuda.is_available():
        if asked is not None:
            raise OptionError(
                f"device={str(device)!r} was asked for, but torch sees no GPU on {platform.node()}"
            )
        return torch.device(_CPU)
    index = asked.index if asked is not None and asked.index is not None else None
    if index is None:
        index = group.local_rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def meet(group: Announcement, device: torch.device, patience: timedelta) -> Store:
    """Connects to the store and waits until all ranks have; if some do not come, says which.

    The keys carry the attempt: after an elastic restart the store may be the old one, with the dead ranks'
    addresses.
    """
    from torch.distributed import DistNetworkError, DistStoreError, TCPStore

    hosts = group.rank == 0 and not group.served
    where = f"{group.meeting_point}:{group.port}"
    try:
        connection = TCPStore(
            group.meeting_point,
            group.port,
            group.world,
            hosts,
            patience,
            wait_for_workers=False,
            master_listen_fd=listener_of(group).detach() if hosts else None,
        )
    except (OSError, DistNetworkError, DistStoreError) as error:
        what = f"cannot serve the store at {where}" if hosts else f"found no store at {where}"
        raise RankError(
            f"rank {group.rank} of {group.world} ({group.source}) {what}: {str(error).splitlines()[0]}. "
            f"{'Is the port taken?' if hosts else 'Did rank 0 start, and can this host reach it?'}"
        ) from error
    store = _part(connection, group.attempt)
    store.set(f"device/{group.rank}", identity(device))
    if store.add("arrived", 1) == group.world:
        store.set("complete", "")
    begun = time.monotonic()
    # It asks instead of waiting in the store, which writes a warning whenever such a wait is over.
    while not store.check(["complete"]):
        waited = time.monotonic() - begun
        time.sleep(min(1e-3 + waited / 20, _LONGEST_NAP))
        if waited < patience.total_seconds() and not store.check(["ended"]):
            continue
        missing = [rank for rank in range(group.world) if not store.check([f"device/{rank}"])]
        ended = [rank for rank in missing if store.check([f"ended/{rank}"])]
        who = f"{rank_list(ended or missing)} of {group.world} ({group.source})"
        if ended:
            raise RankError(
                f"{who} came to the end of the script without `shard`, where rank {group.rank} waits. Every "
                "rank must call `shard`; check branches and early exits that depend on the rank."
            )
        if missing and waited >= patience.total_seconds():
            raise RankError(
                f"{who} did not join within {patience.total_seconds():.0f} s. "
                "They did not start, ended before `shard`, or are still on their way: look at their output."
            )
    return store


def listen(group: Announcement, store: Store, patience: timedelta) -> None:
    """Torch's groups for gloo listen where the other ranks can reach this one, and nobody else where all are
    on one host."""
    from zeroshard.comm.address import say_to_torch, settle
    from zeroshard.comm.rendezvous import Rendezvous

    say_to_torch(settle(Rendezvous(store, group.rank, group.world, patience.total_seconds())))


def listener_of(group: Announcement) -> socket.socket:
    """The socket on which rank 0 serves the store: on loopback where all ranks are on this host, else at the
    address that MASTER_ADDR names. Where that is not one of this host's, or is loopback while others come
    from elsewhere, at all of them."""
    from zeroshard.comm.address import own_address

    backlog = max(128, group.world)
    if group.one_host:
        return socket.create_server((group.meeting_point, group.port), backlog=backlog)
    for family, _, _, _, place in socket.getaddrinfo(group.address, group.port, type=socket.SOCK_STREAM):
        address = str(place[0])
        if not ip_address(address.partition("%")[0]).is_loopback and own_address(address) == address:
            return socket.create_server((address, group.port), family=family, backlog=backlog)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", group.port), family=family, dualstack_ipv6=both, backlog=backlog)


def tell_end(connection: Store, attempt: int, rank: int) -> None:
    """The launcher saw a rank end well; if it never came to `shard`, the others shall not wait for it."""
    store = _part(connection, attempt)
    for key in (f"ended/{rank}", "ended"):
        store.set(key, "")


def _part(connection: Store, attempt: int) -> Store:
    from torch.distributed import PrefixStore

    return PrefixStore(f"zeroshard/attempt-{attempt}", connection)


def identity(device: torch.device) -> str:
    """What tells a rank's device from all others, also where each rank sees only its own as number 0."""
    import torch

    if device.type != "cuda":
        return _CPU
    return f"{platform.node()}/{torch.cuda.get_device_properties(device).uuid}"


def backend_for(devices: Sequence[str]) -> str:
    """NCCL if every rank has a GPU that no other has: it refuses two ranks on one."""
    return "nccl" if _CPU not in devices and len(set(devices)) == len(devices) else "gloo"


def _leave(rank: int) -> None:
    """Closes the group at exit, as NCCL asks; not in a failing rank, whose peers may be stuck, nor in a child
    that the `rank`, a process number, has forked."""
    import torch.distributed as dist

    if os.getpid() == rank and dist.is_initialized() and getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()
