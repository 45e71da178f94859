"""A training job that saves every few steps and goes on from the latest checkpoint it finds."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import models
import torch

import zeroshard as zs

STEPS, EVERY, RANKS = 60, 3, 2


def main(folder: Path, last: int) -> None:
    """Train to the end; or to an earlier `last` step, and wait there to be killed."""
    model = models.build("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = zs.shard(model, optimizer, stage=3)
    found = zs.latest(folder)
    start = run.load(found)["step"] if found is not None else 0
    for step in range(start, STEPS):
        while step == last:
            time.sleep(1.0)
        batch = models.MLP.batch(4 * RANKS, seed=step).chunk(run.size)[run.rank]
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % EVERY == 0:
            # Every other one beside training; the last one must be there when the job ends.
            beside = step % 2 == 0 and step + 1 < STEPS
            run.save(folder / f"step-{step + 1}", extra={"step": step + 1}, keep=3, background=beside)
    run.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
