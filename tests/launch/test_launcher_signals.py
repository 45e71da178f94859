"""The launcher where it is stopped, hung up on, started twice, or given odd streams, scripts and settings."""

# ruff: noqa: F811 (fixtures that another file defines)

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_launch_ranks import (
    ENVIRON,
    JOIN,
    START,
    Start,
    Write,
    alive,
    cli,
    command,
    launch,
    script,  # noqa: F401  (a fixture)
    start,  # noqa: F401  (a fixture)
    started,
)

from zeroshard.launch.job import LaunchJob, shared_environment
from zeroshard.launch.linux import take
from zeroshard.launch.outcome import RankEnding, RankReport, describe, exit_code, first_failure

pytestmark = pytest.mark.ranks
APART = subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode == 0


def test_a_launcher_that_was_stopped_goes_on(script: Write, start: Start) -> None:
    end = "while not os.path.exists(f'{sys.argv[0]}.end'): time.sleep(0.02)"
    path = script(f"{START}\n{end}")
    process = start(f"2, {str(path)!r}")
    started(path, 2)
    for _ in range(12):
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.15)  # longer than a tick: the wait is over when it goes on
        process.send_signal(signal.SIGCONT)
        time.sleep(0.03)
    Path(f"{path}.end").touch()
    _, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (0, "")


def test_a_signal_is_taken_with_who_sent_it() -> None:
    code = (
        "import os, signal; from zeroshard.launch.linux import take\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
        "print(take({signal.SIGTERM}, 0.05)); os.kill(os.getpid(), signal.SIGTERM)\n"
        "caught = take({signal.SIGTERM, signal.SIGINT}, 60.0); print(caught.number.name, caught.from_kernel)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRON)
    assert done.stdout.split() == ["None", "SIGTERM", "False"], done.stderr
    assert take({signal.SIGUSR1}, 0.0) is None


def test_a_terminal_that_is_closed_ends_the_ranks_at_once(script: Write) -> None:
    """The kernel tells the first process of the session, the launcher, and no rank."""
    path = script(START + "\ntime.sleep(3600)")
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
        os.execve(sys.executable, command(f"2, {str(path)!r}, grace=3600.0"), ENVIRON)
    pids = started(path, 2)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGHUP
    assert not any(map(alive, pids))


def test_what_nohup_ignores_is_ignored(script: Write) -> None:
    path = script(f"{START}\nwhile not os.path.exists(f'{{sys.argv[0]}}.end'): time.sleep(0.02)")
    words = ["sh", "-c", 'trap "" HUP INT; exec "$@"', "sh", *command(f"2, {str(path)!r}")]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=ENVIRON)
    started(path, 2)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    Path(f"{path}.end").touch()
    _, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (0, "")


def test_ranks_are_waited_for_where_the_parent_ignored_their_ends(script: Write) -> None:
    words = ["sh", "-c", 'trap "" CHLD; exec "$@"', "sh", *command(f"2, {str(script('sys.exit(rank)'))!r}")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=ENVIRON)
    assert done.returncode == 1
    assert "zeroshard: rank 1 exited with code 1 after" in done.stderr


@pytest.mark.skipif(not APART, reason="needs network namespaces")
def test_a_launcher_whose_store_does_not_answer_can_be_stopped(script: Write) -> None:
    """Without a loopback interface the store waits for itself."""
    path = script(START + "\ntime.sleep(200)")
    words = ["unshare", "--net", sys.executable, "-m", "zeroshard", "run", "--ranks", "2", str(path)]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=ENVIRON)
    pids = started(path, 2)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "stopped by SIGTERM after" in errors
    assert not any(map(alive, pids))


@pytest.mark.skipif(not APART, reason="needs network namespaces")
def test_a_store_that_does_not_answer_ends_the_run_with_advice(script: Write) -> None:
    path = script("time.sleep(200)")
    code = (
        "import sys; from zeroshard.launch import launcher; from zeroshard.launch.job import LaunchJob\n"
        "launcher._STORE = 2.0\n"
        f"sys.exit(launcher.run(LaunchJob(2, {str(path)!r}, preload=('torch.distributed',))))"
    )
    words = ["unshare", "--net", sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=ENVIRON)
    assert done.returncode == 1
    assert re.search(r"the store at 127\.0\.0\.1:\d+, over which ranks meet, does not answer", done.stderr)
    assert "ip link set lo up" in done.stderr


@pytest.mark.parametrize(
    ("said", "threads"),
    [
        ("4,2", "4,2"),
        ("", "8"),
        ("0", "8"),
        ("all", "8"),
        (" 3 ", " 3 "),
        ("9" * 11, "8"),
        ("2147483648", "8"),
    ],
)
def test_threads_are_said_as_openmp_takes_them(said: str, threads: str) -> None:
    environ = {"OMP_NUM_THREADS": said}
    assert (environ | shared_environment(LaunchJob(2, "t.py"), environ, 16))["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(("said", "threads"), [("2,3", 2), ("", 1), ("0", 1), ("99999999999", 1)])
def test_ranks_have_the_threads_that_were_said(script: Write, said: str, threads: int) -> None:
    path = script("import torch\nprint(torch.get_num_threads())")
    job = f"{os.cpu_count()}, {str(path)!r}"
    code = command(job)[2].replace("preload=()", "preload=('torch',)")
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env=ENVIRON | {"OMP_NUM_THREADS": said},
    )
    assert done.returncode == 0, done.stderr
    assert {line.split()[-1] for line in done.stdout.splitlines()} == {str(threads)}


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_streams_may_be_closed(script: Write, closed: str) -> None:
    path = script(
        "print('out', rank); print('err', rank, file=sys.stderr); open(f'{sys.argv[0]}.{rank}', 'w')"
    )
    words = ["sh", "-c", f'"$@" {closed}', "sh", *command(f"2, {str(path)!r}")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=ENVIRON)
    assert done.returncode == 0, done.stderr
    assert all(Path(f"{path}.{rank}").exists() for rank in range(2))
    kept = closed in ("2>&-", "<&-")
    assert sorted(done.stdout.splitlines()) == (["[rank 1] out 1", "out 0"] if kept else [])
    kept = closed in (">&-", "<&-")
    assert sorted(done.stderr.splitlines()) == (["[rank 1] err 1", "err 0"] if kept else [])


COMMAND_LINE = [sys.executable, "-m", "zeroshard", "run", "--ranks", "2"]  # imports torch beforehand
LIGHT = command("2, sys.argv[1], tuple(sys.argv[2:])")


@pytest.mark.parametrize(
    ("way", "launcher"),
    [
        ('"$@" /dev/stdin a <"$SCRIPT"', COMMAND_LINE),
        ('cat "$SCRIPT" | "$@" /dev/stdin a', LIGHT),
        ('"$@" <(cat "$SCRIPT") a', LIGHT),
    ],
)
def test_a_script_may_come_from_a_pipe(script: Write, way: str, launcher: list[str]) -> None:
    path = script(
        """
        import inspect
        def greet():
            print(__name__, rank, sys.argv[1:], len(inspect.getsource(greet).splitlines()))
        greet()
        if rank == 1: raise ValueError('from a pipe')
        """
    )
    words = ["bash", "-c", way, "bash", *launcher]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=300, env=ENVIRON | {"SCRIPT": str(path)}
    )
    assert done.returncode == 1
    assert {"__main__ 0 ['a'] 2", "[rank 1] __main__ 1 ['a'] 2"} == set(done.stdout.splitlines())
    assert "rank 1 exited with code 1: ValueError: from a pipe" in done.stderr


def test_a_rank_that_goes_away_with_success_is_blamed(script: Write) -> None:
    path = script(
        JOIN
        + """
import zeroshard as zs
model = torch.nn.Linear(4, 4)
run = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=1)
if rank == 1: os._exit(0)
model(torch.ones(2, 4)).sum().backward()
"""
    )
    done = cli("run", "--ranks", "2", str(path))
    assert done.returncode == 1
    assert re.search(
        r"rank 1 ended in the middle of its script after .*, with exit code 0 \(os\._exit\?\); "
        r"rank 0 failed after it$",
        done.stderr.splitlines()[-1],
    )


def test_who_left_is_blamed_only_where_peers_miss_it() -> None:
    gone, ended = RankEnding(1, 0, 101.0, finished=False), RankEnding(2, 0, 102.0)
    lost = RankEnding(0, 1, 101.5, report=RankReport("RankError", "rank 1 died", "", 101.5))
    own = RankEnding(0, 1, 101.5, report=RankReport("ValueError", "no", "", 101.5))
    assert first_failure([lost, gone, ended]) is gone
    assert first_failure([own, gone, ended]) is own
    assert first_failure([gone, ended]) is None
    assert exit_code(gone) == 1
    assert describe(gone, 100.0).startswith("rank 1 ended in the middle of its script after 1.0 s")


@pytest.mark.parametrize(
    ("environ", "who"),
    [
        (
            {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},
            "Slurm",
        ),
        ({f"OMPI_COMM_WORLD_{n}": v for n, v in (("RANK", "1"), ("SIZE", "2"))}, "Open MPI"),
    ],
)
def test_a_launcher_that_another_starts_twice_is_refused(
    script: Write, environ: dict[str, str], who: str
) -> None:
    more = {
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NODELIST": "a",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": "job",
    }
    path = script("print('started')")
    words = [*COMMAND_LINE, str(path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=ENVIRON | more | environ)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"on one host, and {who} has started it 2 times (this is number 1)" in done.stderr
    assert "would train a job of its own" in done.stderr


def test_a_launcher_inside_a_rank_is_meant(script: Write) -> None:
    inner = script("print('inner', rank)")
    outer = inner.with_name("outer.py")
    words = [*COMMAND_LINE, str(inner)], command(f"2, {str(inner)!r}")
    outer.write_text(f"import os, subprocess\nsubprocess.run({words!r}[int(os.environ['RANK'])], check=True)")
    done = launch(f"2, {str(outer)!r}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("inner 1") == 2


@pytest.mark.parametrize("blocks", [1, 1500])
def test_ranks_do_without_shared_memory_where_files_may_not_be_large(script: Write, blocks: int) -> None:
    """`ulimit -f` counts anonymous files in memory, too."""
    path = script(
        JOIN
        + """
import zeroshard as zs
model = torch.nn.Linear(512, 512)
run = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=1)
print(run.transport)
run.close()
"""
    )
    words = ["sh", "-c", f'ulimit -f {blocks}; exec "$@"', "sh", sys.executable, "-m", "zeroshard"]
    done = subprocess.run(
        [*words, "run", "--ranks", "2", str(path)], capture_output=True, text=True, timeout=300, env=ENVIRON
    )
    if blocks == 1:
        assert done.returncode == 0, done.stderr
        assert "gloo" in done.stdout
    else:
        assert "bytes of shared memory for" in done.stderr
        assert "ulimit -f" in done.stderr
