"""One system, one size, one process on one GPU: prints a `RESULT {json}` line.

Systems: `plain` (bf16 weights, fp32 master and AdamW on the GPU, written out in PyTorch), those of `peers.py`
and `zs-STAGE` with options, e.g. `zs-3`, `zs-2:optimizer=host`. Every system trains the same Llama-shaped
model on the same tokens with clipping at 1.0 (torchao's cannot clip), so that losses can be compared; a row
whose losses do not agree does not count.

A `STEP {json}` line follows every step, so that whoever started this process has what there was when it ran
out of time. `--device cpu` runs the same on the CPU, with a size as small as `tiny`: to try it, not to time
it.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from torch import nn

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "src")]
import peers  # noqa: E402
from llama import LM, VOCAB, flops_per_token, nparams  # noqa: E402

LR, CLIP = 1e-4, 1.0


def build(size, dtype, device):
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = LM(size)
    torch.set_default_dtype(torch.float32)
    return model


def plain(args, batch):
    model = build(args.size, torch.bfloat16, args.device)
    master = [p.detach().float() for p in model.parameters()]
    optimizer = torch.optim.AdamW(master, lr=LR, fused=True)
    norms = []

    def step(i):
        total = 0.0
        for k in range(args.accum):
            loss = model(*batch(i * args.accum + k))
            (loss / args.accum).backward()
            total += loss.detach() / args.accum
        params = list(model.parameters())
        norms.append(nn.utils.clip_grad_norm_(params, CLIP))
        for m, p in zip(master, params, strict=True):
            m.grad, p.grad = p.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(params, master)
        for m in master:
            m.grad = None
        return total

    return step, norms, lambda: {}


def offload_of(text):
    """`optimizer=auto,device_bytes=20GiB,undo=False` as an `Offload`, and the rest as options of `shard`."""
    import zeroshard as zs

    words = {"True": True, "False": False}
    given = dict(item.split("=", 1) for item in text.split(",") if item)
    given = {k: int(v) if v.isdigit() else words.get(v, v) for k, v in given.items()}
    shard = {name: given.pop(name) for name in ("prefetch", "clip_norm") if name in given}
    return (zs.Offload(**given) if given else None), shard


def zeroshard(args, batch):
    import zeroshard as zs

    name, _, extra = args.system.partition(":")
    offload, options = offload_of(extra)
    if offload is not None:
        options = {"clip_norm": CLIP, "offload": offload} | options
    options |= {"stage": int(name[3:]), "precision": "bf16"}
    # A model that would not fit twice is filled unit by unit, from the meta device.
    large = nparams(args.size) > 9e9 or args.device == "cpu"
    model = build(args.size, torch.bfloat16, "meta" if large else args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    foreseen = predict(model, optimizer, options, args)
    run = zs.shard(model, optimizer, **options)
    print(run.placement.table(), flush=True)
    step, norms, _ = peers.torch_loop(model, optimizer, args, batch, clip=offload is None, quiet=run.no_sync)
    told = {"placement": run.placement.line(), "foreseen": foreseen}
    return step, norms, lambda: run.stats().as_dict() | told


def predict(model, optimizer, options, args):
    """What the planner expects of this very run, to hold against what it took."""
    import zeroshard as zs

    tokens = torch.zeros(args.mbs, args.seq, dtype=torch.int64, device="meta")
    try:
        asked = {"limit": "100TiB", "machine": "H200", "recompute": False, "batch": (tokens, tokens)}
        made = zs.plan(model, optimizer, ranks=1, **asked, **options).chosen
    except Exception as error:  # a prediction that fails is a missing figure, not a failed run
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    return {"device": made.device, "host": made.host, "disk": made.disk, "where": made.where}


def memory():
    with open("/proc/self/status") as f:
        lines = dict(line.split(":", 1) for line in f if ":" in line)
    return {k: round(int(lines[k].split()[0]) / 2**20, 2) for k in ("VmRSS", "VmHWM")}


def device_memory(args):
    if args.device == "cpu":
        return {"gpu_peak_gib": 0.0, "gpu_reserved_gib": 0.0}
    return {
        "gpu_peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "gpu_reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
    }


def settle(args):
    if args.device != "cpu":
        torch.cuda.synchronize()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("system")
    parser.add_argument("size")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--mbs", type=int, default=8)
    parser.add_argument("--accum", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--cap-gib", type=float, default=0)
    parser.add_argument("--trace", default="")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    start = time.time()
    if args.device == "cuda":
        torch.cuda.set_device(0)
    if args.cap_gib and args.device == "cuda":
        torch.cuda.set_per_process_memory_fraction(
            args.cap_gib * 2**30 / torch.cuda.get_device_properties(0).total_memory
        )

    def batch(i):
        generator = torch.Generator().manual_seed(1000 + i)
        ids = torch.randint(0, VOCAB, (args.mbs, args.seq + 1), generator=generator).to(args.device)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    out = {"system": args.system, "size": args.size, "params_b": nparams(args.size) / 1e9}
    if args.system in peers.MAKERS:
        step, norms, stats = peers.MAKERS[args.system](args, batch, build)
    else:
        step, norms, stats = (plain if args.system == "plain" else zeroshard)(args, batch)
    out["init_s"] = round(time.time() - start, 1)
    print("STEP " + json.dumps(out | memory()), flush=True)
    times, losses = [], []
    for i in range(args.steps):
        settle(args)
        begun = time.perf_counter()
        losses.append(step(i).item())
        settle(args)
        times.append(time.perf_counter() - begun)
        print("STEP " + json.dumps(figures(args, out, times, losses, norms)), flush=True)
    out = figures(args, out, times, losses, norms) | {"stats": stats()}
    if args.trace:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            step(args.steps)
            step(args.steps + 1)
        profiler.export_chrome_trace(args.trace)
    print("RESULT " + json.dumps(out), flush=True)
    os._exit(0)


def figures(args, out, times, losses, norms):
    """All figures so far. The first two steps warm up, where there are more."""
    counted = statistics.median(times[2:] or times)
    tokens = args.mbs * args.seq * args.accum
    return out | {
        "step_s": counted,
        "times": [round(t, 4) for t in times],
        "losses": [round(x, 4) for x in losses],
        "norms": [round(float(n), 3) for n in norms],
        "tok_s": tokens / counted,
        "tflops": flops_per_token(args.size, args.seq) * tokens / counted / 1e12,
        **device_memory(args),
        **memory(),
    }


if __name__ == "__main__":
    main()
