"""Jobs that are killed, told to stop, and started again: by the launcher, by torchrun, by a person."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_launch_ranks import ENVIRON, wait_until
from test_launch_ranks import launch as launch_bare
from test_resume import stored

import zeroshard as zs
from zeroshard.comm.diagnosis.exits import EXIT_STUCK
from zeroshard.launch.job import LaunchJob
from zeroshard.launch.outcome import RankEnding, RankReport
from zeroshard.launch.restart import AttemptFailure, hopeless, lost, pause
from zeroshard.testing import assert_same_bits

EXAMPLE = Path(__file__).parents[2] / "examples" / "survive.py"
SMALL = ("--width", "64", "--every", "2")


# ---------------------------------------------------------------------- decisions


def test_waiting_doubles_until_there_is_progress() -> None:
    stuck, moved = AttemptFailure(0, False), AttemptFailure(0, True)
    assert [pause([stuck] * n) for n in (1, 2, 3, 20)] == [0.5, 1.0, 2.0, 30.0]
    assert pause([stuck] * 5 + [moved]) == 0.5


def test_a_rank_is_lost_when_it_fails_again_without_a_checkpoint_between() -> None:
    assert not lost([AttemptFailure(1, False)])
    assert lost([AttemptFailure(1, True), AttemptFailure(1, False)])
    assert not lost([AttemptFailure(1, True), AttemptFailure(1, True)])
    assert not lost([AttemptFailure(0, False), AttemptFailure(1, False)])


def test_what_would_fail_again_is_not_started_again() -> None:
    wrong = RankEnding(0, 1, 1.0, report=RankReport("OptionError", "stage=9", "", 1.0))
    assert hopeless(wrong, 1) == "another attempt would meet the same OptionError"
    assert "called wrongly" in (hopeless(RankEnding(0, 2, 1.0), 2) or "")
    assert "told to stop" in (hopeless(RankEnding(0, zs.PREEMPTED, 1.0), zs.PREEMPTED) or "")
    assert hopeless(RankEnding(0, -9, 1.0), 137) is None
    assert hopeless(RankEnding(0, EXIT_STUCK, 1.0), EXIT_STUCK) is None  # nobody told it to stop


def test_fewer_ranks_need_restarts_and_a_folder() -> None:
    with pytest.raises(zs.OptionError, match=r"needs --max-restarts N and --resume FOLDER"):
        LaunchJob(4, "t.py", fewest=1, restarts=3)
    with pytest.raises(zs.OptionError, match=r"smaller first: 4:2"):
        LaunchJob(2, "t.py", fewest=4, restarts=3, resume=Path("x"))
    with pytest.raises(zs.OptionError, match=r"--max-restarts must be 0 or more"):
        LaunchJob(2, "t.py", restarts=-1)


def test_there_must_be_a_folder_to_resume_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.delenv("ZEROSHARD_RESUME", raising=False)
    model = torch.nn.Linear(2, 2)
    run = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(zs.OptionError, match=r"pass one, run\.resume\('ckpt'\)"):
        run.resume()
    assert run.resume(tmp_path / "none yet") is None
    assert run.folder == tmp_path / "none yet"
    run.save(tmp_path / "a" / "1", extra={"step": 1})
    monkeypatch.setenv("ZEROSHARD_RESUME", str(tmp_path / "a"))
    assert run.resume() == {"step": 1}
    manifest = tmp_path / "a" / "1" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    with pytest.raises(zs.CheckpointError, match=r"no checkpoint that can be loaded, but 1: damaged"):
        run.resume()
    run.close()


# ---------------------------------------------------------------------- jobs


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run of 60 steps that nobody disturbed saved."""
    folder = tmp_path_factory.mktemp("alone")
    done = subprocess.run(
        launch(folder, "--ranks", "2"), capture_output=True, text=True, timeout=300, env=ENVIRON
    )
    assert done.returncode == 0, done.stderr
    return folder


def launch(folder: Path, *words: str, steps: int = 60, pause: float = 0.0) -> list[str]:
    run = [sys.executable, "-m", "zeroshard", "run", "--threads", "1", "--resume", str(folder), *words]
    return [*run, str(EXAMPLE), *SMALL, "--steps", str(steps), "--pause", str(pause)]


class Started:
    """A job in the background, and the ranks that it has now."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRON
        )

    def ranks(self) -> list[int]:
        try:
            listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            names = {int(pid): Path(f"/proc/{pid}/comm").read_text() for pid in listed}
        except OSError:
            return []
        return [pid for pid, name in names.items() if name.startswith("zs-rank-")]

    def reached(self, step: int) -> None:
        """Wait until a checkpoint of this step, or a later one, is complete."""

        def there() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            found = zs.latest(self.folder)
            return found is not None and int(found.name.removeprefix("step-")) >= step

        wait_until(there, 60)

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=300)
        return self.process.returncode, errors


@pytest.fixture
def jobs() -> Iterator[list[Started]]:
    begun: list[Started] = []
    yield begun
    for job in begun:
        job.process.kill()
        job.process.communicate()


@pytest.mark.ranks
def test_a_killed_rank_starts_the_job_again(tmp_path: Path, alone: Path, jobs: list[Started]) -> None:
    jobs.append(Started(launch(tmp_path, "--ranks", "2", "--max-restarts", "2", pause=0.02), tmp_path))
    for step in (6, 30):
        jobs[0].reached(step)
        before = jobs[0].ranks()
        os.kill(before[step % 2], signal.SIGKILL)
        wait_until(lambda before=before: bool(set(jobs[0].ranks()) - set(before)), 20)
    code, errors = jobs[0].end()
    assert code == 0, errors
    said = re.findall(r"zeroshard: restart (\d) of 2 in 0\.5 s with 2 ranks, from .*/step-(\d+)\n", errors)
    assert [number for number, _ in said] == ["1", "2"]
    assert [int(step) >= asked for (_, step), asked in zip(said, (6, 30), strict=True)] == [True, True]
    assert "was killed by SIGKILL" in errors
    assert_same_bits(stored(tmp_path / "step-60"), stored(alone / "step-60"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-56", "step-58", "step-60"]


@pytest.mark.ranks
@pytest.mark.parametrize("to", ["the launcher", "one rank"])
def test_a_run_that_is_told_to_stop_saves_and_goes_on_later(
    tmp_path: Path, alone: Path, jobs: list[Started], to: str
) -> None:
    jobs.append(Started(launch(tmp_path, "--ranks", "2", "--max-restarts", "1", pause=0.05), tmp_path))
    jobs[0].reached(4)
    told = jobs[0].process.pid if to == "the launcher" else jobs[0].ranks()[1]
    os.kill(told, signal.SIGTERM)
    code, errors = jobs[0].end()
    assert code == zs.PREEMPTED == 75, errors
    assert "told to stop by SIGTERM: every rank left at the end of a step" in errors
    assert "restart" not in errors
    found = zs.latest(tmp_path)
    assert found is not None
    assert 4 < int(found.name.removeprefix("step-")) < 60
    if to == "one rank":
        return
    jobs.append(Started(launch(tmp_path, "--ranks", "2"), tmp_path))
    code, errors = jobs[1].end()
    assert code == 0, errors
    assert_same_bits(stored(tmp_path / "step-60"), stored(alone / "step-60"))


BROKEN = """
import os
import torch
import zeroshard as zs
model = torch.nn.Linear(6, 6)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
run = zs.shard(model, optimizer, stage=3)
extra = run.resume()
start = extra["step"] if extra else 0
if run.rank == 0:
    print("from", start, "with", run.size, flush=True)
for step in range(start, 6):
    if step == 3 and run.rank == 2:
        os.kill(os.getpid(), 9)  # a host that is gone whenever it is needed
    whole = torch.randn(6, 6, generator=torch.Generator().manual_seed(step))
    model(whole.chunk(run.size)[run.rank]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 2:
        run.save(run.folder / f"step-{step + 1}", extra={"step": step + 1})
run.close()
"""


@pytest.mark.ranks
def test_a_job_goes_on_with_fewer_ranks_when_one_does_not_come_back(tmp_path: Path) -> None:
    """Three ranks save at step 2 and die in step 3, twice; two of them train on from there to the end."""
    script, folder = tmp_path / "script.py", tmp_path / "ckpt"
    script.write_text(BROKEN)
    words = ["run", "--ranks", "1:3", "--max-restarts", "3", "--resume", str(folder), str(script)]
    done = subprocess.run(
        [sys.executable, "-m", "zeroshard", *words], capture_output=True, text=True, timeout=300, env=ENVIRON
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["from 0 with 3", "from 2 with 3", "from 2 with 2"]
    assert "rank 2 failed again without a checkpoint in between and does not come back" in done.stderr
    assert re.search(r"restart 2 of 3 in 0\.5 s with 2 ranks, from .*/step-2\n", done.stderr)
    assert zs.latest(folder) == folder / "step-6"


@pytest.mark.ranks
def test_restarts_come_to_an_end(tmp_path: Path) -> None:
    """Two attempts fail for a reason that may pass; the third one was called wrongly."""
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nsys.exit(4 - int(os.environ['TORCHELASTIC_RESTART_COUNT']))\n")
    for restarts, status, said in (
        (1, 3, "gave up after 1 restart"),
        (3, 2, "no restart: exit code 2 says that the script was called wrongly"),
    ):
        done = launch_bare(f"1, {str(script)!r}, restarts={restarts}")
        assert done.returncode == status
        assert done.stderr.splitlines()[-1].startswith(f"zeroshard: {said}")


@pytest.mark.ranks
@pytest.mark.slow
def test_torchrun_starts_it_again_too(tmp_path: Path, alone: Path, jobs: list[Started]) -> None:
    words = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3", "--monitor-interval", "0.1"]
    script = [str(EXAMPLE), *SMALL, "--steps", "60", "--pause", "0.05", "--folder", str(tmp_path)]
    jobs.append(Started([sys.executable, "-m", "torch.distributed.run", *words, *script], tmp_path))
    jobs[0].reached(6)
    listed = Path(f"/proc/{jobs[0].process.pid}/task/{jobs[0].process.pid}/children").read_text().split()
    workers = [pid for pid in listed if "survive.py" in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill(int(workers[1]), signal.SIGKILL)
    code, errors = jobs[0].end()
    assert code == 0, errors
    assert_same_bits(stored(tmp_path / "step-60"), stored(alone / "step-60"))
