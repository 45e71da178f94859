"""What it costs: bytes by the closed forms, no growth, nothing left behind, and when a rank blocks."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from comm_ranks import make, threads

from zeroshard.comm import Transport
from zeroshard.comm.shm import ShmTransport
from zeroshard.errors import RankError, TierError

pytestmark = pytest.mark.threads


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def mapped() -> int:
    """Bytes of this process' memfd mappings."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:zeroshard" in line:
            start, end = line.split()[0].split("-")
            total += int(end, 16) - int(start, 16)
    return total


@pytest.mark.parametrize("kind", ["shm", "gloo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_by_the_closed_forms(kind: str, dtype: torch.dtype) -> None:
    shards, cuts = [10, 0, 30], [[(0, 4)], [], [(0, 5), (7, 6)]]

    def body(transport: Transport) -> None:
        rank, size, item = transport.rank, transport.size, dtype.itemsize
        wire = transport.allocate("wire", sum(shards), dtype)
        source = transport.allocate("rows", 20, dtype)
        transport.open()
        counters = transport.counters
        counters.reset()
        out = [[torch.empty(numel) for _, numel in segments] for segments in cuts]
        for _ in range(5):
            transport.fill(wire)
            transport.reduce("gradients", "wire", wire, shards, torch.empty(shards[rank]), 0.5).wait()
            transport.gather("parameters", "rows", source, cuts, out).wait()
            transport.fence()
        rows = [sum(numel for _, numel in segments) for segments in cuts]
        assert counters.sent["gradients"] == 5 * item * (sum(shards) - shards[rank])
        assert counters.received["gradients"] == 5 * item * shards[rank] * (size - 1)
        assert counters.sent["parameters"] == 5 * item * rows[rank] * (size - 1)
        assert counters.received["parameters"] == 5 * item * (sum(rows) - rows[rank])
        before = counters.snapshot()
        transport.broadcast("start", [torch.zeros(100)], 1)
        assert counters.sent.get("broadcast", 0) == (800 if rank == 1 else 0)
        assert counters.received.get("broadcast", 0) == (0 if rank == 1 else 400)
        assert "broadcast" not in before.sent
        assert all(seconds >= 0 for seconds in counters.waited.values())

    threads(kind, 3, body)


def test_one_rank_sends_nothing() -> None:
    def body(transport: Transport) -> None:
        wire = transport.allocate("wire", 4, torch.float32)
        transport.reduce("gradients", "wire", wire, [4], wire.mine, 1.0).wait()
        transport.broadcast("start", [torch.zeros(3)])
        assert sum(transport.counters.sent.values()) + sum(transport.counters.received.values()) == 0

    threads("local", 1, body)


@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_no_growth_over_200_rounds(kind: str) -> None:
    shards, meet = [3000, 5000], threading.Barrier(2)
    seen: list[tuple[int, int, int]] = []

    def body(transport: Transport) -> None:
        wire = transport.allocate("wire", 8000, torch.bfloat16)
        source = transport.allocate("rows", 8000, torch.float32)
        out = [[torch.empty(10), torch.empty(20)] for _ in shards]
        cuts = [[(0, 10), (50, 20)]] * 2
        total = torch.empty(shards[transport.rank])
        for turn in range(200):
            transport.fill(wire)
            wire.mine.fill_(1.0)
            transport.reduce("gradients", "wire", wire, shards, total, 0.5).wait()
            transport.fence()
            source.mine.fill_(float(turn))
            transport.open()
            transport.gather("parameters", "rows", source, cuts, out).wait()
            transport.max([1.0])
            if turn in (10, 199):
                meet.wait(120)
                if transport.rank == 0:
                    gc.collect()
                    states = sum(len(transport_buffer.state) for transport_buffer in (wire, source))
                    seen.append((open_files(), mapped(), states))
                meet.wait(120)

    threads(kind, 2, body)
    early, late = seen
    assert late[1:] == early[1:]
    # Threads of torch open and close a few files of their own; one left behind by each round would be 189.
    assert late[0] < early[0] + 10


@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_what_is_broadcast_in_every_step_keeps_no_more_than_it_is(kind: str) -> None:
    """Statistics of a model go through a buffer that stays: of their size, and larger where others are."""

    def body(transport: Transport) -> None:
        for numel in (100, 4, 1_000_000, 1 << 20, (1 << 20) + 1, 3_000_000, 7):
            tensors = [torch.full((numel,), float(transport.rank)), torch.full((3,), float(transport.rank))]
            transport.broadcast(f"{numel}", tensors, 1)
            assert all(bool((tensor == 1).all()) for tensor in tensors)
            held = transport._bounces.get(1) if kind == "shm" else transport._bounce  # type: ignore[attr-defined]
            if numel == 4:
                assert (held.peers[1] if kind == "shm" else held).numel() == 4 * (100 + 3)
            assert (held is None) == (numel == 3_000_000)

    threads(kind, 2, body)


def test_closed_transports_leave_nothing() -> None:
    def body(transport: Transport) -> None:
        transport_buffer = transport.allocate("rows", 1 << 20, torch.float32)
        transport.broadcast("start", [torch.zeros(10)])
        transport.free(transport_buffer)
        assert transport_buffer.mine.numel() == 0

    threads("shm", 2, body)
    gc.collect()
    files, memory = open_files(), mapped()
    for _ in range(5):
        threads("shm", 2, body)
    gc.collect()
    assert (open_files(), mapped()) == (files, memory)


def test_many_buffers_are_told_in_few_messages() -> None:
    def body(transport: Transport) -> int:
        assert isinstance(transport, ShmTransport)
        letters = transport.control._letters
        with transport.allocating():
            wires = [transport.allocate(f"wire {n}", 2, torch.float32) for n in range(100)]
            lone = transport.allocate("of nothing", 0, torch.float32)
        told = transport.control._letters - letters
        for n, wire in enumerate(wires):
            wire.mine.fill_(float(n + transport.rank))
        transport.barrier("all are filled")
        for n, wire in enumerate(wires):
            assert [peer.tolist() for peer in wire.peers] == [[n, n], [n + 1, n + 1]]
        assert len(lone.peers) == 2
        transport.barrier("all are read")
        return told

    few = threads("shm", 2, body)
    assert max(few) <= 6  # two a batch; longer ones take another


def test_a_region_that_one_rank_allocates_alone_is_an_error() -> None:
    def body(transport: Transport) -> None:
        with transport.allocating():
            for number in range(2 - transport.rank):
                transport.allocate(f"wire {number}", 2, torch.float32)

    for error in threads("shm", 2, body, fails=True):
        assert isinstance(error, RankError)
        assert "ranks allocate different buffers: rank 0 wire 1 (torch.float32), rank 1 none ()" in str(error)


def test_freed_memory_goes_back_and_lanes_are_used_again() -> None:
    def body(transport: Transport) -> None:
        shards, lanes = [8, 8], set()
        for turn in range(6):
            wire = transport.allocate(f"wire {turn}", 16, torch.float32)
            assert not wire.mine.any()
            lanes.add(wire.lane)
            wire.mine.fill_(float(turn))
            out = torch.empty(8)
            transport.reduce("gradients", f"wire {turn}", wire, shards, out, 1.0).wait()
            assert out.tolist() == [2.0 * turn] * 8
            transport.fill(wire)
            transport.free(wire)
        assert len(lanes) == 1

    threads("shm", 2, body)
    threads("gloo", 2, body)


def test_two_transports_in_one_process() -> None:
    store = dist.HashStore()

    def body(transport: Transport) -> None:
        other = make("shm", dist.PrefixStore("other", store), transport.rank, 2)
        for turn in range(10):
            assert transport.max([turn + transport.rank]) == [turn + 1]
            assert other.sum([1.0]) == [2.0]
        other.close()

    threads("shm", 2, body)


def test_fill_waits_until_the_peer_has_taken_its_shard() -> None:
    taken = threading.Event()

    def body(transport: Transport) -> None:
        wire = transport.allocate("wire", 2, torch.float32)
        out = torch.empty(1)
        wire.mine.fill_(1.0)
        work = transport.reduce("gradients", "wire", wire, [1, 1], out, 1.0)
        if transport.rank == 0:
            transport.fill(wire)
            assert taken.is_set()
            wire.mine.fill_(9.0)
        else:
            time.sleep(0.3)
            taken.set()
            work.wait()
        work.wait()
        assert out.item() == 2.0

    threads("shm", 2, body)


@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_ranks_that_fill_before_they_wait_do_not_block_one_another(kind: str) -> None:
    def body(transport: Transport) -> None:
        wires = [transport.allocate(f"wire {n}", 2, torch.float32) for n in range(2)]
        outs = [torch.empty(1) for _ in wires]
        for n, wire in enumerate(wires):
            wire.mine.fill_(n + 1.0)
            transport.reduce("gradients", f"wire {n}", wire, [1, 1], outs[n], 1.0)
        for wire in wires if transport.rank == 0 else wires[::-1]:
            transport.fill(wire)
        assert [out.item() for out in outs] == [2.0, 4.0]

    threads(kind, 2, body)


def test_a_gather_is_one_sided_and_waits_for_the_epoch() -> None:
    opened, gathered = threading.Event(), threading.Event()

    def body(transport: Transport) -> None:
        source = transport.allocate("rows", 4, torch.float32)
        if transport.rank == 1:
            source.mine.fill_(5.0)
            assert opened.wait(120)
            transport.open()
            assert gathered.wait(120)
            return
        transport.open()
        out: list[list[torch.Tensor]] = [[], [torch.empty(4)]]
        work = transport.gather("parameters", "rows", source, [[], [(0, 4)]], out)
        assert not work.poll()
        opened.set()
        work.wait()
        assert out[1][0].tolist() == [5.0] * 4
        gathered.set()

    threads("shm", 2, body)


@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_ranks_must_allocate_alike(kind: str) -> None:
    def body(transport: Transport) -> None:
        transport.allocate("rows", 4, torch.float32 if transport.rank == 0 else torch.float64)

    found = threads(kind, 2, body, fails=True)
    assert all(isinstance(error, RankError) for error in found)
    assert len({str(error) for error in found}) == 1
    said = {
        "shm": "ranks allocate different buffers: rank 0 rows (torch.float32), rank 1 rows (torch.float64). ",
        "gloo": "[['torch.float32', 1], ['torch.float64', 1]] (dtype and lane in rank order). Every rank",
    }
    assert said[kind] in str(found[0])


def test_more_transport_buffers_than_there_are_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(transport: Transport) -> None:
        for number in range(3):
            transport.allocate(f"rows {number}", 4, torch.float32)

    monkeypatch.setattr("zeroshard.comm.shm.MAX_LANES", 2)
    for error in threads("shm", 2, body, fails=True):
        assert str(error) == "more than 2 buffers on one transport: make units or buckets larger"


def test_lack_of_memory_is_an_error_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    def body(transport: Transport) -> None:
        transport.allocate("rows", 4 if transport.rank == 0 else 1 << 20, torch.float32)

    real = os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, at, n: (refuse if n > 1 << 20 else real)(fd, at, n))
    gc.collect()
    files = open_files()
    found = threads("shm", 2, body, fails=True)
    assert all(isinstance(error, TierError) for error in found)
    assert {str(error) for error in found} == {str(found[0])}
    assert "rank 1 has no 4194304 bytes of shared memory for 'rows'" in str(found[0])
    assert str(found[0]).endswith(
        ". Free memory, enlarge the container's limit (or that of files: ulimit -f), or use more ranks."
    )
    assert open_files() == files
