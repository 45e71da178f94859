"""Holds the control areas of ranks on one host: memory that each rank writes and its peers read.

An area is an anonymous file in memory (memfd) that other processes of the host open through
/proc/<pid>/fd/<fd>. It has no name in any file system, so the kernel takes it back when the last process that
maps it ends, however that ends. Torch maps it, and not Python's mmap, which keeps a file descriptor open for
every mapping.

[Note: words] An area is an array of int64 words that only grow, some text, and two slots of an exchange. All
waiting is of one form, "word i of every peer >= target", and a waiting rank writes down i and target. So any
rank can tell for itself whether another still has to wait, and a deadlock is a fact and not a guess: all
ranks wait, none of their conditions holds, and that has not changed for `PATIENCE` seconds.

[Note: elsewhere] A peer may be blocked in another transport of the same processes (two models, two
transports), which this rank sees too, or in a collective of torch, which the peer's own guard writes down
(`diagnosis/stacks.py`). Either counts as waiting; what torch waits for cannot be checked, so that takes
`FOREIGN_PATIENCE`. Where all ranks are inside torch, `desynchronised` tells.

[Note: order] The data must be visible before the word that announces it. On x86 stores are seen in program
order. Elsewhere (ARM) two uncontended lock round trips, release before acquire, order what is before against
what is after; this is only paid there."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from zeroshard.errors import OptionError, RankError

from .diagnosis.stacks import Started, differ
from .diagnosis.waits import alike, disagreement
from .rendezvous import Rendezvous
from .stuck import OTHERS, Person, Usual, in_vain, read, say, wake, why_blamed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def create(name: str, nbytes: int, reserve: bool = True) -> int:
    """The descriptor of a new zero-filled memfd; close it once every peer has opened it.

    With `reserve`, lack of memory is an OSError now and not a SIGBUS later.
    """
    fd = os.memfd_create(f"zeroshard {name}"[:200], os.MFD_CLOEXEC)
    try:
        if reserve and nbytes > 0:
            os.posix_fallocate(fd, 0, nbytes)
        else:
            os.ftruncate(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_peer(pid: int, fd: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Map what process `pid` created, as a flat tensor. OSError where /proc does not show it to us."""
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    path = f"/proc/{pid}/fd/{fd}"
    # Torch would make a missing file, and reports any other trouble as a RuntimeError.
    os.stat(path)
    try:
        return torch.from_file(path, shared=True, size=numel, dtype=dtype)
    except RuntimeError as error:
        raise OSError(str(error).splitlines()[0]) from error


EPOCH, EXCHANGE, STATE, WAIT_WORD, WAIT_TARGET, WAIT_COUNT, FOREIGN, AWAY = range(8)
RUNNING, LEFT, FAILED = range(3)
_LANES_AT = 8
MAX_LANES = 16384
# Untouched pages of an area cost nothing, so it can be roomy.
_TEXT_AT = 8 * (_LANES_AT + 2 * MAX_LANES)
_TEXT = 1024
_FOREIGN_AT = _TEXT_AT + _TEXT
_NOTE = 8192
_NOTE_AT = _FOREIGN_AT + _NOTE
_EXCHANGE_AT = _NOTE_AT + _NOTE
_EXCHANGE_HEAD = struct.Struct("qq")
_EXCHANGE = 1 << 16
_BYTES = _EXCHANGE_AT + 2 * _EXCHANGE

SPIN = 50e-6
NAP, LONG_NAP = 20e-6, 200e-6
HEALTH = 0.2
PATIENCE = 5.0
FOREIGN_PATIENCE = 12.0

_LABEL = 400
_X86 = platform.machine().lower() in {"x86_64", "amd64", "i386", "i686"}
_controls: weakref.WeakSet[Control] = weakref.WeakSet()
_locks = (threading.Lock(), threading.Lock())


def posted(lane: int) -> int:
    """The word that counts the reductions this rank has posted on a lane."""
    return _LANES_AT + 2 * lane


def consumed(lane: int) -> int:
    """The word that counts the reductions whose shards this rank has taken from its peers."""
    return _LANES_AT + 2 * lane + 1


def order_memory() -> None:
    """See [Note: order]."""
    if not _X86:
        for lock in _locks:
            with lock:
                pass


@dataclass(frozen=True)
class BlockedWait:
    """A wait that still has to last: its identity, its words, and the pids that it waits for."""

    wait: tuple[int, int, int]
    label: str
    late: set[int]
    foreign: bool = False


@dataclass(frozen=True)
class RankProcesses:
    """The processes of all ranks. `births`: when each began, which tells reused pids apart; `names`: what
    messages call the ranks."""

    rank: int
    names: Sequence[int]
    pids: list[int]
    births: list[str]
    people: list[Person]

    @property
    def here(self) -> int:
        """How many ranks are in this process."""
        return self.pids.count(self.pids[self.rank])

    def name(self, rank: int) -> str:
        return f"rank {self.names[rank]}"

    def alive(self, rank: int) -> bool:
        if self.pids[rank] == self.pids[self.rank]:
            return True  # a thread of this process
        state, birth = _process_state(self.pids[rank])
        return state not in ("", "Z", "X") and birth == self.births[rank]

    def death(self) -> str | None:
        """That one has died."""
        dead = [rank for rank in range(len(self.pids)) if rank != self.rank and not self.alive(rank)]
        return f"{self.name(dead[0])} (pid {self.pids[dead[0]]}) died" if dead else None


class Control:
    """This rank's control area and its view of the peers'."""

    def __init__(
        self, store: Store, rank: int, size: int, timeout: float, names: Sequence[int] | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.progress: Callable[[], object] = lambda: None
        self._meet(Rendezvous(store, rank, size, timeout), range(size) if names is None else names)
        self._areas = [memoryview(_memory(held)).cast("B") for held in self._held]
        self._words = [area.cast("q") for area in self._areas]
        self._peers = [words for other, words in enumerate(self._words) if other != rank]
        self._mine = self._words[rank]
        self.usual = Usual()
        self._letters = 0
        self._foreign = 0
        self._crossing = _DesyncDetector()
        _controls.add(self)

    def while_waiting(self, progress: Callable[[], object]) -> None:
        """Call this again and again while this rank waits."""
        self.progress = progress

    def _meet(self, meeting: Rendezvous, names: Sequence[int]) -> None:
        area, trouble, pid = -1, None, os.getpid()
        try:
            area = create(f"control {self.rank}", _BYTES, reserve=False)
        except OSError as error:
            trouble = f"rank {names[self.rank]} gets no {_BYTES} bytes of shared memory ({error})"
        try:
            mine = [pid, area, _process_state(pid)[1], Person.me(names[self.rank])]
            told = cast("list[tuple[int, int, str, list[Any]]]", meeting.share("control", mine))
            pids, births = [peer for peer, *_ in told], [birth for _, _, birth, _ in told]
            people = [Person(*who) for *_, who in told]
            self.processes = RankProcesses(self.rank, names, pids, births, people)
            self._held: list[torch.Tensor] = []
            for other, (peer, fd, *_) in enumerate(told):
                if fd < 0 or trouble is not None:
                    continue
                try:
                    self._held.append(open_peer(peer, fd, _BYTES, torch.uint8))
                except OSError as error:
                    trouble = (
                        f"rank {names[self.rank]} cannot open the memory of rank {names[other]} "
                        f"(pid {peer}): {error}"
                    )
            meeting.cause = self.processes.death
            troubles = [said for said in meeting.share("opened", trouble) if said is not None]
        finally:
            if area >= 0:
                os.close(area)
        if troubles:
            raise OptionError(
                f"transport 'shm' cannot work here: {troubles[0]}. Ranks must run as the same user in one "
                "process namespace, and files may not be limited to less (ulimit -f); use transport='gloo' "
                "instead."
            )

    def value(self, rank: int, word: int) -> int:
        return self._words[rank][word]

    def own(self, word: int) -> int:
        return self._mine[word]

    def publish(self, word: int, value: int) -> None:
        """Set one of this rank's words, after everything it has written so far."""
        order_memory()
        self._mine[word] = value

    def reached(self, word: int, target: int) -> bool:
        """Whether that word of every peer is at least `target`; what they wrote before may then be read."""
        for words in self._peers:
            if words[word] < target:
                return False
        order_memory()
        return True

    def wait(self, word: int, target: int, what: Callable[[], str]) -> None:
        """Block until `reached(word, target)`. Raises RankError if that can no longer come about."""
        start = time.perf_counter()
        # Threads of one process have one interpreter: who looks often holds up those that it waits for.
        here = self.processes.here
        while time.perf_counter() - start < SPIN / here:
            if self.reached(word, target):
                return
            os.sched_yield()
        self._write_text(_TEXT_AT, _TEXT, what())
        self._mine[WAIT_COUNT] += 1
        self._mine[WAIT_TARGET] = target
        self.publish(WAIT_WORD, word + 1)
        nap, looked, stuck, said = NAP * here, start, _DeadlockDetector(self), False
        while not self.reached(word, target):
            self.progress()
            now = time.perf_counter()
            if now - looked > HEALTH:
                looked = now
                trouble = self._trouble(word, target, what(), now - start) or stuck.trouble(now)
                if trouble is not None:
                    if self.reached(word, target):
                        break
                    self.leave(trouble)
                    wake(self._late(word, target))
                    raise RankError(read(trouble)[0])
                if not said and self.usual.too_long(now - start, self.timeout):
                    said = self._say(word, target, what(), now - start)
            time.sleep(nap)
            nap = min(nap * 1.5, LONG_NAP * here)
        self._mine[WAIT_WORD] = 0

    def _trouble(self, word: int, target: int, what: str, waited: float) -> str | None:
        # As it was told: who did not come may hear of it from this rank first.
        told = next(self._told(), None)
        if told is not None:
            return told
        late = self._behind(word, target)
        me = self.processes.name(self.rank)
        for other in late:
            who = f"{self.processes.name(other)} (pid {self.processes.pids[other]})"
            if self._words[other][STATE] == LEFT:
                return (
                    f"{who} had ended or closed its run when {me} waited for {what}. Every rank makes as "
                    "many steps as the others, and each call of run.save(), load(), resume(), gathered(), "
                    "publish() and close(): none of them stands under `if run.rank == 0:`"
                )
            if not self.processes.alive(other):
                return f"{who} died while {me} waited for {what}"
        if waited > self.timeout:
            blamed = self._late(word, target)
            return in_vain(me, waited, what, blamed) if blamed or waited > self.timeout + OTHERS else None
        return None

    def _behind(self, word: int, target: int) -> list[int]:
        return [r for r in range(self.size) if r != self.rank and self._words[r][word] < target]

    def _late(self, word: int, target: int) -> list[Person]:
        """Who is to blame for a wait: of those that it waits for, the ranks that wait for nobody."""
        return [
            self.processes.people[rank]
            for rank in self._behind(word, target)
            if self.blocked_anywhere(rank) is None and not self._words[rank][AWAY]
        ]

    def _say(self, word: int, target: int, what: str, waited: float) -> bool:
        """By the first of the ranks that have come."""
        late, names = self._late(word, target), self.processes.names
        if late and min(set(names) - {person.rank for person in late}) == names[self.rank]:
            say(names[self.rank], waited, what, late)
        return bool(late)

    @property
    def name(self) -> int:
        """What messages call this rank."""
        return self.processes.names[self.rank]

    def waits_for(self) -> str | None:
        """What this rank waits for here."""
        return self._read_text(self.rank, _TEXT_AT) if self._mine[WAIT_WORD] else None

    def blamed(self) -> str | None:
        """Why others ended, if it is because this rank did not come and it does not know: it is elsewhere."""
        if self._mine[WAIT_WORD] or self._mine[AWAY]:
            return None
        return why_blamed(self.processes.names[self.rank], self._told())

    def note(self) -> str | None:
        """Why a peer failed, if one has said so."""
        return next((read(told)[0] for told in self._told()), None)

    def _told(self) -> Iterator[str]:
        """The notes of the peers that failed."""
        for other, words in enumerate(self._words):
            if other != self.rank and words[STATE] == FAILED:
                yield self._read_text(other, _NOTE_AT)

    def cause(self) -> str | None:
        """Why a peer failed, or that one has died."""
        told = self.note()
        left = [words[STATE] == LEFT for words in self._words]
        return told if told is not None or any(left) else self.processes.death()

    def blocked(self, rank: int) -> BlockedWait | None:
        """What a rank waits for here, if it does and still has to."""
        words = self._words[rank]
        count, word, target = words[WAIT_COUNT], words[WAIT_WORD] - 1, words[WAIT_TARGET]
        late = [r for r, peer in enumerate(self._words) if word >= 0 and r != rank and peer[word] < target]
        if not late:
            return None
        return BlockedWait(
            (count, word, target), self._read_text(rank, _TEXT_AT), {self.processes.pids[r] for r in late}
        )

    def blocked_anywhere(self, rank: int) -> BlockedWait | None:
        """What a rank waits for, here or elsewhere; see [Note: elsewhere]."""
        found, pids = self.blocked(rank), self.processes.pids
        # Ranks that are threads of one process cannot be told apart by it.
        if found is None and len(set(pids)) == self.size:
            others = [
                other for other in _controls if other is not self and pids[rank] in other.processes.pids
            ]
            seen = [other.blocked(other.processes.pids.index(pids[rank])) for other in others]
            found = next((b for b in seen if b is not None and b.late <= set(pids)), None)
        count = self._words[rank][FOREIGN]
        if found is None and count > 0:
            found = BlockedWait((count, -1, 0), self._foreign_wait(rank)[0], set(), foreign=True)
        return found

    def tell_foreign(self, text: str | None, told: Started | None = None) -> None:
        """Write down the collective of torch that this rank is in, and those that it has started."""
        if text is None:
            self._mine[FOREIGN] = 0
        elif self._mine[FOREIGN] == 0:
            whole = text[:_LABEL] + "\0" + json.dumps(told or {})
            self._write_text(_FOREIGN_AT, _NOTE, whole if len(whole) < _NOTE // 2 else text[:_LABEL])
            self._foreign += 1
            self.publish(FOREIGN, self._foreign)

    def _foreign_wait(self, rank: int) -> tuple[str, Started]:
        label, _, told = self._read_text(rank, _FOREIGN_AT).partition("\0")
        try:
            return label, json.loads(told or "{}")
        except ValueError:  # it is being written
            return label, {}

    def desynchronised(self, now: float) -> str | None:
        """Whether all ranks are in collectives of torch that cannot be the same."""
        counts = [words[FOREIGN] for words in self._words]
        waits = [(count, *self._foreign_wait(rank)) for rank, count in enumerate(counts)]
        return self._crossing.trouble(waits if all(counts) else [], self.processes.names, now)

    def leave(self, note: str | None = None) -> None:
        """Mark this rank as failed, with the reason, or as gone. The first note stays."""
        if self._mine[STATE] == FAILED:
            return
        if note is None:
            self.publish(STATE, LEFT)
        else:
            self._write_text(_NOTE_AT, _NOTE, note)
            self.publish(STATE, FAILED)

    def exchange(self, label: str, payload: bytes) -> list[bytes]:
        """Every rank's payload, in rank order. All ranks must send under the same label at the same time."""
        name = label.encode()[:_LABEL]
        message = name + b"\0" + payload
        room = _EXCHANGE - _EXCHANGE_HEAD.size
        parts: list[list[bytes]] = [[] for _ in range(self.size)]
        sent, longest = 0, 1
        while sent < longest:
            totals = self._letter(message[sent : sent + room], len(message), label, parts)
            if sent == 0:
                longest = max(totals)
                self._compare_labels([part[0].split(b"\0", 1)[0].decode(errors="replace") for part in parts])
            sent += room
        return [b"".join(part).split(b"\0", 1)[1] for part in parts]

    def _letter(self, chunk: bytes, total: int, label: str, parts: list[list[bytes]]) -> list[int]:
        # Two slots are enough: to write letter n a rank has seen every peer's n-1, and a peer that wrote n-1
        # has read all of n-2.
        self._letters += 1
        at = _EXCHANGE_AT + (self._letters % 2) * _EXCHANGE
        body = at + _EXCHANGE_HEAD.size
        mine = self._areas[self.rank]
        _EXCHANGE_HEAD.pack_into(mine, at, total, len(chunk))
        mine[body : body + len(chunk)] = chunk
        self.publish(EXCHANGE, self._letters)
        self.wait(EXCHANGE, self._letters, lambda: label)
        totals = []
        for part, area in zip(parts, self._areas, strict=True):
            whole, length = _EXCHANGE_HEAD.unpack_from(area, at)
            totals.append(whole)
            part.append(bytes(area[body : body + length]))
        return totals

    def _compare_labels(self, labels: list[str]) -> None:
        if not alike(labels):
            raise RankError(disagreement(labels, self.processes.names))

    def _write_text(self, at: int, room: int, text: str) -> None:
        data = text.encode()[: room - 8]
        self._areas[self.rank][at : at + 8 + len(data)] = struct.pack("q", len(data)) + data

    def _read_text(self, rank: int, at: int) -> str:
        area = self._areas[rank]
        (length,) = struct.unpack_from("q", area, at)
        return bytes(area[at + 8 : at + 8 + length]).decode(errors="replace")


def _memory(tensor: torch.Tensor) -> ctypes.Array[ctypes.c_char]:
    """A tensor's bytes, as long as it lives. Its own words cost 20 times as much to read one by one."""
    return (ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())


class _DeadlockDetector:
    """Notices that all ranks are blocked and stay so."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._seen: list[BlockedWait | None] = []
        self._since = 0.0

    def trouble(self, now: float) -> str | None:
        seen = [self._control.blocked_anywhere(rank) for rank in range(self._control.size)]
        if seen != self._seen:
            self._seen, self._since = seen, now
        known = [blocked for blocked in seen if blocked is not None]
        patience = FOREIGN_PATIENCE if any(blocked.foreign for blocked in known) else PATIENCE
        if len(known) < len(seen) or now - self._since < patience:
            return None
        return disagreement([blocked.label for blocked in known], self._control.processes.names)


class _DesyncDetector:
    """Notices that ranks have been in different collectives for a while."""

    def __init__(self) -> None:
        self._seen: object = None
        self._since = 0.0

    def trouble(
        self, waits: Sequence[tuple[int, str, Started]], names: Sequence[int], now: float
    ) -> str | None:
        """`waits`: of all ranks, in their order: a number for each wait, its label, and what was started.
        Empty: not all of them are inside torch."""
        if waits != self._seen:
            self._seen, self._since = waits, now
        if not waits or now - self._since < FOREIGN_PATIENCE or not differ([each for _, _, each in waits]):
            return None
        return disagreement([label for _, label, _ in waits], names)


def _process_state(pid: int) -> tuple[str, str]:
    """(state letter, start time) of a process, or empty. The start time tells reused pids apart."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return fields[0], fields[19]
    except OSError:
        return "", ""
