"""`run.close()`: what it gives back, what it lets go of, and when it must not be called."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.runtime import closing
from zeroshard.testing import ranks, tensor_bytes

STAGES = (0, 1, 2, 3)
WIDTH = 48


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)
        self.spare = nn.Linear(3, 3)  # no rank uses it

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))


def made(stage: int, **options: Any) -> tuple[Net, torch.optim.Optimizer, zs.Run]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, zs.shard(model, optimizer, stage=stage, **options)


def backward(model: nn.Module, run: zs.Run) -> Tensor:
    loss: Tensor = model(batch(run.rank)).square().sum()
    loss.backward()
    return loss


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def step_after(stage: int, closes: bool, options: dict[str, Any]) -> list[Tensor]:
    """Two steps, the second of them after `close()` or before it."""
    model, optimizer, run = made(stage, **options)
    backward(model, run)
    optimizer.step()
    optimizer.zero_grad()
    backward(model, run)
    if closes:
        run.close()
        grads = {name: p.grad for name, p in model.named_parameters()}
        assert {name for name, grad in grads.items() if grad is None} == {"spare.weight", "spare.bias"}
        assert all(g is None or (type(g) is Tensor and g.dtype == torch.float32) for g in grads.values())
    optimizer.step()
    run.close()
    return values(model)


@pytest.mark.ranks
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("options", [{}, {"transport": "gloo", "precision": "bf16"}, {"split": "whole"}])
def test_a_step_after_close_is_the_one_before_it(stage: int, options: dict[str, Any]) -> None:
    if stage == 0:
        options = {name: value for name, value in options.items() if name != "split"}  # nothing is divided
    want = ranks(2).run(step_after, stage, False, options)
    for found in ranks(2).run(step_after, stage, True, options):
        torch.testing.assert_close(found, want[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_after_close_of_one_rank(stage: int) -> None:
    offload = {"precision": "bf16", "offload": zs.Offload("device", master="split")}
    for options in ({}, {"precision": "bf16"}, offload if stage == 3 else {}):
        want, found = (step_after(stage, closes, options) for closes in (False, True))
        torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-7)


def dropped_on_one_rank(stage: int) -> list[Tensor | None]:
    model, _, run = made(stage)
    backward(model, run)
    if run.rank == 1:
        for p in model.parameters():
            p.grad = None
    run.close()
    return [p.grad for p in model.head.parameters()]


@pytest.mark.ranks
def test_gradients_that_one_rank_has_dropped_hang_nobody() -> None:
    one, other = ranks(2).run(dropped_on_one_rank, 3)
    for grad, same in zip(one, other, strict=True):
        assert grad is not None
        assert torch.equal(grad, same)
        assert grad[:1].abs().sum() > 0, "rank 0 has its rows"


# ---------------------------------------------------------------------- when it is refused


def unsynced(model: nn.Module, run: zs.Run) -> None:
    with run.no_sync():
        backward(model, run)
    run.close()


def in_gathered(model: nn.Module, run: zs.Run) -> None:
    with run.gathered("head.*"):
        run.close()


REFUSED: list[tuple[Callable[[nn.Module, zs.Run], None], str]] = [
    (
        unsynced,
        "cannot close now (rank 0): gradients accumulated under run.no_sync() are on each rank alone, and "
        "would be lost. Run the last micro-batch's backward outside of the block first, or drop them with "
        "zero_grad().",
    ),
    (
        in_gathered,
        "cannot close now (rank 0): inside `with run.gathered():` the model holds parameters that are taken "
        "out when the block ends. Call run.close() after the block; it gives whole parameters, too.",
    ),
]


def refused(stage: int) -> list[str]:
    """What is said, and that all goes on."""
    model, optimizer, run = made(stage)
    found = []
    for misuse, _ in REFUSED:
        with pytest.raises(zs.StateError) as caught:
            misuse(model, run)
        found.append(str(caught.value))
        optimizer.zero_grad()
        backward(model, run)
        optimizer.step()
        optimizer.zero_grad()
    with run.kept_full():
        run.close()
    assert all(type(p) is nn.Parameter for p in model.parameters())
    backward(model, run)
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_it_is_refused_where_something_would_be_lost(stage: int) -> None:
    assert refused(stage) == [said for _, said in REFUSED]


@pytest.mark.ranks
@pytest.mark.parametrize("stage", STAGES)
def test_it_is_refused_on_every_rank(stage: int) -> None:
    assert ranks(2).run(refused, stage) == [[said for _, said in REFUSED]] * 2


def backward_after(stage: int, alone: bool) -> str:
    model, _, run = made(stage)
    part = nn.Sequential(*model.blocks) if alone else model
    loss = part(batch(run.rank)).sum()
    run.close()
    with pytest.raises(zs.StateError) as caught:
        loss.backward()
    backward(model, run)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    return str(caught.value)


@pytest.mark.ranks
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("alone", [False, True])
def test_a_backward_of_an_earlier_forward_says_so(stage: int, alone: bool) -> None:
    said = (
        "this backward leads through a forward that was made before run.close(), and the parameters that it "
        "computed with are no longer the model's. Run backward before close(), or make the forward again."
    )
    assert ranks(2).run(backward_after, stage, alone) == [said, said]


def test_gradients_that_are_with_the_host_are_dropped_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    model, _, run = made(3, offload=zs.Offload("host"), clip_norm=1e9)
    backward(model, run)
    with caplog.at_level(logging.WARNING, "zeroshard"):
        run.close()
    assert "run.close() between backward and optimizer.step(): with offload and clip_norm" in caplog.text


# ---------------------------------------------------------------------- what it lets go of


def all_bytes() -> int:
    private, shared = tensor_bytes()
    return private + sum(shared.values())


def left_over(stage: int, options: dict[str, Any]) -> tuple[float, list[str]]:
    """Bytes that tensors hold after `close()`, over those of a plain model with its optimizer's state; with
    the handle alive, and the loss of the last step."""
    before = all_bytes()
    model, optimizer, run = made(stage, **options)
    for _ in range(2):
        loss = backward(model, run)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(batch(0))  # units that stay
    shown, units, stats = repr(run), run.units, run.stats()
    run.close()
    after = all_bytes()
    plain = sum(p.nbytes for p in model.parameters())
    plain += sum(t.nbytes for state in optimizer.state.values() for t in state.values())
    assert plain > 3 * 4 * 3 * WIDTH**2
    assert run.units == units
    assert run.stats().live == stats.live
    assert run.stats().steps == stats.steps == 2
    assert loss.requires_grad
    return (after - before) / plain, [shown, repr(run)]


@pytest.mark.ranks
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_closed_run_holds_nothing(stage: int, transport: str, precision: str | None) -> None:
    for times, shown in ranks(2).run(left_over, stage, {"transport": transport, "precision": precision}):
        assert times < 1.05
        assert f"stage {stage}" in shown[0]
        assert shown[1] == "<zeroshard.Run Net: closed>"


HOST = zs.Offload("host")
OFFLOADED: list[dict[str, Any]] = [
    {"offload": zs.Offload("host", undo=False)},
    {"offload": HOST},
    {"offload": HOST, "precision": "bf16"},
    {"offload": HOST, "clip_norm": 1e9},
]


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, *OFFLOADED])
def test_a_closed_run_of_one_rank_holds_nothing(options: dict[str, Any]) -> None:
    assert left_over(3, options)[0] < 1.05


@pytest.mark.parametrize("offload", [None, zs.Offload()], ids=["on the device", "state on the host"])
def test_it_is_refused_where_the_device_has_no_room(
    offload: zs.Offload | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain model and its optimizer's state would not fit where rows and host memory did: nothing is moved,
    and training goes on."""
    model, optimizer, run = made(0, offload=offload)
    backward(model, run)
    optimizer.step()
    optimizer.zero_grad()
    numel = sum(p.numel() for p in model.parameters())
    added = (4 if offload is None else 12) * numel
    monkeypatch.setattr(closing, "_device_memory", lambda device: (1000 + added - 1, 1000))
    with pytest.raises(zs.StateError, match=r"cannot close now .* more than the 1000 B in use") as caught:
        run.close()
    assert "Save with run.save() or run.full_state_dict(), and let the process end as it is." in str(
        caught.value
    )
    backward(model, run)
    optimizer.step()
    optimizer.zero_grad()
    monkeypatch.setattr(closing, "_device_memory", lambda device: (1000 + added, 1000))
    run.close()
    assert all(type(p) is nn.Parameter for p in model.parameters())
