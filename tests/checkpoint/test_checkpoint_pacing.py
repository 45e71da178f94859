"""Loops of a thread that writes beside training give way, but not for ever, and not while others wait."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from zeroshard.checkpoint import HeldRows, NoPeers, PendingSave, RunSnapshot, Saver, pacing

MOMENT = 20e-6  # seconds that an item takes


class Clock:
    """Time that passes when an item is worked on, and when another thread is let in."""

    def __init__(self, absence: float) -> None:
        self.now, self.absence, self.away = 0.0, absence, list[float]()

    def sleep(self, seconds: float) -> None:
        assert seconds == 0, "only the interpreter is given away"
        self.away.append(self.now)
        self.now += self.absence

    def work(self, count: int) -> list[int]:
        done = []
        for item in pacing.gently(range(count)):
            self.now += MOMENT
            done.append(item)
        return done


@pytest.fixture(params=[1e-6, 60e-6, 5e-3], ids=["nobody", "a timer", "another loop of Python"])
def clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(request.param)
    monkeypatch.setattr(pacing, "time", SimpleNamespace(perf_counter=lambda: clock.now, sleep=clock.sleep))
    return clock


def test_turns_are_short_and_loops_take_twice_as_long_at_most(clock: Clock) -> None:
    with pacing.beside(lambda: False):
        assert clock.work(1000) == [*range(1000)]
    assert clock.away
    assert clock.away[0] <= pacing.TURN + MOMENT, "the first turn is short"
    assert clock.now <= 2 * 1000 * MOMENT + clock.absence


def test_nobody_gives_way_who_is_waited_for(clock: Clock) -> None:
    with pacing.beside(lambda: clock.now > 500 * MOMENT + 0.02):
        clock.work(5000)
    assert clock.away
    assert max(clock.away) <= 500 * MOMENT + 0.02


def test_elsewhere_loops_run_through(clock: Clock) -> None:
    clock.work(100)
    with pacing.beside(lambda: False):
        thread = threading.Thread(target=clock.work, args=(100,))
        thread.start()
        thread.join()
    clock.work(100)
    assert not clock.away


def test_a_save_hurries_while_it_is_waited_for(tmp_path: Path) -> None:
    begun, seen = threading.Event(), list[bool]()

    def read(start: int, stop: int) -> torch.Tensor:
        hurried = pacing._here.hurried
        assert hurried is not None
        seen.append(hurried())
        begun.set()
        while not hurried():  # until the caller below waits
            pass
        seen.append(True)
        return torch.ones(stop - start)

    record = HeldRows("w", "parameter", (4,), "float32", (0, 4), read, lambda start, rows: None)
    pending = Saver(NoPeers()).save(tmp_path / "1", RunSnapshot([record]), background=True)
    assert isinstance(pending, PendingSave)
    assert begun.wait(300)
    pending.copied()
    pending.wait()
    assert seen == [False, True]
