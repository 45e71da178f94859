"""What the host's updates cost the thread that launches: a model on the host, run in several ways by turns.

    python benchmarks/gpu/beside.py                                   # 0.4 B, recomputed and not
    python benchmarks/gpu/beside.py --rounds 3 --ways none now "8 threads"
    python benchmarks/gpu/beside.py --device cpu --size tiny --seq 32 --rounds 1

Of every way the step and the calls of forward and backward, as medians over the rounds, beside those of the
same model without offload. Ways are patches of this file, not options of the library: what pays goes there.
Every result is printed, and written to --out, as soon as it is there.
"""

import argparse
import json
import statistics
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "src")]
from plan_one import clean, load_kernels, measured, options_of, warm_up  # noqa: E402

import zeroshard as zs  # noqa: E402
from zeroshard.tiers import TierCopies  # noqa: E402


@contextmanager
def transfer_workers_in_python():
    """Copies, waits and what lies between them as calls of threads that want the interpreter."""
    with patch.object(TierCopies, "native", False):
        yield


# By name: threads of the host (None: as many as it takes by itself; 0: nothing is offloaded), and the patch.
WAYS = {
    "none": (0, nullcontext),
    "now": (None, nullcontext),
    "couriers in Python": (None, transfer_workers_in_python),
    "12 threads": (12, nullcontext),
    "10 threads": (10, nullcontext),
    "8 threads": (8, nullcontext),
    "6 threads": (6, nullcontext),
}


def run(way, case, device):
    threads, how = WAYS[way]
    options = options_of(case | {"offload": "none" if threads == 0 else "host"})
    if threads:
        options["offload"] = zs.Offload(threads=threads)
    with how():
        told = measured(case | {"brief": False}, case["rows"], options, device)
    clean(device)
    return {"step": told["step"], **told.get("calls", {})}


def shown(way, goes, beside):
    parts = [f"{way:<28}"]
    for name in beside:
        values = [1e3 * go[name] for go in goes]
        middle = statistics.median(values)
        spread = f"({min(values):.0f}-{max(values):.0f})"
        parts.append(f"{name} {middle:6.1f} {spread} {middle - beside[name]:+6.1f}")
    return "  ".join(parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--size", default="0.4b")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=500, help="no further round is begun after these")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    ways, start = list(dict.fromkeys(["none", *args.ways])), time.monotonic()
    if device.type == "cuda":
        warm_up(device)
        load_kernels(args.size, args.rows, args.seq, device)
    found = {}
    for number in range(args.rounds):
        for recompute in (True, False):
            case = {"size": args.size, "world": 1, "stage": 0, "recompute": recompute, "rows": args.rows}
            for way in ways:
                if number and time.monotonic() - start > args.seconds:
                    continue
                told = run(way, case | {"seq": args.seq, "steps": 4}, device)
                found.setdefault(f"recompute {recompute}", {}).setdefault(way, []).append(told)
                print(f"round {number} recompute {recompute} {way}: {told}", flush=True)
                if args.out:
                    args.out.write_text(json.dumps(found, indent=1))
    for how, of in found.items():
        print(f"\n{how}; ms, and beside no offload")
        beside = {name: 1e3 * statistics.median(go[name] for go in of["none"]) for name in of["none"][0]}
        for way, goes in of.items():
            print(shown(way, goes, beside))


if __name__ == "__main__":
    main()
