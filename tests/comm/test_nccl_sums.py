"""What the transport between GPUs hands NCCL for a sum, and makes of what comes back, without NCCL."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from zeroshard.comm import nccl
from zeroshard.comm.nccl import NcclTransport

SHARDS = [[5, 5, 5], [5, 5, 2, 0], [3, 7, 7, 1], [0, 4], [6, 0, 6, 6, 0, 0, 2]]


def one_rank(rank: int, size: int) -> NcclTransport:
    """A rank's transport without a group or a GPU."""
    made: Any = NcclTransport.__new__(NcclTransport)
    made.rank, made.size, made.device = rank, size, torch.device("cpu")
    made._group, made._stages = None, {}
    return made


@pytest.mark.parametrize("shards", SHARDS, ids=str)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float64])
def test_wide_shards_are_padded_to_the_longest(
    shards: list[int], out_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, each = len(shards), max(shards)
    wires = [torch.randn(sum(shards) + 3) for _ in shards]  # wires may be longer than what is sent
    seen: list[torch.Tensor] = []

    def scatter(out: torch.Tensor, source: torch.Tensor, group: object) -> None:
        seen.append(source.view(size, each).clone())
        out.copy_(sums[:each])

    monkeypatch.setattr(nccl, "_reduce_scatter", scatter)
    for rank, wire in enumerate(wires):
        sums, out = torch.randn(each), torch.full((shards[rank],), torch.nan, dtype=out_dtype)
        one_rank(rank, size)._scatter(wire, shards, out, 0.5)
        assert torch.equal(out, (sums[: shards[rank]] * 0.5).to(out_dtype))
        for padded, part in zip(seen.pop(), wire[: sum(shards)].split(shards), strict=True):
            assert torch.equal(padded[: part.numel()], part)


@pytest.mark.parametrize("shards", SHARDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_narrow_shards_are_added_in_rank_order(
    shards: list[int], dtype: torch.dtype, out_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(shards)
    wires = [torch.randn(sum(shards) + 3).mul(100).to(dtype) for _ in shards]

    def exchange(
        into: torch.Tensor, sent: torch.Tensor, takes: list[int], offers: list[int], group: object
    ) -> None:
        assert offers == shards
        assert sent.numel() == sum(shards)
        assert takes == [shards[rank]] * size
        into.copy_(torch.cat([wire[: sum(shards)].split(shards)[rank] for wire in wires]))

    monkeypatch.setattr(dist, "all_to_all_single", exchange)
    for rank, wire in enumerate(wires):
        out = torch.full((shards[rank],), torch.nan, dtype=out_dtype)
        one_rank(rank, size)._add_here(wire, shards, out, 0.5)
        total = torch.zeros(shards[rank])
        for other in wires:
            total += other[: sum(shards)].split(shards)[rank].float()
        assert torch.equal(out, (total * 0.5).to(out_dtype))
