"""Implements the transport of a single rank, where nothing moves."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from .transport import Cuts, DoneWork, Land, Spans, Transport, TransportBuffer, Work, length_of, parts_of


class LocalTransport(Transport):
    """The transport of a world of one. Its transport buffers are on the device itself."""

    name = "local"

    def __init__(self, device: torch.device, rank: int = 0, size: int = 1) -> None:
        super().__init__(rank, size, device)

    def allocate(self, key: str, numel: int, dtype: torch.dtype) -> TransportBuffer:
        return TransportBuffer(key, torch.zeros(numel, dtype=dtype, device=self.device))

    def free(self, transport_buffer: TransportBuffer) -> None:
        transport_buffer.let_go()

    def fill(self, transport_buffer: TransportBuffer) -> None:
        return None

    def reduce(
        self,
        kind: str,
        key: str,
        wire: TransportBuffer,
        shards: Sequence[int],
        out: torch.Tensor,
        scale: float,
    ) -> Work:
        shard = wire.mine[: shards[0]]
        wide = torch.float64 if shard.dtype == torch.float64 else torch.float32
        if out.dtype != shard.dtype and out.dtype != wide:
            # Round once, after the scale, as the transports that add do.
            out.copy_(shard.to(wide) * scale)
            return DoneWork()
        if out.data_ptr() != shard.data_ptr():
            out.copy_(shard)
        if scale != 1.0:
            out.mul_(scale)
        return DoneWork()

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
        (part,) = parts_of(wire.mine, takes)
        land([part[: length_of(part)] if varies else part])
        return DoneWork()

    def gather(
        self, kind: str, key: str, source: TransportBuffer, cuts: Cuts, out: Sequence[Sequence[torch.Tensor]]
    ) -> Work:
        if len(out[0]) > 0:
            pairs = zip(cuts[0], out[0], strict=True)
            sources = [source.mine[at : at + numel].view(to.shape) for (at, numel), to in pairs]
            torch._foreach_copy_(list(out[0]), sources)
        return DoneWork()

    def open(self) -> None:
        return None

    def fence(self) -> None:
        return None

    def broadcast(self, key: str, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        return None

    def barrier(self, what: str) -> None:
        return None

    def compare(self, what: str, place: str) -> None:
        return None

    def max(self, values: Sequence[float], what: str = "a small max") -> list[float]:
        return [float(value) for value in values]

    def sum(self, values: Sequence[float], what: str = "a small sum") -> list[float]:
        return [float(value) for value in values]

    def exchange(self, value: object, what: str = "an exchange") -> list[object]:
        # Through JSON even here, so that a tuple comes back as a list for one rank as for many.
        return [json.loads(json.dumps(value))]

    def report(self, text: str) -> None:
        return None

    def close(self) -> None:
        return None
