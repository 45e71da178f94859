"""What one rank of `links.py` does: join over its shaped link, then train with one system after another.

Started inside a namespace as `python links_rank.py '<assignment as JSON>'`; leaves its numbers in a file.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

WINDOW, TRIES = 3, 4  # of Adaptive: steps a window, and windows until it has tried everything and settled
LOCAL = 8
BUCKET = 1 << 20  # of a small model, so that there is something to overlap
PORT = 29500  # of a namespace that has no other processes


@dataclass(frozen=True)
class Task:
    """What the driver tells a rank."""

    model: str
    systems: list[str]
    rank: int
    world: int
    master: str
    seconds: float  # to time each system for, at least three steps
    answer: str


@dataclass(frozen=True)
class Timing:
    """One system on one rank. Bytes are those of the network interface, a step."""

    step_ms: float
    steps: int
    sent: float
    waited: float  # share of the time; -1 where the system does not say
    losses: list[float]
    note: str = ""


@dataclass(frozen=True)
class Entry:
    """How a system is made, and how many steps belong together."""

    make: Callable[..., object]
    round: int = 1
    warmup: int = 2
    exact: bool = True


def entries() -> dict[str, Entry]:
    """All systems by name: the peers, every stage, every policy, and every codec that there is."""
    from systems import SYSTEMS, zeroshard

    import zeroshard as zs

    def ours(stage: int, **options: object) -> Callable[..., object]:
        return partial(zeroshard, stage=stage, transport="gloo", bucket_bytes=BUCKET, **options)

    found = {name: Entry(SYSTEMS[name]) for name in ("ddp", "fsdp2-zero2", "fsdp2-zero3", "ps")}
    found |= {f"zs-{stage}": Entry(ours(stage)) for stage in range(4)}
    found["zs-2-delayed"] = Entry(ours(2, sync=zs.Delayed()), exact=False)
    local = zs.Local(steps=LOCAL)
    found[f"zs-0-local{LOCAL}"] = Entry(ours(0, sync=local), LOCAL, LOCAL, exact=False)
    choices = [zs.EveryStep(), zs.Local(steps=2), local]
    trial = TRIES * max(WINDOW + 1, LOCAL)
    adaptive = zs.Adaptive(choices=choices, window=WINDOW)
    found["zs-0-adaptive"] = Entry(ours(0, sync=adaptive), LOCAL, trial, exact=False)
    if "compress" in {field.name for field in dataclasses.fields(zs.Options)}:
        made = {
            "bf16": lambda: zs.Cast("bfloat16"),  # type: ignore[attr-defined]
            "int8": lambda: zs.Int8(),  # type: ignore[attr-defined]
            "int4": lambda: zs.Int4(),  # type: ignore[attr-defined]
            "onebit": lambda: zs.OneBit(warmup_steps=1),  # type: ignore[attr-defined]
            "topk": lambda: zs.TopK(ratio=0.01),  # type: ignore[attr-defined]
            "lowrank": lambda: zs.LowRank(rank=4),  # type: ignore[attr-defined]
        }
        for name, make in made.items():
            for stage in (2, 3):
                found[f"zs-{stage}-{name}"] = Entry(ours(stage, compress=make()), exact=False)
    return found


def transmitted() -> int:
    """Bytes that this namespace's link has sent since it was made."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    raise LookupError("no eth0 here: start this through links.py")


def measure(task: Task, entry: Entry) -> Timing:
    """Train, and time whole rounds of steps."""
    import torch
    import torch.distributed as dist
    from models import WORKLOADS

    workload = WORKLOADS[task.model]
    batch = workload.batches(task.rank)
    trainer = entry.make(workload.build())
    losses = [float(trainer.step(batch(index))) for index in range(entry.warmup)]
    began = time.perf_counter()
    losses += [float(trainer.step(batch(len(losses) + index))) for index in range(entry.round)]
    one = torch.tensor([(time.perf_counter() - began) / entry.round])
    dist.all_reduce(one, op=dist.ReduceOp.MAX)
    rounds = max(-(-3 // entry.round), min(int(task.seconds / float(one) / entry.round), 40 // entry.round))
    steps = rounds * entry.round
    batches = [batch(len(losses) + index) for index in range(steps)]
    before, sent = trainer.stats(), transmitted()
    dist.barrier()
    began = time.perf_counter()
    for ready in batches:
        losses.append(float(trainer.step(ready)))
    took = time.perf_counter() - began
    sent = transmitted() - sent
    waited, note = -1.0, ""
    if before is not None:
        now = trainer.stats()
        waited = sum((now - before).waited.values()) / took
        note = now.sync if now.switches else ""
    dist.barrier()
    trainer.close()
    return Timing(1e3 * took / steps, steps, sent / steps, waited, losses[:3], note)


def main(text: str) -> None:
    """All systems of the task, in its order."""
    import torch
    import torch.distributed as dist

    task = Task(**json.loads(text))
    torch.set_num_threads(1)
    known, answers = entries(), {}
    for number, system in enumerate(task.systems):
        store = dist.TCPStore(task.master, PORT + number, task.world, is_master=task.rank == 0)
        dist.init_process_group("gloo", store=store, rank=task.rank, world_size=task.world)
        answers[system] = asdict(measure(task, known[system]))
        dist.barrier()
        dist.destroy_process_group()
        del store
        gc.collect()
        Path(task.answer).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1])
