"""The launcher's decisions: what ranks get, who is to blame, what other launchers' environments mean."""

from __future__ import annotations

import os
import re
import signal
import traceback
from dataclasses import replace

import pytest
import torch

import zeroshard as zs
from zeroshard.errors import OptionError
from zeroshard.launch.job import LaunchJob, rank_environment, shared_environment
from zeroshard.launch.join import (
    Announcement,
    announcement_in,
    backend_for,
    first_host,
    port_of,
    tasks_on_node,
)
from zeroshard.launch.outcome import (
    RankEnding,
    RankReport,
    describe,
    duration,
    exit_code,
    first_failure,
    narrate,
    rank_list,
    summary,
)
from zeroshard.launch.output import OutputRelay
from zeroshard.launch.rank import STACKS, to_the_callers_line
from zeroshard.launch.supervisor import GRACE, after_failure, after_signal

BOOM = RankReport("ValueError", "boom\nmore", "Traceback\nValueError: boom\nmore\n", at=101.0)
LOST = RankReport("RankError", "rank 1 is gone", "Traceback\nRankError: rank 1 is gone\n", at=100.5)


def test_a_rank_gets_what_torchrun_would_set() -> None:
    environment = rank_environment(LaunchJob(4, "train.py"), 3, "127.0.0.1", 4321)
    assert environment["RANK"] == environment["LOCAL_RANK"] == "3"
    assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "4"
    assert announcement_in(environment) == Announcement(
        "zeroshard run", 3, 4, 3, 4, "127.0.0.1", 4321, served=True, one_host=True
    )


@pytest.mark.parametrize(
    ("threads", "environ", "cores", "expected"),
    [
        (None, {}, 16, {"OMP_NUM_THREADS": "8"}),
        (None, {}, 1, {"OMP_NUM_THREADS": "1"}),
        (None, {"OMP_NUM_THREADS": "5"}, 16, {}),
        (3, {"OMP_NUM_THREADS": "5"}, 16, {"OMP_NUM_THREADS": "3"}),
    ],
)
def test_cores_are_shared_unless_said_otherwise(
    threads: int | None, environ: dict[str, str], cores: int, expected: dict[str, str]
) -> None:
    assert shared_environment(LaunchJob(2, "t.py", threads=threads), environ, cores) == expected


@pytest.mark.parametrize("wrong", [{"ranks": 0}, {"ranks": 1, "threads": 0}, {"ranks": 1, "timeout": 0.0}])
def test_a_job_that_makes_no_sense_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(OptionError, match=r"--(ranks|threads|timeout) must be"):
        LaunchJob(target="t.py", **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ending", "text", "code"),
    [
        (
            RankEnding(1, -9, 112.0),
            "rank 1 was killed by SIGKILL after 12 s (the kernel does this when memory",
            137,
        ),
        (RankEnding(1, -11, 100.4, last_line="oops"), "rank 1 was killed by SIGSEGV after 0.4 s: oops", 139),
        (
            RankEnding(1, 3, 101.0, last_line="ValueError: boom"),
            "rank 1 exited with code 3: ValueError: boom",
            3,
        ),
        (
            RankEnding(1, 1, 101.0, report=BOOM, last_line="noise"),
            "rank 1 exited with code 1: ValueError: boom",
            1,
        ),
        (RankEnding(0, 3, 185.0), "rank 0 exited with code 3 after 1 min 25 s", 3),
        (
            RankEnding(2, -9, 109.0, report=BOOM, stopped=True),
            "rank 2 raised ValueError: boom after 1.0 s and did not",
            1,
        ),
    ],
)
def test_an_ending_is_described(ending: RankEnding, text: str, code: int) -> None:
    assert describe(ending, started=100.0).startswith(text)
    assert exit_code(ending) == code


def test_a_long_message_is_told_once() -> None:
    """The traceback has all of it; where a script shows that elsewhere, the last line does."""
    long = "compress= " + "names a codec " * 20
    shown = RankReport("OptionError", long, "Traceback …", 101.0)
    line = describe(RankEnding(0, 1, 101.0, report=shown), started=100.0)
    assert line.startswith("rank 0 exited with code 1: OptionError: compress= names a codec")
    assert line.endswith("…")
    assert len(line) < 130
    hidden = describe(RankEnding(0, 1, 101.0, report=replace(shown, traceback="")), started=100.0)
    assert hidden == f"rank 0 exited with code 1: OptionError: {long.strip()}"


def test_the_first_to_fail_is_blamed_and_not_the_first_to_end() -> None:
    slow = RankEnding(1, 1, 105.0, report=BOOM)
    assert first_failure([RankEnding(0, 7, 102.0), slow]) is slow
    assert first_failure([RankEnding(0, 0, 1.0), RankEnding(1, -15, 2.0, stopped=True)]) is None


def test_a_rank_that_lost_its_peer_is_not_to_blame() -> None:
    killed, lost = RankEnding(1, -9, 101.0), RankEnding(0, 1, 100.9, report=LOST)
    assert first_failure([lost, killed]) is killed
    assert first_failure([lost]) is lost


def test_the_summary_says_what_became_of_all() -> None:
    endings = [
        RankEnding(0, 1, 103.0, report=BOOM),
        RankEnding(1, 1, 103.0, report=BOOM),
        RankEnding(2, 1, 103.0, report=LOST),
        RankEnding(3, -15, 106.0, stopped=True),
        RankEnding(4, 0, 106.0),
    ]
    assert summary(endings, 100.0) == (
        "rank 0 exited with code 1: ValueError: boom; rank 1 failed with the same error; "
        "rank 2 failed after it; rank 3 did not end by itself and was stopped"
    )


def test_a_traceback_is_printed_once() -> None:
    assert (
        narrate(1, BOOM, [], caused=True) == "[rank 1] Traceback\n[rank 1] ValueError: boom\n[rank 1] more\n"
    )
    assert narrate(2, BOOM, [BOOM], caused=True) == ""
    assert narrate(0, LOST, [BOOM], caused=True) == "[rank 0] RankError: rank 1 is gone\n"
    assert narrate(0, LOST, [], caused=False).startswith("[rank 0] Traceback")
    assert RankReport.decode(BOOM.encode()) == BOOM


def test_words() -> None:
    assert rank_list([3]) == "rank 3"
    assert rank_list([7, 0, 2, 3, 4]) == "ranks 0, 2-4, 7"
    assert [duration(s) for s in (0.04, 9.97, 61, 7800)] == ["0.0 s", "10 s", "1 min 1 s", "2 h 10 min"]


def test_signals_get_stronger() -> None:
    ladder = after_failure(50.0)
    assert ladder.due(50.0 + GRACE - 0.1) == []
    assert ladder.due(50.0 + GRACE) == [signal.SIGCONT, STACKS]
    assert ladder.due(51.0 + GRACE) == [signal.SIGTERM]
    assert ladder.due(51.0 + GRACE) == []
    assert ladder.due(90.0) == [signal.SIGKILL]
    assert after_signal(None, 0.0, 30.0).due(1.0) == []
    assert after_signal(signal.SIGINT, 0.0, 30.0).due(0.0) == [signal.SIGINT]
    assert after_signal(None, 0.0, 2.0).due(2.0) == [signal.SIGTERM]


TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"} | {
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NODELIST": "gpu[003-004],gpu9",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2),1",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
}
MPI = {"OMPI_COMM_WORLD_" + name: value for name, value in (("RANK", "1"), ("SIZE", "2"))} | {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-1@1",
}


def test_other_launchers_are_understood() -> None:
    assert announcement_in({}) is None
    assert announcement_in(TORCHRUN) == Announcement("torchrun", 5, 8, 1, 4, "node0", 29500)
    by_hand = {name: value for name, value in TORCHRUN.items() if name != "TORCHELASTIC_RUN_ID"}
    assert announcement_in(by_hand) == Announcement("RANK and WORLD_SIZE", 5, 8, 1, 4, "node0", 29500)
    assert announcement_in(SLURM) == Announcement("Slurm", 4, 7, 1, 3, "gpu003", port_of("77.0"))
    assert announcement_in(MPI) == Announcement(
        "Open MPI", 1, 2, 1, 2, "127.0.0.1", port_of("prterun-host-1@1"), one_host=True
    )
    # mpirun inside a Slurm job, and a batch script that exports a part of torchrun's variables
    assert announcement_in(SLURM | MPI) == announcement_in(MPI)
    assert announcement_in(SLURM | {"WORLD_SIZE": "7"}) == announcement_in(SLURM)
    assert announcement_in(SLURM | {"MASTER_ADDR": "a", "MASTER_PORT": "9"}) == Announcement(
        "Slurm", 4, 7, 1, 3, "a", 9
    )


def test_restarts_are_counted() -> None:
    found = announcement_in(
        TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    )
    assert found == Announcement("torchrun", 5, 8, 1, 4, "node0", 29500, served=True, attempt=2)


def test_one_process_is_no_group() -> None:
    assert announcement_in({"WORLD_SIZE": "1", "RANK": "0"}) is None
    # inside a batch script, before srun: Slurm sets these for a single process
    assert (
        announcement_in({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1", "SLURM_LOCALID": "0"})
        is None
    )


def test_without_local_ranks_the_address_tells() -> None:
    bare = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    found = announcement_in(bare)
    assert found is not None
    assert (found.local_rank, found.local_world) == (0, 1)
    found = announcement_in(bare | {"MASTER_ADDR": "localhost"})
    assert found is not None
    assert (found.local_rank, found.local_world) == (5, 8)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"WORLD_SIZE": "4"},
            "WORLD_SIZE=4) but not RANK and MASTER_ADDR and MASTER_PORT. Start the script with",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "but not MASTER_PORT."),
        (TORCHRUN | {"RANK": "x"}, "the environment variable RANK is 'x', which is not a number"),
        (TORCHRUN | {"RANK": "8"}, "places this process at rank 8 of 8"),
        (TORCHRUN | {"MASTER_PORT": "99999"}, "MASTER_PORT is 99999"),
        (MPI | {"OMPI_COMM_WORLD_SIZE": "4"}, "but not MASTER_ADDR. Pass them on: mpirun -x"),
        (
            {n: v for n, v in SLURM.items() if n != "SLURM_PROCID"},
            "but not SLURM_PROCID. Start the script with srun",
        ),
        (SLURM | {"SLURM_NODEID": "3"}, "SLURM_NODEID is 3, but the tasks per node '3(x2),1' name 3 nodes"),
    ],
)
def test_a_part_of_an_announcement_is_an_error(environ: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        announcement_in(environ)


def test_slurm_lists() -> None:
    assert [first_host(n) for n in ("a", "a,b", "n[7,9-12]", "r[1-2]n[03-04],x")] == ["a", "a", "n7", "r1n03"]
    assert [tasks_on_node("4(x2),3", node) for node in range(3)] == [4, 4, 3]
    with pytest.raises(OptionError, match="which is not a list"):
        tasks_on_node("four", 0)


def test_nccl_only_where_no_gpu_is_shared() -> None:
    assert backend_for(["a/0", "a/1", "b/0"]) == "nccl"
    assert backend_for(["a/0", "a/0"]) == "gloo"
    assert backend_for(["a/0", "cpu"]) == "gloo"


def test_of_a_crash_the_headline_is_remembered() -> None:
    reading, writing = os.pipe()
    passed: list[bytes] = []
    relay = OutputRelay(reading, passed.append)
    dump = b"loss 3\nFatal Python error: Segmentation fault\n\n  File t.py\nExtension modules: a, b\n"
    os.write(writing, dump)
    os.close(writing)
    relay.join()
    assert relay.last_line == "Fatal Python error: Segmentation fault"
    assert b"".join(passed) == dump


def test_an_error_of_ours_is_shown_at_the_line_that_called() -> None:
    with pytest.raises(OptionError, match="stage=7 is not one of") as caught:
        zs.shard(torch.nn.Linear(1, 1), stage=7)
    frames = traceback.extract_tb(to_the_callers_line(caught.value.__traceback__))
    assert [frame.name for frame in frames] == ["test_an_error_of_ours_is_shown_at_the_line_that_called"]
    assert frames[-1].line == "zs.shard(torch.nn.Linear(1, 1), stage=7)"
