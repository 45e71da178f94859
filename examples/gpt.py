"""Train a GPT on the sources of Python's standard library under ZeRO stage 3: under two minutes, two cores.

    zeroshard run --ranks 2 examples/gpt.py

The same script runs under torchrun and as one plain process. The loop in `train` is plain PyTorch: what makes
it sharded is the one line `zs.shard(...)`.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from gpt_data import Batches, Tokenizer, load
from gpt_model import GPT, Config
from rich.console import Console
from rich.rule import Rule
from rich.syntax import Syntax

import zeroshard as zs
from zeroshard.display import Live, Plain, Reading, bytes_text, clock_text, summary

MEMORY = ("parameters", "gradients", "state", "gathered", "buckets")
# The repeated blocks would be found without being named. Embedding and head are large here, so that it pays
# to gather them on their own, too.
UNITS = ("embedding", "blocks.*", "head")
PROMPTS = ("class Buffer:\n    def __init__(self, ", "def find(path, ")
VALIDATIONS = 12
VALIDATION_BATCHES, LAST_VALIDATION_BATCHES = 4, 32


def main() -> None:
    asked = arguments()
    where = asked.text.name if asked.text else "the standard library"
    say(f"Learning {asked.vocabulary:,} tokens from the Python sources in {where} ...")
    tokenizer, text, held_out = load(asked.vocabulary, asked.text)

    torch.manual_seed(0)
    model = GPT(Config(len(tokenizer)))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    run = zs.shard(model, optimizer, stage=asked.stage, units=UNITS, bucket_bytes="1MiB")

    training = Batches(text, model.config.context, asked.rows, run.rank, run.size)
    validation = Batches(held_out, model.config.context, asked.rows, run.rank, run.size)
    # In fp32, weights, gradients and Adam's two moments take four times four bytes, and an all-reduce sends
    # every gradient twice, less the part that stays at sharded parameter.
    plain = Plain(memory=16 * parameters, sent=2 * 4 * parameters * (run.size - 1) // run.size)
    ranks = "one rank" if run.size == 1 else f"{run.size} ranks"
    title = f"ZeroShard · GPT, {parameters / 1e6:.2f} M parameters · ZeRO stage {asked.stage} · {ranks}"
    watch = Watch(run, asked, held_out.bytes_per_token)
    with Live(title, rank=run.rank, plain=plain) as live:
        train(model, optimizer, training, validation, watch, live)

    with run.kept_full():  # one gather for all the tokens to come
        samples = [complete(model, tokenizer, prompt, asked.sample) for prompt in PROMPTS]
    if run.rank == 0:
        show_samples(samples)
        summary("Summary", watch.report(plain))
    run.close()


def train(
    model: GPT,
    optimizer: torch.optim.Optimizer,
    training: Batches,
    validation: Batches,
    watch: Watch,
    live: Live,
) -> None:
    step = 0
    while watch.done < 1:
        for group in optimizer.param_groups:
            group["lr"] = watch.asked.lr * schedule(watch.done)
        inputs, targets = training[step]
        loss = model(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1

        reading = watch.look(step, loss.item(), targets.numel())
        if watch.validation_is_due():
            batches = VALIDATION_BATCHES if watch.done < 1 else LAST_VALIDATION_BATCHES
            reading = watch.heard(reading, validate(model, validation, batches))
        live.show(reading)


def schedule(done: float) -> float:
    """The part of the learning rate at a moment of the training: a short warm-up, then half a cosine."""
    warm_up = min(1.0, (done + 0.002) / 0.03)
    return warm_up * (0.05 + 0.95 * (0.5 + 0.5 * math.cos(math.pi * done)))


@torch.no_grad()
def validate(model: GPT, batches: Batches, number: int) -> float:
    model.eval()
    losses = [model(*batches[index]).item() for index in range(number)]
    model.train()
    return sum(row[0] for row in share([sum(losses) / number])) / batches.size


def complete(model: GPT, tokenizer: Tokenizer, prompt: str, count: int) -> str:
    """The prompt and what the model makes of it, up to the last whole line."""
    model.eval()
    tokens = model.generate(torch.tensor([tokenizer.encode("\n\n" + prompt)]), count)
    return tokenizer.decode(tokens[0].tolist()).strip().rpartition("\n")[0]


def say(text: str) -> None:
    """Print on rank 0, also before there is a run that knows its rank."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def share(numbers: list[float]) -> list[list[float]]:
    """What every rank says, by rank."""
    mine = torch.tensor(numbers, dtype=torch.float64)
    if not dist.is_initialized():
        return [numbers]
    board = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(board, mine)
    return [row.tolist() for row in board]


class Watch:
    """Looks at a run after every step: how far it is, and what every rank holds."""

    def __init__(self, run: zs.Run, asked: argparse.Namespace, bytes_per_token: float) -> None:
        self.run, self.asked, self.bytes_per_token = run, asked, bytes_per_token
        self.done = 0.0
        self._began = time.monotonic()
        self._elapsed = 0.0
        self._last = Reading(step=0, done=0.0, loss=math.nan)
        self._stats = run.stats()
        self._validated = 0

    def look(self, step: int, loss: float, tokens: int) -> Reading:
        stats, self._elapsed = self.run.stats(), time.monotonic() - self._began
        board = share([self._elapsed, loss, *(stats.peak[kind] for kind in MEMORY)])
        # Clocks differ from rank to rank; the learning rate and the end must not. Rank 0's clock decides.
        done = step / self.asked.steps if self.asked.steps else board[0][0] / self.asked.seconds
        self.done = min(done, 1.0)
        self._last = Reading(
            step=step,
            done=self.done,
            loss=sum(row[1] for row in board) / self.run.size,
            tokens=step * tokens * self.run.size,
            memory=[dict(zip(MEMORY, map(int, row[2:]), strict=True)) for row in board],
            sent={kind: count for kind, count in (stats - self._stats).sent.items() if count},
            waited=sum(stats.waited.values()) / self._elapsed,
            facts=self._last.facts,
        )
        self._stats = stats
        return self._last

    def validation_is_due(self) -> bool:
        return self.done * VALIDATIONS >= self._validated

    def heard(self, reading: Reading, loss: float) -> Reading:
        """The same reading with its validation loss."""
        self._validated = int(self.done * VALIDATIONS) + 1
        self._stats = self.run.stats()  # what validation sent is no part of the next step
        bits = {"bits/byte": f"{loss / math.log(2) / self.bytes_per_token:.3f}"}
        self._last = replace(reading, validation=loss, facts=bits)
        return self._last

    def report(self, plain: Plain) -> list[tuple[str, str]]:
        last, loss = self._last, self._last.validation or math.nan
        memory, sent = max(sum(kinds.values()) for kinds in last.memory), sum(last.sent.values())
        return [
            ("validation loss", f"{loss:.3f} per token (perplexity {math.exp(loss):.1f})"),
            ("bits per byte", last.facts["bits/byte"]),
            ("trained", f"{last.step:,} steps, {last.tokens:,} tokens in {clock_text(self._elapsed)}"),
            ("speed", f"{last.tokens / self._elapsed:,.0f} tokens/s"),
            ("memory per rank", f"{bytes_text(memory)} (plain data parallel: {bytes_text(plain.memory)})"),
            ("sent per step by a rank", f"{bytes_text(sent)} (DDP: {bytes_text(plain.sent)})"),
            ("waited for communication", f"{last.waited:.1%} of the time"),
        ]


def show_samples(samples: list[str]) -> None:
    console = Console()
    for text in samples:
        console.print(Rule("the model writes", style="bright_black", align="left"))
        code = Syntax(text, "python", theme="ansi_dark", background_color="default", word_wrap=True)
        console.print(code if console.is_terminal else text, markup=False, highlight=False)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a GPT on the sources of the standard library.")
    option = parser.add_argument
    option("--seconds", type=float, default=85, help="how long to train (default 85)")
    option("--steps", type=int, help="train so many steps instead, however long they take")
    option("--stage", type=int, choices=(0, 1, 2, 3), default=3, help="ZeRO stage (default 3)")
    option("--text", type=Path, help="a folder with Python sources (default: the standard library)")
    option("--vocabulary", type=int, default=2048, help="tokens learnt from the text (default 2048)")
    option("--rows", type=int, default=4, help="rows of a batch, per rank (default 4)")
    option("--lr", type=float, default=8e-3, help="highest learning rate (default 0.008)")
    option("--sample", type=int, default=200, help="tokens of a sample (default 200)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
