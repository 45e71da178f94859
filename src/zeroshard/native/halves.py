"""Split masters on a GPU; see `programs` and, for what they are, `master`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from . import programs

TILE = 4096  # as in halves_kernels


def split(master: Tensor, weight: Tensor, remainder: Tensor) -> bool:
    """As `master.split`, on the stream in force; False where it has done nothing."""
    return _start("split", master.view(torch.int32), weight.view(torch.int16), remainder)


def join(weight: Tensor, remainder: Tensor, master: Tensor) -> bool:
    """As `master.join`, on the stream in force; False where it has done nothing."""
    return _start("join", weight.view(torch.int16), remainder, master.view(torch.int32))


def _start(name: str, *given: Tensor) -> bool:
    plain = all(tensor.is_contiguous() and not tensor.is_meta for tensor in given)
    kernels = _kernels(given[0].device) if plain else None
    if kernels is None:
        return False
    whole, rest = divmod(given[0].numel(), TILE)
    programs.start(getattr(kernels, name), (*given, given[0].numel()), whole, int(rest > 0))
    return True


@functools.cache
def _kernels(device: torch.device) -> Any:
    """The kernels, tried once; None where torch has to do their work."""

    def load() -> Any:
        from . import halves_kernels

        return halves_kernels

    return programs.tried(
        load, lambda kernels: _try(kernels, device), f"split masters run in torch on {device}"
    )


def _try(kernels: Any, device: torch.device) -> None:
    master = torch.tensor([1.0, -3.1415927, 1e-40, float("inf")], device=device)
    halves = torch.empty(2, 4, dtype=torch.int16, device=device)
    again = torch.empty_like(master)
    programs.start(kernels.split, (master.view(torch.int32), *halves, 4), 0, 1)
    programs.start(kernels.join, (*halves, again.view(torch.int32), 4), 0, 1)
    if not torch.equal(again, master):
        raise RuntimeError("it computes wrong bits here")
