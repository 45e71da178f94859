"""Synchronised training by hand: plain PyTorch in one process that plays the ranks one after another.

Nothing of ZeroShard computes in here. Policies and codecs are read for their settings alone, and what the
documentation says of them is written out: who owns which rows, what a code keeps of a shard, what a sender
keeps for later, which gradient an update uses, when ranks meet. A sharded run has to have these bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import models
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeroshard as zs

Grads = dict[str, Tensor]
ALIGN = 16  # elements: what every tensor takes of a shard is a multiple of it
ROWS = 3  # of a batch on one rank


@dataclass(frozen=True)
class Cell:
    """What is trained, and how."""

    world: int = 2
    stage: int = 2
    sync: Any = field(default_factory=zs.EveryStep)
    compress: Any = None
    bucket_bytes: int = 2048
    steps: int = 6
    accumulate: int = 1
    optimizer: str = "adamw"
    transport: str = "auto"

    @property
    def options(self) -> dict[str, Any]:
        """Of `zs.shard`."""
        names = ("stage", "sync", "compress", "bucket_bytes", "transport")
        options = {name: getattr(self, name) for name in names}
        if isinstance(self.sync, zs.Local):
            options["units"] = "none"  # fragments are then cut in the order of the parameters
        return options


@dataclass
class Trained:
    """The weights, and by rank what the first step's code has lost of its gradient, relative."""

    weights: dict[str, Tensor]
    errors: list[float]


def batch(step: int, rank: int) -> Tensor:
    return models.MLP.batch(ROWS, seed=100 * rank + step)


def optimizer_of(cell: Cell, model: nn.Module) -> torch.optim.Optimizer:
    """Two groups: vectors have a rate of their own and do not decay."""
    wide = [p for p in model.parameters() if p.dim() > 1]
    narrow = {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 0.03, "weight_decay": 0.0}
    groups = [{"params": wide, "weight_decay": 0.1}, narrow]
    if cell.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.02, momentum=0.9)
    return torch.optim.AdamW(groups, lr=0.01)


def own_gradient(cell: Cell, model: nn.Module, step: int, rank: int) -> Grads:
    """What one rank has after its backwards."""
    model.zero_grad()
    for micro in range(cell.accumulate):
        model(batch(step * cell.accumulate + micro, rank)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# ---------------------------------------------------------------------- codecs


def arrives(codec: Any, wanted: Tensor) -> Tensor:
    """What comes out of the code of a shard."""
    match codec:
        case zs.Cast(dtype=dtype):
            return wanted.to(getattr(torch, dtype)).float()
        case zs.TopK(ratio=ratio):
            first = wanted.abs().argsort(descending=True, stable=True)[: max(1, round(ratio * len(wanted)))]
            return torch.zeros_like(wanted).index_copy(0, first, wanted[first])
        case zs.Int8(block=block) | zs.Int4(block=block):
            return torch.cat([integers(part, 127 if codec.bits == 8 else 7) for part in wanted.split(block)])
        case zs.OneBit(block=block):
            return torch.cat([signs(part) for part in wanted.split(block)])
    raise AssertionError(f"{codec} is not written out")


def integers(block: Tensor, levels: int) -> Tensor:
    """Multiples of a bf16 scale, which is rounded up."""
    step = block.abs().max() * (1.0 / levels)
    scale = step.to(torch.bfloat16)
    if scale.float() < step:
        scale = (scale.view(torch.int16) + 1).view(torch.bfloat16)
    scale = scale.float()
    return torch.round(block * scale.reciprocal()) * scale if scale > 0 else torch.zeros_like(block)


def signs(block: Tensor) -> Tensor:
    """The mean magnitude in bf16, added up in sixteen lanes, with every value's sign."""
    lanes = torch.zeros(16)
    for row in F.pad(block.abs(), (0, -len(block) % 16)).view(-1, 16):
        lanes = lanes + row
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    mean = (lanes * (1.0 / len(block))).to(torch.bfloat16).float()
    return torch.where(block.signbit(), -mean, mean)


def keeps(codec: Any) -> bool:
    """Whether the sender keeps what did not arrive."""
    return isinstance(codec, zs.TopK) or getattr(codec, "feedback", False)


# ---------------------------------------------------------------------- the way of gradients


def places(shapes: Sequence[torch.Size], world: int, stage: int) -> list[Tensor]:
    """By owner, which elements of the tensors, counted through, its shard has; -1 where there is padding.

    Stage 0 cuts all tensors, and a flag for each of them, into equal parts; from stage 1 on an owner has rows
    of each tensor, as `torch.chunk` makes them.
    """

    def padded(numbers: Tensor) -> Tensor:
        return F.pad(numbers.reshape(-1), (0, -numbers.numel() % ALIGN), value=-1)

    counted, at = list[Tensor](), 0
    for shape in shapes:
        counted.append(torch.arange(at, at + shape.numel()).view(shape))
        at += shape.numel()
    if stage == 0:
        line = torch.cat([padded(numbers) for numbers in counted])
        each = -(-(len(line) + len(shapes)) // (world * ALIGN)) * ALIGN
        return [line[owner * each : (owner + 1) * each] for owner in range(world)]
    heights = [-(-shape[0] // world) for shape in shapes]
    return [
        torch.cat([padded(n[owner * h : (owner + 1) * h]) for n, h in zip(counted, heights, strict=True)])
        for owner in range(world)
    ]


class Wire:
    """Gradients that travel together."""

    def __init__(self, cell: Cell, names: list[str], shapes: list[torch.Size]) -> None:
        self.cell, self.names, self.shapes = cell, names, shapes
        self.places = places(shapes, cell.world, cell.stage)
        self.kept: dict[tuple[int, int], Tensor] = {}  # by sender and owner, what has not been sent
        self.turn = 0
        self.lost = [torch.zeros(2, dtype=torch.float64) for _ in range(cell.world)]

    def reduce(self, grads: list[Grads]) -> Grads:
        """The mean of the ranks' gradients as it arrives, added in rank order."""
        world, stage = self.cell.world, self.cell.stage
        flats = [torch.cat([grad[name].reshape(-1) for name in self.names]) for grad in grads]
        mean = torch.zeros_like(flats[0])
        for owner, at in enumerate(self.places):
            real = at >= 0
            total = torch.zeros(len(at))
            for sender, flat in enumerate(flats):
                values = torch.where(real, flat[at.clamp(min=0)], 0.0)
                came = self.sent((sender, owner), values, real)
                total = came if sender == 0 else total + came
                if sender == owner:
                    self.lost[sender] += torch.stack([(came - values).square().sum(), values.square().sum()])
            total = total * (1.0 / world)
            if stage == 0:  # and back to everybody
                total = self.sent((-1, owner), total, real)
            mean[at[real]] = total[real]
        self.turn += 1
        cuts = mean.split([shape.numel() for shape in self.shapes])
        return {n: cut.view(shape) for n, cut, shape in zip(self.names, cuts, self.shapes, strict=True)}

    def sent(self, way: tuple[int, int], values: Tensor, real: Tensor) -> Tensor:
        codec = self.cell.compress
        if codec is None or self.turn < getattr(codec, "warmup_steps", 0) or not len(values):
            return values
        if not keeps(codec):
            return arrives(codec, values)
        wanted = values + self.kept.get(way, torch.zeros_like(values))
        came = arrives(codec, wanted)
        self.kept[way] = torch.where(real, wanted - came, 0.0)  # nothing waits in the padding
        return came


def wires_of(cell: Cell, model: nn.Module) -> list[Wire]:
    """Tensors in the order of backward, as many together as have room."""
    groups, room = list[list[tuple[str, Tensor]]](), 0
    for name, p in reversed(list(model.named_parameters())):
        if not groups or 4 * p.numel() > room:
            groups.append([])
            room = cell.bucket_bytes
        groups[-1].append((name, p))
        room -= 4 * p.numel()
    return [Wire(cell, [name for name, _ in group], [p.shape for _, p in group]) for group in groups]


# ---------------------------------------------------------------------- policies


def trained_by_hand(cell: Cell) -> Trained:
    return apart(cell) if isinstance(cell.sync, zs.Local) else together(cell)


def together(cell: Cell) -> Trained:
    """All ranks have one model; an update uses the gradient of its own step, or of the one before."""
    model = models.build("mlp")
    optimizer, wires = optimizer_of(cell, model), wires_of(cell, model)
    early = cell.sync.warmup_steps if isinstance(cell.sync, zs.Delayed) else cell.steps
    last: Grads = {}
    for step in range(cell.steps):
        grads = [own_gradient(cell, model, step, rank) for rank in range(cell.world)]
        now = {name: value for wire in wires for name, value in wire.reduce(grads).items()}
        used, last = (now, {}) if step < early else (last, now)
        for name, p in model.named_parameters():
            p.grad = used.get(name)
        if used:
            optimizer.step()
        if step == 0:
            errors = [lost_by(rank, wires) for rank in range(cell.world)]
    return Trained({name: p.detach() for name, p in model.named_parameters()}, errors)


def lost_by(rank: int, wires: list[Wire]) -> float:
    """Of its own shards: the norm of what a code has lost over the norm of the gradient."""
    lost, whole = torch.stack([wire.lost[rank] for wire in wires]).sum(0).tolist()
    return float((lost / whole) ** 0.5)


def apart(cell: Cell) -> Trained:
    """Every rank has a model of its own, and fragments of it meet in turn."""
    policy: zs.Local = cell.sync
    copies = [models.build("mlp") for _ in range(cell.world)]
    inner = [optimizer_of(cell, model) for model in copies]
    for rank, optimizer in enumerate(inner):
        for group in optimizer.param_groups:
            group["lr"] *= policy.rates[rank] if policy.rates else 1.0
    outer = Outer(policy.outer, copies)
    fragments = fragments_of(copies[0], policy.fragments)
    for step in range(1, cell.steps + 1):
        for rank, (model, optimizer) in enumerate(zip(copies, inner, strict=True)):
            own_gradient(cell, model, step - 1, rank)
            optimizer.step()
        for number, names in enumerate(fragments):
            if (step + number * policy.steps // len(fragments)) % policy.steps == 0:
                outer.meet(names)
    if len(fragments) > 1 or cell.steps % policy.steps:  # `run.synchronise()` at the end
        for names in fragments:
            outer.meet(names)
    return Trained({name: p.detach() for name, p in copies[0].named_parameters()}, [])


def fragments_of(model: nn.Module, count: int) -> list[list[str]]:
    """Parameters in their order, cut where a share of all bytes is reached."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    share, at = -(-4 * sum(sizes.values()) // count), 0
    parts: list[list[str]] = [[] for _ in range(count)]
    for name, size in sizes.items():
        parts[min(at // share, count - 1)].append(name)
        at += 4 * size
    return parts


class Outer:
    """Where the last meeting left the ranks, and the momentum of what rounds have changed."""

    def __init__(self, settings: zs.Nesterov, copies: list[Any]) -> None:
        self.settings, self.copies = settings, [dict(model.named_parameters()) for model in copies]
        self.anchors = {name: p.detach().clone() for name, p in self.copies[0].items()}
        self.momentum = {name: torch.zeros_like(value) for name, value in self.anchors.items()}

    @torch.no_grad()
    def meet(self, names: list[str]) -> None:
        lr, mu = self.settings.lr, self.settings.momentum
        for name in names:
            total = self.copies[0][name].clone()
            for other in self.copies[1:]:
                total += other[name]
            delta = self.anchors[name] - total * (1.0 / len(self.copies))
            self.momentum[name] = self.momentum[name] * mu + delta
            self.anchors[name].sub_(delta.add(self.momentum[name], alpha=mu), alpha=lr)
            for copy in self.copies:
                copy[name].copy_(self.anchors[name])


# ---------------------------------------------------------------------- the same through ZeroShard


def sharded(cells: list[Cell]) -> list[Trained]:
    """On a rank of the default group: the weights of each cell, and what its code has lost."""
    return [sharded_one(cell) for cell in cells]


def sharded_one(cell: Cell) -> Trained:
    model = models.build("mlp")
    optimizer = optimizer_of(cell, model)
    run = zs.shard(model, optimizer, **cell.options)
    errors: dict[str, float] = {}
    for step in range(cell.steps):
        for micro in range(cell.accumulate - 1):
            with run.no_sync():
                model(batch(step * cell.accumulate + micro, run.rank)).backward()
        model(batch(step * cell.accumulate + cell.accumulate - 1, run.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        errors = run.stats().error if step == 0 else errors
    run.synchronise()
    weights = models.whole_weights(run)
    run.close()
    return Trained(weights, list(errors.values()))
