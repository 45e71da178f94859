"""Offload: misuse is told at once, what fails on the host is told in the training thread, nothing hangs."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from offload_loop import batch, make_model

import zeroshard as zs
from zeroshard.errors import ModelError, OptionError, StateError, TierError
from zeroshard.offload import python_executor
from zeroshard.testing import ranks
from zeroshard.tiers import TierCopies

Make = Callable[..., torch.optim.Optimizer]
HOST = zs.Offload(stage_bytes=4096, threads=2)


def offloaded(make: Make = torch.optim.AdamW, **options: Any) -> tuple[Any, torch.optim.Optimizer, zs.Run]:
    model = make_model()
    optimizer = make(model.parameters(), lr=1e-3)
    return model, optimizer, zs.shard(model, optimizer, **{"offload": HOST, "clip_norm": 4.0} | options)


# ---------------------------------------------------------------------- options

SPLIT, CODED = zs.Offload(master="split"), zs.Offload(moments="int8")
ADAMW, SGD, RMSPROP = torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop
AMSGRAD = partial(ADAMW, amsgrad=True)
DISK = zs.Offload("disk", path=".", moments="int8")  # refused before anything is written there
REFUSED: list[tuple[Make, dict[str, Any], str]] = [
    (ADAMW, {"offload": SPLIT}, r"needs bf16 compute weights .* the model's own dtype"),
    (ADAMW, {"offload": SPLIT, "precision": "bf16", "clip_norm": None}, r"needs clip_norm= \(math\.inf"),
    (ADAMW, {"offload": CODED, "clip_norm": None}, r"moments=\"int8\"\) is done by .* needs clip_norm="),
    (ADAMW, {"offload": SPLIT, "precision": "fp16"}, r"fp16 with its loss scaling rules out"),
    (RMSPROP, {"offload": SPLIT, "precision": "bf16"}, r"knows Adam, AdamW and SGD; this run has RMSprop"),
    (SGD, {"offload": CODED}, r"is for Adam and AdamW, and this run has SGD alone"),
    (AMSGRAD, {"offload": CODED}, r"moments=\"int8\"\) and amsgrad=True do not go together"),
    (AMSGRAD, {"offload": DISK}, r"moments=\"int8\"\) and amsgrad=True do not go together"),
    (ADAMW, {"clip_norm": 0.0}, r"clip_norm=0\.0 must be above zero"),
    (ADAMW, {"offload": "host"}, r"offload='host' must be a zs\.Offload"),
]


@pytest.mark.parametrize(("make", "options", "message"), REFUSED)
def test_options_that_cannot_take_effect(make: Make, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        offloaded(make, **options)


OFFLOADS: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": "hots"}, r"Offload\.optimizer='hots' is not one of .* Did you mean \"host\"\?"),
    ({"optimizer": "device"}, r"offloads nothing"),
    ({"optimizer": "device", "moments": "int8", "parameters": "host"}, r"belongs to the host update"),
    ({"optimizer": "device", "parameters": "host", "master": "split"}, r"so the two rest together"),
    ({"stages": 1}, r"Offload\.stages=1 must be a whole number, 2 or more"),
    ({"stages": 2.5}, r"Offload\.stages=2\.5 must be a whole number, 2 or more"),
    ({"threads": 0}, r"Offload\.threads=0 must be a whole number, 1 or more"),
    ({"stage_bytes": 0}, r"Offload\.stage_bytes=0 must be more than zero"),
]


@pytest.mark.parametrize(("given", "message"), OFFLOADS)
def test_an_offload_that_means_nothing(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        zs.Offload(**given)


def test_state_of_two_optimizers() -> None:
    model = torch.nn.Linear(2, 2)
    first, second = torch.optim.AdamW(model.parameters()), torch.optim.SGD([model.bias], lr=0.1)
    with pytest.raises(ModelError, match=r"`bias` is in two optimizers, and with offload= its state rests"):
        zs.shard(model, [first, second], offload=zs.Offload())
    with pytest.raises(ModelError, match=r"the same optimizer twice: list each once"):
        zs.shard(model, [first, first])


def refuse_streaming_at_stage_two() -> str:
    with pytest.raises(OptionError) as caught:
        offloaded(stage=2, offload=zs.Offload(parameters="host"))
    return str(caught.value)


@pytest.mark.ranks
def test_streamed_parameters_need_stage_three() -> None:
    told = ranks(2).run(refuse_streaming_at_stage_two)
    assert told[0] == told[1]
    assert "which stage 2 does not: pass stage=3" in told[0]


# ---------------------------------------------------------------------- calls at the wrong moment


def test_a_second_backward_before_the_step() -> None:
    model, _, run = offloaded()
    losses = [model(batch(step, 0)) for step in range(2)]
    losses[0].backward()
    with pytest.raises(StateError, match=r"a second backward before optimizer\.step\(\).*run\.no_sync\(\)"):
        losses[1].backward()
    run.close()


@pytest.mark.parametrize("use", ["forward", "gathered", "state_dict", "model state_dict", "load"])
def test_nothing_is_read_between_backward_and_step(use: str) -> None:
    """Weights and moments may be old or new then; which, depends on the last norm."""
    model, optimizer, run = offloaded()
    model(batch(0, 0)).backward()
    uses: dict[str, Callable[[], Any]] = {
        "forward": lambda: model(batch(1, 0)),
        "gathered": lambda: run.gathered().__enter__(),
        "state_dict": optimizer.state_dict,
        "model state_dict": model.state_dict,
        "load": lambda: optimizer.load_state_dict({"state": {}, "param_groups": []}),
    }
    with pytest.raises(StateError, match=r"between backward and optimizer\.step.*after the step, or drop"):
        uses[use]()
    optimizer.step()
    run.close()


def test_dropped_gradients_that_cannot_be_taken_back() -> None:
    model, optimizer, run = offloaded(clip_norm=math.inf)
    model(batch(0, 0)).backward()
    with pytest.raises(StateError, match=r"dropped between backward and .*step.*inside run\.no_sync"):
        optimizer.zero_grad()
    optimizer.step()
    run.close()


def test_a_norm_above_the_limit_without_room_to_undo() -> None:
    model, optimizer, run = offloaded(offload=zs.Offload(undo=False, stage_bytes=4096, threads=2))
    model(batch(0, 0)).backward()
    optimizer.step()
    (100.0 * model(batch(1, 0))).backward()
    with pytest.raises(StateError, match=r"the gradient norm .* exceeds clip_norm=4\.0 .* \(undo=False\)"):
        optimizer.step()
    with pytest.raises(StateError, match="undo=True"):
        run.close()
    assert not zeroshard_threads()


# ---------------------------------------------------------------------- failures on the host


def zeroshard_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("zeroshard")]


class Broken(RuntimeError):
    pass


def after(calls: int, then: Callable[..., Any]) -> Callable[..., Any]:
    """`then` for some calls, and an error ever after."""
    counter = iter(range(10**6))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(counter) >= calls:
            raise Broken("the roof is on fire")
        return then(*args, **kwargs)

    return call


BREAKS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "update": (python_executor, "update_rows", python_executor.update_rows),
    "copy out": (TierCopies, "out", TierCopies.out),
    "copy back": (TierCopies, "back", TierCopies.back),
}


@pytest.mark.wide(2)
@pytest.mark.parametrize("clip", [math.inf, 1e-3], ids=["early", "late"])
@pytest.mark.parametrize("calls", [0, 5, 40])
@pytest.mark.parametrize("what", BREAKS)
def test_a_failure_on_the_host_is_raised_in_the_training_thread(
    what: str, calls: int, clip: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, function = BREAKS[what]
    few = zs.Offload(stages=2, stage_bytes=4096, threads=2)
    monkeypatch.setattr(TierCopies, "native", False)  # transfer workers in C have a test of their own
    model, optimizer, run = offloaded(clip_norm=clip, offload=few)

    def train() -> None:
        for step in range(20):
            model(batch(step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()

    with patch.object(owner, name, after(calls, function)):
        with pytest.raises(TierError, match=r"update of `[\w.]+` … `[\w.]+` failed: Broken: ") as caught:
            train()
        assert isinstance(caught.value.__cause__, Broken)
        with pytest.raises(TierError, match="the roof is on fire"):
            run.close()
    assert not zeroshard_threads(), "close ends the threads all the same"


def fail_on_rank_one() -> str:
    with patch.object(TierCopies, "native", False):
        model, optimizer, run = offloaded(stage=3)
    step = 0
    try:
        with patch.object(
            python_executor, "update_rows", after(30 if run.rank else 10**6, python_executor.update_rows)
        ):
            for step in range(20):
                model(batch(step, run.rank)).backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        assert step < 19
    return "not reached"


@pytest.mark.ranks
def test_a_failure_on_one_of_two_ranks_ends_both() -> None:
    told = ranks(2).attempt(fail_on_rank_one)
    assert told[1].kind == "TierError"
    assert "the roof is on fire" in told[1].message
    assert told[0].kind == "RankError"


def test_threads_end_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    before = zeroshard_threads()
    monkeypatch.setattr(TierCopies, "native", False)
    model, optimizer, run = offloaded()
    assert len(zeroshard_threads()) == len(before) + python_executor.TRANSFER_WORKERS
    model(batch(0, 0)).backward()
    optimizer.step()
    run.close()
    run.close()
    assert zeroshard_threads() == before


SCRIPT = """
import sys, time
sys.path.insert(0, {tests!r})
import torch, zeroshard as zs
from offload_loop import batch, make_model, paced
model = make_model()
optimizer = torch.optim.AdamW(model.parameters())
with paced("delayed"):
    run = zs.shard(model, optimizer, offload=zs.Offload(stage_bytes=4096, threads=2), clip_norm=1e-3)
    model(batch(0, 0)).backward()
    optimizer.step()
    {last}
"""


@pytest.mark.ranks
@pytest.mark.parametrize("last", ["pass", "raise KeyError('mine')"])
def test_an_interpreter_that_never_closes_ends(last: str) -> None:
    """With updates under way. Daemon threads; nothing to wait for."""
    script = SCRIPT.format(tests=str(Path(__file__).parents[1] / "support"), last=last)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    told = [line for line in done.stderr.splitlines() if line.strip()]
    want = (0, []) if last == "pass" else (1, ["KeyError: 'mine'"])
    assert (done.returncode, told[-1:]) == want, done.stderr


# ---------------------------------------------------------------------- gradients from elsewhere


def test_a_penalty_on_the_weights_would_be_missed_by_the_host() -> None:
    model, optimizer, run = offloaded()
    penalty = next(model.parameters()).square().sum()
    (model(batch(0, 0)) + penalty).backward()
    with pytest.raises(StateError, match=r"a gradient came to `.*` from outside of the model's forward"):
        optimizer.step()
    optimizer.zero_grad()
    model(batch(0, 0)).backward()
    optimizer.step()
    run.close()


def test_a_parameter_without_elements_may_be_used_anywhere() -> None:
    model = torch.nn.Linear(4, 4)
    model.register_parameter("empty", torch.nn.Parameter(torch.empty(0, 3)))
    optimizer = torch.optim.AdamW(model.parameters())
    run = zs.shard(model, optimizer, offload=zs.Offload(), clip_norm=2.0)
    for _ in range(3):
        (model(torch.ones(2, 4)).sum() + model.empty.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert run.stats().updates["early"] + run.stats().updates["late"] == 3
    run.close()
    assert model.empty.shape == (0, 3)


# ---------------------------------------------------------------------- state that is changed by hand


def cleared(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def begun_anew(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])


def counted_anew(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["step"].fill_(1.0)


@pytest.mark.parametrize("change", [cleared, begun_anew, counted_anew])
def test_state_that_the_host_would_not_look_at(change: Callable[[torch.optim.Optimizer], None]) -> None:
    model, optimizer, run = offloaded()
    for step in range(2):
        model(batch(step, 0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    kept = optimizer.state_dict()
    change(optimizer)
    model(batch(2, 0)).sum().backward()
    with pytest.raises(StateError, match=r"state of `.*` was replaced, or its step set, by hand"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(kept)
    model(batch(2, 0)).sum().backward()
    optimizer.step()
    run.close()
