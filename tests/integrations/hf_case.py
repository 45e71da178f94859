"""Scripts as users of Trainer write them, run by ranks of a pool: with plain Trainer (DDP), or sharded."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import zeroshard as zs
import zeroshard.integrations.hf as zhf

Plain = Mapping[str, Any]


@dataclass
class Job:
    """What one script does. `options`: those of `zs.shard`, or None for plain Trainer."""

    options: Plain | None
    arguments: Plain = field(default_factory=dict)
    rows: int = 32
    resume: str | None = None
    stop: int | None = None  # after so many steps, as a job that ends early


@dataclass
class Outcome:
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    history: list[dict[str, float]]
    stage: int | None  # of a sharded model


class Texts(Dataset[dict[str, Tensor]]):
    """Rows of tokens, no two alike."""

    def __init__(self, rows: int, length: int = 12, words: int = 64) -> None:
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(0, words, (rows, length), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index].clone()}


class Stop(TrainerCallback):  # type: ignore[misc]
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def begin() -> None:
    """As the first script of its process, whose ranks have met."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # looked at, and not used
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def gpt2(**keywords: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1
    )
    config.update(dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0) | keywords)
    return GPT2LMHeadModel(config)


def arguments(folder: str, **keywords: Any) -> TrainingArguments:
    plain: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "log_level": "error",
        "max_grad_norm": 0.0,
    }
    return TrainingArguments(output_dir=folder, **(plain | keywords))


def trained(folder: str, job: Job, build: Callable[[], nn.Module] = gpt2, **keywords: Any) -> Outcome:
    begin()
    if job.options is None:
        zhf.disable()
    else:
        zhf.enable(**job.options)
    try:
        trainer = Trainer(
            model=build(),
            args=arguments(folder, **job.arguments),
            train_dataset=Texts(job.rows),
            eval_dataset=Texts(10),
            callbacks=[Stop(job.stop)] if job.stop else [],
            **keywords,
        )
        trainer.train(resume_from_checkpoint=job.resume)
        return outcome(trainer)
    finally:
        zhf.disable()


def outcome(trainer: Trainer) -> Outcome:
    history = trainer.state.log_history
    run = zhf.run_of(trainer.model)
    state = trainer.accelerator.get_state_dict(trainer.model)
    steps = [entry for entry in history if "loss" in entry]
    result = Outcome(
        [entry["loss"] for entry in steps],
        [entry["grad_norm"] for entry in steps],
        {name: value.detach().clone() for name, value in state.items()},
        [comparable(entry) for entry in history],
        run.options.stage if run is not None else None,
    )
    if run is not None:
        run.close()
    return result


def comparable(entry: dict[str, float]) -> dict[str, float]:
    """Without times, and without norms, which are compared to their last digit but one."""
    return {k: v for k, v in entry.items() if not any(word in k for word in ("second", "time", "norm"))}


def listening(folder: str, options: Plain | None, **more: Any) -> Outcome:
    """All that Trainer does beside: evaluates, keeps the best, stops early, predicts, saves."""
    from transformers import EarlyStoppingCallback

    begin()
    keywords: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps"}
    keywords |= {"save_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "agreement"}
    keywords |= {"greater_is_better": False, "save_total_limit": 2, "num_train_epochs": 4}
    made = zhf.ZeroShardTrainer if options is not None else Trainer
    trainer = made(
        model=gpt2(),
        args=arguments(folder, **(keywords | more)),
        train_dataset=Texts(32),
        eval_dataset=Texts(10),  # the last batch is not full, and not every rank has as many
        compute_metrics=agreement,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
        **({"zeroshard": options} if options is not None else {}),
    )
    trainer.train()
    predicted = trainer.predict(Texts(7))
    trainer.save_model(f"{folder}/last")
    result = outcome(trainer)
    result.history.append({"predicted": float(predicted.predictions.sum()), **comparable(predicted.metrics)})
    return result


def agreement(predicted: Any) -> dict[str, float]:
    """Falls for three evaluations, then grows: the best lies in the middle."""
    logits, labels = predicted
    return {"agreement": float(abs((logits.argmax(-1) == labels).mean() - 0.8)), "rows": len(labels)}


BESIDE = ("Seq2SeqTrainer", "Seq2SeqTrainingArguments")


def shown(folder: str, script: str, mixin: str) -> str:
    """The page's script; the class of the second trainer's first base."""
    begin()
    os.chdir(folder)
    names: dict[str, Any] = {name: getattr(transformers, name) for name in BESIDE}
    try:
        exec(script, names)
        assert zhf.run_of(names["model"]).options.stage == 3
        assert zhf.run_of(names["model"]).stats().steps == 4
        zhf.run_of(names["model"]).close()
        zhf.disable()
        names["model"] = gpt2()
        exec(mixin, names)
        return type(names["trainer"]).__mro__[1].__name__
    finally:
        zhf.disable()


def engines(folder: str, options: Plain, keywords: Plain, late: bool = False) -> str:
    """What arguments that ask for DeepSpeed or FSDP are sharded with, or what is said about them."""
    begin()
    zhf.disable()
    try:
        if not late:
            zhf.enable(**options)
        made = arguments(folder, **keywords)
        if late:
            made.fsdp = True  # as transformers itself leaves it
            zhf.enable(**options)
        trainer = Trainer(model=gpt2(), args=made, train_dataset=Texts(8))
        trainer.train()
        told = trainer.accelerator.zeroshard_options
        assert zhf.run_of(trainer.model).stats().steps == trainer.state.global_step
        zhf.run_of(trainer.model).close()
        return ", ".join(f"{name}={value!r}" for name, value in sorted(told.items()) if name != "offload")
    except zs.ZeroShardError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        zhf.disable()


def resumed(folder: str, checkpoint: str, anew: bool = False) -> str:
    begin()
    keywords = {"per_device_train_batch_size": 16, "ignore_data_skip": anew}
    trainer = zhf.ZeroShardTrainer(
        gpt2(), arguments(folder, **keywords), train_dataset=Texts(32), zeroshard={"stage": 2}
    )
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except zs.ZeroShardError as error:
        return f"{type(error).__name__}: {error}"
    zhf.run_of(trainer.model).close()
    return f"{trainer.state.global_step} steps"
