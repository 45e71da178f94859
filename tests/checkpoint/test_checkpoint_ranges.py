"""Who writes and who reads which rows: integers only."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from zeroshard.checkpoint import HeldRows
from zeroshard.checkpoint.ranges import SHARE, RankRows, assign, block_rows, into_files, merge, overlaps
from zeroshard.checkpoint.ranges import describe as told
from zeroshard.errors import CheckpointError


def row(name: str, shape: tuple[int, ...], start: int, stop: int, kind: str = "parameter") -> HeldRows:
    """Rows that a rank tells of, and that nobody reads."""
    return HeldRows(name, kind, shape, "float32", (start, stop), None, None)


def describe(world: int, height: int, ranges: list[tuple[int, int]], width: int = 1) -> list[dict[str, Any]]:
    return [told([row("w", (height, width), *ranges[rank])]) for rank in range(world)]


def test_every_row_is_written_exactly_once_however_ranks_hold_them() -> None:
    chance = random.Random(1)
    for _ in range(200):
        world, height = chance.randint(1, 7), chance.randint(1, 40)
        width = chance.choice([1, SHARE // 8])
        cuts = sorted(chance.randint(0, height) for _ in range(world - 1))
        ranges = list(zip([0, *cuts], [*cuts, height], strict=True))
        ranges = [(0, height) if chance.random() < 0.3 else item for item in ranges]
        tasks = assign(merge(describe(world, height, ranges, width)), world)
        written = Counter(row for mine in tasks for task in mine for row in range(task.start, task.stop))
        assert written == Counter(range(height))
        for rank, mine in enumerate(tasks):
            assert all(ranges[rank][0] <= task.start < task.stop <= ranges[rank][1] for task in mine)


def test_copies_are_shared_out_by_bytes() -> None:
    large = [row("w", (4096, 1024), 0, 4096)]
    small = [row(f"b{i}", (100,), 0, 100) for i in range(40)]
    tasks = assign(merge([told(large + small)] * 4), 4)
    rows = [sum(task.stop - task.start for task in mine if task.index == 0) for mine in tasks]
    assert rows == [1024] * 4
    assert [sum(1 for task in mine if task.index) for mine in tasks] == [10] * 4


def test_a_hole_names_its_rows() -> None:
    with pytest.raises(
        CheckpointError, match=r"rows 4 to 6 of `w` \(parameter, 10 rows\) are held by no rank"
    ):
        assign(merge(describe(2, 10, [(0, 4), (6, 10)])), 2)


def test_rows_outside_the_tensor_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"`w` .* has 10 rows"):
        assign(merge(describe(1, 10, [(0, 11)])), 1)


def test_ranks_that_disagree_are_named() -> None:
    one, other = row("w", (4,), 0, 2), row("w", (5,), 2, 5)
    with pytest.raises(
        CheckpointError, match=r"`w`: it is a parameter of \(4,\) float32 on rank 0 .* on rank 1"
    ):
        merge([told([one]), told([other])])
    with pytest.raises(CheckpointError, match="a buffer of"):
        merge([told([one]), told([row("w", (4,), 0, 2, "buffer")])])


def test_files_are_cut_between_rows() -> None:
    held = [row("a", (10, 1), 0, 10), row("b", (6, 25), 0, 6), row("c", (3, 0), 0, 3)]
    tasks = [RankRows(0, 0, 0, 10), RankRows(0, 1, 5, 6), RankRows(0, 2, 0, 3)]
    assert into_files(tasks, held, limit=16) == [
        [RankRows(0, 0, 0, 4)],
        [RankRows(0, 0, 4, 8)],
        [RankRows(0, 0, 8, 10)],
        [RankRows(0, 1, 5, 6), RankRows(0, 2, 0, 3)],
    ]


def test_overlaps_meet_every_wanted_row_once() -> None:
    chance = random.Random(2)
    for _ in range(300):
        cuts = sorted(chance.sample(range(1, 60), chance.randint(0, 8)))
        spans = list(zip([0, *cuts], [*cuts, 60], strict=True))
        start = chance.randint(0, 60)
        stop = chance.randint(start, 60)
        found = list(overlaps(spans, start, stop))
        assert [row for _, first, last in found for row in range(first, last)] == list(range(start, stop))
        assert all(spans[n][0] <= first < last <= spans[n][1] for n, first, last in found)


def test_a_block_is_a_row_at_least() -> None:
    assert (block_rows(3, 10), block_rows(100, 10)) == (3, 1)
