"""Every policy with every codec at every stage, beside plain PyTorch that does by hand what they say.

python benchmarks/exact/sync_by_hand.py --ranks 2 3 --out

The reference is `tests/support/by_hand.py`: one process that plays the ranks and in which nothing of
ZeroShard
computes. All ranks have to have its bits, in fp32; what cannot be combined has to be refused by `shard()`.
Optimizer, accumulation, transport and size of the buckets change from cell to cell.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # as ranks have: sums are split among threads
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import kept
import torch
from by_hand import Cell, Trained, sharded_one, trained_by_hand

import zeroshard as zs
from zeroshard.testing import ranks

CODECS: dict[str, Any] = {
    "none": None,
    "Cast bf16": zs.Cast("bfloat16"),
    "Cast fp16": zs.Cast("float16"),
    "Int8": zs.Int8(),
    "Int8 feedback": zs.Int8(block=64, feedback=True),
    "Int4": zs.Int4(),
    "TopK": zs.TopK(ratio=0.1),
    "TopK after 2": zs.TopK(ratio=0.02, warmup_steps=2),
    "OneBit": zs.OneBit(warmup_steps=0),
    "OneBit after 2": zs.OneBit(warmup_steps=2, block=64),
}
AT_ONCE = 24  # cells a call


def policies(world: int) -> dict[str, Any]:
    rates = tuple(1 + 0.5 * rank for rank in range(world))
    return {
        "EveryStep": zs.EveryStep(),
        "Delayed": zs.Delayed(),
        "Delayed after 2": zs.Delayed(warmup_steps=2),
        "Local 3, averaged": zs.Local(steps=3, outer=zs.Nesterov(1.0, 0.0)),
        "Local 4, 2 fragments": zs.Local(steps=4, fragments=2),
        "Local 2, rates": zs.Local(steps=2, rates=rates),
    }


def cells_of(world: int) -> dict[tuple[str, str, int], Cell]:
    """By policy, codec and stage."""
    found: dict[tuple[str, str, int], Cell] = {}
    for policy, sync in policies(world).items():
        for codec, compress in CODECS.items():
            for stage in range(4):
                at = len(found)
                found[policy, codec, stage] = Cell(
                    world,
                    stage,
                    sync,
                    compress,
                    bucket_bytes=(2048, 1, 1 << 20)[at % 3],
                    steps=8,
                    accumulate=(1, 1, 2)[at // 3 % 3],
                    optimizer=("adamw", "sgd")[at // 2 % 2],
                    transport=("shm", "gloo")[at // 4 % 2],
                )
    return found


def attempted(cells: list[Cell]) -> list[Trained | str]:
    """On a rank: what each cell came to, or the text with which it was refused."""
    found: list[Trained | str] = []
    for cell in cells:
        try:
            found.append(sharded_one(cell))
        except zs.OptionError as error:
            found.append(str(error))
    return found


def wrong_with(cell: Cell, outs: list[Trained | str]) -> str | None:
    """What differs; `None` where all ranks have the bits of the reference."""
    expected = trained_by_hand(cell)
    for rank, out in enumerate(outs):
        assert isinstance(out, Trained)
        apart = [n for n, want in expected.weights.items() if not torch.equal(out.weights[n], want)]
        if apart:
            far = max(float((out.weights[n] - expected.weights[n]).abs().max()) for n in apart)
            return f"rank {rank} is up to {far:.2g} off in {', '.join(apart)}"
    return None


def compare(worlds: list[int]) -> tuple[list[dict[str, Any]], list[str], Counter[str]]:
    """Rows of the table, failures, and refusals."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    failures, refusals = list[str](), Counter[str]()
    for world in worlds:
        cells = list(cells_of(world).items())
        for start in range(0, len(cells), AT_ONCE):
            some = cells[start : start + AT_ONCE]
            told = ranks(world).run(attempted, [cell for _, cell in some], timeout=600)
            for number, ((policy, codec, stage), cell) in enumerate(some):
                outs = [out[number] for out in told]
                row = rows.setdefault((policy, codec), {"policy": policy, "codec": codec})
                texts = {out for out in outs if isinstance(out, str)}
                wrong = None if texts else wrong_with(cell, outs)
                if len(texts) > 1 or (texts and any(isinstance(out, Trained) for out in outs)):
                    wrong = f"ranks refuse differently: {sorted(texts)}"
                refusals.update(texts)
                failures += [f"{cell}: {wrong}"] if wrong else []
                row[f"{world} ranks, stage {stage}"] = (
                    "DIFFERS" if wrong else "refused" if texts else "same bits"
                )
            print(f"{world} ranks: {start + len(some)} of {len(cells)} cells", flush=True)
    return list(rows.values()), failures, refusals


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--out", action="store_true", help="write benchmarks/results/sync-by-hand.*")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    facts, began = (
        kept.facts(
            "policies and codecs beside plain PyTorch by hand", "the net of `tests/support/by_hand.py`"
        ),
        time.monotonic(),
    )
    rows, failures, refusals = compare(asked.ranks)
    counted = Counter(value for row in rows for value in row.values())
    found = {
        **facts,
        "seconds": round(time.monotonic() - began),
        **{word: counted[word] for word in ("same bits", "refused", "DIFFERS")},
        "rows": rows,
        "failures": failures,
        "refusals": dict(refusals),
    }
    told = [{"times": times, "refusal": text.replace("|", "/")} for text, times in refusals.most_common()]
    body = ["## Failures", "", *([f"- {line}" for line in failures] or ["None."]), ""]
    text = kept.show(found, [*body, *kept.table(rows), "", "## Refusals", "", *kept.table(told)])
    print(text)
    if asked.out:
        kept.keep("sync-by-hand", found, text)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
