"""Save and load the same bytes with ZeroShard, torch.distributed.checkpoint and torch.save, in turn.

python benchmarks/checkpoints/checkpoints.py --out

Two ranks hold a model at stage 3 with AdamW's moments. A round saves and loads with each system, then saves
beside a training step; each round begins with another system. Once with all data synced to the device before
a save counts as done (ours always does, the others are told to), and once with none of that. Seconds are
those of the slower rank, processor seconds those of both; tables show medians, bars compare best rounds.

Then how long the call of a background save of ours takes, by kind of run (`checkpoints_calls.py`), and
what one costs training in all (`checkpoints_beside.py`): by one rank of one thread, which leaves cores to
spare as a job on GPUs does, and by two ranks which use every core. Intervals are the middle 95 % of the
medians of pairs drawn again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import kept

HERE = Path(__file__).resolve().parent
SYSTEMS = {"ours": "ZeroShard", "dcp": "torch.distributed.checkpoint", "torch": "torch.save, rank by rank"}
HELD_UP = 0.05  # of a blocking save
SPARE, BUSY = "cores to spare", "every core busy"
DRAWS = 2000  # of all pairs anew, for an interval
EXPLAINED = (
    "Where every core is busy, what a save needs of them comes out of training: one pass over the rank's "
    "bytes (copy and checksum) and little more, since the disk fetches them by itself. Cores to spare hide "
    "that pass; what is left is the call, the interpreter's lock, and traffic of memory and disk."
)
CALLED = (
    "Nothing is copied in the call, whatever the state is: whoever changes it waits for the copy before. "
    "Updates of the host that are under way are waited for by the thread that copies. With `Delayed()` the "
    "call waits for the gradients under way, which the next backward would wait for."
)
EXTRA = 256 * 2**20  # bytes a rank, beyond one staging copy for background saves

Rows = Sequence[dict[str, Any]]


def measure(folder: Path, megabytes: int, repeats: int) -> dict[str, Any]:
    out = folder / "rows.json"
    command = [sys.executable, "-m", "zeroshard", "run", "--ranks", "2", "--threads", "1"]
    command += [str(HERE / "checkpoints_rank.py"), str(folder / "files"), str(out)]
    command += ["--megabytes", str(megabytes), "--repeats", str(repeats)]
    subprocess.run(command, check=True)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def delays(folder: Path, asked: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """One rank of one thread; and two which have all cores between them."""
    found = {}
    half = max(1, (os.cpu_count() or 2) // 2)
    cases = ((SPARE, 1, 1, asked.device, asked.pairs), (BUSY, 2, half, "cpu", max(asked.pairs // 12, 1)))
    for name, ranks, threads, device, pairs in cases:
        out = folder / f"beside-{ranks}.json"
        command = [sys.executable, "-m", "zeroshard", "run", "--ranks", str(ranks), "--threads", str(threads)]
        command += [str(HERE / "checkpoints_beside.py"), str(folder / "beside"), str(out)]
        command += ["--megabytes", str(asked.megabytes // 2 * ranks), "--repeats", str(pairs)]
        subprocess.run([*command, "--device", device], check=True)
        found[name] = {"ranks": ranks, "threads": threads, "device": device, **json.loads(out.read_text())}
    return found


def calls(folder: Path, asked: argparse.Namespace) -> dict[str, Rows]:
    """By kind of state: blocking saves and calls of background ones, of two ranks."""
    out = folder / "calls.json"
    command = [sys.executable, "-m", "zeroshard", "run", "--ranks", "2", "--threads", "1"]
    command += [str(HERE / "checkpoints_calls.py"), str(folder / "calls"), str(out)]
    subprocess.run([*command, "--megabytes", str(asked.megabytes)], check=True)
    found: dict[str, Rows] = json.loads(out.read_text())
    return found


def call_share(rows: Rows) -> float:
    """The call of a background save as a part of a blocking one, both medians."""
    return statistics.median(r["call"] for r in rows) / statistics.median(r["blocking"] for r in rows)


def called(found: dict[str, Rows]) -> list[dict[str, str]]:
    return [
        {
            "": kind,
            "blocking save, ms": f"{1e3 * statistics.median(r['blocking'] for r in rows):.1f}",
            "call of a background one, ms": f"{1e3 * statistics.median(r['call'] for r in rows):.1f}",
            "of a blocking save": f"{call_share(rows):.1%}",
        }
        for kind, rows in found.items()
    ]


def delay_of(found: dict[str, Any]) -> tuple[float, float, float]:
    """Seconds that a background save takes from training: its call, slower steps, and waiting for its end.
    The median of all pairs, and an interval for it."""
    delays, draw = [row["beside"] - row["alone"] for row in found["rows"]], random.Random(0)
    medians = sorted(statistics.median(draw.choices(delays, k=len(delays))) for _ in range(DRAWS))
    return statistics.median(delays), medians[DRAWS // 40], medians[-DRAWS // 40 - 1]


def shares_of(found: dict[str, Any]) -> tuple[float, str]:
    """The same as a part of a blocking save, and in words."""
    save = statistics.median(found["blocking"])
    share, low, high = (delay / save for delay in delay_of(found))
    return share, f"{share:.1%} ({low:.1%} to {high:.1%})"


def in_all(found: dict[str, dict[str, Any]]) -> list[dict[str, str]]:
    lines = []
    for name, case in found.items():
        rows = case["rows"]

        def ms(field: str, rows: Rows = rows) -> str:
            return f"{1e3 * statistics.median(row[field] for row in rows):.1f}"

        delay, low, high = (f"{1e3 * number:.1f}" for number in delay_of(case))
        lines.append(
            {
                "": f"{name} ({case['ranks']} × {case['threads']} threads, {case['device']})",
                "blocking save, ms": f"{1e3 * statistics.median(case['blocking']):.1f}",
                "pairs": str(len(rows)),
                "steps": str(case["steps"]),
                "alone, ms": ms("alone"),
                "with a save, ms": ms("beside"),
                "of it its call": ms("call"),
                "of it waiting for its end": ms("late"),
                "delay, ms (95 % interval)": f"{delay} ({low} to {high})",
                "of a blocking save": shares_of(case)[1],
            }
        )
    return lines


def timed(rows: Rows) -> Rows:
    """Without the round that warms up: it counts for memory, which later ones find allocated."""
    return [row for row in rows if row["repeat"] >= 0]


def middle(rows: Rows, what: str, sync: bool, field: str = "seconds") -> float:
    return statistics.median(row[field] for row in rows if row["what"] == what and row["sync"] == sync)


def ratio(rows: Rows, sync: bool, over: str, under: str, field: str = "seconds") -> float:
    """The median of the rounds' own ratios: what a busy minute does falls on both."""

    def column(what: str) -> dict[int, float]:
        return {row["repeat"]: row[field] for row in rows if row["what"] == what and row["sync"] == sync}

    one, other = column(over), column(under)
    return statistics.median(one[repeat] / other[repeat] for repeat in one)


def best(rows: Rows, sync: bool, over: str, under: str, field: str = "seconds") -> float:
    """The ratio of the best rounds: other work on the machine can only add time."""
    least = [
        min(row[field] for row in rows if row["what"] == what and row["sync"] == sync)
        for what in (over, under)
    ]
    return least[0] / least[1]


def lines_of(rows: Rows, sync: bool, total: int) -> list[dict[str, str]]:
    found = []
    for verb in ("save", "load", "background"):
        for name, title in SYSTEMS.items():
            what = f"{verb} {name}"
            if not any(row["what"] == what for row in rows):
                continue
            seconds = middle(rows, what, sync)
            found.append(
                {
                    "": what.replace(name, "").strip().replace("background", "background save, with a step"),
                    "system": title,
                    "s": f"{seconds:.2f}",
                    "processor s": f"{middle(rows, what, sync, 'cpu'):.2f}",
                    "MB/s a rank": f"{total / seconds / 1e6:.0f}",
                    "÷ ours": f"{ratio(rows, sync, what, f'{verb} ours'):.2f}",
                    "extra memory, MiB a rank": f"{middle(rows, what, sync, 'extra') / 2**20:.0f}",
                }
            )
    return found


def beside(rows: Rows, sync: bool) -> list[dict[str, str]]:
    found = []
    for name in ("ours", "dcp"):
        held, save = middle(rows, f"held up {name}", sync), middle(rows, f"save {name}", sync)
        alone, step = middle(rows, f"step alone {name}", sync), middle(rows, f"step beside {name}", sync)
        found.append(
            {
                "system": SYSTEMS[name],
                "training held up, ms": f"{1e3 * held:.1f}",
                "of it by the call": f"{1e3 * middle(rows, f'held up by the call {name}', sync):.1f}",
                "of its blocking save": f"{ratio(rows, sync, f'held up {name}', f'save {name}'):.1%}",
                "blocking save, ms": f"{1e3 * save:.0f}",
                "a step alone, ms": f"{1e3 * alone:.0f}",
                "a step beside it, ms": f"{1e3 * step:.0f}",
            }
        )
    return found


def bars(
    rows: Rows, every: Rows, total: int, spare: dict[str, Any], kinds: dict[str, Rows]
) -> list[dict[str, str]]:
    """What was promised, and whether it is so."""
    found = []

    def judge(bar: str, value: float, most: float, shown: str) -> None:
        found.append({"bar": bar, "measured": shown, "verdict": "met" if value <= most else "MISSED"})

    for sync in (True, False):
        how = "synced" if sync else "not synced"
        for verb in ("save", "load"):
            for other in ("dcp", "torch"):
                share = best(rows, sync, f"{verb} ours", f"{verb} {other}")
                spent = best(rows, sync, f"{verb} ours", f"{verb} {other}", "cpu")
                shown = f"{share:.2f} of its time, {spent:.2f} of its processor time"
                judge(f"{verb}, {how}: at most the time of {SYSTEMS[other]}", share, 1.0, shown)
        share = ratio(rows, sync, "held up ours", "save ours")
        judge(
            f"the call of a background save, {how}: at most 5 % of a blocking one",
            share,
            HELD_UP,
            f"{share:.1%}",
        )
    for kind, found_rows in kinds.items():
        share = call_share(found_rows)
        bar = f"the call of a background save, {kind}: at most 5 % of a blocking one"
        judge(bar, share, HELD_UP, f"{share:.1%}")
    share, shown = shares_of(spare)
    bar = "a background save in all, with cores to spare: at most 5 % of a blocking one"
    judge(bar, share, HELD_UP, shown)
    for what, copy in (("save ours", 0), ("load ours", 0), ("background ours", total)):
        most = max(row["extra"] for row in every if row["what"] == what)
        beyond = " beyond its copy" if copy else ""
        shown = f"{(most - copy) / 2**20:.0f} MiB"
        judge(f"{what.removesuffix(' ours')}: at most 256 MiB a rank{beyond}", most - copy, EXTRA, shown)
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=600, help="of weights and moments, both ranks")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=120, help="of steps with and without a background save")
    parser.add_argument("--device", default="cpu", help="of the rank that leaves cores to spare: cpu or cuda")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured (default: the temporary one)")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    parser.add_argument("--out", action="store_true", help="write benchmarks/results/checkpoints.json, .md")
    asked = parser.parse_args(arguments)
    facts = kept.facts(
        "checkpoints: save and load beside torch.distributed.checkpoint and torch.save",
        "one tensor for each block of a GPT; see `job`",
    )
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=asked.folder) as place:
        measured = measure(Path(place), asked.megabytes, asked.repeats)
        kinds = calls(Path(place), asked)
        delayed = delays(Path(place), asked)
    rows, total = measured["rows"], measured["bytes of a rank"]
    judged = bars(timed(rows), rows, total, delayed[SPARE], kinds)
    found = {
        **facts,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "job": f"2 ranks of one thread, stage 3, AdamW, {total / 1e6:.0f} MB a rank, {asked.repeats} rounds",
        "bars": judged,
        "rows": rows,
        "calls": kinds,
        "beside": delayed,
    }
    body = ["## Bars", "", *kept.table(judged), "", "## What a background save costs training in all", ""]
    body += [*kept.table(in_all(delayed)), "", EXPLAINED, ""]
    body += [
        "## The call of a background save, by kind of run",
        "",
        *kept.table(called(kinds)),
        "",
        CALLED,
        "",
    ]
    for sync in (True, False):
        body += [
            f"## {'Synced to the device' if sync else 'Not synced'}",
            "",
            *kept.table(lines_of(timed(rows), sync, total)),
            "",
        ]
        body += [*kept.table(beside(timed(rows), sync)), ""]
    text = kept.show(found, body)
    print(text)
    if asked.out:
        kept.keep("checkpoints", found, text)
    return int(asked.check and any(row["verdict"] != "met" for row in judged))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
