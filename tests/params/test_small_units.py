"""Hundreds of parameters of less than a page stay whole at stage 3: which ones, that the numbers and the
bytes are right, and that larger units beside them are sharded as ever."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.layout.memory import MemoryModel
from zeroshard.layout.prefetch import SMALL_BYTES, SMALL_COUNT, SMALL_ROOM, small_units
from zeroshard.layout.traffic import sent_by_rank
from zeroshard.options import Options
from zeroshard.planner.signatures import blocks_of, rules_of
from zeroshard.testing import assert_bytes, assert_same_bits, ranks

WIDTH, WIDE = 8, 64


class Uneven(nn.Module):
    """132 blocks of four small parameters, two of them behind blocks that are larger."""

    def __init__(self) -> None:
        super().__init__()
        self.first = models.Tower(WIDTH, 130).blocks
        self.widen = nn.Linear(WIDTH, WIDE)
        self.wide = nn.ModuleList(models.Residual(WIDE) for _ in range(3))
        self.narrow = nn.Linear(WIDE, WIDTH)
        self.last = models.Tower(WIDTH, 2).blocks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.first:
            x = block(x)
        x = self.widen(x)
        for block in self.wide:
            x = block(x)
        x = self.narrow(x)
        for block in self.last:
            x = block(x)
        return x.float().square().mean()


def test_which_units_stay_whole() -> None:
    some = {f"u{i}": [SMALL_BYTES - 1] * 4 for i in range(SMALL_COUNT // 4)}
    assert small_units(some) == set(some)
    assert small_units({**some, "large": [SMALL_BYTES] * 4, "nothing": []}) == set(some)
    del some["u0"]
    assert not small_units(some), "too few to be worth it"
    half = [1024] * (SMALL_ROOM // 1024 // 2)
    crowd = {"a": half, "b": [*half, 1024], "c": half, "d": [1]}
    assert small_units(crowd) == {"a", "c"}, "as many as there is room for, in order"


def train(options: dict[str, Any]) -> dict[str, Any]:
    """Three steps; this rank's rows, and bytes beside what was predicted for them."""
    torch.manual_seed(0)
    model = Uneven()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    units, rules = blocks_of(model, [optimizer], "auto"), rules_of([optimizer])
    run = zs.shard(model, optimizer, **options)
    for step in range(3):
        before = run.stats()
        torch.manual_seed(10 * step + run.rank)
        model(torch.randn(2, WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = run.stats()
    rows = {name: sharded_param.to_local().detach() for name, sharded_param in model.named_parameters()}  # type: ignore[operator]
    run._runtime.transport.close()
    setup = MemoryModel(units, run.options, 2, rules, run.rank, traits=run._runtime.transport.traits)
    return {
        "rows": rows,
        "live": stats.live,
        "peak": stats.peak,
        "predicted": asdict(setup.held),
        "sent": (stats - before).sent,
        "expected": sent_by_rank(setup).total,
    }


@pytest.mark.wide(2)
@pytest.mark.ranks
@pytest.mark.parametrize("more", [{}, {"transport": "gloo", "recompute": ["wide.*"]}, {"precision": "bf16"}])
def test_they_train_as_ever_and_their_bytes_are_foreseen(more: dict[str, Any]) -> None:
    plain = ranks(2).run(train, {"stage": 2, **more})
    for one, other in zip(ranks(2).run(train, {"stage": 3, **more}), plain, strict=True):
        assert_same_bits(one["rows"], other["rows"])
        assert one["live"] == one["predicted"]
        assert one["peak"] == one["predicted"]
        assert {kind for kind, count in one["sent"].items() if count} == set(one["expected"])
        for kind, count in one["expected"].items():
            assert_bytes(one["sent"][kind], count, 0.2, kind)  # padding counts among such small ones
        assert one["live"]["parameters"] < other["live"]["parameters"], "the larger ones are sharded"


def calls(stage: int, transport: str) -> tuple[int, int]:
    """How often rows are fetched in a forward: for many at once, and for one."""
    torch.manual_seed(0)
    model = Uneven()
    run = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=stage, transport=transport)
    moved = run._runtime.transport
    counts = Counter[str]()
    for name in ("gather_all", "gather"):
        plain = getattr(moved, name)

        def counted(*given: Any, name: str = name, plain: Any = plain) -> Any:
            counts[name] += 1
            return plain(*given)

        setattr(moved, name, counted)
    with torch.no_grad():
        model(torch.zeros(2, WIDTH))
    found = counts["gather_all"], counts["gather"]
    run.close()  # which gathers every parameter whole
    return found


@pytest.mark.ranks
def test_small_ones_are_fetched_by_one_call() -> None:
    """Over shared memory, where a call does the work itself; elsewhere they are under way one by one."""
    assert set(ranks(2).run(calls, 1, "shm")) == {(1, 0)}
    assert set(ranks(2).run(calls, 3, "shm")) == {(1, 3)}  # and those that are sharded
    assert set(ranks(2).run(calls, 1, "gloo")) == {(0, 136)}


def test_where_rows_travel_as_codes_none_stays() -> None:
    model = Uneven()
    units = blocks_of(model, [torch.optim.AdamW(model.parameters())], "auto")
    small = {unit.name for unit in units if not unit.name.startswith("wide.")}
    assert MemoryModel(units, Options(stage=3), 2).small == small
    assert not MemoryModel(units, Options(stage=3, gather=zs.Int8()), 2).small
    assert not MemoryModel(units, Options(stage=2), 2).small
