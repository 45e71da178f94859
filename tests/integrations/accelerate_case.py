"""Loops as users of Accelerate write them, run by ranks of a pool: with plain Accelerate, or sharded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zeroshard as zs
from zeroshard.integrations import accelerate as zsa

Plain = Mapping[str, Any]


@dataclass
class Loop:
    """What one loop does. `options`: those of `zs.shard`, or None for plain Accelerate."""

    options: Plain | None
    accelerator: Plain = field(default_factory=dict)
    clip: float | None = None
    batches: int = 8
    rest: int = 0  # rows of the last batch, of all ranks together
    load: str | None = None
    save: str | None = None
    begin: int = 0
    until: int | None = None


@dataclass
class Outcome:
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    begun_at: int  # micro-batches that the accelerator knew of when the loop began


def begin(options: Plain | None, **keywords: Any) -> Accelerator:
    """An accelerator as the first of its process, whose ranks have met."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # looked at, and not used
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if options is None:
        return Accelerator(cpu=True, **keywords)
    return zsa.ZeroShardAccelerator(cpu=True, **keywords, **options)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), *blocks, nn.Linear(16, 3))


def batches(size: int, number: int, start: int = 0, rest: int = 0) -> DataLoader[Any]:
    """Batches of 4 for each rank, from one on."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(4 * size * number + rest, 8, generator=generator)
    targets = torch.randn(4 * size * number + rest, 3, generator=generator)
    return DataLoader(TensorDataset(inputs[4 * size * start :], targets[4 * size * start :]), batch_size=4)


def trained(loop: Loop) -> Outcome:
    accelerator = begin(loop.options, **loop.accelerator)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = batches(accelerator.num_processes, loop.batches, loop.begin, loop.rest)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if loop.load:
        accelerator.load_state(loop.load)
    begun_at = accelerator.step
    losses, norms = list[float](), list[Tensor]()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = (model(inputs) - targets).square().mean()
            accelerator.backward(loss)
            if loop.clip and accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), loop.clip))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather_for_metrics(loss.detach()).mean().item())
        if len(losses) == loop.until:
            break
    if loop.save:
        accelerator.save_state(loop.save)
    state = accelerator.get_state_dict(model)
    weights = {name.removeprefix("module."): value.clone() for name, value in state.items()}
    result = Outcome(losses, [norm.item() for norm in norms], weights, begun_at)
    run = zsa.run_of(accelerator.unwrap_model(model))
    if run is not None:
        run.close()
    return result


def two_models(options: Plain | None) -> list[dict[str, Tensor]]:
    """A generator and a critic with an optimizer each, and a frozen teacher."""
    accelerator = begin(options)
    models = [network(0), network(1)]
    teacher = network(2).requires_grad_(False).eval()
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in models]
    loader = batches(accelerator.num_processes, 4)
    first, second, a, b, loader = accelerator.prepare(*models, *optimizers, loader)
    if options is not None:  # which Accelerate alone refuses
        teacher = accelerator.prepare(teacher)
    for inputs, targets in loader:
        with torch.no_grad():
            wanted = teacher(inputs)
        accelerator.backward((first(inputs) - wanted).square().mean())
        a.step()
        a.zero_grad()
        accelerator.backward((second(inputs) - targets).square().mean())
        b.step()
        b.zero_grad(set_to_none=False)
    runs = [zsa.run_of(model) for model in (first, second, teacher)]
    assert [run is not None for run in runs] == [options is not None] * 2 + [options == {"stage": 3}]
    states = [accelerator.get_state_dict(model) for model in (first, second)]
    return [{k.removeprefix("module."): v.clone() for k, v in state.items()} for state in states]


def refused(case: str) -> str:
    """What is said about a misuse, on this rank."""
    with suppress(StopIteration):
        try:
            MISUSES[case]()
        except zs.ZeroShardError as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


def _optimizer(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)


def _unpaired() -> None:
    accelerator = begin({"stage": 2})
    model = accelerator.prepare(network())
    accelerator.backward(model(torch.ones(1, 8)).sum())


def _later() -> None:
    """An optimizer that comes in a later call is no misuse."""
    accelerator = begin({"stage": 2})
    model = accelerator.prepare(network())
    optimizer = accelerator.prepare(_optimizer(model))
    accelerator.backward(model(torch.ones(1, 8)).sum())
    optimizer.step()
    assert zsa.run_of(model).stats().steps == 1


def _shared() -> None:
    models = [network(), network()]
    begin({"stage": 2}).prepare(*models, _optimizer(*models))


def _second() -> None:
    accelerator, model = begin({"stage": 2}), network()
    accelerator.prepare(model, _optimizer(model))
    accelerator.prepare(_optimizer(model))


def _clipped(function: str, *arguments: float) -> None:
    accelerator, model = begin({"stage": 2, "clip_norm": 1.0}), network()
    model, _ = accelerator.prepare(model, _optimizer(model))
    getattr(accelerator, function)(model.parameters(), *arguments)


def _joined() -> None:
    accelerator, model = begin({"stage": 2}), network()
    model, _ = accelerator.prepare(model, _optimizer(model))
    with accelerator.join_uneven_inputs([model], even_batches=False):
        pass


def _launched() -> None:
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    try:
        begin({"stage": 2})
    finally:
        del os.environ["ACCELERATE_USE_FSDP"]


MISUSES = {
    "unpaired": _unpaired,
    "later": _later,
    "shared": _shared,
    "second": _second,
    "clipped": lambda: _clipped("clip_grad_norm_", 2.0),
    "clipped by value": lambda: _clipped("clip_grad_value_", 2.0),
    "joined": _joined,
    "launched": _launched,
    "unknown": lambda: begin({"stages": 2}),
    "value": lambda: begin({"stage": 4}),
    "contradiction": lambda: begin({"precision": "fp16"}, mixed_precision="bf16"),
    "no scaler": lambda: begin({"precision": "fp16"}),
}
