"""Updates shared out among native threads: the bits of one thread, whoever asks and however many do."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from kernel_values import BF16, F32, adam_state, assert_same_bits, built, contents, rough
from torch import Tensor

import zeroshard as zs
from zeroshard import kernels as native
from zeroshard.errors import OptionError, StateError
from zeroshard.kernels import AdamStep, SgdRows, SgdStep, ThreadTeam, library

COUNT = 3 * (1 << 15) + 1031  # four shares, the last of them no whole block
STEP = AdamStep(lr=1e-2, step=9, weight_decay=0.1, grad_scale=0.5)
pytestmark = built


def members(expected: int) -> int:
    """Threads of teams that there are now. One that was joined may be seen for a moment longer."""
    for _ in range(12000):
        found = 0
        for path in Path("/proc/self/task").glob("*/comm"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                found += path.read_text().strip() == "zeroshard-team"
        if found == expected:
            break
        time.sleep(0.01)
    return found


@pytest.fixture(name="team")
def a_team() -> Any:
    team = ThreadTeam.open(3)
    assert team is not None
    yield team
    team.close()


SPLIT, CODED, PEAK = {"master": "split"}, {"moments": "int8"}, {"amsgrad": True}


@pytest.mark.parametrize(
    ("options", "back"),
    [({}, ""), (SPLIT, ""), (CODED, ""), (PEAK, ""), ({}, "again"), (SPLIT, "again"), (SPLIT, "alone")],
    ids=str,
)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_adam_has_the_bits_of_one_thread(
    team: ThreadTeam, dtype: torch.dtype, options: dict[str, object], back: str
) -> None:
    step = None if back == "alone" else STEP
    taken = AdamStep(lr=1e-2, step=9, weight_decay=0.1) if back else None

    def made(by: ThreadTeam | None) -> list[Tensor]:
        state, weight = adam_state(COUNT, 3, False, options)
        native.update_rows(state, rough(COUNT, 1, False).to(dtype), weight, step, taken=taken, team=by)
        return [*contents(state), weight]

    for found, wanted in zip(made(team), made(None), strict=True):
        assert_same_bits(found, wanted)


def test_sgd_has_the_bits_of_one_thread(team: ThreadTeam) -> None:
    first, second = SgdStep(lr=0.1, momentum=0.9, weight_decay=0.1), SgdStep(lr=0.1, momentum=0.9)

    def made(by: ThreadTeam | None) -> list[Tensor]:
        state, weight = SgdRows(rough(COUNT, 1), momentum=rough(COUNT, 2)), torch.empty(COUNT, dtype=BF16)
        native.update_rows(state, rough(COUNT, 3), weight, first, team=by)
        native.update_rows(state, rough(COUNT, 3), weight, second, taken=first, team=by)
        native.update_rows(state, rough(COUNT, 3), weight, None, taken=second, team=by)
        return [*contents(state), weight]

    for found, wanted in zip(made(team), made(None), strict=True):
        assert_same_bits(found, wanted)


def test_several_callers_are_served_at_once(team: ThreadTeam) -> None:
    def aged(seed: int, by: ThreadTeam | None) -> list[Tensor]:
        state, weight = adam_state(COUNT, seed, False, {})
        for count in range(1, 9):
            native.update_rows(
                state, rough(COUNT, count, False), weight, AdamStep(lr=1e-2, step=count), team=by
            )
        return [*contents(state), weight]

    found: dict[int, list[Tensor]] = {}
    callers = [threading.Thread(target=lambda n=n: found.update({n: aged(n, team)})) for n in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for seed in range(4):
        for one, wanted in zip(found[seed], aged(seed, None), strict=True):
            assert_same_bits(one, wanted)


def test_a_team_ends_with_its_threads_and_its_misuse_is_named() -> None:
    team = ThreadTeam.open(3)
    assert team is not None
    assert len(team) == 3
    assert members(3) == 3
    state, weight = adam_state(0, 1, False, {})
    native.update_rows(state, torch.zeros(0), weight, STEP, team=team)  # nothing to do, and it returns
    team.close()
    team.close()
    assert members(0) == 0
    some = adam_state(8, 1, False, {})[0], torch.zeros(8), None
    with pytest.raises(StateError, match="Team: run after close; open a new one"):
        native.update_rows(*some, STEP, team=team)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="threads=0; at least one is needed"):
        ThreadTeam.open(0)


def test_a_team_that_is_closed_meanwhile_serves_whoever_has_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    team = ThreadTeam.open(2)
    assert team is not None
    lock, closing = team._lock, threading.Thread(target=team.close)

    class Door:
        """The team's lock. Whoever comes out first finds that it is being closed."""

        wait, notify_all, __enter__ = lock.wait, lock.notify_all, lock.__enter__

        def __exit__(self, *_: object) -> None:
            lock.release()
            if closing.ident is None:
                closing.start()
                while team._handle is not None:
                    time.sleep(0.001)

    monkeypatch.setattr(team, "_lock", Door())
    (state, weight), (same, alike) = (adam_state(8, 1, False, {}) for _ in range(2))
    native.update_rows(state, torch.ones(8), weight, STEP, team=team)
    closing.join()
    assert members(0) == 0
    native.update_rows(same, torch.ones(8), alike, STEP)
    assert torch.equal(state.exp_avg, same.exp_avg)


@pytest.mark.parametrize("teamed", [True, False])
def test_a_run_with_and_without_a_team_has_the_same_bits(
    teamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves no thread behind."""
    if not teamed:
        monkeypatch.setattr(library.kernels(), "team", None)

    def trained(offload: zs.Offload) -> list[Tensor]:
        model = models.build("mlp")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        run = zs.shard(model, optimizer, precision="bf16", offload=offload, clip_norm=0.5)
        for step in range(4):
            model(models.MLP.batch(3, seed=step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        run.close()
        return [p.detach().clone() for p in model.parameters()]

    for found, wanted in zip(trained(zs.Offload(threads=3)), trained(zs.Offload(threads=1)), strict=True):
        assert_same_bits(found, wanted)
    assert members(0) == 0
