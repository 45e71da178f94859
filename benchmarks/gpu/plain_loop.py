"""What the loop of the README costs with state on the host, beside `clip_norm=`, plain PyTorch and FSDP2.

    python benchmarks/gpu/plain_loop.py --out FOLDER                        # all rows
    python benchmarks/gpu/plain_loop.py --sizes 1b --limits 0.05 --out FOLDER --seconds 300
    python benchmarks/gpu/plain_loop.py --device cpu --sizes tiny --seq 32 --steps 4

Every way trains the same model on the same tokens in a process of its own: Llama-shaped ones of 1.26 and
3.43 B parameters (`1b`, `3b`), and transformers' own Llama of 1.24 B with a tied vocabulary of 128 k (`hf`);
with a limit that every step exceeds (0.05) and one that none does (1e9).

- `plain`: everything on the GPU, written out in PyTorch. `fsdp2`: its CPU offload (not for `hf`).
- `clip_norm`: `shard(offload=, clip_norm=)`. `split`: the same with `Offload(master="split")`.
- `loop`: `clip_grad_norm_` by the loop, no `clip_norm=`. `unclipped`: the same without clipping.
- `looks`: as `loop`, and one gradient in ten is read.

Steps are medians after the first two; losses are held against those of `plain`. With --out,
FOLDER/gpu-plain-loop.json and .md are written after every row, and rows of this commit that are there are not
run again. The exit status is 1 where `loop` takes more than `--bar` times `clip_norm`, or a row failed.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src"), str(HERE.parent / "shared")]
from provenance import command, commit, preamble, version  # noqa: E402

WAYS = ("plain", "clip_norm", "split", "loop", "unclipped", "looks", "fsdp2")
NAMES = {"tiny": "tiny", "1b": "1.26 B", "3b": "3.43 B", "hf": "transformers' Llama, 1.24 B"}
HF_VOCABULARY = 128256


def built(size, dtype, device):
    """The model, whose forward takes tokens and labels and returns the loss."""
    import torch
    from llama import LM
    from torch import nn
    from torch.nn.functional import cross_entropy

    torch.manual_seed(0)
    if size != "hf":
        torch.set_default_dtype(dtype)
        with torch.device(device):
            model = LM(size)
        torch.set_default_dtype(torch.float32)
        return model
    import transformers

    class Stock(nn.Module):
        def __init__(self):
            super().__init__()
            config = transformers.LlamaConfig(
                **{"vocab_size": HF_VOCABULARY, "hidden_size": 2048, "intermediate_size": 8192},
                **{"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8},
                **{"tie_word_embeddings": True, "use_cache": False},
            )
            self.llama = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
            self.llama.gradient_checkpointing_enable({"use_reentrant": False})

        def forward(self, ids, labels):
            logits = self.llama(input_ids=ids).logits
            return cross_entropy(logits.float().view(-1, HF_VOCABULARY), labels.view(-1))

    with torch.device(device):
        model = Stock()
    return model.train()


def child(args):
    """One way, in this process."""
    import one
    import peers
    import torch
    from torch import nn

    import zeroshard as zs

    way, limit, size, device = args.ways[0], args.limits[0], args.sizes[0], args.device
    one.CLIP = peers.CLIP = limit
    one.build = built
    system = "fsdp2-offload" if way == "fsdp2" else way
    given = Namespace(size=size, device=device, accum=1, mbs=args.rows, seq=args.seq, system=system)

    def batch(number):
        generator = torch.Generator().manual_seed(1000 + number)
        ids = torch.randint(0, one.VOCAB, (args.rows, args.seq + 1), generator=generator).to(device)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def sharded():
        model = built(size, torch.bfloat16, device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=one.LR)
        clip = limit if way in ("clip_norm", "split") else None
        given_offload = {"stage_bytes": args.stage_bytes} if args.stage_bytes else {}
        offload = zs.Offload(master="split" if way == "split" else "plain", **given_offload)
        run = zs.shard(model, optimizer, precision="bf16", offload=offload, clip_norm=clip)

        def step(number):
            loss = model(*batch(number))
            loss.backward()
            if way in ("loop", "looks"):
                nn.utils.clip_grad_norm_(model.parameters(), limit)
            if way == "looks":
                for p in list(model.parameters())[::10]:
                    p.grad.abs().amax()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step, [], lambda: run.stats().updates

    if way in ("plain", "fsdp2"):
        step, _, updates = one.plain(given, batch) if way == "plain" else peers.fsdp2(given, batch, built)
    else:
        step, _, updates = sharded()
    times, losses = [], []
    for number in range(args.steps):
        one.settle(given)
        begun = time.perf_counter()
        losses.append(step(number).item())
        one.settle(given)
        times.append(time.perf_counter() - begun)
    counted = sorted(times[2:])
    row = {
        "step_s": statistics.median(counted),
        "times": [round(seconds, 4) for seconds in times],
        "losses": [round(loss, 4) for loss in losses],
        "updates": dict(updates()) if way != "fsdp2" else {},
        **one.device_memory(given),
        **one.memory(),
    }
    print("RESULT " + json.dumps(row), flush=True)


def measured(args, size, limit, way):
    words = ["--sizes", size, "--limits", limit, "--ways", way, "--rows", args.rows, "--seq", args.seq]
    words += ["--steps", args.steps, "--device", args.device, "--child"]
    words += ["--stage-bytes", args.stage_bytes] if args.stage_bytes else []
    row = {"size": size, "limit": limit, "way": way, "commit": commit()}
    try:
        done = subprocess.run(
            [sys.executable, __file__, *map(str, words)],
            capture_output=True,
            text=True,
            timeout=args.limit_s,
        )
    except subprocess.TimeoutExpired:
        return row | {"error": f"took more than {args.limit_s:g} s"}
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    if line is None:
        return row | {"error": done.stderr.strip()[-400:] or "no output"}
    return row | json.loads(line.removeprefix("RESULT "))


def ratios(row, rows):
    """To plain and to `clip_norm` under the same limit; clipping costs plain next to nothing."""
    alike = [r for r in rows if r["size"] == row["size"] and "step_s" in r]
    plain = [r for r in alike if r["way"] == "plain"]
    same = [r for r in plain if r["limit"] == row["limit"]] or plain
    clipped = [r for r in alike if r["way"] == "clip_norm" and r["limit"] == row["limit"]]
    return [row["step_s"] / others[0]["step_s"] if others else None for others in (same, clipped)]


def agrees(row, rows):
    """Whether its losses are those of plain PyTorch, to the rounding of bf16."""
    plain = [r for r in rows if (r["size"], r["limit"], r["way"]) == (row["size"], row["limit"], "plain")]
    if not plain or "losses" not in plain[0]:
        return "–"
    apart = max(abs(a - b) for a, b in zip(row["losses"], plain[0]["losses"], strict=False))
    return f"within {apart:.4f}"


def table(rows):
    lines = [
        "| model, limit | way | s a step (least to most) | ÷ plain | ÷ `clip_norm` | GPU peak, GiB "
        "| host peak, GiB | losses |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        name = f"{NAMES[row['size']]}, {row['limit']:g}"
        if "step_s" not in row:
            lines.append(f"| {name} | {row['way']} | **{row['error'].splitlines()[-1][:90]}** | | | | | |")
            continue
        beside = [f"{ratio:.2f}" if ratio else "" for ratio in ratios(row, rows)]
        spread = sorted(row["times"][2:])
        lines.append(
            f"| {name} | {row['way']} | {row['step_s']:.3f} ({spread[0]:.3f} to {spread[-1]:.3f}) "
            f"| {beside[0]} | {beside[1]} | {row['gpu_peak_gib']:.1f} | {row['VmHWM']:.1f} "
            f"| {agrees(row, rows)} |"
        )
    return lines


def write(folder, rows, args):
    known = {
        "hardware": args.hardware,
        "commit": ", ".join(sorted({row["commit"][:7] for row in rows})),
        "command": command(),
    }
    title = "The README's loop with the optimizer's state on the host"
    text = preamble(title, "Llama-shaped ones, and transformers' Llama", **known)
    text += [
        f"{args.rows} × {args.seq} tokens a step, bf16 with an fp32 master on the host, AdamW,",
        f"recomputation, torch {version('torch')}; medians of {args.steps - 2} steps after two; each way in",
        "a process of its own, in one run. Limit 0.05 clips in every step, 1e9 in none.",
        "",
        *table(rows),
        "",
    ]
    (folder / "gpu-plain-loop.md").write_text("\n".join(text))
    (folder / "gpu-plain-loop.json").write_text(json.dumps(known | {"rows": rows}, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--sizes", nargs="+", default=["1b", "3b", "hf"], choices=list(NAMES))
    parser.add_argument("--limits", nargs="+", type=float, default=[0.05, 1e9])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--rows", type=int, default=3)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--stage-bytes", default="", help="of Offload, such as 16MiB")
    parser.add_argument("--limit-s", type=float, default=240, help="for one row")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no row begins")
    parser.add_argument("--bar", type=float, default=1.2)
    parser.add_argument("--hardware", default="one NVIDIA H200, 16 cores")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return 0
    begun, now = time.monotonic(), commit()
    file = args.out / "gpu-plain-loop.json" if args.out else None
    rows = json.loads(file.read_text())["rows"] if file and file.exists() else []
    rows = [row for row in rows if row["commit"] == now and "step_s" in row]
    there = {(row["size"], row["limit"], row["way"]) for row in rows}
    for size in args.sizes:
        for limit in args.limits:
            for way in args.ways:
                apart = (way == "fsdp2" and (size == "hf" or limit == 1e9)) or (
                    way == "unclipped" and limit < 1
                )
                if apart or (size, limit, way) in there or time.monotonic() - begun > args.seconds:
                    continue
                rows.append(measured(args, size, limit, way))
                print(table(rows)[-1], rows[-1].get("updates", ""), flush=True)
                if args.out:
                    write(args.out, rows, args)
    slow = [row for row in rows if row["way"] == "loop" and "step_s" in row]
    over = [row for row in slow if (ratio := ratios(row, rows)[1]) and ratio > args.bar]
    return int(bool(over) or any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
