"""Where a rank is while a peer waits for it, seen from the guard's thread."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from zeroshard.comm.whereabouts import Whereabouts


def test_frames_of_a_thread_that_runs_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are looked at once it rests."""
    looks: list[int] = []
    frames = sys._current_frames
    monkeypatch.setattr(sys, "_current_frames", lambda: (looks.append(1), frames())[1])
    made: list[Whereabouts] = []
    rest, end = threading.Event(), threading.Event()

    def work() -> None:
        made.append(Whereabouts())
        while not rest.is_set():
            sum(range(1000))
        end.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    while not made:
        time.sleep(0.01)
    for _ in range(2):
        time.sleep(0.4)  # long enough to get a share of a busy machine
        assert made[0].collective(0.0) is None
    assert not looks
    rest.set()
    time.sleep(0.05)
    for _ in range(100):  # until a whole pause of ours was one of its
        time.sleep(0.05)
        assert made[0].collective(0.0) is None  # it waits, but in no collective
        if looks:
            break
    assert looks
    end.set()
    thread.join()
    looks.clear()
    assert made[0].collective(0.0) is None  # nor of one that has ended
    assert not looks
