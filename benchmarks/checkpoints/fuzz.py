"""Hand mutants of checkpoints, and of other libraries' files, to everything that reads them.

python benchmarks/checkpoints/fuzz.py --mutants 10000 --out

Only our own error comes out, nothing is written outside, and memory stays where it was; anything else ends
it with the seed and the number of the mutant.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import kept
from mutants import fuzz_headers, fuzz_manifests, fuzz_sources, peak_bytes

# Each with its share of the mutants: reading a pickle takes longer.
KINDS = {
    "manifests": (fuzz_manifests, 0.6),
    "headers of tensor files": (fuzz_headers, 0.4),
    "torch.save, torch.distributed.checkpoint, indexes": (fuzz_sources, 0.1),
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--mutants", type=int, default=10_000, help="of manifests and headers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", action="store_true", help="write benchmarks/results/fuzz.json, .md")
    asked = parser.parse_args(arguments)
    facts = kept.facts("mutated checkpoints: only our own error comes out", "small checkpoints, mutated")
    began, rows = time.monotonic(), []
    for kind, (fuzz, share) in KINDS.items():
        before = peak_bytes()
        with tempfile.TemporaryDirectory() as place:
            tried = fuzz(Path(place), round(asked.mutants * share), asked.seed)
        grown = (peak_bytes() - before) / 2**20
        rows.append(
            {
                "mutants of": kind,
                "tried": tried.mutants,
                "refused by the first check": tried.refused,
                "read further": tried.accepted,
                "other than our error": 0,
                "peak memory grew by, MiB": f"{grown:.0f}",
            }
        )
        print(rows[-1], flush=True)
    found = {
        **facts,
        "seed": asked.seed,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "rows": rows,
    }
    text = kept.show(found, kept.table(rows))
    print(text)
    if asked.out:
        kept.keep("fuzz", found, text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
