"""Runs under limits that only just fit, several at a time on one GPU: none may end out of memory.

    python benchmarks/gpu/limits.py --seconds 560      # as many of the sixty as fit; again: the rest
    python benchmarks/gpu/limits.py --choose limits-of-h200.json   # on any machine: the limits, and no run
    python benchmarks/gpu/limits.py --chosen limits-of-h200.json --seconds 560
    python benchmarks/gpu/limits.py --device cpu --models tiny --limits 3 --together 1

Ten limits for each of three models (a Llama-shaped one, GPT-2 and Qwen2 of transformers, from their configs),
from the smallest that the planner accepts to what the model takes whole, under both settings of the CUDA
allocator. Each run is a process of its own that passes `limit=` and `batch=` and nothing else, so that its
planner measures the machine, and trains `--steps` steps; the limit is the allocator's, too, so others on the
same GPU cannot be in its way. Rows are written to --out as they come, and a table beside it; rows of this
commit that are there are not run again. The exit status is 1 where a run ended in another way than by
training all its steps.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Condition

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parent), str(HERE.parents[2] / "src"), str(HERE.parents[1] / "shared")]
ALLOCATORS = {"default": None, "expandable": "expandable_segments:True"}
# Rows and tokens a row: none of them is a size that the planner's measurements use.
MODELS = {"tiny": (2, 24), "llama": (3, 1344), "gpt2": (5, 608), "qwen2": (2, 1152)}
GIB = 2**30


def built(name):
    """The model, on the meta device, and its batch."""
    import torch

    rows, length = MODELS[name]
    ids = torch.zeros(rows, length, dtype=torch.int64, device="meta")
    with torch.device("meta"):
        if name in ("tiny", "llama"):
            from llama import LM

            return LM("1b" if name == "llama" else "tiny", ckpt=False), (ids, ids)
        import transformers

        if name == "gpt2":
            sizes = {"n_layer": 36, "n_embd": 1280, "n_head": 20, "n_positions": 640}
            config = transformers.GPT2Config(**sizes, use_cache=False)
        else:
            sizes = {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 20}
            heads = {"num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 151936}
            config = transformers.Qwen2Config(**sizes, **heads, tie_word_embeddings=True, use_cache=False)
        model = transformers.AutoModelForCausalLM.from_config(config)
    return model, {"input_ids": ids, "labels": ids}


def asked(args):
    """What every plan is asked, but for the limit."""
    return {"precision": "bf16"} if args.device == "cuda" else {}


def limits_of(name, args):
    """From the smallest that is planned, with a hundredth more, to what the model takes whole."""
    import torch

    import zeroshard as zs

    def needed(limit):
        model, batch = built(name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        machine = {"machine": "H200"} if args.device == "cuda" else {}
        plan = zs.plan(model, optimizer, ranks=1, limit=int(limit), batch=batch, **machine, **asked(args))
        return plan.chosen.asked

    whole = needed(2**47)
    least, most = 0.0, float(whole)
    while most - least > 0.01 * whole:
        middle = (least + most) / 2
        try:
            needed(middle)
            most = middle
        except zs.PlanError:
            least = middle
    step = (1.06 * whole / (1.01 * most)) ** (1 / max(args.limits - 1, 1))
    return [math.ceil(1.01 * most * step**number) for number in range(args.limits)]


def child(args):
    """One run, in this process."""
    import torch

    import zeroshard as zs

    name, limit = args.models[0], args.limits
    model, batch = built(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    row = {"end": "trained", "losses": []}
    try:
        run = zs.shard(model, optimizer, limit=limit, batch=batch, **asked(args))
        row |= {"plan": run.plan.chosen.label, "planned": run.plan.chosen.device}
        rows, length = MODELS[name]
        for number in range(args.steps):
            generator = torch.Generator().manual_seed(number)
            ids = torch.randint(0, 32000, (rows, length), generator=generator).to(args.device)
            loss = model(input_ids=ids, labels=ids).loss if isinstance(batch, dict) else model(ids, ids)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            row["losses"].append(round(loss.item(), 4))
    except zs.PlanError as error:
        row |= {"end": "refused", "error": str(error)[:400]}
    except torch.OutOfMemoryError as error:
        row |= {"end": "out of memory", "error": str(error)[:400]}
    if args.device == "cuda":
        row |= {
            "peak": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
        }
    if any(not math.isfinite(loss) for loss in row["losses"]):
        row["end"] = "losses that are no numbers"
    print("RESULT " + json.dumps(row), flush=True)


def measured(case, args):
    words = ["--models", case["model"], "--limits", case["limit"], "--steps", args.steps, "--device"]
    setting = ALLOCATORS[case["allocator"]]
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    if setting is not None:
        environment |= dict.fromkeys(names, setting)
    environment["OMP_NUM_THREADS"] = str(max((os.cpu_count() or 1) // args.together, 1))
    begun = time.monotonic()
    command = [sys.executable, __file__, *map(str, words), args.device, "--child"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.limit_s, env=environment)
    except subprocess.TimeoutExpired:
        return case | {"end": f"took more than {args.limit_s:g} s"}
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    row = {"end": "failed"} if line is None else json.loads(line.removeprefix("RESULT "))
    if row["end"] != "trained":
        row["said"] = done.stderr.strip()[-1500:]
    return case | row | {"seconds": round(time.monotonic() - begun, 1)}


def report(rows, args):
    """A table of all runs, beside the file with their figures."""
    from provenance import command, preamble, version

    torch_version = ", ".join(sorted({row["torch"] for row in rows})) or version("torch")
    known = {
        "hardware": args.hardware,
        "commit": ", ".join(sorted({row["commit"][:7] for row in rows})),
        "command": command(),
    }
    text = preamble("Runs under limits that only just fit", "Llama-shaped, GPT-2 and Qwen2", **known)
    trained = sum(row["end"] == "trained" for row in rows)
    text += [
        f"{len(rows)} runs, {trained} of which trained all of their {args.steps} steps; torch",
        f"{torch_version}, {args.together} at a time on one GPU, each under its own limit. Peaks are the",
        "allocator's, in GiB.",
        "",
        "| model | allocator | limit | planned | peak | reserved | plan | end |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row["model"], row["allocator"], row["limit"])):
        sizes = (row["limit"], *(row.get(name, 0) for name in ("planned", "peak", "reserved")))
        shown = " | ".join(f"{size / GIB:.2f}" if size else "" for size in sizes)
        plan = row.get("plan", "").removeprefix("stage 0, ")
        text.append(f"| {row['model']} | {row['allocator']} | {shown} | {plan} | {row['end']} |")
    args.out.with_suffix(".md").write_text("\n".join(text) + "\n")


class Memory:
    """Lets runs begin as long as their limits fit on the GPU together."""

    def __init__(self, room):
        self._room, self._changed = room, Condition()

    def take(self, nbytes):
        with self._changed:
            self._changed.wait_for(lambda: self._room >= nbytes)
            self._room -= nbytes

    def give(self, nbytes):
        with self._changed:
            self._room += nbytes
            self._changed.notify_all()


def main():
    from provenance import commit, version

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--models", nargs="+", default=["llama", "gpt2", "qwen2"], choices=list(MODELS))
    parser.add_argument("--allocators", nargs="+", default=list(ALLOCATORS), choices=list(ALLOCATORS))
    parser.add_argument("--limits", type=int, default=10, help="for each model and allocator")
    parser.add_argument("--choose", type=Path, help="write the limits of each model there, and end")
    parser.add_argument("--chosen", type=Path, help="take them from there: choosing them takes minutes")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--together", type=int, default=5)
    parser.add_argument("--room-gib", type=float, default=120.0, help="of the GPU, for all together")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no run begins")
    parser.add_argument("--limit-s", type=float, default=240.0, help="for one run")
    parser.add_argument("--hardware", default="one NVIDIA H200, 16 cores")
    parser.add_argument("--out", type=Path, default=Path("gpu-limits.json"))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return 0
    if args.choose:
        args.choose.write_text(json.dumps({name: limits_of(name, args) for name in args.models}) + "\n")
        return 0
    chosen = json.loads(args.chosen.read_text()) if args.chosen else {}
    begun, now = time.monotonic(), commit()
    known = json.loads(args.out.read_text()) if args.out.exists() else []
    rows = [row for row in known if row["commit"] == now]
    there = {(row["model"], row["allocator"], row["limit"]) for row in rows}
    memory = Memory(int(args.room_gib * GIB))
    cases = [
        {"model": name, "allocator": allocator, "limit": limit, "commit": now, "torch": version("torch")}
        for name in args.models
        for limit in chosen.get(name) or limits_of(name, args)
        for allocator in (args.allocators if args.device == "cuda" else ["default"])
    ]

    def one(case):
        if (case["model"], case["allocator"], case["limit"]) in there:
            return
        memory.take(case["limit"])
        try:
            if time.monotonic() - begun < args.seconds:
                row = measured(case, args)
                rows.append(row)
                args.out.write_text(json.dumps(rows, indent=1) + "\n")
                report(rows, args)
                said = f"{row['model']:>6} {row['allocator']:<10} {row['limit'] / GIB:7.2f} GiB  {row['end']}"
                print(f"{said}  {row.get('plan', '')}", flush=True)
        finally:
            memory.give(case["limit"])

    with ThreadPoolExecutor(args.together) as pool:
        list(pool.map(one, cases))
    wrong = [row for row in rows if row["end"] != "trained"]
    print(f"{len(rows)} of {len(cases)} runs, {len(wrong)} of them ended otherwise than trained")
    for row in wrong:
        print(json.dumps(row, indent=1))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
