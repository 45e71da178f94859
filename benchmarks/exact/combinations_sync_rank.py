"""What a rank of `combinations_sync.py` does: a small odd model, a training script, and its five lives."""

from __future__ import annotations

import contextlib
import logging
import math
import random
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from combinations_sync_case import CUT, STEPS, Case
from torch import nn

import zeroshard as zs

Weights = dict[str, torch.Tensor]


class Adapted(nn.Module):
    """A frozen layer with a trained correction of rank 2."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: torch.Tensor) -> Any:
        return self.base(x) + x @ self.a.t() @ self.b.t()


class Block(nn.Module):
    def __init__(self, width: int, flags: tuple[str, ...]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        up = nn.Linear(width, width + 5)
        self.down = nn.Linear(width + 5, width)
        self.drop = nn.Dropout(0.2) if "dropout" in flags else nn.Identity()
        self.up = Adapted(up) if "lora" in flags else up

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Zoo(nn.Module):
    """Three blocks between an embedding and a head, with the oddities that `flags` name."""

    words, width = 29, 11

    def __init__(self, flags: tuple[str, ...]) -> None:
        super().__init__()
        self.flags = flags
        self.tokens = nn.Embedding(self.words, self.width)
        self.blocks = nn.ModuleList(Block(self.width, flags) for _ in range(3))
        self.head = nn.Linear(self.width, self.words, bias="bias" in flags)
        if "tied" in flags:
            self.head.weight = self.tokens.weight
        if "frozen" in flags:
            self.blocks[1].requires_grad_(False)
        if "unused" in flags:
            self.unused = nn.Linear(3, 4)
        if "seldom" in flags:
            self.seldom = nn.Linear(self.width, self.width)
        if "scalar" in flags:
            self.scale = nn.Parameter(torch.tensor(1.0))
        if "empty" in flags:
            self.nothing = nn.Parameter(torch.zeros(0, 3))
        if "bn" in flags:
            self.bn = nn.BatchNorm1d(self.width)

    def forward(self, ids: torch.Tensor, seldom: bool = False, boom: float = 1.0) -> Any:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        if seldom and "seldom" in self.flags:
            x = x + self.seldom(x)
        if "bn" in self.flags:
            x = self.bn(x.flatten(0, 1)).view(x.shape)
        if "scalar" in self.flags:
            x = x * self.scale
        if "empty" in self.flags:
            x = x + self.nothing.sum()
        logits = self.head(x).float().flatten(0, 1)
        return nn.functional.cross_entropy(logits, ids.roll(1, 1).flatten()) * boom


def batch(seed: int) -> torch.Tensor:
    return torch.randint(Zoo.words, (4, 6), generator=torch.Generator().manual_seed(seed))


PLAIN: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd0": lambda p: torch.optim.SGD(p, lr=0.05),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


def optimizers(name: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    every = list(model.parameters())
    wide, narrow = [p for p in every if p.dim() > 1], [p for p in every if p.dim() <= 1]
    if name == "groups":
        rest = {"params": narrow, "lr": 3e-2, "weight_decay": 0.0}
        return [torch.optim.AdamW([{"params": wide, "weight_decay": 0.1}, rest], lr=1e-2)]
    if name == "two":
        return [PLAIN["sgd"](wide), PLAIN["adamw"](narrow)]
    if name == "muon":
        square = [p for p in every if p.dim() == 2 and p.numel()]
        return [
            torch.optim.Muon(square, lr=0.01),
            PLAIN["adamw"]([p for p in every if p.dim() != 2 or not p.numel()]),
        ]
    if name == "trainable":
        return [PLAIN["adamw"]([p for p in every if p.requires_grad])]
    return [PLAIN[name](every)]


class Life:
    """One process of a training job, from `zs.shard` to `close()`."""

    def __init__(self, case: Case) -> None:
        torch.set_num_threads(1)
        logging.getLogger("zeroshard").setLevel(logging.ERROR)
        torch.manual_seed(3)
        random.seed(3)
        self.case = case
        self.folder = tempfile.mkdtemp(prefix="zs-combinations-")
        self.model = Zoo(case.flags)
        self.optimizers = optimizers(case.opt, self.model)
        self.schedulers = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
            for optimizer in (self.optimizers if case.sched else [])
        ]
        self.scaler = torch.amp.GradScaler("cpu", enabled=case.scaled, init_scale=256.0, growth_interval=3)
        self.run = zs.shard(self.model, self.optimizers, **case.made(self.folder))
        self.losses: list[float] = []
        self.skips: list[bool] = []
        self.norms: list[float] = []
        torch.manual_seed(100 + self.run.rank)

    @property
    def extra_state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the run."""
        return {"schedulers": self.schedulers, "scalers": [self.scaler] if self.case.scaled else []}

    def train(self, first: int, end: int, look: bool = False) -> None:
        for step in range(first, end):
            self.backward(step)
            self.update()
            self.switch(step + 1)
            for what in self.case.looks if look else ():
                self.look(what, step)

    def switch(self, step: int) -> None:
        """An adaptive policy that found another link, in the step before this one."""
        sync_strategy: Any = self.run._runtime.sync_strategy
        if hasattr(sync_strategy, "_switch") and step in (2, 5):
            sync_strategy._switch(
                (1 + step) % len(sync_strategy.sync_strategies) if step == 5 else 1,
                "the benchmark asks for it",
            )
            self.run._runtime.supply.stale = (
                True  # as after the step in which a sync strategy switches by itself
            )

    def backward(self, step: int) -> None:
        case, rank = self.case, self.run.rank
        if case.zero == "zeros" and step == CUT:
            self.model.zero_grad()  # a gradient of zeros is no part of a checkpoint, as in plain PyTorch
        for micro in range(case.acc):
            last = micro == case.acc - 1
            boom = 1.0
            for at, who, factor in case.boom:
                if (at, who) == (step, rank) and last:
                    boom = factor
            with contextlib.nullcontext() if last or not case.accumulates_apart else self.run.no_sync():
                ids = batch(1000 * step + 10 * micro + rank)
                loss = self.model(ids, seldom=(rank + step) % 2 == 1, boom=boom) / case.acc
                self.scaler.scale(loss).backward()
        self.losses.append(loss.item())

    def update(self) -> None:
        case, skip = self.case, False
        if case.clip is not None:
            if case.scaled:
                for optimizer in self.optimizers:
                    self.scaler.unscale_(optimizer)
            held = [p for p in self.model.parameters() if p.grad is not None]
            norm: Any = nn.utils.clip_grad_norm_(held, case.clip)
            self.norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
            skip = not math.isfinite(self.norms[-1]) and not case.scaled
        self.skips.append(skip)
        if not skip:
            for optimizer in self.optimizers:
                self.scaler.step(optimizer)
            self.scaler.update()
        for scheduler in self.schedulers:
            scheduler.step()
        if case.zero == "model":
            self.model.zero_grad()
        else:
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=case.zero == "opt")

    def look(self, what: str, step: int) -> None:
        """What a script may do between steps; it must change nothing."""
        run, model = self.run, self.model
        if what == "eval":
            with self.evaluating():
                model(batch(77))
        elif what == "gathered":
            with run.gathered("blocks*") as weights:
                for weight in weights.values():
                    float(weight.detach().float().norm())
        elif what == "kept_full":
            with run.kept_full(), self.evaluating():
                for _ in range(1 + run.rank):
                    model(batch(77))
        elif what == "state":
            model.load_state_dict(model.state_dict())
            for optimizer in self.optimizers:
                optimizer.load_state_dict(optimizer.state_dict())
        elif what == "stats":
            str(run.stats())
        elif what == "sync":
            if step == CUT - 1:
                run.synchronise()
        elif what == "preempt":
            run.preempted()
        elif what == "write":
            with run.gathered(write=True):
                pass

    @contextlib.contextmanager
    def evaluating(self) -> Any:
        self.model.eval()
        with torch.no_grad():
            yield
        self.model.train()

    def weights(self) -> Weights:
        with self.run.gathered() as weights:
            return {name: weight.detach().clone() for name, weight in weights.items()}

    def end(self, middle: Weights | None = None) -> dict[str, Any]:
        """Closes the run, trains the plain model that is left for a step, and tells what was found."""
        self.run.synchronise()
        weights = self.weights()
        sync = str(self.run.stats().sync)
        self.run.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        closed = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.model(batch(5)).backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return {
            "weights": weights,
            "middle": middle,
            "losses": self.losses,
            "skips": self.skips,
            "norms": self.norms,
            "close differs": differing(weights, closed),
            "apart": "Local" in sync or "Local" in str(self.case.options),
        }


def differing(one: Weights, other: Weights) -> list[str]:
    """Names of weights that are not the same bit by bit."""
    return [name for name in one if name not in other or not same(one[name], other[name])]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(a.isnan(), b.isnan()):
        return False
    return torch.equal(a.double().nan_to_num(1e300), b.double().nan_to_num(1e300))


def whole(case: Case) -> dict[str, Any]:
    """The run that nothing disturbs: what the others are compared with."""
    life = Life(case)
    life.train(0, CUT)
    life.run.synchronise()
    middle = life.weights()
    life.train(CUT, STEPS)
    return life.end(middle)


def cut(case: Case, path: str) -> dict[str, Any]:
    """Looked at between steps, saved in the middle, and trained on."""
    life = Life(case)
    life.train(0, CUT, look=True)
    life.run.synchronise()
    middle = life.weights()
    guard: Any = life.run.save(path, extra={"at": CUT}, background=case.background, **life.extra_state)
    life.train(CUT, STEPS)
    if case.background:
        guard.wait()
    return life.end(middle)


def resumed(case: Case, path: str) -> dict[str, Any]:
    """A new job that goes on from the checkpoint."""
    return loaded(Life(case), path, STEPS)


def rolled(case: Case, path: str) -> dict[str, Any]:
    """A job that has gone on goes back to the checkpoint."""
    life = Life(case)
    life.train(0, STEPS)
    life.run.synchronise()
    return loaded(life, path, STEPS)


def other(case: Case, path: str) -> dict[str, Any]:
    """Another configuration: the weights arrive, and training goes on."""
    return loaded(Life(case), path, CUT + 3, strict=False)


def loaded(life: Life, path: str, end: int, strict: bool = True) -> dict[str, Any]:
    extra = life.run.load(path, strict=strict, **life.extra_state)
    assert extra == {"at": CUT}, f"extra= came back as {extra}"
    middle = life.weights()
    life.losses, life.skips, life.norms = [], [], []
    life.train(CUT, end)
    return life.end(middle)


def refusable(life: Callable[..., dict[str, Any]], case: Case, *path: str) -> dict[str, Any] | str:
    """What a life found, or the text with which its options were refused."""
    try:
        return life(case, *path)
    except (zs.OptionError, zs.PlanError) as error:
        return str(error)
    except zs.StateError as error:
        if not case.keeps_old_state and "undo=False" in str(error):  # in the step that would need it
            return str(error)
        raise
