"""A combination by hand, in plain PyTorch and one process: what ZeroShard's run has to equal."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from combinations_case import CLIPS, Case, Leg
from combinations_model import (
    Net,
    batch,
    late_group,
    model_of,
    optimizers_of,
    schedules_of,
    set_frozen,
    skipped_block,
    unseen,
)
from torch import Tensor, nn

SCALE = 1024.0  # of the loss, under fp16
PLAIN_LIMIT, VALUE_LIMIT = 0.5, 0.05
LATE_STEP, FIRST_CLOSE = 3, 4


@dataclass
class Trained:
    """What is compared: the mean loss of each step, what evaluations said, and the weights."""

    losses: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    first: dict[str, Tensor] = field(default_factory=dict)


def may_close(case: Case, step: int) -> bool:
    """Whether a run may end here and plain training go on with its model and optimizer."""
    return case.world == 1 and case.wide and step >= FIRST_CLOSE and not case.late_group


def write(weights: Mapping[str, Tensor]) -> None:
    """What the event "write gathered" changes."""
    with torch.no_grad():
        weights["norm.weight"].mul_(0.9)
        weights["blocks.0.down.weight"].add_(0.01)


def clip(case: Case, model: nn.Module, limit: float | None) -> None:
    """Torch's own clipping: to a norm if one is given, by value if the case says so."""
    graded = [p for p in model.parameters() if p.grad is not None]
    if limit is not None:
        nn.utils.clip_grad_norm_(graded, limit)
    if case.clip == "value":
        nn.utils.clip_grad_value_(graded, VALUE_LIMIT)


def happen_between(
    events: tuple[str, ...], model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """What the loop does between backward and step with what it has: gradients, weights, rates."""
    graded = [p for p in model.parameters() if p.grad is not None]
    some = [p for n, p in model.named_parameters() if p.grad is not None and n.startswith(("norm", "head"))]
    for event in events:
        if event in ("halve gradients", "halve some gradients"):
            for p in graded if event == "halve gradients" else some:
                p.grad.mul_(0.5)  # type: ignore[union-attr]
        elif event == "add to gradients":
            for p in graded:
                p.grad.add_(p.detach(), alpha=0.01)  # type: ignore[union-attr]
        elif event == "replace gradients":
            for p in graded:
                p.grad = p.grad * 0.5  # type: ignore[operator]
        elif event == "read norms":
            nn.utils.clip_grad_norm_(graded, math.inf)
            assert all(float(p.grad.norm()) >= 0 for p in graded if p.grad is not None)
        elif event == "clip some" and some:
            nn.utils.clip_grad_norm_(some, 0.05)
        elif event == "read weights":
            assert all(math.isfinite(float(p.detach().sum())) for p in model.parameters())
        elif event == "shrink weights":
            with torch.no_grad():
                for p in graded:
                    p.mul_(0.99)
        elif event == "halve rate between":
            halve_rates(optimizers)
        elif event in ("drop a gradient", "zero a gradient"):
            chosen = [p for p in some if p.grad is not None][:1]
            for p in chosen if event == "zero a gradient" else ():
                p.grad.zero_()  # type: ignore[union-attr]
            for p in chosen if event == "drop a gradient" else ():
                p.grad = None
        graded = [p for p in graded if p.grad is not None]
        some = [p for p in some if p.grad is not None]


def halve_rates(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.5


def penalty(model: nn.Module) -> Tensor | None:
    """What the loop computes of parameters itself."""
    own = [p for n, p in model.named_parameters() if p.requires_grad and n.startswith(("norm", "blocks.0"))]
    return 0.01 * sum((p.square().sum() for p in own), torch.zeros((), device=own[0].device)) if own else None


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}


def in_its_own_dtype(norm: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return norm(x.float()).to(x.dtype)


class Plain:
    """The training of a case in one process, all ranks' batches one after another."""

    def __init__(self, legs: list[Leg]) -> None:
        case = legs[0].case
        self.legs, self.case, self.model = legs, case, model_of(case)
        self.optimizers = optimizers_of(case, self.model)
        self.schedules = schedules_of(case, self.optimizers)
        self.first = weights_of(self.model)
        narrow = {"none": None, "fp16": torch.float16}.get(case.precision, torch.bfloat16)
        self.computed: torch.dtype | None = narrow
        sums = {"bf16, fp32 sums": torch.float32, "fp16": torch.float32}
        self.landed = sums.get(case.precision, narrow)
        self.scale = SCALE if case.precision == "fp16" else 1.0

    def kept(self, name: str) -> bool:
        """Whether a parameter is computed with as it is."""
        return self.case.precision == "bf16, norms kept" and "norm" in name

    def computing(self) -> Net:
        """The model that computes: of low precision, where the case says so."""
        model = copy.deepcopy(self.model)
        for name, parameter in model.named_parameters():
            parameter.grad = None
            if self.computed is not None and not self.kept(name):
                parameter.data = parameter.data.to(self.computed)
        for module in model.modules():
            if isinstance(module, nn.LayerNorm) and self.kept("norm"):
                module.forward = partial(in_its_own_dtype, module.forward)
        return model

    def train(self) -> list[Trained]:
        """What each leg came to. What is not in a checkpoint ends with a leg: gradients of zeros."""
        return [self.train_on(leg) for leg in self.legs]

    def train_on(self, leg: Leg) -> Trained:
        saved, closed = None, False
        self.case, self.found, self.graded = leg.case, Trained(first=self.first), set()
        for step in range(leg.first, leg.end):
            for event in self.case.events.get(step, ()):
                closed = closed or (event == "close" and may_close(self.case, step))
                if event == "write gathered":
                    write(dict(self.model.named_parameters()))
                if event in ("save", "save in background") and not closed:
                    saved = self.state()
                if event == "halve rate":
                    halve_rates(self.optimizers)
                if event == "load" and not closed and saved is not None:
                    self.restore(saved)
                if event in ("evaluate", "kept full", "infer"):
                    self.evaluate()
            set_frozen(self.case, self.model, step)
            if self.case.late_group and step == LATE_STEP:
                self.optimizers[0].add_param_group(late_group(self.model))
            self.backward(step)
            if self.case.has("overflow", step):
                self.overflow(step)
            elif not self.case.has("skip step", step):
                self.update(step)
            for parameter in self.model.parameters():
                parameter.grad = None
        self.found.weights = weights_of(self.model)
        return self.found

    def evaluate(self) -> None:
        with torch.no_grad():
            self.found.evaluations.append(self.computing().eval()(unseen(self.case))["loss"].item())

    def owners(self) -> list[Any]:
        return [self.model, *self.optimizers, *self.schedules]

    def state(self) -> list[dict[str, object]]:
        return copy.deepcopy([o.state_dict() for o in self.owners()])

    def restore(self, saved: list[dict[str, object]]) -> None:
        for owner, state in zip(self.owners(), saved, strict=True):
            owner.load_state_dict(copy.deepcopy(state))

    def backward(self, step: int) -> None:
        """Gradients of all ranks, rounded where they travel, then their mean, rounded where it lands."""
        case, sums, losses = self.case, dict[str, Tensor](), []
        for rank in range(case.world):
            model = self.computing()
            micro_batches = case.micro_batches(step)
            for micro in range(micro_batches):
                loss = model(batch(case, step, rank, micro), skipped_block(case, step))["loss"]
                losses.append(loss.item())
                (loss * self.scale / micro_batches).backward()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    wide = torch.promote_types(parameter.dtype, torch.float32)
                    sums[name] = parameter.grad.to(wide) + sums.get(name, 0)
        self.found.losses.append(sum(losses) / len(losses))
        # A GradScaler unscales what optimizers hold; the late group's gradients count scaled until they do.
        held = {id(p) for o in self.optimizers for group in o.param_groups for p in group["params"]}
        for name, parameter in self.model.named_parameters():
            if name in sums:
                mean = sums[name] / case.world
                if self.landed is not None and not self.kept(name):
                    mean = mean.to(self.landed).float()
                parameter.grad = mean / self.scale if id(parameter) in held else mean
            elif case.zero == "to zeros" and name in self.graded:
                parameter.grad = torch.zeros_like(parameter)
        self.graded |= sums.keys()
        added = penalty(self.model) if case.has("penalty", step) else None
        if added is not None:
            added.backward()

    def overflow(self, step: int) -> None:
        """A scaler steps not, and scales less from then on."""
        if not self.case.has("skip step", step):
            self.scale /= 2
            for schedule in self.schedules:
                schedule.step()

    def update(self, step: int) -> None:
        events = self.case.events.get(step, ())
        if "evaluate between" in events:
            self.evaluate()
        happen_between(events, self.model, self.optimizers)
        limit = PLAIN_LIMIT if self.case.clip == "plain" else CLIPS.get(self.case.clip)
        clip(self.case, self.model, limit)
        for optimizer in self.optimizers:
            optimizer.step()
            if "step twice" in events:
                optimizer.step()
        for schedule in self.schedules:
            schedule.step()
