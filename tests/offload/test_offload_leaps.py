"""Updates that could not be taken back, if they were begun before the norm is known: by their formula, or for
the gradient of a loss that leaped or is no number."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from kernel_values import COMPILED, contents, each_path
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import zeroshard as zs
from zeroshard import kernels
from zeroshard.kernels import AdamRows, AdamStep, Bound, SgdRows, SgdStep, library
from zeroshard.testing import ranks

FIXTURES = (each_path,)
WIDTH, STEPS, CLIP, LEAPS = 6, 9, 1e3, (3, 6)
Make = Callable[[Iterable[nn.Parameter]], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": partial(AdamW, lr=0.01, weight_decay=0.1),
    "adam": partial(Adam, lr=0.01, weight_decay=0.1),
    "momentum": partial(SGD, lr=0.01, momentum=0.9),
    "sgd": partial(SGD, lr=0.01, weight_decay=0.1),
}
# What leaves nothing of the state before: means that are the gradient, squares that are its own, weights that
# decay to nothing.
FINAL: dict[str, Make] = {
    "no mean": partial(AdamW, lr=0.01, betas=(0.0, 0.95)),
    "hardly a mean": partial(AdamW, lr=0.01, betas=(1e-6, 0.95)),
    "no squares": partial(Adam, lr=0.01, betas=(0.9, 1e-6), eps=0.1),
    "no decay left": partial(AdamW, lr=0.5, weight_decay=2.0),
    "no decay left, sgd": partial(SGD, lr=0.5, weight_decay=2.0),
    "nesterov": partial(SGD, lr=0.5, momentum=0.5, nesterov=True, weight_decay=2.0),
    "hardly a momentum": partial(SGD, lr=0.01, momentum=1e-6),
}


class Net(nn.Module):
    """With a parameter that is too small to be divided, and so is counted by one rank alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return (self.scale * x - 1).square().mean()


def furthest(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The largest difference within a tensor, of its largest number."""
    assert got.keys() == want.keys()
    sizes = {name: max(float(t.abs().max()), 1e-6) for name, t in want.items()}
    return max(float((got[name] - t).abs().max()) / sizes[name] for name, t in want.items())


def make(optimizer: Make) -> tuple[Net, Optimizer]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = Net()
    return model, optimizer(model.parameters())


def loss_of(model: nn.Module, step: int, rank: int, factor: float) -> Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * rank + step))
    loss: Tensor = model(x)
    return loss * factor if step in LEAPS else loss


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Weights and moments."""
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        found |= {f"{name}/{k}": t.clone() for k, t in optimizer.state[p].items() if isinstance(t, Tensor)}
    return found


def plain(optimizer: Make, factor: float, skips: bool, world: int, clip: float = CLIP) -> dict[str, Tensor]:
    model, own = make(optimizer)
    for step in range(STEPS):
        for rank in range(world):
            (loss_of(model, step, rank, factor) / world).backward()
        if not (skips and step in LEAPS):
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            own.step()
        own.zero_grad()
    return state_of(model, own)


def trained(
    optimizer: Make, factor: float, skips: bool, clip: float = CLIP, **options: Any
) -> tuple[dict[str, Tensor], dict[str, int]]:
    model, own = make(optimizer)
    run = zs.shard(model, own, clip_norm=clip, **({"offload": zs.Offload(threads=1)} | options))
    for step in range(STEPS):
        loss_of(model, step, run.rank, factor).backward()
        if not (skips and step in LEAPS):
            own.step()
        own.zero_grad()
    counts = run.stats().updates
    run.close()
    return state_of(model, own), counts


@pytest.mark.parametrize("name", FINAL)
def test_what_cannot_be_taken_back_waits_for_the_norm(name: str) -> None:
    got, counts = trained(FINAL[name], 1.0, True)
    assert furthest(got, plain(FINAL[name], 1.0, True, 1)) <= 1e-5
    assert counts == {"early": 0, "late": STEPS - len(LEAPS), "undone": 0}


def test_others_do_not_wait_beside_it() -> None:
    def two(parameters: Iterable[nn.Parameter]) -> Optimizer:
        first, *rest = parameters
        return AdamW([{"params": [first], "betas": (0.0, 0.95)}, {"params": rest}], lr=0.01)

    got, counts = trained(two, 1.0, True)
    assert furthest(got, plain(two, 1.0, True, 1)) <= 2e-6
    assert counts["late"] == STEPS - len(LEAPS)


@pytest.mark.parametrize("factor", [math.nan, math.inf, 1e4, 1e15], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_skipped_for_its_loss_leaves_no_trace(name: str, factor: float) -> None:
    got, counts = trained(OPTIMIZERS[name], factor, True)
    assert furthest(got, plain(OPTIMIZERS[name], factor, True, 1)) <= 2e-6
    assert counts["early"] > 3


@pytest.mark.parametrize("factor", [1e3, 1e6], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_leap_is_clipped(name: str, factor: float) -> None:
    got, counts = trained(OPTIMIZERS[name], factor, False, clip=100.0)
    assert furthest(got, plain(OPTIMIZERS[name], factor, False, 1, clip=100.0)) <= 1e-5
    assert counts["early"] > 1


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "kernels", lambda: None)
    for name in ("adamw", "momentum"):
        got, counts = trained(OPTIMIZERS[name], math.nan, True)
        assert furthest(got, plain(OPTIMIZERS[name], math.nan, True, 1)) <= 2e-6
        assert counts["early"] > 3


def test_python_carries_them_too(tmp_path: Any) -> None:
    """State on the disk is no way for transfer workers in C."""
    disk = zs.Offload("disk", path=str(tmp_path), threads=1)
    got, counts = trained(OPTIMIZERS["adamw"], math.nan, True, offload=disk)
    assert furthest(got, plain(OPTIMIZERS["adamw"], math.nan, True, 1)) <= 2e-6
    assert counts["early"] > 3


def on_rank(stage: int) -> list[tuple[dict[str, Tensor], dict[str, int]]]:
    asked = [(OPTIMIZERS["adamw"], math.nan, True), (FINAL["no mean"], 1.0, True)]
    return [trained(*case, stage=stage) for case in [*asked, (OPTIMIZERS["adamw"], 1e6, False)]]


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_two_ranks(stage: int) -> None:
    wanted = [
        plain(OPTIMIZERS["adamw"], math.nan, True, 2),
        plain(FINAL["no mean"], 1.0, True, 2),
        plain(OPTIMIZERS["adamw"], 1e6, False, 2),
    ]
    for told in ranks(2).run(on_rank, stage):
        for (got, _), want in zip(told, wanted, strict=True):
            assert furthest(got, want) <= 2e-6
        assert [counts["early"] > 3 for _, counts in told] == [True, False, True]


def test_split_masters_keep_their_bits() -> None:
    """A NaN in one step that is skipped; against the plain master."""

    def run_with(master: Any) -> dict[str, Tensor]:
        offload = zs.Offload(threads=1, master=master)
        return trained(OPTIMIZERS["adamw"], math.nan, True, offload=offload, precision="bf16")[0]

    split, whole = run_with("split"), run_with("plain")
    assert all(t.isfinite().all() for t in split.values())
    assert furthest(split, whole) <= 0.02


@pytest.mark.parametrize("size", [4.0, 4.5, math.nan, math.inf])
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_a_bound_of_the_kernels(path: str, kind: str, size: float) -> None:
    """Above it only the weights are written."""
    torch.manual_seed(0)
    bound = Bound(torch.tensor([size]), 4.0)
    grad, weight, master = torch.randn(300), torch.full((300,), 7.0), torch.randn(300)
    if kind == "adam":
        rows: AdamRows | SgdRows = AdamRows(torch.randn(300), torch.rand(300), master.clone())
        before = contents(rows)
        kernels.update_rows(rows, grad, weight, AdamStep(lr=0.1, step=3), bound=bound)
    else:
        rows = SgdRows(master.clone(), momentum=torch.randn(300))
        before = contents(rows)
        kernels.update_rows(rows, grad, weight, SgdStep(lr=0.1, momentum=0.9), bound=bound)
    same = all(torch.equal(old, new) for old, new in zip(before, contents(rows), strict=True))
    assert same == (size != 4.0)
    assert torch.equal(weight, rows.master if rows.master is not None else master)
    assert bound.exceeded == same
    assert path == "torch" or COMPILED is not None
