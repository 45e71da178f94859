"""Training loops that people write: closures, accumulation, evaluation and generation between steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_param_kinds import Branches, Stack, Tied, by_step, four, next_token, squared
from torch import Tensor, nn
from trained_twice import STAGES, Case, Training, assert_as_one_process, moved, plain_turn, tokens, update

pytestmark = pytest.mark.ranks


class Normed(nn.Module):
    """Batch statistics, which every forward broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(normed_layer() for _ in range(3))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += x.sum()
        for layer in self.layers:
            x = layer(x)
        return x


def normed_layer() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())


def closure(training: Training, step: int) -> None:
    def evaluate() -> Tensor:
        training.optimizer.zero_grad()
        loss = training.loss(step)
        loss.backward()
        return loss

    assert training.optimizer.step(evaluate).item() == training.losses[-1]


def zeros_kept(training: Training, step: int) -> None:
    training.loss(step).backward()
    training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=False)


def model_zero_grad(training: Training, step: int) -> None:
    training.model.zero_grad(set_to_none=step % 2 == 0)
    training.loss(step).backward()
    training.optimizer.step()


def accumulate(training: Training, step: int) -> None:
    """Three micro-batches, each reduced; the branches that they use differ."""
    for micro in range(3):
        (training.loss(10 * step + micro) / 3).backward()
    update(training)


def accumulate_unsynced(training: Training, step: int) -> None:
    for micro in range(2):
        if training.run is None:
            (training.loss(10 * step + micro) / 3).backward()
        else:
            with training.run.no_sync():
                (training.loss(10 * step + micro) / 3).backward()
    (training.loss(10 * step + 2) / 3).backward()
    update(training)


def backward_twice(training: Training, step: int) -> None:
    loss = training.loss(step)
    loss.backward(retain_graph=True)
    (0.5 * loss).backward()
    update(training)


def two_forwards(training: Training, step: int) -> None:
    """Two forward passes, then two backward passes in the same order."""
    first, second = training.loss(2 * step), training.loss(2 * step + 1)
    first.backward()
    second.backward()
    update(training)


def sum_of_forwards(training: Training, step: int) -> None:
    (training.loss(2 * step) + 0.5 * training.loss(2 * step + 1)).backward()
    update(training)


def thrown_away(training: Training, step: int) -> None:
    """A forward whose backward never comes, before the one that counts."""
    training.loss(step + 50)
    plain_turn(training, step)


def evaluated(training: Training, step: int) -> None:
    plain_turn(training, step)
    training.model.eval()
    with torch.no_grad() if step % 2 else torch.inference_mode():
        for number in range(2):
            training.loss(100 + number)
    training.model.train()


def evaluated_amid(training: Training, step: int) -> None:
    """Evaluation between forward and backward, and between backward and step."""
    loss = training.loss(step)
    with torch.no_grad():
        training.loss(100)
    loss.backward()
    with torch.inference_mode():
        training.loss(101)
    update(training)


def gradients_read(training: Training, step: int) -> None:
    """The user scales gradients by their norm by hand."""
    training.loss(step).backward()
    for p in training.model.parameters():
        if p.grad is not None:
            norm = p.grad.norm()
            p.grad.div_(1 + _whole(norm).item())
    training.optimizer.step()
    training.optimizer.zero_grad()


def gradients_replaced(training: Training, step: int) -> None:
    training.loss(step).backward()
    for p in training.model.parameters():
        if p.grad is not None:
            p.grad = p.grad * 0.5 + p.detach() * 0.01
    training.optimizer.step()
    training.optimizer.zero_grad()


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def input_gradient(training: Training, step: int) -> None:
    """`torch.autograd.grad` with respect to an input, before the real backward."""
    x = moved(training.case.batch(step, training.parts[0]), training.device).requires_grad_()
    (grad,) = torch.autograd.grad(training.model(x).sum(), x)
    assert grad.shape == x.shape
    assert 0 < float(grad.abs().sum()) < float("inf")
    plain_turn(training, step)


def penalised(model: nn.Module, x: Tensor) -> Tensor:
    """A gradient penalty: the loss holds a gradient with respect to the input (WGAN-GP)."""
    x = x.clone().requires_grad_()
    out = model(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.pow(2).mean() + (grad.norm(2, dim=1) - 1).pow(2).mean()


def weight_penalty(training: Training, step: int) -> None:
    """A penalty on the weights that the loop adds by hand, to the loss of the model."""
    penalty = sum(_whole(p.pow(2).sum()) for p in training.model.parameters())
    (training.loss(step) + 0.01 * penalty).backward()
    update(training)


def toggled(training: Training, step: int) -> None:
    """A part is frozen in every other step."""
    training.model.blocks[1].requires_grad_(step % 2 == 0)
    plain_turn(training, step)


def skipped_step(training: Training, step: int) -> None:
    """Every third update is skipped, its gradients dropped."""
    training.loss(step).backward()
    if step % 3 != 1:
        training.optimizer.step()
    training.optimizer.zero_grad()


def scheduled(training: Training, step: int) -> None:
    if step == 0:
        training.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(training.optimizer, 6)
    plain_turn(training, step)
    training.scheduler.step()


def generate(model: nn.Module, length: int, device: str = "cpu") -> list[int]:
    ids = torch.tensor([[1]], device=device)
    with torch.no_grad():
        for _ in range(length):
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
    return ids[0].tolist()


def generated(training: Training, step: int) -> None:
    """Ranks generate texts of different lengths between the steps."""
    plain_turn(training, step)
    generate(training.model, 2 + 3 * training.parts[0], training.device)


CASES = {
    "closure": Case(Stack, four, squared, turn=closure),
    "zeros kept": Case(Stack, four, squared, turn=zeros_kept),
    "zeros kept, branches": Case(Branches, by_step, squared, turn=zeros_kept),
    "model.zero_grad": Case(Stack, four, squared, turn=model_zero_grad),
    "accumulate": Case(Stack, four, squared, turn=accumulate, clip=0.5),
    "accumulate branches": Case(Branches, by_step, squared, turn=accumulate),
    "accumulate unsynced": Case(Stack, four, squared, turn=accumulate_unsynced, clip=0.5),
    "accumulate branches unsynced": Case(Branches, by_step, squared, turn=accumulate_unsynced),
    "backward twice": Case(Stack, four, squared, turn=backward_twice),
    "two forwards": Case(Stack, four, squared, turn=two_forwards),
    "sum of forwards": Case(Stack, four, squared, turn=sum_of_forwards),
    "sum of forwards, normed": Case(Normed, four, squared, turn=sum_of_forwards),
    "thrown away": Case(Stack, four, squared, turn=thrown_away),
    "evaluated": Case(Stack, four, squared, turn=evaluated),
    "evaluated amid": Case(Stack, four, squared, turn=evaluated_amid),
    "gradients read": Case(Stack, four, squared, turn=gradients_read),
    "gradients replaced": Case(Stack, four, squared, turn=gradients_replaced),
    "input gradient": Case(Stack, four, squared, turn=input_gradient),
    "gradient penalty": Case(Stack, four, penalised),
    "gradient penalty, recomputed": Case(Stack, four, penalised, options={"recompute": True}),
    "weight penalty": Case(Stack, four, squared, turn=weight_penalty, clip=0.5),
    "weight penalty, branches": Case(Branches, by_step, squared, turn=weight_penalty),
    "toggled": Case(Stack, four, squared, turn=toggled),
    "skipped step": Case(Stack, four, squared, turn=skipped_step),
    "scheduled": Case(Stack, four, squared, turn=scheduled),
    "generated": Case(Tied, tokens, next_token, turn=generated),
}


@pytest.mark.wide(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str, stage: int) -> None:
    assert_as_one_process(__name__, name, stage)


@pytest.mark.wide(2)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ["accumulate unsynced", "evaluated amid", "gradient penalty", "thrown away"])
def test_equals_one_process_over_gloo(name: str, stage: int) -> None:
    assert_as_one_process(__name__, name, stage, transport="gloo")
