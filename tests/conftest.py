"""Order, skips, sharing out, thinning, and the rule that no process outlives the test that started it."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest

# Before torch is imported, which reads it once. Sums are split among threads, so what is compared bit for
# bit, a rank and a plain process, needs the same number; and ranks beside one another have no use for more.
os.environ["OMP_NUM_THREADS"] = "1"
# A script's shell has what it starts beside itself ignore Ctrl-C, and so would ranks that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Fast first: what fails early fails cheaply.
LAYERS = ("pure", "threads", "ranks", "cuda")
# Servants of Python and of torch.compile. They end with the process that started them, and live until then.
SERVANTS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "_inductor/compile_worker")
OURS = pytest.StashKey[dict[str, bool]]()
_SET_CHILD_SUBREAPER = 36
_PATIENCE = 60.0
SHARE = 3
# Files that take the longest (the end of `./do test` shows which). Sessions begin with these, so that none is
# left with one when the others are done.
LONG = (
    *(
        "test_exact_loops",
        "test_rows_read",
        "test_restart",
        "test_plan_limits",
        "test_bytes",
        "test_full_state",
    ),
    *("test_hf", "test_hf_features", "test_keras", "test_accelerate", "test_parallel", "test_benchmarks"),
    *("test_launcher_signals", "test_failures", "test_plan_paths", "test_exact_stages", "test_meta_memory"),
)
TOOK = Counter[str]()  # seconds, by file
SPENT = Counter[str]()  # of them, those of CPUs, with all processes that its tests start
NOW: list[tuple[str, float]] = []  # the file that runs, and what had been spent before it
_BESIDE = set[int]()  # sessions that were forked from this one
_TICKS = os.sysconf("SC_CLK_TCK")
_DIE_WITH_PARENT = 1


def layer_of(item: pytest.Item) -> int:
    """The slowest layer that a test's markers name."""
    return max(number for number, name in enumerate(LAYERS) if number == 0 or item.get_closest_marker(name))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    thin(config, items)
    items.sort(key=layer_of)
    cuda = [item for item in items if item.get_closest_marker("cuda")]
    if cuda and not gpu_present():
        for item in cuda:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    threads = [item for item in items if item.get_closest_marker("threads")]
    if threads and not threads_possible():
        for item in threads:
            item.add_marker(pytest.mark.skip(reason="this torch has no ranks as threads"))


def thin(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave one in `n` cases of what is marked `wide(n)`, and the first: which ones, their names decide. Of
    more than three cases that start processes one in `SHARE` is left; nothing that is marked `slow` runs. All
    run with --wide, and where cases are named."""
    if config.getoption("wide") or any("::" in word for word in config.args):
        return
    kept, out, seen = list[pytest.Item](), list[pytest.Item](), set[str]()
    cases = Counter(item.nodeid.partition("[")[0] for item in items)
    for item in items:
        mark, function = item.get_closest_marker("wide"), item.nodeid.partition("[")[0]
        many = item.get_closest_marker("ranks") is not None and cases[function] > 3
        share = max(mark.args[0] if mark is not None else 1, SHARE if many else 1)
        runs = function not in seen or crc32(item.name.encode()) % share == 0
        runs = runs and item.get_closest_marker("slow") is None
        (kept if runs else out).append(item)
        seen.add(function)
    config.hook.pytest_deselected(items=out)
    items[:] = kept


def pytest_configure(config: pytest.Config) -> None:
    """Before `recipes` is imported, here and by ranks: how many steps a training run has."""
    if config.getoption("wide"):
        os.environ["RECIPE_STEPS"] = "20"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--wide", action="store_true", help="run all cases of tests that have many like them")
    told = "share tests out among sessions that name this folder: a file's go to the first that comes to it"
    parser.addoption("--share", metavar="FOLDER", help=told)
    told = "with --share: so many sessions, forked when all tests are collected; the others write logs there"
    parser.addoption("--sessions", type=int, default=1, metavar="N", help=told)


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[None]:
    """Fork the other sessions: what they import and collect costs seconds, and is there already. The first of
    them begins with the tests that start no processes, all others with those that do and wait for them."""
    for number in range(1, session.config.getoption("sessions")):
        sys.stdout.flush()
        if (pid := os.fork()) == 0:
            _BESIDE.clear()
            become_session(session, number)
            break
        _BESIDE.add(pid)
    else:
        number = 0
    if any(item.path.parent.name == "integrations" for item in session.items):
        start_forked_ranks(session)
    if session.config.getoption("sessions") > 1:
        ranks, first = LAYERS.index("ranks"), number == 1
        session.items.sort(
            key=lambda item: (
                layer_of(item) if first else layer_of(item) < ranks,
                item.path.stem not in LONG,
            )
        )
    result = yield
    count_spent("")  # before the other sessions have ended, whose seconds are then this process's too
    while _BESIDE:
        pid = _BESIDE.pop()
        session.testsfailed += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0
    return result


def become_session(session: pytest.Session, number: int) -> None:
    """What a fork does to be a session of its own: it writes to a log, and ends with its parent."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGTERM, 0, 0, 0)
    capture = session.config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    log = os.open(Path(session.config.getoption("share"), f"session-{number}.log"), os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    capture.start_global_capturing()
    capture.suspend_global_capture()


def start_forked_ranks(session: pytest.Session) -> None:
    """The server that ranks of front ends are forked from, while nothing has run yet. What they write is
    captured like all else."""
    import forked_ranks

    if forked_ranks.POSSIBLE:
        capture = session.config.pluginmanager.getplugin("capturemanager")
        capture.resume_global_capture()
        forked_ranks.SERVER.start()
        capture.suspend_global_capture()


def taken(item: pytest.Item) -> bool:
    """Whether another session runs the tests of this one's file and layer; if not, this one does from now."""
    folder = item.config.getoption("share")
    if folder is None:
        return False
    ours = item.config.stash.setdefault(OURS, {})
    key = f"{item.path.stem}-{LAYERS[layer_of(item)]}"
    if key not in ours:
        try:
            Path(folder, key).touch(exist_ok=False)
            ours[key] = True
        except FileExistsError:
            ours[key] = False
    return not ours[key]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if not taken(item):
        count_spent(item.nodeid.partition("::")[0])
        return None
    # The test before left standing what this one would have needed, such as the fixtures of their folder.
    item.session._setupstate.teardown_exact(nextitem)
    return True  # there is nothing left to do for it


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    TOOK[report.nodeid.partition("::")[0]] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """How long each file took, and how much of CPUs, for whoever started the sessions to add up."""
    if folder := session.config.getoption("share"):
        count_spent("")
        lines = [f"{seconds:.2f} {SPENT[name]:.2f} {name}\n" for name, seconds in TOOK.items()]
        Path(folder, f"{os.getpid()}.seconds").write_text("".join(lines))


def count_spent(file: str) -> None:
    """Where another file begins: what the one before has taken of CPUs."""
    if NOW and NOW[-1][0] == file:
        return
    total = cpu_seconds()
    if NOW:
        name, before = NOW.pop()
        SPENT[name] += max(total - before, 0.0)
    NOW.append((file, total))


def cpu_seconds() -> float:
    """What this process has taken of CPUs, with all that it has started and that those have."""
    times, started = dict[int, int](), dict[int, list[int]]()
    for directory in Path("/proc").iterdir() if os.path.exists("/proc/self/stat") else ():
        if directory.name.isdigit() and int(directory.name) not in _BESIDE:
            try:
                words = (directory / "stat").read_text(errors="replace").rpartition(")")[2].split()
            except OSError:
                continue
            times[int(directory.name)] = sum(map(int, words[11:15]))  # with those that it has waited for
            started.setdefault(int(words[1]), []).append(int(directory.name))
    total, waiting = 0, [os.getpid()]
    while waiting:
        pid = waiting.pop()
        total += times.get(pid, 0)
        waiting += started.get(pid, ())
    return total / _TICKS


def pytest_collection_finish() -> None:
    """What is there before the first test stays: the collections that tests ask for look at the rest only."""
    gc.collect()
    gc.freeze()


def gpu_present() -> bool:
    import torch

    return torch.cuda.is_available()


def threads_possible() -> bool:
    from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

    return hasattr(ThreadLocalWorld, "comms")


def children() -> dict[int, str]:
    """The living children of this process and their command lines; `no_orphans` makes orphans ours."""
    found = {}
    for pid in _pids_of_children():
        try:
            words = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        state, parent = words[0], int(words[1])
        if parent == os.getpid() and state not in "ZX" and not any(word in command for word in SERVANTS):
            found[pid] = command.strip() or "(a forked process)"
    return found


def _pids_of_children() -> list[int]:
    """Those of every thread, where the kernel lists them: reading what all processes of a machine are takes
    ten milliseconds, twice a test. Read twice, since a list leaves one out where another ends meanwhile."""
    threads = list(Path("/proc/self/task").iterdir()) if os.path.exists("/proc/self/stat") else []
    try:
        lists = [(thread / "children").read_text().split() for thread in threads * 2]
        return sorted({int(pid) for pids in lists for pid in pids})
    except OSError:  # a thread that has ended meanwhile, or a kernel without such lists
        return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def left_over(before: set[int]) -> list[str]:
    """Children that were not there before and do not end within seconds."""
    deadline = time.monotonic() + _PATIENCE
    while new := {pid: command for pid, command in children().items() if pid not in before}:
        if time.monotonic() > deadline:
            return [f"{pid}: {command}" for pid, command in new.items()]
        time.sleep(0.02)
    return []


@pytest.fixture(autouse=True, scope="session")
def no_orphans() -> Iterator[None]:
    """Makes orphaned descendants children of this process, where they are seen; in the end none is left."""
    if os.path.exists("/proc/self/stat"):
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = set(children())
    yield
    left = left_over(before)
    assert not left, f"processes left over after all tests: {left}"


@pytest.fixture(autouse=True)
def no_leftovers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails the test that leaves a process behind. Fixtures of a wider scope start theirs earlier."""
    if not any(request.node.get_closest_marker(name) for name in ("ranks", "cuda")):
        yield
        return
    before = set(children())
    yield
    left = left_over(before)
    assert not left, f"this test left processes behind: {left}"


@pytest.fixture
def disk_folder(tmp_path: Path) -> Path:
    """A folder that is not on a RAM disk, as the disk tier wants it."""
    from zeroshard.tiers.scratch_file import RAM_DISKS, filesystem_of

    if filesystem_of(str(tmp_path)) in RAM_DISKS:
        pytest.skip("needs a temporary folder on a disk: pytest --basetemp=…")
    return tmp_path
