"""Simulates the peers of one rank: memory and computation are real, and what peers would send is its own.

For torch's ``fake`` process group, which lets a thousand ranks be tried on one device. Buffers are those of
the transport between GPUs, so that a rank's memory is what it would be there; times leave communication
out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import torch

from zeroshard.layout.sharding import RankLengths
from zeroshard.layout.specs import TransportTraits

from .local import LocalTransport
from .targets import GatherTargets, totals_of
from .transport import Cuts, DoneWork, Land, Spans, TransportBuffer, Work, slices


class SimulatedTransport(LocalTransport):
    """Every peer holds what this rank holds: means are its own values, gathered rows are its own repeated."""

    name = "simulated"
    traits = TransportTraits(overlaps=True, staged=True, keeps_order=True)

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
        self,
        kind: str,
        key: str,
        wire: TransportBuffer,
        shards: Sequence[int],
        out: torch.Tensor,
        scale: float,
    ) -> Work:
        lengths = RankLengths.of(shards)
        each, mine, start = lengths.most, lengths[self.rank], lengths.starts[self.rank]
        shard = wire.mine[start : start + mine]
        wide = torch.float32 if shard.dtype.itemsize == 2 else shard.dtype
        if shard.dtype.itemsize == 2:
            self._stage(shard.dtype, mine * self.size)
            if out.dtype != torch.float32:
                self._stage(torch.float32, mine)
        elif not lengths.even or out.dtype != shard.dtype:
            self._stage(shard.dtype, each + (0 if lengths.even else each * self.size))
        if mine:
            out.copy_(shard.to(wide).mul_(scale * self.size))
        self._count_reduce(kind, shards, shard.element_size())
        return DoneWork()

    @torch.no_grad()
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
        self._stage(torch.uint8, sum(-(-n // 16) * 16 * count for (_, n), count in Counter(takes).items()))
        at, length = offers[self.rank]
        land([wire.mine[at : at + length]] * self.size)
        self._count_all_to_all(kind, [n for _, n in offers], [n for _, n in takes])
        return DoneWork()

    @torch.no_grad()
    def gather(
        self, kind: str, key: str, source: TransportBuffer, cuts: Cuts, out: Sequence[Sequence[torch.Tensor]]
    ) -> Work:
        totals = totals_of(cuts, out)
        mine = self._sent(source, cuts, out)
        if isinstance(out, GatherTargets):
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
        return DoneWork()

    def _sent(
        self, source: TransportBuffer, cuts: Cuts, out: Sequence[Sequence[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """What this rank sends of each slot: as it lies there, or a copy on the stage. Between GPUs that has
        room for what all ranks send of what is not gathered straight to its place."""
        straight = out.straight if isinstance(out, GatherTargets) else {}
        each = out.each if isinstance(out, GatherTargets) else max(totals_of(cuts, out))
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
