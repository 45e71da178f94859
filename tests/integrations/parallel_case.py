"""Loops as they are written for torch's DistributedDataParallel, run by ranks under it and under ours."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as Torchs
from torch.optim import SGD, Adafactor, Adam, AdamW, Muon, Optimizer

import zeroshard as zs
from zeroshard.parallel import DistributedDataParallel as Ours

Wrap = Callable[..., Any]
Found = dict[str, Any]
STEPS = 5


def wrapping(stage: int | None, **options: Any) -> Wrap:
    """Torch's wrapper, or ours at a stage."""
    return Torchs if stage is None else lambda model, **own: Ours(model, stage=stage, **options, **own)


class Net(nn.Module):
    """Batch statistics, a buffer of its own, and a branch that not every batch comes to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8)
        self.branch, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor, branch: bool = True) -> Tensor:
        if self.training:
            self.seen += torch.stack([x.detach().mean(), x.detach().std()])
        y = self.norm(self.first(x)).tanh()
        scores: Tensor = self.last(self.branch(y) if branch else y)
        return scores + self.seen.mean()


def batch(step: int, part: int = 0, rows: int = 4) -> Tensor:
    seed = 100 * step + 10 * part + dist.get_rank()
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))


def found(losses: list[float], *models: nn.Module) -> Found:
    states = [model.state_dict() for model in models]
    return {"losses": losses, "states": [{k: v.clone() for k, v in state.items()} for state in states]}


def simple(
    wrap: Wrap, kind: type[Optimizer] = Adam, before: bool = False, divide: int | None = None, **own: Any
) -> Found:
    """The commonest loop, with a schedule, and parameters that are kept from before the first step."""
    torch.manual_seed(dist.get_rank())  # the wrapper makes ranks alike
    net: nn.Module = Net()
    options: Any = {"lr": 1e-2}
    if before:
        optimizer = kind(net.parameters(), **options)
        model = wrap(net, **own)
    else:
        model = wrap(net, **own)
        params = [p for p in model.parameters() if p.ndim == 2 or kind is not Muon]
        optimizer = kind(params, **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    run = None if divide is None else zs.shard(model, optimizer, stage=divide)  # type: ignore[arg-type]
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return found(losses, model) if run is None else {"losses": losses, "states": [run.full_state_dict(None)]}


def unused(wrap: Wrap) -> Found:
    """A branch that is passed over by both ranks, by one, by none."""
    torch.manual_seed(0)
    model = wrap(Net(), find_unused_parameters=True)
    optimizer = SGD(model.parameters(), lr=1e-2, momentum=0.9)
    losses = []
    for step, ways in enumerate(((True, True), (False, True), (False, False), (True, False), (True, True))):
        loss = model(batch(step), branch=ways[dist.get_rank()]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return found(losses, model)


def accumulated(wrap: Wrap) -> Found:
    torch.manual_seed(0)
    model = wrap(Net(), gradient_as_bucket_view=True)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        for part in range(3):
            with nullcontext() if part == 2 else model.no_sync():
                loss = model(batch(step, part)).square().mean() / 3
                loss.backward()
                losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return found(losses, model)


def clipped(wrap: Wrap) -> Found:
    """With a list of parameters that was made before the first step."""
    torch.manual_seed(0)
    model = wrap(Net())
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = SGD(params, lr=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        loss = model(batch(step)).square().mean()
        loss.backward()
        losses += [nn.utils.clip_grad_norm_(params, 0.05).item(), loss.item()]
        assert losses[-2] > 0.05
        optimizer.step()
    return found(losses, model)


def scaled(wrap: Wrap) -> Found:
    """One rank alone meets an inf: both pass the step over."""
    torch.manual_seed(0)
    model = wrap(Net())
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    losses = []
    for step in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch(step)).float().square().mean()
        scale = scaler.scale(loss)
        (scale * (torch.inf if step == 2 and dist.get_rank() == 1 else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses += [loss.item(), scaler.get_scale()]
    return found(losses, model)


def two_models(wrap: Wrap) -> Found:
    """A generator and a discriminator."""
    torch.manual_seed(0)
    maker, judge = wrap(nn.Linear(6, 6)), wrap(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)))
    makes, judges = Adam(maker.parameters(), lr=1e-2), Adam(judge.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        made = maker(batch(step))
        judges.zero_grad()
        loss = judge(made.detach()).mean() - judge(batch(step, 1)).mean()
        loss.backward()
        judges.step()
        makes.zero_grad()
        other = -judge(made).mean()
        other.backward()
        makes.step()
        losses += [loss.item(), other.item()]
    return found(losses, maker, judge)


def two_optimizers(wrap: Wrap) -> Found:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the name that all versions of torch know
        model = wrap(Net(), broadcast_buffers=False)
    head, rest = Adam(model.module.last.parameters(), lr=1e-2), SGD(model.module.first.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        loss = model(batch(step)).square().mean()
        loss.backward()
        for optimizer in (head, rest):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return found(losses, model)


LOOPS: dict[str, Callable[[Wrap], Found]] = {
    "adam": simple,
    "optimizer first": lambda wrap: simple(wrap, AdamW, before=True),
    "static graph": lambda wrap: simple(wrap, SGD, static_graph=True, bucket_cap_mb=1, init_sync=True),
    "adafactor": lambda wrap: simple(wrap, Adafactor),
    "muon": lambda wrap: simple(wrap, Muon),
    "unused": unused,
    "accumulated": accumulated,
    "clipped": clipped,
    "scaled": scaled,
    "two models": two_models,
    "two optimizers": two_optimizers,
}


def all_loops(stage: int | None, **options: Any) -> dict[str, Found]:
    return {name: loop(wrapping(stage, **options)) for name, loop in LOOPS.items()}


def joined(stage: int | None, short: int, scale: bool = True, clip: float = 0.0) -> Found:
    """One rank has three batches, the other one seven; uneven ones, with a schedule."""
    torch.manual_seed(0)
    model = wrapping(stage)(Net())
    optimizer = Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    losses = []
    with model.join(divide_by_initial_world_size=scale):
        for step in range(3 if dist.get_rank() == short else 7):
            optimizer.zero_grad()
            loss = model(batch(step, rows=4 + dist.get_rank())).square().mean()
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
    return found(losses, model)


def all_joined(stage: int | None) -> dict[str, Found]:
    found = {f"{short} {scale}": joined(stage, short, scale) for short in (0, 1) for scale in (True, False)}
    return found if stage else {**found, "clipped": joined(stage, 0, clip=0.05)}


def late(stage: int | None, kind: type[Optimizer]) -> Found:
    """An optimizer that is made when the model is divided for another, and has a list of before."""
    torch.manual_seed(0)
    model = wrapping(stage)(Net())
    params = list(model.parameters())
    first = SGD(model.module.last.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        if step == 2:
            second = kind(params[:1], lr=1e-2)  # type: ignore[call-arg]
        loss = model(batch(step)).square().mean()
        loss.backward()
        first.step()
        if step >= 2:
            second.step()
        for p in params:
            p.grad = None
        losses.append(loss.item())
    assert stage is None or model.run.stats().steps == STEPS - 3  # it was divided anew after the third
    return found(losses, model)


def made_late(stage: int | None) -> dict[str, Found]:
    return {"rows": late(stage, Adam), "whole": late(stage, Adafactor), "none": first_step(stage)}


def first_step(stage: int | None) -> Found:
    """The optimizer is made after the first backward."""
    torch.manual_seed(0)
    model = wrapping(stage)(Net())
    params = list(model.parameters())
    losses = []
    for step in range(STEPS):
        loss = model(batch(step)).square().mean()
        loss.backward()
        if step == 0:
            optimizer = Adam(params, lr=1e-2)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return found(losses, model)


def saved(stage: int | None, path: str) -> Found:
    """Half a training, saved as torch's loops save it, whole; and the other half."""
    torch.manual_seed(0)
    model = wrapping(stage)(Net())
    optimizer = Adam(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        if step == 2:
            state = {"model": model.state_dict()}
            if stage is None:
                state["optimizer"] = optimizer.state_dict()
            else:
                state["optimizer"] = model.run.full_optimizer_state_dict(rank=None)
            if dist.get_rank() == 0:
                torch.save(state, path)
            dist.barrier()
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return found(losses, model)


def resumed(stage: int | None, path: str) -> Found:
    """The other half, of what either wrapper has saved: loaded before the model is divided."""
    torch.manual_seed(7)
    model = wrapping(stage)(Net())
    optimizer = Adam(model.parameters(), lr=1.0)
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    losses = []
    for step in range(2, STEPS):
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    result = found(losses, model)
    model.load_state_dict(state["model"])  # and into a divided one
    again = model.state_dict()
    assert all(torch.equal(again[name], value) for name, value in state["model"].items())
    return result


def divided(stage: int) -> Found:
    """`zs.shard` of a model that is under torch's wrapper."""
    return simple(Torchs, divide=stage)


def saved_by_first(stage: int | None, transport: str = "auto") -> Found:
    """Rank 0 alone asks for the state, in the middle and at the end, while the other one waits for it."""
    torch.manual_seed(0)
    model = wrapping(stage, transport=transport)(Net())
    head, rest = Adam(model.module.last.parameters(), lr=1e-2), SGD(model.module.first.parameters(), lr=0.1)
    kept: list[dict[str, Tensor]] = []

    def keep() -> None:
        if dist.get_rank() == 0:
            kept.append({name: value.clone() for name, value in model.state_dict().items()})
        dist.barrier()

    losses = []
    keep()
    for step in range(STEPS):
        loss = model(batch(step)).square().mean()
        loss.backward()
        for optimizer in (head, rest):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        keep()
    told: list[Any] = [kept]
    dist.broadcast_object_list(told)
    model.load_state_dict(told[0][2])
    keep()
    return {"losses": losses, "states": kept}


def saved_by_one(stage: int, then: str = "forward", **options: Any) -> None:
    model = Ours(nn.Linear(6, 3), stage=stage, **options)
    optimizer = Adam(model.parameters(), lr=1e-2)
    model(batch(0)).sum().backward()
    optimizer.step()
    if then == "written":
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(2)
    if dist.get_rank() == 0:
        try:
            model.state_dict()
        except zs.RankError:
            if then == "barrier":  # as the end of its process would, let the other one go
                dist.barrier()
            raise
    if then == "forward":
        model(batch(1)).sum().backward()
    elif then != "end":
        dist.barrier()


def wrapped(who: int, **options: Any) -> None:
    """One rank alone asks for what cannot be."""
    Ours(nn.Linear(2, 2), **(options if dist.get_rank() == who else {}))


def unlike() -> None:
    Ours(nn.Linear(2, 2 + dist.get_rank()))


def ended(stage: int, how: str) -> None:
    """Blocks that some rank cannot be kept company in."""
    model = Ours(nn.Linear(6, 3), stage=stage)
    optimizer = Adam(model.parameters(), lr=1e-2)
    count = {"none": 0}.get(how, 1) if dist.get_rank() == 1 else 3
    with model.join(throw_on_early_termination=how == "throw"):
        for step in range(count):
            optimizer.zero_grad()
            model(batch(step)).sum().backward()
            if how == "value":
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
            if how == "closure":
                optimizer.step(lambda: 0.0)
            if how == "late":
                SGD(model.parameters(), lr=0.1).step()
            optimizer.step()
