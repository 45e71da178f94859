"""What one rank of `overlap.py` does: train a model whose computation takes a fixed time, and record when it
computes, when it waits for others, and what its link carries meanwhile.

Started inside a namespace as `python overlap_rank.py '<assignment as JSON>'`; leaves its numbers in a file.

Computation is a sleep of fixed length in every block: as with a GPU, the thread that trains is busy and the
processor is not, so that the figures hold on a machine that is shared.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PORT = 29500
BUCKET = 1 << 20


@dataclass(frozen=True)
class Task:
    """What the driver tells a rank."""

    modes: list[str]
    rank: int
    world: int
    master: str
    blocks: int
    width: int
    forward: float  # seconds of one block's forward; backward takes twice as long
    steps: int
    update: float = 0.0  # seconds that the host's update of all parameters is made to take, where it is one
    answer: str = ""


@dataclass
class Record:
    """Spans are (what, start, stop) in seconds since the first step that counts; `link` are (moment, bytes
    sent and received since the last)."""

    step: float = 0.0
    waited: float = 0.0
    sent: float = 0.0
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    link: list[tuple[float, int]] = field(default_factory=list)


def modes() -> dict[str, dict[str, Any]]:
    """Options of `shard` by name."""
    import zeroshard as zs

    late = {"bucket_bytes": 1 << 30}
    host = {"offload": zs.Offload(), "clip_norm": math.inf}
    return {
        "stage 0": {"stage": 0, "bucket_bytes": BUCKET},
        "stage 0, Delayed": {"stage": 0, "bucket_bytes": BUCKET, "sync": zs.Delayed()},
        "stage 2, one bucket": {"stage": 2, **late},
        "stage 2": {"stage": 2, "bucket_bytes": BUCKET},
        "stage 2, Delayed": {"stage": 2, "bucket_bytes": BUCKET, "sync": zs.Delayed()},
        "stage 2, int8 gather": {"stage": 2, "bucket_bytes": BUCKET, "gather": zs.Int8()},
        "stage 2, int8 gather, Delayed": {
            "stage": 2,
            "bucket_bytes": BUCKET,
            "gather": zs.Int8(),
            "sync": zs.Delayed(),
        },
        "stage 2, Delta gather": {"stage": 2, "bucket_bytes": BUCKET, "gather": zs.Delta(zs.Int8())},
        "stage 3, Delta gather": {"stage": 3, "bucket_bytes": BUCKET, "gather": zs.Delta(zs.Int8())},
        "stage 3, prefetch 0": {"stage": 3, "bucket_bytes": BUCKET, "prefetch": 0},
        "stage 3, prefetch 2": {"stage": 3, "bucket_bytes": BUCKET, "prefetch": 2},
        "stage 3, Delayed": {"stage": 3, "bucket_bytes": BUCKET, "prefetch": 2, "sync": zs.Delayed()},
        "stage 2, host update": {"stage": 2, "bucket_bytes": BUCKET, **host},
        "stage 2, host update, Delayed": {
            "stage": 2,
            "bucket_bytes": BUCKET,
            "sync": zs.Delayed(),
            **host,
        },
    }


class Recorder:
    """Notes spans from any place of this process."""

    def __init__(self) -> None:
        self.record, self.began, self.on = Record(), 0.0, False

    @contextlib.contextmanager
    def span(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            if self.on:
                now = time.perf_counter()
                self.record.spans.append((what, start - self.began, now - self.began))

    def watch_link(self, over: threading.Event) -> None:
        last = carried()
        while not over.wait(0.004):
            now = carried()
            if self.on:
                self.record.link.append((time.perf_counter() - self.began, now - last))
            last = now


def carried() -> int:
    """Bytes that this namespace's link has sent and received. Not from /sys, which shows the host's."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    numbers = next(line for line in lines if line.strip().startswith("eth0")).partition(":")[2].split()
    return int(numbers[0]) + int(numbers[8])


def build(task: Task, recorder: Recorder) -> Any:
    """Blocks of one matrix each, whose forward and backward take the time that they are told to."""
    import torch
    from torch import nn

    class Busy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            with recorder.span("forward"):
                time.sleep(task.forward)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            with recorder.span("backward"):
                time.sleep(2 * task.forward)
            return grad

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Linear(task.width, task.width)

        def forward(self, x: Any) -> Any:
            return x + torch.tanh(Busy.apply(self.matrix(x)))

    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(task.blocks)))


def slow_down(host: Any, seconds: float, recorder: Recorder) -> None:
    """Make the updates of all parts together take so long, and note when training waits for them."""
    update, wait, each = host.executor._update, host.wait, seconds / len(host.parts)
    one = threading.Lock()  # one host, whoever brings it a part

    def slowly(staged: Any) -> None:
        with one, recorder.span("host"):
            time.sleep(each)
            update(staged)

    def waiting(part: Any) -> None:
        with recorder.span("wait host"):
            wait(part)

    host.executor._update, host.wait = slowly, waiting


def train(task: Task, options: dict[str, Any]) -> Record:
    import torch
    import torch.distributed as dist

    import zeroshard as zs
    from zeroshard.comm import Counters
    from zeroshard.tiers import TierCopies

    recorder = Recorder()
    model = build(task, recorder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    TierCopies.native = False  # type: ignore[method-assign,assignment]  # updates that Python can slow down
    run = zs.shard(model, optimizer, transport="gloo", **options)
    if run._runtime.host is not None:
        slow_down(run._runtime.host.updates, task.update, recorder)
    plain = Counters.waiting

    @contextlib.contextmanager
    def waiting(self: Counters, kind: str) -> Iterator[None]:
        with recorder.span(f"wait {kind}"), plain(self, kind):
            yield

    Counters.waiting = waiting  # type: ignore[method-assign]
    over = threading.Event()
    watcher = threading.Thread(target=recorder.watch_link, args=(over,), daemon=True)
    watcher.start()
    batch = torch.randn(1, task.width, generator=torch.Generator().manual_seed(task.rank))

    def step() -> None:
        model(batch).square().mean().backward()
        with recorder.span("update"):
            optimizer.step()
        optimizer.zero_grad()

    try:
        for _ in range(3):
            step()
        dist.barrier()
        before, recorder.began, recorder.on = run.stats(), time.perf_counter(), True
        lasted = []
        for _ in range(task.steps):
            started = time.perf_counter()
            step()
            lasted.append(time.perf_counter() - started)
        recorder.on = False
        spent = run.stats() - before
    finally:
        Counters.waiting = plain  # type: ignore[method-assign]
        over.set()
        watcher.join()
    record = recorder.record
    record.step = sorted(lasted)[len(lasted) // 4]
    on_host = sum(stop - start for what, start, stop in record.spans if what == "wait host")
    record.waited = (sum(spent.waited.values()) + on_host) / task.steps
    record.sent = sum(spent.sent.values()) / task.steps
    dist.barrier()
    run.close()
    return record


def main(text: str) -> None:
    """All modes of the task, in its order."""
    import torch
    import torch.distributed as dist

    task = Task(**json.loads(text))
    torch.set_num_threads(1)
    known, answers = modes(), {}
    for number, mode in enumerate(task.modes):
        store = dist.TCPStore(task.master, PORT + number, task.world, is_master=task.rank == 0)
        dist.init_process_group("gloo", store=store, rank=task.rank, world_size=task.world)
        answers[mode] = asdict(train(task, known[mode]))
        dist.barrier()
        dist.destroy_process_group()
        del store
        Path(task.answer).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1])
