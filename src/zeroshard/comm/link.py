"""Messages between ranks on any hosts: gloo's sends and receives, with waits that end when a peer has failed.

A wait inside gloo cannot be interrupted from Python, and a rank that waits there sees nothing else. So a
guard thread looks up every half second. If a peer has failed, or the ranks wait for different things, it
passes the reason on and breaks the connections, which wakes the waiting rank up.

A failing rank tells its peers why over these connections: every rank keeps a receive open for a note from
each peer. The store would not do for this, because it usually ends with rank 0.

[Note: the post] Gloo writes what it can in the call that sends it, and makes a caller wait while it reads
what comes in on the same connection: a step of 27 M parameters lost a tenth of its time in such calls, most
of it without working. So a thread of its own makes them for bulk traffic, in order. Letters, which someone
waits for, are sent by the caller; no lane has both.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, cast

import torch
from torch._C._distributed_c10d import ProcessGroupGloo

from zeroshard.errors import RankError

from . import failure
from .crossed import Started, named, started
from .rendezvous import Rendezvous
from .watch import LONG, Watch, look_after, part_from
from .whereabouts import Whereabouts

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch._C._distributed_c10d import Work as GlooWork

__all__ = ["Job", "Link", "Messages"]

_BREAK_TAG = 0
_NOTE_TAG = 1
_FIRST_TAG = 16
_NOTE = 4096
_LOOK = 0.5
# How long a rank that lost a connection waits for the note that says why.
_GRACE = 1.0

LETTERS = "mail"  # the lane of what the caller sends itself; see [Note: the post]

Messages = Sequence[tuple[int, torch.Tensor]]


@dataclass(eq=False)
class Job:
    """The sends or the receives of one operation, by peer. Its tensors are busy until it is done.

    `posted`: gloo has been asked for all of them, or has `refused` one.
    """

    label: str
    lane: str
    turn: int
    works: list[tuple[int, GlooWork]] = field(default_factory=list)
    posted: threading.Event = field(default_factory=threading.Event)
    refused: tuple[int, RuntimeError] | None = None
    done: bool = False

    def post(self, call: Callable[..., GlooWork], messages: Messages, tag: int) -> None:
        """Ask gloo for its messages."""
        try:
            for peer, tensor in messages:
                self.works.append((peer, call([tensor], peer, tag)))
        except RuntimeError as error:
            self.refused = peer, error
        finally:
            self.posted.set()


class Link:
    """Connections to all peers. A lane is a sequence of operations that all ranks start in the same order."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: float,
        watch: Watch | None = None,
        names: Sequence[int] | None = None,
    ) -> None:
        self.rank = rank
        self.timeout = timeout
        called = range(size) if names is None else names
        self._me = f"rank {called[rank]}"
        told = Rendezvous(store, rank, size, timeout).share("who", [os.getpid(), socket.gethostname()])
        people = zip(called, cast("list[tuple[int, str]]", told), strict=True)
        self._who = [f"rank {r} (pid {pid} on {host})" for r, (pid, host) in people]
        # Far beyond our own timeout: gloo's would break the connection without a word about the cause.
        gloo: Any = ProcessGroupGloo(store, rank, size, timedelta(seconds=10 * timeout + 3600))
        self._gloo = gloo
        self._watch = watch if watch is not None else Watch(store, rank, size)
        self._number = self._watch.join()
        self._whereabouts = Whereabouts()
        self._tags: dict[str, int] = {}
        self._post: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        post = threading.Thread(target=_deliver, args=(self._post,), name="zeroshard post", daemon=True)
        post.start()
        weakref.finalize(self, self._post.put, None)
        self._waiting: tuple[Job, float] | None = None
        self._place: tuple[Job | None, str] = (None, "")  # of the program, in the last long wait
        self._verdict: str | None = None
        self._overdue: Callable[[], str | None] = lambda: None
        self._give_up: Callable[[str], None] = lambda trouble: None
        self._probe = torch.zeros(1, dtype=torch.uint8)
        self._probes: list[GlooWork] = []
        self._probed = 0.0
        self._reported = False
        self._closed = threading.Event()
        peers = [peer for peer in range(size) if peer != rank]
        self._notes = {peer: torch.zeros(_NOTE, dtype=torch.uint8) for peer in peers}
        # Kept, though nobody waits for them: gloo forgets a receive when its work is let go of.
        self._note_works = [gloo.recv([note], peer, _NOTE_TAG) for peer, note in self._notes.items()]
        self._threads = [look_after(self, self._closed, _LOOK), post]

    def tag(self, lane: str, number: int) -> None:
        """Give a lane its tag: the same number on every rank, and no other lane's."""
        self._tags[lane] = _FIRST_TAG + number

    def start(self, label: str, lane: str, receives: Messages, sends: Messages) -> tuple[Job, Job]:
        """Start one turn of a lane: its receives and its sends."""
        tag, name = self._tags[lane], f"{self._number} {lane}"
        turn = self._watch.started[name] = self._watch.started.get(name, 0) + 1
        got, sent = Job(label, name, turn), Job(label, name, turn)
        for job, call, messages in ((got, self._gloo.recv, receives), (sent, self._gloo.send, sends)):
            if lane == LETTERS:
                job.post(call, messages, tag)
            else:
                self._post.put(partial(job.post, call, messages, tag))
        return got, sent

    def wait(self, job: Job) -> None:
        """Block until the job is done. Raises RankError if it cannot come about."""
        if job.done:
            return
        self._waiting = (job, time.monotonic())
        try:
            job.posted.wait()
            if job.refused is not None:
                self._fail(job.label, *job.refused)
            for peer, work in job.works:
                self._wait_one(job, peer, work)
        finally:
            self._waiting = None
        job.done = True
        job.works.clear()

    def _wait_one(self, job: Job, peer: int, work: GlooWork) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            self._fail(job.label, peer, error)

    def note(self) -> str | None:
        """Why a peer failed, if one has said so."""
        for note in self._notes.values():
            length = int(note[0]) + 256 * int(note[1])
            if length:
                return bytes(note[2 : 2 + length].tolist()).decode(errors="replace")
        return None

    def guard(self, overdue: Callable[[], str | None], give_up: Callable[[str], None]) -> None:
        """Watch waits of another kind too: `overdue` says what they are for, `give_up` ends them."""
        self._overdue, self._give_up = overdue, give_up

    def look(self) -> None:
        """What the guard does: end a wait that cannot come about."""
        waiting = self._waiting
        if waiting is None:
            self._look_elsewhere()
            return
        job, since = waiting
        waited = time.monotonic() - since
        trouble = self.note()
        if trouble is None and waited > LONG:
            trouble = self._watched(self._placed(job))
        if trouble is None and waited > self.timeout:
            trouble = f"{self._me} waited {waited:.0f} s for {job.label} and got no answer in that time"
        if trouble is not None and self._waiting is waiting:
            self._verdict = trouble
            self.report(trouble)
            self._break()

    def _placed(self, job: Job) -> Job:
        """With where the program is; looked up once for each wait, which takes a while."""
        if self._place[0] is not job:
            self._place = job, self._whereabouts.caller()
        return Job(job.label + self._place[1], job.lane, job.turn)

    def _look_elsewhere(self) -> None:
        label = self._overdue()
        if label is None:
            self._look_into_torch(self._whereabouts.collective(LONG))
            return
        trouble = self._lost(label) or self._watched(Job(label, "", 0))
        if trouble is not None:
            self.report(trouble)
            self._give_up(trouble)

    def _look_into_torch(self, label: str | None) -> None:
        """Peers that wait for this rank end the run: here, torch notices that they are gone. Where all are
        inside torch, nobody else does."""
        told = {} if label is None else started()
        trouble = self._watched(None if label is None else Job(named(label, told), "", 0), told)
        if trouble is not None and self._watch.all_foreign:
            self.report(trouble)
            failure.give_up(self.rank, trouble)

    def _watched(self, job: Job | None, told: Started | None = None) -> str | None:
        try:
            if job is None:
                self._watch.over(self)
                return None
            return self._watch.waiting(self, job.label, job.lane, job.turn, told)
        except RuntimeError:
            # The store has gone with its rank. Then so has the connection to it, which gloo notices.
            return None

    def _break(self) -> None:
        """Close the connections. Gloo does it to one on which a wait has timed out."""
        for peer in self._notes:
            try:
                self._gloo.recv([torch.zeros(1)], peer, _BREAK_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError:
                continue

    def _lost(self, label: str) -> str | None:
        """Why a peer failed, or that a connection has gone: for waits that gloo knows nothing of."""
        told = self.note()
        now = time.monotonic()
        if told is not None or now - self._probed < LONG:
            return told
        self._probed = now
        for peer in self._notes:
            try:
                # Nobody receives it. Gloo raises here if the connection is closed.
                self._probes.append(self._gloo.send([self._probe], peer, _BREAK_TAG))
            except RuntimeError as error:
                return self._blame(label, peer, str(error))
        return None

    def _blame(self, label: str, peer: int, error: str) -> str:
        deadline = time.monotonic() + _GRACE
        while time.monotonic() < deadline:
            told = self._verdict or self.note()
            if told is not None:
                return told
            time.sleep(0.01)
        if "closed" in error or "reset" in error:
            return f"{self._who[peer]} ended or was killed while {self._me} waited for {label}"
        reason = error.splitlines()[0]
        return f"the connection of {self._me} to {self._who[peer]} failed in {label}: {reason}"

    def _fail(self, label: str, peer: int, error: RuntimeError) -> None:
        text = self._blame(label, peer, str(error))
        self.report(text)
        raise RankError(text) from error

    def report(self, text: str) -> None:
        """Tell every peer that this rank failed and why. The first note stays."""
        if self._reported or self._closed.is_set():
            return
        self._reported = True
        data = text.encode()[: _NOTE - 2]
        note = torch.zeros(_NOTE, dtype=torch.uint8)
        note[: 2 + len(data)] = torch.tensor([len(data) % 256, len(data) // 256, *data], dtype=torch.uint8)
        threads = [
            threading.Thread(target=self._tell, args=(peer, note), daemon=True) for peer in self._notes
        ]
        self._threads += threads
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + _GRACE
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _tell(self, peer: int, note: torch.Tensor) -> None:
        try:
            self._gloo.send([note], peer, _NOTE_TAG).wait(timedelta(seconds=_GRACE))
        except RuntimeError:
            return

    def flush(self, jobs: Iterable[Job], seconds: float) -> None:
        """Wait for sends that nobody here waits for: gloo keeps a message back until its receiver asks, and
        forgets it with its job. Not where a rank has failed, and not for ever."""
        end = time.monotonic() + seconds
        if self._reported or self.note() is not None:
            return
        try:
            for job in jobs:
                if not job.posted.wait(max(end - time.monotonic(), 0.0)):
                    return
                for _, work in job.works:
                    work.wait(timedelta(seconds=max(end - time.monotonic(), 0.001)))
        except RuntimeError:
            return  # the peer is gone, and wants nothing any more

    def close(self) -> None:
        """Let go of the connections, and of the threads that use them: [Note: threads inside torch]."""
        self._closed.set()
        self._post.put(None)
        part_from(self._threads)


def _deliver(post: SimpleQueue[Callable[[], None] | None]) -> None:
    while (item := post.get()) is not None:
        item()
        del item  # or the connections would live as long as this thread
