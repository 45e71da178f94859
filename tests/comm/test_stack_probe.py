"""Where a rank is while a peer waits for it, seen from the guard's thread."""

from __future__ import annotations

import threading
import time

import pytest

from zeroshard.comm.diagnosis import stacks
from zeroshard.comm.diagnosis.stacks import StackProbe


def test_the_stack_of_a_thread_that_runs_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked at once it rests."""
    looks: list[int] = []
    stack_of = stacks.stack_of
    monkeypatch.setattr(stacks, "stack_of", lambda thread: (looks.append(1), stack_of(thread))[1])
    made: list[StackProbe] = []
    rest, end = threading.Event(), threading.Event()

    def work() -> None:
        made.append(StackProbe())
        while not rest.is_set():
            sum(range(1000))
        end.wait(300)

    thread = threading.Thread(target=work)
    thread.start()
    while not made:
        time.sleep(0.01)
    monkeypatch.setattr(stacks, "_RESTS", 1e-3)  # any share of a busy machine is more
    for _ in range(2):
        time.sleep(1.0)
        assert made[0].collective(0.0) is None
    assert not looks
    rest.set()
    time.sleep(0.05)
    for _ in range(2000):  # until a whole pause of ours was one of its
        time.sleep(0.05)
        assert made[0].collective(0.0) is None  # it waits, but in no collective
        if looks:
            break
    assert looks
    end.set()
    thread.join()
    for _ in range(2000):  # the system's thread ends a moment after Python's
        looks.clear()
        assert made[0].collective(0.0) is None  # nor of one that has ended
        if not looks:
            break
        time.sleep(0.05)
    assert not looks


def test_a_stack_is_looked_at_while_its_thread_runs_on() -> None:
    """Thousands of times; a walk from frame to frame crashes. It has the last call first."""
    over = threading.Event()

    def deep(left: int) -> None:
        if left:
            deep(left - 1)

    def work() -> None:
        while not over.is_set():
            deep(30)

    thread = threading.Thread(target=work)
    thread.start()
    assert thread.ident is not None
    end, names, looks = time.monotonic() + 120, set[str](), 0
    while looks < 1000 or not {"deep", "work"} <= names:
        assert time.monotonic() < end
        looks += 1
        stack = stacks.stack_of(thread.ident)
        names |= {frame.name for frame in stack}
        calls = [frame.name for frame in stack if frame.name in ("deep", "work")]
        assert calls == sorted(calls)
    over.set()
    thread.join()
    assert stacks.stack_of(thread.ident) == () or not thread.is_alive()
