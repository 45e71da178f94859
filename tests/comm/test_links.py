"""The shaped links of the benchmarks carry what they should, and nothing of them survives their maker."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "links"
sys.path.append(str(BENCHMARKS))

from namespaces import Link, address, network, why_not  # noqa: E402

pytestmark = [pytest.mark.ranks, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

MAKER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from namespaces import Link, network
with network(2, Link(100, 1)) as net:
    print(*[holder.pid for holder in net._holders], flush=True)
    time.sleep(60)
"""


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_nothing_outlives_a_killed_benchmark() -> None:
    maker = subprocess.Popen([sys.executable, "-c", MAKER, str(BENCHMARKS)], stdout=subprocess.PIPE)
    assert maker.stdout is not None
    pids = [int(word) for word in maker.stdout.readline().split()]
    assert len(pids) == 4, "two ranks, the hub, the relay"
    assert all(running(pid) for pid in pids)
    maker.send_signal(signal.SIGKILL)
    maker.wait()
    maker.stdout.close()
    deadline = time.monotonic() + 120
    while any(running(pid) for pid in pids):
        assert time.monotonic() < deadline, "a namespace is still held"
        time.sleep(0.01)


def test_a_link_has_the_latency_and_at_most_the_rate_asked_for() -> None:
    with network(2, Link(50, 5)) as net:
        command = [sys.executable, str(BENCHMARKS / "probe.py"), str(1 << 20)]
        first = subprocess.Popen(net.command(0, command))
        try:
            told = subprocess.run(
                net.command(1, [*command, address(0)]),
                capture_output=True,
                text=True,
                timeout=300,
                check=True,
            ).stdout
        finally:
            first.kill()
            first.wait()
    found = json.loads(told)
    assert found["round_trip_ms"] >= 10.0
    assert found["mbit"] < 60.0
