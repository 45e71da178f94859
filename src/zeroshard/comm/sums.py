"""Adds the shards of all ranks in rank order. Every transport that adds on the host uses it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from zeroshard import kernels as native
from zeroshard.kernels import SumSpan, library
from zeroshard.kernels import sum_shards as sum_on_this_thread

# The kernel adds on the calling thread; torch spreads over its own. Chunks of 2^18 fp32 values stay in the
# cache while they are widened, added and scaled: of 2^13 to 2^24 the fastest for 2 and 4 ranks, fp32, bf16.
_CHUNK = 1 << 18
# A copy to another device costs a fixed ~10 us, so chunks that leave the host are larger.
_CHUNK_AWAY = 1 << 22

_scratch = threading.local()


def sum_shards(out: torch.Tensor, sources: Sequence[torch.Tensor], scale: float) -> None:
    """`out = scale * (((s0 + s1) + s2) + ...)`, added in fp32 (fp64 where sources are fp64), rounded once.

    All are flat and of one length; the sources on the host. `out` may be one of them, of another dtype, or on
    another device.
    """
    if out.numel() == 0:
        return
    if out.is_complex():
        out, sources = _parts(out), [_parts(source) for source in sources]
    if out.device.type == "cpu" and torch.get_num_threads() == 1:
        sum_on_this_thread(out, sources, scale)
    else:
        _sum_by_chunks(out, sources, scale)


def sum_spans(
    out: torch.Tensor, sources: Sequence[torch.Tensor], scale: float, place: int, spans: Sequence[SumSpan]
) -> None:
    """As `sum_shards`, with one source, number `place`, of which some spans lie elsewhere, in its dtype.
    Together the spans are all of `out`."""
    here = out.device.type == "cpu" and torch.get_num_threads() == 1 and not out.is_complex()
    if here and library.kernels() is not None:
        native.sum_spans(out, sources, scale, place, spans)
        return
    for start, numel, elsewhere, first in spans:
        parts = [source[start : start + numel] for source in sources]
        if elsewhere is not None:
            parts[place] = elsewhere.view(-1)[first : first + numel]
        sum_shards(out[start : start + numel], parts, scale)


def first_scale(ranks: int, width: int) -> float:
    """What the sum of a node's ranks is multiplied by before those of the nodes are added, `width` bytes a
    number: in 16 bits the sum of many could overflow before it is divided."""
    return 1.0 / ranks if width < 4 else 1.0


def _parts(flat: torch.Tensor) -> torch.Tensor:
    """Real and imaginary parts in turn, in the same memory."""
    return torch.view_as_real(flat).view(-1)


def _sum_by_chunks(out: torch.Tensor, sources: Sequence[torch.Tensor], scale: float) -> None:
    """Through an accumulator of one chunk: `out` may be any source, and no temporary is as long as it."""
    wide = torch.float64 if torch.float64 in (out.dtype, sources[0].dtype) else torch.float32
    numel = out.numel()
    chunk = min(_CHUNK * torch.get_num_threads() if out.device.type == "cpu" else _CHUNK_AWAY, numel)
    total, widened = _scratch_memory(chunk, wide)
    for start in range(0, numel, chunk):
        stop = min(start + chunk, numel)
        part, room = total[: stop - start], widened[: stop - start]
        part.copy_(sources[0][start:stop])
        for source in sources[1:]:
            shard = source[start:stop]
            part.add_(shard if shard.dtype == wide else room.copy_(shard))
        if scale != 1.0:
            part.mul_(scale)
        out[start:stop].copy_(part)


def _scratch_memory(numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Two chunks that this thread reuses; ranks may be threads."""
    held: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = _scratch.__dict__.setdefault("held", {})
    if dtype not in held or held[dtype][0].numel() < numel:
        held[dtype] = torch.empty(numel, dtype=dtype), torch.empty(numel, dtype=dtype)
    return held[dtype]
