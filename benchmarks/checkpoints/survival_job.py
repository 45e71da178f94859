"""What `survival.py` kills: a job that saves every few steps, in turn beside training and before it goes on.

It says on rank 0 where it begins, every step, and nothing else.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import nn

import zeroshard as zs


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--width", type=int, default=512)
    asked = parser.parse_args()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(asked.width, asked.width), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9999)
    run = zs.shard(model, optimizer, stage=3)
    extra = run.resume(schedulers=[scheduler])
    start = extra["step"] if extra is not None else 0
    assert run.folder is not None
    if run.rank == 0:
        os.write(1, b"begin %d\n" % start)
    for step in range(start, asked.steps):
        batch = torch.randn(12, asked.width, generator=torch.Generator().manual_seed(step))
        model(batch.chunk(run.size)[run.rank]).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        done = step + 1
        if run.rank == 0:
            os.write(1, b"done %d\n" % done)  # in one shard, whatever kills it
        if done % asked.every == 0 or done == asked.steps:
            beside = done // asked.every % 2 == 0 and done < asked.steps
            path = run.folder / f"step-{done}"
            run.save(path, extra={"step": done}, schedulers=[scheduler], keep=3, background=beside)
    run.close()


if __name__ == "__main__":
    main()
