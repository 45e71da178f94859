"""Nothing hangs: a rank that raises, is killed or goes its own way ends the run on all ranks and is named.

All runs are made before the first test, several at once, since they mostly wait. A few are started as a user
would; the others by a launcher that is forked with torch imported, which spares most of their time.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from zeroshard.cli import main
from zeroshard.launch import supervisor
from zeroshard.testing.processes import server

pytestmark = pytest.mark.ranks
SCRIPT = Path(__file__).parents[1] / "support" / "failing.py"
AT_ONCE = 4


@dataclass(frozen=True)
class Way:
    """What rank 1 does, and where."""

    scenario: str
    transport: str = "shm"
    ranks: int = 2
    stage: int = 3

    def __str__(self) -> str:
        return f"{self.scenario}, {self.transport}, {self.ranks} ranks, stage {self.stage}"


@dataclass(frozen=True)
class Ended:
    code: int
    text: str
    left: list[int]  # processes that are still there

    @property
    def last_line(self) -> str:
        return self.text.strip().splitlines()[-1]


# What rank 1 does → how it is told.
RAISED = {
    Way("raise in forward"): "ValueError: the data were bad",
    Way("raise in forward", "gloo", 4): "ValueError: the data were bad",
    Way("raise in backward"): "ValueError: the gradient was bad",
    Way("raise in backward", "shm", 4): "ValueError: the gradient was bad",
    Way("raise in backward", "gloo"): "ValueError: the gradient was bad",
    Way("raise between steps", stage=1): "ValueError: the disk was full",
}
KILLED = [
    Way("killed in backward"),
    Way("killed in backward", "shm", 4, 2),
    Way("killed in backward", "gloo"),
]
EXITED = [Way("exit between steps"), Way("exit between steps", "gloo")]
EARLY = [Way("ends early"), Way("ends early", "gloo")]
OWN_WAY = [
    Way("skips a backward"),
    Way("skips a backward", "gloo"),
    Way("skips a backward", "gloo", stage=0),  # where nothing but gradients travels
    Way("skips a step", stage=2),
    Way("gathered alone"),
    Way("gathered alone", "gloo"),
]
# All of them are inside torch: what rank 0 waits for, and rank 1.
CROSSED = {
    Way("another collective"): ("all_reduce in group 0", "all_gather in group 0"),
    Way("another collective", "gloo", 4): ("all_reduce in group 0", "all_gather in group 0"),
    Way("another group"): ("all_reduce in group 0", "all_reduce in group 1"),
}
STUCK = [
    Way(scenario, transport, ranks, stage)
    for scenario in ("stopped", "asleep")
    for transport, ranks, stage in (("shm", 3, 3), ("gloo", 3, 3), ("nodes", 4, 2))
]
BEFORE, DISAGREE, SLOW = Way("raise before shard"), Way("another stage"), Way("slow")
REFUSED = Way("refused")
ALONE = (BEFORE, DISAGREE, SLOW, REFUSED)  # each with a test of its own
ALL = [*STUCK, *OWN_WAY, *CROSSED, SLOW, *RAISED, *KILLED, *EXITED, *EARLY, BEFORE, DISAGREE, REFUSED]


AS_A_USER = {Way("raise in forward"), Way("killed in backward"), Way("skips a backward", "gloo")}


def launch(way: Way, folder: Path) -> Ended:
    words = ["run", "--ranks", str(way.ranks), "--threads", "1", "--timeout", "240"]
    words += ["--stuck-after", "9"] if way in STUCK else []
    words += [str(SCRIPT), way.scenario, way.transport, str(way.stage)]
    output = folder / f"{way}.txt"
    start = by_command if way in AS_A_USER else by_fork
    code = start(words, output)
    text = output.read_text()
    pids = [int(pid) for pid in re.findall(r"pid (\d+)$", text, re.MULTILINE)]
    assert len(pids) == way.ranks, text
    left = [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    return Ended(code, text, left)


def by_command(words: list[str], output: Path) -> int:
    with output.open("w") as file:
        command = [sys.executable, "-m", "zeroshard", *words]
        return subprocess.run(command, stdout=file, stderr=file, timeout=300, check=False).returncode


def by_fork(words: list[str], output: Path) -> int:
    process = server().Process(target=forked, args=(words, str(output)))
    process.start()
    process.join(300)
    assert process.exitcode is not None, output.read_text()
    return process.exitcode


def forked(words: list[str], output: str) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(file, stream)
    if "--stuck-after" in words:
        # Its own guard ends who is stuck, however long that takes on a busy machine.
        supervisor.GRACE = 60.0
    sys.exit(main(words))


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[Way, Ended]:
    """How every run ended that a test here asks for."""
    folder = tmp_path_factory.mktemp("runs")
    here = [item for item in request.session.items if item.path == request.path]
    asked = {item.callspec.params["way"] for item in here if hasattr(item, "callspec")}
    ways = [way for way in ALL if way in asked or way in ALONE]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(ways, pool.map(lambda way: launch(way, folder), ways), strict=True))


@pytest.fixture(scope="module", autouse=True)
def in_dev_shm() -> tuple[set[str], ...]:
    return (set(os.listdir("/dev/shm")),)


@pytest.mark.parametrize(("way", "cause"), RAISED.items(), ids=str)
def test_a_rank_that_raises_ends_the_run(ends: dict[Way, Ended], way: Way, cause: str) -> None:
    end = ends[way]
    assert end.code == 1, end.text
    assert end.last_line.startswith(f"zeroshard: rank 1 exited with code 1: {cause}"), end.text
    assert re.search(rf"\[rank [023]\] RankError: rank 1 failed: {cause}", end.text), end.text
    assert f'[rank 1]   File "{SCRIPT}"' in end.text  # its own traceback


@pytest.mark.parametrize("way", KILLED, ids=str)
def test_a_rank_that_is_killed_ends_the_run(ends: dict[Way, Ended], way: Way) -> None:
    end = ends[way]
    assert end.code == 128 + 9, end.text
    assert re.search(r"RankError: rank 1 \(pid \d+.*\) .*while rank \d waited for", end.text), end.text
    assert end.last_line.startswith("zeroshard: rank 1 was killed by SIGKILL"), end.text


@pytest.mark.parametrize("way", EXITED, ids=str)
def test_a_rank_that_exits_ends_the_run(ends: dict[Way, Ended], way: Way) -> None:
    end = ends[way]
    assert end.code == 3, end.text
    assert "zeroshard: rank 1 exited with code 3" in end.last_line, end.text


@pytest.mark.parametrize("way", EARLY, ids=str)
def test_a_rank_that_ends_early_ends_the_run(ends: dict[Way, Ended], way: Way) -> None:
    """Its script returned, say because its loader had fewer batches; the others are in a collective."""
    end = ends[way]
    assert end.code == 1, end.text
    assert re.search(r"RankError: rank 1 .*(while|when) rank 0 waited for", end.text), end.text


@pytest.mark.parametrize("way", OWN_WAY, ids=str)
def test_a_rank_that_goes_its_own_way_ends_the_run(ends: dict[Way, Ended], way: Way) -> None:
    end = ends[way]
    assert end.code == 1, end.text
    said = r"RankError: ranks wait for different things and none can go on: rank 0 waits for .*; rank 1 "
    found = re.search(said + r"waits for (.*)\.", end.text)
    assert found, end.text
    assert way.scenario != "gathered alone" or found[1].startswith("new buffers, 'collect' first"), end.text


@pytest.mark.parametrize(("way", "names"), CROSSED.items(), ids=str)
def test_ranks_in_different_collectives_of_torch_end_the_run(
    ends: dict[Way, Ended], way: Way, names: tuple[str, str]
) -> None:
    ended = ends[way]
    assert ended.code != 0
    one, other = (rf"torch\.distributed\.{name} \(called at failing\.py:\d+\)" for name in names)
    assert re.search(rf"rank 0 waits for {one}; rank 1 waits for {other}", ended.text), ended.text
    assert "Every rank must run the same program" in ended.text


def test_a_rank_that_fails_before_shard_ends_the_run(ends: dict[Way, Ended]) -> None:
    end = ends[BEFORE]
    assert end.code == 1, end.text
    assert "rank 1 exited with code 1: ValueError: no such file" in end.last_line, end.text


def test_ranks_that_disagree_end_the_run_with_one_text(ends: dict[Way, Ended]) -> None:
    end = ends[DISAGREE]
    assert end.code == 1, end.text
    assert "RankError: ranks disagree about the options: stage is 3 on rank 0 and 1 on rank 1." in end.text
    assert "failed with the same error" in end.last_line, end.text


def test_what_one_rank_is_refused_ends_the_run_with_one_text(ends: dict[Way, Ended]) -> None:
    end = ends[REFUSED]
    assert end.code == 1, end.text
    said = "RankError: shard() is refused on all 2 ranks because of rank 1 (check code and files that "
    said += "depend on the rank): OptionError: stage=7 is not one of 0, 1, 2, 3"
    assert end.text.count(said) == 1, end.text  # in a traceback; the last line has its beginning
    assert "because of rank 1" in end.last_line, end.text
    assert "failed with the same error" in end.last_line, end.text


@pytest.mark.parametrize("way", STUCK, ids=str)
def test_a_rank_that_is_stuck_is_named_and_shows_where_it_is(ends: dict[Way, Ended], way: Way) -> None:
    ended = ends[way]
    assert (ended.code, ended.left) == (70, []), ended.text
    stopped = r", stopped by SIGSTOP or Ctrl-Z" if way.scenario == "stopped" else ""
    who = rf"rank 1 \(pid \d+ on \S+{stopped}\)"
    assert re.search(rf"^zeroshard: rank 0 has waited \d+ s for .*: {who} has not come$", ended.text, re.M)
    said = ended.text.count(" has not come")  # in each group; one may hear of the other's failure first
    assert 1 <= said <= (2 if way.transport == "nodes" else 1)
    assert re.search(rf"RankError: rank \d waited \d+ s for .*, and {who} did not come in that", ended.text)
    assert "rank 0 (" not in ended.text
    assert "[rank 1] zeroshard: rank 1 did not come where others waited. It is here" in ended.text
    assert re.search(r'^\[rank 1\]   File ".*failing.py", line \d+, in misbehave$', ended.text, re.M)
    assert "zeroshard: rank 1 exited with code 70" in ended.last_line


def test_a_slow_rank_is_waited_for(ends: dict[Way, Ended]) -> None:
    assert ends[SLOW].code == 0, ends[SLOW].text
    assert sorted(re.findall(r"done (\d)", ends[SLOW].text)) == ["0", "1"]


def test_nothing_is_left_behind(ends: dict[Way, Ended], in_dev_shm: tuple[set[str], ...]) -> None:
    assert {str(way): end.left for way, end in ends.items() if end.left} == {}
    end = time.monotonic() + 120  # tests beside these may try whether it is a disk
    while (left := set(os.listdir("/dev/shm")) - in_dev_shm[0]) and time.monotonic() < end:
        time.sleep(0.1)
    assert left == set()
