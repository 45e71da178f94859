"""Ranks that start different operations are found out, wherever they differ."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from zeroshard.comm.diagnosis import operation_order
from zeroshard.comm.diagnosis.operation_order import OperationOrder
from zeroshard.errors import RankError


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[OperationOrder]]:
    """Their guards never look by themselves."""
    monkeypatch.setattr(operation_order, "EVERY", 3600.0)
    store = dist.HashStore()
    made = [OperationOrder(store, rank, 3) for rank in range(3)]
    yield made
    for one in made:
        one.close()


def start(ranks: list[OperationOrder], *labels: str) -> None:
    for label in labels:
        for one in ranks:
            one.add(label)


def look(ranks: list[OperationOrder], times: int = 1) -> list[str | None]:
    for _ in range(times):
        for one in ranks:
            one.look()
    return [one.trouble for one in ranks]


def test_the_same_operations_are_no_trouble(ranks: list[OperationOrder]) -> None:
    for step in range(50):
        start(ranks, "gather [a]", "gather [b]", "reduce [b]")
        ranks[step % 3].look()
    assert look(ranks, 3) == [None] * 3


def test_a_rank_may_be_ahead(ranks: list[OperationOrder]) -> None:
    start(ranks, "gather [a]")
    for label in ("gather [b]", "gather [c]"):
        ranks[1].add(label)
        look(ranks)
    for label in ("gather [b]", "gather [c]"):
        start([ranks[0], ranks[2]], label)
    assert look(ranks, 2) == [None] * 3


@pytest.mark.parametrize("later", [0, 100])
def test_the_first_difference_is_named_on_all_ranks(ranks: list[OperationOrder], later: int) -> None:
    start(ranks, "gather [a]")
    ranks[0].add("gather [b]")
    start(ranks[1:], "gather [c]")
    start(ranks, *["reduce [d]"] * later)
    found = look(ranks, 4)
    assert found == found[:1] * 3
    assert found[0] is not None
    assert "rank 0 started gather [b] where rank 1 started gather [c]" in found[0] or (
        "rank 2 started gather [c] where rank 0 started gather [b]" in found[0]
    )
    with pytest.raises(RankError, match="gone different ways over NCCL"):
        ranks[2].add("gather [a]")


def test_a_difference_that_nobody_can_name(
    ranks: list[OperationOrder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The neighbour does not answer any more, or has forgotten."""
    monkeypatch.setattr(operation_order, "PATIENCE", 0.0)
    ranks[0].add("gather [b]")
    start(ranks[1:], "gather [c]")
    ranks[0].look()
    ranks[1].look()
    ranks[1].look()
    assert ranks[1].trouble is not None
    assert "before their operation 1" in ranks[1].trouble


def test_only_as_many_are_remembered_as_are_of_use(
    ranks: list[OperationOrder], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks[0].add("gather [b]")
    ranks[0].look()
    start(ranks[1:], *["gather [c]"] * (operation_order.KEPT + 1))
    assert len(ranks[1]._past) == operation_order.KEPT
    ranks[1].look()
    assert ranks[1].trouble is None, "what was forgotten is not compared"
