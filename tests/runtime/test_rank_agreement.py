"""Ranks that differ in model, optimizer or options are refused at shard(), on all with the same text."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import zeroshard as zs
from zeroshard.extend import register_host_update
from zeroshard.testing import ranks

pytestmark = pytest.mark.ranks

Given = tuple[nn.Module, Optimizer | list[Optimizer] | None, dict[str, Any]]


def net(width: int = 3, names: tuple[str, ...] = ("first", "second")) -> nn.Module:
    model = nn.Module()
    for name in names:
        model.add_module(name, nn.Linear(3, width if name == names[-1] else 3))
    return model


def plain(model: nn.Module | None = None, **options: Any) -> Given:
    model = model or net()
    return model, AdamW(model.parameters(), lr=1e-3), options


def with_optimizer(make: Callable[[nn.Module], Optimizer | list[Optimizer]]) -> Given:
    model = net()
    return model, make(model), {}


def own_optimizer(update: str = "") -> Given:
    """A class of the user's, which is registered as one that the host updates, or not."""

    class Own(SGD):
        pass

    if update:
        register_host_update(Own, update)
    return with_optimizer(lambda model: Own(model.parameters(), lr=1e-3))


def with_group(**changes: Any) -> Given:
    model = net()
    groups = [{"params": model.first.parameters()}, {"params": model.second.parameters(), **changes}]
    return model, AdamW(groups, lr=1e-3), {}


def frozen() -> nn.Module:
    model = net()
    model.first.bias.requires_grad_(False)
    return model


def with_buffer(size: int) -> nn.Module:
    model = net()
    model.register_buffer("table", torch.zeros(size))
    return model


def with_buffers(*names: str) -> nn.Module:
    model = net()
    for name in names:
        model.register_buffer(name, torch.zeros(2))
    return model


def unfilled() -> nn.Module:
    with torch.device("meta"):
        return net()


# Name → what the ordinary ranks give, what the last rank gives, and what all of them say.
DIFFERENCES: dict[str, tuple[Callable[[], Given], Callable[[], Given], str]] = {
    "shape": (
        plain, lambda: plain(net(4)),
        "the model: `second.weight` is (3, 3) float32 on {most} and (4, 3) float32 on {last}. "
        "Every rank must build the same model; check code that depends on the rank.",
    ),
    "dtype": (
        plain, lambda: plain(net().to(torch.bfloat16)),
        "the model: `first.weight` is (3, 3) float32 on {most} and (3, 3) bfloat16 on {last}.",
    ),
    "name": (
        plain, lambda: plain(net(names=("first", "other"))),
        "the model: `second.weight` is (3, 3) float32 on {most} and missing on {last}.",
    ),
    "extra parameter": (
        plain, lambda: plain(net(names=("first", "second", "third"))),
        "the model: `third.weight` is missing on {most} and (3, 3) float32 on {last}.",
    ),
    "frozen": (
        plain, lambda: plain(frozen()),
        "the model: `first.bias` is (3,) float32 on {most} and (3,) float32, frozen on {last}.",
    ),
    "buffer": (
        lambda: plain(with_buffer(2)), lambda: plain(with_buffer(3)),
        "the model: buffer `table` is (2,) float32 on {most} and (3,) float32 on {last}.",
    ),
    "meta": (
        plain, lambda: plain(unfilled()),
        "the model: `first.weight` is (3, 3) float32 on {most} and (3, 3) float32, meta on {last}.",
    ),
    "order": (
        plain, lambda: plain(net(names=("second", "first"))),
        "the order of the parameters: it is `first.weight` … `second.bias` (4 parameters, checksum ",
    ),
    "order of buffers": (
        lambda: plain(with_buffers("sin", "cos")), lambda: plain(with_buffers("cos", "sin")),
        "the order of buffers. Every rank must build the same model.",
    ),
    "optimizer": (
        plain, lambda: with_optimizer(lambda m: SGD(m.parameters(), lr=1e-3)),
        "the optimizer: optimizer 0 is AdamW on {most} and SGD on {last}. "
        "Every rank must build the same optimizer; check code that depends on the rank.",
    ),
    "no optimizer": (
        plain, lambda: (net(), None, {}),
        "the optimizer: optimizer 0 is AdamW on {most} and missing on {last}.",
    ),
    "registered update": (
        own_optimizer, lambda: own_optimizer("sgd"),
        "the optimizer: the host's update of optimizer 0 is missing on {most} and SgdRows on {last}.",
    ),
    "learning rate": (
        plain, lambda: with_optimizer(lambda m: AdamW(m.parameters(), lr=0.5)),
        "the optimizer: optimizer 0 group 0: lr is 0.001 on {most} and 0.5 on {last}.",
    ),
    "group": (
        with_group, lambda: with_group(weight_decay=0.5),
        "the optimizer: optimizer 0 group 1: weight_decay is 0.01 on {most} and 0.5 on {last}.",
    ),
    "members of a group": (
        plain, lambda: with_optimizer(lambda m: AdamW(m.first.parameters(), lr=1e-3)),
        "the optimizer: optimizer 0 group 0 is `first.weight` … `second.bias` (4 parameters, checksum ",
    ),
    "stage": (
        plain, lambda: plain(stage=1),
        "the options: stage is 3 on {most} and 1 on {last}. "
        "Every rank must call shard() with the same options.",
    ),
    "units": (
        plain, lambda: plain(units="first"),
        "the options: units is 'auto' on {most} and ('first',) on {last}.",
    ),
    "buckets": (
        plain, lambda: plain(bucket_bytes="1MiB"),
        "the options: bucket_bytes is 26214400 on {most} and 1048576 on {last}.",
    ),
    "precision": (
        plain, lambda: plain(precision="bf16"),
        "the options: precision is None on {most} and Precision(compute='bfloat16'",
    ),
    "codec": (
        lambda: plain(compress=zs.TopK(0.01)), lambda: plain(compress=zs.TopK(0.02)),
        "the options: compress is (('*', TopK(ratio=0.01, ",
    ),
}  # fmt: skip


def shard_with_a_difference(name: str) -> str:
    ordinary, other, _ = DIFFERENCES[name]
    model, optimizer, options = (other if dist.get_rank() == dist.get_world_size() - 1 else ordinary)()
    before = dict(model.named_parameters())
    with pytest.raises(zs.RankError) as caught:
        zs.shard(model, optimizer, **options)
    assert all(p is before[n] for n, p in model.named_parameters())  # nothing was touched
    return str(caught.value)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_is_named_alike_on_all_ranks(name: str) -> None:
    said = ranks(2).run(shard_with_a_difference, name)
    expected = DIFFERENCES[name][2].format(most="rank 0", last="rank 1")
    assert said[0].startswith(f"ranks disagree about {expected}")
    assert said[1] == said[0]


@pytest.mark.parametrize("name", ["shape", "stage"])
def test_the_rank_that_stands_alone_is_told_from_the_others(name: str) -> None:
    said = ranks(4).run(shard_with_a_difference, name)
    expected = DIFFERENCES[name][2].format(most="ranks 0-2", last="rank 3")
    assert said == [said[0]] * 4
    assert said[0].startswith(f"ranks disagree about {expected}")


def asked_for_different_transports() -> str:
    transport = "gloo" if dist.get_rank() == 0 else "shm"
    with pytest.raises(zs.OptionError) as caught:
        zs.shard(net(), transport=transport)  # type: ignore[arg-type]
    return str(caught.value)


def test_different_transports_are_refused_before_the_ranks_can_talk() -> None:
    said = ranks(2).run(asked_for_different_transports)
    assert said == ["ranks ask for different transports: gloo, shm (in rank order)"] * 2


def shard_after_a_refusal() -> float:
    """A refusal leaves the ranks able to try again."""
    shard_with_a_difference("shape")
    model, optimizer, _ = plain()
    run = zs.shard(model, optimizer, stage=2)
    model.first(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    run.close()
    return model.first.weight.sum().item()


def test_ranks_can_try_again() -> None:
    first, second = ranks(2).run(shard_after_a_refusal)
    assert first == second


class Recorder(logging.Handler):
    def __init__(self, into: list[str]) -> None:
        super().__init__()
        self._into = into

    def emit(self, record: logging.LogRecord) -> None:
        self._into.append(record.getMessage())


def values_that_differ() -> tuple[list[float], list[str]]:
    torch.manual_seed(dist.get_rank())
    records: list[str] = []
    handler = Recorder(records)
    zs.api.log.addHandler(handler)
    model, optimizer, _ = plain()
    mine = model.first.weight.sum().item()
    run = zs.shard(model, optimizer)
    run.close()
    zs.api.log.removeHandler(handler)
    return [mine, model.first.weight.sum().item()], records


def orders_that_differ() -> tuple[bool, bool]:
    """The same numbers on all ranks, each in an order of its own; and numbers of sixteen bytes."""
    torch.manual_seed(dist.get_rank())
    model, optimizer, _ = plain()
    model.register_buffer("order", torch.randperm(500).view(5, 100))
    model.register_buffer("phases", torch.randn(7, dtype=torch.complex128))
    zs.shard(model, optimizer).close()
    torch.manual_seed(0)
    plain()
    order, phases = torch.randperm(500).view(5, 100), torch.randn(7, dtype=torch.complex128)
    return torch.equal(model.order, order), torch.equal(model.phases, phases)


def test_an_order_that_differs_between_ranks_is_that_of_rank_0() -> None:
    assert ranks(2).run(orders_that_differ) == [(True, True)] * 2


def test_initial_values_are_those_of_rank_0_and_it_says_so() -> None:
    (first, said), (second, silence) = ranks(2).run(values_that_differ)
    assert first[0] != second[0]
    assert first == [first[0], first[0]]
    assert second[1] == first[0]
    assert said == [
        "initial values differ between ranks (4 tensors, first `first.weight`); rank 0's are used"
    ]
    assert silence == []
