"""Ranks on one host as if on several: a network namespace each, joined by links of a given rate and latency.

Namespaces are held by processes and by nothing else: each has a sleeper that ends with the benchmark, however
that ends (`PR_SET_PDEATHSIG`), and a namespace whose last process has ended takes its devices and shaping
with it. Nothing is set up outside of them. Needs root, `ip`, `tc` with tbf, and /dev/net/tun for latencies.

- Rate: a token bucket (tbf) at the sending end of every rank, and at the port towards it, so that several
  senders to one rank share its link.
- Latency: kernels without netem cannot delay packets, so links of 0.5 ms and more go through a relay in
  user space (`relay.py`), which holds every packet for the time asked for. Below that, ranks sit on a bridge
  and have the latency of the kernel's own switching, which the benchmark measures and reports.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SUBNET = "10.77.0"
RELAYED_MS = 0.5
_PDEATHSIG = 1


@dataclass(frozen=True)
class Link:
    """What every rank has: bits a second each way, and milliseconds one way between any two. An infinite
    rate is what the kernel gives: no queue that could drop a packet and have it counted twice."""

    mbit: float
    ms: float

    @property
    def relayed(self) -> bool:
        return self.ms >= RELAYED_MS

    @property
    def name(self) -> str:
        if self.mbit == math.inf:
            return f"as fast as it goes, {self.ms:g} ms"
        rate = f"{self.mbit / 1000:g} Gbit/s" if self.mbit >= 1000 else f"{self.mbit:g} Mbit/s"
        return f"{rate}, {self.ms:g} ms"

    def shape(self) -> list[str]:
        """Arguments of tc: a bucket of a millisecond, at least two of the largest packets."""
        burst = max(int(self.mbit * 1e6 / 8 * 0.001), 2 * 65536)
        limit = max(int(self.mbit * 1e6 / 8 * 0.1), 4 * burst)
        return ["tbf", "rate", f"{self.mbit:g}mbit", "burst", str(burst), "limit", str(limit)]


def address(rank: int) -> str:
    return f"{SUBNET}.{rank + 1}"


def why_not() -> str | None:
    """Why this machine cannot make such links, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc", "nsenter", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found: install iproute2 and util-linux"
    probe = ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", *Link(100, 0).shape()]
    if subprocess.run(probe, capture_output=True).returncode != 0:
        return "the kernel has no tbf queueing, or forbids namespaces"
    return None if Path("/dev/net/tun").exists() else "there is no /dev/net/tun for latencies"


def end_with_parent() -> None:
    """For `preexec_fn`: SIGKILL when the parent ends, whatever ended it."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class Network:
    """The namespaces of `world` ranks. Made by `network`."""

    def __init__(self, world: int, link: Link, holders: Sequence[subprocess.Popen[bytes]]) -> None:
        self.world, self.link, self._holders = world, link, holders

    def command(self, rank: int, words: Sequence[str]) -> list[str]:
        """`words` inside the namespace of a rank."""
        return _inside(self._holders[rank].pid, words)


@contextlib.contextmanager
def network(world: int, link: Link) -> Iterator[Network]:
    """Namespaces with shaped links between them, gone at the end of the block or of this process."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(world + 1):
            sleeper = ["unshare", "--net", "sleep", "infinity"]
            started.append(subprocess.Popen(sleeper, preexec_fn=end_with_parent))
        own = os.stat("/proc/self/ns/net").st_ino
        for holder in started:
            _until_apart(holder.pid, own)
        pids = [holder.pid for holder in started]
        (_relay if link.relayed else _bridge)(pids[:world], pids[world], link, started)
        for rank in range(world):
            _dress(pids[rank], rank, link)
        yield Network(world, link, started)
    finally:
        for process in reversed(started):
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _until_apart(pid: int, own: int) -> None:
    deadline = time.monotonic() + 5.0
    while os.stat(f"/proc/{pid}/ns/net").st_ino == own:
        if time.monotonic() > deadline:
            raise RuntimeError("a namespace did not come up within 5 s")
        time.sleep(0.005)


def _inside(pid: int, words: Sequence[str]) -> list[str]:
    return ["nsenter", f"--net=/proc/{pid}/ns/net", *words]


def _run(pid: int, *words: str) -> None:
    done = subprocess.run(_inside(pid, words), capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


def _bridge(ranks: list[int], hub: int, link: Link, _: list[subprocess.Popen[bytes]]) -> None:
    _run(hub, "ip", "link", "add", "switch", "type", "bridge")
    _run(hub, "ip", "link", "set", "switch", "up")
    for rank, pid in enumerate(ranks):
        port = f"port{rank}"
        _run(hub, "ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        _run(hub, "ip", "link", "set", port, "master", "switch")
        _run(hub, "ip", "link", "set", port, "up")
        _shape(hub, port, link)


def _relay(ranks: list[int], hub: int, link: Link, started: list[subprocess.Popen[bytes]]) -> None:
    command = [sys.executable, str(HERE / "relay.py"), str(link.ms), str(link.mbit), *map(str, ranks)]
    process = subprocess.Popen(_inside(hub, command), stdout=subprocess.PIPE, preexec_fn=end_with_parent)
    started.append(process)
    assert process.stdout is not None
    if process.stdout.readline().strip() != b"ready":
        raise RuntimeError("the relay did not start")


def _shape(pid: int, device: str, link: Link) -> None:
    if link.mbit < math.inf:
        _run(pid, "tc", "qdisc", "add", "dev", device, "root", *link.shape())


def _dress(pid: int, rank: int, link: Link) -> None:
    _run(pid, "ip", "link", "set", "lo", "up")
    _run(pid, "ip", "address", "add", f"{address(rank)}/24", "dev", "eth0")
    _run(pid, "ip", "link", "set", "eth0", "up")
    _shape(pid, "eth0", link)
    for buffer in ("rmem", "wmem"):  # room for the longest link: 10 Gbit/s x 20 ms
        _run(pid, "sysctl", "-q", f"net.ipv4.tcp_{buffer}=4096 1048576 67108864")
