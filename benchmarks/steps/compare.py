"""Compares ZeroShard with its peers on the CPU: two ranks on one host, one thread each, fp32.

    python benchmarks/steps/compare.py --model gpt-27m --repeats 3 --steps 6 --out

Each repeat starts every system once, in rotated order, in a fresh pair of processes: a slow minute of the
machine then falls on different systems in different repeats, and none holds memory while another is timed.
With `--turns` all stay alive and take turns every few steps; see `turns`.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import signal
import sys
from pathlib import Path
from typing import cast

from bars import bars_for, judge

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

from models import WORKLOADS
from pairs import WARMUP, WORLD, Pair
from provenance import RESULTS, ROOT, command, commit, hardware, version
from report import Comparison, show, write
from results import OTHER, Paired, Run, control_gap, summarise
from rich.console import Console
from systems import SYSTEMS, why_missing
from turns import Turns, at_once, groups, room

LOG_WIDTH = 140
KERNELS = "src/zeroshard/kernels/_kernels*.so"


def run_pair(model: str, system: str, repeat: int, steps: int, timeout_s: float) -> Run:
    """One system, once."""
    return Pair(model, system, steps).end(repeat, timeout_s)


def rotated(systems: list[str], repeat: int, repeats: int) -> list[str]:
    """Each repeat begins elsewhere, so that no system is always first after a pause or always last."""
    offset = repeat * len(systems) // repeats
    return systems[offset:] + systems[:offset]


def rehearse(systems: list[str], timeout_s: float, console: Console) -> None:
    """One unrecorded pair per package on the smallest model.

    The first start of a package on a machine reads it from disk, and DeepSpeed compiles an extension (a
    minute): no start-up that a user would see twice.
    """
    packages = {system.split("-")[0]: system for system in systems}
    for system in packages.values():
        run = run_pair("tiny", system, -1, 1, timeout_s)
        console.print(f"rehearsal {system}: {run.error or 'done'}", markup=False)


def measure(options: argparse.Namespace, systems: list[str], console: Console) -> list[Run]:
    """All repeats of all systems, with a line of progress each."""
    runs: list[Run] = []
    if options.turns:
        parameters = cast("int", WORKLOADS[options.model].describe()["parameters"])
        turns = Turns(options.model, options.turns, options.steps, options.timeout, options.other)
        found = groups(systems, bars_for(options.model, systems), at_once(parameters, room()))
        for number, group in enumerate(found * options.repeats):
            runs += turns.session(group, number, console)
        return runs
    for repeat in range(options.repeats):
        for system in rotated(systems, repeat, options.repeats):
            run = run_pair(options.model, system, repeat, options.steps, options.timeout)
            runs.append(run)
            said = run.error or f"{run.worst('step_ms'):.1f} ms, start-up {run.worst('startup_s'):.1f} s"
            console.print(f"repeat {repeat + 1}/{options.repeats} {system}: {said}", markup=False)
    return runs


def facts(options: argparse.Namespace, load_before: float) -> dict[str, object]:
    """What is needed to repeat the run elsewhere and to know whether it may be compared."""
    return {
        "title": f"{options.model}: {WORLD} ranks x 1 thread, fp32, AdamW",
        "date": datetime.date.today().isoformat(),
        "command": command(),
        "commit": commit(),
        "hardware": hardware(),
        "model": WORKLOADS[options.model].describe(),
        "repeats": options.repeats,
        "steps": f"{WARMUP} to warm up, {options.steps} timed"
        + (f", {options.turns} times after one more to warm up" if options.turns else ""),
        "versions": {name: version(name) for name in ("torch", "deepspeed", "zeroshard")}
        | {"python": platform.python_version()},
        "kernels": "compiled" if list(ROOT.glob(KERNELS)) else "not built, torch does their work",
        "load": f"{load_before:.2f} before, {os.getloadavg()[0]:.2f} after",
    }


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", choices=list(WORKLOADS), default="gpt-27m")
    parser.add_argument(
        "--systems",
        nargs="+",
        choices=list(SYSTEMS),
        default=list(SYSTEMS),
        metavar="SYSTEM",
        help=f"of {', '.join(SYSTEMS)} (default: all)",
    )
    parser.add_argument("--repeats", type=int, help="fresh starts (default: 3, with --turns 1)")
    parser.add_argument("--steps", type=int, help="timed steps of a repeat or a turn (default: 6, 2)")
    parser.add_argument(
        "--turns",
        type=int,
        default=0,
        metavar="N",
        help="keep all systems alive and let them take turns, N times each, to be compared within a round",
    )
    parser.add_argument(
        "--other",
        type=Path,
        metavar="CHECKOUT",
        help="with --turns: also time every zs system with the package of another checkout",
    )
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="per pair (default: 300)")
    parser.add_argument(
        "--no-rehearsal", action="store_true", help="start-up times then include first-use costs"
    )
    parser.add_argument(
        "--out",
        nargs="?",
        type=Path,
        const=Path(),
        metavar="FILE.json",
        help="write results (default name: benchmarks/results/cpu-MODEL[-turns].json)",
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 unless every bar is passed")
    options = parser.parse_args(arguments)
    options.repeats = (1 if options.turns else 3) if options.repeats is None else options.repeats
    options.steps = (2 if options.turns else 6) if options.steps is None else options.steps
    if options.repeats < 1 or options.steps < 1:
        parser.error("--repeats and --steps must be at least 1")
    if options.other is not None:
        if not options.turns:
            parser.error("--other compares two checkouts in turns: pass --turns N too")
        ours = [name for name in options.systems if name.startswith("zs-")]
        options.systems = options.systems + [f"{name}{OTHER}" for name in ours]
    if options.out == Path():
        how = "-turns" if options.turns else ""
        options.out = RESULTS / f"cpu-{options.model}{how}.json"
    return options


def main(arguments: list[str]) -> int:
    """0 when every system that could run gave a valid row (and, with --check, every bar is passed)."""
    options, console = parse(arguments), Console()
    # `timeout` and job schedulers end a command so; as an exception it takes the ranks along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if not console.is_terminal:
        console = Console(width=LOG_WIDTH)
    load_before = os.getloadavg()[0]
    missing = {system: why for system in options.systems if (why := why_missing(system))}
    present = [system for system in options.systems if system not in missing]
    if not options.no_rehearsal:
        rehearse(present, options.timeout, console)
    runs = measure(options, present, console)
    rows = summarise(options.systems, runs, missing)
    comparison = Comparison(
        facts(options, load_before),
        rows,
        runs,
        judge(bars_for(options.model, options.systems), rows, Paired(runs)),
        control_gap(runs),
    )
    show(comparison, console)
    if options.out is not None:
        console.print(*write(comparison, options.out))
    short = [verdict for verdict in comparison.verdicts if not verdict.passed and not verdict.bar.goal]
    return 1 if comparison.failed() or (options.check and short) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
