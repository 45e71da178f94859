"""In which order the host updates what has landed."""

from __future__ import annotations

import threading
from typing import cast

import pytest
import torch
from offload_case import batch, make_model

import zeroshard as zs
from zeroshard.due import Job, next_of
from zeroshard.host import HostUpdates


class _Mark:
    def __init__(self, there: bool) -> None:
        self.there = there

    def passed(self) -> bool:
        return self.there


class _Part:
    def __init__(self, turn: int) -> None:
        self.turn = turn


class _Due:
    def __init__(self, turn: int, there: bool) -> None:
        self.part, self.landed = _Part(turn), _Mark(there)


@pytest.mark.parametrize(
    ("turns", "ready", "idle", "taken"),
    [
        ((9, 1, 8, 7), 4, False, 1),  # the root's norm, which landed long ago
        ((9, 8, 7, 1), 3, False, 2),  # what is asked for first has not landed yet
        ((0, 0, 0, 0), 3, False, 2),  # no forward has asked: the newest
        ((9, 8, 7, 1), 0, True, 0),  # nothing is there: the next to land
        ((9, 8, 7, 1), 0, False, None),
        ((), 0, True, None),
    ],
)
def test_which_update_is_next(turns: tuple[int, ...], ready: int, idle: bool, taken: int | None) -> None:
    due = [_Due(turn, at < ready) for at, turn in enumerate(turns)]
    assert next_of(cast(list[Job], due), idle) == taken


def test_what_forward_asks_for_first_is_updated_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is held up until backward is over; what it then does is in the order of forward."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    taken, gate, stage = list[str](), threading.Event(), HostUpdates._stage
    gate.set()
    asked, ask = list[str](), HostUpdates.ask

    def staged(self: HostUpdates, job: Job, room: object) -> object:
        gate.wait(30)
        taken.append(job.part.params[0].name)
        return stage(self, job, room)  # type: ignore[arg-type]

    def asks(self: HostUpdates, part: object) -> None:
        asked.append(part.params[0].name)  # type: ignore[attr-defined]
        ask(self, part)  # type: ignore[arg-type]

    monkeypatch.setattr(HostUpdates, "_stage", staged)
    monkeypatch.setattr(HostUpdates, "ask", asks)
    run = zs.shard(model, optimizer, offload=zs.Offload(stage_bytes=2048), clip_norm=1e9)
    try:
        for step in range(4):  # the first update waits for its norm
            asked.clear()
            loss = model(batch(step, 0))
            taken.clear()
            gate.clear() if step == 3 else gate.set()
            loss.backward()
            gate.set()
            optimizer.step()
            optimizer.zero_grad()
        run._runtime.settle()
        assert run.stats().updates["early"] >= 2
        assert asked[0] == "tokens.weight"
        assert asked.index("norm.weight") < asked.index("blocks.0.norm1.weight")
        first, *rest = taken  # taken while it was alone
        assert sorted(taken) == sorted(asked)
        assert first == "head.weight"
        assert rest == [name for name in asked if name != first]
    finally:
        gate.set()
        run.close()
