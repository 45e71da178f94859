"""Twenty steps, a save, a fresh model and optimizer, a load and twenty more, for every kind of run.

python benchmarks/checkpoints/resume.py --out

First at the same number of ranks: the bits of forty steps in one go, for every stage, optimizer, tier, form
of the master and the moments, scaler and sync policy. Then a checkpoint of 2 ranks at stage 3 with its state
on the disk, loaded by 1, 3, 4 and 7 ranks at other stages, tiers and precisions: the same weights and moments
to the bit, and training that goes on as plain PyTorch does when it cuts the batch so.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # as ranks have: sums are split among threads
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import cut_run as case
import kept
import torch
from recipes import Recipe
from torch import Tensor

import zeroshard as zs
from zeroshard.testing import ranks

PATIENCE = 600.0
ROWS = 84  # of a batch: 1, 2, 3, 4 and 7 ranks get equal shares
SAVED = {"stage": 3, "clip_norm": float("inf"), "offload": case.Disk.of(optimizer="disk")}
HOST = {"clip_norm": float("inf"), "offload": zs.Offload(threads=1)}
SPLIT = {"offload": zs.Offload(threads=1, master="split"), "precision": "bf16", "clip_norm": float("inf")}
LOADED: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank, stage 3, device": (1, {"stage": 3}),
    "3 ranks, stage 2, device": (3, {"stage": 2}),
    "4 ranks, stage 1, host": (4, {"stage": 1, **HOST}),
    "7 ranks, stage 3, device": (7, {"stage": 3}),
    "3 ranks, stage 3, disk": (3, SAVED),
    "4 ranks, stage 0, device": (4, {"stage": 0}),
    "3 ranks, stage 2, host, split master, bf16": (3, {"stage": 2, **SPLIT}),
    "4 ranks, stage 3, device, bf16": (4, {"stage": 3, "precision": "bf16"}),
}


NOTE = """Plain PyTorch in one process has differences of the same size when it cuts the batch for another
number of ranks from the same step on: sums of floats depend on where they are cut. The bias of attention's
keys has a gradient of zero but for rounding, since softmax takes the same off all of them; Adam divides a
gradient by its size, and so makes steps of noise. It changes nothing that the model computes."""


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    names = sorted(one.keys() | other.keys())
    return [n for n in names if n not in one or n not in other or not torch.equal(one[n], other[n])]


def same_world(name: str, folder: Path, half: int) -> dict[str, Any]:
    """One row: how many tensors differ from those of a run that was never cut."""
    recipe, options = case.MATRIX[name]
    pool, path = ranks(2), folder / "half"
    through = pool.run(case.whole, recipe, options, half, timeout=PATIENCE)
    saved = pool.run(case.first, path, recipe, options, False, half, timeout=PATIENCE)
    loaded = pool.run(case.second, path, recipe, options, True, None, half, timeout=PATIENCE)
    pairs = list(zip(loaded, through, strict=True))
    wrong = [n for got, want in pairs for n in differing(got.weights, want.weights)]
    wrong += [n for got, was in zip(loaded, saved, strict=True) for n in differing(got.held, was.held)]
    losses = all(got.losses == want.losses[half:] for got, want in pairs)
    random = all(got.draws == was.draws for got, was in zip(loaded, saved, strict=True))
    good = not wrong and losses and random
    return {
        "run": name,
        "weights and moments that differ": len(wrong),
        "losses": "the same bits" if losses else "DIFFER",
        "random numbers": "the same" if random else "DIFFER",
        "verdict": "exact" if good else "NOT EXACT",
    }


def largest(one: dict[str, Tensor], other: dict[str, Tensor], meaningful: bool) -> float:
    pairs = {n: one[n] - other[n] for n in one}
    if meaningful:
        pairs = {n: case.without_key_bias(n, d) for n, d in pairs.items()}
    return max(float(d.abs().max()) for d in pairs.values())


def other_worlds(folder: Path, half: int) -> list[dict[str, Any]]:
    """Rows: what arrives, and how far training goes apart from the run that was never cut."""
    recipe, rows = Recipe(), []
    through = ranks(2).run(case.whole, recipe, SAVED, half, ROWS, timeout=PATIENCE)[0]
    saved = ranks(2).run(case.first, folder / "disk", recipe, SAVED, False, half, ROWS, timeout=PATIENCE)[0]
    plain = case.by_hand(recipe, (2, 2), half, ROWS)
    for name, (world, options) in LOADED.items():
        halves = ranks(world).run(
            case.second, folder / "disk", recipe, options, True, None, half, ROWS, timeout=PATIENCE
        )
        wrong = [n for got in halves for n in differing(got.held, saved.held)]
        narrow = "precision" in options
        hand = case.by_hand(recipe, (2, world), half, ROWS)
        apart = [largest(halves[0].weights, through.weights, only) for only in (False, True)]
        own = [largest(hand, plain, only) for only in (False, True)]
        good = not wrong and (narrow or apart[1] < 1e-6)
        rows.append(
            {
                "loaded by": name,
                "weights and moments that differ": len(wrong),
                "largest difference in the end": "bf16 from here" if narrow else f"{apart[0]:.1e}",
                "of plain PyTorch": "" if narrow else f"{own[0]:.1e}",
                "without the keys' bias": "" if narrow else f"{apart[1]:.1e}",
                "of plain PyTorch, without": "" if narrow else f"{own[1]:.1e}",
                "verdict": "same" if good else "DIFFERS",
            }
        )
        print(rows[-1], flush=True)
    return rows


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--half", type=int, default=20, help="steps before the save, and after it")
    parser.add_argument("--only", help="runs whose name has this in it")
    parser.add_argument("--out", action="store_true", help="write benchmarks/results/resume.json, .md")
    asked = parser.parse_args(arguments)
    model = "a GPT of 3 blocks (an MLP where a scaler is tried), 2 ranks, batches of 12 and 84 rows"
    facts = kept.facts(f"resume: {asked.half} steps, a save, a load, {asked.half} more", model)
    began = time.monotonic()
    chosen = [name for name in case.MATRIX if asked.only is None or asked.only in name]
    alike = []
    with tempfile.TemporaryDirectory() as place:
        for number, name in enumerate(chosen):
            (folder := Path(place, str(number))).mkdir()
            alike.append(same_world(name, folder, asked.half))
            print(alike[-1], flush=True)
        other = other_worlds(Path(place), asked.half) if asked.only is None else []
    found = {
        **facts,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "same world": alike,
        "other worlds": other,
    }
    body = ["## The same number of ranks", "", *kept.table(alike), "", "## Another number of ranks", ""]
    body += ["Saved by 2 ranks at stage 3 with master and moments on the disk.", "", *kept.table(other), ""]
    body += [NOTE]
    text = kept.show(found, body)
    print(text)
    if asked.out:
        kept.keep("resume", found, text)
    return int(any(row["verdict"] not in ("exact", "same") for row in [*alike, *other]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
