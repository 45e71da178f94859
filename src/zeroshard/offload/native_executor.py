"""Carries host updates out by native workers.

Updates that transfer workers in C carry out, where nothing of a run's parts needs Python on the way: the same
service as `executor`, and no thread that wants the interpreter.

[Note: written once] From step to step the updates of a part differ in the gradient's address, the event of
its landing and the numbers of the step. So what C reads is written down once, with all checks, and sent
again with those changed. An update of other elements, or one that takes another back, is written down anew.
One part has one update under way at a time, which `HostUpdates` sees to."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from zeroshard.errors import TierError
from zeroshard.kernels import HostTask, ThreadTeam, TransferWorkers, Workers
from zeroshard.params.sharded_param import BackgroundReader
from zeroshard.tiers import CopyMark, StagingPlace, TierCopies
from zeroshard.tiers.staging import LINE

from .group import OffloadGroup, UpdateDone
from .python_executor import alive, tasks_of
from .work import HostUpdate, StagedUpdate, UpdateExecutor, copy_events_of, count_of, ways_of

_LOOK = 0.5  # seconds of waiting between two looks for failures


class _SentUpdate(UpdateDone):
    """An update under way. Its part keeps this until the next one, so it holds no gradient."""

    def __init__(self, post: TransferWorkers, host_task: HostTask) -> None:
        self.post, self.host_task = post, host_task
        self._over = False

    def is_set(self) -> bool:
        return self._over or self.host_task.done

    def wait(self, timeout: float) -> bool:
        return self.is_set() or self.post.wait(self.host_task, timeout)

    def end(self) -> None:
        """It is done, and its task is about to be sent again, for another update."""
        self._over = True


@dataclass
class _WrittenTask:
    """A task as it was written down: for updates of these elements, with or without a bound. Sent again with
    the numbers of each step; see [Note: written once]."""

    host_task: HostTask
    ranges: list[tuple[int, int]]
    bounded: bool
    sent: _SentUpdate | None = None

    def fits(self, job: HostUpdate) -> bool:
        return (
            job.taken is None
            and job.ranges is not None
            and self.bounded == (job.bound is not None)
            and self.ranges == [(run.start, run.stop) for run in job.ranges]
        )

    def renew(self, job: HostUpdate, sent: _SentUpdate) -> None:
        """Write down what is new of an update like the one before, which is done."""
        if self.sent is not None:
            assert job.ranges is not None
            self.sent.end()
            numbers = [run.step.numbers() for run in job.ranges if run.start < run.stop]
            most = None if job.bound is None else job.bound.most
            source, landed, turn = job.flat.data_ptr(), job.landed.handle, job.part.update.turn
            self.host_task.renew(source, landed, numbers, most, turn)
        self.sent = sent


class NativeExecutor(UpdateExecutor):
    """A post and its team; `memory` is for staging."""

    def __init__(self, memory: Tensor, copies: TierCopies, team: ThreadTeam, post: TransferWorkers) -> None:
        self.copies, self.team = copies, team
        self._memory, self._post = memory, post
        self._place: dict[int, StagingPlace] = {}  # by size: where tasks are taken to lie
        self._written: dict[int, _WrittenTask] = {}  # by id(part)
        self._under_way: list[
            tuple[_SentUpdate, HostUpdate]
        ] = []  # and with the jobs, the gradients that are read
        self._lock = threading.Lock()  # of that list: a save waits for updates in a thread of its own
        self._gate: Workers | None = None  # for those that a save still has to copy
        self._gated: list[Future[None]] = []
        self._failure: tuple[str, BaseException] | None = None
        alive.add(self)

    @classmethod
    def open(cls, memory: Tensor, copies: TierCopies, team: ThreadTeam) -> NativeExecutor | None:
        post = TransferWorkers.open(
            team, memory.data_ptr(), memory.numel(), copies.copy_streams, copies.number
        )
        return None if post is None else cls(memory, copies, team, post)

    def submit(self, job: HostUpdate, backlog: int | None = None) -> None:
        self._let_go_of_done()
        part, written = job.part, self._written.get(id(job.part))
        if written is None or not written.fits(job):
            written = self._write(job)
        if written is None:
            job.done.set()
            part.update.send(job.done)
            return
        if job.reader is not None:
            self._wait_at_gate(backlog)
        assert part.copy_events is not None
        host_task = written.host_task
        sent = _SentUpdate(self._post, host_task)
        written.renew(job, sent)
        with self._lock:
            self._under_way.append((sent, job))
        part.update.send(sent, part.copy_events[1])
        if job.reader is None:
            self._post.send(host_task, backlog)
        else:
            assert self._gate is not None
            later = partial(self._send_later, host_task, part, job.reader, backlog)
            self._gated.append(self._gate.submit(later))

    def _write(self, job: HostUpdate) -> _WrittenTask | None:
        """The updates of a part and the copies around them, as C reads them; None where there are none. What
        most steps ask for is kept."""
        if not count_of(job):
            return None
        part, staged = job.part, StagedUpdate(job, self._stage(job.part.stage_bytes))
        host_task = HostTask(self.team, *ways_of(staged), count_of(job), copy_events_of(job, self.copies))
        host_task.address(self._memory.data_ptr(), staged.stage.memory.numel(), part.update.turn)
        for task in tasks_of(staged, host_task):
            task()  # which only writes down what is to be done
        ranges = [(run.start, run.stop) for run, _, _ in job.steps()]
        written = _WrittenTask(host_task, ranges, job.bound is not None)
        if job.taken is None:
            self._written[id(part)] = written
        return written

    def _wait_at_gate(self, backlog: int | None) -> None:
        """Those that a save still has to copy wait on the device, too."""
        self._gate = self._gate or Workers(1)
        self._gated = [each for each in self._gated if not each.done()]
        if backlog is not None and len(self._gated) >= backlog:
            wait(self._gated[: len(self._gated) - backlog + 1])

    def _let_go_of_done(self) -> None:
        """Gradients go with their updates. Transfer workers touch nothing of Python's, so they cannot
        tell."""
        with self._lock:
            self._under_way = [(sent, job) for sent, job in self._under_way if not sent.is_set()]

    def _stage(self, nbytes: int) -> StagingPlace:
        """Memory at the beginning of all: transfer workers find other for it. See `Parcel`."""
        size = max(-(-nbytes // LINE), 1) * LINE
        if size not in self._place:
            self._place[size] = StagingPlace(self._memory[:size])
        return self._place[size]

    def _send_later(
        self, host_task: HostTask, part: OffloadGroup, reader: BackgroundReader, backlog: int | None
    ) -> None:
        """[Note: saved meanwhile]: what was due before the save has been sent already."""
        try:
            reader.copied_of(part)
            self._post.send(host_task, backlog)
        except BaseException as error:  # it must reach the training thread, whatever it is
            self._failure = self._failure or (part.label, error)

    def let_go(self, part: OffloadGroup, free: CopyMark) -> None:
        raise AssertionError(f"{part.label} holds its weights back, which is Python's to do")

    def wait_for(self, done: UpdateDone) -> None:
        while not done.wait(_LOOK):
            self.check()
        self.check()
        self._let_go_of_done()

    def check(self) -> None:
        if self._failure is not None:
            label, error = self._failure
            raise TierError(f"the host update of {label} failed: {type(error).__name__}: {error}") from error
        if self._post.error:
            failed = (job.part.label for sent, job in self._under_way if sent.host_task.task_record.error)
            raise TierError(
                f"the host update of {next(failed, 'a part')} failed: CUDA answered a copy between device "
                f"and host with error {self._post.error}."
            )

    def close(self) -> None:
        if self._gate is not None:
            self._gate.close()
        self._post.close()
        self.team.close()
        self._under_way.clear()

    def halt(self) -> None:
        """The interpreter ends: drop what is due, and leave no thread behind."""
        if self._gate is not None:
            self._gate.halt()
        self._post.drop()
        self._post.close()
        self.team.close()

    def forget(self) -> None:
        """This process is a child of the one that has the threads."""
        self._lock, self._gate = threading.Lock(), None
        self._post.forget()
        self.team.forget()

    def __del__(self) -> None:
        """Nobody closed it. The transfer workers end before the memory goes that they use."""
        self.halt()
