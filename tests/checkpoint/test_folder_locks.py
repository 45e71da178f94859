"""One run at a time saves into a folder: its claim, by processes that live, die, and are on other hosts."""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroshard as zs
from zeroshard.checkpoint import PendingSave, locks
from zeroshard.checkpoint.locks import FILE, FolderLockedError, RunFolders
from zeroshard.errors import CheckpointError
from zeroshard.testing import ranks
from zeroshard.testing.processes import server


def save_and_stay(folder: str, fork: bool, line: Connection) -> None:
    """Another job that has saved its step 50 and lives on, until a line comes. `fork`: it leaves a child."""
    run = made()
    run.resume(folder)
    run.save(folder + "/step-50", extra={"step": 50})
    if fork:
        parent = os.getpid()
        if os.fork() == 0:
            while os.getppid() == parent:
                time.sleep(0.1)
            time.sleep(4)
            os._exit(0)
    line.send("saved")
    line.recv()
    atexit._run_exitfuncs()  # which a process of multiprocessing leaves out


class Clock:
    """`time` for `locks` on the test's thread: sleeping takes none, and what happens meanwhile is known."""

    def __init__(self) -> None:
        self.slept = 0.0
        self.meanwhile: Callable[[], None] = lambda: None
        self._owner, self._now = threading.get_ident(), locks._now

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        if threading.get_ident() != self._owner:
            return time.sleep(seconds)
        self.slept += seconds
        return self.meanwhile()

    def now(self, folder: Path) -> float:
        return self._now(folder) + self.slept


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(locks, "time", clock)
    monkeypatch.setattr(locks, "_now", clock.now)
    return clock


class Job:
    """A process of `save_and_stay`, forked from one that has imported torch."""

    def __init__(self, folder: Path, fork: bool = False) -> None:
        self._line, theirs = server().Pipe()
        self._process = server().Process(target=save_and_stay, args=(str(folder), fork, theirs), daemon=True)
        self._process.start()
        theirs.close()
        assert self._line.recv() == "saved"
        assert self._process.pid is not None
        self.pid = self._process.pid

    def end(self, number: int | None = None) -> None:
        if number is None:
            self._line.send("")
        else:
            os.kill(self.pid, number)
        self._process.join(timeout=300)
        assert self._process.exitcode == (0 if number is None else -number)
        self._line.close()


def made() -> zs.Run:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3)
    return zs.shard(model, torch.optim.AdamW(model.parameters()))


@pytest.fixture
def run() -> Iterator[zs.Run]:
    run = made()
    yield run
    run.close()


def test_many_folders_cost_a_few_descriptors(tmp_path: Path, run: zs.Run) -> None:
    """Front ends have a folder for each checkpoint, and remove old ones whole."""
    folders = [tmp_path / f"checkpoint-{number}" for number in range(7)]
    for number, folder in enumerate(folders):
        run.save(folder / "zeroshard")
        if number == 5:
            shutil.rmtree(folders[4])
            run.save(folders[3] / "again")  # which is the latest but one then
    assert [folder.name[-1] for folder in folders if (folder / FILE).exists()] == ["3", "5", "6"]
    opened = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert len([name for name in opened if FILE in name]) == 4
    run.close()
    assert not [folder for folder in folders if (folder / FILE).exists()]


def test_a_living_run_is_named_with_host_pid_and_time(tmp_path: Path, run: zs.Run) -> None:
    job = Job(tmp_path)
    told = re.compile(
        rf"{tmp_path} belongs to another run, which is alive: process {job.pid} on `{os.uname().nodename}`, "
        r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\. Two runs"
    )
    try:
        with pytest.raises(CheckpointError, match=told):
            run.resume(tmp_path)
        for background in (False, True):  # in the call, whoever writes
            with pytest.raises(CheckpointError, match=told):
                run.save(tmp_path / "step-60", background=background)
        assert run.load(zs.latest(tmp_path)) == {"step": 50}  # loading needs no claim
        assert run.save(tmp_path / "elsewhere" / "step-60").bytes
    finally:
        job.end()
    assert not (tmp_path / FILE).exists()
    assert run.resume(tmp_path) == {"step": 50}
    assert run.save(tmp_path / "step-60").path.name == "step-60"


@pytest.mark.parametrize("fork", [False, True])
def test_the_held_lock_of_a_killed_run_is_taken_over(
    tmp_path: Path, run: zs.Run, fork: bool, clock: Clock
) -> None:
    """At once; also where a process that it forked lives on."""
    Job(tmp_path, fork).end(signal.SIGKILL)
    assert (tmp_path / FILE).exists()
    assert run.resume(tmp_path) == {"step": 50}
    assert not clock.slept
    assert json.loads((tmp_path / FILE).read_text())["pid"] == os.getpid()


def test_runs_of_one_process_share_their_held_lock(tmp_path: Path) -> None:
    one, other = made(), made()
    one.save(tmp_path / "step-1")
    other.save(tmp_path / "step-2")
    one.close()
    assert (tmp_path / FILE).exists()
    other.close()
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2"]


def _save_and_resume(folder: Path) -> list[str]:
    run = made()
    run.resume(folder)
    for number in range(3):
        run.save(folder / f"step-{number}", background=number > 0, keep=2)
    run.close()
    return sorted(os.listdir(folder)) if run.rank == 0 else []


def test_ranks_have_one_held_lock_together(tmp_path: Path) -> None:
    assert ranks(2).run(_save_and_resume, tmp_path)[0] == ["step-1", "step-2"]


def _refused_on(folder: Path) -> str:
    run = made()
    with pytest.raises(CheckpointError) as caught:
        run.save(folder / "step-60", background=True)
    with pytest.raises(CheckpointError) as again:
        run.resume(folder)
    run.close()
    assert str(again.value) == str(caught.value)
    return str(caught.value)


def test_all_ranks_are_refused_with_one_text(tmp_path: Path) -> None:
    job = Job(tmp_path)
    try:
        one, other = ranks(2).run(_refused_on, tmp_path)
    finally:
        job.end()
    assert one == other
    assert f"process {job.pid} on" in one


# ---------------------------------------------------------------------- other hosts, other times


Foreign = Callable[..., Path]


@pytest.fixture
def foreign(tmp_path: Path) -> Foreign:
    """A claim by a process of another host, whose locks do not show here."""

    def sign(**changes: Any) -> Path:
        owner = {"pid": 7, "host": "far", "boot": "other", "machine": "far 1", "token": "0", "since": 0.0}
        (tmp_path / FILE).write_text(json.dumps(owner | changes))
        return tmp_path / FILE

    return sign


def test_another_host_lives_while_its_held_lock_is_touched(
    tmp_path: Path, clock: Clock, foreign: Foreign
) -> None:
    path = foreign()
    clock.meanwhile = lambda: os.utime(path, (1, time.time() + clock.slept))
    with pytest.raises(FolderLockedError, match="process 7 on `far`, since 1970-01-01"):
        RunFolders().hold(tmp_path)
    assert clock.slept > 0


def test_another_host_has_died_when_its_held_lock_is_old(
    tmp_path: Path, clock: Clock, foreign: Foreign
) -> None:
    foreign()
    mine = RunFolders()
    mine.hold(tmp_path)  # waits until it is old enough
    assert locks.FOLDER_STALE - 1 <= clock.slept <= locks.FOLDER_STALE + 2
    mine.release()
    os.utime(foreign(), (1, 1))
    clock.slept = 0.0
    mine.hold(tmp_path)
    assert not clock.slept
    mine.release()
    assert os.listdir(tmp_path) == []


def test_a_machine_that_was_started_anew_has_no_run_any_more(
    tmp_path: Path, foreign: Foreign, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "_machine", lambda: "here 1")
    foreign(machine="here 1")
    mine = RunFolders()
    mine.hold(tmp_path)
    assert not clock.slept
    mine.release()


def test_a_held_lock_is_touched_while_it_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "BEAT", 0.2)
    monkeypatch.setattr(locks, "_beats", [])  # the thread of an earlier one may sleep for long
    mine = RunFolders()
    mine.hold(tmp_path)
    os.utime(tmp_path / FILE, (1, 1))
    deadline = time.monotonic() + 300
    while (tmp_path / FILE).stat().st_mtime <= 1 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert (tmp_path / FILE).stat().st_mtime > 1
    mine.release()


def test_a_run_that_was_stopped_for_long_finds_its_held_lock_taken(
    tmp_path: Path, run: zs.Run, clock: Clock, foreign: Foreign
) -> None:
    run.save(tmp_path / "step-1")
    (tmp_path / FILE).unlink()
    path = foreign()
    clock.meanwhile = lambda: os.utime(path, (1, time.time() + clock.slept))
    with pytest.raises(CheckpointError, match="process 7 on `far`"):
        run.save(tmp_path / "step-2")
    assert sorted(os.listdir(tmp_path)) == [FILE, "step-1"]


def test_a_held_lock_that_somebody_removed_is_made_again(tmp_path: Path, run: zs.Run) -> None:
    run.save(tmp_path / "step-1")
    (tmp_path / FILE).unlink()
    run.save(tmp_path / "step-2")
    assert json.loads((tmp_path / FILE).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"pid": "x", "since": "y"}', "[" * 4000])
def test_a_held_lock_that_cannot_be_read_is_taken_over_when_old(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    os.utime(tmp_path / FILE, (1, 1))
    mine = RunFolders()
    mine.hold(tmp_path)
    mine.release()
    assert os.listdir(tmp_path) == []


def test_processes_of_one_job_share_a_folder(tmp_path: Path, foreign: Foreign) -> None:
    """Two models over groups of their own, each saved by the first rank of its group."""
    code = (
        "import sys, time; from pathlib import Path; from zeroshard.checkpoint.locks import RunFolders\n"
        f"mine = RunFolders('127.0.0.1', 29500, 0); mine.hold(Path({str(tmp_path)!r}))\n"
        "print('held', flush=True); sys.stdin.readline()"
    )
    job = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert job.stdout is not None
    assert job.stdout.readline() == "held\n"
    try:
        RunFolders("127.0.0.1", 29500, 1).hold(tmp_path)
        for other in (RunFolders("127.0.0.1", 29501, 1), RunFolders("127.0.0.1", 29500, 0), RunFolders()):
            locks._held_locks.clear()
            with pytest.raises(FolderLockedError):
                other.hold(tmp_path)
    finally:
        locks._held_locks.clear()
        job.communicate("\n", timeout=300)


def test_where_nothing_can_be_written_resume_still_loads(
    tmp_path: Path, run: zs.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.save(tmp_path / "step-1", extra={"step": 1})
    other = made()
    with monkeypatch.context() as patched:

        def refuse(*_: Any) -> Any:
            raise OSError(30, "Read-only file system")

        locks._held_locks.clear()
        patched.setattr(locks, "_try", refuse)
        assert other.resume(tmp_path) == {"step": 1}
        with pytest.raises(CheckpointError, match=r"claiming .* failed: the file system is read-only"):
            other.save(tmp_path / "step-2")
    other.close()


# ---------------------------------------------------------------------- whose checkpoints may go


def test_checkpoints_of_another_job_stay_until_this_one_goes_on_from_them(
    tmp_path: Path, run: zs.Run
) -> None:
    Job(tmp_path).end()
    before = (tmp_path / "step-50" / "manifest.json").read_bytes()
    with pytest.raises(CheckpointError, match=r"step-50 exists and is a checkpoint, which stays as it is"):
        run.save(tmp_path / "step-50")
    pending = run.save(tmp_path / "step-50", background=True)
    assert isinstance(pending, PendingSave)
    with pytest.raises(CheckpointError, match="which stays as it is"):
        pending.wait()
    assert (tmp_path / "step-50" / "manifest.json").read_bytes() == before
    run.save(tmp_path / "step-60", keep=1)
    run.save(tmp_path / "step-70", keep=1)
    assert (tmp_path / "step-50" / "manifest.json").read_bytes() == before
    run.save(tmp_path / "step-70", keep=1)  # its own
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-50", "step-70"]
    assert run.load(tmp_path / "step-50") == {"step": 50}
    run.save(tmp_path / "step-80", keep=1)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-80"]


def test_checkpoints_of_another_job_are_replaced_where_that_is_asked_for(tmp_path: Path, run: zs.Run) -> None:
    Job(tmp_path).end()
    run.save(tmp_path / "step-50", extra={"step": 51}, overwrite=True)
    assert run.load(tmp_path / "step-50") == {"step": 51}
