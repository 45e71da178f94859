"""Updates that couriers in C carry out, where nothing of a run's parts needs Python on the way: the same
service as `crew`, and no thread that wants the interpreter.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from zeroshard.errors import TierError
from zeroshard.life.guard import Reader
from zeroshard.native import Parcel, Post, Team, Workers
from zeroshard.tier import Copies, Mark, Stage
from zeroshard.tier.arena import LINE

from .crew import alive, tasks_of
from .due import Job, Staged
from .part import Done, Part
from .ways import count_of, signs_of, ways_of

_LOOK = 0.5  # seconds of waiting between two looks for failures


@dataclass(frozen=True)
class _Sent(Done):
    """An update under way. Its part keeps this until the next one, so it holds no gradient."""

    post: Post
    parcel: Parcel

    def is_set(self) -> bool:
        return self.parcel.done

    def wait(self, timeout: float) -> bool:
        return self.parcel.done or self.post.wait(self.parcel, timeout)


class Mail:
    """A post and its team; `memory` is for staging."""

    def __init__(self, memory: Tensor, copies: Copies, team: Team, post: Post) -> None:
        self.copies, self.team = copies, team
        self._memory, self._post = memory, post
        self._place: dict[int, Stage] = {}  # by size: where parcels are taken to lie
        self._under_way: list[tuple[_Sent, Job]] = []  # and with the jobs, the gradients that are read
        self._lock = threading.Lock()  # of that list: a save waits for updates in a thread of its own
        self._gate: Workers | None = None  # for those that a save still has to copy
        self._gated: list[Future[None]] = []
        self._failure: tuple[str, BaseException] | None = None
        alive.add(self)

    @classmethod
    def open(cls, memory: Tensor, copies: Copies, team: Team) -> Mail | None:
        post = Post.open(team, memory.data_ptr(), memory.numel(), copies.roads, copies.number)
        return None if post is None else cls(memory, copies, team, post)

    def submit(self, job: Job, backlog: int | None = None) -> None:
        """Make an update due; from then on `part.done` tells of it. `backlog`: while so many wait on the
        device, this one is not added."""
        self._let_go_of_done()
        if not count_of(job):
            job.done.set()
            job.part.done = job.done
            return
        part, staged = job.part, Staged(job, self._stage(job.part.stage_bytes))
        parcel = Parcel(self.team, *ways_of(staged), count_of(job), signs_of(job, self.copies))
        parcel.address(self._memory.data_ptr(), staged.stage.memory.numel(), part.turn)
        for task in tasks_of(staged, parcel):
            task()  # which only writes down what is to be done
        if job.reader is not None:
            self._wait_at_gate(backlog)
        assert part.signs is not None
        sent = _Sent(self._post, parcel)
        with self._lock:
            self._under_way.append((sent, job))
        part.ready, part.done = part.signs[1], sent
        if job.reader is None:
            self._post.send(parcel, backlog)
        else:
            assert self._gate is not None
            later = partial(self._send_later, parcel, part, job.reader, backlog)
            self._gated.append(self._gate.submit(later))

    def _wait_at_gate(self, backlog: int | None) -> None:
        """Those that a save still has to copy wait on the device, too."""
        self._gate = self._gate or Workers(1)
        self._gated = [each for each in self._gated if not each.done()]
        if backlog is not None and len(self._gated) >= backlog:
            wait(self._gated[: len(self._gated) - backlog + 1])

    def _let_go_of_done(self) -> None:
        """Gradients go with their updates. Couriers touch nothing of Python's, so they cannot tell."""
        with self._lock:
            self._under_way = [(sent, job) for sent, job in self._under_way if not sent.is_set()]

    def _stage(self, nbytes: int) -> Stage:
        """Memory at the beginning of all: couriers find other for it. See `Parcel`."""
        size = max(-(-nbytes // LINE), 1) * LINE
        if size not in self._place:
            self._place[size] = Stage(self._memory[:size])
        return self._place[size]

    def _send_later(self, parcel: Parcel, part: Part, reader: Reader, backlog: int | None) -> None:
        """[Note: saved meanwhile]: what was due before the save has been sent already."""
        try:
            reader.copied_of(part)
            self._post.send(parcel, backlog)
        except BaseException as error:  # it must reach the training thread, whatever it is
            self._failure = self._failure or (part.label, error)

    def let_go(self, part: Part, free: Mark) -> None:
        raise AssertionError(f"{part.label} holds its weights back, which is Python's to do")

    def wait_for(self, done: Done) -> None:
        """Until an update is done, or will never be."""
        while not done.wait(_LOOK):
            self.check()
        self.check()
        self._let_go_of_done()

    def check(self) -> None:
        """Raise in the training thread what failed on the way."""
        if self._failure is not None:
            label, error = self._failure
            raise TierError(f"the host update of {label} failed: {type(error).__name__}: {error}") from error
        if self._post.error:
            failed = (job.part.label for sent, job in self._under_way if sent.parcel.record.error)
            raise TierError(
                f"the host update of {next(failed, 'a part')} failed: CUDA answered a copy between device "
                f"and host with error {self._post.error}."
            )

    def close(self) -> None:
        """End the threads, after what is due."""
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
        """Nobody closed it. The couriers end before the memory goes that they use."""
        self.halt()
