"""What scripts of Trainer ask for beside: functions of a folder, run with plain Trainer and sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from hf_case import Plain, Texts, arguments, begin, gpt2
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import (
    GPT2LMHeadModel,
    PrinterCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
)

import zeroshard.integrations.hf as zhf

Told = dict[str, Any]


def feature(name: str, folder: str, options: Plain | None, keywords: Plain | None = None) -> Told:
    """What a script saw, plain or sharded."""
    begin()
    zhf.disable()
    if options is not None:
        zhf.enable(**options)
    try:
        return FEATURES[name](folder, **(keywords or {}))
    finally:
        zhf.disable()


def made(kind: type[Trainer], model: nn.Module | None, args: Any, **keywords: Any) -> Trainer:
    data = {"train_dataset": Texts(16), "eval_dataset": Texts(6)}
    trainer = kind(model=model, args=args, **(data | keywords))
    trainer.remove_callback(PrinterCallback)
    return trainer


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def told(trainer: Trainer, **more: Any) -> Told:
    run = zhf.run_of(trainer.model)
    result = {"losses": losses(trainer), "stage": run and run.options.stage, **more}
    if run is not None:
        run.close()
    return result


def plain(folder: str, **keywords: Any) -> Told:
    trainer = made(Trainer, gpt2(), arguments(folder, **keywords))
    trainer.train()
    return told(trainer)


def twice(folder: str) -> Told:
    """Trains, goes on, evaluates; then a search's trainer, which makes its model anew for each training."""
    trainer = made(Trainer, gpt2(), arguments(folder))
    trainer.train()
    first = losses(trainer)
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]
    begin()
    searching = made(Trainer, None, arguments(folder), model_init=lambda: gpt2())
    searching.train()
    before = losses(searching)
    searching.train()
    assert before == losses(searching)
    return told(trainer, first=first, evaluated=evaluated, searched=told(searching)["losses"])


def evaluated_first(folder: str) -> Told:
    trainer = made(Trainer, gpt2(), arguments(folder, bf16=True))
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.train()
    return told(trainer, evaluated=evaluated)


def generates(folder: str) -> Told:
    torch.manual_seed(0)
    ends = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(**sizes, **ends, dropout_rate=0.0))
    args = Seq2SeqTrainingArguments(
        folder,
        use_cpu=True,
        report_to=[],
        predict_with_generate=True,
        generation_max_length=20,
        generation_num_beams=2,
        eval_strategy="epoch",
        num_train_epochs=2,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        per_device_train_batch_size=4,
        log_level="error",
    )
    trainer = made(
        Seq2SeqTrainer, model, args, compute_metrics=lambda p: {"tokens": float(p.predictions.sum())}
    )
    trainer.train()
    return told(trainer, tokens=[e["eval_tokens"] for e in trainer.state.log_history if "eval_tokens" in e])


def adapters(folder: str) -> Told:
    """LoRA, with the best of its checkpoints at the end; what is saved reads as PEFT's own."""
    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    often = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    args = arguments(folder, load_best_model_at_end=True, learning_rate=0.05, **often)
    trainer = made(Trainer, get_peft_model(gpt2(), lora), args)
    trainer.train()
    trainer.save_model(f"{folder}/last")
    torch.distributed.barrier()
    read = PeftModel.from_pretrained(gpt2(), f"{folder}/last")
    state = {name: value for name, value in read.state_dict().items() if "lora" in name}
    files = sorted(path.name for path in Path(folder, "last").iterdir())
    return told(trainer, files=files, best=trainer.state.best_global_step, adapters=state)


def logged(folder: str) -> Told:
    trainer = made(Trainer, gpt2(), arguments(folder), callbacks=[zhf.LogStats()])
    trainer.train()
    return told(trainer, entries=[entry for entry in trainer.state.log_history if "loss" in entry])


def limited(folder: str) -> Told:
    trainer = made(Trainer, gpt2(), arguments(folder, gradient_accumulation_steps=2, max_grad_norm=0.5))
    trainer.train()
    run = zhf.run_of(trainer.model)
    return told(trainer, clipped_by=run and run.options.clip_norm, planned=run and run.plan.batch)


class Looks(GPT2LMHeadModel):
    """Decides by values, so that no step can be traced on shapes."""

    def forward(self, input_ids: Any = None, labels: Any = None, **keywords: Any) -> Any:
        assert input_ids.max().item() < 64
        return super().forward(input_ids=input_ids, labels=labels, **keywords)


def untraceable(folder: str) -> Told:
    model = Looks(gpt2().config)
    trainer = made(Trainer, model, arguments(folder))
    trainer.train()
    run = zhf.run_of(trainer.model)
    return told(trainer, planned=run and run.plan.batch)


FEATURES = {
    "plain": plain,
    "twice": twice,
    "evaluated first": evaluated_first,
    "generates": generates,
    "adapters": adapters,
    "limited": limited,
    "logged": logged,
    "untraceable": untraceable,
}
