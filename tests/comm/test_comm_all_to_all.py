"""`all_to_all`: bytes from every rank to every rank, of fixed and of varying length, in turns on one wire."""

from __future__ import annotations

import time

import pytest
import torch
from comm_ranks import threads
from torch import Tensor

from zeroshard.comm import Transport

pytestmark = pytest.mark.threads
SIZES = [("local", 1), ("shm", 2), ("shm", 3), ("gloo", 2), ("gloo", 4), ("nodes", 4)]
TURNS = 5


def content(source: int, target: int, turn: int, length: int) -> Tensor:
    return torch.arange(length).add(100 * source + 10 * target + turn).to(torch.uint8)


def lengths(size: int) -> list[int]:
    """What each rank gets from each: uneven, and for the last of several nothing."""
    return [32 * (rank + 1) for rank in range(size)] if size == 1 else [*range(16, 16 * size, 16), 0]


@pytest.mark.parametrize(("kind", "size"), SIZES)
def test_parts_arrive_in_rank_order_and_are_counted(kind: str, size: int) -> None:
    each = lengths(size)

    def body(transport: Transport) -> tuple[list[list[Tensor]], int, int]:
        rank = transport.rank
        starts = [sum(each[:r]) for r in range(size)]
        wire = transport.allocate("codes", sum(each), torch.uint8)
        offers = list(zip(starts, each, strict=True))
        takes = [(starts[rank], each[rank])] * size
        turns: list[list[Tensor]] = []
        for turn in range(TURNS):
            transport.fill(wire)
            for target, (at, length) in enumerate(offers):
                wire.mine[at : at + length] = content(rank, target, turn, length)
            work = transport.all_to_all(
                "reduce", "codes", wire, offers, takes, lambda parts: turns.append([p.clone() for p in parts])
            )
            work.wait()
            assert work.poll()
        counters = transport.counters
        return turns, counters.sent.get("reduce", 0), counters.received.get("reduce", 0)

    for rank, (turns, sent, received) in enumerate(threads(kind, size, body)):
        assert len(turns) == TURNS
        for turn, parts in enumerate(turns):
            for source, part in enumerate(parts):
                assert torch.equal(part, content(source, rank, turn, each[rank]))
        assert sent == TURNS * (sum(each) - each[rank])
        assert received == TURNS * each[rank] * (size - 1)


@pytest.mark.parametrize(("kind", "size"), SIZES)
def test_offers_that_are_all_the_same_are_a_gather(kind: str, size: int) -> None:
    each = [16 * (rank + 1) for rank in range(size)]

    def body(transport: Transport) -> list[Tensor]:
        rank, found = transport.rank, list[Tensor]()
        wire = transport.allocate("sums", each[rank], torch.uint8)
        wire.mine.copy_(content(rank, 0, 0, each[rank]))
        offers, takes = [(0, each[rank])] * size, [(0, length) for length in each]
        transport.all_to_all(
            "reduce", "sums", wire, offers, takes, lambda parts: found.extend(p.clone() for p in parts)
        ).wait()
        return found

    for parts in threads(kind, size, body):
        assert [part.tolist() for part in parts] == [content(r, 0, 0, each[r]).tolist() for r in range(size)]


@pytest.mark.parametrize(("kind", "size"), SIZES)
def test_of_parts_that_vary_only_what_counts_travels(kind: str, size: int) -> None:
    room = 160

    def used(source: int, target: int, turn: int) -> int:
        return 8 + 16 * ((source + 2 * target + turn) % 4)

    def body(transport: Transport) -> tuple[list[list[Tensor]], int, int]:
        rank = transport.rank
        wire = transport.allocate("rows", room * size, torch.uint8)
        offers = [(room * r, room) for r in range(size)]
        takes = [(room * rank, room)] * size
        turns: list[list[Tensor]] = []
        for turn in range(TURNS):
            transport.fill(wire)
            for target, (at, _) in enumerate(offers):
                length = used(rank, target, turn)
                wire.mine[at : at + 8] = torch.tensor([length]).view(torch.uint8)
                wire.mine[at + 8 : at + length] = content(rank, target, turn, length - 8)
            transport.all_to_all(
                "reduce",
                "rows",
                wire,
                offers,
                takes,
                lambda parts: turns.append([p.clone() for p in parts]),
                varies=True,
            ).wait()
        counters = transport.counters
        return turns, counters.sent.get("reduce", 0), counters.received.get("reduce", 0)

    for rank, (turns, sent, received) in enumerate(threads(kind, size, body)):
        for turn, parts in enumerate(turns):
            for source, part in enumerate(parts):
                length = used(source, rank, turn)
                assert part.numel() == length
                assert torch.equal(part[8:], content(source, rank, turn, length - 8))
        others = [r for r in range(size) if r != rank]
        assert sent == sum(used(rank, r, turn) for turn in range(TURNS) for r in others)
        assert received == sum(used(r, rank, turn) for turn in range(TURNS) for r in others)


@pytest.mark.parametrize(("kind", "size"), [("shm", 2), ("gloo", 2), ("nodes", 4)])
def test_a_rank_that_closes_leaves_nothing_unsent(kind: str, size: int) -> None:
    """A part that varies is asked for when its length has come: by rank 0 after its peers have closed."""
    length = 24

    def body(transport: Transport) -> list[Tensor]:
        wire, found = transport.allocate("rows", length, torch.uint8), list[Tensor]()
        wire.mine.copy_(content(transport.rank, 0, 0, length))
        wire.mine[:8] = torch.tensor([length]).view(torch.uint8)
        spans = [(0, length)] * size
        work = transport.all_to_all(
            "reduce",
            "rows",
            wire,
            spans,
            spans,
            lambda parts: found.extend(p[8:].clone() for p in parts),
            True,
        )
        if transport.rank == 0:
            time.sleep(0.3)
        work.wait()
        transport.close()
        return found

    expected = [content(r, 0, 0, length)[8:].tolist() for r in range(size)]
    for parts in threads(kind, size, body):
        assert [part.tolist() for part in parts] == expected
