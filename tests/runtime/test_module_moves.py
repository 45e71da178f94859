"""`model.to()` and its like: where nothing would change, as front ends call them, and where it would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from misused import Net, backward, trained
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.testing import ranks

STAGES = [0, 1, 2, 3]
SAME: list[Any] = [
    lambda m: m.to("cpu"), lambda m: m.to(torch.device("cpu", 0)), lambda m: m.cpu(), lambda m: m.float(),
    lambda m: m.to(torch.float32), lambda m: m.to(next(m.parameters()).dtype), lambda m: m.to(torch.ones(1)),
    lambda m: m.type(torch.float32), lambda m: m.to("cpu", torch.float32, non_blocking=True),
    lambda m: m.to(memory_format=torch.channels_last),  # of a model without images
]  # fmt: skip


def moved_on_rank(stage: int) -> list[Tensor]:
    model, optimizer, run = trained(stage)
    for _ in range(2):
        for move in SAME:
            assert move(model) is model
            assert move(model.blocks[0][0]) is model.blocks[0][0]
        backward(model)
        optimizer.step()
    run.close()
    return [p.detach() for p in model.parameters()]


def unmoved_on_rank(stage: int) -> list[Tensor]:
    model, optimizer, run = trained(stage)
    for _ in range(2):
        backward(model)
        optimizer.step()
    run.close()
    return [p.detach() for p in model.parameters()]


@pytest.mark.ranks
@pytest.mark.parametrize("stage", STAGES)
def test_what_changes_nothing_is_passed_over(stage: int) -> None:
    for got, expected in zip(
        ranks(2).run(seeded, moved_on_rank, stage), ranks(2).run(seeded, unmoved_on_rank, stage), strict=True
    ):
        assert all(map(torch.equal, got, expected))


def seeded(function: Any, stage: int) -> Any:
    torch.manual_seed(3)
    return function(stage)


class Routed(Net):
    """Casts a layer of its own in forward, as the router of Switch Transformers does."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.router, self.dtype = nn.Linear(3, 3), dtype

    def forward(self, x: Tensor) -> Tensor:
        self.router = self.router.to(self.dtype)
        return super().forward(x * self.router(x.to(self.dtype)).softmax(-1).to(x.dtype))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_layer_that_is_cast_to_its_own_dtype_in_forward(stage: int, precision: str | None) -> None:
    computes = torch.bfloat16 if precision else torch.float32
    model = Routed(computes)
    run = zs.shard(model, stage=stage, precision=precision)
    backward(model)
    assert model.router.weight.grad is not None
    run.close()


@pytest.mark.parametrize("stage", STAGES)
def test_a_layer_that_is_cast_in_forward_to_another(stage: int) -> None:
    model = Routed(torch.float32)
    run = zs.shard(model, stage=stage, precision="bf16")
    with pytest.raises(zs.StateError, match=r"`weight` of Linear, bfloat16 on cpu, would become float32 on"):
        backward(model)
    run.close()
    run = zs.shard(model, stage=stage, precision=zs.Precision("bfloat16", keep=("router*",)))
    backward(model)
    run.close()


def test_what_a_buffer_would_become() -> None:
    model, _, run = trained(2)
    model.register_buffer("late", torch.ones(2, 2, 2, 2))
    assert model.to("cpu") is model
    with pytest.raises(
        zs.StateError, match=r"`late` of Net, float32 on cpu, would become float32 on cpu with"
    ):
        model.to(memory_format=torch.channels_last)
    with pytest.raises(zs.StateError, match=r"would become AssertionError|would become RuntimeError"):
        model.cuda() if not torch.cuda.is_available() else model.to("nowhere")
    with pytest.raises(zs.StateError, match=r"would become float32 on cpu with other values, strides or"):
        model.share_memory()
    run.close()
    assert next(model.to(torch.float64).parameters()).dtype == torch.float64


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_what_front_ends_call() -> None:
    """Accelerate's preparation, Fabric's setup, and what Lightning does at its beginning and end."""
    accelerate = pytest.importorskip("accelerate")
    lightning = pytest.importorskip("lightning")
    model, _, run = trained(3)
    prepared = accelerate.Accelerator(cpu=True).prepare_model(model, evaluation_mode=True)
    assert prepared is model
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    backward(fabric.setup_module(model))
    run.close()

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            result: Tensor = self.net(batch).sum()
            return result

        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer = torch.optim.AdamW(self.parameters())
            self.run = zs.shard(self, optimizer, stage=3)
            return optimizer

    module = Lit()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader([torch.ones(3)] * 4))
    assert module.run.stats().steps == 2
    module.run.close()
