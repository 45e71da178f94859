"""Systems side by side on one GPU: each in a process of its own, in turn, repeated; a table of ratios to
plain PyTorch.

    python benchmarks/gpu/compare.py core            # stages 0 to 3 and FSDP2 at 1.26 B
    python benchmarks/gpu/compare.py offload-1b      # optimizer on the host
    python benchmarks/gpu/compare.py offload-7b      # the same with the GPU capped at 32 GiB
    python benchmarks/gpu/compare.py --out FOLDER …  # also writes FOLDER/gpu-<suite>.json and .md
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "shared"))
from provenance import command, commit, preamble  # noqa: E402

HOST, SPLIT = "zs-1:optimizer=host", "zs-1:optimizer=host,master=split"
CORE = ("plain", "zs-0", "zs-1", "zs-2", "zs-3", HOST, "fsdp2", "zs-3:optimizer=device,master=split")
SUITES = {
    # name: (size, systems with extra arguments, repeats, steps)
    "core": ("1b", {s: [] for s in CORE}, 2, 10),
    "offload-1b": ("1b", {"plain": [], HOST: [], SPLIT: []}, 2, 12),
    "offload-7b": ("7b", {"plain": [], HOST: ["--cap-gib", "32"], SPLIT: ["--cap-gib", "32"]}, 1, 7),
}


def measure(system, size, extra, steps):
    command = [sys.executable, str(HERE / "one.py"), system, size, "--steps", str(steps), *extra]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), None)
    if line is None:
        return {"system": system, "error": (done.stderr.strip().splitlines() or ["no output"])[-1][:300]}
    return json.loads(line[len("RESULT ") :])


def table(rows):
    base = statistics.median(r["step_s"] for r in rows if r["system"] == "plain" and "error" not in r)
    lines = [
        "| system | step, s (min to max) | ÷ plain | GPU peak, GiB | host peak, GiB | host bytes a "
        "parameter | losses |",
        "|---|---|---|---|---|---|---|",
    ]
    reference = next(r["losses"] for r in rows if r["system"] == "plain")
    for system in dict.fromkeys(r["system"] for r in rows):
        mine = [r for r in rows if r["system"] == system]
        if any("error" in r for r in mine):
            lines.append(f"| {system} | failed: {next(r['error'] for r in mine if 'error' in r)} | | | | | |")
            continue
        times = [t for r in mine for t in r["times"][3:]]
        middle = statistics.median(r["step_s"] for r in mine)
        gap = max(abs(a - b) for a, b in zip(mine[0]["losses"], reference, strict=False))
        agrees = "agree" if gap < 5e-3 else f"differ by {gap:.1e}"
        peak, host = max(r["gpu_peak_gib"] for r in mine), max(r["VmHWM"] for r in mine)
        per = host * 2**30 / (mine[0]["params_b"] * 1e9)
        lines.append(
            f"| {system} | {middle:.3f} ({min(times):.3f} to {max(times):.3f}) | {middle / base:.3f} | "
            f"{peak:.3f} | {host:.2f} | {per:.2f} | {agrees} |"
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("suites", nargs="+", choices=list(SUITES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default=None)
    parser.add_argument("--systems", nargs="+", help="of the suites' systems only these")
    args = parser.parse_args()
    for suite in args.suites:
        size, systems, repeats, steps = SUITES[suite]
        rows = []
        for _ in range(repeats):
            for system, extra in systems.items():
                if args.systems and system not in args.systems:
                    continue
                rows.append(measure(system, size, extra, steps))
                print(suite, system, rows[-1].get("step_s", rows[-1].get("error")), flush=True)
                if args.out:  # after each, since it may be cut off
                    write(args, suite, size, rows)
        print(table(rows), flush=True)


def write(args, suite, size, rows):
    import torch

    args.out.mkdir(parents=True, exist_ok=True)
    name = f"gpu-{suite}"
    facts = {
        "suite": suite,
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "commit": args.commit or commit(),
        "command": command(),
        "rows": rows,
    }
    (args.out / f"{name}.json").write_text(json.dumps(facts, indent=1))
    known = {"hardware": facts["device"], "commit": facts["commit"]}
    lines = [
        *preamble(f"{suite} on one GPU", f"Llama-shaped, {size}", **known),
        f"torch {facts['torch']}, 8 × 2048 tokens a step, recomputation per block, clipping at 1.0, medians, "
        "one process per row in turn.",
        "",
        table(rows),
    ]
    (args.out / f"{name}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
