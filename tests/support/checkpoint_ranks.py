"""Ranks as threads for the checkpoint tests, and a small model whose rows they hold."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from zeroshard.checkpoint import HeldRows, LoadResult, NoPeers, RunSnapshot, SaveResult, load, save

T = TypeVar("T")
Full = dict[tuple[str, str], torch.Tensor]


class ThreadPeers:
    """One rank of several that are threads. Values travel as JSON, as between processes."""

    def __init__(self, rank: int, size: int, table: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.table, self.barrier = rank, size, table, barrier

    def exchange(self, value: Any, what: str) -> list[Any]:
        self.table[self.rank] = json.dumps(value)
        self.barrier.wait()
        values = [json.loads(text) for text in self.table]
        self.barrier.wait()
        return values


def ranks(world: int, work: Callable[[ThreadPeers], T]) -> list[T | Exception]:
    """Run `work` as each rank; every rank's result or exception."""
    table: list[Any] = [None] * world
    barrier = threading.Barrier(world, timeout=300)
    results: list[Any] = [None] * world

    def one(rank: int) -> None:
        try:
            results[rank] = work(ThreadPeers(rank, world, table, barrier))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive(), "a rank hangs"
    return results


def all_good(results: list[T | Exception]) -> list[T]:
    good: list[T] = []
    for result in results:
        if isinstance(result, Exception):
            raise result
        good.append(result)
    return good


def model(seed: int = 0) -> Full:
    """Parameters, a buffer and optimizer state of several shapes, with the odd ones."""
    generator = torch.Generator().manual_seed(seed)
    full: Full = {
        ("parameter", "embed.weight"): torch.randn(50, 8, generator=generator),
        ("parameter", "blocks.0.weight"): torch.randn(16, 4, 3, generator=generator).bfloat16(),
        ("parameter", "blocks.0.bias"): torch.randn(5, generator=generator),
        ("parameter", "scale"): torch.randn((), generator=generator),
        ("parameter", "nothing"): torch.zeros(0, 4),
        ("parameter", "hollow"): torch.zeros(3, 0),
        ("buffer", "counts"): torch.randint(0, 99, (7,), generator=generator),
    }
    for name in ("embed.weight", "blocks.0.bias"):
        shape = full["parameter", name].shape
        full["state:exp_avg", name] = torch.randn(shape, generator=generator)
        full["state:step", name] = torch.tensor(float(seed + 7))
    return full


def blank(full: Full) -> Full:
    return {key: torch.zeros_like(tensor) for key, tensor in full.items()}


def rows_of(height: int, rank: int, world: int) -> tuple[int, int]:
    chunk = -(-height // world)
    return min(rank * chunk, height), min((rank + 1) * chunk, height)


def held(full: Full, rank: int = 0, world: int = 1, copied: bool = False) -> list[HeldRows]:
    """A rank's records over slices of the full tensors, so that what it writes is seen there."""
    records = []
    for (kind, name), tensor in full.items():
        if copied or not tensor.dim():
            records.append(HeldRows.of(name, kind, tensor))
        else:
            start, stop = rows_of(tensor.shape[0], rank, world)
            records.append(HeldRows.of(name, kind, tensor[start:stop], start, tensor.shape[0]))
    return records


def save_as(
    path: Path, full: Full, world: int = 1, values: dict[str, Any] | None = None, **options: Any
) -> list[SaveResult]:
    def work(peers: ThreadPeers) -> SaveResult:
        snapshot = RunSnapshot(held(full, peers.rank, world), values or {"step": 3}, {"rank": peers.rank})
        return save(path, snapshot, peers, **options)

    return all_good(ranks(world, work))


def load_as(path: Path, full: Full, world: int = 1, strict: bool = True) -> list[LoadResult]:
    """Load into `full`, each rank its rows."""
    return all_good(
        ranks(world, lambda peers: load(path, RunSnapshot(held(full, peers.rank, world)), peers, strict))
    )


def same(one: Full, other: Full) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def saved_once(path: Path, seed: int = 0) -> Full:
    """A checkpoint of one rank, and what is in it."""
    full = model(seed)
    save(path, RunSnapshot(held(full), {"step": seed}), NoPeers())
    return full
