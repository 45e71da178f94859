"""What one process of a measured pair does: join, build, warm up, time, and leave its numbers in a file.

Started by `pairs.py`, once per rank, system and repeat: `python rank.py '<assignment as JSON>'`. A rank that
was not told how many steps to time waits for turns: each line of its input is a number of steps, and its end
is the end.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

COMPARED_LOSSES = 5
SAID = b"."  # when a warm-up or a turn is over


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
    says: int  # a pipe to the driver


@dataclass(frozen=True)
class Measurement:
    """What a rank answers. Times in milliseconds, except `startup_s`."""

    startup_s: float
    step_ms: float
    mean_ms: float
    steps_ms: list[float]
    turns_ms: list[float]  # the mean step of each turn
    turns_busy_ms: list[float]  # of that, processor time of all threads
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


class Clock:
    """Times steps of a trainer, some at a time, as one window without a barrier inside.

    A barrier before every step would hide what a system leaves unfinished at the end of one (a gather put off
    to the next forward, a prefetch), so the ranks meet once, before the window.
    """

    def __init__(
        self, step: Callable[[Any], Any], batch: Callable[[int], Any], meet: Callable[[], object]
    ) -> None:
        self._step, self._batch, self._meet = step, batch, meet
        self.steps_ms: list[float] = []
        self.turns_ms: list[float] = []
        self.turns_busy_ms: list[float] = []
        self.losses: list[float] = []

    def warm_up(self, steps: int = 1) -> None:
        """Steps that are not timed."""
        for _ in range(steps):
            self.losses.append(float(self._step(self._batch(len(self.losses)))))

    def time(self, steps: int) -> None:
        """Steps that are."""
        batches = [self._batch(len(self.losses) + index) for index in range(steps)]
        self._meet()
        times, busy = [time.perf_counter()], time.process_time()
        for ready in batches:
            self.losses.append(float(self._step(ready)))
            times.append(time.perf_counter())
        self.turns_busy_ms.append(1e3 * (time.process_time() - busy) / steps)
        self.steps_ms += [1e3 * (end - begin) for begin, end in pairwise(times)]
        self.turns_ms.append(1e3 * (times[-1] - times[0]) / steps)

    @property
    def cpu_share(self) -> float:
        return sum(self.turns_busy_ms) / sum(self.turns_ms)


def measure(assignment: Assignment) -> Measurement:
    """Train, and time the steps after the warm-up."""
    import torch

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
    from models import WORKLOADS
    from systems import SYSTEMS
    from torch import distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", assignment.port, assignment.world, is_master=False)
    dist.init_process_group("gloo", store=store, rank=assignment.rank, world_size=assignment.world)
    workload = WORKLOADS[assignment.model]
    batch = workload.batches(assignment.rank)
    trainer = SYSTEMS[assignment.system](workload.build())

    clock = Clock(trainer.step, batch, dist.barrier)
    clock.warm_up()
    startup_s = time.monotonic() - assignment.started
    clock.warm_up(assignment.warmup - 1)
    if assignment.steps:
        clock.time(assignment.steps)
    else:
        os.write(assignment.says, SAID)
        for line in sys.stdin:
            clock.warm_up()
            clock.time(int(line))
            os.write(assignment.says, SAID)

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
        step_ms=statistics.median(clock.steps_ms if assignment.steps else clock.turns_ms),
        mean_ms=statistics.fmean(clock.steps_ms),
        steps_ms=clock.steps_ms,
        turns_ms=[] if assignment.steps else clock.turns_ms,
        turns_busy_ms=clock.turns_busy_ms,
        cpu_share=clock.cpu_share,
        peak_rss=proc_bytes("status", "VmHWM"),
        pss=pss,
        losses=clock.losses[:COMPARED_LOSSES],
    )


if __name__ == "__main__":
    told = Assignment(**json.loads(sys.argv[1]))
    Path(told.answer).write_text(json.dumps(asdict(measure(told))))
