"""Step times over slow links: ranks in network namespaces of their own, rate and latency shaped.

    python benchmarks/links/links.py --worlds 2 4 --mbit 10000 1000 100 --ms 0.1 1 10 --out

With `--out` results are written after each link, and links that the file has already are not run again: a
run that was cut off goes on where it stopped. Rows of such links can be measured again by name, in place of
the old ones; all others stay:

    python benchmarks/links/links.py --again zs-0-adaptive zs-0-topk --missed --out FILE.json

Needs root. See `namespaces.py` for how the links are made; they are gone when this ends, also when killed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import ranks_apart
from links_rank import ADAPTIVE, Task, across_nodes, entries
from models import WORKLOADS
from namespaces import Link, Network, address, end_with_parent, network, why_not
from provenance import RESULTS, command, commit, preamble
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
MISSED = "MISSED"
CLOSE = 1.10  # Adaptive against the best of all others
EXACT = 1e-4  # relative, of the first losses: a system that trains another model is no faster


def run_link(world: int, link: Link, systems: list[str], options: argparse.Namespace) -> dict[str, object]:
    """Systems on one kind of link: the slowest rank's times, or what went wrong."""
    per_node = options.ranks_per_node
    model = options.model or ("paced-7m" if link.mbit >= 1000 else "paced-2m")
    with network(world // per_node, link) as net:
        measured = probe(net)
        tasks = [
            Task(model, systems, rank, world, address(0), options.seconds, "", per_node, options.visits)
            for rank in range(world)
        ]
        told = ranks_apart.run(net, "links_rank.py", tasks, per_node, options.timeout)
    rows = {s: best([t[s] for t in told.answers]) for s in systems if all(s in t for t in told.answers)}
    facts = {"model": model, "world": world, "per_node": per_node, "load_average": os.getloadavg()[0]}
    return {**facts, "link": asdict(link), "measured": measured, "rows": rows, "problem": told.problem}


def probe(net: Network) -> dict[str, float]:
    """What the link really gives: round trip of a byte and one-way rate between ranks 0 and 1."""
    amount = str(max(int(net.link.mbit * 1e6 / 8 * 0.5), 1 << 20))
    command = [sys.executable, str(HERE / "probe.py")]
    first = subprocess.Popen(net.command(0, [*command, amount]), preexec_fn=end_with_parent)
    try:
        second = net.command(1, [*command, amount, address(0)])
        told = subprocess.run(second, capture_output=True, text=True, timeout=60, check=True).stdout
    finally:
        first.kill()
        first.wait()
    found: dict[str, float] = json.loads(told)
    return found


def best(ranks: list[list[dict[str, object]]]) -> dict[str, object]:
    """The visit in which others disturbed least: the one with the shortest steps."""
    visits = [combine(list(visit)) for visit in zip(*ranks, strict=False)]
    return min(visits, key=lambda row: float(row["step_ms"]))  # type: ignore[arg-type]


def combine(ranks: list[dict[str, object]]) -> dict[str, object]:
    """The slowest rank counts; losses are averaged, which makes them those of the whole batch."""
    losses = [sum(step) / len(ranks) for step in zip(*(r["losses"] for r in ranks), strict=True)]  # type: ignore[call-overload]
    worst = {key: max(float(r[key]) for r in ranks) for key in ("step_ms", "sent", "waited")}  # type: ignore[arg-type]
    return {**worst, "steps": ranks[0]["steps"], "losses": losses, "note": ranks[0]["note"]}


def check(result: dict[str, object]) -> None:
    """Mark exact systems that trained another model than DDP."""
    rows: dict[str, dict[str, object]] = result["rows"]  # type: ignore[assignment]
    reference = rows.get("ddp")
    known = {**entries(), **across_nodes()}
    for system, row in rows.items():
        if reference is not None and known[system].exact:
            pairs = zip(row["losses"], reference["losses"], strict=False)  # type: ignore[call-overload]
            gap = max(abs(a - b) / abs(b) for a, b in pairs)
            if gap > EXACT:
                row["note"] = f"INVALID: losses differ from DDP's by {gap:.1e}"
    judge_adaptive(rows)


def judge_adaptive(rows: dict[str, dict[str, object]]) -> None:
    """Say how far Adaptive is from the fastest fixed system of the table, whether it could choose it or
    not."""
    fixed = {
        name: float(str(row["step_ms"]))
        for name, row in rows.items()
        if name != ADAPTIVE and "INVALID" not in str(row["note"])
    }
    if ADAPTIVE in rows and fixed:
        best_ = min(fixed, key=lambda name: fixed[name])
        times = float(str(rows[ADAPTIVE]["step_ms"])) / fixed[best_]
        verdict = "" if times <= CLOSE else f": {MISSED}, at most {CLOSE:g}"
        said = str(rows[ADAPTIVE]["note"]).rpartition("; ")[2]  # without an earlier verdict
        rows[ADAPTIVE]["note"] = f"{times:.2f} x {best_}{verdict}; {said}"


def missed(result: dict[str, object]) -> bool:
    rows: dict[str, dict[str, object]] = result["rows"]  # type: ignore[assignment]
    return ADAPTIVE in rows and MISSED in str(rows[ADAPTIVE]["note"])


def replace_rows(result: dict[str, object], newer: dict[str, object], when: str) -> dict[str, object]:
    """A link with some of its rows measured anew, which is said; as it was where that failed."""
    if newer["problem"]:
        return result
    rows, fresh = result["rows"], newer["rows"]
    told = [*result.get("again", []), {"rows": list(fresh), "commit": when, "load": newer["load_average"]}]  # type: ignore[misc, call-overload]
    return {**result, "rows": {**rows, **fresh}, "again": told}  # type: ignore[dict-item]


def tabulate(result: dict[str, object]) -> Table:
    link = Link(**result["link"])  # type: ignore[arg-type]
    got: dict[str, float] = result["measured"]  # type: ignore[assignment]
    each = f", {result['per_node']} a node" if result["per_node"] != 1 else ""
    title = (
        f"{result['world']} ranks{each}, {link.name}, {result['model']} "
        f"(measured: {got['mbit']:.0f} Mbit/s, round trip {got['round_trip_ms']:.2f} ms)"
    )
    table = Table(title=title, title_justify="left")
    for heading in ("system", "ms a step", "x DDP", "sent a step", "waited", ""):
        table.add_column(heading, justify="left" if heading in ("system", "") else "right")
    rows: dict[str, dict[str, float]] = result["rows"]  # type: ignore[assignment]
    base = rows.get("ddp", {}).get("step_ms")
    for system, row in rows.items():
        speed = f"{base / row['step_ms']:.2f}" if base else "-"
        waited = f"{row['waited']:.0%}" if row["waited"] >= 0 else "-"
        sent = f"{row['sent'] / 1e6:.2f} MB"
        table.add_row(system, f"{row['step_ms']:.0f}", speed, sent, waited, str(row["note"]))
    if result["problem"]:
        table.add_row("FAILED", "", "", "", "", str(result["problem"]))
    return table


def record(options: argparse.Namespace, results: list[dict[str, object]]) -> dict[str, object]:
    return {
        "command": command(),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "kernel": platform.release(),
        "models": {str(r["model"]): WORKLOADS[str(r["model"])].describe() for r in results},
        "visits": options.visits,
        "how": "namespaces; rate by tbf; latencies of 0.5 ms and more by a user-space relay (no netem)",
        "results": results,
    }


def write(path: Path, told: dict[str, object], console: Console) -> None:
    """JSON, and the tables beside it as Markdown."""
    path.write_text(json.dumps(told, indent=1) + "\n")
    models: dict[str, dict[str, object]] = told["models"]  # type: ignore[assignment]
    shown = "; ".join(
        f"{name}: {m['parameters']:,} parameters, {1e3 * float(str(m['seconds'])):.0f} ms of computation"
        for name, m in models.items()
    )
    load: tuple[float, ...] = told["load_average"]  # type: ignore[assignment]
    lines = [
        *preamble("Step times over shaped links", ", ".join(models), commit=told["commit"]),
        f"{told['cores']} cores shared with other work (load average {load[0]:.1f} when it ended): of the "
        "rounds of a system, the first quartile counts, and of its visits "
        f"({told['visits']}, with all others in between) the shortest. Models in fp32 with AdamW, whose "
        f"computation is a sleep, as with a GPU ({shown}): what is compared is communication. "
        f"Links: {told['how']}.",
        "",
        "`sent a step` is what the network interface of the busiest rank counted. `waited`: share of the "
        "time in which the slowest rank waited for others, where the system says so.",
    ]
    for result in told["results"]:  # type: ignore[attr-defined]
        table = tabulate(result)
        head = [str(column.header) for column in table.columns]
        lines += ["", f"## {table.title}", ""]
        for told_again in result.get("again", []):
            lines += [f"Measured again at {told_again['commit']}: {', '.join(told_again['rows'])}.", ""]
        lines += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
        cells = [list(column.cells) for column in table.columns]
        lines += [f"| {' | '.join(str(cell) for cell in row)} |" for row in zip(*cells, strict=True)]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")
    console.print(f"written: {path} and {path.with_suffix('.md').name}")


def main() -> int:
    """Every link for every number of ranks."""
    known = list({**entries(), **across_nodes()})
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mbit", type=float, nargs="+", default=[10000, 1000, 100])
    parser.add_argument("--ms", type=float, nargs="+", default=[0.1, 1, 10], help="one way")
    parser.add_argument(
        "--systems", nargs="+", choices=known, default=known, metavar="SYSTEM", help=", ".join(known)
    )
    parser.add_argument(
        "--again", nargs="+", choices=known, metavar="SYSTEM", help="on links that the file has, only these"
    )
    parser.add_argument("--missed", action="store_true", help="with --again: where Adaptive missed its bar")
    parser.add_argument("--ranks-per-node", type=int, default=1, help="as many share a namespace and a link")
    parser.add_argument("--model", choices=list(WORKLOADS), help="default: by the link's rate")
    parser.add_argument("--visits", type=int, default=2, help="of each system; the least disturbed counts")
    parser.add_argument("--seconds", type=float, default=1.0, help="to time each system for")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one link")
    parser.add_argument("--out", nargs="?", const="", metavar="FILE.json")
    options = parser.parse_args()
    if options.ranks_per_node > 1 and options.systems is known:
        options.systems = list(across_nodes())
    elif options.systems is known:
        options.systems = list(entries())
    if problem := why_not():
        print(f"links.py: {problem}", file=sys.stderr)
        return 2
    console, path = Console(width=150), None
    if options.out is not None:
        default = RESULTS / "links.json"
        path = Path(options.out) if options.out else default
    results = finished(path)
    places = [(w, Link(mbit, ms)) for w in options.worlds for mbit in options.mbit for ms in options.ms]
    for world, link in places:
        number = next((n for n, result in enumerate(results) if same(result, world, link, options)), None)
        if number is None and options.again is None:
            results.append(run_link(world, link, options.systems, options))
        elif (
            number is not None
            and options.again is not None
            and (missed(results[number]) or not options.missed)
        ):
            newer = run_link(world, link, options.again, options)
            results[number] = replace_rows(results[number], newer, commit())
        else:
            continue
        result = results[number if number is not None else -1]
        check(result)
        console.print(tabulate(result))
        if path is not None:
            write(path, record(options, results), console)
    return 1 if any(result["problem"] for result in results) else 0


def finished(path: Path | None) -> list[dict[str, object]]:
    """Links that an earlier run has left in the file, all of their systems timed."""
    if path is None or not path.exists():
        return []
    told: list[dict[str, object]] = json.loads(path.read_text())["results"]
    return [result for result in told if not result["problem"]]


def same(result: dict[str, object], world: int, link: Link, options: argparse.Namespace) -> bool:
    place = result["world"], result["per_node"], result["link"]
    wanted = options.systems if options.again is None else ()
    missing = set(wanted) - set(result["rows"])  # type: ignore[call-overload]
    return place == (world, options.ranks_per_node, asdict(link)) and not missing


if __name__ == "__main__":
    sys.exit(main())
