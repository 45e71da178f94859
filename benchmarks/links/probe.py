"""What a link gives by plain TCP: `probe.py BYTES` answers, `probe.py BYTES ADDRESS` asks, prints JSON."""

from __future__ import annotations

import json
import socket
import statistics
import sys
import time

PORT = 29400
PINGS = 20


def answer(amount: int) -> None:
    """Echo single bytes, then take `amount` bytes and say so."""
    with socket.create_server(("", PORT)) as server:
        peer, _ = server.accept()
        with peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(PINGS):
                peer.sendall(peer.recv(1))
            got = 0
            while got < amount:
                got += len(peer.recv(1 << 20))
            peer.sendall(b"!")


def ask(amount: int, address: str) -> dict[str, float]:
    """The median round trip of a byte, and the rate of one stream."""
    deadline = time.monotonic() + 20.0
    while True:
        try:
            peer = socket.create_connection((address, PORT), timeout=30.0)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    with peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(PINGS):
            began = time.perf_counter()
            peer.sendall(b"?")
            peer.recv(1)
            trips.append(time.perf_counter() - began)
        began = time.perf_counter()
        peer.sendall(bytes(amount))
        peer.recv(1)
        took = time.perf_counter() - began
    return {"round_trip_ms": 1e3 * statistics.median(trips), "mbit": amount * 8 / took / 1e6}


if __name__ == "__main__":
    if len(sys.argv) == 2:
        answer(int(sys.argv[1]))
    else:
        print(json.dumps(ask(int(sys.argv[1]), sys.argv[2])))
