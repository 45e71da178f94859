"""What the planner says of some ways to train a Llama-shaped model, and what they then take: a JSON line for
each case, read from the standard input. Started by `plan_error.py`, once for each size and world.

A world of more than one rank is simulated: a fake process group, one rank's real memory and computation. Its
exchanges take no time, so its step is predicted for links that take none.
"""

import argparse
import gc
import json
import os
import sys
import threading
import time
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "src")]
from llama import LM, SIZES, VOCAB, Block  # noqa: E402
from peak_blocks import PeakBlocks  # noqa: E402

import zeroshard as zs  # noqa: E402
from zeroshard.planner.answer import problem_of  # noqa: E402
from zeroshard.planner.candidates import all_candidates  # noqa: E402
from zeroshard.runtime.measure import here  # noqa: E402
from zeroshard.testing import PeakBytes  # noqa: E402

# Far above all norms here. Near its limit updates wait for the norm, which no plan foresees.
CLIP = 100.0
ROOM = 0.92  # of the device: what a case may be predicted to take
MOST_WARM, SECONDS = 8, 1.5  # steps before those that count, and how long these go on at least
NO_LINKS = {
    "link": 1e18,
    "network": 1e18,
    "latency": 0.0,
    "hop": 0.0,
    "node_hop": 0.0,
}  # of a simulated world
ON_DEVICE = ("parameters", "gradients", "state", "gathered", "buckets")


def meta_model(size):
    with torch.device("meta"):
        return LM(size, ckpt=False)


def offload_of(kind, size, world, stage):
    """`auto`: the device may hold the weights and half of the state. The host has room for the rest: all
    ranks of a simulated world are on this one, and each would get its share of what is free."""
    if kind == "none":
        return None
    if kind == "host":
        return zs.Offload()
    whole = zs.plan(
        meta_model(size), ranks=world, limit="100TiB", stage=stage, offload=None, precision="bf16"
    ).chosen.lasting
    near = whole["parameters"] + whole["state"] // 2
    return zs.Offload(optimizer="auto", device_bytes=near, host_bytes=2**40 if world > 1 else None)


def options_of(case):
    offload = offload_of(case["offload"], case["size"], case["world"], case["stage"])
    made = {
        "stage": case["stage"],
        "precision": "bf16",
        "recompute": case["recompute"],
        "offload": offload,
        "prefetch": 1,
        "bucket_bytes": "25MiB",
        "split": "auto",
    }
    return made | ({"clip_norm": CLIP} if offload is not None else {})


def predicted(case, rows, options, machine, memory):
    """The one candidate that these options leave, for a micro-batch of so many rows."""
    ids = torch.empty(rows, case["seq"], dtype=torch.int64, device="meta")
    model = meta_model(case["size"])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    problem = problem_of(
        model, optimizer, ranks=case["world"], limit=memory, batch=(ids, ids), machine=machine, **options
    ).problem
    return next(iter(all_candidates(problem)))


def fitting_rows(case, options, machine, memory):
    """The largest micro-batch of those to try that is predicted to fit, and its prediction."""
    for rows in case["rows"]:
        found = predicted(case, rows, options, machine, memory)
        if found.device <= ROOM * memory:
            return rows, found
    return None, found


class HostPeak:
    """The most resident memory of this process while active, beyond what it had at the start."""

    def __init__(self):
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @staticmethod
    def now():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def _watch(self):
        while not self._stop.wait(0.01):
            self.most = max(self.most, self.now())

    def __enter__(self):
        self.start = self.most = self.now()
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()
        self.most = max(self.most, self.now()) - self.start


def resident():
    """Bytes of this process by kind, as the kernel counts them."""
    with open("/proc/self/status") as file:
        lines = [line.split() for line in file if line.startswith(("VmRSS", "VmHWM", "Rss", "VmPin"))]
    return {name.rstrip(":"): int(kib) * 1024 for name, kib, *_ in lines}


def in_detail(step, run, told):
    """Two more steps: one with a stop after each phase, one with the allocator's events recorded."""
    told["phases"] = step(stops=True)
    told["live"], told["peaks"] = run.stats().live, run.stats().peak
    told["resident"]["detail"] = resident()
    if torch.cuda.is_available():
        with PeakBlocks() as blocks:
            step()
        told["blocks"] = blocks.found


def steadied(step, run):
    """Steps until all memory has been touched and, with offload, two updates in a row have begun in backward:
    before that each step has to wait for what the one before left over. Returns how many they were."""
    taken = 0
    while taken < MOST_WARM:
        counts = run.stats().updates
        step()
        step()
        taken += 2
        if not counts or run.stats().updates["early"] - counts["early"] == 2:
            break
    return taken


def measured(case, rows, options, device):
    torch.manual_seed(0)
    told = {"resident": {"start": resident()}, "spent": {}}
    spent, at = told["spent"], time.perf_counter()
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    model = meta_model(case["size"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = zs.shard(model, optimizer, **options)
    ids = torch.randint(0, VOCAB, (rows, case["seq"] + 1), device=device)
    batch = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    del ids
    told["resident"]["sharded"] = resident()
    spent["sharding"] = time.perf_counter() - at

    def step(stops=False):
        marks = [time.perf_counter()]

        def mark():
            if stops and device.type == "cuda":
                torch.cuda.synchronize()
            marks.append(time.perf_counter())

        loss = model(*batch)
        mark()
        loss.backward()
        mark()
        optimizer.step()
        mark()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return dict(zip(("forward", "backward", "update"), (b - a for a, b in pairwise(marks)), strict=False))

    try:
        at = time.perf_counter()
        step()
        told["resident"]["first"] = resident()
        spent["first step"] = time.perf_counter() - at
        times, calls = [], []  # of calls: until they return, the device may be behind
        if case.get("brief"):
            step()
        else:
            told["warm_up"] = 1 + steadied(step, run)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            earlier = run.stats().updates
            while len(times) < case["steps"] or (sum(times) < SECONDS and not case.get("brief")):
                start = time.perf_counter()
                calls.append(step())
                times.append(time.perf_counter() - start)
            told["calls"] = {name: sum(call[name] for call in calls) / len(calls) for name in calls[0]}
            told["updates"] = {kind: n - earlier[kind] for kind, n in run.stats().updates.items()}
            run._runtime.settle()
            peak, reserved = torch.cuda.max_memory_allocated() - before, torch.cuda.max_memory_reserved()
        else:
            with PeakBytes() as seen:
                step()
            for _ in range(case["steps"]):
                start = time.perf_counter()
                step()
                times.append(time.perf_counter() - start)
            live = run.stats().live
            stages = getattr(run._runtime.transport, "_stages", {}).values()
            peak = (
                sum(live[kind] for kind in ON_DEVICE) + seen.most + sum(t.nbytes for t in (*batch, *stages))
            )
            reserved = peak
        mean = sum(times) / len(times)  # an overlapped update moves time from one step into the next
        told |= {"device": peak, "reserved": reserved, "step": mean, "steps": times, "before": before}
        if device.type == "cuda":
            counted = torch.cuda.memory_stats()
            told |= {what: counted[f"{what}_bytes.all.peak"] for what in ("active", "requested")}
        if not case.get("brief") and case.get("details", True):
            in_detail(step, run, told)
        return told
    finally:
        at = time.perf_counter()
        end(run)
        spent["ending"] = time.perf_counter() - at


def end(run):
    """Let go of all that a run holds. `close()` would make the model whole, which need not fit."""
    runtime = run._runtime
    runtime.close()
    run._hooks.remove()
    if runtime.host is not None:
        runtime.host.close()
    runtime.transport.close()


def one(case, machine, device, memory, rehearse=False):
    """A case. `rehearse`: after some steps that do not count, because a process keeps something of its first
    ones (16 MB on an H200), which would be seen where one rank of many has little on its host."""
    start = time.perf_counter()
    options = options_of(case)
    rows, found = fitting_rows(case, options, machine, memory)
    told = dict(case) | {
        "rows": rows,
        "machine": asdict(machine),
        "options": {name: str(value) for name, value in options.items()},
        "predicted": {
            "device": found.device - found.kinds.get("margin", 0),
            "with_margin": found.device,
            "host": found.host,
            "step": found.step,
            "seconds": found.seconds,
            "kinds": found.kinds,
            "where": found.where,
            "lasting": found.lasting,
        },
    }
    if rows is None:
        return told | {"skipped": f"is predicted to need {found.device / 2**30:.1f} GiB"}
    told["plan_s"] = round(time.perf_counter() - start, 2)
    if device.type == "cuda":
        load_kernels(case["size"], rows, case["seq"], device)
    if rehearse:
        measured(case | {"brief": True, "steps": 1}, rows, options, device)
        clean(device)
    gc.collect()  # or what planning left is looked at again and again while the first case is timed
    try:
        with HostPeak() as host:
            told["measured"] = measured(case, rows, options, device)
        told["measured"]["host"] = host.most
    except Exception as error:  # the next case may still run
        told["error"] = f"{type(error).__name__}: {error}"[:400]
    told["wall_s"] = round(time.perf_counter() - start, 1)
    return told


def warm_up(device):
    """Load what a process loads once and keeps, or the first case with offload would have it among its host
    memory (0.1 GiB on an H200)."""
    for offload, recompute in ((None, True), (zs.Offload(), True), (zs.Offload(), False)):
        model = meta_model("tiny")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        run = zs.shard(
            model,
            optimizer,
            precision="bf16",
            recompute=recompute,
            offload=offload,
            clip_norm=None if offload is None else CLIP,
        )
        ids = torch.zeros(1, 64, dtype=torch.int64, device=device)
        for _ in range(3):
            model(ids, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
        end(run)
    torch._C._cuda_clearCublasWorkspaces()


def load_kernels(size, rows, seq, device):
    """Have the kernels of these shapes loaded, which a process does once and keeps in its memory."""
    _, width, hidden, heads = SIZES[size]
    with torch.device(device):
        block = Block(width, hidden, heads).bfloat16()
        head = torch.nn.Linear(width, VOCAB, bias=False).bfloat16()
    x = torch.zeros(rows, seq, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    head(block(x)).sum().backward()
    torch.cuda.synchronize()
    del block, head, x
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def clean(device):
    """Nothing of a case stays for the next."""
    gc.collect()
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # or the next case would not count them
        torch.cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    if args.world > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.world)
    machine = replace(here(device), **(NO_LINKS if args.world > 1 else {}))
    if device.type == "cuda":
        warm_up(device)
    memory = torch.cuda.mem_get_info()[1] if device.type == "cuda" else machine.memory
    for number, line in enumerate(sys.stdin):
        told = one(json.loads(line), machine, device, memory, rehearse=args.world > 1 and number == 0)
        clean(device)
        print("RESULT " + json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
