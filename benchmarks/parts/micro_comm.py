"""How long one reduce and one gather take: our transports against gloo's own collectives.

    python benchmarks/parts/micro_comm.py [--mib 128] [--ranks 2] [--rounds 15]

`reduce` brings a buffer of so many MiB (fp32, one shard per rank) to the sum of each rank's shard; `gather`
brings the shards together to such a buffer. The rows are measured in turn within each round, so that a noisy
machine is noisy for all of them alike, and each starts at a barrier. Printed are the slowest rank's
milliseconds: the median over the rounds, and the least.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zeroshard.comm import GlooTransport, ShmTransport, Transport

Measured = dict[str, Callable[[], None]]


def ours(transport: Transport, numel: int) -> Measured:
    """One reduce and one gather of a transport."""
    size, rank = transport.size, transport.rank
    shards = [numel // size] * size
    wire = transport.allocate("wire", numel, torch.float32)
    wire.mine.fill_(rank + 1.0)
    total = torch.zeros(shards[rank])
    rows = transport.allocate("rows", shards[rank], torch.float32)
    rows.mine.fill_(rank + 1.0)
    transport.open()
    cuts = [[(0, count)] for count in shards]
    whole = torch.zeros(numel)
    out = [[part] for part in whole.tensor_split(size)]
    out[rank] = []

    def reduce() -> None:
        transport.reduce("gradients", "wire", wire, shards, total, 1 / size).wait()
        transport.fill(wire)

    def gather() -> None:
        transport.gather("parameters", "rows", rows, cuts, out).wait()

    return {f"{transport.name} reduce": reduce, f"{transport.name} gather": gather}


def theirs(size: int, numel: int) -> Measured:
    """Gloo's own reduce-scatter and all-gather."""
    scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    collect: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    whole, shard = torch.ones(numel), torch.ones(numel // size)
    return {
        "torch gloo reduce": lambda: scatter(shard, whole, op=dist.ReduceOp.SUM),
        "torch gloo gather": lambda: collect(whole, shard),
    }


def measure(rank: int, size: int, store_path: str, numel: int, rounds: int, pipe: Any) -> None:
    """One rank: every row once a round, each behind a barrier."""
    torch.set_num_threads(1)
    store = dist.FileStore(store_path, size)
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=size)
    shm = ShmTransport(dist.PrefixStore("shm", store), rank, size)
    gloo = GlooTransport(dist.PrefixStore("gloo", store), rank, size)
    rows = {**ours(shm, numel), **ours(gloo, numel), **theirs(size, numel)}
    rows["shm barrier"] = lambda: shm.barrier("row")
    rows["gloo barrier"] = lambda: gloo.barrier("row")
    found: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(rounds + 2):
        for name, run in rows.items():
            shm.barrier("start")
            start = time.perf_counter()
            run()
            found[name] += shm.max([time.perf_counter() - start])
    pipe.send({name: times[2:] for name, times in found.items()})
    shm.barrier("end")
    gloo.close()
    shm.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    numel = (options.mib << 20) // 4 // options.ranks * options.ranks
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "store")
        ranks = [
            context.Process(target=measure, args=(rank, options.ranks, path, numel, options.rounds, send))
            for rank in range(options.ranks)
        ]
        for process in ranks:
            process.start()
        found = receive.recv()
        for process in ranks:
            process.join()
    setting = f"{options.ranks} ranks x 1 thread, {options.rounds} rounds"
    print(f"{options.mib} MiB fp32, {setting}, torch {torch.__version__}")
    print(f"{'':20}{'median ms':>12}{'least ms':>12}")
    for name, times in found.items():
        print(f"{name:20}{1e3 * statistics.median(times):12.2f}{1e3 * min(times):12.2f}")


if __name__ == "__main__":
    main()
