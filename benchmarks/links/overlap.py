"""Is communication hidden? Waited time over total time, and a picture of it.

    python benchmarks/links/overlap.py --out      # 2 ranks in network namespaces, links of several rates

Needs root; see `namespaces.py`. Each link is as fast as makes what a rank sends in a step last a given share
of the step's computation, which is a sleep of fixed length (see `overlap_rank.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import ranks_apart
from namespaces import Link, address, network, why_not
from overlap_rank import Task, modes
from provenance import RESULTS, preamble
from rich.console import Console
from rich.table import Table
from spans import Panel, draw

WORLD = 2


def computing(options: argparse.Namespace) -> float:
    """Seconds of a step's computation."""
    return float(3 * options.blocks * options.forward_ms / 1e3)


def run_link(share: float, options: argparse.Namespace) -> dict[str, object]:
    """All modes on the link on which gradients and new parameters take `share` of the computation."""
    nbytes = 4 * options.blocks * (options.width + 1) * options.width  # reduce and publish, half of it each
    mbit = nbytes * 8 / 1e6 / (share * computing(options))
    link = Link(round(mbit), options.ms)
    tasks = [
        Task(
            options.modes,
            rank,
            WORLD,
            address(0),
            options.blocks,
            options.width,
            options.forward_ms / 1e3,
            options.steps,
            options.host_share * computing(options),
        )
        for rank in range(WORLD)
    ]
    with network(WORLD, link) as net:
        told = ranks_apart.run(net, "overlap_rank.py", tasks, 1, options.timeout)
    if told.problem:
        raise SystemExit(f"overlap.py: {told.problem}:\n{told.logs[0][-2000:]}")
    rows = {mode: max((t[mode] for t in told.answers), key=lambda row: row["step"]) for mode in options.modes}
    return {"share": share, "mbit": link.mbit, "ms": link.ms, "computing": computing(options), "rows": rows}


def tabulate(result: dict[str, object]) -> Table:
    computed = float(result["computing"])  # type: ignore[arg-type]
    title = (
        f"{result['mbit']} Mbit/s, {result['ms']:g} ms: gradients and parameters take {result['share']:.0%} "
        f"of the computation ({1e3 * computed:.0f} ms)"
    )
    table = Table(title=title, title_justify="left")
    for name in ("", "ms a step", "of computation", "waited", "waited / total", "sent", "on the link"):
        table.add_column(name, justify="right" if name else "left")
    rows: dict[str, dict[str, float]] = result["rows"]  # type: ignore[assignment]
    for mode, row in rows.items():
        lasts = 8 * row["sent"] / (1e6 * float(result["mbit"]))  # type: ignore[arg-type]
        table.add_row(
            mode,
            f"{1e3 * row['step']:.0f}",
            f"{row['step'] / computed:.2f}",
            f"{1e3 * row['waited']:.0f} ms",
            f"{row['waited'] / row['step']:.0%}",
            f"{row['sent'] / 1e6:.1f} MB",
            f"{lasts / computed:.0%}",
        )
    return table


def write(path: Path, results: list[dict[str, object]], options: argparse.Namespace) -> None:
    """JSON without the spans, the tables as Markdown, the pictures as SVG."""
    lines = [
        *preamble(
            "Overlap of communication and computation", f"{options.blocks} blocks of {options.width}², paced"
        ),
        f"{WORLD} ranks in network namespaces, {options.blocks} blocks of {options.width}², "
        f"fp32, AdamW. A block's forward is a sleep of {options.forward_ms:g} ms, "
        f"its backward of twice that. The first quartile of {options.steps} steps "
        f"(the machine was shared: load average {os.getloadavg()[0]:.1f} at the end), the slower rank. `one "
        "bucket` sends nothing before backward has ended: what no overlap costs. `on the link`: what is "
        "sent, over the link's rate and the computation. An update on the host is made to take "
        f"{options.host_share:.0%} of the computation by a sleep.",
    ]
    for result in results:
        table = tabulate(result)
        head = [str(column.header) for column in table.columns]
        lines += ["", f"## {table.title}", "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
        cells = [list(column.cells) for column in table.columns]
        lines += [f"| {' | '.join(map(str, row))} |" for row in zip(*cells, strict=True)]
        rows: dict[str, dict[str, object]] = result["rows"]  # type: ignore[assignment]
        panels = [Panel(mode, row.pop("spans"), row.pop("link")) for mode, row in rows.items()]  # type: ignore[arg-type]
        picture = path.with_name(f"{path.stem}-{result['share']:.2f}.svg")
        seconds = 3.2 * max(float(row["step"]) for row in rows.values())  # type: ignore[arg-type]
        picture.write_text(draw(str(table.title), panels, seconds))
        lines += ["", f"![spans]({picture.name})"]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")
    path.write_text(json.dumps(results, indent=1) + "\n")


def main() -> int:
    """Every link."""
    known = list(modes())
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.9, 1.5])
    parser.add_argument("--ms", type=float, default=0.1, help="latency, one way")
    parser.add_argument("--modes", nargs="+", choices=known, default=known, metavar="MODE")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--forward-ms", type=float, default=15.0)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--host-share", type=float, default=0.9, help="of the computation that an update on the host takes"
    )
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--out", nargs="?", const="", metavar="FILE.json")
    options = parser.parse_args()
    if problem := why_not():
        print(f"overlap.py: {problem}", file=sys.stderr)
        return 2
    console, results = Console(width=120), []
    for share in options.shares:
        results.append(run_link(share, options))
        console.print(tabulate(results[-1]))
    if options.out is not None:
        default = RESULTS / "overlap.json"
        write(Path(options.out) if options.out else default, results, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
