"""Joins ranks on several hosts without GPUs: shards go over gloo's sends and receives, sums are made here.

Gloo's own reduce-scatter moves the bytes of an all-reduce, and its all-gather is slow; this moves the ideal
volume.

- **stage**: host memory into which the peers' shards arrive; one per wire, and one per key of a gather for
  what is short; reused for ever. What a gather is made of: see `targets`."""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from zeroshard.comm import bounce
from zeroshard.errors import RankError
from zeroshard.layout.specs import TransportTraits

from .diagnosis import exits
from .diagnosis.waits import StoreWatch, alike, asked_for, disagreement
from .link import LETTER, LETTERS, Messages, MessageSet, PeerLink, head_of, opened, room_beside
from .sums import sum_shards
from .targets import GatherMessages, rooms_for
from .transport import (
    HEAD,
    Add,
    Cuts,
    Land,
    Spans,
    SummingTransport,
    TransportBuffer,
    Work,
    fold,
    length_of,
    parts_of,
    slices,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_PASSAGES = 4  # of one key that are kept
TURNS = 4  # lanes of a wire for sums, one for each of so many updates
_PARTING = 10.0  # seconds that a rank stays for peers that have yet to take what it sent

_UNREAD = 0xFF

Finish = Callable[[], None]
Tails = Sequence[ctypes.c_ubyte]


class GlooTransport(SummingTransport):
    """Sends and receives over gloo. Transport buffers are host memory, also where the device is a GPU."""

    name = "gloo"
    traits = TransportTraits(overlaps=True, direct=True, adds_here=True)

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        device: torch.device | None = None,
        timeout: float = 600.0,
        watch: StoreWatch | None = None,
        names: Sequence[int] | None = None,
    ) -> None:
        super().__init__(rank, size, device if device is not None else torch.device("cpu"))
        self._names = names
        self._link = PeerLink(store, rank, size, timeout, watch, names)
        self._link.tag(LETTERS, 0)
        self._peers = [peer for peer in range(size) if peer != rank]
        self._lanes_used = 0
        self._turns = 0
        self._lanes_free: list[int] = []
        self._pending: dict[TransportBuffer, list[_Move]] = {}
        self._sends: dict[TransportBuffer, list[MessageSet]] = {}
        self._bounce: torch.Tensor | None = None
        exits.listen(self)

    # Buffers

    def allocate(self, key: str, numel: int, dtype: torch.dtype) -> TransportBuffer:
        return self.adopt(key, torch.zeros(numel, dtype=dtype))

    def adopt(self, key: str, memory: torch.Tensor) -> TransportBuffer:
        """A transport buffer over flat host memory that the caller has. Collective in call order, as
        `allocate`."""
        dtype = memory.dtype
        lane = self._lanes_free.pop() if self._lanes_free else self._lanes_used + 1
        self._lanes_used = max(self._lanes_used, lane)
        told = [
            json.loads(text) for text in self._exchange(f"new buffers, '{key}' first", [str(dtype), lane])
        ]
        if any(item != told[0] for item in told):
            raise RankError(
                f"ranks allocate different buffers as '{key}': {told} (dtype and lane in rank order). "
                "Every rank must build the same model; check code that depends on the rank."
            )
        names = [f"deal {lane}", f"gather {lane}", *(f"reduce {lane} {turn}" for turn in range(TURNS))]
        for number, name in enumerate(names):
            self._link.tag(name, len(names) * lane + number)
        return TransportBuffer(key, memory, lane)

    def free(self, transport_buffer: TransportBuffer) -> None:
        self._settle(transport_buffer)
        self._lanes_free.append(transport_buffer.lane)
        transport_buffer.let_go()

    def fill(self, transport_buffer: TransportBuffer) -> None:
        if self._pending.get(transport_buffer) or self._sends.get(transport_buffer):
            with self.counters.waiting("fill"):
                self._settle(transport_buffer)

    def _settle(self, transport_buffer: TransportBuffer) -> None:
        """Finish what this rank has started on a transport buffer."""
        for move in self._pending.pop(transport_buffer, []):
            move.wait()
        for job in self._sends.pop(transport_buffer, []):
            self._link.wait(job)

    # Traffic

    def reduce_by(
        self,
        add: Add,
        kind: str,
        key: str,
        wire: TransportBuffer,
        shards: Sequence[int],
        out: torch.Tensor,
        scale: float,
    ) -> Work:
        # What ranks send in different steps must not meet: at stage 0 nobody else would tell.
        return self.reduce_from(kind, key, wire, slices(wire.mine, shards), out, scale, add, self._turns)

    def reduce_from(
        self,
        kind: str,
        key: str,
        wire: TransportBuffer,
        offered: Sequence[torch.Tensor],
        out: torch.Tensor,
        scale: float,
        add: Add = sum_shards,
        turn: int = 0,
    ) -> Work:
        """As `reduce`, with the shards in any places of the wire: `offered[r]` is the one for rank r."""
        # Several buckets take turns on one wire, and so on its stage: what was there has been added by now.
        for move in self._pending.pop(wire, []):
            move.wait()
        shards = [shard.numel() for shard in offered]
        mine = shards[self.rank]
        stage = self._stage(wire, "reduce", mine * (self.size - 1))
        reduced_grad = slices(stage, [mine] * (self.size - 1))
        receives = list(zip(self._peers, reduced_grad, strict=True)) if mine else []
        sends = [(peer, offered[peer]) for peer in self._peers if shards[peer]]
        tails = _tails(receives)
        label = f"its {kind} [{key}]" + (f", turn {turn}" if turn else "")
        got, sent = self._link.start(label, f"reduce {wire.lane} {turn % TURNS}", receives, sends)
        sources = [*reduced_grad[: self.rank], offered[self.rank], *reduced_grad[self.rank :]]
        move = _Move(self, kind, got, lambda: add(out, sources, scale), tails)
        self._begin(wire, move, sent)
        self._count_reduce(kind, shards, wire.mine.element_size())
        return move

    def all_to_all(
        self,
        kind: str,
        key: str,
        wire: TransportBuffer,
        offers: Spans,
        takes: Spans,
        land: Land,
        varies: bool = False,
    ) -> Work:
        for move in self._pending.pop(wire, []):
            move.wait()  # the parts of an earlier turn lie where those of this one will
        offered = parts_of(wire.mine, offers)
        if varies:
            return self._all_to_all_varying(kind, key, wire, offered, takes, land)
        parts = slices(self._stage(wire, "deal", sum(n for _, n in takes)), [n for _, n in takes])
        parts[self.rank] = offered[self.rank]
        receives = [(peer, parts[peer]) for peer in self._peers if takes[peer][1]]
        sends = [(peer, offered[peer]) for peer in self._peers if offers[peer][1]]
        tails = _tails(receives)
        got, sent = self._link.start(f"its {kind} [{key}]", f"deal {wire.lane}", receives, sends)
        move = _Move(self, kind, got, lambda: land(parts), tails)
        self._begin(wire, move, sent)
        self._count_all_to_all(kind, [n for _, n in offers], [n for _, n in takes])
        return move

    def _all_to_all_varying(
        self,
        kind: str,
        key: str,
        wire: TransportBuffer,
        offered: list[torch.Tensor],
        takes: Spans,
        land: Land,
    ) -> Work:
        """Heads first; when they have come, room for the rest is made. What follows a head is sent at once
        behind it, and gloo keeps it back until it is asked for."""
        label, lane = f"its {kind} [{key}]", f"deal {wire.lane}"
        lengths = [length_of(part) for part in offered]
        heads = [torch.zeros(HEAD, dtype=torch.uint8) for _ in takes]
        heads[self.rank] = offered[self.rank][:HEAD]
        sends: list[tuple[int, torch.Tensor]] = []
        for peer in self._peers:
            used = offered[peer][: lengths[peer]]
            sends += [(peer, part) for part in (used[:HEAD], used[HEAD:]) if part.numel()]
        got, sent = self._link.start(label, lane, [(p, heads[p]) for p in self._peers if takes[p][1]], sends)

        def finish() -> None:
            used = [length_of(head) if takes[rank][1] else 0 for rank, head in enumerate(heads)]
            parts = [torch.empty(length, dtype=torch.uint8) for length in used]
            parts[self.rank] = offered[self.rank][: lengths[self.rank]]
            receives = []
            for peer in self._peers:
                if used[peer]:
                    parts[peer][:HEAD] = heads[peer]
                if used[peer] > HEAD:
                    receives.append((peer, parts[peer][HEAD:]))
            with self.counters.waiting(kind):
                self._link.wait(self._link.start(label, lane, receives, [])[0])
            self._count_all_to_all(kind, lengths, used)
            land(parts)

        move = _Move(self, kind, got, finish)
        self._begin(wire, move, sent)
        return move

    def gather(
        self, kind: str, key: str, source: TransportBuffer, cuts: Cuts, out: Sequence[Sequence[torch.Tensor]]
    ) -> Work:
        self._finish_last(source, key)
        source.state["source"] = True
        passage = self._passage(key, source, cuts, out)
        if passage.packs:
            for job in self._sends.pop(source, []):
                self._link.wait(job)
            passage.pack()
        lane = f"gather {source.lane}"
        got, sent = self._link.start(f"its {kind} [{key}]", lane, passage.receives, passage.sends)
        move = _Move(self, kind, got, passage.unpack)
        source.state[f"last {key}"] = move
        self._begin(source, move, sent)
        self._count_gather(kind, passage.totals, source.mine.element_size())
        return move

    def _passage(
        self, key: str, source: TransportBuffer, cuts: Cuts, out: Sequence[Sequence[torch.Tensor]]
    ) -> GatherMessages:
        """Prepared before, if what is gathered went to the same tensors: a gather group has few buffers."""
        known = cast("list[GatherMessages]", source.prepared.setdefault(key, []))
        for passage in known:
            if passage.out is out and passage.cuts == cuts:
                return passage
        made = GatherMessages(key, source, cuts, out, self.rank, partial(self._stage, source))
        known[:] = [made, *known[: _PASSAGES - 1]]
        return made

    def receive(self, wire: TransportBuffer, most: int) -> int:
        return self._stage(wire, "reduce", most * len(self._peers)).nbytes

    def expect(self, key: str, source: TransportBuffer, cuts: Cuts) -> int:
        rooms = rooms_for(key, cuts, self.rank, source.mine.element_size())
        return sum(self._stage(source, name, numel).nbytes for name, numel in rooms.items())

    def _stage(self, transport_buffer: TransportBuffer, name: str, numel: int) -> torch.Tensor:
        held = cast("torch.Tensor | None", transport_buffer.state.get(name))
        if held is None or held.numel() < numel:
            held = transport_buffer.state[name] = torch.empty(numel, dtype=transport_buffer.mine.dtype)
        return held[:numel]

    def _finish_last(self, transport_buffer: TransportBuffer, key: str) -> None:
        """A gather's stage is in use until the last gather of that key has ended."""
        last = transport_buffer.state.get(f"last {key}")
        if last is not None:
            cast(_Move, last).wait()

    def _begin(self, transport_buffer: TransportBuffer, move: _Move, sent: MessageSet) -> None:
        open_moves = [other for other in self._pending.get(transport_buffer, []) if not other.ended]
        self._pending[transport_buffer] = [*open_moves, move]
        open_sends = [job for job in self._sends.get(transport_buffer, []) if not job.done]
        self._sends[transport_buffer] = [*open_sends, sent]

    def open(self) -> None:
        return None

    def fence(self) -> None:
        self._turns += 1
        self.beat()
        with self.counters.waiting("fence"):
            # Wires have `fill`: a reduction may take longer than the step that started it.
            for transport_buffer in [
                transport_buffer for transport_buffer in self._sends if "source" in transport_buffer.state
            ]:
                self._settle(transport_buffer)

    # Small agreements

    def _exchange(self, label: str, value: object) -> list[bytes]:
        return self._letters(label, json.dumps(value).encode())

    def _letters(self, label: str, payload: bytes) -> list[bytes]:
        """Every rank's payload, in rank order. All ranks must send under the same label at the same time."""
        with self.counters.waiting("agree"):
            head = head_of(label, payload)
            heads = self._swap(label, head, [LETTER] * self.size)
            names, rests, starts = [], [], []
            for got in heads:
                name, total, start = opened(got)
                names.append(name)
                starts.append(start)
                rests.append(total - len(start))
            if not alike(names):
                raise RankError(disagreement(names, self._names))
            rest = payload[room_beside(label) :]
            ends = self._swap(label, rest, rests) if any(rests) else [b""] * self.size
        return [start + end for start, end in zip(starts, ends, strict=True)]

    def _swap(self, label: str, mine: bytes, lengths: Sequence[int]) -> list[bytes]:
        out = (
            torch.frombuffer(bytearray(mine), dtype=torch.uint8)
            if mine
            else torch.empty(0, dtype=torch.uint8)
        )
        came = {peer: bytearray(lengths[peer]) for peer in self._peers if lengths[peer]}
        receives = [(peer, torch.frombuffer(buffer, dtype=torch.uint8)) for peer, buffer in came.items()]
        sends = [(peer, out) for peer in self._peers] if mine else []
        got, sent = self._link.start(label, LETTERS, receives, sends)
        self._link.wait(got)
        self._link.wait(sent)
        return [mine if rank == self.rank else bytes(came.get(rank, b"")) for rank in range(self.size)]

    def compare(self, what: str, place: str) -> None:
        """With the left neighbour alone: if all neighbours agree, all ranks do. The letter goes among others,
        so that one of another kind is told from it at once."""
        label, left = asked_for(what, place), (self.rank - 1) % self.size
        mine, came = bytearray(head_of(label, b"")), bytearray(LETTER)
        with self.counters.waiting("agree"):
            coming = [(left, torch.frombuffer(came, dtype=torch.uint8))]
            going = [((self.rank + 1) % self.size, torch.frombuffer(mine, dtype=torch.uint8))]
            for job in self._link.start(label, LETTERS, coming, going):
                self._link.wait(job)
        both = sorted([(left, opened(bytes(came))[0]), (self.rank, label)])
        if not alike([said for _, said in both]):
            called = range(self.size) if self._names is None else self._names
            text = disagreement([said for _, said in both], [called[rank] for rank, _ in both])
            self.report(text)  # others may agree with their neighbours
            raise RankError(text)

    def barrier(self, what: str) -> None:
        self._letters(f"barrier '{what}'", b"")

    def max(self, values: Sequence[float], what: str = "a small max") -> list[float]:
        return self._fold("max", values, what)

    def sum(self, values: Sequence[float], what: str = "a small sum") -> list[float]:
        return self._fold("sum", values, what)

    def _fold(self, how: str, values: Sequence[float], what: str) -> list[float]:
        rows = self._letters(what, struct.pack(f"{len(values)}d", *values))
        return fold([struct.unpack(f"{len(row) // 8}d", row) for row in rows], how)

    def exchange(self, value: object, what: str = "an exchange") -> list[object]:
        return [json.loads(text) for text in self._exchange(what, value)]

    def broadcast(self, key: str, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        label = f"broadcast '{key}'"
        self._letters(label, b"")
        room = bounce.room(tensors)
        if self._bounce is None or self._bounce.numel() < room:
            self._bounce = torch.empty(room, dtype=torch.uint8)
        buffer, sends = self._bounce, self.rank == source

        def move(start: int, stop: int) -> None:
            part = buffer[start:stop]
            receives = [(source, part)] if not sends and stop > start else []
            targets = [(peer, part) for peer in self._peers] if sends and stop > start else []
            for job in self._link.start(label, LETTERS, receives, targets):
                self._link.wait(job)

        with self.counters.waiting("broadcast"):
            bounce.broadcast(tensors, buffer, sends, move)
        if bounce.is_large(tensors):
            self._bounce = None
        self._count_broadcast(tensors, source)

    # The end

    def waits_for(self) -> str | None:
        """What this rank waits for here."""
        return self._link.waits_for()

    def also(self, away: Callable[[], str | None]) -> None:
        """Tell peers what this rank waits for in another transport."""
        self._link.guard.know_of(away)

    def beat(self) -> None:
        """A step has come to its end."""
        self._link.guard.usual.beat()

    def guard(self, overdue: Callable[[], tuple[str, float] | None], give_up: Callable[[str], None]) -> None:
        """Also watch waits that this transport does not do itself. See `Link.guard`."""
        self._link.guard.watch_too(overdue, give_up)

    def report(self, text: str) -> None:
        self._link.notes.report(text)

    def cause(self) -> str | None:
        return self._link.notes.first()

    def close(self) -> None:
        exits.unlisten(self)
        self._link.flush([job for jobs in self._sends.values() for job in jobs if not job.done], _PARTING)
        self._link.close()
        self._pending.clear()
        self._sends.clear()
        self._bounce = None


class _Move:
    """Waits for what the peers send, then puts it where it belongs.

    [Note: the last byte] Gloo cannot be asked whether a message is there. It reads a message into its place
    in order, on its own thread, so the last byte changes last: it is set to `_UNREAD` before. A message that
    ends with that byte is taken for one that has yet to come, until somebody waits for it.
    """

    __slots__ = ("_finish", "_job", "_kind", "_tails", "_transport", "ended")

    def __init__(
        self, transport: GlooTransport, kind: str, job: MessageSet, finish: Finish, tails: Tails | None = None
    ) -> None:
        self._transport, self._kind, self._job, self._tails = transport, kind, job, tails
        self._finish: Finish | None = finish
        self.ended = False

    def poll(self) -> bool:
        if self.ended or self._tails is None or any(tail.value == _UNREAD for tail in self._tails):
            return self.ended
        self.wait()
        return True

    def wait(self) -> None:
        if self.ended:
            return
        with self._transport.counters.waiting(self._kind):
            self._transport._link.wait(self._job)
        self.ended = True
        finish, self._finish = self._finish, None
        if finish is not None:
            with torch.no_grad():
                finish()


def _tails(receives: Messages) -> Tails:
    """The last byte of each message that is to come, marked: see [Note: the last byte]."""
    found = [ctypes.c_ubyte.from_address(t.data_ptr() + t.nbytes - 1) for _, t in receives]
    for tail in found:
        tail.value = _UNREAD
    return found
