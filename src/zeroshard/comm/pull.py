"""Operations of ranks that read one another's memory in place, once they have been started; see `shm`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from zeroshard.kernels import TensorCopies
from zeroshard.layout.sharding import RankLengths

from .control import Control, consumed, posted
from .transport import Counters, Cuts, TransportBuffer


class PeerReader(Protocol):
    """The transport that started these operations. `reductions` and `gathers`: those that have not ended."""

    control: Control
    counters: Counters
    reductions: list[PeerReduce]
    gathers: list[PeerGather]


class PeerReduce:
    """Waits for every peer's wire, then takes this rank's shards."""

    __slots__ = ("_done", "_key", "_kind", "_take", "_transport", "_turn", "wire")

    def __init__(
        self,
        transport: PeerReader,
        kind: str,
        key: str,
        wire: TransportBuffer,
        turn: int,
        take: Callable[[], None],
    ) -> None:
        self._transport, self._kind, self._key, self.wire, self._turn = transport, kind, key, wire, turn
        self._take = take
        self._done = False

    def poll(self) -> bool:
        control = self._transport.control
        if self._done:
            return True
        if not control.reached(posted(self.wire.lane), self._turn):
            return False
        self._done = True
        with torch.no_grad():
            self._take()
        control.publish(consumed(self.wire.lane), self._turn)
        self._transport.reductions.remove(self)
        return True

    def wait(self) -> None:
        if self.poll():
            return
        transport = self._transport
        with transport.counters.waiting(self._kind):
            word = posted(self.wire.lane)
            transport.control.wait(word, self._turn, lambda: f"its {self._kind} [{self._key}]")
        self.poll()


@dataclass
class GatherCopies:
    """The copies of one key's gathers, prepared: out of the peers' memory, into the tensors of the last
    one."""

    cuts: Cuts
    sources: list[torch.Tensor]
    moves: TensorCopies
    totals: RankLengths
    out: Sequence[Sequence[torch.Tensor]]
    targets: list[torch.Tensor]

    def run(self, out: Sequence[Sequence[torch.Tensor]]) -> None:
        moved = "neither"
        if out is not self.out:
            self.out, self.targets = out, [to for tensors in out for to in tensors]
            moved = "to"
        if self.targets:
            self.moves.run(self.targets, self.sources, moved)


class PeerGather:
    """Waits until a word of every peer says that it is ready, then copies."""

    __slots__ = ("_copies", "_done", "_key", "_kind", "_out", "_ready", "_transport")

    def __init__(
        self,
        transport: PeerReader,
        kind: str,
        key: str,
        ready: tuple[int, int],
        copies: GatherCopies,
        out: Sequence[Sequence[torch.Tensor]],
    ) -> None:
        self._transport, self._kind, self._key, self._ready = transport, kind, key, ready
        self._copies, self._out = copies, out
        self._done = False

    def poll(self) -> bool:
        if self._done:
            return True
        if not self._transport.control.reached(*self._ready):
            return False
        self._done = True
        self._copies.run(self._out)
        self._transport.gathers.remove(self)
        return True

    def wait(self) -> None:
        if self.poll():
            return
        transport = self._transport
        with transport.counters.waiting(self._kind):
            transport.control.wait(*self._ready, lambda: f"its {self._kind} [{self._key}]")
        self.poll()


def totals(cuts: Cuts) -> RankLengths:
    return RankLengths(sum(numel for _, numel in segments) for segments in cuts)
