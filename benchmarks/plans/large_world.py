"""One rank of a simulated world: what it keeps in memory, and the processor time of its start and steps.

    python benchmarks/plans/large_world.py                   # worlds of 8, 64 and 1,024; under a minute
    python benchmarks/plans/large_world.py --other CHECKOUT  # and with the package of another checkout
    python benchmarks/plans/large_world.py --large 64        # and 1.26 B parameters in worlds of these sizes

Stage 3, bf16, updates on the host, on the CPU; torch's fake process group. Resident memory is what the second
run in a process adds: the first loads kernels that stay. For the large model it is compared with the bytes
that a plan counts. Writes `results/large-world.md` and `.json`.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

from provenance import RESULTS, ROOT, command, commit, hardware, preamble, version

SMALL, LARGE = (22, 64), (22, 2048)  # blocks, and their width
STEPS = 4


def measured(world: int, shape: tuple[int, int]) -> dict[str, Any]:
    """In a process of its own: two runs one after the other, and the figures of the second."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    torch.set_num_threads(1)  # several would spin while they wait, on a machine that is shared
    one_run(shape)
    return one_run(shape) | {"world": world, "blocks": shape[0], "width": shape[1]}


def one_run(shape: tuple[int, int]) -> dict[str, Any]:
    import torch

    import zeroshard as zs

    before, start = resident(), time.process_time()
    model, batch = built(*shape)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    run = zs.shard(model, optimizer, stage=3, precision="bf16", offload=zs.Offload(), clip_norm=1e9)
    started = time.process_time() - start
    steps = []
    for _ in range(STEPS):
        start = time.process_time()
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(time.process_time() - start)
    runtime = run._runtime
    runtime.settle()
    live = run.stats().live
    stages = list(runtime.transport._stages.values())  # type: ignore[attr-defined]
    for stage in stages:
        stage.zero_()  # between GPUs all of it is used; here some pages were never touched
    grown = resident() - before
    tensors = sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())
    on_host = live["host"] + live["staging"]
    counted = sum(live.values()) + sum(stage.nbytes for stage in stages)
    runtime.close()
    run._hooks.remove()
    if runtime.host is not None:
        runtime.host.close()
    runtime.transport.close()
    return {
        "parameters": len(list(model.parameters())),
        "start_s": started,
        "step_s": statistics.median(steps[1:]),
        "tensors": tensors,
        "resident": grown,
        "counted": counted,
        "host": on_host,
        "host_resident": grown - (counted - on_host),
    }


def built(blocks: int, width: int) -> tuple[Any, Any]:
    """Residual blocks of seven matrices and two norms, without memory, and a batch of four rows."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = [(width, width)] * 4 + [(width, 4 * width), (4 * width, width), (width, width)]
            self.parts = nn.ModuleList(nn.Linear(a, b) for a, b in sizes)
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value, out, up, down, gate = self.parts
            y = self.norms[0](x)
            x = x + out(query(y) * torch.sigmoid(key(y)) + value(y))
            y = self.norms[1](x)
            return x + down(torch.relu(up(y))) * torch.sigmoid(gate(y))

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(blocks))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x.square().mean()

    with torch.device("meta"):
        made = Stack()
    return made, torch.ones(4, width)


def resident() -> int:
    """Bytes of this process that are in memory and not a file's, with nothing left over."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def asked(checkout: Path, world: int, large: bool) -> dict[str, Any]:
    """The figures of one case, from a process of its own."""
    command = [sys.executable, __file__, "--one", str(world), *(["--large", "0"] if large else [])]
    environment = os.environ | {"PYTHONPATH": str(checkout / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"a world of {world} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(rows: list[dict[str, Any]]) -> list[str]:
    names = ("package", "ranks", "parameters", "start, CPU s", "step, CPU s", "tensors")
    names += ("resident, MiB", "counted, MiB", "of it host, MiB", "counted there, MiB")
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in rows:
        what = f"{row['parameters']} of width {row['width']:,}"
        times = f"{row['start_s']:.2f} | {row['step_s']:.2f} | {row['tensors']:,}"
        sizes = [row[name] / 2**20 for name in ("resident", "counted", "host_resident", "host")]
        memory = " | ".join(f"{size:.1f}" for size in sizes)
        lines.append(f"| {row['package']} | {row['world']:,} | {what} | {times} | {memory} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 64, 1024])
    parser.add_argument("--large", type=int, nargs="*", default=[])
    parser.add_argument("--other", type=Path, help="another checkout, measured before this one")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(measured(args.one, LARGE if args.large else SMALL)))
        return
    packages = [("before", args.other)] if args.other else []
    packages.append(("now", ROOT))
    rows = []
    for large, worlds in ((False, args.worlds), (True, args.large)):
        for world in worlds:
            for name, checkout in packages:
                rows.append({"package": name} | asked(checkout, world, large))
                print(table(rows)[-1], flush=True)
    path = args.out or RESULTS / "large-world.json"
    facts = {
        "hardware": hardware(),
        "torch": version("torch"),
        "commit": commit(),
        "command": command(),
    }
    path.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")
    head = [
        *preamble("One rank of a simulated world", "22 blocks, of width 64 and 2,048"),
        "Stage 3, bf16, updates on the host. Memory is what the second run in a process adds; `host` is that "
        "without what a plan counts as the device's, beside what it counts as the host's.",
        "",
    ]
    path.with_suffix(".md").write_text("\n".join([*head, *table(rows)]) + "\n")


if __name__ == "__main__":
    main()
