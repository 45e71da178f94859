"""The models, batches, optimizers and options of combinations."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from combinations_case import CLIPS, PLANNED, Case
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, StepLR

import zeroshard as zs
from zeroshard.extend import register_host_update

WIDTH = 12


class Lion(torch.optim.Optimizer):
    """As Chen et al. wrote it: none of torch's."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            (first, second), lr = group["betas"], group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - lr * group["weight_decay"])
                p.add_((mean * first + p.grad * (1 - first)).sign_(), alpha=-lr)
                mean.mul_(second).add_(p.grad * (1 - second))
        return loss


register_host_update(Lion, "lion")


class Lora(nn.Module):
    """A frozen layer with a trained one of rank 2 beside it."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.base = nn.Linear(inner, outer).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, inner) * 0.3)
        self.b = nn.Parameter(torch.randn(outer, 2) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        whole: Tensor = self.base(x)
        return whole + x @ self.a.t() @ self.b.t()


class Block(nn.Module):
    """A residual block; some kinds have scalars, empty parameters or a list of them. All have odd buffers."""

    calls: Tensor
    phases: Tensor

    def __init__(self, kind: str, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = Lora(WIDTH, hidden) if kind == "lora" else nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)
        odd = kind == "empty and scalar"
        self.scale = nn.Parameter(torch.tensor(0.7)) if odd or kind == "lora" else None
        self.empty = nn.Parameter(torch.empty(0, 3)) if odd else None
        vectors = [nn.Parameter(torch.randn(WIDTH) * 0.1) for _ in range(2)] if kind == "list" else []
        self.vectors = nn.ParameterList(vectors)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("phases", torch.ones(2, dtype=torch.complex64), persistent=False)

    def reset_parameters(self) -> None:
        """What no file has."""
        self.phases.fill_(1)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        if self.scale is not None:
            y = y * self.scale
        if self.empty is not None:
            y = y + (self.empty * 1).sum()
        if len(self.vectors):
            y = y + self.vectors[0] - self.vectors[1] * x
        return x + y


class Net(nn.Module):
    """A model of tokens that returns its loss in a dict."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embedding = nn.Embedding(case.vocab, WIDTH)
        blocks = [Block(case.block, case.hidden + number % 2) for number in range(case.blocks)]
        self.blocks = nn.ModuleList(blocks + blocks[:1] * case.shared_module)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, case.vocab, bias=False)
        if case.tied:
            self.head.weight = self.embedding.weight
        if case.frozen:
            self.blocks[1].requires_grad_(False)
        if case.adapters:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(name.endswith((".a", ".b", "scale")))
        self.raises = False

    def forward(self, tokens: Tensor, skipped: int | None = None) -> dict[str, Tensor]:
        return self.training_step(tokens, skipped)

    def training_step(self, tokens: Tensor, skipped: int | None = None) -> dict[str, Tensor]:
        x = self.embedding(tokens[:, :-1])
        for number, block in enumerate(self.blocks):
            if number != skipped:
                x = block(x)
            if self.raises:
                raise ValueError("as asked")
        logits = self.head(self.norm(x)).flatten(0, 1).float()
        return {"loss": F.cross_entropy(logits, tokens[:, 1:].flatten())}


# Ranks know it by their environment; see `--device`.
DEVICE = os.environ.get("COMBINATIONS_DEVICE", "cpu")


def model_of(case: Case) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        model = Net(case)
    if case.dtype == "float64":
        for parameter in model.parameters():
            parameter.data = parameter.data.double()
    return model.to(DEVICE)


def empty_of(case: Case) -> tuple[Net, Callable[[nn.Module], None]]:
    """The same on the meta device, and what fills a module of it."""
    full = model_of(case)
    with torch.device("meta"):
        model = Net(case)
    for parameter, filled in zip(model.parameters(), full.parameters(), strict=True):
        parameter.data = parameter.data.to(filled.dtype)
    twins = {id(module): template for module, template in zip(model.modules(), full.modules(), strict=True)}

    def fill(module: nn.Module) -> None:
        template = twins[id(module)]
        for own, values in ((module._parameters, template._parameters), (module._buffers, template._buffers)):
            for name, tensor in own.items():
                if tensor is not None:
                    tensor.copy_(values[name])

    return model, fill


def file_of(case: Case, folder: Path) -> Path:
    """The values of `empty_of` in a file, as other libraries write them."""
    state = {name: tensor.clone() for name, tensor in model_of(case).state_dict().items()}
    save_file(state, folder / "model.safetensors")
    return folder


def batch(case: Case, step: int, rank: int, micro: int) -> Tensor:
    seeded = torch.Generator().manual_seed(case.seed * 7919 + 1000 * step + 10 * rank + micro)
    return torch.randint(case.vocab, (1 + rank if case.uneven else 2, 6), generator=seeded).to(DEVICE)


def unseen(case: Case) -> Tensor:
    """The batch of evaluations."""
    return batch(case, 99, 0, 0)


def skipped_block(case: Case, step: int) -> int | None:
    return case.blocks - 1 if case.has("skip block", step) else None


def set_frozen(case: Case, model: Net, step: int) -> None:
    """Freezes or thaws a block where this step says so."""
    for event in case.events.get(step, ()):
        if event in ("freeze", "thaw") and not case.frozen:
            block = model.blocks[1].requires_grad_(event == "thaw")
            if case.block == "lora":
                block.get_submodule("up.base").requires_grad_(False)


def of_late_group(name: str) -> bool:
    return name.startswith(("head", "embedding"))


def late_group(model: Net) -> dict[str, Any]:
    """The group that an optimizer gets after some steps."""
    return {"params": [p for n, p in model.named_parameters() if p.requires_grad and of_late_group(n)]}


def optimizers_of(case: Case, model: Net) -> list[torch.optim.Optimizer]:
    optim, rate = torch.optim, 5e-2 if case.optimizer in ("sgd", "momentum", "nesterov") else 1e-2
    named = list(model.named_parameters())
    if case.optimizer == "muon":
        trained = [p for _, p in named if p.requires_grad]
        matrices = [p for p in trained if p.dim() == 2 and p.numel()]
        rest = [p for p in trained if not (p.dim() == 2 and p.numel())]
        return [optim.Muon(matrices, lr=1e-2), *([optim.AdamW(rest, lr=rate)] if rest else [])]
    if case.adapters and case.seed % 2:  # else the optimizer is given frozen ones, too
        named = [(n, p) for n, p in named if p.requires_grad]
    if case.late_group:
        named = [(n, p) for n, p in named if p.requires_grad and not of_late_group(n)]
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "adamw": (optim.AdamW, {"weight_decay": 0.1}),
        "fused": (optim.AdamW, {"weight_decay": 0.1, "fused": True}),
        "adam": (optim.Adam, {"weight_decay": 0.01}),
        "decoupled": (optim.Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
        "tensor rate": (optim.AdamW, {"lr": torch.tensor(rate)}),
        "maximize": (optim.AdamW, {"lr": rate / 10, "maximize": True}),
        "amsgrad": (optim.AdamW, {"amsgrad": True}),
        "sgd": (optim.SGD, {"weight_decay": 0.01}),
        "momentum": (optim.SGD, {"momentum": 0.9, "dampening": 0.1}),
        "nesterov": (optim.SGD, {"momentum": 0.9, "nesterov": True}),
        "rmsprop": (optim.RMSprop, {"lr": rate / 10}),
        "adafactor": (optim.Adafactor, {}),
        "nadam": (optim.NAdam, {}),
        "adagrad": (optim.Adagrad, {}),
        "adamax": (optim.Adamax, {}),
        "radam": (optim.RAdam, {}),
        "rprop": (optim.Rprop, {"lr": rate / 10}),
        "asgd": (optim.ASGD, {}),
        "adadelta": (optim.Adadelta, {"lr": 1.0}),
        "lion": (Lion, {"lr": rate / 10}),
    }
    kind, options = kinds[case.optimizer]
    others = [optim.AdamW([p for _, p in named[1::2]], lr=rate)] if case.two else []
    named = named[::2] if case.two else named
    groups = [{"params": [p for _, p in named[i :: case.groups]]} for i in range(case.groups)]
    groups = [group for group in groups if group["params"]]
    for number, group in enumerate(groups[1:] if case.optimizer != "adafactor" else (), start=1):
        group.update(group_options(case.optimizer, rate, number))
    return [kind(groups, **{"lr": rate, **options}), *others]


def group_options(optimizer: str, rate: float, number: int) -> dict[str, Any]:
    """What a group that is not the first has of its own."""
    own: dict[str, Any] = {"lr": rate / (number + 1)}
    if optimizer == "tensor rate":
        own["lr"] = torch.tensor(own["lr"])
    if optimizer != "rprop":
        own["weight_decay"] = 0.05 * number
    return own


def schedules_of(case: Case, optimizers: list[torch.optim.Optimizer]) -> list[LRScheduler]:
    if case.schedule == "none":
        return []
    cycled = ("adamw", "fused", "adam", "amsgrad", "decoupled", "momentum", "nesterov", "maximize")
    if case.schedule == "one cycle" and case.optimizer in cycled:
        return [
            OneCycleLR(o, max_lr=[group["lr"] for group in o.param_groups], total_steps=20)
            for o in optimizers
        ]
    return [StepLR(o, 2, gamma=0.7) for o in optimizers]


def options_of(case: Case, folder: Path) -> dict[str, Any]:
    """What `zs.shard` is called with."""
    units = {"blocks": ("blocks.*",), "nested": ("blocks.*", "blocks.*.up")}
    precisions: dict[str, Any] = {
        "none": None,
        "bf16, norms kept": zs.Precision(keep=("*norm*",)),
        "bf16, fp32 sums": zs.Precision(reduce="float32"),
    }
    options: dict[str, Any] = {
        "stage": case.stage,
        "prefetch": case.prefetch if case.stage == 3 else None,
        "recompute": case.recompute,
        "units": units.get(case.units, case.units),
        "clip_norm": CLIPS.get(case.clip),
        "transport": case.transport if case.world > 1 and DEVICE == "cpu" else "auto",
        "precision": precisions.get(case.precision, case.precision),
    }
    if case.offload == PLANNED:  # the rest is the plan's to say
        given = ("units", "clip_norm", "transport", "precision")
        return {name: options[name] for name in given if options[name] is not None}
    if case.bucket:
        options["bucket_bytes"] = case.bucket
    if case.split != "auto" and case.world > 1 and case.stage:
        options["split"] = case.split
    if case.offload != "none":
        options["offload"] = zs.Offload(**offload_options(case, folder))
    return {name: value for name, value in options.items() if value is not None}


def offload_options(case: Case, folder: Path) -> dict[str, Any]:
    if case.offload == "split, device":
        return {"optimizer": "device", "master": "split"}
    dice = random.Random(case.seed)
    room = {
        "device_bytes": 20_000 + dice.choice([0, 2_000, 8_000, 10**6]),
        "host_bytes": dice.choice([60_000, 200_000]),
        "path": str(folder),
    }
    kinds: dict[str, dict[str, Any]] = {
        "host": {},
        "parameters on host": {"parameters": "host"},
        "disk": {"optimizer": "disk", "path": str(folder)},
        "all on disk": {"optimizer": "disk", "parameters": "disk", "path": str(folder)},
        "auto": {"optimizer": "auto", **room},
        "auto with parameters": {"optimizer": "auto", "parameters": "auto", **room},
        "split": {"master": "split"},
        "split, int8 moments": {"master": "split", "moments": "int8"},
        "split, disk": {"optimizer": "disk", "master": "split", "path": str(folder)},
        "int8 moments": {"moments": "int8"},
        "no undo": {"undo": False},
    }
    return {**kinds[case.offload], "stage_bytes": case.stage_bytes, "stages": case.stages}
