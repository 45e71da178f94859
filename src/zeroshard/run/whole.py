"""Whole tensors from the rows of all ranks, for reading, closing and state dicts. Not on the path of a
training step."""

from __future__ import annotations

import torch
from torch import Tensor

from zeroshard.comm import Region, Transport
from zeroshard.count.layout import Slot


@torch.no_grad()
def collect(transport: Transport, local: Tensor, slot: Slot) -> Tensor:
    """The whole tensor from every rank's rows; all ranks call it in the same order."""
    if slot.split == "copy" or transport.size == 1:
        return local.detach().clone()
    rank, size = transport.rank, transport.size
    full = torch.empty(slot.shape, dtype=local.dtype, device=local.device)
    region: Region = transport.allocate("collect", max(slot.held(rank), 1), local.dtype)
    region.mine[: local.numel()].copy_(local.reshape(-1))
    flat = full.view(-1)
    cuts = [[(0, slot.held(r))] for r in range(size)]
    out = [[flat[slot.rows(r)[0] * slot.row : slot.rows(r)[1] * slot.row]] for r in range(size)]
    transport.barrier("collect")
    transport.gather("collect", f"collect/{slot.name}", region, cuts, out).wait()
    transport.barrier("collected")
    transport.free(region)
    return full
