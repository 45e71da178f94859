"""Loops with what people use beside a model and its optimizer: under torch's DDP, and sharded."""

from __future__ import annotations

import csv
import inspect
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import zeroshard as zs

WIDE, STEPS = 128, 4


@dataclass
class Outcome:
    """What a loop came to: losses and other numbers, and whole tensors by name."""

    numbers: list[float]
    tensors: dict[str, Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.inner(self.norm(x)).tanh())


class Net(nn.Module):
    """Blocks, batch statistics, and a head with 8 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.statistics, self.head = nn.BatchNorm1d(WIDE), nn.Linear(WIDE, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.statistics(x))
        return scores


def net(kind: Callable[[], nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def batch(number: int) -> tuple[Tensor, Tensor]:
    own = torch.Generator().manual_seed(100 * number + dist.get_rank())
    return torch.randn(6, WIDE, generator=own), torch.randint(8, (6,), generator=own)


class Loop:
    """A model under torch's wrapper (`stage` None), or sharded."""

    def __init__(self, stage: int | None, model: nn.Module, optimizer: Optimizer, **options: Any) -> None:
        self.net, self.optimizer, self.numbers = model, optimizer, list[float]()
        self.run = None if stage is None else zs.shard(model, optimizer, stage=stage, **options)
        self.model = nn.parallel.DistributedDataParallel(model) if stage is None else model

    def loss(self, number: int) -> Tensor:
        inputs, targets = batch(number)
        loss = nn.functional.cross_entropy(self.model(inputs).float(), targets)
        self.numbers.append(loss.item())
        return loss

    def step(self, number: int) -> None:
        self.loss(number).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def whole(self, write: bool = False) -> AbstractContextManager[Any]:
        return nullcontext() if self.run is None else self.run.gathered(write=write)

    def outcome(self, **others: Tensor) -> Outcome:
        """Statistics of batches are each rank's own until the next forward."""
        state = self.net.state_dict() if self.run is None else self.run.full_state_dict(None)
        state = {name.replace("_orig_mod.", ""): value.clone() for name, value in state.items()}
        kept = {name: value for name, value in state.items() if "running_" not in name}
        return Outcome(self.numbers, kept | others)


def adamw(model: nn.Module) -> Optimizer:
    return AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


# ---- torch's own ----


def autocast(stage: int | None) -> Outcome:
    """In bf16, with a scale that one rank's infinite loss halves."""
    model = net()
    loop = Loop(stage, model, SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    for number in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loop.loss(number)
        infinite = number == 1 and dist.get_rank() == 1
        scaler.scale(loss * torch.inf if infinite else loss).backward()
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()
        loop.numbers.append(scaler.get_scale())
    return loop.outcome()


def compiled(stage: int | None, how: str, backend: str = "aot_eager") -> Outcome:
    """`torch.compile(model)`, `model.compile()`, or each block."""
    model = net()
    given = model
    if how == "wrapped":
        given = torch.compile(model, backend=backend)  # type: ignore[assignment]
    else:
        for module in model.blocks if how == "blocks" else [model]:  # type: ignore[union-attr]
            module.compile(backend=backend)
    loop = Loop(stage, given, adamw(model))
    for number in range(STEPS):
        loop.step(number)
    return loop.outcome()


def averaged(stage: int | None) -> Outcome:
    """A moving average of weights, with statistics of its own, from which the model goes on."""
    model = net()
    loop = Loop(stage, model, adamw(model))
    with loop.whole():
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=False)
    for number in range(STEPS):
        loop.step(number)
        with loop.whole():
            average.update_parameters(model)
    update_bn([batch(0)[0]], average)
    found = {f"average.{name}": value.clone() for name, value in average.state_dict().items()}
    with loop.whole(write=True), torch.no_grad():
        for mine, other in zip(model.parameters(), average.module.parameters(), strict=True):
            mine.copy_(other)
    for number in range(STEPS):
        loop.step(number)
    return loop.outcome(**found)


def of_first(model: Any) -> Tensor:
    """Rank 0's statistics: without a backward, those of other ranks are their own."""
    mean: Tensor = model.statistics.running_mean.clone()
    return mean if dist.get_rank() == 0 else torch.zeros(())


def statistics(stage: int | None) -> Outcome:
    """`update_bn` of the model itself, after training; and a loop that puts new tensors in their place."""
    model: Any = net()
    loop = Loop(stage, model, adamw(model))
    loop.step(0)
    update_bn([batch(number)[0] for number in range(2)], loop.model)
    found = {"after": of_first(model)}
    loop.step(1)
    model.statistics.running_mean = torch.zeros(WIDE)
    model.statistics.running_var = torch.ones(WIDE)
    model.train()
    for number in range(2):
        loop.model(batch(number)[0])
    found["replaced"] = of_first(model)
    loop.step(2)
    return loop.outcome(**found)


# ---- other libraries ----


def measured(stage: int | None) -> Outcome:
    """Metrics of torchmetrics, beside the model and as parts of it."""
    torchmetrics: Any = import_module("torchmetrics")

    class Measured(Net):
        def __init__(self) -> None:
            super().__init__()
            kinds = {"task": "multiclass", "num_classes": 8}
            self.seen = torchmetrics.MetricCollection(
                {"accuracy": torchmetrics.Accuracy(**kinds), "f1": torchmetrics.F1Score(**kinds)}
            )

    model: Any = net(Measured)
    loop = Loop(stage, model, adamw(model))
    mean = torchmetrics.MeanMetric()
    for _ in range(2):
        for number in range(STEPS):
            loop.step(number)
            inputs, targets = batch(number)
            with torch.no_grad():
                model.seen.update(loop.model(inputs), targets)
            mean.update(loop.numbers[-1])
        found = [*model.seen.compute().values(), mean.compute()]
        loop.numbers += [value.item() for value in found]
        model.seen.reset()
        mean.reset()
    return loop.outcome()


def adapted(stage: int | None) -> Outcome:
    """LoRA of PEFT: frozen weights are sharded, too; the adapter is saved alone, and merged in the end."""
    peft: Any = import_module("peft")
    config = peft.LoraConfig(r=4, target_modules=["inner", "outer"], modules_to_save=["head"])
    model = peft.get_peft_model(net(), config)
    loop = Loop(stage, model, adamw(model))
    for number in range(STEPS):
        loop.step(number)
    state = model.state_dict() if loop.run is None else loop.run.full_state_dict(None)
    adapter = peft.get_peft_model_state_dict(model, state_dict=state)
    assert 0 < len(adapter) < len(state)
    found = {f"adapter.{name}": value.clone() for name, value in adapter.items()}
    outcome = loop.outcome(**found)
    if loop.run is not None:
        loop.run.close()
    merged = model.merge_and_unload()
    outcome.tensors |= {f"merged.{name}": value.clone() for name, value in merged.named_parameters()}
    return outcome


def adapted_later(stage: int) -> None:
    """An adapter that comes when the model is sharded."""
    peft: Any = import_module("peft")
    config = peft.LoraConfig(r=4, target_modules=["inner"])
    model = peft.get_peft_model(net(), config)
    loop = Loop(stage, model, adamw(model))
    loop.step(0)
    model.add_adapter("second", config)
    model.set_adapter("second")
    loop.step(1)


def models_of_timm(stage: int | None) -> Outcome:
    """A vision transformer with timm's own average of weights, clipping and scaler."""
    # Its torchvision may be built for GPUs, and then lacks an operator that its import asks for.
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    timm, utils = import_module("timm"), import_module("timm.utils")
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 8}
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, **sizes)
    loop = Loop(stage, model, adamw(model))
    with loop.whole():
        average = utils.ModelEmaV3(model, decay=0.9)
    for number in range(STEPS):
        own = torch.Generator().manual_seed(100 * number + dist.get_rank())
        images, targets = torch.randn(4, 3, 16, 16, generator=own), torch.randint(8, (4,), generator=own)
        loss = nn.functional.cross_entropy(loop.model(images), targets)
        loop.numbers.append(loss.item())
        loss.backward()
        utils.dispatch_clip_grad(model.parameters(), 100.0, mode="norm")
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        with loop.whole():
            average.update(model)
    found = {f"average.{name}": value.clone() for name, value in average.module.state_dict().items()}
    return loop.outcome(**found)


# ---- optimizers of other libraries ----


def optimizer_of(library: str, name: str, model: nn.Module) -> Optimizer:
    """By its name, with what it asks for."""
    kind: Any = getattr(import_module(library), name)
    takes = inspect.signature(kind.__init__).parameters
    keywords: dict[str, Any] = {"num_iterations": 10} if "num_iterations" in takes else {}
    if library != "pytorch_optimizer" or takes["lr"].default is inspect.Parameter.empty:
        keywords["lr"] = 1e-3
    params: Iterable[Any] = list(model.parameters())
    if "use_muon" in str(inspect.getsource(kind)):
        params = [
            {"params": [p for p in params if (p.ndim == 2) is matrices], "use_muon": matrices}
            for matrices in (True, False)
        ]
    made: Optimizer = kind(params, **keywords)
    return made


def modes(optimizer: Optimizer, mode: str) -> None:
    """Of those that tell training from evaluation."""
    if hasattr(optimizer, mode):
        getattr(optimizer, mode)()


def updated(stage: int | None, library: str, name: str, options: dict[str, Any] | None = None) -> Outcome:
    """The plain loop."""
    model = net()
    loop = Loop(stage, model, optimizer_of(library, name, model), **options or {})
    modes(loop.optimizer, "train")
    for number in range(STEPS):
        torch.manual_seed(number)  # some draw random numbers
        loop.step(number)
    modes(loop.optimizer, "eval")
    return loop.outcome()


def resumed(stage: int, library: str, name: str, folder: str, begin: int) -> Outcome:
    """Half of the loop, to a checkpoint, or on from it."""
    model = net()
    loop = Loop(stage, model, optimizer_of(library, name, model))
    modes(loop.optimizer, "train")
    if begin:
        loop.run.load(folder)  # type: ignore[union-attr]
    for number in range(begin, begin + STEPS // 2):
        loop.step(number)
    if not begin:
        loop.run.save(folder)  # type: ignore[union-attr]
    modes(loop.optimizer, "eval")
    return loop.outcome()


# ---- trackers ----


def told_to(tracker: str, folder: str) -> tuple[dict[str, float], dict[str, float]]:
    """A run's numbers, and what a tracker's own files have of them."""
    model = net()
    loop = Loop(3, model, adamw(model))
    loop.step(0)
    numbers = {name: float(value) for name, value in loop.run.stats().scalars().items()}  # type: ignore[union-attr]
    return numbers, TRACKERS[tracker](numbers, folder)


def in_csv(numbers: dict[str, float], folder: str) -> dict[str, float]:
    path = Path(folder, "log.csv")
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, numbers)
        writer.writeheader()
        writer.writerow(numbers)
    (line,) = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
    return {name: float(value) for name, value in line.items()}


def in_tensorboard(numbers: dict[str, float], folder: str) -> dict[str, float]:
    writer = import_module("torch.utils.tensorboard").SummaryWriter(folder)
    for name, value in numbers.items():
        writer.add_scalar(name, value, 1)
    writer.close()
    read = import_module("tensorboard.backend.event_processing.event_accumulator").EventAccumulator(folder)
    read.Reload()
    return {name: read.Scalars(name)[0].value for name in read.Tags()["scalars"]}


def in_mlflow(numbers: dict[str, float], folder: str) -> dict[str, float]:
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "1"
    mlflow = import_module("mlflow")
    mlflow.set_tracking_uri(f"file:{folder}/runs")  # which it makes itself
    with mlflow.start_run() as run:
        mlflow.log_metrics(numbers, step=1)
    found: dict[str, float] = mlflow.get_run(run.info.run_id).data.metrics
    return found


def in_wandb(numbers: dict[str, float], folder: str) -> dict[str, float]:
    """Offline. Of its file the names are looked for: it is no format for others."""
    wandb = import_module("wandb")
    run = wandb.init(mode="offline", dir=folder, project="zeroshard")
    run.log(numbers, step=1)
    run.finish()
    wandb.teardown()
    (file,) = Path(folder).rglob("*.wandb")
    data = file.read_bytes()
    return {name: value for name, value in numbers.items() if name.encode() in data}


TRACKERS = {"csv": in_csv, "tensorboard": in_tensorboard, "mlflow": in_mlflow, "wandb": in_wandb}
