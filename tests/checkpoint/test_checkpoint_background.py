"""Saves beside training: what they hold, how failure is told, and that the process waits for them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from checkpoint_ranks import ThreadPeers, all_good, blank, held, load_as, model, ranks, same

from zeroshard.checkpoint import HeldRows, NoPeers, PendingSave, RunSnapshot, Saver, SaveResult, latest, load
from zeroshard.errors import CheckpointError
from zeroshard.params.sharded_param import GuardedState

pytestmark = pytest.mark.threads


def gated(gate: threading.Event) -> HeldRows:
    """A tensor that can be read when the gate opens."""

    def read(start: int, stop: int) -> torch.Tensor:
        assert gate.wait(300)
        return torch.ones(stop - start)

    return HeldRows("w", "parameter", (4,), "float32", (0, 4), read, lambda start, rows: None)


def broken() -> HeldRows:
    def read(start: int, stop: int) -> torch.Tensor:
        raise OSError(28, "No space left on device", "scratch")

    return HeldRows("w", "parameter", (4,), "float32", (0, 4), read, lambda start, rows: None)


def test_it_returns_at_once_and_takes_the_values_of_that_moment(tmp_path: Path) -> None:
    gate = threading.Event()
    saver = Saver(NoPeers())
    values = {"step": 1, "list": [1], "ema": torch.zeros(2)}
    pending = saver.save(tmp_path / "1", RunSnapshot([gated(gate)], values), background=True)
    assert isinstance(pending, PendingSave)
    assert not pending.done
    with pytest.raises(CheckpointError, match=r"has not finished after 0\.01 s"):
        pending.wait(0.01)
    values["list"].append(2)  # type: ignore[attr-defined]
    values["ema"].fill_(9)  # type: ignore[attr-defined]
    gate.set()
    saved = pending.wait()
    assert saved.path == tmp_path / "1"
    assert pending.error is None
    loaded = load(tmp_path / "1", RunSnapshot([HeldRows.of("w", "parameter", torch.zeros(4))]), NoPeers())
    assert loaded.values["list"] == [1]
    assert loaded.values["ema"].tolist() == [0, 0]


def test_originals_may_change_once_they_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves of tensors that change right after; the copy's memory is used again."""
    monkeypatch.setattr("zeroshard.checkpoint.staging.CHUNK", 100)
    monkeypatch.setattr("zeroshard.checkpoint.ranges.FILE_LIMIT", 3000)
    full = model()
    saver = Saver(NoPeers())
    places = set()
    for step in range(4):
        before = {key: tensor.clone() for key, tensor in full.items()}
        pending = saver.save(tmp_path / "1", RunSnapshot(held(full)), background=True)
        assert isinstance(pending, PendingSave)
        pending.copied()
        for tensor in full.values():
            tensor.add_(1)
        places.add(tuple(memory.data_ptr() for memory in saver.staging._memory))
        saver.wait()
        target = blank(full)
        load_as(tmp_path / "1", target)
        assert same(target, before), step
    assert len(places) == 1
    files = [*(tmp_path / "1").glob("*.safetensors")]
    assert len(files) == 2
    assert saver.staging.bytes == sum(-(-file.stat().st_size // 4096) * 4096 for file in files)


def test_what_is_saved_may_change_from_save_to_save(tmp_path: Path) -> None:
    """Files are drawn once for what stays the same, and anew for what does not."""
    first, second = {("parameter", "w"): torch.randn(9, 4)}, {("parameter", "w"): torch.randn(9, 4)}
    longer = {**second, ("parameter", "v"): torch.randn(5)}
    other = {("parameter", "w"): torch.randn(7, 3).half()}
    saver, save_plan = Saver(NoPeers()), []
    for step, full in enumerate([first, second, longer, other, first]):
        saver.save(tmp_path / str(step), RunSnapshot(held(full)), background=step != 3)
        saver.wait()
        save_plan.append(saver._save_plan.file_plans([], 0))
        target = blank(full)
        load_as(tmp_path / str(step), target)
        assert same(target, full), step
    assert [one is two for one, two in pairwise(save_plan)] == [True, False, False, False]


def test_copied_is_the_moment_from_which_they_may_change(tmp_path: Path) -> None:
    gate = threading.Event()
    values = torch.ones(4)

    def read(start: int, stop: int) -> torch.Tensor:
        assert gate.wait(300)
        return values[start:stop]

    record = HeldRows("w", "parameter", (4,), "float32", (0, 4), read, lambda start, rows: None)
    saver = Saver(NoPeers())
    pending = saver.save(tmp_path / "1", RunSnapshot([record]), background=True)
    assert isinstance(pending, PendingSave)
    threading.Timer(0.05, gate.set).start()
    pending.copied()
    values.zero_()
    pending.wait()
    target = torch.zeros(4)
    load(tmp_path / "1", RunSnapshot([HeldRows.of("w", "parameter", target)]), NoPeers())
    assert target.tolist() == [1, 1, 1, 1]


def test_what_an_owner_waits_for_is_copied_first_and_alone(tmp_path: Path) -> None:
    """And what has no owner comes last."""
    begun, gates = threading.Event(), {name: threading.Event() for name in "abcd"}
    order: list[str] = []

    def record(name: str, owner: GuardedState | None) -> HeldRows:
        def read(start: int, stop: int) -> torch.Tensor:
            begun.set()
            assert gates[name].wait(300)
            order.append(name)
            return torch.ones(stop - start)

        rows = (0, 4)
        return HeldRows(name, "parameter", (4,), "float32", rows, read, lambda start, rows: None, owner=owner)

    first, second, third = GuardedState(), GuardedState(), GuardedState()
    records = [record("d", None), record("a", first), record("b", second), record("c", third)]
    saver = Saver(NoPeers())
    pending = saver.save(tmp_path / "1", RunSnapshot(records), background=True)
    assert isinstance(pending, PendingSave)
    for owner in (first, second, third):
        owner.read_by(pending)
    assert begun.wait(300)
    waiting = threading.Thread(target=third.before_change)
    waiting.start()
    while not pending._progress.hurried:
        time.sleep(0.001)
    gates["a"].set()
    gates["c"].set()
    waiting.join(300)
    assert order == ["a", "c"]
    first.before_change()
    third.before_change()
    assert not pending.done
    gates["b"].set()
    gates["d"].set()
    second.before_change()
    pending.copied_of(None)
    assert order == ["a", "c", "b", "d"]
    pending.wait()
    pending.copied_of(GuardedState())  # of whom nothing is saved


def test_a_failed_save_holds_no_owner_up(tmp_path: Path) -> None:
    owner = GuardedState()
    pending = Saver(NoPeers()).save(
        tmp_path / "1", RunSnapshot([replace(broken(), owner=owner)]), background=True
    )
    assert isinstance(pending, PendingSave)
    owner.read_by(pending)
    owner.before_change()
    with pytest.raises(CheckpointError, match="the disk is full"):
        pending.wait()


def test_copies_are_of_this_ranks_share_only(tmp_path: Path) -> None:
    full = {("parameter", "w"): torch.randn(4096, 256)}

    def work(peers: ThreadPeers) -> int:
        saver = Saver(peers)
        saver.save(tmp_path / "1", RunSnapshot(held(full, copied=True)), background=True)
        saver.wait()
        return saver.staging.bytes

    assert all_good(ranks(4, work)) == [(1 << 20) + 4096] * 4, "the header takes a page"
    target = blank(full)
    load_as(tmp_path / "1", target)
    assert same(full, target)


def test_several_ranks_save_in_the_background(tmp_path: Path) -> None:
    full = model()

    def work(peers: ThreadPeers) -> SaveResult:
        saver = Saver(peers)
        for step in range(3):
            saver.save(tmp_path / str(step), RunSnapshot(held(full, peers.rank, 3)), background=True, keep=2)
        saved = saver.wait()
        assert saved is not None
        return saved

    assert {saved.path.name for saved in all_good(ranks(3, work))} == {"2"}
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]
    target = blank(full)
    load_as(tmp_path / "2", target)
    assert same(full, target)


def test_a_failure_is_reported_and_the_next_save_is_the_retry(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver = Saver(NoPeers())
    with caplog.at_level(logging.WARNING, "zeroshard"):
        pending = saver.save(tmp_path / "1", RunSnapshot([broken()]), background=True)
        saved = saver.save(tmp_path / "2", RunSnapshot(held(model())))
    assert isinstance(pending, PendingSave)
    assert isinstance(pending.error, CheckpointError)
    assert isinstance(saved, SaveResult)
    assert saved.after_failure is not None
    assert "the disk is full" in saved.after_failure
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert "saving again after the background save" in caplog.text
    assert latest(tmp_path) == tmp_path / "2"
    assert os.listdir(tmp_path) == ["2"]


def test_waiting_raises_the_failure_once(tmp_path: Path) -> None:
    saver = Saver(NoPeers())
    saver.save(tmp_path / "1", RunSnapshot([broken()]), background=True)
    with pytest.raises(CheckpointError, match="the disk is full"):
        saver.wait()
    assert saver.wait() is None


def test_all_ranks_hear_of_one_ranks_failure(tmp_path: Path) -> None:
    def work(peers: ThreadPeers) -> str:
        saver = Saver(peers)
        rows = (4 * peers.rank, 4 * peers.rank + 4)
        bad = broken()
        read = bad.read if peers.rank else (lambda start, stop: torch.zeros(stop - start))
        record = HeldRows("w", "parameter", (8,), "float32", rows, read, bad.write)
        saver.save(tmp_path / "1", RunSnapshot([record]), background=True)
        with pytest.raises(CheckpointError) as caught:
            saver.wait()
        return str(caught.value)

    texts = set(all_good(ranks(2, work)))
    assert len(texts) == 1
    assert "rank 1: " in texts.pop()


@pytest.mark.parametrize("threads", [1, 3])
def test_the_process_waits_for_it(tmp_path: Path, threads: int) -> None:
    """Also where other threads would help it, which Python at its end starts no more."""
    code = """
import sys, time, torch
from zeroshard.checkpoint import NoPeers, HeldRows, Saver, RunSnapshot, staging
torch.set_num_threads(int(sys.argv[2]))
staging.BLOCK, staging.CHUNK = 4, 8
def read(start, stop):
    time.sleep(0.2)
    return torch.ones(stop - start)
record = HeldRows("w", "parameter", (4,), "float32", (0, 4), read, print)
Saver(NoPeers()).save(sys.argv[1], RunSnapshot([record]), background=True)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "1"), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    target = torch.zeros(4)
    load(tmp_path / "1", RunSnapshot([HeldRows.of("w", "parameter", target)]), NoPeers())
    assert target.tolist() == [1, 1, 1, 1]
