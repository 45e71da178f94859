"""Transfer workers in C: bits, order, room, errors. The device is a few functions of this file, which they
call."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kernel_values import BF16, F32, adam_state, assert_same_bits, built, contents, rough
from torch import Tensor

from zeroshard import kernels
from zeroshard.errors import StateError
from zeroshard.kernels import (
    AdamStep,
    CopyEvents,
    CopySpec,
    CopyStreams,
    HostTask,
    SgdRows,
    SgdStep,
    ThreadTeam,
    TransferWorkers,
    library,
)

pytestmark = built
STEP = AdamStep(lr=1e-2, step=9, weight_decay=0.1, grad_scale=0.5)
OTHER = AdamStep(lr=1e-2, step=9, weight_decay=0.1)
NOT_READY = 600
COUNT = 1000


class Device:
    """Events are numbers. Those in `away` have not passed; whoever waits for one is held up."""

    def __init__(self) -> None:
        self.away: set[int] = set()
        self.log: list[tuple[str, int]] = []
        self.fails: dict[str, int] = {}
        self._changed = threading.Condition()
        pointer, number = ctypes.c_void_p, ctypes.c_int
        kinds = {
            "copy": (self._copy, pointer, pointer, ctypes.c_size_t, number, pointer),
            "record": (lambda event, stream: 0, pointer, pointer),
            "follow": (self._follow, pointer, pointer, ctypes.c_uint),
            "wait": (self._wait, pointer),
            "query": (lambda event: NOT_READY if event in self.away else 0, pointer),
            "use": (lambda number: self._note("use", number), number),
        }
        self._kept: dict[str, Any] = {}
        for name, (function, *arguments) in kinds.items():
            self._kept[name] = ctypes.CFUNCTYPE(number, *arguments)(function)
        addresses = {name: ctypes.cast(f, ctypes.c_void_p).value for name, f in self._kept.items()}
        self.copy_streams = CopyStreams(library.DeviceRecord(**addresses), leaving=1, coming=2)

    def _note(self, what: str, which: int) -> int:
        self.log.append((what, which))
        return self.fails.get(what, 0)

    def _copy(self, to: int, source: int, nbytes: int, kind: int, stream: int) -> int:
        assert kind == 4
        ctypes.memmove(to, source, nbytes)
        return self._note("copy", stream)

    def _follow(self, stream: int, event: int, flags: int) -> int:
        return self._note("follow", event)

    def _wait(self, event: int) -> int:
        with self._changed:
            self._changed.wait_for(lambda: event not in self.away, 30)
        return self._note("wait", event)

    def passes(self, *events: int) -> None:
        with self._changed:
            self.away -= set(events)
            self._changed.notify_all()

    def order(self) -> list[int]:
        """Landed events, as their tasks were carried."""
        return [event for what, event in self.log if what == "follow"]


class Served:
    """A post with staging memory for so many tasks of `COUNT` bf16 elements."""

    def __init__(self, device: Device | None, room: int) -> None:
        self.team = team = ThreadTeam.open(2)
        assert team is not None
        self.nbytes = -(-2 * COUNT // 64) * 64
        self.memory = torch.zeros(room * self.nbytes, dtype=torch.uint8)
        copy_streams = None if device is None else device.copy_streams
        post = TransferWorkers.open(team, self.memory.data_ptr(), self.memory.numel(), copy_streams, 3)
        assert post is not None
        self.post, self.device, self.made = post, device, list[Any]()

    def host_task(self, seed: int, landed: int = 0, turn: int = 0) -> HostTask:
        """An update whose events are `landed` and the two numbers behind it."""
        assert self.team is not None
        state, weight = adam_state(COUNT, seed, False, {})
        assert weight is not None
        grad, place = rough(COUNT, seed).to(BF16), self.memory[: 2 * COUNT].view(BF16)
        copy_events = (
            None
            if self.device is None
            else CopyEvents(self.device.copy_streams, landed, landed + 1, landed + 2)
        )
        out = [CopySpec(place.data_ptr(), grad.data_ptr(), 2 * COUNT)]
        back = [CopySpec(weight.data_ptr(), place.data_ptr(), 2 * COUNT)]
        host_task = HostTask(self.team, out, back, 1, copy_events)
        host_task.address(self.memory.data_ptr(), self.nbytes, turn)
        kernels.update_rows(state, place, place, STEP, team=host_task)
        self.made.append((host_task, state, grad, weight, seed))
        return host_task

    def check(self) -> None:
        """Every update has the bits of a plain one."""
        for host_task, state, grad, weight, seed in self.made:
            assert host_task.done
            same, alike = adam_state(COUNT, seed, False, {})
            kernels.update_rows(same, grad, alike, STEP)
            for found, wanted in zip([*contents(state), weight], [*contents(same), alike], strict=True):
                assert_same_bits(found, wanted)


@contextlib.contextmanager
def served(device: Device | None, room: int) -> Iterator[Served]:
    found = Served(device, room)
    try:
        yield found
    finally:
        if device is not None:
            device.passes(*device.away)
        found.post.close()
        assert found.team is not None
        found.team.close()


def until(met: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not met():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_many_host_tasks_through_little_memory_have_the_bits_of_plain_updates() -> None:
    for device in (None, Device()):
        with served(device, 2) as office:
            host_tasks = [office.host_task(seed, 10 * seed + 10, turn=seed % 5) for seed in range(40)]
            for host_task in host_tasks:
                office.post.send(host_task)
            assert all(office.post.wait(host_task, 120) for host_task in host_tasks)
            office.check()
            assert office.post.error == 0
        if device is not None:
            assert device.log.count(("use", 3)) == 4, "each courier, once"


def test_what_forward_asks_for_first_is_carried_first() -> None:
    device = Device()
    device.away = {11, 60, 70}  # the first is held up on its way; two have not landed
    with served(device, 1) as office:
        first, second = office.host_task(1, 10), office.host_task(2, 20)
        office.post.send(first)
        until(lambda: device.order() == [10])
        office.post.send(second)  # taken up, and waits for the memory of the first
        time.sleep(0.05)
        rest = {30: 9, 40: 2, 50: 2, 60: 0, 70: 1}  # by landed event: the turn
        for landed, turn in rest.items():
            office.post.send(office.host_task(landed, landed, turn))
        device.passes(11)
        for host_task, *_ in office.made:
            assert office.post.wait(host_task, 120)
        # Of two that are asked for together the newer; of those that have not landed the older.
        assert device.order() == [10, 20, 50, 40, 30, 60, 70]
        office.check()


def test_staging_memory_is_not_given_on_before_it_has_been_read() -> None:
    device = Device()
    device.away = {12}  # weights of the first are on their way back
    with served(device, 1) as office:
        first, second = office.host_task(1, 10), office.host_task(2, 20)
        office.post.send(first)
        until(lambda: device.order() == [10])
        office.post.send(second)
        assert office.post.wait(first, 120), "it is done: whoever uses the weights waits on the device"
        assert not office.post.wait(second, 0.1)
        assert device.order() == [10]
        device.passes(12)
        assert office.post.wait(second, 120)
        office.check()


def test_a_sender_waits_while_too_many_are_due() -> None:
    device = Device()
    device.away = {11}
    with served(device, 1) as office:
        office.post.send(office.host_task(10, 10))
        until(lambda: device.order() == [10])
        for landed in (20, 30, 40):  # one is carried, one taken up, two are due
            office.post.send(office.host_task(landed, landed), backlog=2)
        late = threading.Thread(target=office.post.send, args=(office.host_task(50, 50), 2))
        late.start()
        late.join(0.1)
        assert late.is_alive()
        device.passes(11)
        late.join(120)
        assert not late.is_alive()
        for host_task, *_ in office.made:
            assert office.post.wait(host_task, 120)
        office.check()


@pytest.mark.parametrize("what", ["copy", "follow", "wait"])
def test_an_error_of_the_device_ends_the_service(what: str) -> None:
    device = Device()
    with served(device, 2) as office:
        good = office.host_task(1, 10)
        office.post.send(good)
        assert office.post.wait(good, 120)
        until(lambda: ("wait", 12) in device.log)
        device.fails[what] = 719
        host_tasks = [office.host_task(seed, 10 * seed) for seed in range(2, 9)]
        for host_task in host_tasks:
            office.post.send(host_task, backlog=2)
        until(lambda: office.post.error == 719)
        answers = list[bool]()
        late = threading.Thread(target=lambda: answers.append(office.post.wait(host_tasks[-1], 1e6)))
        late.start()
        late.join(120)
        assert answers == [False]
        assert sum(host_task.task_record.error == 719 for host_task in host_tasks) in range(1, 5)


def test_several_updates_of_one_part_travel_together() -> None:
    """A split master, whose weights come along; then SGD, in two ranges; one that is taken back, too."""
    team = ThreadTeam.open(2)
    assert team is not None
    memory = torch.zeros(2 * 4096, dtype=torch.uint8)
    post = TransferWorkers.open(team, memory.data_ptr(), memory.numel(), None, 0)
    assert post is not None
    try:
        grad = rough(COUNT, 5).to(BF16)
        here, there = memory[: 2 * COUNT].view(BF16), memory[2 * COUNT : 4 * COUNT].view(BF16)
        (state, weight), (same, alike) = (adam_state(COUNT, 3, False, {"master": "split"}) for _ in range(2))
        assert weight is not None
        out = [
            CopySpec(here.data_ptr(), grad.data_ptr(), 2 * COUNT),
            CopySpec(there.data_ptr(), weight.data_ptr(), 2 * COUNT),
        ]
        host_task = HostTask(team, out, [CopySpec(weight.data_ptr(), there.data_ptr(), 2 * COUNT)])
        host_task.address(memory.data_ptr(), 4096, 0)
        kernels.update_rows(state, here, there, STEP, taken=OTHER, team=host_task)
        kernels.update_rows(same, grad, alike, STEP, taken=OTHER)
        post.send(host_task)
        assert post.wait(host_task, 120)
        for found, wanted in zip([*contents(state), weight], [*contents(same), alike], strict=True):
            assert_same_bits(found, wanted)

        def rows() -> tuple[SgdRows, Tensor]:
            return SgdRows(rough(COUNT, 1), momentum=rough(COUNT, 2)), torch.zeros(COUNT, dtype=F32)

        (state, weight), (same, alike) = rows(), rows()
        grad, place = rough(COUNT, 7), memory[: 4 * COUNT].view(F32)
        step = SgdStep(lr=0.1, momentum=0.9, weight_decay=0.1)
        cut = 300
        host_task = HostTask(
            team,
            [CopySpec(place.data_ptr(), grad.data_ptr(), 4 * COUNT)],
            [CopySpec(weight.data_ptr(), place.data_ptr(), 4 * COUNT)],
            updates=2,
        )
        host_task.address(memory.data_ptr(), 4096, 0)
        for start, stop in ((0, cut), (cut, COUNT)):
            some = place[start:stop]
            kernels.update_rows(state.rows(start, stop), some, some, step, team=host_task)
        kernels.update_rows(same, grad, alike, step)
        post.send(host_task)
        assert post.wait(host_task, 120)
        for found, wanted in zip([*contents(state), weight], [*contents(same), alike], strict=True):
            assert_same_bits(found, wanted)
    finally:
        post.close()
        post.close()
        team.close()
    with pytest.raises(StateError, match="Post: used after close"):
        post.send(host_task)
