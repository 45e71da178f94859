"""What each rank of `checkpoints.py` does to learn how long the call of a background save takes, for every
kind of state that changes at moments of its own.

A round takes a step and saves, blocking; takes a step and saves beside the next one. The call comes right
after `optimizer.step()`, so it includes waiting for what the step has begun and a save must see.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from checkpoints_beside import Bench

import zeroshard as zs

DISK = "state on the disk"
HOST: dict[str, Any] = {"stage": 3, "clip_norm": math.inf}
KINDS: dict[str, dict[str, Any]] = {
    "state on the device": {"stage": 3},
    "state on the host": {**HOST, "offload": zs.Offload(threads=1)},
    "state on the host, 8-bit moments": {**HOST, "offload": zs.Offload(threads=1, moments="int8")},
    DISK: HOST,
    "sync=Delayed()": {"stage": 3, "sync": zs.Delayed()},
    "compress=Int8(feedback=True)": {"stage": 2, "compress": zs.Int8(feedback=True)},
}


def options_of(kind: str, folder: Path) -> dict[str, Any]:
    if kind == DISK:
        return {**HOST, "offload": zs.Offload(optimizer="disk", threads=1, path=str(folder))}
    return KINDS[kind]


def measure(kind: str, asked: argparse.Namespace) -> list[dict[str, float]]:
    bench = Bench(asked.megabytes, asked.folder, torch.device("cpu"), options_of(kind, asked.folder))
    rows = []
    for number in range(-1, asked.repeats):  # the first allocates
        bench.train(1)
        blocking, _ = bench.blocking()
        bench.train(1)
        path = asked.folder / "call"
        bench.together([0.0])
        began = time.perf_counter()
        pending = bench.begin(path)
        called = time.perf_counter() - began
        bench.train(1)
        pending.wait()
        (call,) = bench.together([called])
        bench.clear(path)
        if number >= 0:
            rows.append({"blocking": blocking, "call": call})
    bench.run.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--megabytes", type=int, default=600, help="of weights and moments, all ranks")
    parser.add_argument("--repeats", type=int, default=2)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    found = {kind: measure(kind, asked) for kind in KINDS}
    if os.environ.get("RANK", "0") == "0":
        asked.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
