"""Kill ranks and whole jobs, many times, at seeded random moments, most of them during saves.

python benchmarks/checkpoints/survival.py --kills 100 --out

Checked after every kill: the job goes on from a checkpoint that was complete, none newer is lost, and nothing
is left of the saves that were killed. At the end: parameters, moments and schedule are bit-equal to a run
that was left alone. A killed rank is started again by the launcher, a killed launcher by this command.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import queue
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

from provenance import RESULTS, command, commit, hardware
from torch import Tensor

import zeroshard as zs
from zeroshard.checkpoint import read_manifest
from zeroshard.checkpoint.loading import CheckpointReader

JOB = Path(__file__).resolve().with_name("survival_job.py")
SCRATCH = re.compile(r"\.(.+)\.(saving|removing-[0-9a-f]{16})")
ENDLESS = 10_000_000
PATIENCE = 180.0
# Shares of the kills: at a rank (else at the whole job), and while a save is under way (else at any moment).
AT_A_RANK, DURING_A_SAVE = 0.75, 0.8
SAVE = 0.04  # seconds that a save takes here, about


@dataclass(frozen=True)
class Kill:
    """One kill and what came of it. `complete` is the newest checkpoint just before, `resumed` the step that
    the job went on from, `trained` the last step before; `seconds` is from the kill to the next step done."""

    at: str
    during_save: bool
    complete: int
    trained: int
    resumed: int
    seconds: float
    scratch: int


class Job:
    """A job under the launcher, and what rank 0 says of it."""

    def __init__(self, folder: Path, ranks: int, steps: int = ENDLESS) -> None:
        command = [sys.executable, "-m", "zeroshard", "run", "--threads", "1", "--ranks", str(ranks)]
        command += ["--max-restarts", "100000", "--resume", str(folder), str(JOB), "--steps", str(steps)]
        self.lines: queue.SimpleQueue[tuple[float, str]] = queue.SimpleQueue()
        self.seen = 0  # the last step that rank 0 said it has done
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.errors, text=True)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put((time.monotonic(), line.strip()))

    def ranks(self) -> list[int]:
        try:
            listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            return [int(pid) for pid in listed if "zs-rank" in Path(f"/proc/{pid}/comm").read_text()]
        except OSError:
            return []

    def next(self, word: str) -> tuple[float, int]:
        """When the next line with this word came, and its number."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                when, line = self.lines.get(timeout=1.0)
            except queue.Empty:
                continue
            number = self._number(line)
            if re.search(f"{word} [0-9]+$", line):
                return when, number
        self.end()
        raise SystemExit(f"no '{word}' within {PATIENCE:.0f} s; the launcher said:\n{self.said()}")

    def _number(self, line: str) -> int:
        """What a line ends with; a rank that is killed may leave half of one before it."""
        number = int((re.findall(r"\d+$", line) or ["0"])[0])
        if re.fullmatch(r"done \d+", line):
            self.seen = number
        return number

    def drained(self) -> int:
        """The last step of a job that has ended."""
        self.reader.join()
        while not self.lines.empty():
            self._number(self.lines.get()[1])
        return self.seen

    def said(self) -> str:
        self.errors.seek(0)
        return self.errors.read()[-4000:]

    def end(self) -> int:
        self.process.kill()
        return self.process.wait()


def newest(folder: Path) -> int:
    found = zs.latest(folder)
    return int(found.name.removeprefix("step-")) if found is not None else 0


def scratch(folder: Path) -> set[str]:
    """What saves under way, or dead ones, have in the folder; tokens are random, so none comes twice."""
    found: set[str] = set()
    for entry in os.scandir(folder) if folder.is_dir() else ():
        if SCRATCH.fullmatch(entry.name):
            found.add(entry.name if "removing" in entry.name else "")
            try:
                found |= {f"{entry.name}/{inner}" for inner in os.listdir(entry.path) if len(inner) == 16}
            except OSError:
                continue
    return found - {""}


def wait_for_a_save(folder: Path, draw: random.Random) -> None:
    """Until some saves are through and another is under way; to a random moment of it."""
    goal = newest(folder) + 3 * draw.randint(0, 3)
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if scratch(folder) and newest(folder) >= goal:
            time.sleep(draw.random() * SAVE)
            if scratch(folder):
                return
        time.sleep(0.001)
    raise SystemExit(f"no save began within {PATIENCE:.0f} s")


def kill(job: Job, folder: Path, ranks: int, draw: random.Random) -> tuple[Job, Kill]:
    """Kill once, see the job go on, and judge how."""
    if draw.random() < DURING_A_SAVE:
        wait_for_a_save(folder, draw)
    else:
        time.sleep(draw.random() * 2.0)
    alive = job.ranks()
    whole = draw.random() >= AT_A_RANK or not alive
    complete, during, began = newest(folder), bool(scratch(folder)), time.monotonic()
    os.kill(job.process.pid if whole else draw.choice(alive), signal.SIGKILL)
    left = scratch(folder)
    if whole:
        job.end()
        left, trained = scratch(folder), job.drained()
        job = Job(folder, ranks)
    _, resumed = job.next("begin")
    trained = trained if whole else job.seen
    remains = left & scratch(folder)
    when, first = job.next("done")
    found = Kill(
        "job" if whole else "rank", during, complete, trained, resumed, round(when - began, 3), len(remains)
    )
    if resumed < complete or first != resumed + 1 or remains:
        job.end()
        raise SystemExit(f"survival is broken: {found}, scratch {sorted(remains)}\n{job.said()}")
    return job, found


def stored(path: Path) -> dict[str, Tensor]:
    """Parameters, optimizer state and values of a checkpoint; what belongs to single ranks apart."""
    manifest = read_manifest(path)
    with CheckpointReader(path, manifest) as reader:
        return {f"{entry.kind} {entry.name}": reader.whole(entry) for entry in manifest.entries}


def finish(folder: Path, ranks: int, steps: int) -> dict[str, Tensor]:
    """Run to the end, undisturbed, and return what was saved there."""
    job = Job(folder, ranks, steps)
    if job.process.wait(timeout=600):
        raise SystemExit(f"the job failed:\n{job.said()}")
    hidden = [name for name in os.listdir(folder) if name.startswith(".")]
    if hidden or len(os.listdir(folder)) > 3:
        raise SystemExit(f"something was left in the folder: {sorted(os.listdir(folder))}")
    return stored(folder / f"step-{steps}")


def survive(place: Path, kills: int, ranks: int, seed: int) -> tuple[list[Kill], int]:
    """All kills, then the end; returns them and the number of steps, or unsharded parameters with what
    went wrong."""
    draw = random.Random(seed)
    job = Job(place / "killed", ranks)
    results: list[Kill] = []
    try:
        job.next("begin")
        for number in range(kills):
            job, found = kill(job, place / "killed", ranks, draw)
            results.append(found)
            print(f"{number + 1:4d}  {found}", flush=True)
    finally:
        job.end()
    steps = newest(place / "killed") + 30
    one, other = (finish(place / name, ranks, steps) for name in ("killed", "alone"))
    differ = [name for name in other if name not in one or one[name].ne(other[name]).any()]
    if differ or one.keys() != other.keys():
        raise SystemExit(f"{len(differ)} tensors differ from the run that was left alone: {differ[:5]}")
    return results, steps


def summary(results: list[Kill], steps: int, asked: argparse.Namespace, lasted: float) -> dict[str, object]:
    ranks = [r.seconds for r in results if r.at == "rank"]
    jobs = [r.seconds for r in results if r.at == "job"]
    lost = [max(0, r.trained - r.resumed) for r in results]
    return {
        "title": f"survival: {len(results)} SIGKILLs of a training job",
        "date": datetime.date.today().isoformat(),
        "command": command(),
        "model": "matrices of 513 x 512",
        "commit": commit(),
        "hardware": hardware(),
        "job": f"{asked.ranks} ranks, stage 3, AdamW, {4 * 513 * 512 * 12 / 1e6:.1f} MB a checkpoint, "
        "saved every 3 steps, every other one in the background, keep=3",
        "seed": asked.seed,
        "minutes": round(lasted / 60, 1),
        "killed": {"ranks": len(ranks), "whole jobs": len(jobs)},
        "during a save": sum(r.during_save for r in results),
        "steps trained": steps,
        "steps lost at a kill": {"median": statistics.median(lost), "most": max(lost)},
        "resumed from older than the newest complete checkpoint": 0,
        "scratch left after the next start": 0,
        "final parameters, moments, schedule": "bit-equal to a run that was left alone",
        "seconds from a killed rank to the next step": spread(ranks),
        "seconds from a killed job to the next step, started anew": spread(jobs),
    }


def spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    return {"median": round(statistics.median(values), 2), "most": round(max(values), 2)}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", action="store_true", help="write benchmarks/results/survival.json and .md")
    asked = parser.parse_args(arguments)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        results, steps = survive(Path(place), asked.kills, asked.ranks, asked.seed)
    found = summary(results, steps, asked, time.monotonic() - began)
    lines = [f"- {name}: {value}" for name, value in found.items() if name != "title"]
    text = "\n".join([f"# {found['title']}", "", *lines]) + "\n"
    print(text)
    if asked.out:
        path = RESULTS / "survival.json"
        path.write_text(json.dumps({**found, "kills": [asdict(r) for r in results]}, indent=1) + "\n")
        path.with_suffix(".md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
