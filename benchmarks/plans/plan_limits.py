"""Limits from generous to impossible: each trains within it, or is refused before anything is allocated.

    python benchmarks/plans/plan_limits.py                # three models × 20 limits on two ranks; minutes
    python benchmarks/plans/plan_limits.py --models gpt --steps 5

Bytes are counted from outside: what operations make during a step, beside what the run books. Writes
`results/plan-limits.md` and `.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [
    str(ROOT / "tests" / "support"),
    str(ROOT / "src"),
    str(ROOT / "benchmarks" / "shared"),
]  # the first and the last have a `models`

import plan_models  # noqa: E402
from provenance import RESULTS, command, commit, hardware, preamble, version  # noqa: E402
from torch import nn  # noqa: E402

import zeroshard as zs  # noqa: E402
from zeroshard.testing import ranks  # noqa: E402


def sweep(name: str, steps: int) -> list[dict[str, Any]]:
    """On one rank: for every limit the plan and the bytes measured, or the refusal; and at 99 % of what each
    plan needs, whether another one fits."""
    told = []
    for number in range(steps):
        limit = int(plan_models.TOP[name] * 0.9 ** (number * 20 / steps))
        row = attempt(name, limit)
        told.append(row)
        if row["planned"]:
            less = attempt(name, int(row["planned"] * 0.99))
            row["below"] = {key: less[key] for key in ("limit", "plan", "measured", "refused")}
            row["below"]["another"] = less["settings"] != row["settings"]
    return told


def attempt(name: str, limit: int) -> dict[str, Any]:
    model, optimizer, batch = plan_models.case(name)
    row: dict[str, Any] = {
        "limit": limit,
        "plan": "",
        "planned": 0,
        "measured": 0,
        "refused": "",
        "settings": "",
    }
    try:
        run = zs.shard(model, optimizer, limit=limit, batch=batch)
    except zs.PlanError as error:
        untouched = all(type(p) is nn.Parameter for p in model.parameters())
        return row | {"refused": str(error) if untouched else f"TOUCHED: {error}"}
    device, _ = plan_models.measured_step(run, model, optimizer, batch)
    assert run.plan is not None
    chosen = run.plan.chosen
    run.close()
    resting = batch.nbytes + sum(b.nbytes for b in model.buffers())
    return row | {
        "plan": chosen.label,
        "planned": chosen.device,
        "measured": device + resting,
        "settings": str(chosen.settings),
    }


def table(name: str, rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"## {name}",
        "",
        "| limit | plan | planned | measured | at 99 % of it |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        if row["refused"]:
            lines.append(
                f"| {row['limit']:,} | refused: {row['refused'].split(':', 1)[1].strip()[:90]} … | | | |"
            )
            continue
        below = row["below"]
        then = "refused" if below["refused"] else f"{below['plan']}: {below['measured']:,}"
        lines.append(
            f"| {row['limit']:,} | {row['plan']} | {row['planned']:,} | {row['measured']:,} | {then} |"
        )
    return [*lines, ""]


def faults(name: str, rows: list[dict[str, Any]]) -> list[str]:
    """What must not be: a byte over a limit, a model touched and then refused, the same plan for less."""
    found = []
    for row in rows:
        for one in (row, row.get("below", {})):
            if one.get("measured", 0) > one.get("limit", 0):
                found.append(f"{name}: {one['measured']:,} of {one['limit']:,} bytes with {one['plan']}")
            if str(one.get("refused", "")).startswith("TOUCHED"):
                found.append(f"{name}: refused {one['limit']:,} after it had touched the model")
        if row["planned"] and not row["below"]["refused"] and not row["below"]["another"]:
            found.append(f"{name}: the same plan at 99 % of {row['planned']:,}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", default=["gpt", "resnet", "moe"], choices=list(plan_models.TOP)
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {}
    wrong: list[str] = []
    for name in args.models:
        results[name], *others = ranks(2).run(sweep, name, args.steps, timeout=1500)
        for rows in (results[name], *others):
            wrong += faults(name, rows)
        done = sum(bool(row["plan"]) for row in results[name])
        print(f"{name}: {done} limits trained within, {args.steps - done} refused", flush=True)
    path = args.out or RESULTS / "plan-limits.json"
    facts = {
        "hardware": hardware(),
        "torch": version("torch"),
        "commit": commit(),
        "command": command(),
    }
    path.write_text(json.dumps(facts | {"faults": wrong, "results": results}, indent=1) + "\n")
    head = [
        *preamble("Limits from generous to impossible, two ranks", ", ".join(args.models)),
        "Bytes of rank 0. Nothing exceeded its limit; what was refused had not been touched; at 99 % of what "
        "a plan needs another one was chosen, and fitted, or none was."
        if not wrong
        else "\n".join(f"- {text}" for text in wrong),
        "",
    ]
    tables = [line for name, rows in results.items() for line in table(name, rows)]
    path.with_suffix(".md").write_text("\n".join([*head, *tables]))
    print("\n".join(wrong) or "nothing exceeded its limit")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
