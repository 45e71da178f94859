"""What one gather over messages is made of, prepared once and used by every gather of the same key into the
same tensors.

- **stage**: where the peers' short segments arrive; long ones are received into their places.
- **pack**: this rank's short segments one after another, where there are several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zeroshard.count.wires import ALONE
from zeroshard.native import Moves

from .transport import Cuts, Region, Spans, slices

__all__ = ["Passage", "rooms_for"]

Out = Sequence[Sequence[torch.Tensor]]
# Memory of a name and a length that a region keeps.
Room = Callable[[str, int], torch.Tensor]


class Passage:
    """`sends`, `receives`: messages by peer. `pack` before the former, `unpack` after the latter."""

    def __init__(self, key: str, source: Region, cuts: Cuts, out: Out, rank: int, room: Room) -> None:
        self.cuts, self.out = cuts, out
        mine, width = source.mine, source.mine.element_size()
        peers = [peer for peer in range(len(cuts)) if peer != rank]
        self.totals = [sum(numel for _, numel in segments) for segments in cuts]
        self._packed: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        parts = []
        for message in _messages(cuts[rank], width):
            segments = [mine[at : at + n] for at, n in (cuts[rank][index] for index in message)]
            if len(segments) > 1:
                lengths = [segment.numel() for segment in segments]
                pack = room(f"pack {key}", sum(lengths))
                self._packed = slices(pack, lengths), segments
                segments = [pack]
            parts += segments
        self.sends = [(peer, part) for peer in peers for part in parts]
        self._targets = [target.detach().view(-1) for target in out[rank]]
        self._sources = [mine[at : at + n] for at, n in cuts[rank]] if self._targets else []
        self.receives: list[tuple[int, torch.Tensor]] = []
        self._receive(key, mine.dtype, [(p, m) for p in peers for m in _messages(cuts[p], width)], room)
        self._packing, self._unpacking = Moves(*self._packed), Moves(self._targets, self._sources)

    def _receive(
        self, key: str, dtype: torch.dtype, coming: Sequence[tuple[int, list[int]]], room: Room
    ) -> None:
        cuts, out = self.cuts, self.out
        direct = [
            len(message) == 1 and _lands_directly(out[peer][message[0]], dtype) for peer, message in coming
        ]
        lengths = [
            0 if lands else sum(cuts[peer][index][1] for index in message)
            for lands, (peer, message) in zip(direct, coming, strict=True)
        ]
        stage = slices(room(f"gather {key}", sum(lengths)), lengths)
        for (peer, message), lands, part in zip(coming, direct, stage, strict=True):
            if lands:
                self.receives.append((peer, out[peer][message[0]].detach().view(-1)))
            else:
                self.receives.append((peer, part))
                self._targets += [out[peer][index].detach().view(-1) for index in message]
                self._sources += slices(part, [cuts[peer][index][1] for index in message])

    @property
    def packs(self) -> bool:
        """Whether anything is copied before it is sent."""
        return bool(self._packed[0])

    def pack(self) -> None:
        self._packing.run(*self._packed, "neither")

    def unpack(self) -> None:
        if self._targets:
            self._unpacking.run(self._targets, self._sources, "neither")


def _messages(segments: Spans, width: int) -> list[list[int]]:
    """Which segments of a gather travel as one message, the same for sender and receiver: long ones alone, so
    that they are not copied on their way, and all short ones together."""
    sizes = [numel * width for _, numel in segments]
    long = [[index] for index, size in enumerate(sizes) if size >= ALONE]
    short = [index for index, size in enumerate(sizes) if 0 < size < ALONE]
    return [*long, short] if short else long


def rooms_for(key: str, cuts: Cuts, rank: int, width: int) -> dict[str, int]:
    """What a region keeps for gathers of `key` into host memory, in elements: one segment alone is sent from
    its place and lands in its place."""
    together = [
        sum(
            segments[index][1]
            for message in _messages(segments, width)
            if len(message) > 1
            for index in message
        )
        for segments in cuts
    ]
    return {f"pack {key}": together[rank], f"gather {key}": sum(together) - together[rank]}


def _lands_directly(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a peer's message can be received into its place."""
    return target.dtype == dtype and target.device.type == "cpu"
