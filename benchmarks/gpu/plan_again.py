"""What the planner of today says of runs that were measured before: files of `plan_error.py`, predicted anew
with the machine's figures that they record. No GPU is needed. Of a case that several have, the last counts.

    python benchmarks/gpu/plan_again.py benchmarks/results/<file>.json
    python benchmarks/gpu/plan_again.py <file>.json --figure efficiency=0.82 --figure host_rate=123e9
    python benchmarks/gpu/plan_again.py <one>.json <two>.json --out benchmarks/results/<file>.json
"""

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "src")]
from plan_error import key, summary, table, write  # noqa: E402
from plan_one import options_of, predicted  # noqa: E402

from zeroshard.machine import Machine  # noqa: E402

KNOWN = {field.name for field in fields(Machine)}


def again(row, figures):
    """The row with what is predicted for it now."""
    told = {name: value for name, value in row["machine"].items() if name in KNOWN}
    machine = Machine(**(told | figures))
    found = predicted(row, row["rows"], options_of(row), machine, machine.memory)
    device = found.device - found.kinds.get("margin", 0)
    return row | {"predicted": {"device": device, "host": found.host, "step": found.step}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, help="write them into one file of results, and a table beside it")
    parser.add_argument("--note", help="a paragraph for that table: what there is to know of these runs")
    parser.add_argument("--figure", action="append", default=[], metavar="NAME=VALUE", help="of the machine")
    args = parser.parse_args()
    figures = {name: float(value) for name, value in (one.split("=") for one in args.figure)}
    told = [json.loads(file.read_text()) for file in args.files]
    rows = {
        key(row): row | {"commit": row.get("commit", one["commit"])}
        for one in told
        for row in one["rows"]
        if "measured" in row
    }
    made = [again(row, figures) for row in rows.values()]
    for row in made:
        row["measured"].pop("blocks", None)  # what lay at the peak: large, and of use to its own commit only
    if args.out:
        facts = {name: value for name, value in told[0].items() if name != "rows"}
        command = (
            "python benchmarks/gpu/plan_error.py`, predicted anew by `python benchmarks/gpu/plan_again.py"
        )
        write(args.out, facts | {"command": command, "note": args.note}, made)
    print("\n".join([*summary(made), "", *table(made)]))


if __name__ == "__main__":
    main()
