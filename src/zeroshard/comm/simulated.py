"""One rank of a world that is not there: real memory and real computation, and what the peers would send is
this rank's own.

For torch's ``fake`` process group, which lets a thousand ranks be tried on one device. Buffers are those of
the transport between GPUs, so that a rank's memory is what it would be there; times leave communication out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from zeroshard.count.layout import Lengths

from .local import LocalTransport
from .targets import Targets, totals_of
from .transport import Cuts, Done, Land, Region, Spans, Work, slices

__all__ = ["SimulatedTransport"]


class SimulatedTransport(LocalTransport):
    """Every peer holds what this rank holds: means are its own values, gathered rows are its own repeated."""

    name = "simulated"
    overlaps = staged = keeps_order = True

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        super().__init__(device, rank, size)
        self._stages: dict[torch.dtype, torch.Tensor] = {}

    def _stage(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """As between GPUs: one for each dtype, grown to the largest."""
        held = self._stages.get(dtype)
        if held is None or held.numel() < numel:
            held = self._stages[dtype] = torch.empty(numel, dtype=dtype, device=self.device)
        return held

    @torch.no_grad()
    def reduce(
        self, kind: str, key: str, wire: Region, pieces: Sequence[int], out: torch.Tensor, scale: float
    ) -> Work:
        lengths = Lengths.of(pieces)
        each, mine, start = lengths.most, lengths[self.rank], lengths.starts[self.rank]
        piece = wire.mine[start : start + mine]
        wide = torch.float32 if piece.dtype.itemsize == 2 else piece.dtype
        if piece.dtype.itemsize == 2:
            self._stage(piece.dtype, mine * self.size)
            if out.dtype != torch.float32:
                self._stage(torch.float32, mine)
        elif not lengths.even or out.dtype != piece.dtype:
            self._stage(piece.dtype, each + (0 if lengths.even else each * self.size))
        if mine:
            out.copy_(piece.to(wide).mul_(scale * self.size))
        self._count_reduce(kind, pieces, piece.element_size())
        return Done()

    @torch.no_grad()
    def deal(
        self,
        kind: str,
        key: str,
        wire: Region,
        offers: Spans,
        takes: Spans,
        land: Land,
        varies: bool = False,
    ) -> Work:
        self._stage(torch.uint8, sum(-(-length // 16) * 16 for _, length in takes))
        at, length = offers[self.rank]
        land([wire.mine[at : at + length]] * self.size)
        self._count_deal(kind, [n for _, n in offers], [n for _, n in takes])
        return Done()

    @torch.no_grad()
    def gather(
        self, kind: str, key: str, source: Region, cuts: Cuts, out: Sequence[Sequence[torch.Tensor]]
    ) -> Work:
        totals = totals_of(cuts, out)
        mine = self._sent(source, cuts, out)
        if isinstance(out, Targets):
            pairs = [(mine[slot], to) for _, strides in out.strides for slot, to in strides]
            pairs += [(mine[slot], to.view(self.size, -1)) for slot, to in out.straight.items()]
        else:
            flat = [[tensor.view(-1) for tensor in tensors] for tensors in out if len(tensors) > 0]
            pairs = [pair for tensors in flat for pair in zip(mine, tensors, strict=True)]
        # A rank that holds fewer rows than another has not all that this one would send.
        fed = [(own[: to.shape[-1]].expand_as(to), to) for own, to in pairs if own.numel() >= to.shape[-1]]
        if fed:
            torch._foreach_copy_([to for _, to in fed], [own for own, _ in fed])
        self._count_gather(kind, totals, source.mine.element_size())
        return Done()

    def _sent(self, source: Region, cuts: Cuts, out: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """What this rank sends of each slot: as it lies there, or a copy on the stage. Between GPUs that has
        room for what all ranks send of what is not gathered straight to its place."""
        straight = out.straight if isinstance(out, Targets) else {}
        each = out.each if isinstance(out, Targets) else max(totals_of(cuts, out))
        parts = [source.mine[at : at + numel] for at, numel in cuts[self.rank]]
        staged = [slot for slot in range(len(parts)) if slot not in straight or source.state.get("host")]
        sizes = [parts[slot].numel() for slot in staged]
        past = sum(parts[slot].numel() for slot in staged if slot in straight)
        stage = self._stage(source.mine.dtype, past + each * (self.size + 1))
        packed = dict(zip(staged, slices(stage, sizes), strict=True))
        if packed:
            torch._foreach_copy_(list(packed.values()), [parts[slot] for slot in staged])
        return [packed.get(slot, part) for slot, part in enumerate(parts)]

    def sum(self, values: Sequence[float], what: str = "a small sum") -> list[float]:
        return [float(value) * self.size for value in values]

    def exchange(self, value: object, what: str = "an exchange") -> list[object]:
        return [json.loads(json.dumps(value))] * self.size

    def close(self) -> None:
        self._stages.clear()
