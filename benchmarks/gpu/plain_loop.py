"""What the loop of the README costs with state on the host, beside `clip_norm=` and plain PyTorch.

    python benchmarks/gpu/plain_loop.py                                     # 1 B and 3 B, 3 x 4096 tokens
    python benchmarks/gpu/plain_loop.py --sizes 1b --limits 1 --ways plain clip_norm loop
    python benchmarks/gpu/plain_loop.py --device cpu --sizes tiny --seq 32 --steps 4

Every way trains the same Llama-shaped model on the same tokens in a process of its own, with a
limit that every step exceeds (the smaller one) and one that none does. `plain`: everything on the
GPU, written out in PyTorch. `clip_norm`: `shard(offload=, clip_norm=)`. `loop`: `clip_grad_norm_`
by the loop, no `clip_norm=`. `looks`: the same, and one gradient in ten is read. Steps are medians;
a row whose losses are not those of the others says so. The exit status is 1 where `loop` takes more
than `--bar` times `clip_norm`. Rows are written to --out as they come.
"""

import argparse
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

WAYS = ("plain", "clip_norm", "loop", "looks")


def child(args):
    """One way, in this process."""
    import one
    import torch
    from torch import nn

    import zeroshard as zs

    way, limit, size, device = args.ways[0], args.limits[0], args.sizes[0], args.device
    one.CLIP = limit
    given = Namespace(size=size, device=device, accum=1, mbs=args.rows, seq=args.seq)

    def batch(i):
        generator = torch.Generator().manual_seed(1000 + i)
        ids = torch.randint(0, one.VOCAB, (args.rows, args.seq + 1), generator=generator).to(device)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def sharded():
        model = one.build(size, torch.bfloat16, device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=one.LR)
        clip = limit if way == "clip_norm" else None
        run = zs.shard(model, optimizer, precision="bf16", offload=zs.Offload(), clip_norm=clip)
        norms = []

        def step(i):
            loss = model(*batch(i))
            loss.backward()
            if way != "clip_norm":
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit))
            if way == "looks":
                for p in list(model.parameters())[::10]:
                    p.grad.abs().amax()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step, norms, lambda: run.stats().updates

    step, norms, updates = one.plain(given, batch) if way == "plain" else sharded()
    times, losses = [], []
    for i in range(args.steps):
        one.settle(given)
        begun = one.time.perf_counter()
        losses.append(step(i).item())
        one.settle(given)
        times.append(one.time.perf_counter() - begun)
    told = {"way": way, "limit": limit, "size": size, "updates": updates(), "torch": torch.__version__}
    print("RESULT " + json.dumps(one.figures(given, told, times, losses, norms)), flush=True)


def measured(args, size, limit, way):
    words = ["--sizes", size, "--limits", str(limit), "--ways", way, "--rows", args.rows, "--seq", args.seq]
    words += ["--steps", args.steps, "--device", args.device, "--child"]
    done = subprocess.run(
        [sys.executable, __file__, *map(str, words)], capture_output=True, text=True, timeout=args.seconds
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    if line is None:
        return {"way": way, "size": size, "limit": limit, "error": done.stderr.strip()[-400:]}
    return json.loads(line.removeprefix("RESULT "))


def shown(row, rows):
    alike = [r for r in rows if (r["size"], r["limit"]) == (row["size"], row["limit"]) and "step_s" in r]
    steps = {r["way"]: r["step_s"] for r in alike}
    beside = [f"{row['step_s'] / steps[way]:.2f} x {way}" for way in ("plain", "clip_norm") if way in steps]
    apart = max(abs(a - b) for a, b in zip(row["losses"], alike[0]["losses"], strict=True))
    return (
        f"{row['size']:>5} limit {row['limit']:<8g} {row['way']:<10} {row['step_s']:.3f} s  "
        f"{', '.join(beside)}"
        f"  GPU {row['gpu_peak_gib']:.1f} GiB  losses within {apart:.3f}  {row['updates']}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--sizes", nargs="+", default=["1b", "3b"])
    parser.add_argument("--limits", nargs="+", type=float, default=[0.05, 1e9])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--rows", type=int, default=3)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=300, help="for one way")
    parser.add_argument("--bar", type=float, default=1.2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "src")]
        child(args)
        return 0
    rows, over = [], False
    for size in args.sizes:
        for limit in args.limits:
            for way in args.ways:
                rows.append(measured(args, size, limit, way))
                row = rows[-1]
                print(shown(row, rows) if "step_s" in row else row, flush=True)
                if args.out:
                    args.out.write_text(json.dumps(rows, indent=1))
            steps = {r["way"]: r.get("step_s") for r in rows if (r["size"], r["limit"]) == (size, limit)}
            if steps.get("loop") and steps.get("clip_norm"):
                over = over or steps["loop"] > args.bar * steps["clip_norm"]
    return int(over or any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
