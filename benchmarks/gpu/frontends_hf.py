"""Trainer of Hugging Face on one GPU, in bf16: sharded by ZeroShard beside itself, taking turns.

    python benchmarks/gpu/frontends_hf.py --rounds 5 --steps 6

A Llama of 1.24 B parameters (vocabulary 128 k); plain Trainer computes under autocast with fp32 weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
from provenance import commit, version
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import zeroshard.integrations.hf as zhf

ROWS, LENGTH, BAR = 4, 2048, 1.03
SIZES = {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": LENGTH}


class Clock(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.ended: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        torch.cuda.synchronize()
        self.ended.append(time.perf_counter())


def made(options: dict[str, Any] | None) -> tuple[Trainer, Clock]:
    zhf.disable()
    if options is not None:
        zhf.enable(**options)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=True))
    tokens = torch.randint(0, SIZES["vocab_size"], (ROWS * 64, LENGTH))
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=ROWS,
        bf16=True,
        gradient_checkpointing=True,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        log_level="error",
    )
    clock = Clock()
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[clock])  # type: ignore[arg-type]
    trainer.remove_callback(PrinterCallback)
    return trainer, clock


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="timed steps of a turn")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    systems = {"plain": made(None), "stage 3": made({"stage": 3}), "stage 0": made({"stage": 0})}
    told: dict[str, list[float]] = {name: [] for name in systems}
    losses: dict[str, list[float]] = {}
    for number in range(asked.rounds + 1):
        for name, (trainer, clock) in systems.items():
            trainer.args.max_steps = asked.steps + 1
            clock.ended.clear()
            trainer.train()
            losses.setdefault(name, [e["loss"] for e in trainer.state.log_history if "loss" in e])
            if number:
                told[name].append(statistics.fmean(after - before for before, after in pairwise(clock.ended)))
    facts = {
        "gpu": torch.cuda.get_device_name(),
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate")},
        "commit": commit(),
        "parameters": sum(p.numel() for p in systems["plain"][0].model.parameters()),
        "tokens": ROWS * LENGTH,
        "seconds": told,
        "losses": losses,
        "ratios": {
            name: statistics.median(a / b for a, b in zip(told[name], told["plain"], strict=True))
            for name in ("stage 3", "stage 0")
        },
    }
    print(json.dumps(facts, indent=1))
    if asked.out:
        asked.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return 0 if facts["ratios"]["stage 3"] <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
