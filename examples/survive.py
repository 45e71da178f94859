"""Training that survives: killed ranks, a killed job, a scheduler that wants the machine back.

zeroshard run --ranks 1:2 --max-restarts 3 --resume ckpt examples/survive.py

It saves every few steps beside training. Kill a rank (`kill -9`, any of the `zs-rank-N`) and the job goes on
from the latest checkpoint; send SIGTERM to the command, and it saves and unsharded parameters with exit
code 75; start it
again, and it goes on from there. It also works under torchrun:

torchrun --max-restarts 3 --nproc-per-node 2 examples/survive.py --folder ckpt
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch import nn

import zeroshard as zs


def main() -> None:
    asked = arguments()
    torch.manual_seed(0)
    width = asked.width
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, asked.steps)
    run = zs.shard(model, optimizer, stage=3)

    extra = run.resume(asked.folder, schedulers=[scheduler])
    start = extra["step"] if extra is not None else 0
    assert run.folder is not None
    if run.rank == 0:
        print(f"step {start} on {run.size} ranks", flush=True)

    for step in range(start, asked.steps):
        loss = model(batch(step, asked.rows, width, run)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        time.sleep(asked.pause)

        done, leaving = step + 1, run.preempted()
        if leaving or done % asked.every == 0 or done == asked.steps:
            run.save(
                run.folder / f"step-{done}",
                extra={"step": done},
                schedulers=[scheduler],
                keep=3,
                background=not leaving and done < asked.steps,
            )
        if leaving:
            sys.exit(zs.PREEMPTED)
    run.close()


def batch(step: int, rows: int, width: int, run: zs.Run) -> torch.Tensor:
    """A function of the step alone: rows are shared out over however many ranks there are."""
    whole = torch.randn(rows, width, generator=torch.Generator().manual_seed(step))
    return whole.chunk(run.size)[run.rank]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    option = parser.add_argument
    option("--folder", help="of the checkpoints (default: that of `zeroshard run --resume`)")
    option("--steps", type=int, default=200, help="train so many (default 200)")
    option("--every", type=int, default=5, help="save after so many (default 5)")
    option("--width", type=int, default=256, help="of the layers (default 256)")
    option("--rows", type=int, default=12, help="of the batch of all ranks (default 12)")
    option("--pause", type=float, default=0.0, help="seconds to wait in every step, to have time to kill it")
    return parser.parse_args()


if __name__ == "__main__":
    main()
