"""Scripts as users of TRL write them, run by ranks of a pool: plain, or sharded."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from hf_case import begin
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback, Trainer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl.distributed import DistributedBackend
from trl.generation.vllm_generation import VLLMGeneration

import zeroshard.integrations.hf as zhf


def words() -> PreTrainedTokenizerFast:
    known = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(60))]
    inner = Tokenizer(models.WordLevel({word: at for at, word in enumerate(known)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **ends)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, pad_token_id=0, bos_token_id=1, eos_token_id=2))


def texts(rows: int, **lengths: int) -> Dataset:
    draw = random.Random(0)
    return Dataset.from_list(
        [
            {name: " ".join(f"w{draw.randrange(60)}" for _ in range(n)) for name, n in lengths.items()}
            for _ in range(rows)
        ]
    )


def arguments(kind: type, folder: str, **keywords: Any) -> Any:
    plain = {"use_cpu": True, "bf16": False, "report_to": [], "logging_steps": 1, "save_strategy": "no"}
    plain |= {"disable_tqdm": True, "max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-3}
    return kind(output_dir=folder, **(plain | keywords))


def sft(folder: str) -> Trainer:
    args = arguments(SFTConfig, folder, max_length=16)
    return SFTTrainer(llama(), args, train_dataset=texts(16, text=8), processing_class=words())


def dpo(folder: str) -> Trainer:
    rows = texts(16, prompt=4, chosen=4, rejected=4)
    args = arguments(DPOConfig, folder, max_length=16)
    return DPOTrainer(llama(), llama(), args=args, train_dataset=rows, processing_class=words())


def grpo(folder: str) -> Trainer:
    if torch.distributed.get_rank() == 0:
        llama().save_pretrained(f"{folder}/llama")
    torch.distributed.barrier()
    generated = {"num_generations": 4, "max_completion_length": 8, "beta": 0.1, "use_vllm": False}
    return GRPOTrainer(
        f"{folder}/llama",
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        args=arguments(GRPOConfig, folder, **generated, per_device_train_batch_size=4),
        train_dataset=texts(16, prompt=4),
        processing_class=words(),
    )


SCRIPTS = {"sft": sft, "dpo": dpo, "grpo": grpo}


def trained(name: str, folder: str, stage: int | None) -> dict[str, Any]:
    begin()
    zhf.disable()
    if stage is not None:
        zhf.enable(stage=stage)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        trainer = SCRIPTS[name](folder)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        steps = [entry for entry in trainer.state.log_history if "loss" in entry]
        run, reference = zhf.run_of(trainer.model), getattr(trainer, "ref_model", None)
        return {
            "losses": [entry["loss"] for entry in steps],
            "norms": [entry["grad_norm"] for entry in steps],
            "stage": run and run.options.stage,
            "reference": reference is not None and zhf.run_of(reference) is not None,
            "handed": handed_to_vllm(trainer) if run is not None else {},
            "weights": trainer.accelerator.get_state_dict(trainer.model),
        }
    finally:
        zhf.disable()


def handed_to_vllm(trainer: Trainer) -> dict[str, torch.Tensor]:
    """What TRL hands to vLLM, parameter by parameter; every rank takes part."""
    hands = VLLMGeneration.__new__(VLLMGeneration)
    hands.model, hands.accelerator = trainer.model, trainer.accelerator
    hands._dist = DistributedBackend(SimpleNamespace(state=trainer.accelerator.state))
    assert hands._dist.fsdp_version is None  # of others
    hands._dist = DistributedBackend(trainer.accelerator)
    return {name: value.detach().clone() for name, value in hands._iter_named_params()}
