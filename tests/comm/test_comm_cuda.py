"""Transports where a GPU is at hand: two ranks that share it, and NCCL with one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from comm_ranks import KINDS, Ranks

from zeroshard.comm import NcclTransport, Transport, connect

pytestmark = [pytest.mark.cuda, pytest.mark.ranks]


def on_gpu(transport: Transport) -> list[list[float]]:
    """Wires filled from the GPU, sums and segments that land there."""
    found = []
    device = torch.device("cuda", 0)
    shards = [700, 300][: transport.size]
    for dtype in (torch.float32, torch.bfloat16):
        wire = transport.allocate(f"wire {dtype}", sum(shards), dtype)
        for turn in range(3):
            data = torch.arange(sum(shards), device=device) % 7 + transport.rank + turn
            transport.fill(wire)
            wire.mine.copy_(data)
            out = torch.empty(shards[transport.rank], device=device)
            transport.reduce("gradients", f"wire {dtype}", wire, shards, out, 0.5).wait()
            found.append(out.tolist())
    source = transport.allocate("rows", 100, torch.float32)
    source.mine.fill_(transport.rank + 1.0)
    transport.open()
    out_rows = [[torch.empty(5, 2, device=device), torch.empty(30, device=device)] for _ in shards]
    transport.gather("parameters", "rows", source, [[(0, 10), (20, 30)]] * len(shards), out_rows).wait()
    found += [tensor.flatten().tolist() for tensors in out_rows for tensor in tensors]
    weights = [torch.full((4,), float(transport.rank + 1), device=device)]
    transport.broadcast("start", weights, transport.size - 1)
    transport.fence()
    return [*found, weights[0].tolist()]


def expected(rank: int, size: int) -> list[list[float]]:
    shards = [700, 300][:size]
    start, found = sum(shards[:rank]), []
    for _ in range(2):
        for turn in range(3):
            parts = [torch.arange(sum(shards)) % 7 + other + turn for other in range(size)]
            found.append((sum(parts)[start : start + shards[rank]] * 0.5).tolist())
    for other in range(size):
        found += [[other + 1.0] * 10, [other + 1.0] * 30]
    return [*found, [float(size)] * 4]


def share_a_gpu(rank: int, path: str, report: Any) -> None:
    store = dist.FileStore(path, 2)
    device = torch.device("cuda", 0)
    transports = [kind(dist.PrefixStore(name, store), rank, 2, device) for name, kind in KINDS.items()]
    report([on_gpu(transport) for transport in transports])
    for transport in transports:
        transport.barrier("the end")
        transport.close()


def test_two_ranks_share_a_gpu() -> None:
    ranks = Ranks(2, share_a_gpu)
    found = ranks.reports(120)
    assert ranks.join(120) == [0, 0]
    for rank in range(2):
        assert found[rank] == [expected(rank, 2)] * 2


def one_rank(rank: int, path: str, report: Any) -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.FileStore(path, 1), rank=0, world_size=1, device_id=device)
    transport = connect(device, "nccl")
    assert isinstance(transport, NcclTransport)
    report(on_gpu(transport))
    transport.close()
    dist.destroy_process_group()


def test_nccl_with_one_rank() -> None:
    ranks = Ranks(1, one_rank)
    found = ranks.reports(120)
    assert ranks.join(120) == [0]
    assert found[0] == expected(0, 1)
