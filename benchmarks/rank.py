"""What one process of a measured pair does: join, build, warm up, time, and leave its numbers in a file.

Started by `compare.py`, once per rank, system and repeat: `python rank.py '<assignment as JSON>'`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

COMPARED_LOSSES = 5


@dataclass(frozen=True)
class Assignment:
    """What the driver tells a rank. `started` is on the host's monotonic clock, which its processes share."""

    model: str
    system: str
    rank: int
    world: int
    port: int
    warmup: int
    steps: int
    started: float
    answer: str


@dataclass(frozen=True)
class Measurement:
    """What a rank answers. Times in milliseconds, except `startup_s`."""

    startup_s: float
    step_ms: float
    mean_ms: float
    steps_ms: list[float]
    cpu_share: float
    peak_rss: int
    pss: int
    losses: list[float]


def proc_bytes(file: str, field: str) -> int:
    """A `field: N kB` line of a file of /proc/self, in bytes."""
    for line in Path("/proc/self", file).read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/{file} has no line {field!r}: memory is measured on Linux only")


def measure(assignment: Assignment) -> Measurement:
    """Train, and time the steps after the warm-up as one window without a barrier inside.

    A barrier before every step would hide what a system leaves unfinished at the end of one (a gather put off
    to the next forward, a prefetch), so the ranks meet once, before the window.
    """
    import torch
    from models import WORKLOADS
    from systems import SYSTEMS
    from torch import distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", assignment.port, assignment.world, is_master=False)
    dist.init_process_group("gloo", store=store, rank=assignment.rank, world_size=assignment.world)
    workload = WORKLOADS[assignment.model]
    batch = workload.batches(assignment.rank)
    trainer = SYSTEMS[assignment.system](workload.build())

    losses = [float(trainer.step(batch(0)))]
    startup_s = time.monotonic() - assignment.started
    losses += [float(trainer.step(batch(index))) for index in range(1, assignment.warmup)]
    batches = [batch(assignment.warmup + index) for index in range(assignment.steps)]
    dist.barrier()
    times, cpu = [time.perf_counter()], time.process_time()
    for ready in batches:
        losses.append(float(trainer.step(ready)))
        times.append(time.perf_counter())
    cpu = time.process_time() - cpu
    steps_ms = [1e3 * (end - begin) for begin, end in pairwise(times)]

    # Ranks map one another's pages under shared memory, so RSS counts those in every rank; PSS divides them,
    # but only while all ranks live: hence the barriers around it. VmHWM and not getrusage's maxrss, which a
    # child inherits from the process that forked it.
    dist.barrier()
    pss = proc_bytes("smaps_rollup", "Pss")
    dist.barrier()
    trainer.close()
    dist.destroy_process_group()
    return Measurement(
        startup_s=startup_s,
        step_ms=statistics.median(steps_ms),
        mean_ms=statistics.fmean(steps_ms),
        steps_ms=steps_ms,
        cpu_share=cpu / (times[-1] - times[0]),
        peak_rss=proc_bytes("status", "VmHWM"),
        pss=pss,
        losses=losses[:COMPARED_LOSSES],
    )


if __name__ == "__main__":
    told = Assignment(**json.loads(sys.argv[1]))
    Path(told.answer).write_text(json.dumps(asdict(measure(told))))
