"""What torch's own records say about ranks that are all inside it."""

from __future__ import annotations

import pytest

from zeroshard.comm.diagnosis import stacks
from zeroshard.comm.diagnosis.stacks import Started, differ, named

SAME: dict[str, list[Started]] = {
    "nothing is recorded": [{}, {}],
    "all in one": [{"0": [5, "all_reduce of [[3]]"]}] * 3,
    "one is ahead": [{"0": [5, "broadcast"]}, {"0": [6, "all_reduce of [[3]]"]}],
    "one is ahead in both groups": [{"0": [5, "a"], "1": [2, "b"]}, {"0": [6, "c"], "1": [3, "d"]}],
    "one is ahead in one of two groups": [{"0": [5, "a"], "1": [2, "b"]}, {"0": [5, "a"], "1": [3, "d"]}],
    "groups that others are not in": [{"0": [5, "a"], "1": [2, "b"]}, {"0": [5, "a"], "2": [9, "c"]}],
}
APART: dict[str, list[Started]] = {
    "another operation": [{"0": [5, "all_gather"]}, {"0": [5, "all_gather"]}, {"0": [5, "barrier"]}],
    "another size": [{"0": [5, "all_reduce of [[3]]"]}, {"0": [5, "all_reduce of [[4]]"]}],
    "another group": [{"0": [5, "a"], "1": [2, "b"]}, {"0": [4, "a"], "1": [3, "b"]}],
    "another group, of three": [
        {"0": [5, "a"], "1": [2, "b"]},
        {"0": [5, "a"], "1": [3, "c"]},
        {"0": [6, "d"], "1": [2, "b"]},
    ],
}


@pytest.mark.parametrize("case", SAME)
def test_what_may_be_the_same_is_left_alone(case: str) -> None:
    assert not differ(SAME[case])


@pytest.mark.parametrize("case", APART)
def test_what_cannot_be_the_same_is_a_fact(case: str) -> None:
    assert differ(APART[case])
    assert differ(APART[case][::-1])


def test_a_wait_is_named_by_what_was_started_last() -> None:
    one, at = {"0": [5, "all_gather"]}, " (called at train.py:7)"
    several = {"1": [9, "barrier"], **one}
    assert named(f"torch.distributed.wait_tensor{at}", one) == f"torch.distributed's all_gather{at}"
    assert named("a collective of torch", one) == "torch.distributed's all_gather"
    assert named(f"torch.distributed.all_reduce{at}", one) == f"torch.distributed.all_reduce{at}"
    assert named(f"torch.distributed.scatter{at}", several) == f"torch.distributed.scatter in group 0{at}"
    assert named("a collective of torch", {}) == "a collective of torch"


def test_a_torch_without_records_or_with_others_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = stacks.torch._C._distributed_c10d
    for told in ("not JSON", "[]", '{"entries": [{"is_p2p": false}]}', "{}"):
        monkeypatch.setattr(inside, "_dump_fr_trace_json", lambda told=told: told)
        assert stacks.started() == {}
    monkeypatch.delattr(inside, "_dump_fr_trace_json")
    assert stacks.started() == {}
