"""What Trainer of Hugging Face costs over a plain loop: at stage 3 beside DDP, two ranks on CPUs.

    python benchmarks/steps/frontends_hf.py --rounds 5 --steps 3 --out

All systems stay alive and take turns: a step to warm up, then timed ones, in a new order each round. Ratios
are taken within a round. DeepSpeed's plain loop stands beside them where it is installed, `fully_shard`'s in
any case: Trainer's own FSDP2 falls back to DDP on CPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

from provenance import RESULTS, command, commit, hardware, preamble, version
from torch import Tensor

from zeroshard.testing import Ranks

ROWS, LENGTH, RATE, CLIP = 4, 64, 3e-4, 1.0
SIZES = {"vocab_size": 16384, "n_positions": LENGTH, "n_embd": 384, "n_layer": 12, "n_head": 6}
SYSTEMS = ("DDP loop", "DDP Trainer", "stage 3 loop", "stage 3 Trainer", "fully_shard loop", "DeepSpeed loop")
BAR = 1.05
#: Of this process, where it is a rank: a function of a number of steps that returns their seconds.
_TURN: Callable[[int], list[float]] | None = None


def model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(**SIZES, bos_token_id=0, eos_token_id=1)
    config.update(dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0))
    return GPT2LMHeadModel(config).train()


def rows(number: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, SIZES["vocab_size"], (number, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]


def adamw(module: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(module.parameters(), lr=RATE, fused=True)


def timed(step: Callable[[Tensor], None]) -> Callable[[int], list[float]]:
    """The loop that a user writes, over this rank's batches."""
    from torch.utils.data import DataLoader, DistributedSampler

    data = rows(ROWS * 2 * 64)
    batches = DataLoader(data, batch_size=ROWS, sampler=DistributedSampler(data))  # type: ignore[arg-type]

    def turn(steps: int) -> list[float]:
        told, coming = [], iter(batches)
        for _ in range(steps + 1):
            begun = time.perf_counter()
            step(next(coming)["input_ids"])
            told.append(time.perf_counter() - begun)
        return told[1:]

    return turn


def loop(system: str) -> Callable[[int], list[float]]:
    trained = model()
    if system == "DeepSpeed loop":
        return timed(deepspeed(trained))
    if system == "DDP loop":
        from torch.nn.parallel import DistributedDataParallel

        trained = DistributedDataParallel(trained, gradient_as_bucket_view=True)
    if system == "fully_shard loop":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2,))
        for block in trained.transformer.h:
            fully_shard(block, mesh=mesh)
        fully_shard(trained, mesh=mesh)
    optimizer = adamw(trained)
    if system == "stage 3 loop":
        import zeroshard as zs

        zs.shard(trained, optimizer, stage=3)

    def step(tokens: Tensor) -> None:
        trained(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return timed(step)


def deepspeed(trained: Any) -> Callable[[Tensor], None]:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed as ds

    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": CLIP,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 3},
    }
    engine, *_ = ds.initialize(
        model=trained, optimizer=adamw(trained), config=config, dist_init_required=False
    )

    def step(tokens: Tensor) -> None:
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()

    return step


def trainer(system: str) -> Callable[[int], list[float]]:
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    if system == "stage 3 Trainer":
        import zeroshard.integrations.hf as zhf

        zhf.enable(stage=3)
    ended: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ended.append(time.perf_counter())

    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=ROWS,
        learning_rate=RATE,
        max_grad_norm=CLIP,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=10**6,
        disable_tqdm=True,
        log_level="error",
    )
    made = Trainer(model(), arguments, train_dataset=rows(ROWS * 2 * 64), callbacks=[Clock()])  # type: ignore[arg-type]
    made.remove_callback(PrinterCallback)

    def turn(steps: int) -> list[float]:
        ended.clear()
        made.args.max_steps = steps + 1
        made.train()
        return [after - before for before, after in pairwise(ended)]

    return turn


def begin(system: str) -> None:
    global _TURN
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # looked at, and not used
    _TURN = (trainer if system.endswith("Trainer") else loop)(system)


def take_turn(steps: int) -> float:
    assert _TURN is not None
    return statistics.fmean(_TURN(steps))


def measured(rounds: int, steps: int) -> dict[str, list[float]]:
    """The mean step of each round, of the slower rank, in seconds."""
    pools: dict[str, Ranks] = {}
    told: dict[str, list[float]] = {}
    try:
        for system in SYSTEMS:
            if system == "DeepSpeed loop" and version("deepspeed") == "not installed":
                continue
            pools[system], told[system] = Ranks(2, warn="ignore"), []
            pools[system].run(begin, system, timeout=300)
            pools[system].run(take_turn, 1, timeout=300)
            print(f"{system}: ready", file=sys.stderr)
        for number in range(rounds):
            for system in random.Random(number).sample(list(pools), len(pools)):
                told[system].append(max(pools[system].run(take_turn, steps, timeout=300)))
    finally:
        for pool in pools.values():
            pool.stop()
    return told


def ratios(told: dict[str, list[float]], over: str, under: str) -> list[float]:
    return [a / b for a, b in zip(told[over], told[under], strict=True)]


def report(told: dict[str, list[float]]) -> tuple[str, bool]:
    costs = {name: ratios(told, f"{name} Trainer", f"{name} loop") for name in ("DDP", "stage 3")}
    beside = [ours / plain for ours, plain in zip(costs["stage 3"], costs["DDP"], strict=True)]
    kept = statistics.median(beside) <= BAR
    peer = "DeepSpeed loop" if "DeepSpeed loop" in told else "fully_shard loop"
    against = statistics.median(ratios(told, "stage 3 Trainer", peer))
    said = {True: "kept", False: "missed"}
    parameters = sum(p.numel() for p in model().parameters())
    lines = [
        *preamble(
            "Trainer over a plain loop, two CPU ranks", f"GPT-2 of {parameters / 1e6:.1f} M parameters"
        ),
        f"GPT-2 of {parameters / 1e6:.1f} M parameters, {ROWS} × {LENGTH} tokens a rank, AdamW (fused), "
        f"gradients clipped to {CLIP}, one thread a rank.",
        "",
        f"- torch {torch.__version__}, transformers {version('transformers')}, accelerate "
        f"{version('accelerate')}, deepspeed {version('deepspeed')}",
        "",
        "| system | step, median | least | most |",
        "|---|---|---|---|",
        *(
            f"| {name} | {statistics.median(t) * 1e3:.0f} ms | {min(t) * 1e3:.0f} | {max(t) * 1e3:.0f} |"
            for name, t in told.items()
        ),
        "",
        "| ratio within a round, median | | bar |",
        "|---|---|---|",
        f"| Trainer ÷ loop, DDP | {statistics.median(costs['DDP']):.3f} | |",
        f"| Trainer ÷ loop, stage 3 | {statistics.median(costs['stage 3']):.3f} | |",
        f"| the second ÷ the first | {statistics.median(beside):.3f} | ≤ {BAR} {said[kept]} |",
        f"| stage 3 Trainer ÷ {peer} | {against:.3f} | < 1 {said[against < 1]} |",
        "",
    ]
    return "\n".join(lines), kept and against < 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a turn")
    parser.add_argument("--out", action="store_true", help="write results/cpu-hf.md and .json")
    arguments = parser.parse_args()
    told = measured(arguments.rounds, arguments.steps)
    text, kept = report(told)
    print(text)
    if arguments.out:
        name = RESULTS / "cpu-hf"
        name.with_suffix(".md").write_text(text, encoding="utf-8")
        facts = {"command": command(), "commit": commit(), "hardware": hardware(), "seconds": told}
        name.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
