"""How much every part that the host updates holds up a thread that calls small operations, in microseconds.

    python benchmarks/parts/micro_beside.py
    python benchmarks/parts/micro_beside.py --device cuda --threads 14 --width 2048 --parts 16

Parts land one by one between small steps, as in backward. `accept` is what the calling thread does for a part
itself; with `no update` nothing follows from it. The rest is what other threads want of the interpreter, and
on a machine whose memory or cores are short, of those.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.offload.updates import HostUpdates
from zeroshard.offload.work import HostUpdate
from zeroshard.runtime.measure import _SmallProbe

GOES = 40


class Layers(nn.Module):
    """One part for each layer."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def updates_of(run: zs.Run) -> HostUpdates:
    host = run._runtime.host
    assert host is not None
    assert host.updates is not None
    run._runtime.settle()
    return host.updates


def timed(updates: HostUpdates, step: Callable[[], None], alone: float) -> tuple[list[float], list[float]]:
    """Of several goes: what a part holds the thread up by, and what of that `accept` takes."""
    grads = [torch.randn(p.numel, device=p.targets[0].device).to(p.grad_dtype) for p in updates.parts]
    late, own = [], []
    for _ in range(GOES):
        accepting, start = 0.0, time.perf_counter()
        for part, grad in zip(updates.parts, grads, strict=True):
            before = time.perf_counter()
            updates.accept(part, grad, [True] * len(part.params))
            accepting += time.perf_counter() - before
            step()
        count, end = len(updates.parts), time.perf_counter()
        updates.drain()
        for part in updates.parts:
            part.flat = part.taken = None
        late.append(1e6 * ((end - start) / count - alone))
        own.append(1e6 * accepting / count)
    return late, own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--parts", type=int, default=32)
    parser.add_argument("--width", type=int, default=448, help="a part is its square")
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(args.device)
    model = Layers(args.parts, args.width).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    run = zs.shard(
        model,
        optimizer,
        precision="bf16",
        offload=zs.Offload(threads=args.threads),
        clip_norm=math.inf,
        bucket_bytes=2 * args.width**2,
    )
    for _ in range(3):
        model(torch.randn(2, args.width, device=device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    updates, small = updates_of(run), _SmallProbe(device)
    alone = small.seconds(100)
    print(f"{len(updates.parts)} parts; a small step of {small.kernels} kernels alone: {1e6 * alone:.0f} us")
    submit = updates.executor.submit

    def done_at_once(job: HostUpdate, backlog: int | None = None) -> None:
        job.done.set()
        job.part.done = job.done

    for label, way in (("no update", done_at_once), ("updated", submit)) * 2:
        updates.executor.submit = way  # type: ignore[method-assign]
        late, own = timed(updates, small.step, alone)
        low, middle = min(late), statistics.median(late)
        print(f"{label:<10} held up by {middle:.0f} (least {low:.0f}), accept {statistics.median(own):.0f}")
    run.close()


if __name__ == "__main__":
    main()
