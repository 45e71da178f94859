"""Random combinations of features against plain PyTorch: stages, precisions, tiers, optimizers, odd models.

python benchmarks/exact/combinations.py --seeds 0 1000 --ranks 1 2 3 4 --seconds 480 --out
python benchmarks/exact/combinations.py --device cuda    # ranks share the GPUs, over NCCL
./do fuzz 600 5000    # for 600 seconds from seed 5000 on, and shrinks what fails

Each seed is a combination. As drawn, it may be one that ZeroShard refuses, which must be by an error of its
own with the same text on every rank. Then the nearest one that the documentation allows trains for seven
steps, every fourth beside another run in the same processes, half of the others until a new job with
another number of ranks and another configuration goes on from a checkpoint. Losses, evaluations and weights
are compared with a loop in plain PyTorch that knows nothing of ZeroShard. A seed that fails is shown with the
line that repeats it, and makes the exit status 1. With --shrink it is also brought to the smallest
combination that still fails, one feature less at a time, and shown with the line that repeats that.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # as ranks have: sums are split among threads
if "--device" in sys.argv[:-1]:  # before anything of it is imported, here and by ranks
    os.environ["COMBINATIONS_DEVICE"] = sys.argv[sys.argv.index("--device") + 1]

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import combinations_rank
import kept
import torch
from combinations_case import CODED, Case, Leg, allowed, draw, legs_of
from combinations_model import DEVICE
from combinations_plain import Plain, Trained
from combinations_shrink import from_text, shrunk, to_text

from zeroshard.testing import ranks

PATIENCE = 60.0
BESIDE = 1_000_000  # added to a seed for the run beside it
NOT_COUNTED = ("seed", "events", "hidden", "vocab", "blocks", "stage_bytes", "stages", "groups", "bucket")
SHARD_FIELDS = ("stage", "block", "dtype", "clip", "offload", "recompute")


@dataclass
class Tally:
    """What came out so far."""

    outcomes: Counter[str] = field(default_factory=Counter)
    features: Counter[tuple[str, str]] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)
    apart: float = 0.0  # the largest distance of fp32 weights, relative to the way they went

    def count(self, case: Case) -> None:
        for one in fields(case):
            if one.name not in NOT_COUNTED:
                self.features[one.name, str(getattr(case, one.name))] += 1
        for event in {name for names in case.events.values() for name in names}:
            self.features["event drawn", event] += 1

    def compare(self, leg: Leg, apart: float) -> None:
        if leg.case.wide and leg.case.offload not in CODED and leg.case.optimizer != "muon":
            self.apart = max(self.apart, apart)


@dataclass(frozen=True)
class Bounds:
    """How far a run may be from plain PyTorch: losses and evaluations relative to their size, weights to the
    way that training moved them. Low precision rounds in another order; int8 moments are not exact. Muon
    rounds to bf16 inside: gradients that differed by 1e-7 took plain PyTorch 0.023 of its way apart."""

    loss: float
    evaluation: float
    weights: float

    @classmethod
    def of(cls, case: Case) -> Bounds:
        coded = case.offload in CODED
        weights = 0.2 if not case.wide else 5e-2 if case.optimizer in ("muon", "lion") else 2e-3
        weights *= 2 if case.optimizer == "lion" else 1  # a sign is either way where a mean is nothing
        return cls(
            loss=(1e-4 if case.wide else 0.02) + 0.03 * coded,
            evaluation=(1e-4 if case.wide else 0.03) + 0.03 * coded,
            weights=weights + 0.25 * coded,
        )


def on_ranks(world: int, function: Any, *arguments: Any) -> list[Any]:
    """What each rank returns; a world of one is this process."""
    if world == 1:
        return [function(*arguments)]
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    return ranks(world, backend).run(function, *arguments, timeout=PATIENCE)


def farthest(got: list[float], want: list[float]) -> float:
    pairs = zip(got, want, strict=True)
    return max((abs(a - b) / abs(b) if math.isfinite(a) else math.inf for a, b in pairs), default=0.0)


def weight_faults(case: Case, outs: list[Trained], want: Trained) -> Iterator[str]:
    """Each weight: whole, the same on all ranks, and where plain PyTorch has it."""
    bound = Bounds.of(case).weights
    for name, right in want.weights.items():
        copies = [out.weights[name] for out in outs]
        if any(c.dtype != right.dtype or c.shape != right.shape for c in copies):
            yield f"{name} is {[(c.dtype, c.shape) for c in copies]}"
            continue
        if not all(torch.equal(c, copies[0]) for c in copies):
            yield f"{name} differs between ranks"
        off, way = float((copies[0] - right).norm()), float((right - want.first[name]).norm())
        if not math.isfinite(off):
            yield f"{name} is not finite"
        elif way == 0 and off > (1e-6 if case.wide else 4e-3 * float(right.norm())):
            yield f"{name} moved by {off:.2g}, and should not"
        elif way and off / way > 3 * bound:
            yield f"{name} is {off / way:.2g} of its way off"


def distance(outs: list[Trained], want: Trained) -> float:
    """Of all weights that moved at once, relative to the way they went."""
    pairs = [(outs[0].weights[n], w, want.first[n]) for n, w in want.weights.items()]
    pairs = [(got, w, first) for got, w, first in pairs if not torch.equal(w, first)]
    off = sum(float((got - w).norm()) ** 2 for got, w, _ in pairs)
    way = sum(float((w - first).norm()) ** 2 for _, w, first in pairs)
    return math.sqrt(off / max(way, 1e-30))


def faults(case: Case, outs: list[Trained], want: Trained) -> Iterator[str]:
    """What is not as in plain PyTorch."""
    bounds = Bounds.of(case)
    losses = [sum(each) / len(outs) for each in zip(*(out.losses for out in outs), strict=True)]
    if (off := farthest(losses, want.losses)) > bounds.loss:
        yield f"losses are {off:.2g} off: {losses}, not {want.losses}"
    for rank, out in enumerate(outs):
        if len(out.evaluations) != len(want.evaluations):
            yield f"rank {rank} has {len(out.evaluations)} evaluations, not {len(want.evaluations)}"
        elif (off := farthest(out.evaluations, want.evaluations)) > bounds.evaluation:
            yield f"evaluations of rank {rank} are {off:.2g} off"
    yield from weight_faults(case, outs, want)
    if (off := distance(outs, want)) > bounds.weights:
        yield f"all weights are {off:.2g} of their way off"


def refused(drawn: Case) -> str | None:
    """The text that every rank refuses the combination with, or None."""
    texts = on_ranks(drawn.world, combinations_rank.refusal, drawn)
    if len(set(texts)) > 1:
        raise AssertionError(f"ranks refuse differently: {texts}")
    text: str | None = texts[0]
    return text


def try_drawn(drawn: Case, fit: Case, tally: Tally) -> None:
    """The combination as drawn, where it is not one to train with."""
    if all(getattr(drawn, name) == getattr(fit, name) for name in SHARD_FIELDS):
        return
    text = refused(drawn)
    if text is None:
        tally.outcomes["accepted by shard() as drawn, not trained so"] += 1
    else:
        tally.outcomes["refused as drawn"] += 1
        tally.refusals[text.splitlines()[0]] += 1


def cases_of(seed: int) -> list[Case]:
    """The seed's combination, and for some seeds another that trains beside it."""
    drawn = draw(seed)
    cases = [allowed(drawn)]
    if seed % 4 == 3:
        others = (allowed(draw(seed + BESIDE + 1000 * n)) for n in range(1000))
        cases.append(next(other for other in others if other.world == drawn.world))
        cases = [replace(case, moves=None) for case in cases]
    return cases


def try_seed(seed: int, tally: Tally) -> list[str]:
    """Trains the seed's combination, alone or with another; returns what is wrong."""
    drawn = draw(seed)
    try_drawn(drawn, allowed(drawn), tally)
    return try_cases(cases_of(seed), tally)


def try_cases(cases: list[Case], tally: Tally) -> list[str]:
    """Trains allowed combinations in the same processes; returns what is wrong."""
    trainings = [legs_of(case) for case in cases]
    wrong = []
    with tempfile.TemporaryDirectory() as shared:
        answers = [
            on_ranks(legs[0].case.world, combinations_rank.train, list(legs), Path(shared))
            for legs in zip(*trainings, strict=True)
        ]
    for number, legs in enumerate(trainings):
        found, same_bits = list[str](), True
        for leg, of_ranks, want in zip(legs, answers, Plain(legs).train(), strict=True):
            outs = [answer[number] for answer in of_ranks]
            found += [
                f"seed {leg.case.seed}, {leg.first} to {leg.end}: {f}" for f in faults(leg.case, outs, want)
            ]
            same_bits = same_bits and all(
                torch.equal(out.weights[name], right) for out in outs for name, right in want.weights.items()
            )
            tally.compare(leg, distance(outs, want))
        wrong += found
        if not found:
            tally.outcomes["bit-equal" if same_bits else "equal within rounding"] += 1
            for leg in legs:
                tally.count(leg.case)
    return wrong


def outcome(trial: Callable[[], list[str]]) -> list[str]:
    """What is wrong, an exception included."""
    try:
        return trial()
    except Exception:
        return ["raised: " + traceback.format_exc()[-1500:]]


def attempt(seed: int, tally: Tally, shrink: float = 0.0) -> None:
    """Tries a seed, and says how to repeat it if it fails; then tries smaller ones for so many seconds."""
    wrong = outcome(lambda: try_seed(seed, tally))
    if not wrong:
        return
    tally.outcomes["FAILED"] += 1
    line = f"python benchmarks/exact/combinations.py --seeds {seed} {seed + 1} --device {DEVICE}"
    case = allowed(draw(seed))
    failure = {"repeat": line, "case": str(case), "wrong": wrong[:8]}
    tally.failures.append(failure)
    print(f"FAILED: {line}\n  {case}", *wrong[:8], sep="\n  ", flush=True)
    if shrink:
        failure["smallest"] = smallest(cases_of(seed), shrink)
        print(f"  the smallest that fails: {failure['smallest']}", flush=True)


def fails(case: Case) -> bool:
    return bool(outcome(lambda: try_cases([case], Tally())))


def smallest(cases: list[Case], seconds: float) -> str:
    """The line that repeats the smallest combination that still fails, of those that fail alone."""
    end = time.monotonic() + seconds
    case = next(filter(fails, cases), None)
    if case is None:
        return "none alone: only beside one another, or not every time"
    found = shrunk(case, fails, lambda: time.monotonic() < end)
    return f"python benchmarks/exact/combinations.py --case '{to_text(found)}'"


def try_text(text: str) -> int:
    """Tries one combination; the exit status."""
    wrong = outcome(lambda: try_cases([from_text(text)], Tally()))
    print(*(wrong or ["equal"]), sep="\n")
    return int(bool(wrong))


def body(tally: Tally) -> list[str]:
    """The tables for people."""
    lines = ["## Outcomes", "", *kept.table([{"outcome": n, "runs": c} for n, c in tally.outcomes.items()])]
    lines += ["", "## Failures", ""]
    lines += [f"- `{f['repeat']}`: {f['wrong'][-1].splitlines()[-1]}" for f in tally.failures] or ["None."]
    lines += ["", "## Refusals of combinations as drawn", ""]
    lines += kept.table(
        [{"text": t.replace("|", "\\|"), "times": c} for t, c in tally.refusals.most_common()]
    )
    by_feature: dict[str, list[str]] = {}
    for (name, value), count in sorted(tally.features.items()):
        by_feature.setdefault(name, []).append(f"{value} {count}")
    lines += ["", "## Runs equal to plain PyTorch, by feature", ""]
    return lines + kept.table(
        [{"feature": n.replace("_", " "), "runs": "; ".join(v)} for n, v in by_feature.items()]
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs=2, default=[0, 100], metavar=("FROM", "TO"))
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2, 3, 4], help="only these numbers of ranks"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no further seed after so long")
    parser.add_argument("--out", action="store_true", help="write benchmarks/results/combinations.json, .md")
    parser.add_argument("--case", help="this combination alone, as --shrink writes it")
    parser.add_argument(
        "--shrink",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="shrink each failure, for so long at most",
    )
    asked = parser.parse_args(arguments)
    facts = kept.facts(
        "random combinations: equal to plain PyTorch, or refused", "small odd models, drawn by seed"
    )
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    if asked.case is not None:
        return try_text(asked.case)
    began, tally, tried = time.monotonic(), Tally(), 0
    for seed in range(*asked.seeds):
        if draw(seed).world in asked.ranks:
            if time.monotonic() - began > asked.seconds:
                break
            attempt(seed, tally, asked.shrink)
            tried += 1
    found = {
        **facts,
        "seeds tried": tried,
        "seconds": round(time.monotonic() - began),
        "largest distance of fp32 weights over the way they went": f"{tally.apart:.1e}",
        "outcomes": dict(tally.outcomes),
        "failures": tally.failures,
        "refusals": dict(tally.refusals.most_common()),
        "features": [[name, value, count] for (name, value), count in sorted(tally.features.items())],
    }
    text = kept.show(found, body(tally))
    print(text)
    if asked.out:
        kept.keep("combinations" if DEVICE == "cpu" else f"combinations-{DEVICE}", found, text)
    return int(bool(tally.failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
