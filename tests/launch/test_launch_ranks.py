"""The launcher at work: ranks of small scripts that fail, hang, are killed, and are told to stop."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from zeroshard.launch.supervisor import GRACE

pytestmark = pytest.mark.ranks

Write = Callable[[str], Path]
Start = Callable[[str], subprocess.Popen[str]]
# Scripts run in other folders, where a relative path to the sources would mean nothing. Unbuffered, as in
# many containers: lines of several ranks must not mix there either.
ENVIRON = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def script(tmp_path: Path) -> Write:
    def write(code: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text("import os, sys, time\nrank = int(os.environ['RANK'])\n" + textwrap.dedent(code))
        return path

    return write


def command(job: str) -> list[str]:
    """A launcher that imports no torch beforehand, so that it starts at once."""
    code = (
        "import sys; from zeroshard.launch.job import LaunchJob; from zeroshard.launch.launcher import run\n"
    )
    return [sys.executable, "-c", f"{code}sys.exit(run(LaunchJob({job}, preload=(), store=False)))"]


def launch(job: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(job), capture_output=True, text=True, timeout=300, env=ENVIRON)


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a launcher that the test ends; one that it does not end is killed, and its ranks with it."""
    processes: list[subprocess.Popen[str]] = []

    def begin(job: str) -> subprocess.Popen[str]:
        processes.append(subprocess.Popen(command(job), stderr=subprocess.PIPE, text=True, env=ENVIRON))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def wait_until(check: Callable[[], bool], seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


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


def test_modules_run_too(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "job.py").write_text("import sys; print(__name__, __package__, sys.argv[1:])")
    job = "2, 'package.job', ('x',), module=True"
    done = subprocess.run(
        command(job), capture_output=True, text=True, timeout=300, cwd=tmp_path, env=ENVIRON
    )
    assert sorted(done.stdout.splitlines()) == ["[rank 1] __main__ package ['x']", "__main__ package ['x']"]
    assert done.returncode == 0


def test_the_first_failure_is_named_and_the_stuck_are_stopped(script: Write) -> None:
    path = script(
        """
        if rank == 1:
            raise ValueError("boom")
        if rank == 2:
            os.kill(os.getpid(), 19)  # SIGSTOP
        time.sleep(60)
        """
    )
    before = time.monotonic()
    done = launch(f"3, {str(path)!r}")
    assert time.monotonic() - before >= GRACE
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "runpy" not in done.stderr.partition("(most recent call first)")[0]
    # Of rank 0, whose lines go to the terminal itself, another's may stand in the middle.
    shown = rf'\[rank 2\]   File "{re.escape(str(path))}", line [78] in <module>$'
    assert re.search(shown, done.stderr, re.MULTILINE), done.stderr
    assert done.stderr.splitlines()[-1] == (
        "zeroshard: rank 1 exited with code 1: ValueError: boom; "
        "ranks 0, 2 did not end by themselves and were stopped"
    )


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


@pytest.mark.parametrize("end", ["raise ValueError('of a child')", "sys.exit('of a child')"])
def test_a_child_that_a_rank_forks_may_fail(script: Write, end: str) -> None:
    path = script(
        f"""
        child = os.fork()
        if child == 0:
            {end}
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    )
    done = launch(f"2, {str(path)!r}")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["1", "[rank 1] 1"]
    assert "zeroshard: " not in done.stderr


def test_an_error_of_all_ranks_is_shown_once(script: Write) -> None:
    done = launch(f"4, {str(script('raise KeyError(7)'))!r}")
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert re.search(
        r"rank \d exited with code 1: KeyError: 7; ranks .* failed with the same error$", done.stderr
    )


def test_a_hook_of_the_script_shows_its_own_traceback(script: Write) -> None:
    done = launch(f"2, {str(script('sys.excepthook = lambda *e: print(repr(e[1])); 1 / 0'))!r}")
    assert "Traceback" not in done.stderr
    assert "[rank 1] ZeroDivisionError('division by zero')\n" in done.stdout


def test_a_time_limit_shows_where_the_ranks_are(script: Write) -> None:
    path = script(
        """
        def stuck_here():
            time.sleep(3600)
        stuck_here() if rank == 1 else None
        """
    )
    for limit in (6, 40, 240):  # starting both is a part of it
        done = launch(f"2, {str(path)!r}, timeout={limit}")
        if "in stuck_here" in done.stderr:
            break
    assert done.returncode == 124
    assert "in stuck_here" in done.stderr
    last = f"zeroshard: --timeout {limit} is over and rank 1 had not ended (see the stacks above)"
    assert done.stderr.splitlines()[-1] == last


def test_output_can_go_to_files(script: Write, tmp_path: Path) -> None:
    path = script("print('out', rank); print('err', rank, file=sys.stderr)")
    done = launch(f"2, {str(path)!r}, log_dir=__import__('pathlib').Path({str(tmp_path)!r}) / 'logs'")
    assert (done.stdout, done.stderr) == ("out 0\n", "err 0\n")
    assert sorted((tmp_path / "logs" / "rank-1.log").read_text().splitlines()) == ["err 1", "out 1"]


def test_files_keep_what_failed_attempts_wrote(script: Write, tmp_path: Path) -> None:
    path = script(
        """
        print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"])
        sys.exit(rank if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 0)
        """
    )
    logs, mine = tmp_path / "logs", tmp_path / "logs" / "rank-1.log"
    for runs in (1, 2):  # a new run goes on in the file
        done = launch(f"2, {str(path)!r}, restarts=1, log_dir=__import__('pathlib').Path({str(logs)!r})")
        assert done.returncode == 0, done.stderr
        assert mine.read_text().splitlines() == ["attempt 0", "attempt 1"] * runs


def test_a_folder_for_files_that_cannot_be_made_is_refused_before_a_rank_starts(script: Write) -> None:
    path = script("print('started')")
    done = launch(f"2, {str(path)!r}, log_dir=__import__('pathlib').Path({str(path)!r}) / 'logs'")
    assert "OptionError: --log-dir " in done.stderr
    assert re.search(r"script\.py/logs cannot be made: Not a directory\. Name a folder", done.stderr)
    assert done.stdout == ""


START = "open(f'{sys.argv[0]}.{rank}.{os.getpid()}', 'w').close()"


def started(path: Path, count: int) -> list[int]:
    """Waits until this many processes of a script that begins with `START` run, and returns their ids."""
    wait_until(lambda: len(list(path.parent.glob(f"{path.name}.*"))) >= count)
    return [int(mark.suffix[1:]) for mark in path.parent.glob(f"{path.name}.*")]


@pytest.mark.parametrize(("number", "words"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGINT")])
def test_signals_reach_the_ranks(script: Write, start: Start, number: signal.Signals, words: str) -> None:
    path = script(
        f"""
import signal
signal.signal(signal.SIGTERM, lambda *_: sys.exit("saved"))
try:
    {START}
    time.sleep(60)
except KeyboardInterrupt:
    print("saved", file=sys.stderr)
"""
    )
    process = start(f"2, {str(path)!r}")
    pids = started(path, 2)
    process.send_signal(number)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 128 + number
    assert errors.count("saved") == 2
    assert f"stopped by {words} after" in errors.splitlines()[-1]
    assert not any(map(alive, pids))


def test_an_interrupt_of_one_rank_is_named_as_the_cause(script: Write) -> None:
    path = script(
        """
import signal
if rank == 1:
    os.kill(os.getpid(), signal.SIGINT)
time.sleep(60)
"""
    )
    done = launch(f"2, {str(path)!r}")
    assert done.returncode == 130
    said = r"rank 1 exited with code 130: KeyboardInterrupt: interrupted \(SIGINT\) at script\.py:\d+"
    assert re.search(said, done.stderr)
    assert "Traceback" not in done.stderr


def test_ctrl_c_arrives_once(script: Write) -> None:
    """The terminal tells the whole process group; said again, it would interrupt the ranks' clean-up."""
    path = script(
        f"""
import signal
interrupts, end = 0, time.monotonic() + 60
def interrupted(*_):
    global interrupts, end
    interrupts, end = interrupts + 1, time.monotonic() + 1
signal.signal(signal.SIGINT, interrupted)
{START}
while time.monotonic() < end:
    time.sleep(0.05)
print("tty", sys.stdout.isatty(), "interrupts", interrupts)
"""
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, command(f"2, {str(path)!r}"), ENVIRON)
    started(path, 2)
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


def test_nothing_outlives_a_killed_launcher(script: Write, start: Start) -> None:
    path = script(START + "; time.sleep(60)")
    process = start(f"2, {str(path)!r}")
    pids = started(path, 2)
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(alive, pids)))


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
from zeroshard.launch.join import join
"""


def cli(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-m", "zeroshard", *words]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=300, cwd=cwd, env=ENVIRON)


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


def test_a_rank_that_does_not_come_is_named(script: Write) -> None:
    path = script(
        JOIN
        + """
if rank == 1: sys.exit(0)
join("cpu")
"""
    )
    done = cli("run", "--ranks", "3", str(path))
    assert done.returncode == 1
    said = "RankError: rank 1 of 3 (zeroshard run) came to the end of the script without `shard`, where rank "
    assert said in done.stderr.splitlines()[-1]


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


@pytest.mark.slow
def test_torchrun_starts_the_same_script(script: Write) -> None:
    path = script(JOIN + "join('cpu'); dist.barrier(); os.write(1, b'joined %d\\n' % dist.get_world_size())")
    words = ["--standalone", "--nproc-per-node", "2", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        capture_output=True,
        text=True,
        timeout=300,
        env=ENVIRON | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("joined 2") == 2


@pytest.mark.ranks
def test_a_rank_that_is_asked_for_its_stack_while_python_ends_goes_on(tmp_path: Path) -> None:
    """The interpreter takes its handler away before the process ends, as is done here by hand."""
    script = tmp_path / "late.py"
    script.write_text(
        "import faulthandler, os, signal\n"
        "faulthandler.unregister(signal.SIGUSR2)\n"
        "os.kill(os.getpid(), signal.SIGUSR2)\n"
        "print('went on')\n"
    )
    command = [sys.executable, "-m", "zeroshard", "run", "--ranks", "1", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[-2:]) == (0, ["went", "on"]), done.stderr
