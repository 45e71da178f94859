"""Bytes by the interface's own counters: every codec, touched rows, local steps, and nodes with a cache.

    python benchmarks/links/bytes_sent.py --out          # some minutes; needs root (see namespaces.py)
    python benchmarks/links/bytes_sent.py --quick        # a small model, 2 ranks, seconds

Ranks sit in network namespaces of their own, whose interfaces carry nothing else. What is counted is what
the interface sent, headers, acknowledgements and agreements included, beside what the run itself says.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import ranks_apart
from bytes_sent_rank import LOCAL, Task, node_ways, ways
from namespaces import Link, address, network, why_not
from provenance import RESULTS, command, commit, hardware, preamble
from rich.console import Console
from rich.table import Table

LINK = Link(math.inf, 0.0)
# Times fewer bytes than the row that it is compared with.
CODECS = {"bf16": 1.95, "int8": 3.9, "int4": 7.5, "1-bit": 28.0, "top-k 1 %": 45.0}
NODES = {"node cache, int8 gather": 3.0, "node cache, int8": 3.0}


@dataclass(frozen=True)
class Row:
    """Bytes of a step, all ranks together: what their interfaces sent, and what the run counted."""

    name: str
    seen: float
    said: float
    against: str = ""
    times: float = 0.0
    bar: float = 0.0

    @property
    def holds(self) -> bool:
        return self.times >= self.bar


def counted(names: list[str], world: int, task: Mapping[str, int], timeout: float) -> dict[str, Row]:
    """Train in each way; on two nodes where there are more than two ranks."""
    each = max(world // 2, 1)
    tasks = [Task(names, rank, world, address(0), **task) for rank in range(world)]
    with network(2, LINK) as net:
        told = ranks_apart.run(net, "bytes_sent_rank.py", tasks, each, timeout)
    if told.problem:
        raise SystemExit(f"bytes_sent.py: {told.problem}\n{told.logs[0][-2000:]}")
    found = {}
    for name in names:
        # Ranks of a node share an interface: each of them read the same counter.
        seen = sum(answer[name]["seen"] for answer in told.answers) / each
        found[name] = Row(name, seen, sum(answer[name]["said"] for answer in told.answers))
    return found


def compared(row: Row, base: Row, bar: float = 0.0) -> Row:
    return Row(row.name, row.seen, row.said, base.name, base.seen / row.seen, bar)


def codec_rows(stages: tuple[int, ...], task: Mapping[str, int], timeout: float) -> list[Row]:
    """Gradients of two ranks; the first row of a stage is plain."""
    names = [name for name in ways() if name.startswith(tuple(f"stage {stage}," for stage in stages))]
    found, rows = counted(names, 2, task, timeout), []
    for name, row in found.items():
        stage, _, codec = name.partition(", ")
        rows.append(compared(row, found[f"{stage}, fp32"], CODECS.get(codec, 0.0)))
    return rows


def other_rows(task: Mapping[str, int], timeout: float) -> list[Row]:
    """An embedding's rows, against the dense gradient and the number of rows; and local steps."""
    names = [name for name in ways() if not name.startswith("stage")]
    found = counted(names, 2, task, timeout)
    dense, every = found.pop("1000 rows, dense"), found.pop("every step")
    rows = [dense]
    for name, row in found.items():
        if name == "local":
            rows += [every, compared(row, every, 0.99 * LOCAL)]
        else:
            rows.append(compared(row, dense, 0.95 * 16384 / int(name.split()[0])))
    return rows


def node_rows(each: int, task: Mapping[str, int], timeout: float) -> list[Row]:
    """What leaves a node at stage 3. Flat stage 3 keeps its last two units between forward and backward, so
    without codecs the bound is `each` x 3/2 less these."""
    found = counted(list(node_ways(each)), 2 * each, task, timeout)
    flat, bound = found["flat"], (3 - 2 / task["blocks"]) * each / 2
    bars = {**NODES, "node cache": 0.99 * bound}
    return [compared(row, flat, bars.get(name, 0.0)) for name, row in found.items()]


def tabulate(title: str, rows: list[Row]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("", "interface, a step", "more than the run says", "times fewer", "bar", ""):
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        times = f"{row.times:.2f}" if row.against and row.against != row.name else ""
        bar = f"{row.bar:.2f}" if row.bar else ""
        verdict = "" if not row.bar else "holds" if row.holds else "MISSED"
        more = f"{100 * (row.seen / row.said - 1):.2f} %"
        table.add_row(row.name, f"{row.seen / 1e6:.3f} MB", more, times, bar, verdict)
    return table


def write(path: Path, tables: Mapping[str, list[Row]], options: argparse.Namespace) -> None:
    """JSON, and the tables beside it as Markdown."""
    facts = {
        "command": command(),
        "commit": commit(),
        "hardware": hardware(),
        "date": datetime.date.today().isoformat(),
        "model": {name: getattr(options, name) for name in ("width", "blocks", "steps")},
    }
    told = {**facts, "tables": {title: [vars(row) for row in rows] for title, rows in tables.items()}}
    path.write_text(json.dumps(told, indent=1) + "\n")
    lines = [
        *preamble(
            "Bytes by the interfaces' own counters", f"{options.blocks} blocks of width {options.width}"
        ),
        f"Ranks in network namespaces whose interfaces carry nothing else; the mean of {options.steps} steps "
        "after a first one, all interfaces together, fp32, "
        f"{options.blocks} blocks of two matrices {options.width}² (nodes: 24 blocks of 384²; rows: an "
        "embedding of 16384 x 256). Headers, acknowledgements and agreements count, too.",
    ]
    for title, rows in tables.items():
        table = tabulate(title, rows)
        head = [str(column.header) for column in table.columns]
        lines += ["", f"## {title}", "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
        cells = [list(column.cells) for column in table.columns]
        lines += [f"| {' | '.join(map(str, row))} |" for row in zip(*cells, strict=True)]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")


def main() -> int:
    """All tables, or with `--quick` the codecs at stage 2."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one table")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", nargs="?", const="", metavar="FILE.json")
    options = parser.parse_args()
    if problem := why_not():
        print(f"bytes_sent.py: {problem}", file=sys.stderr)
        return 2
    task = {name: getattr(options, name) for name in ("width", "blocks", "steps")}
    console, tables = Console(width=120), {}

    def show(title: str, rows: list[Row]) -> None:
        tables[title] = rows
        console.print(tabulate(title, rows))

    if options.quick:
        show(
            "Gradients of 2 ranks",
            codec_rows((2,), {**task, "width": 512, "blocks": 2, "steps": 1}, options.timeout),
        )
    else:
        show("Gradients of 2 ranks, backward alone", codec_rows((0, 2), task, options.timeout))
        show("Touched rows, and local steps, 2 ranks", other_rows(task, options.timeout))
        deep = {**task, "width": 384, "blocks": 24}
        for each in (2, 4):
            title = f"What leaves a node: stage 3 on 2 nodes of {each} ranks"
            show(title, node_rows(each, deep, options.timeout))
    if options.out is not None:
        default = RESULTS / "bytes.json"
        write(Path(options.out) if options.out else default, tables, options)
    return 0 if all(row.holds for rows in tables.values() for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
