"""What each rank of `checkpoints.py` does: saves and loads the same bytes by every system, in turn."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.checkpoint import PendingSave, durable_files

WIDTH, ROWS = 2048, 64


class Bench:
    """A sharded model after one step, and the rows of it that this rank holds."""

    def __init__(self, megabytes: int, folder: Path) -> None:
        layers = max(2, round(megabytes * 1e6 / (WIDTH * WIDTH * 12)))
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.run = zs.shard(self.model, self.optimizer, stage=3)
        self.folder = folder
        self.step()
        self.path = folder / "none"
        self.beside = dist.new_group(backend="gloo")  # its thread and our barriers must not meet

    def step(self) -> None:
        self.model(torch.ones(ROWS, WIDTH)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def distributed(self) -> dict[str, Any]:
        """Weights and moments as DTensors, which torch.distributed.checkpoint saves by rows, as we do."""
        state = self.optimizer.state_dict()["state"]
        moments = {f"{i}.{key}": value for i, kept in state.items() for key, value in kept.items()}
        return {"model": dict(self.model.state_dict()), "optimizer": moments}

    def local(self) -> dict[str, Tensor]:
        """This rank's rows as plain tensors: what torch.save would be given by hand."""
        found: dict[str, Tensor] = {}
        for part, tensors in self.distributed().items():
            for name, value in tensors.items():
                found[f"{part}.{name}"] = value.to_local() if hasattr(value, "to_local") else value
        return found

    # ---------------------------------------------------------------------- systems

    def save_ours(self, sync: bool) -> None:
        self.run.save(self.path)

    def save_dcp(self, sync: bool) -> None:
        writer = dcp.FileSystemWriter(self.path, sync_files=sync)
        dcp.save(self.distributed(), storage_writer=writer)

    def save_torch(self, sync: bool) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / f"{dist.get_rank()}.pt", "wb") as file:
            torch.save(self.local(), file)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()

    def load_ours(self, sync: bool) -> None:
        self.run.load(self.path)

    def load_dcp(self, sync: bool) -> None:
        dcp.load(self.distributed(), checkpoint_id=self.path)

    def load_torch(self, sync: bool) -> None:
        found = torch.load(self.path / f"{dist.get_rank()}.pt", weights_only=True)
        for name, tensor in self.local().items():
            with torch.no_grad():
                tensor.copy_(found[name])
        dist.barrier()

    def begin_ours(self, sync: bool) -> Callable[[], object]:
        pending = self.run.save(self.path, background=True)
        assert isinstance(pending, PendingSave)
        return pending.wait

    def begin_dcp(self, sync: bool) -> Callable[[], object]:
        writer = dcp.FileSystemWriter(self.path, sync_files=sync)
        return dcp.async_save(self.distributed(), storage_writer=writer, process_group=self.beside).result


@contextmanager
def syncing(wanted: bool) -> Iterator[None]:
    """Ours always syncs; without it for the comparison alone."""
    kept = durable_files.sync, durable_files.start_writeback, durable_files.sync_folder
    if not wanted:
        durable_files.sync = lambda fd: None  # type: ignore[assignment]
        durable_files.start_writeback = lambda fd, offset, count: None
        durable_files.sync_folder = lambda path: None
    try:
        yield
    finally:
        durable_files.sync, durable_files.start_writeback, durable_files.sync_folder = kept


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    return 0


@contextmanager
def measured(into: dict[str, float]) -> Iterator[None]:
    """Seconds of the slower rank, processor seconds of both, and the larger rank's peak above the start."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, used = resident("VmRSS"), time.process_time()
    dist.barrier()
    began = time.perf_counter()
    yield
    mine = [time.perf_counter() - began, time.process_time() - used, float(resident("VmHWM") - before)]
    board: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(board, mine)
    into["seconds"] = max(row[0] for row in board)
    into["cpu"] = sum(row[1] for row in board)
    into["extra"] = max(row[2] for row in board)


def one_round(bench: Bench, repeat: int, sync: bool, note: Callable[[str, dict[str, float]], None]) -> None:
    systems = ["ours", "dcp", "torch"]
    systems = systems[repeat % 3 :] + systems[: repeat % 3]
    for name in systems:
        bench.path = bench.folder / f"{name}-{repeat}"
        for verb in ("save", "load"):
            found: dict[str, float] = {}
            dist.barrier()
            with syncing(sync), measured(found):
                getattr(bench, f"{verb}_{name}")(sync)
            note(f"{verb} {name}", found)
        clear(bench.path)
    for name in (name for name in systems if name != "torch"):
        bench.path = bench.folder / f"{name}-{repeat}-beside"
        background(bench, name, sync, note)
        clear(bench.path)


def background(bench: Bench, name: str, sync: bool, note: Callable[[str, dict[str, float]], None]) -> None:
    """How long the call holds training up and how long the next update waits for the copy; how long that step
    takes beside the save, and one without a save; then the rest."""
    alone = timed(bench.step)
    whole: dict[str, float] = {}
    waited = [0.0]
    with syncing(sync), measured(whole):
        began = time.perf_counter()
        wait = getattr(bench, f"begin_{name}")(sync)
        held = time.perf_counter() - began
        if (reader := bench.run._runtime.reader) is not None:
            copied = reader.copied_of

            def read(owner: Any) -> None:
                waited[0] += timed(lambda: copied(owner))

            reader.copied_of = read  # type: ignore[method-assign]
        beside = timed(bench.step)
        wait()
    board: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(board, [held + waited[0], held, waited[0], alone, beside])
    kinds = ("held up", "held up by the call", "held up by the copy", "step alone", "step beside")
    for what, values in zip(kinds, zip(*board, strict=True), strict=True):
        note(f"{what} {name}", {"seconds": max(values), "cpu": 0.0, "extra": 0.0})
    note(f"background {name}", whole)


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def clear(path: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
        os.sync()
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    bench = Bench(asked.megabytes, asked.folder)
    rows: list[dict[str, Any]] = []
    for repeat in range(-1, asked.repeats):  # the first warms all of them up
        for sync in (True, False):

            def note(what: str, found: dict[str, float], sync: bool = sync, repeat: int = repeat) -> None:
                rows.append({"what": what, "sync": sync, "repeat": repeat, **found})

            one_round(bench, max(repeat, 0), sync, note)
    total = sum(tensor.nbytes for tensor in bench.local().values())
    if bench.run.rank == 0:
        asked.out.write_text(json.dumps({"bytes of a rank": total, "rows": rows}))
    bench.run.close()


if __name__ == "__main__":
    main()
