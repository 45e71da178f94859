"""Sends messages between ranks on any hosts, over gloo, with waits that end when a peer has failed.

A small message is a head of one size, with a label, the length of what is told, and as much of that as fits.
The rest follows.

A wait inside gloo cannot be interrupted from Python, and a rank that waits there sees nothing else. So a
guard thread looks up every half second. If a peer has failed, or the ranks wait for different things, it
passes the reason on and breaks the connections, which wakes the waiting rank up.

A failing rank tells its peers why over these connections: every rank keeps a receive open for a note from
each peer. The store would not do for this, because it usually ends with rank 0.

[Note: the sending thread] Gloo writes what it can in the call that sends it, and makes a caller wait while it
reads what comes in on the same connection: a step of 27 M parameters lost a tenth of its time in such calls,
most of it without working. So a thread of its own makes them for bulk traffic, in order. Small messages,
which someone waits for, are sent by the caller; no lane has both."""

from __future__ import annotations

import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, cast

import torch
from torch._C._distributed_c10d import ProcessGroupGloo

from zeroshard.errors import RankError

from .address import settle
from .diagnosis import exits
from .diagnosis.stacks import StackProbe, Started, named, started
from .diagnosis.waits import LONG, Aside, StoreWatch, look_after, part_from
from .rendezvous import Rendezvous
from .stuck import OTHERS, Person, Usual, in_vain, read, say, show_and_end, wake, why_blamed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch._C._distributed_c10d import Work as GlooWork


LETTER = 1024  # bytes of a head
_LABEL = 400
_LENGTHS = struct.Struct("qq")


def head_of(label: str, payload: bytes) -> bytes:
    """What a letter begins with."""
    name = _name(label)
    head = _LENGTHS.pack(len(name), len(payload)) + name + payload[: room_beside(label)]
    return head.ljust(LETTER, b"\0")


def room_beside(label: str) -> int:
    """How many bytes of the payload the head has room for."""
    return LETTER - _LENGTHS.size - len(_name(label))


def opened(head: bytes) -> tuple[str, int, bytes]:
    """A letter's label, the length of its payload, and what of that came with the head."""
    length, total = _LENGTHS.unpack_from(head)
    body = head[_LENGTHS.size :]
    return body[:length].decode(errors="replace"), total, body[length:][:total]


def _name(label: str) -> bytes:
    return label.encode()[:_LABEL]


_BREAK_TAG = 0
_NOTE_TAG = 1
_FIRST_TAG = 16
_NOTE = 4096
_LOOK = 0.5
# How long a rank that lost a connection waits for the note that says why.
_GRACE = 1.0

LETTERS = "mail"  # the lane of what the caller sends itself; see [Note: the sending thread]

Messages = Sequence[tuple[int, torch.Tensor]]


@dataclass(eq=False)
class MessageSet:
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

    def end(self) -> None:
        """All of them have come or gone."""
        self.done = True
        self.works.clear()


@dataclass(frozen=True)
class PeerNames:
    """Who is at the other ends. `names`: what messages call the ranks; `people`: their processes."""

    rank: int
    names: Sequence[int]
    people: list[Person]

    @property
    def here(self) -> int:
        return self.names[self.rank]

    @property
    def me(self) -> str:
        return f"rank {self.here}"


class FailureNotes:
    """The notes by which ranks tell their peers why they failed, and the connections that show it."""

    def __init__(self, gloo: Any, peers: Sequence[int]) -> None:
        self._gloo = gloo
        self._notes = {peer: torch.zeros(_NOTE, dtype=torch.uint8) for peer in peers}
        # Kept, though nobody waits for them: gloo forgets a receive when its work is let go of.
        self._receives = [gloo.recv([note], peer, _NOTE_TAG) for peer, note in self._notes.items()]
        self._probe = torch.zeros(1, dtype=torch.uint8)
        self._probes: list[GlooWork] = []
        self._probed = 0.0
        self.closed = threading.Event()
        self.reported = False
        self.threads: list[threading.Thread] = []

    def first(self) -> str | None:
        """Why a peer failed, if one has said so."""
        return next((read(told)[0] for told in self.told()), None)

    def told(self) -> Iterator[str]:
        """The notes of the peers that failed."""
        for note in self._notes.values():
            length = int(note[0]) + 256 * int(note[1])
            if length:
                yield bytes(note[2 : 2 + length].tolist()).decode(errors="replace")

    def report(self, text: str) -> None:
        """Tell every peer that this rank failed and why. The first note stays."""
        if self.reported or self.closed.is_set():
            return
        self.reported = True
        data = text.encode()[: _NOTE - 2]
        note = torch.zeros(_NOTE, dtype=torch.uint8)
        note[: 2 + len(data)] = torch.tensor([len(data) % 256, len(data) // 256, *data], dtype=torch.uint8)
        threads = [
            threading.Thread(target=self._tell, args=(peer, note), daemon=True) for peer in self._notes
        ]
        self.threads += threads
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

    def lost(self) -> tuple[int, str] | None:
        """A connection that has gone, and what gloo says of it; looked for now and then."""
        now = time.monotonic()
        if now - self._probed < LONG:
            return None
        self._probed = now
        for peer in self._notes:
            try:
                # Nobody receives it. Gloo raises here if the connection is closed.
                self._probes.append(self._gloo.send([self._probe], peer, _BREAK_TAG))
            except RuntimeError as error:
                return peer, str(error)
        return None

    def break_connections(self) -> None:
        """Close the connections. Gloo does it to one on which a wait has timed out."""
        for peer in self._notes:
            try:
                self._gloo.recv([torch.zeros(1)], peer, _BREAK_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError:
                continue


class CurrentWait:
    """What the caller of a link waits for: an operation, since when, and of whom."""

    def __init__(self) -> None:
        self.job: tuple[MessageSet, float] | None = None
        self.peer: int | None = None

    def begin(self, job: MessageSet) -> None:
        self.job = job, time.monotonic()

    def turn_to(self, peer: int) -> None:
        self.peer = peer

    def end(self) -> None:
        self.job = None


class LinkGuard:
    """Ends waits that cannot come about: those of a link, and of another transport between the same ranks.
    It looks from a thread of its own."""

    def __init__(
        self, peers: PeerNames, timeout: float, watch: StoreWatch, notes: FailureNotes, wait: CurrentWait
    ) -> None:
        self._peers, self._timeout, self._watch, self._notes, self._wait = peers, timeout, watch, notes, wait
        self.usual = Usual()
        self._stacks = StackProbe()
        self._aside = Aside()
        self._said: object = None  # the wait that was spoken of
        self._place: tuple[MessageSet | None, str] = (None, "")  # of the program, in the last long wait
        self._verdict: str | None = None
        self._away: Callable[[], str | None] = lambda: None  # what this rank waits for in another transport
        self._overdue: Callable[[], tuple[str, float] | None] = lambda: None
        self._give_up: Callable[[str], None] = lambda trouble: None

    @property
    def threads(self) -> list[threading.Thread]:
        return self._aside.threads

    def know_of(self, away: Callable[[], str | None]) -> None:
        """Ask what this rank waits for in another transport."""
        self._away = away

    def watch_too(
        self, overdue: Callable[[], tuple[str, float] | None], give_up: Callable[[str], None]
    ) -> None:
        """Watch waits of another kind, too: `overdue` says what they are for and how long they have lasted,
        `give_up` ends them."""
        self._overdue, self._give_up = overdue, give_up

    def look(self) -> None:
        """End a wait that cannot come about."""
        waiting = self._wait.job
        if waiting is None:
            self._look_elsewhere()
            return
        job, since = waiting
        waited = time.monotonic() - since
        trouble = next(self._notes.told(), None)
        if trouble is None and waited > LONG:
            trouble = self._watched(self._placed(job))
        if trouble is None:
            trouble = self._in_vain(job, job.label, waited)
        if trouble is not None and self._wait.job is waiting:
            self._verdict = read(trouble)[0]
            self._tell_all(trouble)
            self._notes.break_connections()

    def _tell_all(self, trouble: str) -> None:
        """Peers, and those that it is about, if they are stopped on this host."""
        self._notes.report(trouble)
        wake([self._peers.people[self._peers.names.index(rank)] for rank in read(trouble)[1]])

    def _in_vain(self, wait: object, what: str, waited: float) -> str | None:
        """Speak of a wait that is too long; the text of one that is over."""
        ends = waited > self._timeout
        # Peers that wait themselves have said so by then.
        if not ends and (self._said is wait or not self.usual.too_long(waited - 2 * _LOOK, self._timeout)):
            return None
        late, me = self._late(), self._peers.me
        if ends:  # a peer that waits elsewhere names who did not come there
            return in_vain(me, waited, what, late) if late or waited > self._timeout + OTHERS else None
        if not late:
            return None
        self._said = wait
        here = self._peers.here
        if min(set(self._peers.names) - {person.rank for person in late}) == here:
            say(here, waited, what, late)
        return None

    def _late(self) -> list[Person]:
        """Who is to blame for a wait: the ranks that wait for nothing. Where the store does not say, with the
        process that keeps it stopped: the peer whose message does not come."""
        absent = self._aside.call(self._watch.absent)
        if absent is None:
            absent = [] if self._wait.peer is None else [self._wait.peer]
        return [self._peers.people[rank] for rank in absent]

    def _placed(self, job: MessageSet) -> MessageSet:
        """With where the program is; looked up once for each wait, which takes a while."""
        if self._place[0] is not job:
            self._place = job, self._stacks.caller()
        return MessageSet(job.label + self._place[1], job.lane, job.turn)

    def _look_elsewhere(self) -> None:
        me = self._peers.here
        blamed = why_blamed(me, self._notes.told())
        if blamed is not None:  # also where the device has stood still as long as this rank
            show_and_end(me, blamed, self._stacks.thread)
        overdue = self._overdue()
        if overdue is None:
            away = self._away()
            if away is not None:
                self._watched(MessageSet(away, "", 0), away=True)
                return
            self._look_into_torch(self._stacks.collective(LONG))
            return
        label, waited = overdue
        trouble = next(self._notes.told(), None)
        if trouble is None and (lost := self._notes.lost()) is not None:
            trouble = self.blame(label, *lost)
        trouble = trouble or self._watched(MessageSet(label, "", 0))
        # The device may be behind for long: its oldest operation is the wait.
        trouble = trouble or self._in_vain(label, label, waited)
        if trouble is not None:
            self._tell_all(trouble)
            self._give_up(read(trouble)[0])

    def _look_into_torch(self, label: str | None) -> None:
        """Peers that wait for this rank end the run: here, torch notices that they are gone. Where all are
        inside torch, nobody else does."""
        told = {} if label is None else started()
        trouble = self._watched(None if label is None else MessageSet(named(label, told), "", 0), told)
        if trouble is not None and self._watch.all_foreign:
            self._notes.report(trouble)
            exits.give_up(self._peers.rank, trouble)

    def _watched(self, job: MessageSet | None, told: Started | None = None, away: bool = False) -> str | None:
        # Where the store has gone with its rank, so has the connection to it, which gloo notices.
        if job is not None:
            return self._aside.call(
                partial(self._watch.waiting, self, job.label, job.lane, job.turn, told, away)
            )
        if self._watch.speaks_for(self):
            self._aside.call(partial(self._watch.over, self))
        return None

    def blame(self, label: str, peer: int, error: str) -> str:
        """Why a wait for a peer has ended with this error of gloo: what the peer, or we, have said of it."""
        deadline = time.monotonic() + _GRACE
        while time.monotonic() < deadline:
            told = self._verdict or self._notes.first()
            if told is not None:
                return told
            time.sleep(0.01)
        me, person = self._peers.me, self._peers.people[peer]
        if "closed" in error or "reset" in error:
            return f"{person} ended or was killed while {me} waited for {label}"
        reason = error.splitlines()[0]
        return f"the connection of {me} to {person} failed in {label}: {reason}"


class PeerLink:
    """Connections to all peers. A lane is a sequence of operations that all ranks start in the same order."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: float,
        watch: StoreWatch | None = None,
        names: Sequence[int] | None = None,
    ) -> None:
        called = range(size) if names is None else names
        meeting = Rendezvous(store, rank, size, timeout)
        people = [Person(*cast("list[Any]", who)) for who in meeting.share("who", Person.me(called[rank]))]
        # Far beyond our own timeout: gloo's would break the connection without a word about the cause.
        gloo = _connections(store, rank, size, settle(meeting), timedelta(seconds=10 * timeout + 3600))
        self._gloo = gloo
        self._watch = watch if watch is not None else StoreWatch(store, rank, size)
        self._number = self._watch.join()
        self._tags: dict[str, int] = {}
        self._post: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        post = threading.Thread(target=_deliver, args=(self._post,), name="zeroshard post", daemon=True)
        post.start()
        weakref.finalize(self, self._post.put, None)
        self._wait = CurrentWait()
        self.notes = FailureNotes(gloo, [peer for peer in range(size) if peer != rank])
        self.guard = LinkGuard(PeerNames(rank, called, people), timeout, self._watch, self.notes, self._wait)
        self._threads = [look_after(self.guard, self.notes.closed, _LOOK), post]

    def tag(self, lane: str, number: int) -> None:
        """Give a lane its tag: the same number on every rank, and no other lane's."""
        self._tags[lane] = _FIRST_TAG + number

    def start(
        self, label: str, lane: str, receives: Messages, sends: Messages
    ) -> tuple[MessageSet, MessageSet]:
        """Start one turn of a lane: its receives and its sends."""
        tag, name = self._tags[lane], f"{self._number} {lane}"
        turn = self._watch.started[name] = self._watch.started.get(name, 0) + 1
        got, sent = MessageSet(label, name, turn), MessageSet(label, name, turn)
        for job, call, messages in ((got, self._gloo.recv, receives), (sent, self._gloo.send, sends)):
            if lane == LETTERS:
                job.post(call, messages, tag)
            else:
                self._post.put(partial(job.post, call, messages, tag))
        return got, sent

    def wait(self, job: MessageSet) -> None:
        """Block until the job is done. Raises RankError if it cannot come about."""
        if job.done:
            return
        self._wait.begin(job)
        try:
            job.posted.wait()
            if job.refused is not None:
                self._fail(job.label, *job.refused)
            for peer, work in job.works:
                self._wait.turn_to(peer)
                try:
                    work.wait()
                except RuntimeError as error:
                    self._fail(job.label, peer, error)
        finally:
            self._wait.end()
        job.end()

    def waits_for(self) -> str | None:
        """What this rank waits for here."""
        waiting = self._wait.job
        return None if waiting is None else waiting[0].label

    def _fail(self, label: str, peer: int, error: RuntimeError) -> None:
        text = self.guard.blame(label, peer, str(error))
        self.notes.report(text)
        raise RankError(text) from error

    def flush(self, jobs: Iterable[MessageSet], seconds: float) -> None:
        """Wait for sends that nobody here waits for: gloo keeps a message back until its receiver asks, and
        forgets it with its job. Not where a rank has failed, and not for ever."""
        end = time.monotonic() + seconds
        if self.notes.reported or self.notes.first() is not None:
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
        self.notes.closed.set()
        self._post.put(None)
        part_from(self.threads)

    @property
    def threads(self) -> list[threading.Thread]:
        """All that may be inside of torch."""
        return [*self._threads, *self.notes.threads, *self.guard.threads]


def _connections(store: Store, rank: int, size: int, address: str | None, patience: timedelta) -> Any:
    """Gloo's to all peers, at this address; None: at the one that gloo finds."""
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address) if address else gloo.create_default_device()]
    options._timeout = patience
    return gloo(store, rank, size, options)


def _deliver(post: SimpleQueue[Callable[[], None] | None]) -> None:
    while (item := post.get()) is not None:
        item()
        del item  # or the connections would live as long as this thread
