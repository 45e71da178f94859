"""What plans foresee beside what others have published of the same runs, and how an exchange grows with
ranks. Nothing is run.

    python benchmarks/plans/plan_published.py --out

Published: Llama 3.1 8 B at stage 3 on H100s (96 GB, 500 W), 2 x 8192 tokens a device in bf16, eager, of
torchtitan (benchmarks/llama3_h100_202412_torchtitan.md, December 2024). Its selective recomputation of
products is planned as every second block recomputed, which is about as much work. `efficiency` of an H100 is
fitted to both rows.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks" / "shared")]

import torch  # noqa: E402
from provenance import RESULTS, command, commit, preamble, version  # noqa: E402

import zeroshard as zs  # noqa: E402
from zeroshard.cli._architecture import build  # noqa: E402
from zeroshard.machine import machine  # noqa: E402
from zeroshard.planner.pricing import ring_seconds  # noqa: E402

LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA |= {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}
TOKENS = 2 * 8192
PUBLISHED = {8: 5762, 128: 5605}  # GPUs: tokens a second on each
RINGS = (8, 64, 1024, 16384)


def foreseen(ranks: int) -> zs.Plan:
    """The plan of the published run, of the memory that its devices have for tensors."""
    with torch.device("meta"):
        model = build(LLAMA, "llama")
    return zs.plan(
        model,
        ranks=ranks,
        limit="95GiB",
        batch="2x8192",
        machine="H100",
        precision="bf16",
        stage=3,
        recompute="*layers.*[02468]",
        offload=None,
    )


def row(ranks: int, told: int) -> dict[str, float]:
    step = foreseen(ranks).chosen.step
    return {"gpus": ranks, "published": told, "estimated": TOKENS / step, "error": TOKENS / step / told - 1}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", action="store_true", help="write it to benchmarks/results")
    args = parser.parse_args()
    rows = [row(ranks, told) for ranks, told in PUBLISHED.items()]
    h100 = machine("H100")
    rings = {ranks: h100.latency + ring_seconds(ranks, h100) for ranks in RINGS}
    facts = {
        "torch": version("torch"),
        "commit": commit(),
        "command": command(),
    }
    lines = [
        *preamble(
            "Plans beside published runs", "Llama 3.1 8 B", hardware="H100s, as published; nothing was run"
        ),
        "",
        *(__doc__ or "").split("\n\n", 2)[2].splitlines(),
        "",
        "| GPUs | published, tokens/s a GPU | estimated | error |",
        "|---|---|---|---|",
        *(f"| {r['gpus']} | {r['published']:,} | {r['estimated']:,.0f} | {r['error']:+.1%} |" for r in rows),
        "",
        f"An exchange takes {h100.latency * 1e6:.0f} µs beside its bytes, and what a ring's hops take: "
        f"{h100.hop * 1e6:.1f} µs to a device of the node and {h100.node_hop * 1e6:.1f} µs to another, as "
        "NCCL's tuning model has them for LL128 (src/graph/tuning.cc). Not measured here.",
        "",
        "| ranks | an exchange, ms |",
        "|---|---|",
        *(f"| {ranks:,} | {seconds * 1e3:.3f} |" for ranks, seconds in rings.items()),
        "",
    ]
    print("\n".join(lines))
    if args.out:
        path = RESULTS / "plan-published.json"
        path.write_text(json.dumps(facts | {"rows": rows, "rings": rings}, indent=1) + "\n")
        path.with_suffix(".md").write_text("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
