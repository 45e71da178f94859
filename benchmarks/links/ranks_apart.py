"""Ranks as processes inside namespaces: start one for each task, and collect what each unsharded
parameters in a file."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

from environment import environment
from namespaces import Network, end_with_parent

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Told:
    """What the ranks left, in rank order (nothing where one did not come so far), and what went wrong."""

    answers: list[dict[str, Any]]
    problem: str = ""
    logs: list[str] = field(default_factory=list)


def surroundings(rank: int, world: int) -> dict[str, str]:
    """As for `compare.py`, but on several hosts."""
    changed = {
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    return {**environment(rank), **changed}


def run(net: Network, script: str, tasks: Sequence[Any], per_node: int, timeout: float) -> Told:
    """`script` for every task, a dataclass with a field `answer` for the file that the rank is to write."""
    world = len(tasks)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        answers = [Path(folder, f"rank{rank}.json") for rank in range(world)]
        logs = [Path(folder, f"rank{rank}.log") for rank in range(world)]
        ranks = []
        for rank, task in enumerate(tasks):
            told = json.dumps({**asdict(task), "answer": str(answers[rank])})
            command = net.command(rank // per_node, [sys.executable, str(HERE / script), told])
            env = surroundings(rank, world)
            with logs[rank].open("wb") as log:
                ranks.append(
                    subprocess.Popen(command, env=env, stdout=log, stderr=log, preexec_fn=end_with_parent)
                )
        problem = wait(ranks, timeout)
        texts = [log.read_text(errors="replace") for log in logs]
        if problem:
            lines = [line for text in texts for line in text.splitlines() if "Error" in line]
            problem = f"{problem}: {lines[-1][:300] if lines else 'no error in its output'}"
        found = [json.loads(answer.read_text()) if answer.exists() else {} for answer in answers]
        return Told(found, problem, texts)


def wait(ranks: list[subprocess.Popen[bytes]], timeout: float) -> str:
    """Until all ranks ended, or one failed, or time is up."""
    deadline = time.monotonic() + timeout
    try:
        while any(rank.poll() is None for rank in ranks):
            failed = [number for number, rank in enumerate(ranks) if rank.poll()]
            if failed:
                time.sleep(3.0)  # the others say why, too
                return f"rank {failed[0]} failed"
            if time.monotonic() > deadline:
                return f"not done within {timeout:.0f} s"
            time.sleep(0.05)
        return next((f"rank {n} failed" for n, rank in enumerate(ranks) if rank.returncode), "")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
