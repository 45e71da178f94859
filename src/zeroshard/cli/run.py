"""Start ranks of a script on this host.

The script sees the variables that torchrun sets, so it needs no change to run under either. Rank 0 writes to
the terminal; lines of the others come with their rank in front. If a rank fails, the others are ended, the
last line names the first that failed and how, and the exit code is that rank's (128 + the signal for one that
was killed).

With --max-restarts a failed rank starts the whole job again, by itself; a script that calls `run.resume()`
then goes on from the latest complete checkpoint of the --resume folder. --ranks 1:4 begins with 4, and goes
on with one fewer where a rank failed again before another checkpoint was complete. SIGTERM is passed on: a
script that asks `run.preempted()` saves and leaves with exit code 75, and no restart follows.

examples:
  zeroshard run --ranks 2 train.py --lr 3e-4
  zeroshard run --ranks 8 --threads 1 --timeout 600 -m project.train
  zeroshard run --ranks 1:4 --max-restarts 3 --resume ckpt train.py
  zeroshard run --ranks 2 --hf stage=3,precision=bf16 train.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from zeroshard.extend import LaunchJob, rank_range


def configure(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    add = parser.add_argument
    add("--ranks", required=True, metavar="N", help="how many processes to start; MIN:MAX with restarts")
    add("--max-restarts", type=int, default=0, metavar="N", help="start again after a failure, N times")
    add("--resume", type=Path, metavar="FOLDER", help="the folder of checkpoints, for `run.resume()`")
    add(
        "--grace",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds to save and leave after SIGTERM or Ctrl-C (default 30)",
    )
    add("--threads", type=int, metavar="T", help="threads per rank (OMP_NUM_THREADS; default: cores / N)")
    add(
        "--timeout",
        type=float,
        metavar="S",
        help="stop after S seconds, showing each rank's stack; exit code 124",
    )
    add(
        "--stuck-after",
        type=float,
        metavar="S",
        help="end the run when ranks have waited S seconds for one that lives and does not come, with that "
        "rank's stack (default 600, or shard(timeout=))",
    )
    add(
        "--log-dir",
        type=Path,
        metavar="D",
        help="write the output of rank 1 and up to D/rank-N.log, not the terminal",
    )
    add(
        "--hf",
        action="append",
        metavar="OPTIONS",
        help="shard what transformers' Trainer and Accelerate train: stage=3, or stage=3,offload=host",
    )
    add("-m", dest="module", action="store_true", help="the target is a module's name, as in python -m")
    add("target", help="the script, or the module after -m")
    passed = add("arguments", nargs=argparse.REMAINDER, help="what the script gets")
    passed.required = False  # argparse would ask for them where the target is missing


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit code: in the launcher that of the run, in each forked rank that of the script."""
    from zeroshard.extend import launch

    fewest, most = rank_range(arguments.ranks)
    return launch(
        LaunchJob(
            ranks=most,
            fewest=fewest,
            restarts=arguments.max_restarts,
            resume=arguments.resume,
            grace=arguments.grace,
            target=arguments.target,
            arguments=tuple(arguments.arguments),
            module=arguments.module,
            threads=arguments.threads,
            timeout=arguments.timeout,
            stuck_after=arguments.stuck_after,
            log_dir=arguments.log_dir,
            before=before(arguments.hf),
        )
    )


def before(words: list[str] | None) -> Callable[[], object] | None:
    """What comes before an unchanged script of Trainer's or Accelerate's."""
    if words is None:
        return None
    from zeroshard.integrations.options import enable_when_imported, parse_options

    return partial(enable_when_imported, parse_options(words), f"--hf {','.join(words)}")
