"""What one rank of `bytes_sent.py` does: train in each way, and read its interface's counter around it.

Started inside a namespace as `python bytes_sent_rank.py '<assignment as JSON>'`; leaves its numbers in a
file.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PORT = 29500  # of a namespace that has no other processes
QUIET = 0.02  # seconds without a packet: what was under way has been counted
LOCAL = 8


@dataclass(frozen=True)
class Task:
    """What the driver tells a rank."""

    ways: list[str]
    rank: int
    world: int
    master: str
    width: int
    blocks: int
    steps: int
    answer: str = ""


@dataclass(frozen=True)
class Way:
    """Options of `shard`, and what is trained: matrices, or an embedding of which `rows` are touched. Without
    `updates`, backward alone runs, so that gradients alone travel."""

    options: dict[str, Any]
    updates: bool = False
    rows: int = 0
    steps: int = 1  # of a round, which is what is counted


def ways() -> dict[str, Way]:
    """All that is counted, by name. The first word of a codec's row is the stage."""
    import zeroshard as zs

    codecs = {
        "fp32": None,
        "bf16": zs.Cast("bfloat16"),
        "int8": zs.Int8(),
        "int4": zs.Int4(),
        "1-bit": zs.OneBit(warmup_steps=0),
        "top-k 1 %": zs.TopK(ratio=0.01),
        "low rank 4": zs.LowRank(rank=4),
    }
    found = {
        f"stage {stage}, {name}": Way({"stage": stage, "compress": codec})
        for stage in (0, 2)
        for name, codec in codecs.items()
    }
    found |= {
        f"{rows} rows{', dense' if codec is None else ''}": Way({"stage": 2, "compress": codec}, rows=rows)
        for rows, codec in [(1000, None), *((rows, zs.Rows()) for rows in (250, 500, 1000, 2000))]
    }
    found["every step"] = Way({"stage": 0}, updates=True)
    found["local"] = Way({"stage": 0, "sync": zs.Local(steps=LOCAL)}, updates=True, steps=LOCAL)
    return found


def node_ways(each: int) -> dict[str, Way]:
    """Stage 3 on nodes of `each` ranks: flat, and with rows of other nodes kept inside the node."""
    import zeroshard as zs

    flat = {"stage": 3, "transport": "gloo", "ranks_per_node": each}
    cached = {"stage": 3, "transport": "nodes", "node_cache": True, "ranks_per_node": each}
    return {
        "flat": Way(flat, updates=True),
        "node cache": Way(cached, updates=True),
        "node cache, int8 gather": Way({**cached, "gather": zs.Int8()}, updates=True),
        "node cache, int8": Way({**cached, "gather": zs.Int8(), "compress": zs.Int8()}, updates=True),
    }


def transmitted() -> int:
    """Bytes that this namespace's interface has sent since it was made."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    raise LookupError("no eth0 here: start this through bytes_sent.py")


def settled() -> int:
    """The counter when nothing has been sent for a while."""
    seen, since = transmitted(), time.monotonic()
    while time.monotonic() - since < QUIET:
        time.sleep(0.005)
        now = transmitted()
        if now != seen:
            seen, since = now, time.monotonic()
    return seen


def matrices(task: Task) -> Any:
    """Residual blocks of two matrices."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(task.width, task.width), nn.Linear(task.width, task.width)

        def forward(self, x: Any) -> Any:
            return x + self.down(torch.tanh(self.up(x)))

    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(task.blocks)))


def train(task: Task, way: Way) -> dict[str, float]:
    """Bytes of a step: by the interface, and by the run's own count (of what leaves a node)."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import zeroshard as zs

    torch.manual_seed(task.rank)
    nodes = "ranks_per_node" in way.options
    if way.rows:
        model: nn.Module = nn.Embedding(16384, 256)
        batch = torch.arange(way.rows) * (16384 // way.rows)  # as many of every owner's
    else:
        model, batch = matrices(task), torch.randn(2, task.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = zs.shard(model, optimizer, **{"transport": "gloo", **way.options})

    def round_() -> None:
        for _ in range(way.steps):
            model(batch).square().mean().backward()
            if way.updates:
                optimizer.step()
            optimizer.zero_grad()

    told = count(round_, task.steps, run.stats, "between" if nodes else "sent")
    dist.barrier()
    run.close()
    return {name: value / (task.steps * way.steps) for name, value in told.items()}


def count(round_: Callable[[], None], rounds: int, stats: Callable[[], Any], name: str) -> dict[str, float]:
    """What `rounds` of them send, after a first one."""
    import torch.distributed as dist

    round_()
    dist.barrier()
    before, start = stats(), settled()
    dist.barrier()
    for _ in range(rounds):
        round_()
    spent = stats() - before
    dist.barrier()
    stop = settled()
    dist.barrier()
    return {"seen": stop - start, "said": float(sum(getattr(spent, name).values()))}


def main(text: str) -> None:
    """All ways of the task, in its order."""
    import torch
    import torch.distributed as dist

    task = Task(**json.loads(text))
    torch.set_num_threads(1)
    known = {**ways(), **(node_ways(task.world // 2) if task.world > 2 else {})}
    store = dist.TCPStore(task.master, PORT, task.world, is_master=task.rank == 0)
    dist.init_process_group("gloo", store=store, rank=task.rank, world_size=task.world)
    answers = {}
    for name in task.ways:
        answers[name] = train(task, known[name])
        Path(task.answer).write_text(json.dumps(answers))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
