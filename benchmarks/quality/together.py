"""All of it together on the GPT of the demo: stage 3, coded gradients and coded parameters, against data
parallel training without codecs: bytes that a rank sends in a step, and the loss on text held out.

    python benchmarks/quality/together.py --out                    # some minutes on two cores
    python benchmarks/quality/together.py --steps 20 --seeds 0     # to see that it works

Data parallel training is stage 0, which sends what an all-reduce does: 2 (N-1)/N of the gradient.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("benchmarks/shared", "src", "examples")]

import provenance  # noqa: E402
import torch  # noqa: E402
from gpt_data import Batches, load  # noqa: E402
from gpt_model import GPT, Config  # noqa: E402

import zeroshard as zs  # noqa: E402
from zeroshard.testing import ranks  # noqa: E402

WORLD, ROWS, VOCABULARY, HELD_OUT = 2, 2, 2048, 48
UNITS = ("embedding", "blocks.*", "head")
FEWER, CLOSE = 0.70, 0.01  # the bars: bytes spared, and how far the loss may be
NORMS = {"*norm*": None}
PLAIN = "data parallel, no codecs"


def sharded(gradients: zs.Codec, parameters: Any, units: Any = "none") -> dict[str, Any]:
    """Stage 3 with both coded, norms' gradients excepted; gathered once a step where there is one unit."""
    codecs = NORMS | {"*": gradients}
    return {"stage": 3, "units": units, "compress": codecs, "gather": parameters}


WAYS: dict[str, dict[str, Any]] = {
    PLAIN: {"stage": 0},
    "stage 3, Int8 gradients and parameters": sharded(zs.Int8(), zs.Int8(), UNITS),
    "stage 3, Int4 gradients, Int8 parameters": sharded(zs.Int4(), zs.Int8(), UNITS),
    "the same, gathered once a step (one unit)": sharded(zs.Int4(), zs.Int8()),
    "the same, Int4 parameters": sharded(zs.Int4(), zs.Int4(block=32, feedback=False)),
    "stage 3, Int4 gradients, Int4 changes of parameters": sharded(
        zs.Int4(), zs.Delta(zs.Int4(block=128, feedback=False))
    ),
    "stage 3, Int4 gradients, TwoBit changes of parameters": sharded(
        zs.Int4(), zs.Delta(zs.TwoBit(block=64, feedback=False))
    ),
    "stage 3, TwoBit gradients, TwoBit changes of parameters": sharded(
        zs.TwoBit(), zs.Delta(zs.TwoBit(block=64, feedback=False))
    ),
    "stage 3, Ternary gradients, Int4 changes of parameters": sharded(
        zs.Ternary(), zs.Delta(zs.Int4(block=128, feedback=False))
    ),
    "stage 3, Ternary gradients, TwoBit changes of parameters": sharded(
        zs.Ternary(), zs.Delta(zs.TwoBit(block=64, feedback=False))
    ),
    "stage 3, Ternary gradients, TwoBit changes, OneBit those of embedding and head": sharded(
        zs.Ternary(),
        NORMS
        | dict.fromkeys(
            ("embedding*", "head*"), zs.Delta(zs.OneBit(block=512, warmup_steps=0, feedback=False))
        )
        | {"*": zs.Delta(zs.TwoBit(block=64, feedback=False))},
    ),
    "stage 3, TwoBit gradients, OneBit changes of parameters": sharded(
        zs.TwoBit(block=512), zs.Delta(zs.OneBit(block=512, warmup_steps=0, feedback=False))
    ),
    "stage 0, ranks apart for 24 steps": {
        "stage": 0,
        "sync": zs.Local(steps=24, outer=zs.Nesterov(0.7, 0.6)),
    },
    "stage 3, LowRank gradients, Int4 changes of parameters": sharded(
        zs.LowRank(rank=4), zs.Delta(zs.Int4(block=128, feedback=False))
    ),
}


@dataclass
class Outcome:
    """One way, over the seeds."""

    name: str
    losses: list[float]
    sent: float  # bytes a step
    uncompressed: float
    error: dict[str, float]
    seconds: float


texts = cache(load)


def train(options: dict[str, Any], steps: int, seed: int) -> dict[str, Any]:
    """On a rank. The demo's loop, for a number of steps instead of minutes."""
    tokenizer, text, held_out = texts(VOCABULARY)
    torch.manual_seed(seed)
    model = GPT(Config(len(tokenizer)))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    run = zs.shard(model, optimizer, bucket_bytes="1MiB", **options)
    training = Batches(text, model.config.context, ROWS, run.rank, run.size)
    validation = Batches(held_out, model.config.context, ROWS, run.rank, run.size)
    began = time.perf_counter()
    for step in range(steps):
        done = step / steps
        warm_up = min(1.0, (done + 0.002) / 0.03)
        for group in optimizer.param_groups:
            group["lr"] = 8e-3 * warm_up * (0.05 + 0.95 * (0.5 + 0.5 * math.cos(math.pi * done)))
        model(*training[seed * 10_000 + step]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(options.get("sync"), zs.Local):
        run.synchronise()
    seconds, stats = (time.perf_counter() - began) / steps, run.stats()
    with torch.no_grad(), run.kept_full():
        model.eval()
        loss = statistics.fmean(float(model(*validation[index])) for index in range(HELD_OUT))
    run.close()
    moved = ("reduce", "gather", "publish", "outer")
    return {
        "loss": loss,
        "sent": sum(stats.sent.get(kind, 0) for kind in moved) / steps,
        "uncompressed": sum(stats.uncompressed.get(kind, 0) for kind in moved) / steps,
        "error": stats.error,
        "seconds": seconds,
    }


def measure(name: str, steps: int, seeds: list[int]) -> Outcome:
    losses, told = [], {}
    for seed in seeds:
        everyone = ranks(WORLD).run(train, WAYS[name], steps, seed, timeout=3600)
        told = everyone[0]
        losses.append(statistics.fmean(rank["loss"] for rank in everyone))
    return Outcome(name, losses, told["sent"], told["uncompressed"], told["error"], told["seconds"])


def table(outcomes: list[Outcome]) -> str:
    """Beside the first: how many bytes fewer, and how far the loss is."""
    first = outcomes[0]
    lines = [
        "| | bytes a rank sends in a step | fewer than data parallel | loss on held-out text | beside it |",
        "|---|---|---|---|---|",
    ]
    for one in outcomes:
        fewer = 1 - one.sent / first.sent
        loss = statistics.fmean(one.losses)
        beside = statistics.fmean(a / b for a, b in zip(one.losses, first.losses, strict=False)) - 1
        figures = f"{one.sent / 1e3:,.0f} kB | {100 * fewer:.1f} % | {loss:.4f} | {100 * beside:+.2f} %"
        name = one.name if len(one.losses) == len(first.losses) else f"{one.name} ({len(one.losses)} seed)"
        lines.append(f"| {name} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--ways", type=int, nargs="+", help="their numbers, in place of all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", action="store_true", help="write a result file")
    parser.add_argument("--keep", type=Path, help="write the outcomes as JSON, to be joined")
    parser.add_argument("--join", type=Path, nargs="+", help="outcomes of other runs, in place of training")
    asked = parser.parse_args()
    outcomes, commit = join(asked.join or []), provenance.commit()
    for number, name in enumerate(() if asked.join else WAYS):
        if asked.ways and number not in asked.ways:
            continue
        outcomes.append(measure(name, asked.steps, asked.seeds))
        print(outcomes[-1], flush=True)
    if asked.keep:
        asked.keep.write_text(json.dumps([asdict(one) for one in outcomes]))
        return
    if asked.out:
        write(outcomes, asked, commit)
    print(table(outcomes))
    best = [1 - o.sent / outcomes[0].sent for o in outcomes[1:] if close(o, outcomes[0])]
    if asked.steps >= 200 and max(best, default=0.0) < FEWER:
        sys.exit(f"no way sends {100 * FEWER:.0f} % fewer bytes with a loss within {100 * CLOSE:.0f} %")


def join(paths: list[Path]) -> list[Outcome]:
    """Outcomes of runs apart, the seeds of a way together, in the order of `WAYS`."""
    found = [Outcome(**each) for path in paths for each in json.loads(path.read_text())]
    result = []
    for name in WAYS:
        mine = [one for one in found if one.name == name]
        if mine:
            losses = [loss for one in mine for loss in one.losses]
            result.append(replace(mine[0], losses=losses))
    return result


def write(outcomes: list[Outcome], asked: argparse.Namespace, commit: str) -> None:
    """The result so far."""
    tokens = WORLD * ROWS * 128
    seeds = " ".join(map(str, asked.seeds))
    about = (
        "\n".join(provenance.preamble("Codecs together", "the demo's GPT of 4 blocks", commit=commit))
        + f"\nGPT of the demo ({VOCABULARY} tokens, 4 blocks), fp32, "
        f"{WORLD} ranks, {asked.steps} steps of {tokens} tokens, seeds {seeds}. Norms travel as "
        "they are. Bytes are the mean of all steps, warm-up included. "
        f"torch {torch.__version__}.\n\n{table(outcomes)}\n"
    )
    (provenance.RESULTS / "cpu-together.md").write_text(about, encoding="utf-8")
    data = {
        "commit": commit,
        "steps": asked.steps,
        "ways": [asdict(one) for one in outcomes],
    }
    (provenance.RESULTS / "cpu-together.json").write_text(json.dumps(data, indent=1) + "\n")


def close(one: Outcome, first: Outcome) -> bool:
    return statistics.fmean(one.losses) <= (1 + CLOSE) * statistics.fmean(first.losses)


if __name__ == "__main__":
    main()
