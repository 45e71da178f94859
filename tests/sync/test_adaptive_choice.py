"""How `Adaptive` decides: a pure function of timings, here of made-up ones, with other work in between."""

from __future__ import annotations

import random

import pytest

from zeroshard.sync.adaptive_choice import KEPT, LONGEST, ChoiceJudge, WindowReading

# ms a step as measured over shaped links (2026-11-16) of EveryStep, Int8, TopK, Local(8), by ranks, Mbit/s
# and ms of latency. `WAITED`: shares of a step; of TopK next to nothing, since its own work is what it costs.
LINKS = {
    (2, 10000, 0.1): (83, 69, 90, 51),
    (2, 10000, 1): (87, 82, 107, 54),
    (2, 10000, 10): (107, 130, 137, 50),
    (2, 1000, 0.1): (252, 95, 84, 72),
    (2, 1000, 1): (255, 96, 90, 69),
    (2, 1000, 10): (283, 155, 132, 81),
    (2, 100, 0.1): (562, 149, 48, 98),
    (2, 100, 1): (556, 165, 52, 103),
    (2, 100, 10): (589, 226, 121, 102),
    (4, 10000, 0.1): (120, 105, 150, 65),
    (4, 10000, 1): (216, 116, 144, 73),
    (4, 10000, 10): (185, 157, 165, 70),
    (4, 1000, 0.1): (387, 160, 168, 103),
    (4, 1000, 1): (379, 149, 142, 104),
}
WAITED = (0.3, 0.1, 0.04, 0.1)
ROUNDS = (1, 1, 1, 8)  # steps that belong together
WINDOW = 3


class Machine:
    """A machine that is shared: every step a little longer than it need be, some much, and now and then all
    of them for half a second."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.clock, self.busy_until = 0.0, 0.0
        self.busy_from = self.dice.expovariate(1 / 5.0)

    def step(self, seconds: float) -> float:
        took = seconds * (1.0 + abs(self.dice.gauss(0.0, 0.06)))
        if self.dice.random() < 0.05:
            took += seconds * self.dice.expovariate(1.0)
        if self.clock > self.busy_from:
            self.busy_until = self.clock + self.dice.expovariate(1 / 0.5)
            self.busy_from = self.busy_until + self.dice.expovariate(1 / 5.0)
        if self.clock < self.busy_until:
            took *= 1.6
        self.clock += took
        return took


def search(judge: ChoiceJudge, machine: Machine, seconds: tuple[float, ...]) -> tuple[int, int]:
    """The choice that is settled upon, and the steps until then."""
    current, steps = 0, 0
    while True:
        length = -(-WINDOW * judge.window_factor // ROUNDS[current]) * ROUNDS[current]
        took = sum(machine.step(seconds[current]) for _ in range(length)) / length
        steps += length
        decision = judge.hear(current, WindowReading(took, WAITED[current] * took, 1e6))
        current = decision.number
        if decision.settled:
            return current, steps


@pytest.mark.parametrize("link", LINKS, ids=str)
def test_what_is_settled_upon_is_within_a_tenth_of_the_best(link: tuple[float, float, float]) -> None:
    seconds = tuple(1e-3 * ms for ms in LINKS[link])
    for seed in range(40):
        chosen, steps = search(ChoiceJudge(0.05, 4.0, len(seconds)), Machine(seed), seconds)
        assert seconds[chosen] < 1.1 * min(seconds), f"seed {seed} of {LINKS[link]}"
        assert steps <= 110


def test_a_choice_without_waiting_is_no_reason_to_stop_looking() -> None:
    """A codec's own work may take longer than what it spares."""
    judge = ChoiceJudge(0.05, 4.0, 3)
    assert judge.hear(0, WindowReading(0.083, 0.03, 1e7)).number == 1
    assert judge.hear(1, WindowReading(0.090, 0.001, 1e5)).number == 2


def choosing(seconds: list[float], noise: dict[int, float], windows: int, judge: ChoiceJudge) -> list[int]:
    """The choice in force in each window, where choice n takes seconds[n] a step, half of it waiting. `noise`
    has a factor for disturbed windows, by their number."""
    current, taken = 0, []
    for number in range(windows):
        taken.append(current)
        took = seconds[current] * noise.get(number, 1.0)
        current = judge.hear(current, WindowReading(took, took / 2, 1e6)).number
    return taken


def test_the_shortest_is_found_and_a_faithful_one_preferred() -> None:
    assert choosing([1.0, 0.3, 0.8], {}, 8, ChoiceJudge(0.05, 4.0, 3)) == [0, 1, 2, 1, 1, 1, 1, 1]
    rounds = [0, 1] * KEPT
    assert choosing([1.0, 0.97], {}, 12, ChoiceJudge(0.05, 4.0, 2)) == [*rounds, 0, 0], "3 % are not worth it"
    calm = ChoiceJudge(0.05, 4.0, 2)
    assert calm.hear(0, WindowReading(1.0, 0.01, 1e6)).number == 0, "nothing to gain, so nothing is tried"


def test_a_disturbed_window_changes_nothing() -> None:
    """Neither while choices are tried, where those that came close are measured again, nor later."""
    close, tried = [1.0, 0.50, 0.44], [0] + [1, 2] * KEPT
    assert choosing(close, {2: 1.2}, 13, ChoiceJudge(0.05, 4.0, 3)) == [*tried, 2, 2]
    for factor in (1.3, 3.0):
        assert choosing(close, {12: factor}, 14, ChoiceJudge(0.05, 4.0, 3)) == [*tried, 2, 2, 2]


def test_the_runner_up_is_measured_again_and_stays_if_it_is_worth_it() -> None:
    judge = ChoiceJudge(0.05, 4.0, 2)
    taken = choosing([1.0, 0.9], {}, 60, judge)
    visits = [number for number in range(2 * KEPT, 60) if taken[number] == 0]
    assert visits == [13, 17, 25, 41], "one window each, at intervals that double"
    assert judge.window_factor == LONGEST
    assert choosing([1.0, 0.7], {}, 60, ChoiceJudge(0.05, 4.0, 2))[3:] == [1] * 57, "nobody came close"
    faster = ChoiceJudge(0.05, 4.0, 2)
    assert choosing([1.0, 0.9], {}, 13, faster)[-1] == 1
    assert faster.host == 1, "the other one's turn"
    decision = faster.hear(0, WindowReading(0.8, 0.4, 1e6))
    assert decision.number == 0
    assert decision.why == "800.0 ms a step against 900.0 ms"
    assert faster.hear(0, WindowReading(0.8, 0.4, 1e6)).number == 0


def test_a_link_that_has_changed_is_tried_again() -> None:
    judge = ChoiceJudge(0.05, 4.0, 2)
    assert choosing([1.0, 0.5], {}, 6, judge)[-3:] == [1, 1, 1]
    assert judge.window_factor == 8, "an agreement costs little where windows are long"
    current, taken = 1, list[int]()
    for _ in range(6):
        taken.append(current)
        current = judge.hear(current, WindowReading([0.2, 0.9][current], 0.1, 1e6)).number
    assert taken == [1, 1, 0, 0, 0, 0], "two slow windows, then the other one"
    assert judge.window_factor > 1


def test_unrest_goes_back_to_the_first_choice() -> None:
    judge = ChoiceJudge(0.05, 4.0, 2)
    choosing([1.0, 0.3], {}, 4, judge)
    decision = judge.hear(1, WindowReading(0.3, 0.1, 1e7, unrest=9.0))
    assert decision.number == 0
    assert "norm" in decision.why
    assert judge.hear(0, WindowReading(1.0, 0.8, 1e8)).number == 1, "calm again"
