"""One save at a time per path, nothing left behind by the dead, nothing taken from the living; and which to
keep."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from checkpoint_ranks import blank, held, load_as, model, same, save_as, saved_once

from zeroshard.checkpoint import HeldRows, NoPeers, RunSnapshot, clean, durable_files, latest, save, verify
from zeroshard.checkpoint import locks as held_locks
from zeroshard.checkpoint.manifest import NAME
from zeroshard.errors import CheckpointError

# Holds a lock as a living save does, without the seconds that importing torch takes.
OWNER = """
import fcntl, sys, time
file = open(sys.argv[1], "r+")
fcntl.flock(file, fcntl.LOCK_EX)
print("ready", flush=True)
time.sleep(60)
"""


def test_a_second_save_to_the_same_path_is_refused(tmp_path: Path) -> None:
    ticket = held_locks.take(tmp_path / "1")
    with pytest.raises(CheckpointError, match=rf"process {os.getpid()} on .* is saving to .*/1 now"):
        save(tmp_path / "1", RunSnapshot(held(model())), NoPeers())
    saved_once(tmp_path / "2")
    assert clean(tmp_path) == []
    assert ticket.staging.is_dir()
    ticket.release()
    saved_once(tmp_path / "1")
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


@pytest.mark.ranks
def test_another_process_is_respected_while_it_lives_and_cleaned_up_after(tmp_path: Path) -> None:
    holder = dead(tmp_path / "last")
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(holder / "owner.json")], stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            owner = {
                "pid": process.pid,
                "host": "here",
                "boot": held_locks.boot_id(),
                "token": "0123456789abcdef",
            }
            (holder / "owner.json").write_text(json.dumps(owner))
            assert clean(tmp_path) == []
            with pytest.raises(CheckpointError, match=rf"process {process.pid} on here is saving to .*/last"):
                save(tmp_path / "last", RunSnapshot(held(model())), NoPeers())
        finally:
            process.kill()
    assert len(clean(tmp_path)) == 1
    assert os.listdir(tmp_path) == []
    saved_once(tmp_path / "last")
    assert latest(tmp_path) == tmp_path / "last"


@pytest.mark.ranks
def test_killed_at_random_moments(tmp_path: Path) -> None:
    """Whenever a save is killed, what was complete still is, and the next start leaves no trace of it."""
    script = Path(__file__).parents[1] / "support" / "checkpoint_kills.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), "20", "5"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for name, results in json.loads(done.stdout).items():
        assert len(results) == 20
        assert all(result["good"] and not result["hidden"] for result in results), (name, results)
        before = count = 0
        for result in results:
            saved = result["latest"] or 0
            assert saved >= max(before, result["told"]), (name, results)
            # A save removes the oldest when it is complete, so one that was killed may leave one too many.
            assert result["count"] <= (3 if result["told"] else count) + 1, (name, results)
            before, count = saved, result["count"]
        assert before > 0, f"no save was fast enough: {results}"


def dead(target: Path) -> Path:
    """A holder as a killed process leaves it: not locked."""
    holder = held_locks.holder_of(target)
    holder.mkdir(parents=True)
    owner = {"pid": 4_000_000, "host": "here", "boot": held_locks.boot_id(), "token": "0123456789abcdef"}
    (holder / "owner.json").write_text(json.dumps(owner))
    return holder


def test_an_interrupted_replacement_is_finished(tmp_path: Path) -> None:
    """Where names cannot be swapped, a crash between the two moves has the old one put aside and the new one
    unnamed."""
    old, new = saved_once(tmp_path / "1", 1), saved_once(tmp_path / "2", 2)
    holder = dead(tmp_path / "1")
    os.rename(tmp_path / "1", holder / "replaced")
    os.rename(tmp_path / "2", holder / "0123456789abcdef")
    clean(tmp_path)
    assert os.listdir(tmp_path) == ["1"]
    target = blank(old)
    load_as(tmp_path / "1", target)
    assert same(target, new)


def test_an_interrupted_replacement_without_a_new_one_is_undone(tmp_path: Path) -> None:
    old = saved_once(tmp_path / "1", 1)
    holder = dead(tmp_path / "1")
    os.rename(tmp_path / "1", holder / "replaced")
    (holder / "0123456789abcdef").mkdir()
    clean(tmp_path)
    target = blank(old)
    load_as(tmp_path / "1", target)
    assert same(target, old)
    assert os.listdir(tmp_path) == ["1"]


def test_replacing_where_names_cannot_be_swapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_files, "exchange", lambda one, other: False)
    saved_once(tmp_path / "1", 1)
    new = saved_once(tmp_path / "1", 2)
    target = blank(new)
    load_as(tmp_path / "1", target)
    assert same(target, new)
    assert os.listdir(tmp_path) == ["1"]


@pytest.mark.parametrize("back", ["at once", "when it is released", "by the next save"])
def test_a_replacement_that_fails_between_its_moves_is_undone(
    back: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_files, "exchange", lambda one, other: False)
    old, rename = saved_once(tmp_path / "1", 1), os.rename
    failures = {"at once": 1, "when it is released": 2, "by the next save": 3}[back]

    def failing(source: Path, to: Path) -> None:
        nonlocal failures
        if Path(to) == tmp_path / "1" and failures:
            failures -= 1
            raise OSError(errno.EIO, "")
        rename(source, to)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", failing)
        with pytest.raises(CheckpointError, match=r"moving the finished .* failed: .*input/output error"):
            saved_once(tmp_path / "1", 2)
    if back == "by the next save":
        assert os.listdir(tmp_path) == [".1.saving"]
        clean(tmp_path)
    assert os.listdir(tmp_path) == ["1"]
    target = blank(old)
    load_as(tmp_path / "1", target)
    assert same(target, old) == (back != "by the next save")  # that finds a new one which is complete


def test_a_disk_without_room_for_a_held_lock_keeps_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "")

    monkeypatch.setattr(os, "write", full)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError, match=r"preparing to save to .*/1 failed: the disk is full"):
        held_locks.take(tmp_path / "1")
    assert len(os.listdir("/proc/self/fd")) == before
    assert os.listdir(tmp_path) == []


def test_an_empty_folder_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    saved_once(tmp_path / "1")
    assert latest(tmp_path) == tmp_path / "1"


def test_a_save_of_another_host_is_dead_only_when_it_writes_no_more(tmp_path: Path) -> None:
    """Its lock may not be visible here, so its writes are its heartbeat."""
    holder = dead(tmp_path / "1")
    owner = {"pid": 1, "host": "elsewhere", "boot": "another", "token": "0123456789abcdef"}
    (holder / "owner.json").write_text(json.dumps(owner))
    assert clean(tmp_path) == []
    with pytest.raises(CheckpointError, match="on elsewhere is saving"):
        saved_once(tmp_path / "1")
    past = time.time() - held_locks.STALE - 10
    for path in (holder / "owner.json", holder):
        os.utime(path, (past, past))
    assert len(clean(tmp_path)) == 1
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("owner", [None, "", '{"pid": 3'])
def test_a_holder_that_was_never_signed_is_dead(tmp_path: Path, owner: str | None) -> None:
    """Holders are signed under the gate, so one without a whole signature lost its owner there."""
    holder = held_locks.holder_of(tmp_path / "1")
    holder.mkdir()
    if owner is not None:
        (holder / "owner.json").write_text(owner)
    saved_once(tmp_path / "1")
    assert os.listdir(tmp_path) == ["1"]


def test_a_rank_that_outlives_its_job_cannot_write_into_the_next(tmp_path: Path) -> None:
    first = held_locks.take(tmp_path / "1")
    stale = first.staging
    shutil.rmtree(first.holder)
    second = held_locks.take(tmp_path / "1")
    assert not stale.exists()
    first.release()
    assert second.staging.is_dir()
    second.release()


def test_other_peoples_hidden_things_stay(tmp_path: Path) -> None:
    for name in (".git", ".1.saving.bak", ".x.removing-12"):
        (tmp_path / name).mkdir()
    saved_once(tmp_path / "1")
    assert clean(tmp_path) == []
    assert sorted(os.listdir(tmp_path)) == [".1.saving.bak", ".git", ".x.removing-12", "1"]


def test_what_a_stopped_removal_left_is_removed(tmp_path: Path) -> None:
    saved_once(tmp_path / "1")
    held_locks.set_aside(tmp_path / "1")
    assert len(clean(tmp_path)) == 1
    assert os.listdir(tmp_path) == []


def test_keep_removes_the_oldest_of_the_family_only(tmp_path: Path) -> None:
    full = model()
    for name in ("best", "other-1", "step-1", "step-2", "step-3"):
        save_as(tmp_path / name, full)
    removed = save_as(tmp_path / "step-10", full, world=2, keep=2)
    assert [path.name for path in removed[1].removed] == ["step-2", "step-1"]
    assert sorted(os.listdir(tmp_path)) == ["best", "other-1", "step-10", "step-3"]
    save_as(tmp_path / "step-2", full, keep=1)
    assert sorted(os.listdir(tmp_path)) == ["best", "other-1", "step-2"]


def test_keep_leaves_a_folder_with_something_else_in_it(tmp_path: Path) -> None:
    saved_once(tmp_path / "1")
    (tmp_path / "1" / "notes.txt").write_text("mine")
    save_as(tmp_path / "2", model(), keep=1)
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


def test_keep_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="keep=0 is no number of checkpoints to keep; pass 1"):
        save_as(tmp_path / "1", model(), keep=0)


def test_the_latest_does_not_hang_on_clocks_or_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "nowhere") is None
    saved_once(tmp_path / "900")
    monkeypatch.setattr(time, "time", lambda: 5.0)
    saved_once(tmp_path / "1000")
    assert latest(tmp_path) == tmp_path / "1000"
    saved_once(tmp_path / "100")
    assert latest(tmp_path) == tmp_path / "100"
    assert latest(tmp_path / "900") == tmp_path / "900"
    (tmp_path / "100" / NAME).unlink()
    assert latest(tmp_path) == tmp_path / "1000"


def test_listing_many_reads_only_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(5):
        saved_once(tmp_path / str(step))
    from zeroshard.checkpoint import directory

    def never(path: Path) -> None:
        raise AssertionError("read in full")

    monkeypatch.setattr(directory, "read_manifest", never)
    assert directory.next_serial(tmp_path) == 6


def test_a_child_that_shares_the_lock_does_not_keep_the_path(tmp_path: Path) -> None:
    """Children forked while saving (data loader workers) share the lock; letting go works all the same."""
    ticket = held_locks.take(tmp_path / "1")
    child = subprocess.Popen(["sleep", "30"], pass_fds=[ticket.fd])
    try:
        ticket.release()
        saved_once(tmp_path / "1")
        assert child.poll() is None, "the child had let go of the lock by itself"
        assert verify(tmp_path / "1").ok
    finally:
        child.kill()
        child.wait()


def test_a_tensor_of_very_many_rows_is_described_without_memory(tmp_path: Path) -> None:
    """Rows are never listed one by one."""
    record = HeldRows(
        "w", "parameter", (1 << 40, 0), "float32", (0, 1 << 40), lambda a, b: torch.empty(b - a, 0), print
    )
    save(tmp_path / "1", RunSnapshot([record]), NoPeers())
    assert verify(tmp_path / "1").ok
