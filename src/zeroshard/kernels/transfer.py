"""Has native workers copy an offload group's gradient to the host, update its state and copy weights back.

Tasks are made due from Python, and carried out without the interpreter; Python asks whether they are done.

[Note: without the interpreter] Whenever a thread of the host takes the interpreter, the thread that launches
kernels has to sleep and be woken, which costs it more than what the other does meanwhile. An update that
comes back to Python for each of its copies and waits asks for it some twenty times; a `HostRoundTrip` twice,
and a task of `TransferWorkers` not at all."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from zeroshard.errors import StateError, TierError
from zeroshard.kernels import library

from .threads import ThreadTeam


class CopySpec(NamedTuple):
    """Addresses, and how many bytes."""

    to: int
    source: int
    nbytes: int


@dataclass(frozen=True)
class CopyStreams:
    """How a GPU is reached: the runtime's functions, and a stream for each direction."""

    device: library.DeviceRecord
    leaving: int
    coming: int


@dataclass(frozen=True)
class CopyEvents:
    """Events of a trip over `copy_streams`, by their handles: `landed` is when there is something to fetch,
    `arrived` and `ready` are recorded when the copies out and back are done."""

    copy_streams: CopyStreams
    landed: int | None
    arrived: int
    ready: int


class _CopyList:
    """Copies as C reads them."""

    def __init__(self, copies: Sequence[CopySpec]) -> None:
        to, sources, sizes = zip(*copies, strict=True) if copies else ((), (), ())
        count, address = len(copies), ctypes.addressof
        self._to, self._source = ((ctypes.c_void_p * count)(*each) for each in (to, sources))
        self._bytes = (ctypes.c_int64 * count)(*sizes)
        arrays = address(self._to), address(self._source), address(self._bytes)
        self.record = library.CopyListRecord(count, *arrays)

    def begin_at(self, source: int) -> None:
        """The first copy is from elsewhere."""
        self._source[0] = source


class UpdateChunks:
    """So many `updates` of one part, and the copies around them: before the first `out` is fetched, and after
    the last `back` is sent. Without `copy_events` all of it is in the CPU's memory.

    Nothing runs here: `record` writes an update down."""

    def __init__(
        self,
        team: ThreadTeam,
        out: Sequence[CopySpec],
        back: Sequence[CopySpec],
        updates: int = 1,
        copy_events: CopyEvents | None = None,
    ) -> None:
        self._team, self._copy_events = team, copy_events
        self._out, self._back = _CopyList(out), _CopyList(back)
        self._records: list[library.StepRecord] = []
        self.update_records = (library.UpdateRecord * updates)()

    def record(self, kernel: library.UpdateKernel, record: library.StepRecord) -> library.UpdateRecord:
        at, nothing, events = len(self._records), library.CopyListRecord(), self._copy_events
        self._records.append(record)
        copies = (
            self._out.record if at == 0 else nothing,
            self._back.record if at == len(self.update_records) - 1 else nothing,
        )
        device: int | None = None
        streams: tuple[int | None, ...] = (None,) * 5
        if events is not None:
            to = events.copy_streams
            device = ctypes.addressof(to.device)
            streams = to.leaving, to.coming, events.landed, events.arrived, events.ready
        share = self._team.share_of(record.rows.count)
        run = record.address, kernel.address, share
        self.update_records[at] = library.UpdateRecord(None, *run, device, *copies, *streams)
        return self.update_records[at]


class HostRoundTrip(UpdateChunks):
    """Made by the calling thread, each update as soon as it is asked for."""

    def take(self, kernel: library.UpdateKernel, record: library.StepRecord) -> None:
        """Record it, and run it with its copies."""
        update_record = self.record(kernel, record)
        self._team.go(update_record)
        if update_record.error:
            raise TierError(f"CUDA answered a copy between device and host with error {update_record.error}")


class HostTask(UpdateChunks):
    """Made by a transfer worker. Its addresses are written down as if its staging memory began at `place`;
    the transfer worker finds `nbytes` for it elsewhere. `turn`: as which of all parts forward asks for it."""

    def take(self, kernel: library.UpdateKernel, record: library.StepRecord) -> None:
        """Record it, for the transfer worker."""
        self.record(kernel, record)

    def address(self, place: int, nbytes: int, turn: int) -> None:
        update_records = ctypes.addressof(self.update_records)
        self.task_record = library.TaskRecord(update_records, len(self.update_records), place, nbytes, turn)

    def renew(
        self,
        gradient: int,
        landed: int | None,
        numbers: Sequence[tuple[Any, ...]],
        most: float | None,
        turn: int,
    ) -> None:
        """The same updates in another step. They were carried, and nobody asks whether any more."""
        self._out.begin_at(gradient)
        for update_record, record, own in zip(self.update_records, self._records, numbers, strict=True):
            update_record.wait_for(landed)
            record.renew(own, most)
        self.task_record.again(turn)

    @property
    def done(self) -> bool:
        return bool(self.task_record.done)


class TransferWorkers:
    """Transfer workers who carry tasks to a team and back, through staging memory of so many bytes at
    `memory`."""

    def __init__(self, calls: library.TransferCalls, handle: int) -> None:
        self._calls = calls
        self._handle: int | None = handle

    @classmethod
    def open(
        cls, team: ThreadTeam, memory: int, nbytes: int, copy_streams: CopyStreams | None, number: int
    ) -> TransferWorkers | None:
        """None where the system refused the threads. `number`: of the device at the other end of
        `copy_streams`."""
        kernels = library.kernels()
        calls = kernels.post if kernels is not None else None
        if calls is None:
            return None
        device = None if copy_streams is None else ctypes.addressof(copy_streams.device)
        handle = calls.open(team.handle, device, number, memory, nbytes)
        return None if handle is None else cls(calls, handle)

    def send(self, host_task: HostTask, backlog: int | None = None) -> None:
        """Make a task due. `backlog`: while so many are, this one is not added."""
        self._calls.send(self._open(), ctypes.byref(host_task.task_record), backlog or 0)

    def wait(self, host_task: HostTask, seconds: float) -> bool:
        """Whether a task is done, within so much time, and that nothing has failed."""
        return bool(self._calls.wait(self._open(), ctypes.byref(host_task.task_record), int(1000 * seconds)))

    @property
    def error(self) -> int:
        """What CUDA answered when something failed."""
        return 0 if self._handle is None else int(self._calls.error(self._handle))

    def drop(self) -> None:
        """Forget what is due and has not been taken up."""
        if self._handle is not None:
            self._calls.drop(self._handle)

    def close(self) -> None:
        """End the transfer workers, after what is due."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._calls.close(handle)

    def forget(self) -> None:
        """The transfer workers are those of a parent, and not here."""
        self._handle = None

    def _open(self) -> int:
        if self._handle is None:
            raise StateError("Post: used after close; open a new one")
        return self._handle
