"""What one rank of `links.py` does: join over its shaped link, then train with one system after another.

Started inside a namespace as `python links_rank.py '<assignment as JSON>'`; leaves its numbers in a file.
"""

from __future__ import annotations

import gc
import itertools
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

WINDOW = 3  # of Adaptive: steps that it measures of each choice
AGREED = 8  # windows of which ranks agree once, when it has settled
APART = (8, 32)  # local steps
ROUNDS = 3  # that a system is timed for, at least
PATIENCE = 600  # steps within which Adaptive must have settled
ADAPTIVE = "zs-0-adaptive"
BUCKETS = 6  # of a model, so that there is something to overlap
PORT = 29500  # of a namespace that has no other processes


@dataclass(frozen=True)
class Task:
    """What the driver tells a rank."""

    model: str
    systems: list[str]
    rank: int
    world: int
    master: str
    seconds: float  # to time each visit of a system for, at least ROUNDS rounds
    answer: str = ""
    per_node: int = 1
    visits: int = 1  # of each system, all of them between two of one: the machine may be shared


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
    """How a system is made, and how many steps belong together. One that `settles` is timed from then on, in
    the rounds of what it settled upon; the steps before are said in its note."""

    make: Callable[..., object]
    round: int = 1
    warmup: int = 1
    exact: bool = True
    settles: bool = False


def entries(bucket: int = 1 << 20) -> dict[str, Entry]:
    """All systems by name: the peers, every stage, every policy, and every codec."""
    from systems import SYSTEMS, zeroshard

    import zeroshard as zs

    def ours(stage: int, **options: object) -> Callable[..., object]:
        return partial(zeroshard, stage=stage, transport="gloo", bucket_bytes=bucket, whole=False, **options)

    found = {name: Entry(SYSTEMS[name]) for name in ("ddp", "fsdp2-zero2", "fsdp2-zero3", "ps")}
    found |= {f"zs-{stage}": Entry(ours(stage)) for stage in range(4)}
    int8, topk, onebit = zs.Int8(), zs.TopK(ratio=0.01), zs.OneBit(warmup_steps=1)
    local = {steps: zs.Local(steps=steps) for steps in APART}
    coded = {
        "zs-0-int8": ours(0, compress=int8),
        "zs-0-int4": ours(0, compress=zs.Int4()),
        "zs-0-onebit": ours(0, compress=onebit),
        "zs-0-topk": ours(0, compress=topk),
        "zs-0-lowrank": ours(0, compress=zs.LowRank(rank=4)),
        "zs-2-bf16": ours(2, compress=zs.Cast("bfloat16"), gather=zs.Cast("bfloat16")),
        "zs-2-int8": ours(2, compress=int8, gather=int8),
        "zs-2-topk": ours(2, compress=topk, gather=int8),
        "zs-3-int8": ours(3, compress=int8, gather=int8),
        "zs-2-delayed": ours(2, sync=zs.Delayed()),
        "zs-2-delayed-int8": ours(2, sync=zs.Delayed(), compress=int8, gather=int8),
    }
    found |= {name: Entry(make, exact=False) for name, make in coded.items()}
    for steps, policy in local.items():
        found[f"zs-0-local{steps}"] = Entry(ours(0, sync=policy), steps, exact=False)
    coded_choices = [zs.EveryStep(compress=codec) for codec in (int8, onebit, topk)]
    choices = [zs.EveryStep(), *coded_choices, *local.values()]
    adaptive = zs.Adaptive(choices=choices, window=WINDOW, unrest=1e9)
    found[ADAPTIVE] = Entry(ours(0, sync=adaptive), settles=True, exact=False)
    return found


def across_nodes(bucket: int = 1 << 20) -> dict[str, Entry]:
    """For several ranks a node: stage 3 as it is, and with rows of other nodes kept inside the node."""
    from systems import SYSTEMS, zeroshard

    import zeroshard as zs

    def ours(**options: object) -> Callable[..., object]:
        return partial(zeroshard, stage=3, bucket_bytes=bucket, ranks_per_node=2, whole=False, **options)

    cached = partial(ours, transport="nodes", node_cache=True)
    return {
        "ddp": Entry(SYSTEMS["ddp"]),
        "fsdp2-zero3": Entry(SYSTEMS["fsdp2-zero3"]),
        "zs-3": Entry(ours(transport="gloo")),
        "zs-3-cache": Entry(cached()),
        "zs-3-cache-gather8": Entry(cached(gather=zs.Int8()), exact=False),
        "zs-3-cache-int8": Entry(cached(gather=zs.Int8(), compress=zs.Int8()), exact=False),
        "zs-3-int8": Entry(ours(transport="gloo", compress=zs.Int8(), gather=zs.Int8()), exact=False),
    }


def transmitted() -> int:
    """Bytes that this namespace's link has sent since it was made."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    raise LookupError("no eth0 here: start this through links.py")


def settled(stats: Any) -> str:
    """On what Adaptive has settled and what looking for it took; empty before."""
    lines = [line for line in stats.switches if "settled on" in line]
    return lines[-1].partition(": ")[2].partition(";")[0] if lines else ""


def measure(task: Task, entry: Entry) -> Timing:
    """Train, and time whole rounds of steps."""
    import torch
    import torch.distributed as dist
    from models import WORKLOADS

    workload = WORKLOADS[task.model]
    batch = workload.batches(task.rank)
    trainer = entry.make(workload.build())
    losses = [float(trainer.step(batch(index))) for index in range(entry.warmup)]
    while entry.settles and not settled(trainer.stats()) and len(losses) < PATIENCE:
        losses.append(float(trainer.step(batch(len(losses)))))
    dist.barrier()
    before, sent, skipped = trainer.stats(), transmitted(), len(losses)
    length = entry.round
    if entry.settles and (apart := re.search(r"Local\(steps=(\d+)", settled(before))):
        length = int(apart[1])

    def rounds(count: int) -> list[float]:
        batches = [batch(len(losses) + index) for index in range(count * length)]
        marks = [time.perf_counter()]
        for number, ready in enumerate(batches, 1):
            losses.append(float(trainer.step(ready)))
            if number % length == 0:
                marks.append(time.perf_counter())
        return [after - before for before, after in itertools.pairwise(marks)]

    lasted = rounds(1)
    one = torch.tensor(lasted)
    dist.all_reduce(one, op=dist.ReduceOp.MAX)
    lasted += rounds(max(min(int(task.seconds / float(one)), 40 // length), ROUNDS - 1))
    sent, steps, took = transmitted() - sent, len(losses) - skipped, sum(lasted)
    # The machine may be shared, and others can only make a round longer: the first quartile of them.
    lasted.sort()
    step, waited, note = lasted[len(lasted) // 4] / length, -1.0, ""
    if before is not None:
        spent = trainer.stats() - before
        waited = sum(spent.waited.values()) / took
        note = settled(trainer.stats())
        if entry.settles and length < AGREED * WINDOW:  # else every round has an agreement in it
            # Few rounds have one, and the quartile would leave it out.
            step += spent.waited.get("agree", 0.0) / steps
    dist.barrier()
    trainer.close()
    return Timing(1e3 * step, steps, sent / steps, waited, losses[:3], note)


def main(text: str) -> None:
    """All systems of the task, in its order."""
    import torch
    import torch.distributed as dist
    from models import WORKLOADS

    task = Task(**json.loads(text))
    torch.set_num_threads(1)
    bucket = 4 * int(WORKLOADS[task.model].describe()["parameters"]) // BUCKETS  # type: ignore[call-overload]
    known = {**entries(bucket), **(across_nodes(bucket) if task.per_node > 1 else {})}
    answers: dict[str, list[dict[str, object]]] = {}
    for number, system in enumerate(task.systems * task.visits):
        store = dist.TCPStore(task.master, PORT + number, task.world, is_master=task.rank == 0)
        dist.init_process_group("gloo", store=store, rank=task.rank, world_size=task.world)
        answers.setdefault(system, []).append(asdict(measure(task, known[system])))
        dist.barrier()
        dist.destroy_process_group()
        del store
        gc.collect()
        Path(task.answer).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1])
