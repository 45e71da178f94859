"""Several ranks on one GPU, over NCCL through the loopback interface: ZeroShard, DDP and FSDP2, in turn.

    python benchmarks/gpu/shared_gpu.py --out FOLDER    # also writes FOLDER/gpu-nccl.json and .md

NCCL takes ranks for different hosts if they say so (see `zeroshard.testing.Ranks`), and then lets them share
a GPU. Its links are sockets of one host, so times say how much of the traffic is hidden behind computation
and how much memory it takes; they are not those of GPUs with links of their own.

- `alone`: nothing is sent; the ranks only share the GPU. `ddp-bf16`: weights in bf16, no master.
- `fsdp2-bf16` and `zs-N-bf16`: bf16 compute and gradients, fp32 master.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "shared"), str(HERE.parents[1] / "src")]
from llama import LM, VOCAB, nparams  # noqa: E402
from provenance import commit, preamble  # noqa: E402

import zeroshard as zs  # noqa: E402
from zeroshard.testing import Ranks  # noqa: E402

SYSTEMS = ("alone", "ddp", "fsdp2", *(f"zs-{stage}" for stage in range(4)))
NARROW = ("ddp-bf16", "fsdp2-bf16", *(f"zs-{stage}-bf16" for stage in range(4)))
LR, WARM = 1e-4, 3


def made(system, size):
    """The model as it is called, its optimizer, and what to close at the end."""
    torch.manual_seed(0)
    model = LM(size, ckpt=False).cuda()
    kind, narrow = system.removesuffix("-bf16"), system.endswith("-bf16")
    if kind == "fsdp2":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        dtype = torch.bfloat16 if narrow else None
        policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)}
        for block in model.blocks:
            fully_shard(block, **policy)
        fully_shard(model, **policy)
    if kind == "ddp":
        model = model.to(torch.bfloat16) if narrow else model
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    run = None
    if kind.startswith("zs"):
        run = zs.shard(model, optimizer, stage=int(kind[3:]), precision="bf16" if narrow else None)
    return model, optimizer, run


def measure(system, size, rows, seq, steps):
    """On a rank: seconds of each step, losses, and the most device memory."""
    gc.collect()  # what is left of the system before
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model, optimizer, run = made(system, size)
    seeded = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(0, VOCAB, (rows, seq + 1), generator=seeded).cuda()
    times, losses = [], []
    for _ in range(WARM + steps):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        loss = model(ids[:, :-1], ids[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        losses.append(loss.item())
    told = {"steps": times[WARM:], "losses": losses, "peak": torch.cuda.max_memory_allocated() - before}
    if run is not None:
        told["sent"] = sum(run.stats().sent.values()) / (WARM + steps)
        run.close()
    del model, optimizer, run
    torch.cuda.empty_cache()
    return told


def table(rows):
    """For people: medians over the rounds of each round's median."""
    lines = [
        "| system | step, ms (rounds) | ÷ ddp | ÷ fsdp2 | peak, GiB | last loss |",
        "|---|---|---|---|---|---|",
    ]
    middle = {
        system: [statistics.median(r["steps"]) for r in rows if r["system"] == system]
        for system in dict.fromkeys(r["system"] for r in rows)
    }
    for system, rounds in middle.items():
        suffix = "-bf16" if system.endswith("-bf16") else ""
        last = next(r for r in reversed(rows) if r["system"] == system)
        step = statistics.median(rounds)
        ratios = [f"{step / statistics.median(middle[p + suffix]):.2f}" for p in ("ddp", "fsdp2")]
        spread = ", ".join(f"{1e3 * one:.0f}" for one in rounds)
        peak, loss = last["peak"] / 2**30, last["losses"][-1]
        lines.append(
            f"| {system} | {1e3 * step:.0f} ({spread}) | {' | '.join(ratios)} | {peak:.2f} | {loss:.5f} |"
        )
    return lines


def main():
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size", default="0.1b")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--systems", nargs="+", default=[*SYSTEMS, *NARROW])
    parser.add_argument("--out")
    asked = parser.parse_args()
    pool, rows = Ranks(asked.ranks, warn="ignore", backend="nccl"), []
    for number in range(asked.rounds):
        for system in asked.systems:
            found = pool.run(measure, system, asked.size, asked.rows, asked.seq, asked.steps, timeout=120)
            slowest = [max(each) for each in zip(*(one["steps"] for one in found), strict=True)]
            mean = [sum(each) / len(found) for each in zip(*(one["losses"] for one in found), strict=True)]
            rows.append({"round": number, "system": system} | found[0] | {"steps": slowest, "losses": mean})
            print(system, *(f"{1e3 * step:.0f}" for step in slowest), flush=True)
    pool.stop()
    facts = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": commit(),
        "ranks": asked.ranks,
        "model": f"{nparams(asked.size) / 1e6:.0f} M parameters, {asked.rows} x {asked.seq} tokens a rank",
    }
    known = {"hardware": f"{facts['device']}, one for {asked.ranks} ranks", "commit": facts["commit"]}
    said = preamble("Several ranks on one GPU, over NCCL", facts["model"], **known)
    text = "\n".join([*said, *table(rows)]) + "\n"
    print(text)
    if asked.out:
        name = Path(asked.out) / "gpu-nccl.json"
        name.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")
        name.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
