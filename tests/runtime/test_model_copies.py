"""Copies of a sharded model: plain models of their own, or an error that says how to get one."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_param_kinds import Stack, four, squared
from torch import Tensor
from torch.optim.swa_utils import AveragedModel
from trained_twice import Case, Training, in_float64, plain_turn, same_tensors

import zeroshard as zs
from zeroshard.testing import ranks

CASE = Case(Stack, four, squared)


def trained(options: dict[str, Any] | None, parts: list[int]) -> dict[str, Tensor]:
    """A copy is made in the middle, trained on for a step, and its output is taken at the end."""
    training = Training(CASE, parts, options)
    plain_turn(training, 0)
    run, model = training.run, training.model
    if run is not None and run.size > 1 and run.options.stage:
        with run.gathered():
            copied = copy.deepcopy(model)
    else:
        copied = copy.deepcopy(model)
    kept = {n: p.detach().clone() for n, p in copied.named_parameters()}
    plain_turn(training, 1)  # the copy keeps its weights, also those of units that are recomputed
    training.loss(2).backward()
    squared(copied, four(2, 0)).backward()
    copied.zero_grad()  # its own alone
    assert all(p.grad is None for p in copied.parameters())
    training.optimizer.step()
    training.optimizer.zero_grad()
    same_tensors({n: p.detach() for n, p in copied.named_parameters()}, kept, 0.0, "of the copy")
    found = {"output of the copy": copied(four(5, 0)).detach(), **kept}
    copied.double()  # nothing of ours guards it
    if run is not None:
        run.close()
    return found | {f"model.{n}": p.detach() for n, p in model.named_parameters()}


def trained_on_rank(options: dict[str, Any]) -> dict[str, Tensor]:
    return trained(options, [dist.get_rank()])


@pytest.mark.parametrize("stage", [0, 3])
def test_a_copy_is_a_plain_model(stage: int) -> None:
    options = {"stage": stage, "recompute": True}
    same_tensors(trained(options, [0]), trained(None, [0]), 1e-9, "on one rank")
    expected = trained(None, [0, 1])
    for rank, got in enumerate(ranks(2).run(trained_on_rank, options)):
        same_tensors(got, expected, 1e-9, f"on rank {rank}")


def test_an_average_of_weights_made_after_shard() -> None:
    """`AveragedModel` copies the model."""

    def average(recompute: bool | None) -> tuple[Tensor, dict[str, Tensor]]:
        model = in_float64(Stack)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if recompute is not None:
            zs.shard(model, optimizer, recompute=recompute)
        averaged = AveragedModel(model)
        for step in range(3):
            squared(model, four(step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            averaged.update_parameters(model)
        return averaged(four(9, 0)).detach(), {n: p.detach() for n, p in averaged.named_parameters()}

    want, weights = average(None)
    for recompute in (False, True):
        got, mine = average(recompute)
        torch.testing.assert_close(got, want)
        same_tensors(mine, weights, 1e-9, "of the average")


def copy_rows(stage: int) -> None:
    model = in_float64(Stack)
    zs.shard(model, torch.optim.AdamW(model.parameters()), stage=stage)
    said = (
        r"copy\.deepcopy\(\) of a sharded model: `first\.weight` is not whole here\. Copy it inside `with run"
    )
    with pytest.raises(zs.StateError, match=said):
        copy.deepcopy(model)
    with pytest.raises(zs.StateError, match="deepcopy"):
        AveragedModel(model)


def test_rows_are_not_copied() -> None:
    ranks(2).run(copy_rows, 2)
    model = Stack()
    options: dict[str, Any] = {"precision": "bf16", "offload": zs.Offload("device", master="split")}
    zs.shard(model, torch.optim.AdamW(model.parameters()), **options)
    with pytest.raises(zs.StateError, match=r"copy\.deepcopy\(\) of a sharded model"):
        copy.deepcopy(model.blocks[1])


def test_a_sharded_model_is_not_pickled() -> None:
    model = Stack()
    run = zs.shard(model, torch.optim.AdamW(model.parameters()))
    said = r"cannot be pickled, nor saved whole by torch\.save\(\): use run\.save\(folder\), save model"
    with pytest.raises(zs.StateError, match=said):
        torch.save(model, io.BytesIO())
    run.close()
    torch.save(model, io.BytesIO())
