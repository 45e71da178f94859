"""Split master: an fp32 master kept as the bf16 weight that computes and a 16-bit remainder, 2 bytes fewer.

The pair is one-to-one with the fp32 bit patterns, so nothing is lost, whatever the value. The weight is the
master rounded to nearest with ties *away from zero*: ties to even cannot be inverted, since weights with an
even pattern would stand for 65,537 masters each and there are only 65,536 remainders. One master in 131,072
is such a tie. Where a plain master must give the same weights as a split one, `ties="away"` in the update
rounds alike."""

from __future__ import annotations

import ctypes
from typing import Literal

import torch

from zeroshard.errors import OptionError

from . import abi, checks, fallback, halves, loader

Ties = Literal["even", "away"]
DEVICE_CHUNK = 1 << 24  # elements at a time on a device without Triton: meanwhile ten bytes for each


def split(
    master: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """An fp32 tensor on any device as (bf16 weight, int16 remainder), in `out` where that is given."""
    if out is None:
        out = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
    weight, remainder = out
    if master.device.type != "cpu":
        if not halves.split(master, weight, remainder):
            fallback.split(master, weight, remainder, DEVICE_CHUNK)
        return out
    checks.flat("split", "master", master, (torch.float32,))
    checks.flat("split", "weight", weight, (torch.bfloat16,), master.numel())
    checks.flat("split", "remainder", remainder, (torch.int16,), master.numel())
    kernels = loader.kernels()
    if kernels is None:
        fallback.split(master, weight, remainder)
    else:
        kernels.split(ctypes.byref(_halves(master, weight, remainder)))
    return out


def join(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 master, bit for bit, that `split` took apart; on the same device."""
    master = torch.empty_like(weight, dtype=torch.float32)
    if weight.device.type != "cpu":
        if not halves.join(weight, remainder, master):
            fallback.join(weight, remainder, master, DEVICE_CHUNK)
        return master
    checks.flat("join", "weight", weight, (torch.bfloat16,))
    checks.flat("join", "remainder", remainder, (torch.int16,), weight.numel())
    kernels = loader.kernels()
    if kernels is None:
        fallback.join(weight, remainder, master)
    else:
        kernels.join(ctypes.byref(_halves(master, weight, remainder)))
    return master


def _halves(master: torch.Tensor, weight: torch.Tensor, remainder: torch.Tensor) -> abi.Halves:
    return abi.Halves(master.numel(), master.data_ptr(), weight.data_ptr(), remainder.data_ptr())


def check_master(where: str, master: torch.Tensor | None, remainder: torch.Tensor | None) -> int:
    """Raise unless exactly one of the two is there and well-formed; returns the number of rows."""
    if master is not None and remainder is None:
        checks.flat(where, "master", master, (torch.float32,))
        return master.numel()
    if remainder is not None and master is None:
        checks.flat(where, "remainder", remainder, (torch.int16,))
        return remainder.numel()
    raise OptionError(f"{where}: give either `master` (fp32) or `remainder` (int16, for a split master)")


def weight_kind(where: str, weight: torch.Tensor | None, count: int, splits: bool, ties: Ties) -> int:
    """The kind under which the kernels write `weight`; raises where it does not fit the master."""
    if ties not in ("even", "away"):
        raise OptionError(f'{where}: ties={ties!r}; "even" or "away" is needed')
    if splits:
        if weight is None:
            raise OptionError(f"{where}: a split master needs its bf16 `weight`, which is half of it")
        checks.flat(where, "weight", weight, (torch.bfloat16,), count)
        return abi.SPLIT
    if weight is None:
        return abi.NONE
    checks.flat(where, "weight", weight, checks.FLOATS, count)
    if ties == "away" and weight.dtype == torch.bfloat16:
        return abi.BF16_AWAY
    return abi.KINDS[weight.dtype]
