"""What the planner of today says of runs that were measured before: a file of `plan_error.py`, predicted anew
with the machine's figures that it records. No GPU is needed.

    python benchmarks/gpu/plan_again.py benchmarks/results/<file>.json
    python benchmarks/gpu/plan_again.py <file>.json --figure efficiency=0.82 --figure host_rate=123e9
"""

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "src")]
from plan_error import summary, table  # noqa: E402
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
    parser.add_argument("file", type=Path)
    parser.add_argument("--figure", action="append", default=[], metavar="NAME=VALUE", help="of the machine")
    args = parser.parse_args()
    figures = {name: float(value) for name, value in (one.split("=") for one in args.figure)}
    rows = [row for row in json.loads(args.file.read_text())["rows"] if "measured" in row]
    made = [again(row, figures) for row in rows]
    print("\n".join([*summary(made), "", *table(made)]))


if __name__ == "__main__":
    main()
