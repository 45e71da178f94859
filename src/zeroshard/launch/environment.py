"""Meets the other ranks: initialises `torch.distributed` from what the environment announces."""

from __future__ import annotations

import atexit
import os
import platform
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from zeroshard.errors import OptionError, RankError

from . import announce
from .announce import Announcement
from .job import RESUME
from .outcome import rank_list

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

__all__ = ["Announcement", "announced", "join", "resume_folder", "tell_end"]

_CPU = "cpu"
_PATIENCE = timedelta(minutes=5)
_LONGEST_NAP = 0.25


def announced() -> Announcement | None:
    """The group that this process's environment announces, or `None`."""
    return announce.announced(os.environ)


def resume_folder() -> Path | None:
    """The folder that `zeroshard run --resume` named, or `None`."""
    folder = os.environ.get(RESUME)
    return Path(folder) if folder else None


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
    where = f"{group.address}:{group.port}"
    try:
        connection = TCPStore(group.address, group.port, group.world, hosts, patience, wait_for_workers=False)
    except (DistNetworkError, DistStoreError) as error:
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
