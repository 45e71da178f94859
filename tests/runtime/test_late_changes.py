"""What comes after shard(): groups that are added, parameters that are thawed, references out of date."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_param_kinds import Stack, four, squared
from torch import Tensor, nn
from trained_twice import STAGES, Case, Training, in_float64, plain, plain_turn, same_tensors

import zeroshard as zs
from zeroshard.testing import ranks

pytestmark = pytest.mark.ranks
WORLD = 2


def added_group(stage: int | None, parts: list[int]) -> tuple[dict[str, Tensor], list[int]]:
    """The head is trained first; then the blocks join, at another rate."""
    model = in_float64(Stack)
    optimizer = torch.optim.AdamW(model.last.parameters(), lr=1e-2)
    run = None if stage is None else zs.shard(model, optimizer, stage=stage)
    for step in range(5):
        if step == 2:
            optimizer.add_param_group({"params": list(model.blocks.parameters()), "lr": 1e-3})
        torch.stack([squared(model, four(step, part)) for part in parts]).mean().backward()
        optimizer.step()
        model.zero_grad()
    if run is not None:
        run.close()
    state = optimizer.state_dict()["state"]
    return {n: p.detach() for n, p in model.named_parameters()}, sorted(state)


def added_group_on_rank(stage: int) -> tuple[dict[str, Tensor], list[int]]:
    return added_group(stage, [dist.get_rank()])


@pytest.mark.parametrize("stage", STAGES)
def test_groups_that_are_added_after_shard(stage: int) -> None:
    expected, states = added_group(None, list(range(WORLD)))
    for rank, (got, kept) in enumerate(ranks(WORLD).run(added_group_on_rank, stage)):
        same_tensors(got, expected, 1e-9, f"on rank {rank}")
        assert kept == states  # closed, the optimizer has the state of both groups


def added_to_one_that_needs_whole_tensors() -> None:
    model = Stack()
    optimizer = torch.optim.Adafactor(model.last.parameters())
    zs.shard(model, optimizer, stage=2)
    said = r"Adafactor needs whole tensors, and `first.weight` was divided by rows\. Give it the parameter"
    with pytest.raises(zs.ModelError, match=said):
        optimizer.add_param_group({"params": [model.first.weight]})
    for kind in (torch.optim.Adafactor, torch.optim.AdamW):
        model = Stack()
        optimizer = kind(model.last.parameters())
        run = zs.shard(model, optimizer, stage=2, split="whole")
        optimizer.add_param_group({"params": [model.first.weight]})
        squared(model, four(0, 0).float()).backward()
        optimizer.step()
        with run.gathered("first.weight") as whole:
            assert not torch.equal(whole["first.weight"], Stack().first.weight)


def test_groups_of_an_optimizer_that_needs_whole_tensors_must_be_there_at_shard() -> None:
    ranks(WORLD).run(added_to_one_that_needs_whole_tensors)


def test_groups_whose_parameters_have_no_master() -> None:
    """With offload no step reaches the fp32 values of what no optimizer had; an update of the bf16 weight
    would lose most of itself in rounding."""
    model = Stack()
    optimizer = torch.optim.AdamW(model.last.parameters())
    run = zs.shard(model, optimizer, precision="bf16", offload=zs.Offload())
    said = r"`first.weight` was in no optimizer when .* has no master that an update could reach\. Give"
    with pytest.raises(zs.ModelError, match=said):
        optimizer.add_param_group({"params": model.first.parameters()})
    assert len(optimizer.param_groups) == 1
    with run.gathered() as whole:
        assert {p.dtype for p in whole.values()} == {torch.float32}
    run.close()
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def thawed(training: Training, step: int) -> None:
    """Frozen after shard(), and thawed block by block."""
    for number, block in enumerate(training.model.blocks):
        block.requires_grad_(step >= 2 * number)
    plain_turn(training, step)


CASES = {"thawed": Case(Stack, four, squared, turn=thawed)}


def thaw(stage: int) -> dict[str, Tensor]:
    training = Training(CASES["thawed"], [dist.get_rank()], {"stage": stage})
    for step in range(6):
        thawed(training, step)
    assert training.run is not None
    training.run.close()
    return {n: p.detach() for n, p in training.model.named_parameters()}


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_frozen_after_shard_can_be_thawed(stage: int) -> None:
    expected = plain(CASES["thawed"], WORLD).params
    for rank, got in enumerate(ranks(WORLD).run(thaw, stage)):
        same_tensors(got, expected, 1e-9, f"on rank {rank}")


def thaw_what_was_frozen_before(stage: int) -> None:
    model = in_float64(Stack)
    model.blocks[1].requires_grad_(False)
    run = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=stage)
    squared(model, four(0, run.rank)).backward()
    model.blocks[1].requires_grad_(True)
    said = r"`blocks.1.norm.weight` was frozen when zs.shard\(\) was called, so its gradient has no place"
    with pytest.raises(zs.StateError, match=said):
        model(four(1, run.rank))


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_frozen_before_shard_cannot_be_thawed(stage: int) -> None:
    ranks(WORLD).run(thaw_what_was_frozen_before, stage)
    thaw_what_was_frozen_before(stage)


def use_out_of_date(stage: int) -> None:
    """A list of parameters made before shard(): used in silence, it would clip nothing."""
    model = in_float64(Stack)
    before = list(model.parameters())
    forgotten = torch.optim.SGD(model.last.parameters(), lr=0.1)
    run = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=stage)
    squared(model, four(0, run.rank)).backward()
    uses: list[Any] = [
        lambda: nn.utils.clip_grad_norm_(before, 1.0),
        lambda: before[0].grad,
        lambda: before[0].sum(),
        lambda: before[0].data,
        forgotten.step,
        forgotten.zero_grad,
    ]
    said = r"taken from the model before zs\.shard\(\), which has replaced it\. Take it again after"
    for use in uses:
        with pytest.raises(zs.StateError, match=said):
            use()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_taken_before_shard_cannot_be_used(stage: int) -> None:
    ranks(WORLD).run(use_out_of_date, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_taken_before_shard_stay_where_they_are_not_replaced(stage: int) -> None:
    model = Stack()
    before = list(model.parameters())
    run = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=stage)
    assert all(new is old for new, old in zip(model.parameters(), before, strict=True))
    model(torch.ones(2, 4)).sum().backward()
    assert float(nn.utils.clip_grad_norm_(before, 1.0)) > 0
    run.close()


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_gradient_hooks_of_parameters_are_refused(register: str) -> None:
    model = Stack()
    getattr(model.blocks[0].up.weight, register)(lambda grad: None)
    said = r"`blocks.0.up.weight` has gradient hooks, which would not be called"
    with pytest.raises(zs.ModelError, match=said):
        zs.shard(model)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 3])
def test_gradient_hooks_of_parameters_are_refused_later_too(stage: int, world: int, register: str) -> None:
    for said in (
        ranks(world).run(hooked_late, stage, register) if world > 1 else [hooked_late(stage, register)]
    ):
        assert "`blocks.0.up.weight` has a gradient hook, registered after zs.shard()" in said


def hooked_late(stage: Any, register: str) -> str:
    """What is said at the forward after that, and nothing once the hook is gone."""
    model, x = Stack(), torch.ones(2, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    run = zs.shard(model, optimizer, stage=stage)
    for step in range(2):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            handle = getattr(model.blocks[0].up.weight, register)(lambda grad: None)
            with pytest.raises(zs.StateError) as caught:
                model(x)
            handle.remove()
    run.close()
    return str(caught.value)


@pytest.mark.parametrize("stage", STAGES)
def test_modules_that_come_later_are_refused_where_ranks_would_part(stage: int) -> None:
    for replaced, added, thawed in ranks(WORLD).run(came_late, stage):
        said = "was not in the model when zs.shard() was called, and the ranks would not add up its gradients"
        assert replaced.startswith(
            f"`last.weight` {said}: they would train different models. Call run.close()"
        )
        assert added.startswith(f"`extra.0.weight` {said}")
        assert thawed.startswith(f"`extra.0.weight` {said}")


def came_late(stage: Any) -> list[str]:
    """What is said of a new module in place of another, of one more, and of a frozen one that is thawed. What
    goes back to where it was, changes its place, or does not train says nothing."""
    model, x, said = Stack(), torch.ones(2, 4), list[str]()
    run = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=stage)

    def refused() -> None:
        with pytest.raises(zs.StateError) as caught:
            model(x)
        said.append(str(caught.value))

    last, model.last = model.last, nn.Linear(6, 4)
    refused()
    with torch.no_grad():
        model(x)
    model.last = last
    model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]
    model.extra = nn.Sequential()
    model(x).sum().backward()
    model.extra.append(nn.Linear(4, 4))
    refused()
    model.extra.requires_grad_(False)
    model(x).sum().backward()
    model.extra.requires_grad_(True)
    refused()
    del model.extra
    model(x).sum().backward()
    run.close()
    model.extra = nn.Linear(4, 4)
    model(x)
    return said


def test_one_rank_trains_modules_that_come_later() -> None:
    model, x = Stack(), torch.ones(2, 4)
    run = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=3)
    model.last = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.last.parameters(), lr=1.0)
    before = model.last.weight.detach().clone()
    model(x).sum().backward()
    optimizer.step()
    assert not torch.equal(model.last.weight, before)
    run.close()


def test_torch_tells_nobody_of_new_modules_once_models_are_gone() -> None:
    assert ranks(WORLD).run(told_of_modules) == [[1, 0], [1, 0]]


def told_of_modules() -> list[int]:
    hooks = nn.modules.module._global_module_registration_hooks
    zs.shard(Stack())  # never closed
    run = zs.shard(kept := Stack())
    gc.collect()
    some = len(hooks)
    run.close()
    del kept
    gc.collect()
    return [some, len(hooks)]
