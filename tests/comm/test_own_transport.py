"""A transport that the library does not know: ranks are threads, and read one another's tensors."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from zeroshard import options
from zeroshard.extend import (
    Cuts,
    DoneWork,
    Land,
    Spans,
    SummingTransport,
    TransportBuffer,
    TransportTraits,
    Work,
    fold,
    register_transport,
)
from zeroshard.testing import run_threads

STEPS = 3


class Room:
    """What the ranks of one transport share."""

    def __init__(self, size: int, timeout: float) -> None:
        self.meeting = threading.Barrier(size, timeout=timeout)
        self.said: list[Any] = [None] * size


ROOMS: dict[str, Room] = {}


class ThreadTransport(SummingTransport):
    """Every operation meets twice: when all ranks have shown what others read, and when all have read it."""

    name = "threads"
    traits = TransportTraits(adds_here=True, keeps_order=True)

    def __init__(self, store: Any, rank: int, size: int, device: torch.device, timeout: float) -> None:
        super().__init__(rank, size, device)
        if rank == 0:
            key = uuid.uuid4().hex
            ROOMS[key] = Room(size, timeout)
            store.set("room", key)
        self._room = ROOMS[store.get("room").decode()]

    def _share(self, value: Any, read: Callable[[list[Any]], Any]) -> Any:
        self._room.said[self.rank] = value
        try:
            self._room.meeting.wait()
            result = read(self._room.said)
            self._room.meeting.wait()
        except threading.BrokenBarrierError as error:
            raise zs.RankError("a rank has left its transport, or did not come in time.") from error
        return result

    def allocate(self, key: str, numel: int, dtype: torch.dtype) -> TransportBuffer:
        return TransportBuffer(key, torch.zeros(numel, dtype=dtype, device=self.device))

    def free(self, transport_buffer: TransportBuffer) -> None:
        transport_buffer.mine = transport_buffer.mine.new_empty(0)

    def fill(self, transport_buffer: TransportBuffer) -> None:
        return None  # all have read it when an operation ends

    def reduce_by(
        self,
        add: Callable[[Tensor, Sequence[Tensor], float], None],
        kind: str,
        key: str,
        wire: TransportBuffer,
        shards: Sequence[int],
        out: Tensor,
        scale: float,
    ) -> Work:
        start = sum(shards[: self.rank])
        total = torch.empty_like(out)

        def read(wires: list[Tensor]) -> None:
            add(total, [other[start : start + shards[self.rank]] for other in wires], scale)

        self._share(wire.mine, read)
        out.copy_(total)
        self._count_reduce(kind, shards, wire.mine.element_size())
        return DoneWork()

    def all_to_all(
        self,
        kind: str,
        key: str,
        wire: TransportBuffer,
        offers: Spans,
        takes: Spans,
        land: Land,
        varies: bool = False,
    ) -> Work:
        def read(wires: list[Tensor]) -> list[Tensor]:
            return [other[at : at + n].clone() for other, (at, n) in zip(wires, takes, strict=True)]

        land(self._share(wire.mine, read))
        self._count_all_to_all(kind, [n for _, n in offers], [n for _, n in takes])
        return DoneWork()

    def gather(
        self, kind: str, key: str, source: TransportBuffer, cuts: Cuts, out: Sequence[Sequence[Tensor]]
    ) -> Work:
        def read(sources: list[Tensor]) -> None:
            for other, spans, targets in zip(sources, cuts, out, strict=True):
                for (at, numel), to in zip(spans, targets, strict=False):
                    to.copy_(other[at : at + numel].view(to.shape))

        self._share(source.mine, read)
        self._count_gather(kind, [sum(n for _, n in spans) for spans in cuts], source.mine.element_size())
        return DoneWork()

    def open(self) -> None:
        return None

    def fence(self) -> None:
        self.barrier("fence")

    def broadcast(self, key: str, tensors: Sequence[Tensor], source: int = 0) -> None:
        def read(said: list[Sequence[Tensor]]) -> None:
            if self.rank != source:
                for mine, theirs in zip(tensors, said[source], strict=True):
                    mine.copy_(theirs)

        self._share(tensors, read)
        self._count_broadcast(tensors, source)

    def barrier(self, what: str) -> None:
        self._share(None, len)

    def compare(self, what: str, place: str) -> None:
        if len(self._share(what, set)) > 1:
            raise zs.RankError(f"ranks ask for different things {place}")

    def max(self, values: Sequence[float], what: str = "a small max") -> list[float]:
        return self._share(list(values), lambda rows: fold(rows, "max"))

    def sum(self, values: Sequence[float], what: str = "a small sum") -> list[float]:
        return self._share(list(values), lambda rows: fold(rows, "sum"))

    def exchange(self, value: object, what: str = "an exchange") -> list[object]:
        return [json.loads(text) for text in self._share(json.dumps(value), list)]

    def report(self, text: str) -> None:
        self._room.meeting.abort()

    def close(self) -> None:
        return None


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one test: elsewhere the name is unknown."""
    connect = import_module("zeroshard.comm.connect")
    monkeypatch.setattr(connect, "TRANSPORTS", names := [*options.TRANSPORTS])
    monkeypatch.setattr(options, "TRANSPORTS", names)
    monkeypatch.setattr(connect, "_makers", {})
    register_transport("threads", ThreadTransport)


def model() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(3)), nn.Linear(24, 3))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return net


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(5, 24, generator=torch.Generator().manual_seed(100 * step + rank))


def trained(stage: int, transport: str) -> tuple[str, list[Tensor], dict[str, int]]:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    run = zs.shard(net, optimizer, stage=stage, transport=transport)
    for step in range(STEPS):
        net(batch(step, run.rank)).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    sent, name = run.stats().sent, run.transport
    run.close()
    return name, [p.detach().clone() for p in net.parameters()], sent


@pytest.mark.threads
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_it_trains_as_shared_memory_does(stage: int) -> None:
    for own, shm in zip(
        run_threads(3, trained, stage, "threads"), run_threads(3, trained, stage, "shm"), strict=True
    ):
        assert (own[0], shm[0]) == ("threads", "shm")
        assert all(torch.equal(a, b) for a, b in zip(own[1], shm[1], strict=True))
        assert own[2]["reduce"] == shm[2]["reduce"] > 0


@pytest.mark.threads
def test_a_name_is_taken_once_and_an_unknown_one_refused() -> None:
    with pytest.raises(zs.OptionError, match=r"transport 'gloo' exists already: take another name\."):
        register_transport("gloo", ThreadTransport)
    with pytest.raises(zs.OptionError, match='Did you mean "threads"'):
        zs.Options(transport="thread")
