"""Kills saves at random moments, many times: `python checkpoint_kills.py FOLDER COUNT SEED`. Prints what it
saw as JSON.

One process that forks its victims, since importing torch for each would take longer than all the saves.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from zeroshard.checkpoint import HeldRows, NoPeers, RunSnapshot, clean, latest, read_manifest, save, verify


def victim(folder: Path, first: int, told: int) -> None:
    """Save step after step, saying so after each; to one name in a folder of that name."""
    for step in range(first, first + 10_000):

        def read(start: int, stop: int, step: int = step) -> torch.Tensor:
            time.sleep(0.001)
            return torch.full((stop - start, 1024), float(step))

        records = [
            HeldRows(f"w{i}", "parameter", (64, 1024), "float32", (0, 64), read, lambda start, rows: None)
            for i in range(3)
        ]
        name = "last" if folder.name == "one name" else str(step)
        save(folder / name, RunSnapshot(records, {"step": step}), NoPeers(), keep=3)
        os.write(told, b"%d\n" % step)


def kill_one(folder: Path, first: int, delay: float) -> int:
    """The last step that a victim said it had saved before it was killed, or 0."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            victim(folder, first, theirs)
        finally:
            os._exit(1)
    os.close(theirs)
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with os.fdopen(ours) as told:
        return max((int(line) for line in told), default=0)


def judge(folder: Path, told: int) -> dict[str, object]:
    """What is on the disk after the next start."""
    clean(folder)
    path = latest(folder)
    return {
        "told": told,
        "latest": None if path is None else read_manifest(path).head.step,
        "good": path is None or verify(path).ok,
        "hidden": [name for name in os.listdir(folder) if name.startswith(".")],
        "count": len(os.listdir(folder)),
    }


def main() -> None:
    folder, count, chance = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    torch.set_num_threads(1)
    seen: dict[str, list[dict[str, object]]] = {"new names": [], "one name": []}
    for name, results in seen.items():
        place = folder / name
        place.mkdir(parents=True)
        known = 0
        for _ in range(count):
            told = kill_one(place, known + 1, chance.uniform(0.001, 0.12))
            results.append(judge(place, told))
            known = int(str(results[-1]["latest"] or 0))
    json.dump(seen, sys.stdout)


if __name__ == "__main__":
    main()
