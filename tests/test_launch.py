"""The launcher: what it says, sets and kills, and what it understands of other launchers."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from zeroshard.errors import OptionError
from zeroshard.launch.announce import Announcement, announced, first_host, port_of, tasks_on_node
from zeroshard.launch.environment import backend_for
from zeroshard.launch.job import Job, rank_environment, shared_environment
from zeroshard.launch.outcome import (
    Ending,
    Report,
    describe,
    duration,
    exit_code,
    first_failure,
    narrate,
    rank_list,
    summary,
)
from zeroshard.launch.watch import GRACE, after_failure, after_signal

BOOM = Report("ValueError", "boom\nmore", "Traceback\nValueError: boom\nmore\n", at=101.0)
LOST = Report("RankError", "rank 1 is gone", "Traceback\nRankError: rank 1 is gone\n", at=100.5)


# ---------------------------------------------------------------------------------------------------- pure


def test_a_rank_gets_what_torchrun_would_set() -> None:
    environment = rank_environment(Job(4, "train.py"), 3, "127.0.0.1", 4321)
    assert environment["RANK"] == environment["LOCAL_RANK"] == "3"
    assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "4"
    assert announced(environment) == Announcement("torchrun", 3, 4, 3, 4, "127.0.0.1", 4321, served=True)


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
    assert shared_environment(Job(2, "t.py", threads=threads), environ, cores) == expected


@pytest.mark.parametrize("wrong", [{"ranks": 0}, {"ranks": 1, "threads": 0}, {"ranks": 1, "timeout": 0.0}])
def test_a_job_that_makes_no_sense_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(OptionError, match=r"--(ranks|threads|timeout) must be"):
        Job(target="t.py", **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ending", "text", "code"),
    [
        (
            Ending(1, -9, 112.0),
            "rank 1 was killed by SIGKILL after 12 s (the kernel does this when memory",
            137,
        ),
        (Ending(1, -11, 100.4, last_line="oops"), "rank 1 was killed by SIGSEGV after 0.4 s: oops", 139),
        (Ending(1, 3, 101.0, last_line="ValueError: boom"), "rank 1 exited with code 3: ValueError: boom", 3),
        (
            Ending(1, 1, 101.0, report=BOOM, last_line="noise"),
            "rank 1 exited with code 1: ValueError: boom",
            1,
        ),
        (Ending(0, 3, 185.0), "rank 0 exited with code 3 after 1 min 25 s", 3),
        (
            Ending(2, -9, 109.0, report=BOOM, stopped=True),
            "rank 2 raised ValueError: boom after 1.0 s and did not",
            1,
        ),
    ],
)
def test_an_ending_is_described(ending: Ending, text: str, code: int) -> None:
    assert describe(ending, started=100.0).startswith(text)
    assert exit_code(ending) == code


def test_the_first_to_fail_is_blamed_and_not_the_first_to_end() -> None:
    slow = Ending(1, 1, 105.0, report=BOOM)
    assert first_failure([Ending(0, 7, 102.0), slow]) is slow
    assert first_failure([Ending(0, 0, 1.0), Ending(1, -15, 2.0, stopped=True)]) is None


def test_a_rank_that_lost_its_peer_is_not_to_blame() -> None:
    killed, lost = Ending(1, -9, 101.0), Ending(0, 1, 100.9, report=LOST)
    assert first_failure([lost, killed]) is killed
    assert first_failure([lost]) is lost


def test_the_summary_says_what_became_of_all() -> None:
    endings = [
        Ending(0, 1, 103.0, report=BOOM),
        Ending(1, 1, 103.0, report=BOOM),
        Ending(2, 1, 103.0, report=LOST),
        Ending(3, -15, 106.0, stopped=True),
        Ending(4, 0, 106.0),
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
    assert Report.decode(BOOM.encode()) == BOOM


def test_words() -> None:
    assert rank_list([3]) == "rank 3"
    assert rank_list([7, 0, 2, 3, 4]) == "ranks 0, 2-4, 7"
    assert [duration(s) for s in (0.04, 9.97, 61, 7800)] == ["0.0 s", "10 s", "1 min 1 s", "2 h 10 min"]


def test_signals_get_stronger() -> None:
    ladder = after_failure(50.0)
    assert ladder.due(50.0 + GRACE - 0.1) == []
    assert ladder.due(50.0 + GRACE) == [signal.SIGTERM]
    assert ladder.due(50.0 + GRACE) == []
    assert ladder.due(90.0) == [signal.SIGKILL]
    assert after_signal(signal.SIGINT, 0.0, forward=False).due(1.0) == []
    assert after_signal(signal.SIGINT, 0.0, forward=True).due(0.0) == [signal.SIGINT]


TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"} | {
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
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
    assert announced({}) is None
    assert announced(TORCHRUN) == Announcement("torchrun", 5, 8, 1, 4, "node0", 29500)
    assert announced(SLURM) == Announcement("Slurm", 4, 7, 1, 3, "gpu003", port_of("77.0"))
    assert announced(MPI) == Announcement("Open MPI", 1, 2, 1, 2, "127.0.0.1", port_of("prterun-host-1@1"))
    # mpirun inside a Slurm job, and a batch script that exports a part of torchrun's variables
    assert announced(SLURM | MPI) == announced(MPI)
    assert announced(SLURM | {"WORLD_SIZE": "7"}) == announced(SLURM)
    assert announced(SLURM | {"MASTER_ADDR": "a", "MASTER_PORT": "9"}) == Announcement(
        "Slurm", 4, 7, 1, 3, "a", 9
    )


def test_restarts_are_counted() -> None:
    found = announced(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert found == Announcement("torchrun", 5, 8, 1, 4, "node0", 29500, served=True, attempt=2)


def test_one_process_is_no_group() -> None:
    assert announced({"WORLD_SIZE": "1", "RANK": "0"}) is None
    # inside a batch script, before srun: Slurm sets these for a single process
    assert (
        announced({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1", "SLURM_LOCALID": "0"})
        is None
    )


def test_without_local_ranks_the_address_tells() -> None:
    bare = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    found = announced(bare)
    assert found is not None
    assert (found.local_rank, found.local_world) == (0, 1)
    found = announced(bare | {"MASTER_ADDR": "localhost"})
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
        announced(environ)


def test_slurm_lists() -> None:
    assert [first_host(n) for n in ("a", "a,b", "n[7,9-12]", "r[1-2]n[03-04],x")] == ["a", "a", "n7", "r1n03"]
    assert [tasks_on_node("4(x2),3", node) for node in range(3)] == [4, 4, 3]
    with pytest.raises(OptionError, match="which is not a list"):
        tasks_on_node("four", 0)


def test_nccl_only_where_no_gpu_is_shared() -> None:
    assert backend_for(["a/0", "a/1", "b/0"]) == "nccl"
    assert backend_for(["a/0", "a/0"]) == "gloo"
    assert backend_for(["a/0", "cpu"]) == "gloo"


# ----------------------------------------------------------------------------------------------- processes

Write = Callable[[str], Path]
# Scripts run in other folders, where a relative path to the sources would mean nothing.
ENVIRON = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1] / "src")}


@pytest.fixture
def script(tmp_path: Path) -> Write:
    def write(code: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text("import os, sys, time\nrank = int(os.environ['RANK'])\n" + textwrap.dedent(code))
        return path

    return write


def command(job: str) -> list[str]:
    """A launcher that imports no torch beforehand, so that it starts at once."""
    code = "import sys; from zeroshard.launch.job import Job; from zeroshard.launch.local import run\n"
    return [sys.executable, "-c", f"{code}sys.exit(run(Job({job}, preload=(), store=False)))"]


def launch(job: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(job), capture_output=True, text=True, timeout=60, env=ENVIRON)


def wait_until(check: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.ranks
def test_ranks_run_and_their_lines_are_told_apart(script: Write) -> None:
    path = script(
        """
        import atexit, local_module
        atexit.register(print, "bye", rank)
        print("hello from", __name__, sys.argv[1:], local_module.x)
        print("to stderr", file=sys.stderr)
        sys.stdout.write("no newline") if rank == 2 else None
        """
    )
    path.with_name("local_module.py").write_text("x = 5\n")
    done = launch(f"3, {str(path)!r}, ('a', '--b')")
    assert done.returncode == 0
    hello = "hello from __main__ ['a', '--b'] 5"
    assert {hello, f"[rank 1] {hello}", f"[rank 2] {hello}", "bye 0", "[rank 1] bye 1"} <= set(
        done.stdout.split("\n")
    )
    assert "[rank 2] no newlinebye 2\n" in done.stdout
    assert sorted(done.stderr.splitlines()) == ["[rank 1] to stderr", "[rank 2] to stderr", "to stderr"]


@pytest.mark.ranks
def test_modules_run_too(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "job.py").write_text("import sys; print(__name__, __package__, sys.argv[1:])")
    job = "2, 'package.job', ('x',), module=True"
    done = subprocess.run(command(job), capture_output=True, text=True, timeout=60, cwd=tmp_path, env=ENVIRON)
    assert sorted(done.stdout.splitlines()) == ["[rank 1] __main__ package ['x']", "__main__ package ['x']"]
    assert done.returncode == 0


@pytest.mark.ranks
def test_the_first_failure_is_named_and_the_stuck_are_stopped(script: Write) -> None:
    path = script(
        """
        if rank == 1:
            raise ValueError("boom")
        time.sleep(60)
        """
    )
    before = time.monotonic()
    done = launch(f"3, {str(path)!r}")
    assert time.monotonic() - before >= GRACE
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "runpy" not in done.stderr
    assert done.stderr.splitlines()[-1] == (
        "zeroshard: rank 1 exited with code 1: ValueError: boom; "
        "ranks 0, 2 did not end by themselves and were stopped"
    )


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        ("os.kill(os.getpid(), 9)", 137, "rank 1 was killed by SIGKILL after "),
        ("print('last words', file=sys.stderr); os._exit(3)", 3, "rank 1 exited with code 3: last words"),
        ("sys.exit(5)", 5, "rank 1 exited with code 5 after "),
        ("sys.exit('no data')", 1, "rank 1 exited with code 1: SystemExit: no data"),
        ("exec('1 +')", 1, "rank 1 exited with code 1: SyntaxError: invalid syntax"),
    ],
)
def test_every_way_to_fail_is_reported(script: Write, code: str, status: int, message: str) -> None:
    done = launch(f"2, {str(script('if rank == 1: ' + code))!r}")
    assert done.returncode == status
    assert done.stderr.splitlines()[-1].startswith(f"zeroshard: {message}")


@pytest.mark.ranks
def test_an_error_of_all_ranks_is_shown_once(script: Write) -> None:
    done = launch(f"4, {str(script('raise KeyError(7)'))!r}")
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert re.search(
        r"rank \d exited with code 1: KeyError: 7; ranks .* failed with the same error$", done.stderr
    )


@pytest.mark.ranks
def test_a_hook_of_the_script_shows_its_own_traceback(script: Write) -> None:
    done = launch(f"2, {str(script('sys.excepthook = lambda *e: print(repr(e[1])); 1 / 0'))!r}")
    assert "Traceback" not in done.stderr
    assert "[rank 1] ZeroDivisionError('division by zero')\n" in done.stdout


@pytest.mark.ranks
def test_a_time_limit_shows_where_the_ranks_are(script: Write) -> None:
    path = script(
        """
        def stuck_here():
            time.sleep(60)
        stuck_here() if rank == 1 else None
        """
    )
    done = launch(f"2, {str(path)!r}, timeout=3")
    assert done.returncode == 124
    assert "in stuck_here" in done.stderr
    last = "zeroshard: --timeout 3 is over and rank 1 had not ended (see the stacks above)"
    assert done.stderr.splitlines()[-1] == last


@pytest.mark.ranks
def test_output_can_go_to_files(script: Write, tmp_path: Path) -> None:
    path = script("print('out', rank); print('err', rank, file=sys.stderr)")
    done = launch(f"2, {str(path)!r}, log_dir=__import__('pathlib').Path({str(tmp_path)!r}) / 'logs'")
    assert (done.stdout, done.stderr) == ("out 0\n", "err 0\n")
    assert sorted((tmp_path / "logs" / "rank-1.log").read_text().splitlines()) == ["err 1", "out 1"]


START = "open(f'{sys.argv[0]}.{rank}.{os.getpid()}', 'w').close()\n"


def started(path: Path, count: int) -> list[int]:
    """Waits until this many processes of a script that begins with `START` run, and returns their ids."""
    wait_until(lambda: len(list(path.parent.glob(f"{path.name}.*"))) >= count)
    return [int(mark.suffix[1:]) for mark in path.parent.glob(f"{path.name}.*")]


@pytest.mark.ranks
@pytest.mark.parametrize(("number", "words"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGINT")])
def test_signals_reach_the_ranks(script: Write, number: signal.Signals, words: str) -> None:
    path = script(
        START
        + """
import signal
signal.signal(signal.SIGTERM, lambda *_: sys.exit("saved"))
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("saved", file=sys.stderr)
"""
    )
    process = subprocess.Popen(command(f"2, {str(path)!r}"), stderr=subprocess.PIPE, text=True, env=ENVIRON)
    pids = started(path, 2)
    time.sleep(0.3)
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert errors.count("saved") == 2
    assert f"stopped by {words} after" in errors.splitlines()[-1]
    assert not any(map(alive, pids))


@pytest.mark.ranks
def test_ctrl_c_arrives_once(script: Write) -> None:
    """The terminal tells the whole process group; said again, it would interrupt the ranks' clean-up."""
    path = script(
        START
        + """
interrupts = 0
end = time.monotonic() + 60
while time.monotonic() < end:
    try:
        time.sleep(0.05)
    except KeyboardInterrupt:
        interrupts += 1
        end = time.monotonic() + 1
print("tty", sys.stdout.isatty(), "interrupts", interrupts)
"""
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, command(f"2, {str(path)!r}"), ENVIRON)
    started(path, 2)
    time.sleep(0.3)
    os.write(terminal, b"\x03")
    text = b""
    while True:
        try:
            text += os.read(terminal, 4096)
        except OSError:
            break
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    os.close(terminal)
    assert b"tty True interrupts 1" in text
    assert b"[rank 1] tty False interrupts 1" in text


@pytest.mark.ranks
def test_nothing_outlives_a_killed_launcher(script: Write) -> None:
    path = script(START + "time.sleep(60)")
    process = subprocess.Popen(command(f"2, {str(path)!r}"), env=ENVIRON)
    pids = started(path, 2)
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(alive, pids)), 5.0)


@pytest.mark.ranks
def test_nothing_outlives_a_failed_rank(script: Write) -> None:
    """A process that a rank started becomes the launcher's when the rank dies, and is ended with the run."""
    path = script(
        """
        import subprocess
        code = "import os, sys, time; open(f'{sys.argv[1]}.x.{os.getpid()}', 'w').close(); time.sleep(60)"
        subprocess.Popen([sys.executable, "-c", code, sys.argv[0]])
        while not [n for n in os.listdir(os.path.dirname(sys.argv[0])) if ".x." in n]: time.sleep(0.02)
        os._exit(9)
        """
    )
    done = launch(f"1, {str(path)!r}")
    assert done.returncode == 9
    assert not any(map(alive, started(path, 1)))


JOIN = """
import torch, torch.distributed as dist
from zeroshard.launch.environment import join
"""


def cli(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-m", "zeroshard", *words]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=120, cwd=cwd, env=ENVIRON)


@pytest.mark.ranks
def test_ranks_meet_in_a_group(script: Write) -> None:
    path = script(
        JOIN
        + """
assert join("cpu") is True
assert join("cpu") is False
x = torch.full((1,), float(rank + 1))
dist.all_reduce(x)
print(dist.get_backend(), x.item(), torch.get_num_threads(), os.environ["OMP_NUM_THREADS"])
"""
    )
    done = cli("run", "--ranks", "3", "--threads", "2", str(path))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[rank 1] gloo 6.0 2 2",
        "[rank 2] gloo 6.0 2 2",
        "gloo 6.0 2 2",
    ]


@pytest.mark.ranks
def test_a_script_may_initialise_the_group_itself(script: Write) -> None:
    path = script(
        JOIN
        + """
import random
dist.init_process_group("gloo")
assert join() is False
draws = [None] * 2
dist.all_gather_object(draws, random.random())
print(len(set(draws)))
dist.destroy_process_group()
"""
    )
    done = cli("run", "--ranks", "2", str(path))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "2\n[rank 1] 2\n" or done.stdout == "[rank 1] 2\n2\n"


@pytest.mark.ranks
def test_a_rank_that_does_not_come_is_named(script: Write) -> None:
    path = script(
        JOIN
        + """
from datetime import timedelta
if rank == 1: sys.exit(0)
join("cpu", patience=timedelta(seconds=1))
"""
    )
    done = cli("run", "--ranks", "3", str(path))
    assert done.returncode == 1
    assert "RankError: rank 1 of 3 (torchrun) did not join within 1 s" in done.stderr.splitlines()[-1]


@pytest.mark.ranks
def test_the_cause_is_named_where_a_peer_is_lost(script: Write) -> None:
    path = script(
        JOIN
        + """
join("cpu")
if rank == 1: os.kill(os.getpid(), 9)
dist.barrier()
"""
    )
    done = cli("run", "--ranks", "2", str(path))
    assert done.returncode == 137
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("zeroshard: rank 1 was killed by SIGKILL after ")
    assert done.stderr.splitlines()[-1].endswith("; rank 0 failed after it")


@pytest.mark.ranks
@pytest.mark.slow
def test_torchrun_starts_the_same_script(script: Write) -> None:
    path = script(JOIN + "join('cpu'); dist.barrier(); print('joined', dist.get_world_size())")
    words = ["--standalone", "--nproc-per-node", "2", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        capture_output=True,
        text=True,
        timeout=120,
        env=ENVIRON | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("joined 2") == 2
