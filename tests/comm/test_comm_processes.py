"""Transports between real processes: chosen by `connect`, and when one of the processes is gone."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comm_ranks import KINDS, Ranks
from nccl_on_cpu import nccl_over_gloo

from zeroshard.comm import Transport, connect, control, link, shm
from zeroshard.comm import control as memfd
from zeroshard.comm.diagnosis import waits
from zeroshard.errors import OptionError, RankError

pytestmark = pytest.mark.ranks

Report = Callable[[Any], None]
CPU = torch.device("cpu")


def sums(transport: Transport) -> list[float]:
    shards = [1001, 2003]
    wire = transport.allocate("wire", sum(shards), torch.float32)
    wire.mine.copy_(torch.randn(sum(shards), generator=torch.Generator().manual_seed(transport.rank)))
    out = torch.empty(shards[transport.rank])
    transport.reduce("gradients", "wire", wire, shards, out, 0.3).wait()
    return out.tolist()


def moves(transport: Transport) -> list[list[float]]:
    """Values of reductions and gathers with even, uneven and empty shards."""
    found = []
    for number, (shards, dtype) in enumerate(
        [([4, 4], torch.float32), ([3, 8], torch.float32), ([0, 5], torch.bfloat16), ([6, 2], torch.float64)]
    ):
        generator = torch.Generator().manual_seed(10 * number + transport.rank)
        wire = transport.allocate(f"wire {number}", sum(shards), dtype)
        mine = slice(sum(shards[: transport.rank]), sum(shards[: transport.rank + 1]))
        for out in (torch.empty(shards[transport.rank]), wire.mine[mine]):
            transport.fill(wire)
            wire.mine.copy_(torch.randn(sum(shards), generator=generator))
            transport.reduce("gradients", f"wire {number}", wire, shards, out, 0.3).wait()
            found.append(out.tolist())
    source = transport.allocate("rows", 10, torch.float32)
    source.mine.copy_(torch.arange(10.0) + 100 * transport.rank)
    transport.open()
    for number, cuts in enumerate([[[(0, 3)], [(4, 3)]], [[(1, 2), (5, 4)], [(0, 1)]], [[], [(2, 2)]]]):
        out = [[torch.zeros(1, numel).bfloat16() for _, numel in segments] for segments in cuts]
        transport.gather("parameters", f"rows {number}", source, cuts, out).wait()
        transport.fence()
        found += [tensor.flatten().tolist() for tensors in out for tensor in tensors]
    tensors = [torch.full((3, 2), float(transport.rank)).t(), torch.tensor(transport.rank)]
    transport.broadcast("start", tensors, 1)
    found += [tensor.flatten().tolist() for tensor in tensors]
    return [*found, transport.max([transport.rank, 3.0]), transport.sum([1.0])]


def without_proc(rank: int) -> list[str]:
    """What `connect` does when one rank cannot open the other's memory."""
    real = memfd.open_peer

    def refuse(pid: int, fd: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if pid != os.getpid():
            raise PermissionError(13, "Permission denied")
        return real(pid, fd, numel, dtype)

    memfd.open_peer = refuse if rank == 1 else real
    try:
        fallen_back = connect(CPU, "auto")
        name = fallen_back.name
        fallen_back.barrier("the end")
        fallen_back.close()
        try:
            connect(CPU, "shm")
        except OptionError as error:
            return [name, str(error)]
        return [name]
    finally:
        memfd.open_peer = real


def connected(rank: int, path: str, report: Report) -> None:
    warnings.simplefilter("error")
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    transports = {name: connect(CPU, name) for name in ("auto", "shm", "gloo")}
    found: dict[str, Any] = {
        name: (transport.name, sums(transport)) for name, transport in transports.items()
    }
    with nccl_over_gloo(dist.PrefixStore("nccl", dist.FileStore(path, 2))) as nccl:
        found["moves"] = [moves(transport) for transport in (nccl, transports["shm"], transports["gloo"])]
        nccl.barrier("the end")
        nccl.close()
    alone = dist.new_group([rank], use_local_synchronization=True)
    found["alone"] = connect(CPU, group=alone).name
    for name, asked in (("nccl", "nccl"), ("local", "local"), ("differ", ("shm", "gloo")[rank])):
        try:
            connect(CPU, asked)
        except OptionError as error:
            found[name] = str(error)
    found["hidden"] = without_proc(rank)
    for transport in transports.values():
        transport.barrier("the end")
        transport.close()
    report(found)
    dist.destroy_process_group()


def test_connect_chooses_and_transports_agree() -> None:
    ranks = Ranks(2, connected)
    found = ranks.reports(240)
    assert ranks.join(120) == [0, 0]
    for rank in range(2):
        told = found[rank]
        assert [told[name][0] for name in ("auto", "shm", "gloo")] == ["shm", "shm", "gloo"]
        assert told["auto"][1] == told["shm"][1] == told["gloo"][1]
        assert told["moves"][0] == told["moves"][1] == told["moves"][2]
        assert told["alone"] == "local"
        assert told["hidden"][0] == "gloo"
        assert "shm' cannot work here: rank 1 cannot open the memory of rank 0 (pid " in told["hidden"][1]
        assert "use transport='gloo' instead" in told["hidden"][1]
        assert told["nccl"].startswith(
            "transport 'nccl' needs a group with the nccl backend and one GPU per rank"
        )
        assert told["local"] == "transport 'local' is for one rank and this group has 2: use transport='auto'"
        assert told["differ"] == "ranks ask for different transports: shm, gloo (in rank order)"


def both(rank: int, size: int, path: str) -> list[Transport]:
    """One transport of each kind: a process can be killed only once."""
    store = dist.FileStore(path, size)
    return [kind(dist.PrefixStore(name, store), rank, size) for name, kind in KINDS.items()]


def errors_of(
    rank: int, transports: list[Transport], body: Callable[[Transport], None]
) -> list[tuple[str, float]]:
    """What each transport raises when `body` runs on all at once, and how long it took."""
    found: dict[str, tuple[str, float]] = {}
    start = time.monotonic()

    def run(transport: Transport) -> None:
        try:
            body(transport)
        except RankError as error:
            found[transport.name] = (str(error), time.monotonic() - start)

    threads = [threading.Thread(target=run, args=(transport,), daemon=True) for transport in transports]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    return [found.get(name, ("nothing", 0.0)) for name in KINDS]


def hurry() -> None:
    """Find mismatches sooner. That the real patience is within the promise is a test of its own."""
    control.PATIENCE, control.FOREIGN_PATIENCE, waits.PATIENCE = 1.0, 1.5, 1.5
    shm.LONG = link.LONG = 1.0


def test_the_guard_of_30_seconds_is_kept() -> None:
    slack = 3.0  # guards look once a second
    assert control.PATIENCE + slack < 30
    assert waits.LONG + control.FOREIGN_PATIENCE + slack < 30
    assert waits.LONG + waits.PATIENCE + slack < 30


def killed(rank: int, path: str, report: Report) -> None:
    transports = both(rank, 3, path)
    wires = [transport.allocate("bucket 0", 3, torch.float32) for transport in transports]
    if rank == 1:
        report(len(list(Path("/dev/shm").glob("*zeroshard*"))))
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    def body(transport: Transport) -> None:
        wire = wires[transports.index(transport)]
        transport.reduce("gradients", "bucket 0", wire, [1, 1, 1], torch.empty(1), 1.0).wait()

    report(errors_of(rank, transports, body))
    os._exit(0)


def without_places(text: str) -> str:
    """A message without where in the program each wait was called."""
    return re.sub(r" \(called at [^)]*\)", "", text)


def test_a_killed_rank_ends_its_peers() -> None:
    ranks = Ranks(3, killed)
    found = ranks.reports(240)
    codes = ranks.join(120)
    assert codes == [0, -signal.SIGKILL, 0]
    assert found[1] == 0, "nothing of shared memory has a name that could be left behind"
    pid = ranks.processes[1].pid
    for rank in (0, 2):
        (shm, _), (gloo, _) = found[rank]
        # Whoever noticed first has told the others, so the waiting rank that is named may be either.
        assert shm.startswith(f"rank 1 (pid {pid}) died while rank ")
        assert shm.endswith("waited for its gradients [bucket 0]")
        assert gloo.startswith(f"rank 1 (pid {pid} on ")
        assert "ended or was killed while rank " in gloo
        assert without_places(gloo).endswith("waited for its gradients [bucket 0]")


def raising(rank: int, path: str, report: Report) -> None:
    transports = both(rank, 2, path)
    for transport in transports:
        transport.barrier("start")
    if rank == 0:
        raise ValueError("batch 7 is empty")
    report(errors_of(rank, transports, lambda transport: transport.barrier("after the step")))
    os._exit(0)


def test_a_rank_that_raises_ends_its_peers_with_its_words() -> None:
    ranks = Ranks(2, raising)
    found = ranks.reports(240)
    assert ranks.join(120) == [1, 0]
    assert found[0] == "nothing"
    for text, _ in found[1]:
        assert text == "rank 0 failed: ValueError: batch 7 is empty"


def apart(rank: int, path: str, report: Report) -> None:
    hurry()
    transports = both(rank, 2, path)
    wires = [transport.allocate("bucket 0", 2, torch.float32) for transport in transports]

    def body(transport: Transport) -> None:
        if rank == 0:
            transport.barrier("after the step")
        else:
            wire = wires[transports.index(transport)]
            transport.reduce("gradients", "bucket 0", wire, [1, 1], torch.empty(1), 1.0).wait()

    report(errors_of(rank, transports, body))
    os._exit(0)


def in_torch(rank: int, path: str, report: Report, kind: str) -> None:
    """Rank 1 is in a collective of torch, or in another transport, and rank 0 in ours."""
    hurry()
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    first, second = connect(CPU, kind), connect(CPU, kind)
    for transport in (first, second):
        transport.barrier("start")
    text = ""
    try:
        if rank == 0:
            first.barrier("after the step")
        elif kind == "shm":
            dist.all_reduce(torch.zeros(1))
        else:
            second.barrier("after the other step")
    except RuntimeError as error:
        text = str(error)
    report((text, first.cause()))
    os._exit(0)


@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_waits_outside_of_a_transport_are_seen(kind: str) -> None:
    ranks = Ranks(2, in_torch, kind)
    found = ranks.reports(240)
    assert ranks.join(120) == [0, 0]
    text, _ = found[0]
    assert "rank 0 waits for barrier 'after the step'; rank 1 waits for " in without_places(text)
    if kind == "shm":
        assert "torch.distributed.all_reduce (called at test_comm_processes.py:" in text
        assert found[1][1] == text, "torch only told rank 1 that a connection was closed"
    else:
        assert "rank 1 waits for barrier 'after the other step'" in text
        assert found[1][0] == text


def test_ranks_at_different_places_end_together() -> None:
    ranks = Ranks(2, apart)
    found = ranks.reports(240)
    assert ranks.join(120) == [0, 0]
    for rank in range(2):
        for text, seconds in found[rank]:
            said = "rank 0 waits for barrier 'after the step'; rank 1 waits for its gradients [bucket 0]"
            assert said in without_places(text)
            assert seconds >= 1.0, "after a while of patience"
    assert found[0][0][0] == found[1][0][0]
    assert found[0][1][0] == found[1][1][0]
