"""What codecs and sync policies do to a trained model: real data, three seeds, beside plain data parallelism.

    python -m zeroshard run --ranks 2 benchmarks/quality/quality.py --out      # results/quality-<task>.json

`digits`: a convolutional net on scikit-learn's handwritten digits (its data file is enough), SGD with
momentum; accuracy on images held back. `text`: a GPT on the sources of Python's standard library, AdamW; loss
on text held back. All rows of a task use the same steps, batches, schedule and first parameters; only
`shard`'s options differ. README.md has the conditions, which were fixed before the runs that are kept. Rows
are written as they come, so a run that is cut short keeps what it has; `--rows` runs some of them, and
`--join` makes one result of several."""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import math
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

from models import GPT, GPTShape
from provenance import RESULTS, command, commit, hardware, preamble
from torch import Tensor, nn
from torch.nn import functional

import zeroshard as zs

POINTS, LOSS = (
    0.5,
    0.02,
)  # how far a row that is judged may fall behind: points of accuracy, share of the loss
JUDGED = ("int8", "1-bit", "top-k 1 %")
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """What is trained: `batch(generator)` for training, `test()` gives (loss, accuracy or None)."""

    build: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    test: Callable[[nn.Module], tuple[float, float | None]]
    steps: int
    rate: Callable[[float, int], float]  # share of the learning rate by share of the run, and by step
    vectors: tuple[str, ...]  # patterns of the names of biases and norms
    adam: bool = False


def digits(shuffle: int) -> Task:
    """1,400 images to learn from, 397 to be judged by; `shuffle` is the seed that chooses them."""
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        sys.exit("quality.py: the digits come with scikit-learn: pip install scikit-learn")
    path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(path, "rt") as file:
        rows = torch.tensor([[float(cell) for cell in line.split(",")] for line in file])
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(shuffle))]
    images, labels = rows[:, :64].view(-1, 1, 8, 8) / 16, rows[:, 64].long()

    def build() -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()),
            *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10)),
        )

    def batch(generator: torch.Generator) -> Batch:
        chosen = torch.randint(0, 1400, (32,), generator=generator)
        return images[chosen], labels[chosen]

    def test(model: nn.Module) -> tuple[float, float | None]:
        found = model(images[1400:])
        right = (found.argmax(1) == labels[1400:]).float().mean()
        return float(functional.cross_entropy(found, labels[1400:])), 100 * float(right)

    return Task(
        build,
        lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        batch,
        lambda model, given: functional.cross_entropy(model(given[0]), given[1]),
        test,
        steps=500,
        vectors=("*.bias",),
        rate=lambda done, step: min(1.0, (step + 1) / 40) * (1.0 - 0.9 * done),
    )


def text(validate: bool) -> Task:
    """Bytes of Python's own sources: eight tenths to learn from, the last to be judged by, or with `validate`
    the one before it, on which the conditions were settled."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    data = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:80])
    tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    border, length = int(0.8 * len(tokens)), 48
    start, end = (0.8, 0.9) if validate else (0.9, 1.0)
    shape = GPTShape(vocab=256, context=length, width=64, heads=4, depth=2)

    def cut(first: Tensor) -> Batch:
        window = tokens[first[:, None] + torch.arange(length + 1)]
        return window[:, :-1], window[:, 1:]

    def batch(generator: torch.Generator) -> Batch:
        return cut(torch.randint(0, border - length - 1, (8,), generator=generator))

    def test(model: nn.Module) -> tuple[float, float | None]:
        generator = torch.Generator().manual_seed(1)
        low, high = int(start * len(tokens)), int(end * len(tokens)) - length - 1
        first = torch.randint(low, high, (512,), generator=generator)
        return statistics.fmean(float(model(*cut(part))) for part in first.split(64)), None

    return Task(
        lambda: GPT(shape),
        lambda model: torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True),
        batch,
        lambda model, given: model(*given),
        test,
        steps=3000,
        vectors=("*norm*", "*.bias"),
        rate=lambda done, step: (
            min(1.0, (step + 1) / 100) * (0.05 + 0.95 * (0.5 + 0.5 * math.cos(math.pi * done)))
        ),
        adam=True,
    )


def rows(task: Task) -> dict[str, dict[str, Any]]:
    """The options of each row; the first is what the others are held against. Beside Adam, second moments are
    frozen where a codec can do that; beside top-k, biases and norms have four bits each."""
    early, adam = task.steps // 5, task.adam
    few = dict.fromkeys(task.vectors, zs.Int4())
    codecs: dict[str, Any] = {
        "int8": zs.Int8(),
        "1-bit": zs.OneBit(warmup_steps=early, freeze=adam),
        "top-k 1 %": few | {"*": zs.TopK(0.01, warmup_steps=early, ramp_steps=early, freeze=adam)},
        "int4": zs.Int4(),
        "low rank 4": zs.LowRank(rank=4),
        "rows": zs.Rows(),
        "bf16": zs.Cast("bfloat16"),
    }
    found: dict[str, dict[str, Any]] = {"plain": {"stage": 2}}
    found |= {name: {"stage": 2, "compress": codec} for name, codec in codecs.items()}
    found["delayed"] = {"stage": 2, "sync": zs.Delayed()}
    found["delayed late"] = {"stage": 2, "sync": zs.Delayed(warmup_steps=early)}
    found["local 8"] = {"stage": 0, "sync": zs.Local(steps=8, outer=zs.Nesterov(0.7, 0.6))}
    return found


def train(task: Task, options: dict[str, Any], seed: int) -> dict[str, Any]:
    """One run; the same loss on every rank."""
    torch.manual_seed(seed)
    model = task.build()
    optimizer = task.optimizer(model)
    run = zs.shard(model, optimizer, **options)
    generator = torch.Generator().manual_seed(100 * seed + run.rank)
    plan = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: task.rate(step / task.steps, step))
    late, before = task.steps // 10, 0
    for step in range(task.steps):
        if step == task.steps - late:
            before = run.stats().sent.get("reduce", 0)
        task.loss(model, task.batch(generator)).backward()
        optimizer.step()
        optimizer.zero_grad()
        plan.step()
    if "sync" in options and isinstance(options["sync"], zs.Local):
        run.synchronise()
    with torch.no_grad():
        loss, accuracy = task.test(model)
    sent = run.stats().sent
    run.close()
    reduced = sent.get("reduce", 0)
    return {
        "loss": loss,
        "accuracy": accuracy,
        "reduce": reduced,
        "late": (reduced - before) / late,  # in a step of the last tenth
        "sent": sum(sent.values()),
    }


def behind(row: dict[str, Any], plain: dict[str, Any]) -> str:
    """Whether a row that is judged keeps to its bar."""
    if row["name"] not in JUDGED:
        return ""
    if plain["accuracy"] is not None:
        return "pass" if row["accuracy"] >= plain["accuracy"] - POINTS else "FAIL"
    return "pass" if row["loss"] <= plain["loss"] * (1 + LOSS) else "FAIL"


def table(found: list[dict[str, Any]]) -> str:
    """Markdown: means over the seeds, and each. Bytes are those of gradients, of all steps and (`× fewer`) of
    the last tenth, which no warm-up is in; where ranks meet by their parameters, all there are."""
    lines = []
    for name in dict.fromkeys(row["task"] for row in found):
        mine = [row for row in found if row["task"] == name]
        lines += [f"## {name}", ""]
        lines += ["| | loss | accuracy | each seed | bytes ÷ plain | × fewer at last | bar |"]
        lines += ["|---|---|---|---|---|---|---|"]
        for row in mine:
            accuracy = "–" if row["accuracy"] is None else f"{row['accuracy']:.2f} %"
            key = "loss" if row["accuracy"] is None else "accuracy"
            seeds = ", ".join(f"{one[key]:.4g}" for one in row["seeds"])
            share = row["reduce"] / mine[0]["reduce"] if row["reduce"] else row["sent"] / mine[0]["sent"]
            fewer = f"{mine[0]['late'] / row['late']:.1f}" if row["late"] else "–"
            figures = f"{row['loss']:.4f} | {accuracy} | {seeds} | {share:.3f} | {fewer}"
            lines.append(f"| {row['name']} | {figures} | {behind(row, mine[0])} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=["digits", "text"], default=["digits", "text"])
    parser.add_argument("--rows", nargs="+", help="names of rows, in place of all")
    parser.add_argument("--join", nargs="+", type=Path, metavar="FILE", help="results to be made into one")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--shuffle", type=int, default=0, help="which digits are held back")
    parser.add_argument("--validate", action="store_true", help="judge text by its validation part")
    parser.add_argument("--steps", type=int, help="in place of the task's own")
    parser.add_argument("--out", nargs="?", const="", help="write a result file; its name may be given")
    options = parser.parse_args()
    if options.join:
        join(options.join, Path(options.out or "joined.json"))
        return
    torch.set_num_threads(1)
    date = time.strftime("%Y-%m-%d")
    facts = {"date": date, "command": command(), "commit": commit(), "hardware": hardware()}
    facts |= {"torch": torch.__version__, "seeds": options.seeds, "shuffle": options.shuffle}
    for name in options.tasks:
        found: list[dict[str, Any]] = []
        task = digits(options.shuffle) if name == "digits" else text(options.validate)
        task = Task(**{**vars(task), "steps": options.steps or task.steps})
        for row, how in rows(task).items():
            if options.rows and row not in options.rows:
                continue
            seeds = [train(task, how, seed) for seed in options.seeds]
            means = {
                key: None if seeds[0][key] is None else statistics.fmean(one[key] for one in seeds)
                for key in seeds[0]
            }
            about = {"task": name, "name": row, "steps": task.steps, "options": repr(how)}
            found.append({**about, **means, "seeds": seeds})
            if is_first():
                print(f"{name} {row}: loss {means['loss']:.4f} accuracy {means['accuracy']}", flush=True)
                if options.out is not None:
                    path = Path(options.out or RESULTS / f"quality-{name}.json")
                    write(path, {**facts, "rows": found})
        if is_first():
            print(table(found))


MODELS = {
    "digits": "a convolutional net on scikit-learn's digits",
    "text": "a GPT of two blocks of width 64 on the sources of Python's library",
}


def write(path: Path, result: dict[str, Any]) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n")
    task = result["rows"][0]["task"]
    known = {name: result[name] for name in ("date", "hardware", "commit", "command")}
    head = preamble("Quality, 2 ranks", MODELS[task], **known)
    steps = result["rows"][0]["steps"]
    about = f"{steps} steps, seeds {result['seeds']}."
    path.with_suffix(".md").write_text("\n".join([*head, about, "", table(result["rows"])]))


def join(paths: list[Path], into: Path) -> None:
    """Rows of several results, of one commit and the same seeds, as one: `plain` first."""
    parts = [json.loads(path.read_text()) for path in paths]
    if len({(part["commit"], str(part["seeds"]), part["shuffle"]) for part in parts}) > 1:
        sys.exit("quality.py: results of different commits, seeds or shuffles do not belong together")
    every = sorted((row for part in parts for row in part["rows"]), key=lambda row: row["name"] != "plain")
    write(into, {**parts[0], "command": f"{parts[0]['command']} and others, joined", "rows": every})


def is_first() -> bool:
    """Whether this rank is the one that speaks."""
    return torch.distributed.get_rank() == 0 if torch.distributed.is_initialized() else True


if __name__ == "__main__":
    main()
