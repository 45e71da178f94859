"""Ranks that live and do not come: what is said, when, and who is named. Whole runs: see `test_failures`."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from zeroshard.cli import main
from zeroshard.comm import rendezvous, stuck
from zeroshard.comm.diagnosis import waits
from zeroshard.comm.diagnosis.waits import Aside
from zeroshard.comm.rendezvous import Rendezvous
from zeroshard.comm.stuck import Person, Usual, in_vain, marked, read, wake, why_blamed
from zeroshard.errors import OptionError
from zeroshard.launch.job import LaunchJob, rank_environment
from zeroshard.launch.join import patience

SCRIPT = """
import os, signal, sys, time, torch
import zeroshard as zs
rank = int(os.environ["RANK"])
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = zs.shard(model, optimizer, stage=1, transport="gloo", timeout=9)
print("ready", flush=True)
if rank == 0: os.kill(os.getpid(), signal.SIGSTOP)
if rank == 0: time.sleep(100)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
"""


def person(pid: int, rank: int = 1) -> Person:
    _, _, host, space, thread = Person.me(rank)
    return Person(rank, pid, host, space, thread)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_stopped_rank_that_keeps_the_store_is_named_all_the_same() -> None:
    """Nobody answers what others ask the store then."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    environ = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ | {"RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=300)[1] for rank in reversed(ranks)][::-1]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    named = "rank 0 (pid "
    assert "zeroshard: rank 1 has waited" in errors[1]
    assert f"and {named}" in errors[1], errors[1]
    assert "stopped by SIGSTOP or Ctrl-Z) did not come in that time" in errors[1]
    assert [rank.returncode for rank in ranks] == [70, 1], errors
    assert "rank 0 did not come where others waited" in errors[0]
    assert re.search(r'File "<string>", line (9|10), in <module>', errors[0])


def test_a_wait_is_spoken_of_after_many_times_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(stuck.time, "monotonic", lambda: now)
    usual = Usual()
    assert not usual.too_long(4.9, 600.0)
    assert usual.too_long(5.1, 600.0)
    for _ in range(40):
        usual.beat()
        now += 2.0
    assert not usual.too_long(19.0, 600.0)
    assert usual.too_long(21.0, 600.0)
    assert usual.too_long(6.0, 10.0), "before the wait ends"


def test_a_note_says_who_did_not_come() -> None:
    assert read(marked("a wait", [1, 12])) == ("a wait", [1, 12])
    assert read(marked("a wait", [])) == read("a wait") == ("a wait", [])
    text, late = read(in_vain("rank 0", 9.2, "its gather [x]", [person(1, rank) for rank in range(1, 8)]))
    assert late == [*range(1, 8)]
    assert text.startswith("rank 0 waited 9 s for its gather [x], and rank 1 (pid 1 on ")
    assert " and 3 more did not come in that time" in text
    assert "and some rank, which is not known, did not come" in in_vain("rank 0", 9.2, "it", [])


def test_a_rank_is_blamed_by_any_of_the_notes() -> None:
    """Rank 0 may have heard of the end from rank 2, and have told rank 1 first."""
    notes = ["rank 0 heard of it", marked("rank 2 waited in vain", [1])]
    assert why_blamed(1, notes) == "rank 2 waited in vain"
    assert why_blamed(3, notes) is None
    assert why_blamed(1, []) is None


def test_a_stopped_process_is_seen_and_let_go_on() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 120
        while not person(process.pid).stopped:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert "stopped by SIGSTOP or Ctrl-Z)" in str(person(process.pid))
        assert not Person(1, process.pid, "elsewhere", "another space", 0).stopped
        wake([person(process.pid)])
        while person(process.pid).stopped:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()


def test_a_store_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "_ANSWERS", 0.05)
    aside, open_again = Aside(), threading.Event()
    assert aside.call(lambda: 7) == 7
    assert aside.call(open_again.wait) is None
    assert aside.call(lambda: 7) is None, "one call is out"
    open_again.set()
    for thread in aside.threads:
        thread.join()
    assert aside.call(lambda: 7) == 7

    def gone() -> int:
        raise RuntimeError("the store has gone")

    assert aside.call(gone) is None


def test_how_long_a_rank_waits_is_said_by_the_program_or_the_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ZEROSHARD_STUCK_AFTER", raising=False)
    assert patience() == 600.0
    monkeypatch.setenv("ZEROSHARD_STUCK_AFTER", "20")
    assert (patience(), patience(7)) == (20.0, 7.0)
    for wrong in (0, -1, True, "5", float("nan"), float("inf")):
        with pytest.raises(OptionError, match="pass the seconds that a rank waits for another, more than 0"):
            patience(wrong)
    environment = rank_environment(LaunchJob(2, "t.py", stuck_after=20.0), 0, "127.0.0.1", 1)
    assert environment["ZEROSHARD_STUCK_AFTER"] == "20.0"
    assert main(["run", "--ranks", "2", "--stuck-after", "0", "t.py"]) != 0
    assert "--stuck-after must be a positive number of seconds, not 0" in capsys.readouterr().err


def test_a_long_wait_for_shard_says_for_whom(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "_SPEAKS", 0.1)
    store = dist.HashStore()
    meetings = [Rendezvous(store, rank, 3, 30.0) for rank in range(3)]
    found: list[object] = []
    early = [
        threading.Thread(target=lambda meeting=meeting: found.append(meeting.share("place", meeting.rank)))
        for meeting in meetings[:2]
    ]
    for thread in early:
        thread.start()
    said = ""
    while not said:
        time.sleep(0.01)
        said = capsys.readouterr().err
    meetings[2].share("place", 2)
    for thread in early:
        thread.join()
    assert found == [[0, 1, 2]] * 2
    said += capsys.readouterr().err
    assert re.fullmatch(
        r"(zeroshard: rank 0 has waited \d+ s for rank 2 to come to `shard` \('place'\)\n)+", said
    )
