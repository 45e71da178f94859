"""The harness itself: a failure is told with its cause, a hang ends, a pool heals, and nothing outlives its
owner.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard as zs
from zeroshard.testing import (
    PeakBytes,
    RankFailure,
    Ranks,
    assert_bytes,
    assert_losses,
    assert_same_bits,
    run_threads,
    tensor_bytes,
    ulps,
)

ranks_mark = pytest.mark.ranks


def rank_and_pid() -> tuple[int, int]:
    return dist.get_rank(), os.getpid()


def fail_alone() -> None:
    """Rank 1 raises while rank 0 waits for its parameters."""
    model = nn.Linear(3, 2)
    zs.shard(model, torch.optim.SGD(model.parameters()), stage=3)
    if dist.get_rank() == 1:
        raise ValueError("the cause")
    model(torch.ones(1, 3))


def sleep_on_one() -> None:
    if dist.get_rank() == 0:
        time.sleep(1000)


def end(code: int) -> None:
    os._exit(code)


def warn() -> None:
    import warnings

    warnings.warn("something is old", stacklevel=1)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone(pids: list[int], within: float = 120.0) -> bool:
    deadline = time.monotonic() + within
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@ranks_mark
def test_a_pool_stays_until_a_rank_fails_and_then_heals() -> None:
    pool = Ranks(2)
    first = pool.run(rank_and_pid)
    assert [rank for rank, _ in first] == [0, 1]
    assert pool.run(rank_and_pid) == first
    with pytest.raises(
        RankFailure, match=r"(?s)fail_alone failed on 2 of 2.*RankError: rank 1 failed: ValueError: the cause"
    ):
        pool.run(fail_alone)
    assert gone([pid for _, pid in first])
    second = pool.run(rank_and_pid)
    assert {pid for _, pid in first}.isdisjoint(pid for _, pid in second)
    pool.stop()
    assert gone([pid for _, pid in second])


@ranks_mark
def test_outcomes() -> None:
    pool = Ranks(2)
    pool.run(rank_and_pid)
    for seconds in (2.0, 20.0, 200.0):  # in which rank 1 must answer
        pool.run(rank_and_pid)
        first, second = pool.attempt(sleep_on_one, timeout=seconds)
        if second.kind is None:
            break
    assert first.kind == "TimeoutError"
    assert "in sleep_on_one" in first.message, "it says where the rank was"
    assert second.kind is None
    dead = pool.attempt(end, 7)
    assert [(outcome.kind, outcome.message) for outcome in dead] == [
        ("ProcessEnded", "the process ended with exit code 7")
    ] * 2
    assert [outcome.kind for outcome in pool.attempt(warn)] == ["UserWarning"] * 2
    pool.stop()


SCRIPT = """
import sys, time
sys.path.insert(0, {here!r})
if __name__ == "__main__":
    import test_harness
    from zeroshard.testing import Ranks
    pool = Ranks(2)
    print(*(pid for _, pid in pool.run(test_harness.rank_and_pid)), flush=True)
    pool.attempt(test_harness.sleep_on_one)
"""


@ranks_mark
def test_a_killed_owner_leaves_no_rank_behind(tmp_path: Path) -> None:
    """Even in the middle of a call."""
    script = tmp_path / "owner.py"
    script.write_text(SCRIPT.format(here=str(Path(__file__).parent)))
    owner = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert [alive(pid) for pid in pids] == [True, True]
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    assert gone(pids)


def sum_over_ranks(fail: bool) -> float:
    if fail and dist.get_rank() == 1:
        raise ValueError("the cause")
    total = torch.ones(1)
    dist.all_reduce(total)
    return float(total)


@pytest.mark.threads
def test_threads() -> None:
    assert run_threads(3, sum_over_ranks, False) == [3.0, 3.0, 3.0]
    hook = sys.excepthook
    with pytest.raises(
        RankFailure, match=r"(?s)sum_over_ranks failed on 3 of 3 ranks.*ValueError: the cause"
    ):
        run_threads(3, sum_over_ranks, True)
    assert run_threads(2, sum_over_ranks, False) == [2.0, 2.0]
    assert not dist.is_initialized()
    assert sys.excepthook is hook


def test_a_torch_without_groups_of_threads_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.testing._internal.distributed import multi_threaded_pg

    monkeypatch.delattr(multi_threaded_pg.ThreadLocalWorld, "comms", raising=False)
    with pytest.raises(zs.StateError, match="has no groups of threads that can be left: take torch"):
        run_threads(2, sum_over_ranks, False)


def test_ulps() -> None:
    one = torch.tensor([1.0, -1.0, 0.0])
    assert ulps(one, one.clone()) == 0
    assert ulps(one, torch.nextafter(one, torch.tensor(2.0))) == 1
    assert ulps(torch.tensor([0.0]), torch.tensor([-0.0])) == 0
    assert ulps(torch.tensor([1e-45]), torch.tensor([-1e-45])) == 2, "the zero lies between"
    assert (
        ulps(torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.0078125], dtype=torch.bfloat16)) == 1
    )
    with pytest.raises(AssertionError, match="cannot be compared"):
        ulps(one, one.double())


def test_comparisons_say_what_differs() -> None:
    a, b = {"w": torch.ones(2), "b": torch.zeros(1)}, {"w": torch.tensor([1.0, 1.5]), "b": torch.zeros(1)}
    assert_same_bits(a, dict(a))
    with pytest.raises(
        AssertionError, match=r"1 of 2 tensors differ by more than 0 ulps: `w` by 4194304 ulps, 0\.5 in value"
    ):
        assert_same_bits(a, b)
    with pytest.raises(AssertionError, match="names on one side only: b"):
        assert_same_bits(a, {"w": a["w"]})
    assert assert_losses([1.0, 2.0], [1.0, 2.002], 2e-3) == pytest.approx(1e-3, rel=0.01)
    with pytest.raises(AssertionError, match=r"loss 1 is 2\.0 and should be 2\.2"):
        assert_losses([1.0, 2.0], [1.0, 2.2], 1e-3)
    with pytest.raises(AssertionError, match="loss 0 is nan"):
        assert_losses([float("nan")], [1.0], 1e-3)
    with pytest.raises(AssertionError, match="cannot be compared"):
        assert_losses([], [], 1.0)
    with pytest.raises(
        AssertionError, match=r"moments: 110 bytes, expected 100 within 5\.0%, off by \+10\.00%"
    ):
        assert_bytes(110, 100, 0.05, "moments")


def test_bytes_are_counted_once() -> None:
    before, _ = tensor_bytes()
    whole = torch.zeros(1000)
    parts = [whole[:10], whole[500:], whole.view(10, 100)]
    after, _ = tensor_bytes()
    assert after - before == 4000
    assert len(parts) == 3


def test_peak_counts_what_operations_make() -> None:
    held = torch.ones(1000)
    with PeakBytes() as peak:
        held.add_(1.0)
        held.view(10, 100).mul_(2.0)
        one = held + 1.0
        del one
        two = held + 2.0
        three = two * 2.0
        del two
    assert (peak.most, peak.now) == (8000, 4000)
    assert three.numel() == 1000
