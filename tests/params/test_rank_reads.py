"""Ranks that read different things off sharded tensors are told so, on all ranks, before torch mixes them up
or hangs; those that read the same are left alone, however they go about it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode

import zeroshard as zs
from zeroshard.errors import RankError
from zeroshard.params import rank_reads
from zeroshard.testing import ranks

KINDS = ["shm", "gloo"]
CLIPPED = r"norm of the gradient of `0\.weight` … the gradient of `2\.bias` \(6 tensors, [0-9a-f]{8}\)"


class Trained:
    """A model that has gradients, and what a loop may do with them."""

    def __init__(self, transport: str = "shm", stage: int = 3) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.run = zs.shard(self.model, self.optimizer, stage=stage, transport=transport)
        self.model(torch.ones(2, 4)).sum().backward()
        self.ps = list(self.model.parameters())

    def clip(self) -> float:
        return float(nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))

    def unscale(self) -> None:
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(1))
        scaler.unscale_(self.optimizer)

    def state(self, key: str) -> torch.Tensor:
        self.optimizer.step()
        return self.optimizer.state_dict()["state"][0][key]


# What rank 0 does, what the others do, and how both are told.
APART: dict[str, tuple[Callable[[Trained], object], Callable[[Trained], object], str, str]] = {
    "a clip and a gather": (
        Trained.clip,
        lambda t: t.ps[0].full_tensor(),
        CLIPPED,
        r"full_tensor of `0\.weight`",
    ),
    "norms": (
        lambda t: t.ps[0].detach().norm().item(),
        lambda t: t.ps[2].detach().norm().item(),
        r"norm of `0\.weight`",
        r"norm of `1\.weight`",
    ),
    "a norm and a sum": (
        lambda t: float(t.ps[0].detach().norm()),
        lambda t: float(t.ps[0].detach().sum()),
        r"norm of `0\.weight`",
        r"sum of `0\.weight`",
    ),
    "a parameter and its gradient": (
        lambda t: float(t.ps[0].detach().abs().max()),
        lambda t: float(t.ps[0].grad.abs().max()),
        r"max of `0\.weight`",
        r"max of the gradient of `0\.weight`",
    ),
    "gathers": (
        lambda t: t.ps[0].full_tensor(),
        lambda t: t.ps[1].redistribute(placements=[Replicate()]),
        r"full_tensor of `0\.weight`",
        r"full_tensor of `0\.bias`",
    ),
    "unscaling and a clip": (Trained.unscale, Trained.clip, "unscale_ of the gradient of", CLIPPED),
    "lists": (
        lambda t: nn.utils.get_total_norm(t.ps[:4]),
        lambda t: nn.utils.get_total_norm([*t.ps[:2], *t.ps[4:5], *t.ps[3:4]]),
        r"norm of `0\.weight` … `1\.bias` \(4 tensors, ",
        r"norm of `0\.weight` … `1\.bias` \(4 tensors, ",
    ),
    "rows": (
        lambda t: t.ps[0].detach()[0],
        lambda t: t.ps[2].detach()[0],
        r"select of `0\.weight`",
        r"select of `1\.weight`",
    ),
    "state": (
        lambda t: t.state("exp_avg").norm().item(),
        lambda t: t.state("exp_avg_sq").norm().item(),
        r"norm of exp_avg of `0\.weight`",
        r"norm of exp_avg_sq of `0\.weight`",
    ),
    "a clip and a gathered block": (
        Trained.clip,
        lambda t: t.run.gathered().__enter__(),
        CLIPPED,
        r"new buffers, 'collect' first",
    ),
}


def apart(case: str, transport: str) -> str:
    trained = Trained(transport)
    first, others, *_ = APART[case]
    with pytest.raises(RankError) as caught:
        (others if dist.get_rank() else first)(trained)
    return str(caught.value)


@pytest.mark.ranks
@pytest.mark.parametrize("transport", KINDS)
@pytest.mark.parametrize("case", APART)
def test_ranks_that_read_different_things_are_told(case: str, transport: str) -> None:
    text, same = ranks(2).run(apart, case, transport)
    assert same == text
    one, other = APART[case][2:]
    placed = r".* \(called at test_rank_reads\.py:\d+\)"
    found = re.search(rf"rank 0 waits for all ranks to compute {one}{placed}; rank 1 waits for (.*)\.", text)
    assert found, text
    assert re.match(rf"(all ranks to compute )?{other}", found[1]), text
    assert "Every rank must run the same program" in text


def in_other_ways() -> list[object]:
    """The same on both ranks, by other means, and what one rank does alone."""
    trained, first = Trained(), dist.get_rank() == 0
    p, grad = trained.ps[0].detach(), trained.ps[0].grad
    if first:
        p.to_local().norm()
        grad = grad.nan_to_num()
        assert p.detach().mul(2).to_local().shape == (2, 4)
    told: list[object] = [
        float(grad.norm() if first else torch.linalg.vector_norm(grad)),
        float(p.norm()) if first else float(p.norm().full_tensor()),
    ]
    norm = nn.utils.clip_grad_norm_(trained.ps, 1.0, foreach=first)
    if first:
        assert float(norm) > 0
        assert type(norm) is torch.Tensor
    if first:  # without a name from now on
        grad = trained.ps[0].grad
        trained.ps[0].grad = DTensor.from_local(grad.to_local(), grad.device_mesh, grad.placements)
    trained.clip()
    told += [torch.equal(p, p), int(p.argmax()), p.detach()[0].to_local().tolist()]
    grads = [q.grad for q in trained.ps]
    trained.run.close()
    told.append(float(grads[1].norm()))  # torch's own affair
    return told


@pytest.mark.ranks
def test_ranks_that_read_the_same_are_left_alone() -> None:
    first, other = ranks(2).run(in_other_ways)
    assert other[:2] == pytest.approx(first[:2])
    assert other[2:] == first[2:]


class Counted(TorchDispatchMode):
    """How often torch communicates."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        self.count += any(
            word in str(func) for word in ("all_reduce.", "all_gather_into_tensor.", "allreduce_")
        )
        return func(*args, **(kwargs or {}))


def communicated() -> dict[str, tuple[int, int]]:
    """How often torch communicated, and how often ranks compared."""
    trained, counted, seen = Trained(), list[str](), dict[str, tuple[int, int]]()
    transport = trained.run._runtime.transport
    compare = transport.compare
    transport.compare = lambda what, place: (counted.append(what), compare(what, place))[1]
    p = trained.ps[0].detach()
    steps: dict[str, Callable[[], object]] = {
        "clip": lambda: nn.utils.clip_grad_norm_(trained.ps, 1.0),
        "unscale": trained.unscale,
        "norm": lambda: p.norm().item(),
        "whole": lambda: p.full_tensor(),
        "row": lambda: p[0],
        "equal": lambda: torch.equal(p, p),
        "product": lambda: p @ p,
        "argmax": lambda: p.argmax(),
        "local": lambda: (p * 2 + p).clamp_(0).to_local(),
        "pending": lambda: p.sum() * 2,
        "chunks": lambda: [part.to_local() for part in p.detach().chunk(2, dim=1)],
    }
    for name, step in steps.items():
        counted.clear()
        with Counted() as mode:
            step()
        seen[name] = mode.count, len(counted)
    trained.run.close()
    return seen


@pytest.mark.ranks
def test_ranks_compare_once_where_torch_communicates_and_nowhere_else() -> None:
    for seen in ranks(2).run(communicated):
        assert {name: min(count, 1) for name, (count, _) in seen.items()} == {
            name: compared for name, (_, compared) in seen.items()
        }, seen
        assert seen["clip"] == (1, 1)
        assert seen["local"] == (0, 0)


def test_the_names_of_many_are_bounded() -> None:
    runs = rank_reads.RankReads()
    one = rank_reads.ReadSubject(runs, ("`a`",))
    many = one
    for _ in range(3000):  # deeper than Python's stack
        joined = rank_reads.joined([many, one])
        assert joined is not None
        many = joined
    assert many.text("norm").startswith("norm of `a` … `a` (3001 tensors, ")
    for _ in range(7):
        joined = rank_reads.joined([many] * 4)
        assert joined is not None
        many = joined
    assert many.names == ()
    assert many.text("norm") == ""
    assert rank_reads.joined([None]) is None
    mixed = rank_reads.joined([one, None])
    assert mixed is not None
    assert mixed.names == ()
