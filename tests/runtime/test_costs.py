"""What is done for each tensor, unit and rank is done once: work that is counted in calls of Python at two
sizes grows no faster than the size."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from counting import calls_of, many_small, simulated
from kernel_values import built
from torch import nn

import zeroshard as zs
from zeroshard.options import Stage
from zeroshard.runtime import build


def clipped(tensors: int) -> tuple[int, int]:
    """Calls of the first `clip_grad_norm_` of these gradients, and of the next."""
    model = many_small(tensors)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = zs.shard(model, optimizer, stage=2, units=["*"])
    counted = []
    for _ in range(2):
        model(torch.ones(2, 4)).square().mean().backward()
        counted.append(calls_of(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return counted[0], counted[1]


def test_clipping_is_linear_and_the_first_time_like_the_others() -> None:
    with simulated(4):
        clipped(20)  # what happens once in a process
        first, next_ = clipped(100)
        more, more_next = clipped(400)
    assert first <= 3 * next_
    assert more <= 3 * more_next
    assert more <= 4.2 * first
    assert more_next <= 4.2 * next_
    assert more_next <= 400 * 60


def offloaded_step(offload: zs.Offload | None, tensors: int) -> int:
    """Calls of a step, in the thread that trains."""
    model = many_small(tensors)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    run = zs.shard(model, optimizer, stage=0, units=["*"], offload=offload, clip_norm=1.0)

    def step() -> None:
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):
        step()
    calls = min(calls_of(step) for _ in range(3))  # a step may have to look for the host's end more than once
    run.close()
    return calls


HOST: list[tuple[str, int]] = [("host", 15), ("disk", 12), ("parameters", 90)]


@built
@pytest.mark.parametrize(("rests", "most"), HOST)
def test_a_host_update_calls_little_for_a_tensor_and_more_for_a_unit(
    rests: str, most: int, tmp_path: Path
) -> None:
    """What a step calls above one on the device, a tensor, where ten share an offload group."""
    offload = {
        "host": zs.Offload(threads=1),
        "disk": zs.Offload("disk", path=str(tmp_path), threads=1),
        "parameters": zs.Offload(parameters="host", threads=1),
    }[rests]
    offloaded_step(offload, 20)  # what happens once in a process
    few, many = (offloaded_step(offload, n) - offloaded_step(None, n) for n in (100, 400))
    assert few <= most * 100
    assert many <= 4.5 * few


def planned(layers: int) -> int:
    """Calls of a plan of as many units that are alike."""
    with torch.device("meta"):
        model = many_small(layers, each=1)
    optimizer = torch.optim.SGD(model.parameters())
    asked = {"ranks": 8, "limit": "80GiB", "stage": 3, "units": ["*"], "batch": torch.ones(2, 4)}
    return calls_of(lambda: zs.plan(model, optimizer, **asked))


def test_a_plan_is_linear_in_the_layers() -> None:
    planned(10)  # what happens once in a process
    assert planned(400) <= 4.4 * planned(100)


def coded_step(world: int, stage: Stage) -> int:
    """Calls of a step whose gradients are coded."""
    with simulated(world):
        model = many_small(40, each=20, width=16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = zs.shard(model, optimizer, stage=stage, units=["*"], compress=zs.compress.Int8())

        def step() -> None:
            model(torch.ones(2, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        calls = calls_of(step)
        run.close()
    return calls


@built
@pytest.mark.parametrize("stage", [0, 2])
def test_a_coded_step_calls_no_more_for_more_ranks(stage: Stage) -> None:
    coded_step(8, stage)  # what happens once in a process
    assert coded_step(1024, stage) <= 1.1 * coded_step(64, stage)


@contextmanager
def searches() -> Iterator[list[int]]:
    """Python's searches of all objects for cycles, by generation, as they begin."""
    begun: list[int] = []

    def heard(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            begun.append(info["generation"])

    gc.callbacks.append(heard)
    try:
        yield begun
    finally:
        gc.callbacks.remove(heard)


def counted(work: Callable[[], object]) -> int:
    """Calls of work that makes thousands of objects and keeps them, and must not be searched meanwhile."""
    gc.collect()
    with searches() as begun:
        calls = calls_of(work)
    assert 2 not in begun
    return calls


def sharded(tensors: int, stage: Stage) -> int:
    """Calls of `shard()` on one of four ranks."""
    model = many_small(tensors)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runs: list[zs.Run] = []
    calls = counted(lambda: runs.append(zs.shard(model, optimizer, stage=stage, units=["*"])))
    runs[0].close()
    return calls


@pytest.mark.parametrize("stage", [2, 3])
def test_sharding_is_linear_in_the_tensors(stage: Stage) -> None:
    with simulated(4):
        sharded(20, stage)  # what happens once in a process
        few, many = sharded(100, stage), sharded(400, stage)
    assert many <= 4.1 * few
    assert many <= 400 * 700


def kept(tensors: int, stage: Stage) -> int:
    """Bytes of Python's objects that `shard()` leaves on one of two ranks."""
    model = many_small(tensors)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gc.collect()
    tracemalloc.start()
    run = zs.shard(model, optimizer, stage=stage, units=["*"])
    gc.collect()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    run.close()
    return size


@pytest.mark.parametrize("stage", [2, 3])
def test_a_tensor_keeps_few_objects(stage: Stage) -> None:
    with simulated(2):
        kept(20, stage)  # what happens once in a process
        few, many = kept(100, stage), kept(400, stage)
    assert many - few <= 300 * {2: 6000, 3: 7000}[stage]


@pytest.mark.parametrize("stage", [1, 3])
def test_originals_go_as_their_rows_come(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    model = many_small(40)
    originals, left = list(model.parameters()), list[int]()
    store = build._store

    def counted_store(*given: Any) -> None:
        left.append(sum(p.untyped_storage().nbytes() >= 64 for p in originals))
        store(*given)

    monkeypatch.setattr(build, "_store", counted_store)
    with simulated(2):
        zs.shard(model, stage=stage, units=["*"]).close()
    assert left == list(range(40, 0, -1))


def checkpointed(tensors: int, folder: Path) -> tuple[int, int]:
    """Calls of a save, and of a load, of one rank."""
    model = many_small(tensors)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    run = zs.shard(model, optimizer, stage=0, units=["*"])
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    calls = (
        counted(lambda: run.save(folder / str(tensors))),
        counted(lambda: run.load(folder / str(tensors))),
    )
    run.close()
    return calls


def test_a_checkpoint_is_linear_in_the_tensors(tmp_path: Path) -> None:
    checkpointed(20, tmp_path)  # what happens once in a process
    (save, load), (more_save, more_load) = (checkpointed(n, tmp_path) for n in (100, 400))
    assert more_save <= 4.1 * save
    assert more_load <= 4.1 * load
    assert more_save <= 4 * 400 * 130  # of each parameter three tensors of state, too
    assert more_load <= 4 * 400 * 160


def stepped(tensors: int) -> int:
    """Calls of a step of the only rank, beyond those of the loop without us."""
    model = many_small(tensors)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    plain = calls_of(step)
    run = zs.shard(model, optimizer, stage=0, units=["*"])
    step()
    calls = calls_of(step)
    run.close()
    return calls - plain


def test_a_step_of_one_rank_adds_little_to_each_tensor() -> None:
    stepped(20)  # what happens once in a process
    few, many = stepped(100), stepped(400)
    assert many <= 4.1 * few
    assert many <= 400 * 17
