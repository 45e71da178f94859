"""Shards of all ranks added in their order on a GPU, by one launch; see `programs`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from zeroshard.kernels import triton_programs

TILE = 256  # as in ordered_kernels


def sum_in_order(shards: Tensor, out: Tensor, scale: float) -> bool:
    """`out = scale * (((p0 + p1) + p2) + ...)` in fp32, on the stream in force; False where it has done
    nothing. `shards`: 16-bit numbers of all ranks, each as many as `out` has, one after another."""
    plain = shards.is_contiguous() and out.is_contiguous() and out.dtype == torch.float32
    kernels = _kernels(shards.device) if plain else None
    if kernels is None:
        return False
    numel = out.numel()
    _start(kernels, shards, out, numel, shards.numel() // numel, scale)
    return True


def _start(kernels: Any, shards: Tensor, out: Tensor, numel: int, ranks: int, scale: float) -> None:
    whole, rest = divmod(numel, TILE)
    triton_programs.start(kernels.sum_in_order, (shards, out, numel, ranks, scale), whole, int(rest > 0))


@functools.cache
def _kernels(device: torch.device) -> Any:
    """The kernels, tried once; None where torch has to do their work."""

    def load() -> Any:
        from zeroshard.kernels import ordered_sum_triton

        return ordered_sum_triton

    return triton_programs.tried(
        load, lambda kernels: _try(kernels, device), f"sums of 16-bit gradients run in torch on {device}"
    )


def _try(kernels: Any, device: torch.device) -> None:
    # In another order the small ones would be lost, or be there.
    shards = torch.tensor([1.0, 2.0**30, -(2.0**30), 1.0], dtype=torch.bfloat16, device=device)
    out = torch.zeros(1, device=device)
    _start(kernels, shards, out, 1, 4, 0.5)
    if out.tolist() != [0.5]:
        raise RuntimeError("it computes wrong sums here")
