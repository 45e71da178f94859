"""Compares ZeroShard with its peers on the CPU: two ranks on one host, one thread each, fp32.

    python benchmarks/compare.py --model gpt-27m --repeats 3 --steps 6 --out

Each repeat starts every system once, in rotated order, in a fresh pair of processes: a slow minute of the
machine then falls on different systems in different repeats, and none holds memory while another is timed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from bars import bars_for, judge
from models import WORKLOADS
from provenance import commit, hardware, version
from rank import Assignment
from report import Comparison, show, write
from results import Run, control_gap, summarise
from rich.console import Console
from systems import SYSTEMS, why_missing
from torch import distributed as dist

HERE = Path(__file__).resolve().parent
WORLD = 2
WARMUP = 3
GRACE_S = 10.0
POLL_S = 0.05
LOG_WIDTH = 140
KERNELS = "src/zeroshard/native/_kernels*.so"


def environment(rank: int) -> dict[str, str]:
    """What `torchrun` would announce, one thread, and this checkout first on the path.

    Bytecode may be written: the peers have theirs since they were installed, and a checkout gets it from its
    rehearsal. Where it is forbidden, compiling our sources would count as our start-up, and theirs not.
    """
    inherited = os.environ.get("PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {
        **kept,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(WORLD),
        "LOCAL_WORLD_SIZE": str(WORLD),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), *([inherited] if inherited else [])]),
        # DeepSpeed compiles a small extension on first use and looks for ninja on the path.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        # Peers call functions that torch deprecates, once per collective: printing that is not their work.
        "PYTHONWARNINGS": "ignore::FutureWarning",
    }


def wait(ranks: list[subprocess.Popen[bytes]], timeout_s: float) -> str:
    """Until all ranks ended. Returns why they did not end well, or an empty string; leaves none running."""
    deadline, failed = time.monotonic() + timeout_s, ""
    try:
        while any(rank.poll() is None for rank in ranks):
            if time.monotonic() > deadline:
                return failed or f"did not finish within {timeout_s:.0f} s"
            if not failed and (codes := [rank.poll() for rank in ranks if rank.poll()]):
                failed = f"a rank ended with status {codes[0]}"
                deadline = min(deadline, time.monotonic() + GRACE_S)
            time.sleep(POLL_S)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return failed or next(
        (f"a rank ended with status {rank.returncode}" for rank in ranks if rank.returncode), ""
    )


def last_words(logs: list[Path]) -> str:
    """The last line of the log that ends in an error: what a reader wants to know first."""
    ends = [lines[-1] for log in logs if (lines := log.read_text(errors="replace").strip().splitlines())]
    errors = [end for end in ends if "Error" in end]
    return (errors or ends or ["no output"])[0][:300]


def run_pair(model: str, system: str, repeat: int, steps: int, timeout_s: float) -> Run:
    """One system, once: two fresh processes that meet at a store of this process."""
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        answers = [Path(folder, f"rank{rank}.json") for rank in range(WORLD)]
        logs = [Path(folder, f"rank{rank}.log") for rank in range(WORLD)]
        ranks = []
        for rank in range(WORLD):
            told = Assignment(
                model, system, rank, WORLD, store.port, WARMUP, steps, time.monotonic(), str(answers[rank])
            )
            with logs[rank].open("wb") as log:
                command = [sys.executable, str(HERE / "rank.py"), json.dumps(asdict(told))]
                ranks.append(
                    subprocess.Popen(command, env=environment(rank), stdout=log, stderr=subprocess.STDOUT)
                )
        if failed := wait(ranks, timeout_s):
            return Run(system, repeat, error=f"{failed}: {last_words(logs)}")
        return Run(system, repeat, tuple(json.loads(answer.read_text()) for answer in answers))


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
    runs = []
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
        "command": shlex.join(["python", "benchmarks/compare.py", *sys.argv[1:]]),
        "commit": commit(),
        "hardware": hardware(),
        "model": WORKLOADS[options.model].describe(),
        "repeats": options.repeats,
        "steps": f"{WARMUP} to warm up, {options.steps} timed",
        "versions": {name: version(name) for name in ("torch", "deepspeed", "zeroshard")}
        | {"python": platform.python_version()},
        "kernels": "compiled" if list(HERE.parent.glob(KERNELS)) else "not built, torch does their work",
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
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="timed steps per repeat (default: 6)")
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
        help="write results (default name: benchmarks/results/DATE-cpu-MODEL.json)",
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 unless every bar is passed")
    options = parser.parse_args(arguments)
    if options.repeats < 1 or options.steps < 1:
        parser.error("--repeats and --steps must be at least 1")
    if options.out == Path():
        name = f"{datetime.date.today().isoformat()}-cpu-{options.model}.json"
        options.out = HERE / "results" / name
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
        judge(bars_for(options.model, options.systems), rows),
        control_gap(runs),
    )
    show(comparison, console)
    if options.out is not None:
        console.print(*write(comparison, options.out))
    short = [verdict for verdict in comparison.verdicts if not verdict.passed and not verdict.bar.goal]
    return 1 if comparison.failed() or (options.check and short) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
