"""Splits an fp32 master into a bf16 weight and a 16-bit remainder, 2 bytes fewer, and joins them.

The pair is one-to-one with the fp32 bit patterns, so nothing is lost, whatever the value. The weight is the
master rounded to nearest with ties *away from zero*: ties to even cannot be inverted, since weights with an
even pattern would stand for 65,537 masters each and there are only 65,536 remainders. One master in 131,072
is such a tie. Where a plain master must give the same weights as a split one, `ties="away"` in the update
rounds alike. On a GPU Triton does it (`split_master_triton`)."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Literal

import torch
from torch import Tensor

from zeroshard.errors import OptionError
from zeroshard.kernels import checks, fallback, library, triton_programs

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
        if not gpu_split(master, weight, remainder):
            fallback.split(master, weight, remainder, DEVICE_CHUNK)
        return out
    checks.flat("split", "master", master, (torch.float32,))
    checks.flat("split", "weight", weight, (torch.bfloat16,), master.numel())
    checks.flat("split", "remainder", remainder, (torch.int16,), master.numel())
    kernels = library.kernels()
    if kernels is None:
        fallback.split(master, weight, remainder)
    else:
        kernels.split(ctypes.byref(_halves(master, weight, remainder)))
    return out


def join(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 master, bit for bit, that `split` took apart; on the same device."""
    master = torch.empty_like(weight, dtype=torch.float32)
    if weight.device.type != "cpu":
        if not gpu_join(weight, remainder, master):
            fallback.join(weight, remainder, master, DEVICE_CHUNK)
        return master
    checks.flat("join", "weight", weight, (torch.bfloat16,))
    checks.flat("join", "remainder", remainder, (torch.int16,), weight.numel())
    kernels = library.kernels()
    if kernels is None:
        fallback.join(weight, remainder, master)
    else:
        kernels.join(ctypes.byref(_halves(master, weight, remainder)))
    return master


def _halves(master: torch.Tensor, weight: torch.Tensor, remainder: torch.Tensor) -> library.SplitRecord:
    return library.SplitRecord(master.numel(), master.data_ptr(), weight.data_ptr(), remainder.data_ptr())


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
        return library.SPLIT
    if weight is None:
        return library.NONE
    checks.flat(where, "weight", weight, checks.FLOATS, count)
    if ties == "away" and weight.dtype == torch.bfloat16:
        return library.BF16_AWAY
    return library.KINDS[weight.dtype]


TILE = 4096  # as in halves_kernels


def gpu_split(master: Tensor, weight: Tensor, remainder: Tensor) -> bool:
    """As `master.split`, on the stream in force; False where it has done nothing."""
    return _start("split", master.view(torch.int32), weight.view(torch.int16), remainder)


def gpu_join(weight: Tensor, remainder: Tensor, master: Tensor) -> bool:
    """As `master.join`, on the stream in force; False where it has done nothing."""
    return _start("join", weight.view(torch.int16), remainder, master.view(torch.int32))


def _start(name: str, *given: Tensor) -> bool:
    plain = all(tensor.is_contiguous() and not tensor.is_meta for tensor in given)
    kernels = _kernels(given[0].device) if plain else None
    if kernels is None:
        return False
    whole, rest = divmod(given[0].numel(), TILE)
    triton_programs.start(getattr(kernels, name), (*given, given[0].numel()), whole, int(rest > 0))
    return True


@functools.cache
def _kernels(device: torch.device) -> Any:
    """The kernels, tried once; None where torch has to do their work."""

    def load() -> Any:
        from zeroshard.kernels import split_master_triton

        return split_master_triton

    return triton_programs.tried(
        load, lambda kernels: _try(kernels, device), f"split masters run in torch on {device}"
    )


def _try(kernels: Any, device: torch.device) -> None:
    master = torch.tensor([1.0, -3.1415927, 1e-40, float("inf")], device=device)
    halves = torch.empty(2, 4, dtype=torch.int16, device=device)
    again = torch.empty_like(master)
    triton_programs.start(kernels.split, (master.view(torch.int32), *halves, 4), 0, 1)
    triton_programs.start(kernels.join, (*halves, again.view(torch.int32), 4), 0, 1)
    if not torch.equal(again, master):
        raise RuntimeError("it computes wrong bits here")
