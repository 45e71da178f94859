"""What each rank of `checkpoints.py` does to learn how much a background save delays training in all.

A pair times as many steps as a save needs to be complete, once with a save that begins before the first of
them and once without, in random order. The delay is what the former takes more, its call and its end
included. Single delays scatter by more than what is asked for, so there are many pairs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeroshard as zs
from zeroshard.checkpoint import PendingSave

WIDTH, ROWS = 2048, 64
EVERY = 8  # pairs to a blocking save


class Bench:
    def __init__(self, megabytes: int, folder: Path, device: torch.device, options: dict[str, Any]) -> None:
        layers = max(2, round(megabytes * 1e6 / (WIDTH * WIDTH * 12)))
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.run = zs.shard(self.model, self.optimizer, **options)
        self.batch = torch.ones(ROWS, WIDTH, device=device)
        self.folder = folder

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.model(self.batch).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.batch.is_cuda:
            torch.cuda.synchronize()

    def begin(self, path: Path) -> PendingSave:
        pending = self.run.save(path, background=True)
        assert isinstance(pending, PendingSave)
        return pending

    def clear(self, path: Path) -> None:
        self.together([0.0])
        if self.run.rank == 0:
            shutil.rmtree(path)
            os.sync()
        self.together([0.0])

    def together(self, mine: list[float]) -> list[float]:
        """The largest of each number over the ranks; also a barrier."""
        if not dist.is_initialized():
            return mine
        board: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(board, mine)
        return [max(values) for values in zip(*board, strict=True)]

    def alone(self, steps: int) -> float:
        self.together([0.0])
        began = time.perf_counter()
        self.train(steps)
        return self.together([time.perf_counter() - began])[0]

    def beside(self, steps: int) -> list[float]:
        """Seconds of the steps with a save, of its call, of what was left of it after them; processor seconds
        of all."""
        path = self.folder / "beside"
        self.together([0.0])
        used, began = time.process_time(), time.perf_counter()
        pending = self.begin(path)
        called = time.perf_counter() - began
        self.train(steps)
        trained = time.perf_counter() - began
        pending.wait()
        whole = time.perf_counter() - began
        found = self.together([whole, called, whole - trained, time.process_time() - used])
        self.clear(path)
        return found

    def blocking(self) -> list[float]:
        path = self.folder / "blocking"
        self.together([0.0])
        used, began = time.process_time(), time.perf_counter()
        self.run.save(path)
        found = self.together([time.perf_counter() - began, time.process_time() - used])
        self.clear(path)
        return found

    def needed(self) -> int:
        """Steps that are sure to last longer than a background save: twice as long as one takes alone."""
        self.train(2)
        for _ in range(2):  # the first allocates
            path = self.folder / "first"
            began = time.perf_counter()
            self.begin(path).wait()
            save = time.perf_counter() - began
            self.clear(path)
        step = self.alone(2) / 2
        return math.ceil(self.together([max(2.0, 2 * save / step)])[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--megabytes", type=int, default=300, help="of all ranks")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    asked = parser.parse_args()
    bench = Bench(asked.megabytes, asked.folder, asked.device, {"stage": 3})
    steps = bench.needed()
    order = random.Random(0)  # the same on all ranks
    rows, blocking = [], []
    for number in range(asked.repeats):
        saves_first = order.random() < 0.5
        alone = 0.0 if saves_first else bench.alone(steps)
        whole, called, late, used = bench.beside(steps)
        alone = bench.alone(steps) if saves_first else alone
        rows.append({"alone": alone, "beside": whole, "call": called, "late": late, "cpu": used})
        if number % EVERY == 0:
            blocking.append(bench.blocking()[0])
    if bench.run.rank == 0:
        asked.out.write_text(json.dumps({"steps": steps, "blocking": blocking, "rows": rows}))
    bench.run.close()


if __name__ == "__main__":
    main()
