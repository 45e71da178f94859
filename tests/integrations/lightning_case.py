"""Scripts as users of Lightning write them, run by ranks of a pool: under its own DDP, or sharded."""

from __future__ import annotations

import csv
import io
import logging
import os
import pickle
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import Precision
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zeroshard as zs
from zeroshard.integrations import lightning as zsl

Plain = Mapping[str, Any]


@dataclass
class Job:
    """What one script does. `options`: those of the strategy, or None for Lightning's DDP."""

    options: Plain | None
    trainer: Plain = field(default_factory=dict)
    rows: int = 30
    resume: str | None = None
    save: str | None = None


@dataclass
class Outcome:
    losses: list[float]
    weights: dict[str, Tensor]
    logged: dict[str, float]
    stage: int | None  # of a sharded model


class Net(pl.LightningModule):
    """A small model whose losses are noted."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)]
        self.body = nn.Sequential(nn.Linear(8, width), nn.Tanh(), *blocks)
        self.head = nn.Linear(width, 3)
        self.losses: list[float] = []

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.body(inputs))

    def loss(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def data(rows: int, seed: int = 1, batch: int = 4) -> DataLoader[Any]:
    """Batches of 4 for each rank; the last one may be smaller."""
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randn(rows, 8, generator=generator), torch.randn(rows, 3, generator=generator)
    return DataLoader(TensorDataset(inputs, targets), batch_size=batch)


def announce() -> int:
    """As torchrun says it to the first of a process, whose ranks have met."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # looked at, and not used
    return size


def trainer_of(options: Plain | None, **given: Any) -> pl.Trainer:
    """A quiet trainer on CPUs."""
    size = announce()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if options is None:
        given = {
            "plugins": [TorchElasticEnvironment()],
            "strategy": DDPStrategy(find_unused_parameters=True),
            **given,
        }
    else:
        given = {"strategy": zsl.ZeroShardStrategy(**options), **given}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "max_epochs": 2}
    return pl.Trainer(accelerator="cpu", devices=size, **(quiet | given))


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Weights, on rank 0 alone; the model is plain afterwards."""
    run = zsl.run_of(model)
    state = model.state_dict() if run is None else run.full_state_dict(None)
    if run is not None:
        run.close()
    return {name: value.detach().clone() for name, value in state.items()}


def trained(job: Job) -> Outcome:
    torch.manual_seed(0)
    model, trainer = Net(), trainer_of(job.options, **job.trainer)
    trainer.fit(model, data(job.rows), data(12, 2), ckpt_path=job.resume)
    if job.save:
        trainer.save_checkpoint(job.save)
    run = zsl.run_of(model)
    stage = run.options.stage if run is not None else None
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Outcome(model.losses, whole(model), logged, stage)


def fitted_twice(options: Plain | None) -> Outcome:
    """By one optimizer, whose state the second trainer goes on with."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.configure_optimizers = lambda: optimizer  # type: ignore[method-assign]
    for _ in range(2):
        trainer = trainer_of(options, max_epochs=1)
        trainer.fit(model, data(12))
    run = zsl.run_of(model)
    return Outcome(model.losses, whole(model), {}, None if run is None else run.options.stage)


class Frozen(Net):
    """No optimizer, and a method of its own in place of torch's."""

    def configure_optimizers(self) -> Any:
        return None

    def zero_grad(self) -> None:  # type: ignore[override]
        super().zero_grad()


class PathIO(TorchCheckpointIO):
    """A plugin of the user's, which looks at paths."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.kinds.append(type(path).__name__)
        super().save_checkpoint(checkpoint, path, storage_options)


def without_optimizer(options: Plain, file: Path) -> tuple[list[float], list[str], bool]:
    """Nothing is updated, and checkpoints go on."""
    model, io = Frozen(), PathIO()
    trainer = trainer_of(options, max_epochs=1, plugins=[io])
    trainer.fit(model, data(8))
    trainer.save_checkpoint(file)
    model.zero_grad()
    again = Frozen()
    trainer_of(options, max_epochs=2).fit(again, data(8), ckpt_path=file)
    same = all(torch.equal(a, b) for a, b in zip(whole(model).values(), whole(again).values(), strict=True))
    return model.losses, io.kinds, same


def sent_to_others() -> list[str]:
    """Strategies, as they go to ranks that Lightning starts itself."""
    strategies = [zsl.ZeroShardStrategy(stage=2), zsl.ZeroShardFabricStrategy(stage=2)]
    return [type(pickle.loads(pickle.dumps(strategy))).__name__ for strategy in strategies]


class Seen(pl.Callback):
    """Notes what a callback sees."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.rates: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        run = zsl.run_of(pl_module)
        if run is None or run.options.clip_norm is None:
            of = pl.utilities.grad_norm if run is None else zsl.grad_norm
            self.norms.append(float(of(pl_module, 2)["grad_2.0_norm_total"]))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        run = zsl.run_of(pl_module)
        if run is not None and run.options.clip_norm is not None and trainer.global_step > len(self.norms):
            self.norms.append(run.stats().norm)
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


class Meta(Net):
    """Layers that are made on the meta device, and filled where they are sharded."""

    def __init__(self, empty: bool) -> None:
        super().__init__(8)
        self.body, self.head, self.empty = None, None, empty

    def configure_model(self) -> None:
        if self.head is None:
            torch.manual_seed(5)
            with torch.device("meta" if self.empty else "cpu"):
                self.body, self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3)


class Gan(pl.LightningModule):
    """Two optimizers, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker, self.critic = nn.Linear(8, 3), nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = -self.critic(self.maker(batch[0])).mean()
        first.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=0.01, gradient_clip_algorithm="norm")
        first.step()
        self.untoggle_optimizer(first)
        with second.toggle_model(sync_grad=True):
            gap = self.critic(self.maker(batch[0]).detach()).mean() - self.critic(batch[1]).mean()
            second.zero_grad()
            self.manual_backward(gap)
            second.step()
        self.losses += [loss.item(), gap.item()]

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.maker.parameters()), torch.optim.SGD(self.critic.parameters(), lr=0.1)]


def by_hand(options: Plain | None) -> Outcome:
    torch.manual_seed(0)
    model = Gan()
    trainer_of(options).fit(model, data(24))
    stage = run.options.stage if (run := zsl.run_of(model)) is not None else None
    return Outcome(model.losses, whole(model), {}, stage)


class Thaws(BaseFinetuning):
    """Freezes the body, and trains it from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.body)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.body, optimizer)


def finetuned(options: Plain | None, batch: int) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Net()
    model.configure_optimizers = lambda: torch.optim.AdamW(  # type: ignore[method-assign]
        [p for p in model.parameters() if p.requires_grad], lr=1e-2
    )
    trainer_of(options, callbacks=[Thaws()], max_epochs=3).fit(model, data(24, batch=batch))
    return model.losses, whole(model)


def rate_found(options: Plain | None, folder: str) -> tuple[list[float], float, list[str]]:
    """Lightning's tuner, which goes back to a checkpoint of its own; then a training."""
    torch.manual_seed(0)
    model = Net()
    model.lr = 1e-2
    trainer = trainer_of(options, default_root_dir=folder, max_epochs=1)
    found = Tuner(trainer).lr_find(model, data(64), num_training=9, update_attr=False)
    trainer.fit(model, data(16))
    whole(model)
    return model.losses, found.results["loss"][-1], os.listdir(folder)


class First(pl.Callback):
    """Notes the weights with which training begins, or sets them."""

    def __init__(self, state: dict[str, Tensor] | None) -> None:
        self.state = state

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self.state is not None:
            pl_module.load_state_dict(self.state)
        elif (run := zsl.run_of(pl_module)) is not None:
            self.state = run.full_state_dict(None)


def from_meta(options: Plain | None, state: dict[str, Tensor] | None = None) -> Any:
    model, first = Meta(state is None), First(state)
    trainer_of(options, callbacks=[first]).fit(model, data(30))
    return model.losses, whole(model), first.state


@dataclass
class Clipped:
    losses: list[float]
    norms: list[float]
    rates: list[float]
    weights: dict[str, Tensor]


def clipped(options: Plain | None) -> Clipped:
    torch.manual_seed(0)
    model, seen = Net(), Seen()
    trainer = trainer_of(options, accumulate_grad_batches=2, gradient_clip_val=0.25, callbacks=[seen])
    trainer.fit(model, data(30))
    return Clipped(model.losses, seen.norms, seen.rates, whole(model))


def evaluated(options: Plain | None, path: str) -> tuple[list[Any], int | None]:
    """Before training, of a checkpoint, and after training; and the stage of what nothing trains."""
    torch.manual_seed(0)
    model, trainer = Net(), trainer_of(options)
    found: list[Any] = [trainer.validate(model, data(12, 2), verbose=False)]
    found += [trainer.test(model, data(10, 3), ckpt_path=path, verbose=False)]
    found += [torch.cat(trainer.predict(model, data(10, 3))).tolist()]
    stage = run.options.stage if (run := zsl.run_of(model)) is not None else None
    trainer.fit(model, data(30))
    found += [model.losses, trainer.test(model, data(10, 3), verbose=False)]
    if options is not None:
        trainer.strategy.close()
        assert zsl.run_of(model) is None
    return found, stage


@dataclass
class Averaged:
    losses: list[float]
    logged: dict[str, float]
    best: str
    files: list[str]
    rates: str
    weights: dict[str, Tensor]


class Decays(Net):
    """With a scheduler whose state is unlike that of the one which takes its place."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)]


def averaged(
    options: Plain | None,
    kind: str,
    folder: str,
    resume: str | None = None,
    epochs: int = 3,
    precision: Any = "32-true",
) -> Averaged:
    """With Lightning's callbacks."""
    torch.manual_seed(0)
    model = Net() if kind == "ema" else Decays()
    average = EMAWeightAveraging(decay=0.9) if kind == "ema" else StochasticWeightAveraging(0.02, 1)
    best = ModelCheckpoint(folder, monitor="val", save_last=True, save_top_k=2)
    callbacks = [average, best, LearningRateMonitor("step"), EarlyStopping("val", patience=1)]
    trainer = trainer_of(
        options,
        callbacks=callbacks,
        enable_checkpointing=True,
        max_epochs=epochs,
        precision=precision,
        logger=CSVLogger(folder, "", ""),
        log_every_n_steps=1,
    )
    trainer.fit(model, data(30), data(12, 2), ckpt_path=resume)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    metrics = Path(folder, "metrics.csv").read_text(encoding="utf-8")
    files = [path.name for path in sorted(Path(folder).glob("*.ckpt"))]
    return Averaged(model.losses, logged, Path(best.best_model_path).name, files, metrics, whole(model))


class Part(nn.Module):
    """A plain module, of which the loop calls a method beside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Linear(16, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.body(inputs))

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(self(inputs), targets)


def fabric_of(options: Plain | None, **given: Any) -> Fabric:
    size = announce()
    warnings.simplefilter("ignore")
    if options is None:
        given = {"plugins": [TorchElasticEnvironment()], "strategy": FabricDDPStrategy(), **given}
    else:
        given = {"strategy": zsl.ZeroShardFabricStrategy(**options), **given}
    fabric = Fabric(accelerator="cpu", devices=size, **given)
    fabric.launch()
    return fabric


@dataclass
class Looped:
    losses: list[float]
    norms: list[float]
    step: int
    weights: dict[str, Tensor]
    rest: dict[str, Any] | None


def looped(
    options: Plain | None, save: str = "", load: str = "", precision: Any = "32-true", apart: bool = False
) -> Looped:
    """A loop of Fabric's. `apart`: the model is set up before its optimizer."""
    fabric = fabric_of(options, **{"precision" if isinstance(precision, str) else "plugins": precision})
    torch.manual_seed(0)
    plain = Part()
    optimizer: Any = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    if apart:
        model, optimizer = fabric.setup_module(plain), fabric.setup_optimizers(optimizer)
    else:
        model, optimizer = fabric.setup(plain, optimizer)
    model.mark_forward_method("loss")
    loader = fabric.setup_dataloaders(data(30))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    rest = fabric.load(load, state) if load else None
    losses, norms = list[float](), list[Tensor]()
    for number, batch in enumerate(loader):
        last = number % 2 == 1
        with fabric.no_backward_sync(model, enabled=not last):
            loss = model.loss(*batch) if last else nn.functional.mse_loss(model(batch[0]), batch[1])
            if last and precision == "32-true":
                loss.backward()  # which Fabric allows where neither strategy nor precision scales losses
            else:
                fabric.backward(loss)
        losses.append(loss.item())
        if last:
            norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.5))
            optimizer.step()
            optimizer.zero_grad()
            state["step"] += 1
    if save:
        fabric.save(save, state)
        fabric.save(f"{save}.weights", {"model": model})
    return Looped(losses, [norm.item() for norm in norms], state["step"], whole(plain), rest)


def dropped(options: Plain | None) -> Tensor:
    """Gradients that waited on their ranks, dropped by Fabric's wrapper of the optimizer."""
    fabric = fabric_of(options)
    torch.manual_seed(0)
    plain = nn.Linear(4, 1)
    model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    with fabric.no_backward_sync(model):
        fabric.backward(model(torch.full((1, 4), 9.0)).sum())
    optimizer.zero_grad()
    fabric.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    return whole(plain)["weight"]


def two_models(options: Plain, folder: str) -> list[dict[str, Tensor]]:
    """Two models in one checkpoint of Fabric's, before and after."""
    fabric, found = fabric_of(options), []
    for seed in (0, 1):
        torch.manual_seed(seed)
        plain = [nn.Linear(4, 2), nn.Linear(2, 2)]
        pairs = [fabric.setup(one, torch.optim.Adam(one.parameters())) for one in plain]
        names = ("first", "first optimizer", "second", "second optimizer")
        state = dict(zip(names, (one for pair in pairs for one in pair), strict=True)) | {"seed": seed}
        if seed == 0:
            fabric.save(folder, state)
        else:
            fabric.load(folder, state)
            assert state["seed"] == 0
        found += [whole(one) for one in plain]
    return found


def refused(case: str, folder: str) -> str:
    """What is said about a misuse, on this rank."""
    try:
        MISUSES[case](folder)
    except (zs.ZeroShardError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _fit(options: Plain, optimizer: str = "AdamW", **given: Any) -> tuple[Net, pl.Trainer]:
    model, trainer = Net(), trainer_of(options, max_epochs=1, **given)
    trainer.fit(model, data(4))
    return model, trainer


def _norms_of_nothing(folder: str) -> None:
    model, _ = _fit({"stage": 2, "clip_norm": 1.0})
    zsl.grad_norm(model, 2)


def _no_norm(folder: str) -> None:
    zsl.grad_norm(nn.Linear(2, 2), 0)


def _elsewhere(folder: str) -> None:
    _, trainer = _fit({"stage": 2})
    trainer.save_checkpoint("s3://somewhere/x.ckpt")


def _not_trainers(folder: str) -> None:
    model, _ = _fit({"stage": 2})
    run = zsl.run_of(model)
    assert run is not None
    run.save(folder, overwrite=True)
    trainer_of({"stage": 2}).fit(model, data(4), ckpt_path=folder)


def _paired(optimizers: bool) -> Any:
    fabric, model = fabric_of({"stage": 2}), nn.Linear(2, 1)
    wrapped = fabric.setup_module(model)
    if optimizers:
        for _ in range(2):
            fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    return fabric, wrapped


def _unpaired(folder: str) -> None:
    fabric, model = _paired(False)
    fabric.backward(model(torch.ones(1, 2)).sum())


def _unpaired_alone(folder: str) -> None:
    _, model = _paired(False)
    model(torch.ones(1, 2)).sum().backward()


def _loop_clips(**how: float) -> None:
    fabric, plain = fabric_of({"stage": 2, "clip_norm": 1.0}), nn.Linear(2, 1)
    model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    fabric.clip_gradients(model, optimizer, **how)


def _fabric_saved(folder: str, ask: Any) -> None:
    fabric, plain = fabric_of({"stage": 2}), nn.Linear(2, 1)
    model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    fabric.save(folder, {"model": model, "optimizer": optimizer})
    fabric.load(folder, ask(model, optimizer))


MISUSES = {
    "unknown": lambda folder: zsl.ZeroShardStrategy(stages=3),
    "contradiction": lambda folder: _fit({"precision": "fp16"}, precision="bf16-mixed"),
    "no scaler": lambda folder: _fit({"precision": "fp16"}),
    "engine": lambda folder: _fit({}, plugins=Odd()),
    "clipped": lambda folder: _fit({"clip_norm": 1.0}, gradient_clip_val=2.0),
    "clipped by value": lambda folder: _fit(
        {"clip_norm": 1.0}, gradient_clip_val=2.0, gradient_clip_algorithm="value"
    ),
    "norms of nothing": _norms_of_nothing,
    "no norm": _no_norm,
    "elsewhere": _elsewhere,
    "not Trainer's": _not_trainers,
    "unpaired": _unpaired,
    "unpaired, alone": _unpaired_alone,
    "paired twice": lambda folder: _paired(True),
    "loop clips": lambda folder: _loop_clips(max_norm=2.0),
    "loop clips by value": lambda folder: _loop_clips(clip_val=2.0),
    "nobody's": lambda folder: _fabric_saved(folder, lambda model, optimizer: None),
    "more": lambda folder: _fabric_saved(
        folder, lambda model, optimizer: {"model": model, "optimizer": optimizer, "epoch": 0}
    ),
}


class Odd(Precision):
    """A precision of somebody else's."""

    precision = "transformer-engine"


def asked_by_name() -> list[str]:
    """The strategies that names stand for, in both packages."""
    announce()
    import pytorch_lightning

    from zeroshard.integrations import pytorch_lightning as other

    fabric: Any = Fabric(accelerator="cpu", devices=1, strategy="zeroshard_2")
    made = [
        pl.Trainer(accelerator="cpu", devices=1, strategy="zeroshard", logger=False).strategy,
        pl.Trainer(accelerator="cpu", devices=1, strategy="zeroshard_3_offload", logger=False).strategy,
        fabric.strategy,
        pytorch_lightning.Trainer(
            accelerator="cpu", devices=1, strategy="zeroshard_1", logger=False
        ).strategy,
    ]
    assert isinstance(made[-1], other.ZeroShardStrategy)
    return [f"{type(one).__name__} {one.zeroshard_options}" for one in made]


def of_the_other_package(sharded: bool) -> tuple[list[float], int | None]:
    """A script of `pytorch_lightning`."""
    import pytorch_lightning
    from lightning_fabric.plugins.environments import TorchElasticEnvironment as Elastic

    from zeroshard.integrations import pytorch_lightning as other

    class Old(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = nn.Linear(8, 3), list[float]()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    size = announce()
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    quiet |= {"logger": False, "max_epochs": 1, "accelerator": "cpu", "devices": size}
    torch.manual_seed(0)
    model = Old()
    if sharded:
        quiet |= {"strategy": other.ZeroShardStrategy(stage=3)}
    else:
        quiet |= {"strategy": "ddp", "plugins": [Elastic()]}
    pytorch_lightning.Trainer(**quiet).fit(model, data(16))
    run = other.run_of(model)
    stage = run.options.stage if run is not None else None
    whole(model)
    return model.losses, stage


def logged(folder: str) -> list[str]:
    """The columns of what a logger was given, and steps between two of its lines."""
    model = Net()
    trainer = trainer_of(
        {"stage": 3},
        callbacks=[zsl.LogStats()],
        logger=CSVLogger(folder, "", ""),
        log_every_n_steps=2,
        accumulate_grad_batches=2,
        max_epochs=4,
    )
    trainer.fit(model, data(30))
    lines = list(csv.DictReader(Path(folder, "metrics.csv").read_text(encoding="utf-8").splitlines()))
    told = [line for line in lines if line.get("zeroshard/steps")]
    assert all(float(line["zeroshard/live/state"]) > 0 for line in told)
    assert all(float(line["zeroshard/sent/reduce"]) > 0 for line in told)
    return [line["zeroshard/steps"] for line in told]


def shown(code: str, folder: str) -> str:
    """What a page shows, run in a folder; the text that it prints."""
    announce()
    warnings.simplefilter("ignore")
    before, told = os.getcwd(), io.StringIO()
    os.chdir(folder)
    try:
        with redirect_stdout(told):
            exec(code, {"torch": torch})
    finally:
        os.chdir(before)
    return told.getvalue()
