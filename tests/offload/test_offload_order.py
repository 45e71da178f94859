"""In which order the host updates what has landed."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from offload_loop import batch, make_model
from torch.testing._internal.distributed.fake_pg import FakeStore

import zeroshard as zs
from zeroshard.checkpoint import PendingSave, read_manifest
from zeroshard.checkpoint.staging import FileImage
from zeroshard.kernels import TransferWorkers, update_rows
from zeroshard.offload import python_executor
from zeroshard.offload.group import joined
from zeroshard.offload.python_executor import PythonExecutor
from zeroshard.offload.updates import HostUpdates
from zeroshard.offload.work import HostUpdate, StagedUpdate, next_of
from zeroshard.runtime.snapshot import host_parts
from zeroshard.tiers import StagingPlace, TierCopies


class _Mark:
    def __init__(self, there: bool) -> None:
        self.there = there

    def passed(self) -> bool:
        return self.there


class _Part:
    def __init__(self, turn: int) -> None:
        self.update = SimpleNamespace(turn=turn)


class _Due:
    def __init__(self, turn: int, there: bool, reader: object = None) -> None:
        self.part, self.landed, self.reader = _Part(turn), _Mark(there), reader


@pytest.mark.parametrize(
    ("turns", "ready", "taken"),
    [
        ((9, 1, 8, 7), 4, 1),  # the root's norm, which landed long ago
        ((9, 8, 7, 1), 3, 2),  # what is asked for first has not landed yet
        ((0, 0, 0, 0), 3, 2),  # no forward has asked: the newest
        ((9, 8, 7, 1), 0, 0),  # nothing is there: the next to land
    ],
)
def test_which_update_is_next(turns: tuple[int, ...], ready: int, taken: int) -> None:
    due = [_Due(turn, at < ready) for at, turn in enumerate(turns)]
    assert next_of(cast(list[HostUpdate], due)) == taken


def test_weights_that_lie_together_are_one_copy() -> None:
    memory, other = torch.arange(64.0), torch.arange(16.0)
    targets = [memory[0:16], memory[16:32], memory[32:40], memory[48:64], other, other[:0]]
    spans = [(0, 16), (16, 16), (32, 8), (48, 16), (64, 16), (80, 0)]  # eight elements of padding behind 40
    strips = joined(targets, spans)
    assert [(strip.start, strip.stop) for strip in strips] == [(0, 40), (48, 64), (64, 80)]
    assert torch.equal(strips[0].target, memory[:40])
    assert strips[0].target.data_ptr() == memory.data_ptr()
    assert [(s.start, s.stop) for s in joined(targets[1:3], spans[1:3])] == [(16, 40)]
    assert len(joined([memory[0:16], memory[32:48]], [(0, 16), (16, 16)])) == 2


@pytest.mark.parametrize("master", ["plain", "split"])
def test_a_block_s_weights_come_back_in_one_copy(master: Any) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    run = zs.shard(
        model, optimizer, precision="bf16", clip_norm=1e9, offload=zs.Offload(optimizer="host", master=master)
    )
    parts = run._runtime.host.parts  # type: ignore[union-attr]
    assert any(len(part.strips) < len(part.params) for part in parts)
    for part in parts:
        assert sum(s.stop - s.start for s in part.strips) == sum(n for _, n in part.spans)
        some = [index % 2 == 0 for index in range(len(part.params))]
        named = [(s.start, s.stop) for s in part.strips_of(some)]
        for (at, n), used in zip(part.spans, some, strict=True):
            assert used == any(start <= at and at + n <= stop for start, stop in named)
    run.close()


def test_updates_from_before_a_save_go_first() -> None:
    """A save that copies beside training waits for them, and those from after it wait for the save."""
    due = [_Due(8, True), _Due(9, True), _Due(1, True, "a save"), _Due(0, True)]
    taken = []
    while due:
        taken.append(due.pop(next_of(cast(list[HostUpdate], due))).part.update.turn)
    assert taken == [8, 9, 0, 1]


def test_what_forward_asks_for_first_is_updated_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is held up until backward is over; what it then does is in the order of forward."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    taken, gate, board = list[str](), threading.Event(), PythonExecutor._board
    gate.set()
    asked, ask = list[str](), HostUpdates.ask

    def boards(self: PythonExecutor, job: HostUpdate) -> StagingPlace:
        gate.wait(300)
        taken.append(job.part.params[0].name)
        return board(self, job)

    def asks(self: HostUpdates, part: object) -> None:
        asked.append(part.params[0].name)  # type: ignore[attr-defined]
        ask(self, part)  # type: ignore[arg-type]

    monkeypatch.setattr(TierCopies, "native", False)  # transfer workers in C have a test of their own
    monkeypatch.setattr(PythonExecutor, "_board", boards)
    monkeypatch.setattr(HostUpdates, "ask", asks)
    run = zs.shard(model, optimizer, offload=zs.Offload(stage_bytes=2048), clip_norm=1e9)
    try:
        for step in range(4):  # the first update waits for its norm
            asked.clear()
            loss = model(batch(step, 0))
            taken.clear()
            gate.clear() if step == 3 else gate.set()
            loss.backward()
            gate.set()
            optimizer.step()
            optimizer.zero_grad()
        run._runtime.settle()
        assert run.stats().updates["early"] >= 2
        assert asked[0] == "tokens.weight"
        assert asked.index("norm.weight") < asked.index("blocks.0.norm1.weight")
        first, *rest = taken  # taken while it was alone, or on a busy machine with what had landed by then
        assert sorted(taken) == sorted(asked)
        assert rest == [name for name in asked if name != first]
    finally:
        gate.set()
        run.close()


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (1, 3), (4, 0)])
def test_forward_does_not_wait_for_updates_of_later_units(
    world: int, stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """See [Note: in turn] in `supply`."""
    if world > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    gate, began, opened, finish = threading.Event(), list[bool](), list[bool](), PythonExecutor._finish

    def held_up(self: PythonExecutor, staged: StagedUpdate) -> None:
        if staged.job.part.params[0].name.startswith("blocks.2."):
            opened.append(gate.wait(300))
        finish(self, staged)

    monkeypatch.setattr(TierCopies, "native", False)
    monkeypatch.setattr(PythonExecutor, "_finish", held_up)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    run = zs.shard(model, optimizer, stage=stage, offload=zs.Offload(), clip_norm=1e9)
    try:
        model.blocks[0].register_forward_hook(lambda *_: began.append(gate.is_set()))
        model.blocks[1].register_forward_hook(lambda *_: gate.set())
        for step in range(4):
            loss = model(batch(step, 0))
            gate.clear() if step >= 2 else gate.set()  # the first updates wait for their norm
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert run.stats().updates["early"] >= 2
        assert began == [False, True, True, False]
        assert all(opened)
    finally:
        gate.set()
        run._runtime.close()
        run._hooks.remove()
        if world > 1:
            dist.destroy_process_group()


@pytest.mark.parametrize(("stage", "sync", "waits"), [
    (0, zs.EveryStep(), False),
    (0, zs.Delayed(), True),  # forward begins the next updates: those before come first
    (1, zs.EveryStep(), True),  # peers read the rows
    (3, zs.EveryStep(), True),
])  # fmt: skip
def test_which_runs_wait_for_all_updates_before_a_forward(
    stage: Any, sync: Any, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    waited, drain = list[int](), HostUpdates.drain

    def counted(self: HostUpdates) -> None:
        waited.append(step)
        drain(self)

    monkeypatch.setattr(HostUpdates, "drain", counted)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    run = zs.shard(model, optimizer, stage=stage, offload=zs.Offload(), clip_norm=1e9, sync=sync)
    try:
        for step in range(4):
            model(batch(step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert waited == ([0, 1, 2, 3] if waits else [])
    finally:
        run._runtime.close()
        run._hooks.remove()
        dist.destroy_process_group()


@pytest.mark.parametrize(("moments", "native"), [("float32", True), ("float32", False), ("int8", False)])
def test_a_background_save_does_not_wait_for_updates_and_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moments: Any, native: bool
) -> None:
    gate, copying, fill, send = threading.Event(), threading.Event(), FileImage.fill, TransferWorkers.send

    def update(*given: Any, **more: Any) -> None:
        assert gate.wait(300)
        update_rows(*given, **more)

    def send_late(*given: Any) -> None:
        def late() -> None:
            assert gate.wait(300)
            send(*given)

        send(*given) if gate.is_set() else threading.Thread(target=late).start()

    def filled(*given: Any) -> None:
        copying.set()
        fill(*given)

    if native:
        monkeypatch.setattr(TransferWorkers, "send", send_late)
    else:
        monkeypatch.setattr(TierCopies, "native", False)
        monkeypatch.setattr(python_executor, "update_rows", update)
    monkeypatch.setattr(FileImage, "fill", filled)
    for background in (True, False):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters())
        run = zs.shard(model, optimizer, clip_norm=math.inf, offload=zs.Offload(threads=1, moments=moments))
        gate.set()
        for step in range(3):
            model(batch(step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                run._runtime.settle()
                if background:
                    gate.clear()
            if step == 1:
                saved = run.save(tmp_path / str(background), background=background)
                if isinstance(saved, PendingSave):
                    begun = [part.update.done for part in host_parts(run._runtime)]
                    assert not any(done.is_set() for done in begun)
                    assert copying.wait(300)
                    time.sleep(0.05)  # in which a copy would be made that does not wait
                    assert not saved.done
                    gate.set()
        run.close()
    assert read_manifest(tmp_path / "True").entries == read_manifest(tmp_path / "False").entries
