"""Train seeded combinations of codecs, policies, stages, tiers and odd models, and resume them.

python benchmarks/exact/combinations_sync.py --seeds 0 200 --seconds 480 --out

A combination holds if ranks agree on every weight, looking and saving change nothing, a new job resumes bit
by bit, a job that has gone on rolls back bit by bit (even seeds), exact codecs change nothing, `close()`
leaves what `gathered()` showed, and another configuration loads the same weights and trains on; or if it is
refused with our own error, the same on all ranks. Anything else is printed with the line that repeats it.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import combinations_sync_rank as lives
import kept
from combinations_sync_case import CUT, Case, draw
from combinations_sync_rank import differing

from zeroshard.testing.processes import Outcome, Ranks

Found = list[dict[str, Any]]  # of each rank


@dataclass
class Tally:
    """What came of the seeds."""

    outcomes: Counter[str] = field(default_factory=Counter)
    features: dict[str, Counter[str]] = field(default_factory=dict)
    refusals: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)

    def count(self, case: Case, outcome: str) -> None:
        self.outcomes[outcome] += 1
        for feature in case.features():
            self.features.setdefault(feature, Counter())[outcome] += 1

    def refused(self, text: str, what: str = "") -> None:
        self.refusals[what + (text if len(text) <= 140 else f"{text[:140]}…")] += 1


class Pools:
    """Ranks by their number, kept between cases."""

    def __init__(self) -> None:
        self._pools: dict[int, Ranks] = {}

    def live(self, life: Callable[..., Any], case: Case, *path: str) -> Found | str:
        """What each rank found, or the text of the refusal on which all agree."""
        ranks = self._pools.setdefault(case.world, Ranks(case.world))
        outcomes = ranks.attempt(lives.refusable, life, case, *path, timeout=60)
        failed = [told(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome.kind]
        assert not failed, "\n".join(failed)
        found = [outcome.value for outcome in outcomes]
        texts = {value if isinstance(value, str) else "trained" for value in found}
        if any(isinstance(value, str) for value in found):
            assert len(texts) == 1, f"ranks differ in what they refuse: {sorted(texts)}"
            return str(found[0])
        agreed(found)
        return found

    def stop(self) -> None:
        for ranks in self._pools.values():
            ranks.stop()


def told(rank: int, outcome: Outcome) -> str:
    return f"rank {rank} {outcome.kind}: {outcome.message}\n" + "\n".join(outcome.trace.splitlines()[-14:])


def agreed(found: Found) -> None:
    """All ranks have one model, and had the same steps of it where they step together."""
    first = found[0]
    for rank, value in enumerate(found):
        assert not value["close differs"], f"rank {rank}: close() left other {value['close differs']}"
        same(first["weights"], value["weights"], f"rank {rank} has other weights than rank 0")
        if not first["apart"]:
            assert value["skips"] == first["skips"], (
                f"ranks skip differently: {first['skips']}, {value['skips']}"
            )
            norms = value["norms"]
            assert norms == first["norms"] or any(norm != norm for norm in norms), "ranks see other norms"


def same(expected: lives.Weights, got: lives.Weights, complaint: str) -> None:
    names = differing(expected, got)
    assert not names, f"{complaint}: {', '.join(names[:4])}{f' and {len(names) - 4} more' * (len(names) > 4)}"


def check(case: Case, path: str, pools: Pools, tally: Tally) -> str:
    """What came of a case: `held` or `refused`; an `AssertionError` says what is wrong with it."""
    whole = pools.live(lives.whole, case)
    if isinstance(whole, str):
        tally.refused(whole)
        return "refused"
    weights, middle = whole[0]["weights"], whole[0]["middle"]
    assert case.boom or all(weight.isfinite().all() for weight in weights.values()), "weights are not finite"
    for life, complaint in (
        (lives.cut, f"looking ({', '.join(case.looks)}) and saving changed the weights"),
        (lives.resumed, "a new job resumes differently"),
        (lives.rolled, "a job that goes back differs"),
    ):
        if life is lives.rolled and case.seed % 2:
            continue
        found = trained(pools.live(life, case, path), complaint)
        if life is lives.cut and case.sends_anew:
            whole, weights, middle = found, found[0]["weights"], found[0]["middle"]
        if life is not lives.cut:
            same(middle, found[0]["middle"], "other weights were loaded than saved")
        same(weights, found[0]["weights"], complaint)
        if life is lives.resumed and not case.boom:
            losses = [value["losses"] for value in found]
            assert losses == [value["losses"][CUT:] for value in whole], "a new job has other losses"
    exact = None if case.sends_anew else case.exact()
    if exact is not None:
        found_exact = pools.live(lives.whole, exact)
        if not isinstance(found_exact, str):
            same(weights, found_exact[0]["weights"], "a codec that claims to be exact changes weights")
    loaded = pools.live(lives.other, case.other(), path)
    if isinstance(loaded, str):
        tally.refused(loaded, "at load into another configuration: ")
    else:
        got = {name: weight.float() for name, weight in loaded[0]["middle"].items()}
        expected = {name: weight.float() for name, weight in middle.items()}
        same(expected, got, f"another configuration loads other weights ({case.other()})")
    return "held"


def trained(found: Found | str, what: str) -> Found:
    assert not isinstance(found, str), f"{what}: refused where the run before was not: {found}"
    return found


def attempt(seeds: Iterable[int], budget: float, verbose: bool) -> Tally:
    tally, pools, end = Tally(), Pools(), time.monotonic() + budget
    try:
        for seed in seeds:
            if time.monotonic() > end:
                break
            case = draw(seed)
            path = tempfile.mkdtemp(prefix="zs-combinations-")
            try:
                outcome = check(case, f"{path}/checkpoint", pools, tally)
            except AssertionError as error:
                outcome = "failed"
                again = f"python benchmarks/exact/combinations_sync.py --seeds {seed} {seed + 1}"
                tally.failures.append({"seed": seed, "again": again, "error": str(error), "case": str(case)})
                print(f"FAILED: {again}\n{case}\n{error}\n", flush=True)
            finally:
                shutil.rmtree(path, ignore_errors=True)
            tally.count(case, outcome)
            if verbose:
                print(seed, outcome, flush=True)
    finally:
        pools.stop()
    return tally


def report(found: dict[str, Any], tally: Tally) -> str:
    features = [
        {"feature": name, **{outcome: count[outcome] for outcome in ("held", "refused", "failed")}}
        for name, count in sorted(tally.features.items())
    ]
    refusals = [
        {"times": times, "refusal": text.replace("|", "/")} for text, times in tally.refusals.most_common()
    ]
    failures = [f"- `{one['again']}`: {one['error'].splitlines()[0]}" for one in tally.failures]
    body = ["## Failures", "", *(failures or ["None."]), "", "## Features", "", *kept.table(features)]
    return kept.show(found, [*body, "", "## Refusals", "", *kept.table(refusals)])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 100), metavar=("FROM", "TO"))
    parser.add_argument("--first", type=int, nargs="*", default=[], metavar="SEED", help="tried before those")
    parser.add_argument("--seconds", type=float, default=480.0, help="no seed begins after that")
    parser.add_argument("--verbose", action="store_true", help="a line for each seed")
    parser.add_argument("--out", action="store_true", help="write results/combinations-sync.*")
    asked = parser.parse_args(arguments)
    facts = kept.facts(
        "combinations of codecs, policies, stages and tiers, resumed from a checkpoint",
        "small odd models, drawn by seed",
    )
    began, rest = time.monotonic(), range(*asked.seeds)
    seeds = itertools.chain(asked.first, (seed for seed in rest if seed not in asked.first))
    tally = attempt(seeds, asked.seconds, asked.verbose)
    found = {
        **facts,
        "seconds": round(time.monotonic() - began),
        **{outcome: tally.outcomes[outcome] for outcome in ("held", "refused", "failed")},
        "features": tally.features,
        "refusals": tally.refusals,
        "failures": tally.failures,
    }
    text = report(found, tally)
    print(text)
    if asked.out:
        kept.keep("combinations-sync", found, text)
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
