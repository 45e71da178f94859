"""Misuse is loud after `shard()`, too: what a loop may do to a sharded model, and what all ranks are told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from misused import Net, Trained, backward, trained
from models import whole_weights
from torch import nn
from torch.distributed.tensor import distribute_tensor
from torch.optim import AdamW

import zeroshard as zs
from zeroshard.testing import ranks


@pytest.fixture(params=[0, 1, 2, 3])
def net(request: pytest.FixtureRequest) -> Iterator[Trained]:
    model, optimizer, run = trained(request.param)
    yield model, optimizer, run
    run.close()


@pytest.mark.parametrize("move", [
    lambda m: m.to(torch.float16), lambda m: m.half(), lambda m: m.double(), lambda m: m.share_memory(),
    lambda m: m.cuda(), lambda m: m.to("meta"), lambda m: m.blocks.bfloat16(),
    lambda m: m.blocks[0].to(torch.float64),
    lambda m: m.blocks[0][0].to_empty(device="cpu"),
])  # fmt: skip
def test_moving_or_casting_a_sharded_model(net: Trained, move: Any) -> None:
    with pytest.raises(zs.StateError, match=r"like change nothing after zs\.shard\(\), and `.*weight` of"):
        move(net[0])
    backward(net[0])


def test_sharding_twice(net: Trained) -> None:
    model, _, run = net
    with pytest.raises(zs.ModelError, match=r"Net, or a part of it, is sharded already\. Close the earlier"):
        zs.shard(model)
    with pytest.raises(zs.ModelError, match=r"Linear, or a part of it, is sharded already"):
        zs.shard(model.blocks[0][0])
    with pytest.raises(
        zs.ModelError, match=r"Sequential, or a part of it, is .* share a part are sharded together"
    ):
        zs.shard(nn.Sequential(model, nn.Linear(3, 3)))
    run.close()
    zs.shard(model).close()


def test_step_inside_no_sync(net: Trained) -> None:
    model, optimizer, run = net
    said = r"optimizer\.step\(\) inside run\.no_sync\(\): .* Leave the block before the last micro-batch"
    with run.no_sync():
        backward(model)
        with pytest.raises(zs.StateError, match=said):
            optimizer.step()
    backward(model)
    optimizer.step()


def test_step_after_accumulation_that_was_never_synchronised(net: Trained) -> None:
    model, optimizer, run = net
    with run.no_sync():
        backward(model)
    said = r"gradients accumulated under run\.no_sync\(\) were never synchronised"
    with pytest.raises(zs.StateError, match=said):
        optimizer.step()
    optimizer.zero_grad()  # drops them, and all is well
    backward(model)
    optimizer.step()


@pytest.mark.parametrize("how", ["assigned", "gathered", "functional"])
def test_a_forward_with_parameters_that_are_not_ours(net: Trained, how: str) -> None:
    """It would compute with others than those that stand in the model, without a word."""
    model, optimizer, run = net
    x, kept = torch.ones(2, 3), dict(model.named_parameters())
    zeros = {name: torch.zeros(p.shape) for name, p in kept.items()}
    if how == "assigned":
        model.blocks[1][0].weight = nn.Parameter(zeros["blocks.1.0.weight"])
    said = r"`blocks\.[01]\.0\.weight` in the model is not what zs\.shard\(\) put there, .* run\.gathered"
    with run.gathered(write=True) if how == "gathered" else nullcontext():  # noqa: SIM117 - raised inside
        with pytest.raises(zs.StateError, match=said):
            torch.func.functional_call(model, zeros, x) if how == "functional" else model(x)
    for name, sharded_param in kept.items():
        model.get_submodule(name.rpartition(".")[0])._parameters[name.rpartition(".")[2]] = sharded_param
    backward(model)
    optimizer.step()


def test_loading_a_state_dict_of_the_wrong_shape(net: Trained) -> None:
    model, _, run = net
    before = whole_weights(run)
    state = {name: torch.zeros_like(value) for name, value in before.items()}
    state["blocks.1.0.weight"] = torch.zeros(3, 4)
    said = r"`blocks\.1\.0\.weight` is \(3, 4\) in the given state and \(3, 3\) in the model\. Nothing was"
    with pytest.raises(zs.ModelError, match=said):
        model.load_state_dict(state)
    with run.gathered() as whole:
        assert all(torch.equal(p, before[name]) for name, p in whole.items())


def test_loading_a_state_dict_with_other_names(net: Trained) -> None:
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"blocks\.0\.0\.weight\""):
        net[0].load_state_dict({"other": torch.zeros(3, 3)})


def test_use_after_close(net: Trained) -> None:
    model, optimizer, run = net
    run.close()
    for use in (run.publish, run.gathered().__enter__, run.kept_full().__enter__):
        with pytest.raises(zs.StateError, match=r"this run is closed; call zs\.shard\(\) again"):
            use()
    assert repr(run) == "<zeroshard.Run Net: closed>"
    backward(model)  # model and optimizer are plain again
    optimizer.step()


def set_a_whole_gradient(stage: Any) -> str:
    model, whole = nn.Linear(4, 5), torch.ones(5, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    run = zs.shard(model, optimizer, stage=stage)
    before = model.weight.full_tensor().detach()  # type: ignore[operator]
    model(torch.ones(2, 4)).sum().backward()
    model.weight.grad = whole
    with pytest.raises(zs.StateError) as caught:
        optimizer.step()
    optimizer.zero_grad()
    mesh, rows = model.weight.device_mesh, model.weight.placements
    model.weight.grad = distribute_tensor(whole, mesh, rows)  # type: ignore[arg-type]
    optimizer.step()
    assert torch.equal(model.weight.full_tensor(), before - 1)  # type: ignore[operator]
    run.close()
    return str(caught.value)


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_whole_gradient_where_rows_belong(stage: int) -> None:
    said = (
        "`weight`.grad is a plain tensor of shape (5, 4), and a gradient here has the rows of its rank: set"
    )
    assert all(text.startswith(said) for text in ranks(2).run(set_a_whole_gradient, stage))


# ---------------------------------------------------------------------- on several ranks


def misused(stage: int) -> list[str]:
    """What two ranks are told, one thing after another; each leaves the run as it was."""
    model, optimizer, run = trained(stage)
    wrong = {name: torch.zeros(7) for name in model.state_dict()}
    stepped = Net()
    stale = AdamW(stepped.parameters())
    backward(stepped)
    stale.step()

    def inside() -> None:
        with run.no_sync():
            backward(model)
            optimizer.step()

    told = []
    for use in (
        lambda: model.half(),
        lambda: model.blocks[0].to(torch.float64),
        lambda: model.load_state_dict(wrong),
        inside,
        optimizer.step,
        lambda: zs.shard(Net(), optimizer),
        lambda: zs.shard(stepped, stale),
        lambda: zs.shard(Net(), units="block.*"),
        lambda: zs.shard(Net(), units="none", recompute=True),
    ):
        with pytest.raises(zs.ZeroShardError) as caught:
            use()
        told.append(str(caught.value))
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
    run.close()
    return told


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_rank_is_told_the_same(stage: int) -> None:
    first, second = ranks(2).run(misused, stage)
    assert second == first
    for text, words in zip(first, (
        "like change nothing after zs.shard()", "like change nothing after zs.shard()",
        "is (7,) in the given state",
        "optimizer.step() inside run.no_sync()", "were never synchronised", "4 of the 4 parameters of AdamW",
        "AdamW has stepped already", 'unit pattern "block.*" matches none', "recompute=True recomputes units",
    ), strict=True):  # fmt: skip
        assert words in text
    assert 'Did you mean "blocks.*" (2 modules)?' in first[7]
