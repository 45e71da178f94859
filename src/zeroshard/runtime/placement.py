"""Decides for one `shard()` where every unit rests, the same on all ranks, and says so."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace

from torch import nn
from torch.optim import Optimizer

from zeroshard.comm import Transport
from zeroshard.layout.memory import MemoryModel, heaviest
from zeroshard.layout.placement import Placement
from zeroshard.options import Offload, Options
from zeroshard.params.units import find_units
from zeroshard.planner.signatures import blocks_of, rules_of

from .plan_guard import PlanGuard

log = logging.getLogger("zeroshard")
SHARE = 0.9  # of the host memory that is free


def resting(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    options: Options,
    transport: Transport,
    guard: PlanGuard | None = None,
) -> Placement:
    """All ranks call it. With ``auto`` the sizes of the rank that holds most decide for all, unless a plan
    has decided already. Rank 0 shows what was decided."""
    offload = options.offload
    planned = guard.plan.chosen.placement if guard is not None else None
    if planned is not None:
        return planned
    if offload is None or not offload.automatic:
        labels = [unit.label for unit in find_units(model, options.units)]
        if offload is None:
            return Placement.uniform(labels, "device")
        assert offload.optimizer != "auto"
        assert offload.parameters != "auto"
        placement = Placement.uniform(labels, offload.optimizer, offload.parameters)
    else:
        limits = replace(offload, host_bytes=_host_bytes(offload, transport))
        units, rules = blocks_of(model, optimizers, options.units), rules_of(optimizers)
        setup = MemoryModel(units, replace(options, offload=limits), transport.size, rules)
        placement = heaviest(setup).places
        if transport.rank == 0:
            print(placement.table(), file=sys.stderr, flush=True)
    if transport.rank == 0:
        log.info("%s", placement.line())
    return placement


def _host_bytes(offload: Offload, transport: Transport) -> int:
    """What a rank may take of the host: what was said, or its share of what is free where least is."""
    machines = transport.exchange(socket.gethostname(), "shard(offload=...)")
    if offload.host_bytes is not None:
        return offload.host_bytes
    mine = int(SHARE * free_host_bytes()) // max(machines.count(socket.gethostname()), 1)
    return -int(transport.max([-float(mine)])[0])


def free_host_bytes() -> int:
    """Memory that this process could still take without swapping: of the machine, or of its control group."""
    with open("/proc/meminfo") as file:
        told = dict(line.split(":", 1) for line in file)
    free = int(told["MemAvailable"].split()[0]) * 1024
    folder = "/sys/fs/cgroup"
    try:
        with (
            open(os.path.join(folder, "memory.max")) as limit,
            open(os.path.join(folder, "memory.current")) as current,
        ):
            text = limit.read().strip()
            if text != "max":
                free = min(free, max(int(text) - int(current.read()), 0))
    except (OSError, ValueError):
        pass
    return free
