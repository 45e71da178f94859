"""What grows with the number of tensors, ranks and layers, at three sizes each, and how fast.

    python benchmarks/steps/costs.py                 # every row; goes on where it stopped
    python benchmarks/steps/costs.py clip plan       # these rows, measured anew

CPU time and memory of one rank, each case in processes of its own: models of many small tensors, ten a
unit, where overhead shows. `exponent` is that of the straight line through the logarithms of size and
figure. Writes `results/costs.md` and `.json` after each case.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from kept import RESULTS, facts, keep, show, table


class Row(NamedTuple):
    """What is measured: of whom, at which sizes, and what each figure is."""

    title: str
    systems: tuple[str, ...]
    sizes: tuple[int, ...]
    figures: tuple[str, ...] = ("CPU ms",)


MANY = (1000, 3000, 10000)
ROWS = {
    "clip": Row(
        "clip_grad_norm_, by tensors; two ranks, stage 2",
        ("zs", "fsdp2"),
        (500, 1000, 2000),
        ("first, CPU ms", "later, CPU ms"),
    ),
    "shard": Row(
        "shard(), by tensors; two ranks, stage 2",
        ("zs", "fsdp2", "ddp"),
        MANY,
        ("CPU ms", "KB a tensor that stay"),
    ),
    "build": Row(
        "memory of a rank above the start while shard() builds, by MB of the model; two ranks",
        ("zs stage 2", "zs stage 3", "fsdp2"),
        (128, 512, 1024),
        ("MB at most", "MB that stay"),
    ),
    "int8": Row(
        "a step with compress=Int8(), by simulated ranks; stage 2", ("zs", "zs without"), (64, 512, 4096)
    ),
    "plan": Row("a plan of a fixed stage, by layers", ("zs",), (126, 500, 1000)),
    "save": Row(
        "a save, by parameters with Adam's state; one rank",
        ("zs", "torch"),
        MANY,
        ("CPU ms", "MB above the state"),
    ),
    "load": Row(
        "a load of the same",
        ("zs", "torch"),
        MANY,
        ("CPU ms", "MB above the state"),
    ),
    "step": Row("a step, by tensors; one rank, stage 0", ("zs", "ddp", "plain"), MANY),
    "offload": Row(
        "a step, by tensors, by where state (host, disk) or parameters and state rest; one rank, stage 0",
        ("device", "host", "parameters", "disk"),
        MANY,
        ("CPU ms", "calls of Python"),
    ),
    "threads": Row(
        "a step of a rank, by ranks that are threads of one process; stage 2", ("zs",), (4, 16, 64)
    ),
}


def resident(field: str) -> float:
    """Bytes of this process: there now (`VmRSS`), or at most since `forget_peak` (`VmHWM`)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith(field))


def forget_peak() -> None:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def timed(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def made(system: str, tensors: int, stage: int) -> tuple[Any, Any, Callable[[], object]]:
    """A model, its optimizer, and what wraps them; the wrapped model stands in the last one's answer."""
    import torch
    from counting import many_small

    import zeroshard as zs

    model = many_small(tensors)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def wrap() -> object:
        if system == "zs":
            zs.shard(model, optimizer, stage=stage, units=["*"])
        elif system == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            for unit in (*model, model):
                fully_shard(unit)
            optimizer.param_groups[0]["params"] = list(model.parameters())
        elif system == "ddp":
            return torch.nn.parallel.DistributedDataParallel(model)
        return model

    return model, optimizer, wrap


def of_ranks(row: str, system: str, size: int) -> list[float]:
    """On every rank: the times of a row whose ranks are real."""
    import torch

    made(system, 20, 2)[2]()  # what happens once in a process
    model, optimizer, wrap = made(system, size, 0 if row == "step" else 2)
    wrapped: Any = model
    forget_peak()
    before, start = resident("VmRSS"), time.process_time()
    wrapped = wrap()
    times = [time.process_time() - start, (resident("VmRSS") - before) / size / 1e3]
    wrapped = model if wrapped is None else wrapped
    if row == "shard":
        return [1e3 * times[0], times[1]]
    times = []
    for _ in range(5):
        start = time.process_time()
        wrapped(torch.ones(2, 4)).square().mean().backward()
        if row == "clip":
            times.append(timed(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        if row == "step":
            times.append(time.process_time() - start)
    return [1e3 * times[0], 1e3 * min(times[1:])] if row == "clip" else [1e3 * min(times[1:])]


def built(system: str, megabytes: int) -> list[float]:
    """On every rank: the memory that sharding a model takes, at its most and in the end."""
    import torch

    import zeroshard as zs

    width = 1024  # a layer is 4 MB
    made("zs" if system.startswith("zs") else system, 20, 2)[2]()
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(megabytes // 4)]
    model = torch.nn.Sequential(*layers)
    layers.clear()
    forget_peak()
    before = resident("VmRSS")
    if system == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for unit in (*model, model):
            fully_shard(unit)
    else:
        zs.shard(model, stage=int(system[-1]), units=["*"])  # type: ignore[arg-type]
    return [(resident(field) - before) / 1e6 for field in ("VmHWM", "VmRSS")]


def kept_on_disk(row: str, system: str, size: int) -> list[float]:
    import torch
    from counting import many_small

    import zeroshard as zs

    def one(count: int, folder: str) -> list[float]:
        model = many_small(count)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run = zs.shard(model, optimizer, stage=0) if system == "zs" else None
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

        def save() -> None:
            if run is not None:
                run.save(f"{folder}/{count}")
            else:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, f"{folder}/{count}")

        def load() -> None:
            if run is not None:
                run.load(f"{folder}/{count}")
            else:
                state = torch.load(f"{folder}/{count}")
                model.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])

        if row == "load":
            save()
        forget_peak()
        before = resident("VmRSS")
        seconds = timed(save if row == "save" else load)
        return [1e3 * seconds, (resident("VmHWM") - before) / 1e6]

    with tempfile.TemporaryDirectory() as folder:
        one(20, folder)  # what happens once in a process
        return one(size, folder)


def threaded() -> float:
    import torch
    import torch.distributed as dist
    from counting import many_small

    import zeroshard as zs

    model = many_small(20)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run = zs.shard(model, optimizer, stage=2, units=["*"])

    def steps(count: int) -> None:
        for _ in range(count):
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    steps(3)
    dist.barrier()  # type: ignore[no-untyped-call]
    seconds = timed(lambda: (steps(10), dist.barrier()))  # type: ignore[no-untyped-call,func-returns-value]
    ms = 1e3 * seconds / 10 / run.size
    run.close()
    return ms


def rested(system: str, tensors: int) -> list[float]:
    """A step whose state rests on the host; of one thread, as the host's own has the other core."""
    import torch
    from counting import calls_of, many_small

    import zeroshard as zs

    with tempfile.TemporaryDirectory() as folder:
        offload = {
            "device": None,
            "host": zs.Offload(threads=1),
            "parameters": zs.Offload(parameters="host", threads=1),
            "disk": zs.Offload("disk", path=folder, threads=1),
        }[system]
        model = many_small(tensors)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        run = zs.shard(model, optimizer, stage=0, units=["*"], offload=offload, clip_norm=1.0)

        def step() -> None:
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        milliseconds = 1e3 * min([timed(step) for _ in range(8)][3:])
        calls = calls_of(step)
        run.close()
    return [milliseconds, calls]


def coded(system: str, world: int) -> list[float]:
    import torch
    from counting import many_small, simulated

    import zeroshard as zs

    with simulated(world):
        model = many_small(100, each=20, width=64)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        codec = {"compress": zs.compress.Int8()} if system == "zs" else {}
        zs.shard(model, optimizer, stage=2, units=["*"], **codec)  # type: ignore[arg-type]

        def step() -> None:
            model(torch.ones(2, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return [1e3 * min([timed(step) for _ in range(6)][1:])]


def planned(layers: int) -> list[float]:
    import torch
    from counting import many_small

    import zeroshard as zs

    def plan(count: int) -> None:
        with torch.device("meta"):
            model = many_small(10 * count)
        optimizer = torch.optim.AdamW(model.parameters())
        zs.plan(model, optimizer, ranks=8, limit="80GiB", stage=3, units=["*"], batch=torch.ones(2, 4))

    plan(4)
    return [1e3 * timed(lambda: plan(layers))]


def measured(row: str, system: str, size: int) -> list[float]:
    import torch

    torch.set_num_threads(1)
    if row == "plan":
        return planned(size)
    if row == "int8":
        return coded(system, size)
    if row == "offload":
        return rested(system, size)
    if row in ("save", "load"):
        return kept_on_disk(row, system, size)
    from zeroshard.testing import Ranks, run_threads

    if row == "threads":
        return [max(run_threads(size, threaded))]

    group = Ranks(1 if row == "step" else 2, warn="ignore")
    try:
        given = (built, system, size) if row == "build" else (of_ranks, row, system, size)
        told = group.run(*given, timeout=500)
    finally:
        group.stop()
    return [max(times) for times in zip(*told, strict=True)]


def exponent(points: dict[int, float]) -> float:
    """The slope of the line through the logarithms."""
    xs, ys = [math.log(size) for size in points], [math.log(time) for time in points.values()]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def text(found: dict[str, Any]) -> str:
    lines: list[str] = []
    for name, row in ROWS.items():
        shown = []
        for system in row.systems:
            cases = {size: found["cases"].get(f"{name} {system} {size}") for size in row.sizes}
            known = {size: case["figures"] for size, case in cases.items() if case}
            for number, what in enumerate(row.figures) if known else ():
                points = {size: figures[number] for size, figures in known.items()}
                figures = {f"{n:,}": f"{points[n]:.1f}" if n in points else "" for n in row.sizes}
                fits = len(points) > 1 and min(points.values()) > 0
                load = max(case["load"] for case in cases.values() if case)
                about = {"system": system, "figure": what}
                slope = f"{exponent(points):.2f}" if fits else ""
                shown.append({**about, **figures, "exponent": slope, "load": f"up to {load:.0f}"})
        lines += [f"## `{name}`: {row.title}", "", *table(shown), ""] if shown else []
    return show(found, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rows", nargs="*", help=f"some of {', '.join(ROWS)}")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measured(args.one[0], args.one[1], int(args.one[2]))))
        return
    unknown = set(args.rows) - set(ROWS)
    if unknown:
        parser.error(f"no rows {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    path = RESULTS / "costs.json"
    found = facts("Costs by size", "many small tensors, see `tests/support/counting.py`")
    found["cases"] = json.loads(path.read_text())["cases"] if path.exists() else {}
    for row in args.rows or ROWS:
        for system in ROWS[row].systems:
            for size in ROWS[row].sizes:
                name = f"{row} {system} {size}"
                if name in found["cases"] and not args.rows:
                    continue
                load = os.getloadavg()[0]
                command = [sys.executable, __file__, "--one", row, system, str(size)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
                figures = json.loads(done.stdout.splitlines()[-1])
                found["cases"][name] = {"figures": figures, "load": load}
                print(name, figures, flush=True)
                keep("costs", found, text(found))


if __name__ == "__main__":
    main()
