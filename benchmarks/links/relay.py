"""Holds every packet between ranks for a fixed time: the latency of a link, where the kernel has no netem.

Started by `namespaces.py` as `python relay.py MILLISECONDS MBIT PID…`: makes one tun device per rank, moves
it into the namespace of that process as eth0, says "ready", and forwards until it is killed. Packets to one
rank leave no faster than its link, in the order they came.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import subprocess
import sys
from collections import deque
from time import monotonic

_TUNSETIFF = 0x400454CA
_TUN, _NO_HEADER = 0x0001, 0x1000
MTU = 65000


def open_tun(name: str, pid: str) -> int:
    """A tun device that lies in the namespace of another process, and stays with this one's descriptor."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TUN | _NO_HEADER))
    subprocess.run(["ip", "link", "set", name, "mtu", str(MTU)], check=True)
    subprocess.run(["ip", "link", "set", name, "netns", pid, "name", "eth0"], check=True)
    return tun


class Port:
    """The way to one rank: packets and when each may leave."""

    def __init__(self, tun: int, delay: float, rate: float) -> None:
        self.tun, self._delay, self._rate = tun, delay, rate
        self._queue: deque[tuple[float, bytes]] = deque()
        self._free = 0.0

    def take(self, packet: bytes, now: float) -> None:
        self._free = max(self._free, now) + len(packet) / self._rate
        self._queue.append((self._free + self._delay, packet))

    def send(self, now: float) -> float:
        """Let go what is due; when the next one is."""
        while self._queue and self._queue[0][0] <= now:
            with contextlib.suppress(OSError):  # a full receiver, a device not yet up: lost, as on a wire
                os.write(self.tun, self._queue.popleft()[1])
        return self._queue[0][0] if self._queue else float("inf")


def main(milliseconds: str, mbit: str, *pids: str) -> None:
    """Forward for ever."""
    delay, rate = float(milliseconds) / 1e3, float(mbit) * 1e6 / 8
    ports = [Port(open_tun(f"zs{n}", pid), delay, rate) for n, pid in enumerate(pids)]
    print("ready", flush=True)
    tuns = [port.tun for port in ports]
    while True:
        now = monotonic()
        due = min(port.send(now) for port in ports)
        wait = 1.0 if due == float("inf") else max(due - monotonic(), 0.0)
        for tun in select.select(tuns, [], [], wait)[0]:
            for _ in range(32):
                try:
                    packet = os.read(tun, MTU + 64)
                except OSError:  # nothing more for now
                    break
                target = packet[19] - 1 if packet[0] >> 4 == 4 else -1  # the last byte of an IPv4 address
                if 0 <= target < len(ports):
                    ports[target].take(packet, monotonic())


if __name__ == "__main__":
    main(*sys.argv[1:])
