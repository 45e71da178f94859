"""A job whose ranks are killed again and again ends where one ends that was left alone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from survival_script import EVERY, RANKS, STEPS
from test_resume import stored

import zeroshard as zs
from zeroshard.testing import assert_same_bits

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

SCRIPT = Path(__file__).parents[1] / "support" / "survival_script.py"


def start(folder: Path, last: int = STEPS) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "zeroshard", "run", "--ranks", str(RANKS), str(SCRIPT), str(folder)]
    command.append(str(last))
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def reached(folder: Path) -> int:
    found = zs.latest(folder)
    return int(found.name.removeprefix("step-")) if found is not None else 0


def kill_a_rank(job: subprocess.Popen[str], folder: Path, after: int, draw: random.Random) -> None:
    """Once the job has come to a step, at a random moment from there on."""
    deadline = time.monotonic() + 60
    while reached(folder) < after and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(draw.random() * 0.05)
    ranks = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    if ranks:
        os.kill(int(draw.choice(ranks)), signal.SIGKILL)


def test_killed_ranks_cost_no_more_than_the_steps_since_the_last_save(tmp_path: Path) -> None:
    draw = random.Random(5)
    folder, alone = tmp_path / "killed", tmp_path / "alone"
    before = 0
    for after in (EVERY, STEPS // 4, STEPS // 2):
        job = start(folder, last=after + 6 * EVERY)  # so that it cannot end before it is killed
        kill_a_rank(job, folder, after, draw)
        output, _ = job.communicate(timeout=300)
        assert job.returncode, output
        assert reached(folder) >= max(after, before), output
        before = reached(folder)
    for place in (folder, alone):
        job = start(place)
        output, _ = job.communicate(timeout=300)
        assert job.returncode == 0, output
    assert_same_bits(stored(folder / f"step-{STEPS}"), stored(alone / f"step-{STEPS}"))
    # What the killed saves had begun is gone, and no more than three checkpoints were kept.
    assert sorted(p.name for p in folder.iterdir()) == [f"step-{STEPS - i * EVERY}" for i in (2, 1, 0)]
